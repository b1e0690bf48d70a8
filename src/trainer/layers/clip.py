"""The interface of attention layers for QK-Clip."""

from typing import Any, Protocol

import jax


class Clipped(Protocol):
    """A layer whose logits QK-Clip bounds: an NNX module anywhere in a block, or an NNX or Linen block itself.

    The layer defines scaling factors for its weights, and sows a `layers.sown.MaxLogit` under the name "max_logit", for
    example the value `ops.max_logits.max_logits(query, key, mask, when=context.sampled)`. The class of a block without
    attention sets `logit_factors = None`.
    """

    heads: int  # the number of heads whose logits the layer sows

    def logit_factors(self, eta_h: jax.Array) -> dict[str, Any]:
        """Returns factors for the layer's parameters, which together multiply the logits of head h by `eta_h[h]`.

        `eta_h` is float32 [heads], at most 1. The result is a nested dict from names of the layer's parameters to
        factors. A factor applies to all parameters below its name, such as kernel and bias. The factor's axes align
        with the parameter's last axes and have the same length or length 1. This method may read only the shapes of the
        layer's arrays, which may have leading layer axes.
        """

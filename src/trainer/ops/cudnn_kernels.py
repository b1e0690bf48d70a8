"""cuDNN's attention kernels: forward, and backward from the forward kernel's residuals.

`jax.nn.dot_product_attention` calls the same kernels, but it gives their residuals no checkpoint name, so no
rematerialization policy can save the residuals. That function also always computes the gradient of the bias. This file
therefore calls JAX's private primitives directly. No other file uses them (docs/decisions/0035-cudnn-kernels.md).
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from trainer.ops.documents import packed


class Fused(NamedTuple):
    """The static parameters: see `ops.attention`."""

    scale: float
    window: int = 0


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def fused_attention(
    how: Fused,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    documents: jax.Array | None = None,
) -> jax.Array:
    """Computes attention with a causal mask by index in the row: [b, t, h, d]. Differentiable in reverse mode only.

    `bias`, bfloat16 [b, 1, t, s], is added to the scores, and gets no gradient. `documents`: int32 [b, n], see
    `ops.documents`; n > 0. With n = 1, the results of padding tokens are zero. The residuals of the backward pass are
    the result and the softmax statistics. They have the checkpoint name "context". With n documents, the statistics are
    float32 [b n, h, t], because cuDNN stores a row of statistics per document.
    """
    (out,) = _by_rows(functools.partial(_forward_kernel, how, False))(query, key, value, bias, documents)
    return out


def _forward(how: Fused, *arrays: Any) -> Any:
    left = _by_rows(functools.partial(_forward_kernel, how, True))(*arrays)
    out, statistics = (checkpoint_name(x, "context") for x in left)
    return out, (arrays, statistics, out)


def _backward(how: Fused, left: Any, gradient: jax.Array) -> Any:
    arrays, statistics, out = left
    gradients = _by_rows(functools.partial(_backward_kernel, how))(statistics, out, gradient, *arrays)
    return *gradients, *(None for _ in arrays[3:])


fused_attention.defvjp(_forward, _backward)


def _by_rows(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `kernel`, a function of arrays [b, ...], so that `jax.vmap` merges the mapped axis into b."""

    @jax.custom_batching.custom_vmap
    def call(*arrays: Any) -> Any:
        return kernel(*arrays)

    @call.def_vmap
    def mapped(size: int, is_mapped: Any, *arrays: Any) -> Any:
        def rows(x: jax.Array, has_axis: bool) -> jax.Array:
            return (x if has_axis else jnp.broadcast_to(x, (size, *x.shape))).reshape(-1, *x.shape[1 + has_axis :])

        out = call(*jax.tree.map(rows, arrays, tuple(is_mapped)))
        out = jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), out)
        return out, jax.tree.map(lambda _: True, out)

    return call


def _forward_kernel(
    how: Fused, training: bool, query: jax.Array, key: jax.Array, value: jax.Array, *masks: jax.Array | None
) -> list[jax.Array]:
    operands, parameters = _call(how, query, key, *masks)
    return _jaxs()._dot_product_attention_fwd_p.bind(query, key, value, *operands, **parameters, is_training=training)


def _backward_kernel(
    how: Fused,
    statistics: jax.Array,
    out: jax.Array,
    gradient: jax.Array,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *masks: jax.Array | None,
) -> list[jax.Array]:
    operands, parameters = _call(how, query, key, *masks)
    arrays = query, key, value, *operands, statistics, out, gradient
    return _jaxs()._dot_product_attention_bwd_p.bind(*arrays, **parameters)


def _call(
    how: Fused, query: jax.Array, key: jax.Array, bias: jax.Array | None, documents: jax.Array | None
) -> tuple[list[jax.Array], dict[str, Any]]:
    """Returns the operands and the parameters that the forward and the backward primitive have in common."""
    jaxs = _jaxs()
    absent = jnp.zeros(0, jnp.bfloat16)
    parameters = {
        "scale": how.scale,
        "seed": 0,
        "dropout_rate": 0.0,
        "variadic_args": (bias is not None, False),  # whether there is a bias, and whether to compute its gradient
        "mask_type": jaxs.MaskType.CAUSAL if documents is None else jaxs.MaskType.PADDING_CAUSAL,
        "layout": jaxs.AttentionLayout.BTNH.value,
        "sliding_window_length": how.window or None,
    }
    if "score_mod_jaxpr" in inspect.signature(jaxs._dot_product_attention_fwd_cuda_lowering).parameters:
        parameters |= {"score_mod_name": None, "score_mod_jaxpr": None}
    lengths, offsets = absent, [absent, absent]
    if documents is not None and documents.shape[1] == 1:
        lengths = documents[:, 0]
    elif documents is not None:
        sizes, starts = packed(documents, query.shape[1])
        lengths, starts = sizes.reshape(documents.shape), starts.reshape(len(documents), -1)
        # Offsets are counted in entries, not in tokens. They are computed here, because JAX 0.10 would use the number
        # of query heads for the keys' offsets, too.
        offsets = [starts * (x.shape[2] * x.shape[3]) for x in (query, key)]
    # The operands after the bias are the lengths of queries and keys, their offsets, and two page tables.
    return [absent if bias is None else bias, lengths, lengths, *offsets, absent, absent], parameters


def _jaxs() -> Any:
    # Imported late, because only runs on GPUs need this module.
    from jax._src.cudnn import fused_attention_stablehlo

    return fused_attention_stablehlo

"""Facts about EXAONE 4.0 for the configuration check, which reports mistakes in keys before JAX is imported."""

from trainer.config.capabilities.windows import ALTERNATING
from trainer.config.family import Facts
from trainer.config.tensors import TENSORS, renamed

_NORM = {"pre_self_attention_layer_norm/scale": "post_self_attention_layer_norm/scale"}


def _gated(config):
    """Returns an error message if the MLP has no gate, otherwise None."""
    return None if len(config.mlp_activations) == 2 else "the MLP of this family is gated: give two activations"


FACTS = Facts(
    "docs.guides.exaone4.family:FAMILY",
    reads=("sliding_window_pattern",),
    fixes={"use_qk_norm": True, **ALTERNATING},
    period=4,
    checks=((("decoder_block", "mlp_activations"), _gated),),
    tensors=lambda config: renamed(TENSORS, _NORM),
)

"""What the first stage asks about EXAONE 4.0. Without JAX, so that mistakes in its keys are found before JAX loads."""

from trainer.config.capabilities.windows import ALTERNATING
from trainer.config.family import Facts
from trainer.config.tensors import TENSORS, renamed

_NORM = {"pre_self_attention_layer_norm/scale": "post_self_attention_layer_norm/scale"}


def _gated(config):
    """Returns what is wrong with these keys, or None."""
    return None if len(config.mlp_activations) == 2 else "the MLP of this family is gated: give two activations"


FACTS = Facts(
    "docs.guides.exaone4.family:FAMILY",
    reads=("sliding_window_pattern",),
    fixes={"use_qk_norm": True, **ALTERNATING},
    period=4,
    checks=((("decoder_block", "mlp_activations"), _gated),),
    tensors=lambda config: renamed(TENSORS, _NORM),
)

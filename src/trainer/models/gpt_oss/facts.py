"""The properties of gpt-oss that the configuration stage needs (`config.family.Facts`)."""

from trainer.config.capabilities.windows import ALTERNATING
from trainer.config.family import Axes, Facts
from trainer.config.keys import Config
from trainer.config.tensors import TENSORS, of_blocks, renamed

ATTENTION = "GptOssAttention"  # MaxText's name of the attention layer; the layer's parameter names begin with it
_NAMES = {name: name.replace("self_attention/", f"{ATTENTION}/") for name in TENSORS}


def _tensors(config: Config) -> dict[str, Axes]:
    return renamed(of_blocks(config), _NAMES)


def _limit(config: Config) -> str | None:
    return (
        None
        if config.mlp_activations_limit > 0
        else "this family clamps its gated units: set a positive limit (published models: 7)"
    )


FACTS = Facts(
    "trainer.models.gpt_oss.family:FAMILY",
    reads=("num_experts", "attention_bias", "mlp_activations_limit", "sliding_window_pattern"),
    fixes={**ALTERNATING, "interleave_moe_layer_step": 1},
    ignores={"has a gated unit of its own": ("mlp_activations",)},
    sinks=True,
    period=2,
    maxtext_words={"attention_sink=true": "", "mlp_bias=true": "", "routed_bias=true": ""},
    checks=((("decoder_block", "mlp_activations_limit"), _limit),),
    tensors=_tensors,
)

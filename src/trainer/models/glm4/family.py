"""GLM 4 (GLM team 2024, arXiv:2406.12793): Llama's block with biases of queries, keys and values. RoPE rotates adjacent
pairs in the first half of each head. Models since April 2025 also have norms after attention and MLP."""

from trainer.config.keys import Config
from trainer.layers.stack import Stack
from trainer.models.family import Family
from trainer.models.flops import forward_flops_per_token
from trainer.models.gemma2.family import POST_NORMS
from trainer.models.gguf import Gguf
from trainer.models.huggingface import HuggingFace, Layout
from trainer.models.llama2.block import OuterNorms
from trainer.models.llama2.family import LAYOUTS
from trainer.models.phi3.family import GATE_UP, no_tokens
from trainer.models.qwen2 import family as qwen2


class Block(OuterNorms, qwen2.Block):
    """Computes y = x + norm(attention(norm(x))) and returns dropout(y + norm(mlp(norm(y)))). The keys
    `use_post_attn_norm` and `use_post_ffw_norm` enable the outer norms; `attention_bias` enables the biases."""


def stacks(config: Config) -> list[Stack]:
    """Returns one stack of equal blocks."""
    return [Stack("layers", (Block,), config.base_num_decoder_layers)]


# Hugging Face stores each head as the adjacent pairs that RoPE rotates, so its entries are not reordered.
_SHARED = {name: layout._replace(rotated="") for name, layout in (LAYOUTS | qwen2.BIASES).items()}
_OUTER = {
    "decoder/layers/post_self_attention_norm/scale": Layout("model.layers.{}.post_self_attn_layernorm.weight"),
    "decoder/layers/post_ffw_norm/scale": Layout("model.layers.{}.post_mlp_layernorm.weight"),
}
_HUGGING_FACE = HuggingFace(
    "glm4",
    "Glm4ForCausalLM",
    _SHARED | _OUTER,
    defaults={
        **{"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1.5625e-7, "partial_rotary_factor": 0.5},
        "attention_bias": True,
    },
    merged=(GATE_UP,),
    partial=True,
    sizes={"attention_bias": "attention_bias"},
    implies=dict.fromkeys(POST_NORMS, True),
    write=no_tokens,
    gguf=Gguf("glm4"),
)
FAMILY = Family(
    stacks,
    forward_flops_per_token,
    hugging_face=[
        _HUGGING_FACE,
        _HUGGING_FACE._replace(
            model_type="glm",
            architecture="GlmForCausalLM",
            layouts=_SHARED,
            implies=dict.fromkeys(POST_NORMS, False),
            gguf=Gguf("chatglm"),
        ),
    ],
)

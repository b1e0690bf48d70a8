"""Qwen2 and Qwen2.5 (Qwen team 2024, arXiv:2407.10671, arXiv:2412.15115): Llama's block with biases of queries,
keys and values."""

from collections.abc import Mapping
from typing import Any

from flax import nnx

from trainer.config.keys import Config
from trainer.layers.stack import Stack
from trainer.models.family import Family, MaxText
from trainer.models.flops import forward_flops_per_token
from trainer.models.gguf import Gguf
from trainer.models.huggingface import HuggingFace, Layout
from trainer.models.llama2 import block as llama2
from trainer.models.llama2.family import LAYOUTS

BIASED = ("query", "key", "value")


class Block(llama2.Block):
    """Llama's block. With `attention_bias`, queries, keys and values have a bias."""

    def make_attention(self, config: Config, rngs: nnx.Rngs, dtypes: Mapping[str, Any], **given: Any) -> Any:
        return super().make_attention(config, rngs, dtypes, bias=BIASED if config.attention_bias else (), **given)


def stacks(config: Config) -> list[Stack]:
    """Returns one stack of equal blocks."""
    return [Stack("layers", (Block,), config.base_num_decoder_layers)]


_OURS, _THEIRS = "decoder/layers/self_attention/", "model.layers.{}.self_attn."
BIASES = {
    f"{_OURS}query/bias": Layout(_THEIRS + "q_proj.bias", flat=True, rotated="head_dim"),
    f"{_OURS}key/bias": Layout(_THEIRS + "k_proj.bias", flat=True, rotated="head_dim"),
    f"{_OURS}value/bias": Layout(_THEIRS + "v_proj.bias", flat=True),
}
FAMILY = Family(
    stacks,
    forward_flops_per_token,
    hugging_face=[
        HuggingFace(
            "qwen2",
            "Qwen2ForCausalLM",
            LAYOUTS | BIASES,
            defaults={"num_key_value_heads": 32, "sliding_window": 4096},
            window="switched",
            implies={"attention_bias": True},
            off=("use_mrope",),
            gguf=Gguf("qwen2"),
            # Two fields of CodeQwen1.5, and a field for texts of more than 262,144 tokens. transformers ignores all.
            ignored=("seq_length", "rotary_emb_base", "dual_chunk_attention_config"),
        )
    ],
    maxtext=MaxText(norms_heads=True, keys=("attention_bias",)),
)

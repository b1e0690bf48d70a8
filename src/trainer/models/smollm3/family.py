"""SmolLM3 (Hugging Face 2025): Llama's block, but every fourth layer has no RoPE (arXiv:2501.18795)."""

from collections.abc import Mapping
from typing import Any

from flax import nnx

from trainer.config.keys import Config
from trainer.layers.stack import Stack
from trainer.models.family import Family
from trainer.models.flops import forward_flops_per_token
from trainer.models.gguf import Gguf
from trainer.models.huggingface import HuggingFace
from trainer.models.llama2 import block as llama2
from trainer.models.llama2.family import LAYOUTS
from trainer.models.patterns import read_unrotated, repeated, rotated


class Unrotated(llama2.Block):
    """Llama's block without RoPE."""

    def make_attention(self, config: Config, rngs: nnx.Rngs, dtypes: Mapping[str, Any], **given: Any) -> Any:
        return super().make_attention(config, rngs, dtypes, **{**given, "rope": None})


def stacks(config: Config) -> list[Stack]:
    """Returns the stacks, in which every `nope_layer_interval`-th layer has no RoPE; -1: all layers have RoPE."""
    every = config.nope_layer_interval
    blocks = [llama2.Block] if every == -1 else [*[llama2.Block] * (every - 1), Unrotated]
    return repeated(blocks, config.base_num_decoder_layers)


def _write(config: Config) -> dict[str, Any]:
    every, layers = config.nope_layer_interval, config.base_num_decoder_layers
    interval = {} if every == -1 else {"no_rope_layer_interval": every}
    # These fields are null: if they were missing, transformers would use the published vocabulary's special tokens.
    tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    return {"no_rope_layers": rotated(every, layers), **interval, **tokens}


FAMILY = Family(
    stacks,
    forward_flops_per_token,
    hugging_face=[
        HuggingFace(
            "smollm3",
            "SmolLM3ForCausalLM",
            LAYOUTS,
            defaults={
                **{"num_key_value_heads": 4, "rope_theta": 2_000_000, "tie_word_embeddings": True},
                **{"no_rope_layer_interval": 4},
            },
            only={"use_sliding_window": False},
            fields=("no_rope_layers", "no_rope_layer_interval"),
            ignored=("sliding_window", "max_window_layers"),  # no effect without use_sliding_window
            read=read_unrotated,
            write=_write,
            gguf=Gguf("smollm3", pairs=True, fields=lambda said: {"no_rope_layer_interval": 4}),
        )
    ],
)

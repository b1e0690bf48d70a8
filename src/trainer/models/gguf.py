"""How a family's models stand in llama.cpp's GGUF files, where they differ from a folder of Hugging Face.

The declaration of each family is in the family's file. They were checked against llama.cpp of cyllama 0.2.18, whose
logits of a small model of each are those of this trainer.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

# The fields of all architectures: the end of the key, and the field of config.json.
SIZES = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
}
NUMBERS = {"attention.layer_norm_rms_epsilon": "rms_norm_eps", "rope.freq_base": "rope_theta"}
COUNT = "expert_count"


class Gguf(NamedTuple):
    """The architecture of a family in llama.cpp.

    Attributes:
      name: in general.architecture. Of several declarations with a name, a file is read as the first that has experts
        or has none, as the file does.
      pairs: whether each head of queries and keys is stored as adjacent pairs, not as two halves.
      one: whether norms are stored with 1 added.
      sizes, numbers: the end of the key of each integer and number, and its field of config.json.
      fields: further fields of config.json, given those that were read; llama.cpp has them in its code.
    """

    name: str
    pairs: bool = False
    one: bool = False
    sizes: Mapping[str, str] = SIZES
    numbers: Mapping[str, str] = NUMBERS
    fields: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda said: {}


def scaled_queries(said: Mapping[str, Any], largest: int) -> int:
    """Returns query_pre_attn_scalar, which llama.cpp derives: the size of a head, but in the model of `largest` layers
    its width over its heads."""
    width = said.get("hidden_size", 0) // (said.get("num_attention_heads") or 1)
    return width if said.get("num_hidden_layers") == largest else said.get("head_dim", width)

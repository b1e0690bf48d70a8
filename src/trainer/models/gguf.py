"""How a family's models stand in llama.cpp's GGUF files, where they differ from a folder of Hugging Face.

The declaration of each family is in the family's file. They were checked against llama.cpp of cyllama 0.2.18, whose
logits of a small model of each are those of this trainer.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from trainer.models.huggingface import Layout

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
EPSILON = "attention.layer_norm_rms_epsilon"
NUMBERS = {EPSILON: "rms_norm_eps", "rope.freq_base": "rope_theta"}
COUNT, USED, WINDOW = "expert_count", "expert_used_count", "attention.sliding_window"
ATTENTION = "rope.scaling.attn_factor"  # by which RoPE scales queries and keys
LOG = "rope.scaling.yarn_log_multiplier"  # a tenth of mscale_all_dim


class Gguf(NamedTuple):
    """The architecture of a family in llama.cpp.

    Attributes:
      name: in general.architecture.
      when: whether a file with this name is read so, given a function that returns the value with the end of a key: an
        integer, or of the type that is its second argument.
      pairs: whether each head of queries and keys is stored as adjacent pairs, not as two halves.
      one: whether norms are stored with 1 added.
      layouts: those of parameters that stand in other tensors than in a folder, with names of Hugging Face that the
        package gguf knows. One with `EXPERT` means the tensor of all experts of a layer.
      sizes, numbers: the end of the key of each integer and number, and its field of config.json.
      needs: keys without which llama.cpp does not read a file, besides `EPSILON` and `USED`.
      more: the types of the values at further keys.
      fields: further fields of config.json, given those that were read, also rope_scaling, and the values of `more` by
        their keys.
      write: returns values at keys of `more` and others, given config.json as this trainer writes it.
      refuses: returns why llama.cpp computes another function, given the same; "" if it does not.
      note: how llama.cpp computes every file of the architecture differently; "" if it does not.
    """

    name: str
    when: Callable[[Callable[..., Any]], bool] = lambda said: not said(COUNT)
    pairs: bool = False
    one: bool = False
    layouts: Mapping[str, "Layout"] = {}
    sizes: Mapping[str, str] = SIZES
    numbers: Mapping[str, str] = NUMBERS
    needs: Sequence[str] = ()
    more: Mapping[str, type] = {}
    fields: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda said: {}
    write: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda data: {}
    refuses: Callable[[Mapping[str, Any]], str] = lambda data: ""
    note: str = ""


def scaled_queries(said: Mapping[str, Any], largest: int) -> int:
    """Returns query_pre_attn_scalar, which llama.cpp derives: the size of a head, but in the model of `largest` layers
    its width over its heads."""
    width = said.get("hidden_size", 0) // (said.get("num_attention_heads") or 1)
    return width if said.get("num_hidden_layers") == largest else said.get("head_dim", width)

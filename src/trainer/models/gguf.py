"""The type that declares how a family's llama.cpp GGUF files differ from its Hugging Face folders.

Each family's module contains its declaration. All declarations were checked against the llama.cpp of cyllama 0.2.18:
for a small model of each family, llama.cpp's logits agree with this trainer's logits.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from trainer.models.huggingface import Layout

# `SIZES` and `NUMBERS` contain the fields that all architectures share. They map a GGUF key, without the prefix that
# names the architecture, to a field of config.json.
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
ATTENTION = "rope.scaling.attn_factor"  # the factor by which RoPE scales queries and keys
LOG = "rope.scaling.yarn_log_multiplier"  # a tenth of mscale_all_dim in config.json


class Gguf(NamedTuple):
    """A family's architecture in llama.cpp.

    Attributes:
      name: the value of general.architecture.
      when: returns whether this declaration applies to a file with this architecture name. Its argument is a function
        for reading the file: given the end of a key and the value's type (by default int), this function returns the
        key's value, or None if the file lacks the key.
      pairs: whether each head of queries and keys is stored as adjacent pairs, not as two halves.
      one: whether the scales of norms are stored with 1 added.
      layouts: the layouts of parameters whose GGUF tensors differ from the tensors in a Hugging Face folder. The
        layouts use Hugging Face names that the package gguf can translate to GGUF names. A name with `EXPERT` denotes
        one tensor of all experts of a layer.
      sizes, numbers: map the end of a key to a field of config.json: `sizes` for integers, `numbers` for other numbers.
      needs: the ends of keys that llama.cpp requires in addition to `EPSILON` and `USED`.
      more: maps the ends of further keys to the types of their values.
      fields: returns further fields of config.json, by name. Its argument is a mapping that contains the fields read
        so far, including rope_scaling, and the values of the keys in `more`.
      write: given the config.json that this trainer writes, returns the values of the GGUF keys in `more`, and of any
        other GGUF keys whose value it overrides.
      refuses: returns why llama.cpp's output would differ from this trainer's, given the config.json that this trainer
        writes; "" if it would not.
      note: how llama.cpp's computation differs from this trainer's for every file of the architecture.
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
    """Returns query_pre_attn_scalar as llama.cpp derives it: the width divided by the number of heads for the family's
    largest model, which has `largest` layers, and head_dim for other models."""
    width = said.get("hidden_size", 0) // (said.get("num_attention_heads") or 1)
    return width if said.get("num_hidden_layers") == largest else said.get("head_dim", width)

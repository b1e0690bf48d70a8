"""The architectures of llama.cpp that families of this package have, and how their fields and tensors differ from those
in a folder of Hugging Face.

Checked against llama.cpp of cyllama 0.2.18, whose logits of a small model of each are those of this trainer.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from trainer.config.errors import UserError, shortened
from trainer.config.words import visible

# The fields of all architectures: the end of the key, and the field of config.json.
_SIZES = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
}
_NUMBERS = {"attention.layer_norm_rms_epsilon": "rms_norm_eps", "rope.freq_base": "rope_theta"}
_EXPERTS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}


class Architecture(NamedTuple):
    """An architecture.

    Attributes:
      name: in general.architecture.
      model_type: in config.json; the family is the one that declares it.
      also: other model types that are written as this architecture.
      pairs: whether each head of queries and keys is stored as adjacent pairs, not as two halves.
      one: whether norms are stored with 1 added.
      sizes, numbers: the end of the key of each integer and number, and its field of config.json.
      fields: further fields of config.json, given those that were read; llama.cpp has them in its code.
    """

    name: str
    model_type: str
    also: tuple[str, ...] = ()
    pairs: bool = False
    one: bool = False
    sizes: Mapping[str, str] = _SIZES
    numbers: Mapping[str, str] = _NUMBERS
    fields: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda said: {}


def _gemma(largest: int, more: Mapping[str, Any] = {}) -> Callable[[Mapping[str, Any]], Mapping[str, Any]]:
    """`largest`: the number of layers of the model whose scores are scaled by its width over its heads."""

    def fields(said: Mapping[str, Any]) -> Mapping[str, Any]:
        heads = said.get("num_attention_heads") or 1
        width = said.get("hidden_size", 0) // heads
        scale = width if said.get("num_hidden_layers") == largest else said.get("head_dim", width)
        return {"query_pre_attn_scalar": scale, "hidden_activation": "gelu_pytorch_tanh", **more}

    return fields


_WINDOW = {"attention.sliding_window": "sliding_window"}
_CAPS = {"attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"}
_MIXTRAL = _SIZES | {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
_FEED_FORWARD = {"expert_feed_forward_length": "moe_intermediate_size"}
_ROUTED = {"decoder_sparse_step": 1, "norm_topk_prob": True}
_NO_ROPE = {"no_rope_layer_interval": 4}
_GEMMA3 = {"sliding_window_pattern": 6, "rope_local_base_freq": 10000.0}
_ALL = (
    Architecture("llama", "llama", ("mistral",), pairs=True),
    Architecture("llama", "mixtral", pairs=True, sizes=_MIXTRAL, fields=lambda said: {"sliding_window": None}),
    Architecture("qwen2", "qwen2"),
    Architecture("qwen3", "qwen3"),
    Architecture("qwen3moe", "qwen3_moe", sizes=_SIZES | _EXPERTS | _FEED_FORWARD, fields=lambda said: _ROUTED),
    Architecture("gemma", "gemma", one=True),
    Architecture("gemma2", "gemma2", one=True, sizes=_SIZES | _WINDOW, numbers=_NUMBERS | _CAPS, fields=_gemma(46)),
    Architecture(
        "gemma3",
        "gemma3_text",
        one=True,
        sizes=_SIZES | _WINDOW,
        numbers=_NUMBERS | {"final_logit_softcapping": "final_logit_softcapping"},
        fields=_gemma(62, _GEMMA3),
    ),
    Architecture("olmo2", "olmo2"),
    Architecture("smollm3", "smollm3", pairs=True, fields=lambda said: _NO_ROPE),
)


def read_as(name: str, where: str, *, experts: bool) -> Architecture:
    """Returns the architecture called `name`.

    Args:
      experts: whether the file says how many experts it has.

    Raises:
      UserError: it is not known.
    """
    found = [it for it in _ALL if it.name == name]
    if not found:
        known = ", ".join(dict.fromkeys(it.name for it in _ALL))
        raise UserError(
            f"{where}: general.architecture={shortened(visible(name))} is not read (known: {known}); a folder of "
            "Hugging Face with this model may be"
        )
    return found[-1] if experts else found[0]


def written_as(model_type: str) -> Architecture:
    """Returns the architecture as which models of `model_type` are written.

    Raises:
      UserError: there is none.
    """
    for it in _ALL:
        if model_type in (it.model_type, *it.also):
            return it
    known = ", ".join(model_type for it in _ALL for model_type in (it.model_type, *it.also))
    raise UserError(f"format=gguf: models of the type {model_type} are not written (known: {known})")

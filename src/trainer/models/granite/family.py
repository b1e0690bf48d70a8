"""Granite 3 (IBM 2024, Granite 3.0 Language Models): Llama's block with constant factors, as in
muP (arXiv:2203.03466), on token embeddings, on attention and MLP outputs, on attention scores and on logits."""

from collections.abc import Mapping
from typing import Any

from trainer.models.family import Family
from trainer.models.flops import forward_flops_per_token
from trainer.models.gguf import NUMBERS, Gguf
from trainer.models.huggingface import HuggingFace
from trainer.models.llama2.family import LAYOUTS, stacks

# In config.json, logits_scaling divides the logits, but attention_multiplier multiplies the scores.
FACTORS = {name: name for name in ("embedding_multiplier", "residual_multiplier")}
POWERS = {
    "logits_multiplier": ("logits_scaling", -1.0),
    "query_pre_attn_scalar": ("attention_multiplier", -2.0),
}
# transformers uses 1 for each absent factor, even for attention_multiplier, where one would expect 1 / sqrt(head_dim).
DEFAULTS = dict.fromkeys((*FACTORS, "attention_multiplier"), 1.0)
_SCALES = {
    **{"embedding_scale": "embedding_multiplier", "residual_scale": "residual_multiplier"},
    **{"attention.scale": "attention_multiplier", "logit_scale": "logits_scaling"},
}
_ROTATES = "rope.scaling.finetuned"  # for this architecture, the key determines whether llama.cpp applies RoPE


def _fields(said: Mapping[str, Any]) -> dict[str, Any]:
    """See `Gguf.fields`. Without attention_multiplier, llama.cpp uses 1 / sqrt(head_dim)."""
    scale = {} if "attention_multiplier" in said else {"attention_multiplier": max(said["head_dim"], 1) ** -0.5}
    # position_embedding_type="nope" means that the model has no RoPE. The reader of config.json refuses this value.
    return scale | ({} if said.get(_ROTATES, True) else {"position_embedding_type": "nope"})


GGUF = Gguf("granite", pairs=True, numbers=NUMBERS | _SCALES, more={_ROTATES: bool}, fields=_fields)
FAMILY = Family(
    stacks,
    forward_flops_per_token,
    hugging_face=[
        HuggingFace(
            "granite",
            "GraniteForCausalLM",
            LAYOUTS,
            defaults=DEFAULTS,
            sizes=FACTORS,
            powers=POWERS,
            gguf=GGUF,
        )
    ],
)

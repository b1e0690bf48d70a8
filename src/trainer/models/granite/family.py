"""Granite 3 (IBM 2024, Granite 3.0 Language Models): Llama's block. Embedded tokens, what each layer adds to the
residual stream, scores and logits have factors of their own, as in muP (arXiv:2203.03466)."""

from collections.abc import Mapping
from typing import Any

from trainer.models.family import Family
from trainer.models.flops import forward_flops_per_token
from trainer.models.gguf import NUMBERS, Gguf
from trainer.models.huggingface import HuggingFace
from trainer.models.llama2.family import LAYOUTS, stacks

# config.json has the divisor of the logits, and the factor on scores itself.
FACTORS = {name: name for name in ("embedding_multiplier", "residual_multiplier")}
POWERS = {
    "logits_multiplier": ("logits_scaling", -1.0),
    "query_pre_attn_scalar": ("attention_multiplier", -2.0),
}
# transformers takes 1 for each factor that is absent; that on scores is then not of the size of a head.
DEFAULTS = dict.fromkeys((*FACTORS, "attention_multiplier"), 1.0)
_SCALES = {
    **{"embedding_scale": "embedding_multiplier", "residual_scale": "residual_multiplier"},
    **{"attention.scale": "attention_multiplier", "logit_scale": "logits_scaling"},
}
_ROTATES = "rope.scaling.finetuned"  # the switch of RoPE in llama.cpp


def _fields(said: Mapping[str, Any]) -> dict[str, Any]:
    """Without a factor on scores, llama.cpp takes that of the size of a head."""
    scale = {} if "attention_multiplier" in said else {"attention_multiplier": max(said["head_dim"], 1) ** -0.5}
    return scale | ({} if said.get(_ROTATES, True) else {"position_embedding_type": "nope"})  # which is refused


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

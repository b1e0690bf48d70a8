"""The properties of Gemma that the configuration stage needs (`config.family.Facts`)."""

from collections.abc import Mapping
from typing import Any

from trainer.config.family import Axes, Facts
from trainer.config.tensors import TENSORS, renamed

_NORM = {"pre_self_attention_layer_norm/scale": "pre_self_attention_norm/scale"}
# Gemma multiplies embeddings by sqrt(width), but does not divide the logits of a tied head by it.
FIXES = {"normalize_embedding_logits": False}


def tensors(config: Mapping[str, Any]) -> dict[str, Axes]:
    """See `Facts.tensors`. Returns Llama's tensors under this family's names."""
    del config
    return renamed(TENSORS, _NORM)


FACTS = Facts("trainer.models.gemma.family:FAMILY", fixes=FIXES, tensors=tensors)

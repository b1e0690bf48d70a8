"""`Facts` of Gemma, for the configuration stage."""

from collections.abc import Mapping
from typing import Any

from trainer.config.family import Axes, Facts
from trainer.config.tensors import TENSORS, renamed

_NORM = {"pre_self_attention_layer_norm/scale": "pre_self_attention_norm/scale"}
# Embeddings are scaled; the logits of a tied head are not.
FIXES = {"normalize_embedding_logits": False}


def tensors(config: Mapping[str, Any]) -> dict[str, Axes]:
    """Returns Llama's tensors under the names of this family."""
    del config
    return renamed(TENSORS, _NORM)


FACTS = Facts("trainer.models.gemma.family:FAMILY", fixes=FIXES, tensors=tensors)

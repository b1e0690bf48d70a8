"""The properties of OLMo 2 that the configuration stage needs (`config.family.Facts`)."""

from collections.abc import Mapping
from typing import Any

from trainer.config.family import Axes, Facts
from trainer.config.tensors import TENSORS, renamed

_NAMES = {name: name.replace("self_attention/", "attention/") for name in TENSORS if "self_attention/" in name}
_NAMES |= {"pre_self_attention_layer_norm/scale": "post_self_attention_layer_norm/scale"}


def tensors(config: Mapping[str, Any]) -> dict[str, Axes]:
    """See `Facts.tensors`. Returns Llama's tensors under this family's names."""
    del config
    return renamed(TENSORS, _NAMES)


FACTS = Facts("trainer.models.olmo2.family:FAMILY", tensors=tensors)

"""What the first stage asks about OLMo 2."""

from collections.abc import Mapping
from typing import Any

from trainer.config.family import Axes, Facts
from trainer.config.tensors import TENSORS


def tensors(config: Mapping[str, Any]) -> dict[str, Axes]:
    """Llama's tensors, under the names of this family."""
    del config
    names = {"self_attention/": "attention/", "pre_self_attention_layer_norm/": "post_self_attention_layer_norm/"}
    renamed = dict(TENSORS)
    for old, new in names.items():
        renamed = {f"{new}{name.removeprefix(old)}" if name.startswith(old) else name: it for name, it in renamed.items()}
    return renamed


FACTS = Facts("trainer.models.olmo2.family:FAMILY", tensors=tensors)

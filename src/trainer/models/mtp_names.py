"""Parameter names of multi-token prediction: the module of each parameter, and its Hugging Face tensor.

The layout follows DeepSeek-V3's published weights: the modules follow the L layers, module k as layer L + k - 1.
"""

import re
from collections.abc import Mapping
from typing import Any

from trainer.config.effects import no_effect_of
from trainer.config.errors import UserError
from trainer.config.keys import Config
from trainer.models.families import family, hugging_face, in_stack, stacks
from trainer.models.huggingface import HuggingFace, Layout
from trainer.models.mtp import (
    BLOCK,
    EMBEDDING_NORM,
    FINAL_NORM,
    HIDDEN_NORM,
    MTP,
    PROJECTION,
    depths,
    last_block,
    part_path,
)
from trainer.models.patterns import LAYERS, REMAINDER

MODULES = "mtp_num_layers"  # the configuration key
_MODULE = re.compile(rf"(?:.*/)?{MTP}/mtp_layer_([0-9]+)/")
_PARTS = {
    f"{EMBEDDING_NORM}/scale": Layout("enorm.weight"),
    f"{HIDDEN_NORM}/scale": Layout("hnorm.weight"),
    f"{PROJECTION}/kernel": Layout("eh_proj.weight", inputs=1),
    f"{FINAL_NORM}/scale": Layout("shared_head.norm.weight"),
}
# Published weights repeat the model's embedding table and output head in each module.
_COPIES = {"embed_tokens.weight": "token_embedder/embedding", "shared_head.head.weight": "decoder/logits_dense/kernel"}
# The names of all module tensors in Hugging Face, with {} for the number of the layer.
MODULE_TENSORS = tuple(f"model.layers.{{}}.{name}" for name in (*(it.name for it in _PARTS.values()), *_COPIES))


def module_of(name: str) -> int:
    """Returns the number of the module that contains the canonical parameter `name`; 0 for parameters of the model."""
    found = _MODULE.match(name)
    return int(found[1]) if found else 0


def decoder_name(config: Config, name: str) -> str:
    """Returns the last layer's parameter that corresponds to `name` in a module's block; elsewhere, `name` itself."""
    own = f"{part_path(module_of(name), BLOCK)}/"
    return f"decoder/{last_block(config)[0]}/{name.removeprefix(own)}" if name.startswith(own) else name


def is_final_norm(name: str) -> bool:
    """Returns whether the canonical parameter `name` belongs to the final norm of a module."""
    return name.startswith(f"{part_path(module_of(name), FINAL_NORM)}/")


def hugging_face_layouts(config: Config, declared: HuggingFace | None = None) -> Mapping[str, Layout]:
    """Returns the layouts of `declared` (by default, of the family of `config`), and of the modules of `config`."""
    layouts = dict((declared or hugging_face(config)).layouts)
    for stack in stacks(config):
        # Each block of a pattern has the layouts of the stack, unless the family declares layouts for the block.
        above = f"decoder/{LAYERS if stack.name == REMAINDER else stack.name}/"
        each = {name.removeprefix(above): it for name, it in layouts.items() if name.startswith(above)}
        layouts = {f"decoder/{path}/{name}": it for path in stack.paths for name, it in each.items()} | layouts
    below = f"decoder/{last_block(config)[0]}/"
    block = {name.removeprefix(below): it for name, it in layouts.items() if name.startswith(below)}
    for k in depths(config):
        place = _layer(config, k)
        layouts |= {part_path(k, part): it._replace(name=place + it.name) for part, it in _PARTS.items()}
        number = config.base_num_decoder_layers + k - 1
        own = part_path(k, BLOCK)
        layouts |= {f"{own}/{part}": it._replace(name=it.name.format(number)) for part, it in block.items()}
    return layouts


def rotated_heads(
    config: Config, shapes: Mapping[str, tuple[int, ...]], why: str, decoder_block: str = ""
) -> dict[str, int]:
    """Returns the parameters of `shapes` whose entries RoPE rotates, with the number of entries in a head.

    Args:
      why: the reason why entries must be reordered, for messages.
      decoder_block: the family whose layouts are used, by default the family of `config`.

    Raises:
      UserError: the family has no layouts, or none for a parameter in a block, such as an adapter.
    """
    if no_effect_of(config, "rope_interleave"):
        return {}
    block = decoder_block or config.decoder_block
    layouts = hugging_face_layouts(config, hugging_face(config, block)) if family(block).hugging_face else {}
    if unknown := [name for name in shapes if name not in layouts and (in_stack(name) or module_of(name))]:
        raise UserError(
            f"{why}: decoder_block={block} declares no Layouts of {len(unknown)} parameters, so whether to reorder "
            f"them is unknown: {', '.join(unknown[:3])}{', ...' if unknown[3:] else ''}"
        )
    heads = {name: layouts[name].head(config, shape) for name, shape in shapes.items() if name in layouts}
    return {name: head for name, head in heads.items() if head}


def hugging_face_modules(layers: int, tensors: Mapping[str, Any]) -> int:
    """Returns the number of modules among the tensors of a model with `layers` layers."""
    count = 0
    while f"model.layers.{layers + count}.eh_proj.weight" in tensors:
        count += 1
    return count


def hugging_face_copies(config: Config) -> dict[str, str]:
    """Returns the modules' tensors that may repeat a tensor of the model, each with the canonical name of the repeated
    parameter."""
    copies = {_layer(config, k) + name: of for k in depths(config) for name, of in _COPIES.items()}
    table = _COPIES["embed_tokens.weight"]
    return dict.fromkeys(copies, table) if config.logits_via_embedding else copies


def in_other_module(config: Config, tensor: str, modules: int) -> bool:
    """Returns whether a tensor belongs to one of a checkpoint's `modules` modules that `config` does not have."""
    own = config.mtp_num_layers
    return any(tensor.startswith(_layer(config, k)) for k in range(own + 1, modules + 1))


def _layer(config: Config, k: int) -> str:
    return f"model.layers.{config.base_num_decoder_layers + k - 1}."

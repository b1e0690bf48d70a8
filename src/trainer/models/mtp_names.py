"""Maps multi-token prediction parameters to their modules and to tensors in Hugging Face checkpoints.

In DeepSeek-V3's published weights, module k of a model with L layers is stored as layer L + k - 1. The type
`models.huggingface.Modules` declares the tensors' names.
"""

import re
from collections.abc import Mapping

from trainer.config.capabilities.recurrent_keys import recurrent_modules
from trainer.config.effects import no_effect_of
from trainer.config.errors import UserError
from trainer.config.keys import Config
from trainer.models.families import family, hugging_face, in_stack, stacks
from trainer.models.huggingface import LAYER, HuggingFace, Layout, Modules
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

MODULES = "mtp_num_layers"  # the configuration key for the number of modules
_MODULE = re.compile(rf"(?:.*/)?{MTP}/mtp_layer_([0-9]+)/")
# The parameters that correspond to `Modules.names`, in the same order.
_PARTS = (f"{EMBEDDING_NORM}/scale", f"{HIDDEN_NORM}/scale", f"{PROJECTION}/kernel", f"{FINAL_NORM}/scale")
# Published weights repeat the model's embedding table and output head in each module.
_COPIES = {"embed_tokens.weight": "token_embedder/embedding", "shared_head.head.weight": "decoder/logits_dense/kernel"}
# The tensors that a module has in addition to its block, in DeepSeek-V3's layout. {} is the number of the layer.
MODULE_TENSORS = tuple(f"{LAYER}{name}" for name in (*(f"{it}.weight" for it in Modules().names), *_COPIES))


def module_of(name: str) -> int:
    """Returns the number of the module that contains the canonical parameter `name`; 0 for parameters of the model."""
    found = _MODULE.match(name)
    return int(found[1]) if found else 0


def decoder_name(config: Config, name: str) -> str:
    """Returns the name of the last layer's parameter that corresponds to `name`, a parameter in a module's block. Other
    names are returned unchanged."""
    own = f"{part_path(module_of(name), BLOCK)}/"
    return f"decoder/{last_block(config)[0]}/{name.removeprefix(own)}" if name.startswith(own) else name


def is_final_norm(name: str) -> bool:
    """Returns whether the canonical parameter `name` belongs to the final norm of a module."""
    return name.startswith(f"{part_path(module_of(name), FINAL_NORM)}/")


def hugging_face_layouts(config: Config, declared: HuggingFace | None = None) -> Mapping[str, Layout]:
    """Returns the layouts of the model's and the modules' parameters, by canonical name. `declared`: the declaration
    with the model's layouts, by default that of `config`'s family."""
    hf = declared or hugging_face(config)
    layouts, modules = dict(hf.layouts), hf.mtp
    for stack in stacks(config):
        # A stack may repeat several blocks. Each has the stack's layouts unless the family declares its own.
        above = f"decoder/{LAYERS if stack.name == REMAINDER else stack.name}/"
        each = {name.removeprefix(above): it for name, it in layouts.items() if name.startswith(above)}
        layouts = {f"decoder/{path}/{name}": it for path in stack.paths for name, it in each.items()} | layouts
    below = f"decoder/{last_block(config)[0]}/"
    block = {name.removeprefix(below): it for name, it in layouts.items() if name.startswith(below)}
    for k in depths(config):
        number = config.base_num_decoder_layers + k - 1
        for part, name in zip(_PARTS, modules.names, strict=True):
            tensor = f"{modules.above}{name}.weight".format(number)
            layouts[part_path(k, part)] = Layout(tensor, inputs=int(part.startswith(PROJECTION)))
        for part, it in block.items():
            tensor = it.name.replace(LAYER, modules.block).format(number)
            layouts[f"{part_path(k, BLOCK)}/{part}"] = it._replace(name=tensor)
    return layouts


def rotated_heads(
    config: Config, shapes: Mapping[str, tuple[int, ...]], why: str, decoder_block: str = ""
) -> dict[str, int]:
    """Returns, for each parameter in `shapes` whose entries RoPE rotates, the number of entries in a head.

    Args:
      why: the reason for reordering entries, for error messages.
      decoder_block: the family whose layouts are used, by default the family of `config`.

    Raises:
      UserError: the family declares no layouts, or no layout for a parameter in a block, such as an adapter.
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


def module_problem(config: Config, modules: Modules) -> str:
    """Returns why Hugging Face's format cannot represent the modules of `config`; "" if it can."""
    if config.mtp_num_layers > modules.most:
        return f"mtp_num_layers={config.mtp_num_layers}: the format has at most {modules.most}"
    if recurrent_modules(config):
        return (
            f"mtp_num_layers={config.mtp_num_layers}: the module's block is like the last layer, which is recurrent; "
            "the format requires attention"
        )
    return ""


def hugging_face_copies(config: Config) -> dict[str, str]:
    """Returns the tensors of modules that may repeat a tensor of the model: a dict from the tensor's name to the
    canonical name of the repeated parameter."""
    copies = {_layer(config, k) + name: of for k in depths(config) for name, of in _COPIES.items()}
    table = _COPIES["embed_tokens.weight"]
    return dict.fromkeys(copies, table) if config.logits_via_embedding else copies


def in_other_module(config: Config, how: Modules, tensor: str, modules: int) -> bool:
    """Returns whether `tensor` belongs to a module that the model of `config` lacks.

    `modules`: the number of modules in the checkpoint.
    """
    first, own = config.base_num_decoder_layers - 1, config.mtp_num_layers
    return any(tensor.startswith(how.above.format(first + k)) for k in range(own + 1, modules + 1))


def _layer(config: Config, k: int) -> str:
    return LAYER.format(config.base_num_decoder_layers + k - 1)

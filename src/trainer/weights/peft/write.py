"""Writes folders of Hugging Face's PEFT: adapter_config.json and adapter_model.safetensors."""

import functools
import itertools
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from trainer.backends.registry import make_model
from trainer.config.errors import UserError
from trainer.config.keys import Config
from trainer.leaves.source import Leaf, Tick, joined, names_of, progress
from trainer.models.huggingface import EXPERT
from trainer.weights.huggingface.read import head_to_reorder, tensors_of
from trainer.weights.huggingface.safetensors_file import SafetensorsFile
from trainer.weights.huggingface.weight_files import PEFT_WEIGHTS
from trainer.weights.params.write import target_dtypes
from trainer.weights.peft.adapter_config import CONFIG, config_fields
from trainer.weights.peft.merged_modules import with_whole_modules
from trainer.weights.peft.read import TABLE
from trainer.weights.peft.tensor_names import A, Tables

_ABOVE, _HEAD, _ROUTER = "base_model.model.", "lm_head.weight", "/gate/kernel"


def write_peft(
    folder: Path,
    config: Config,
    leaves: Mapping[str, Leaf],
    *,
    base: str,
    rank: int,
    alpha: float,
    dtype: str | None = None,
) -> None:
    """Writes adapters, and other parameters as modules_to_save, into `folder`, which must exist.

    A layer in which a and b are zero gets no adapter in the file. In a module with an adapter, a trained matrix or bias
    is written to base_layer, as peft writes heads and biases.

    Args:
      config: resolved.
      leaves: both halves (a and b) of each adapter, and the other trained parameters, by canonical name.
      base: the name or path of the adapted model, for base_model_name_or_path.
      rank, alpha: the product of an adapter is (alpha / rank) a b.
      dtype: see `write_huggingface`.

    Raises:
      UserError: lists the parameters that PEFT cannot store; or the error of `target_dtypes`.
    """
    tables = Tables(config)
    leaves, times = with_whole_modules(config, tables, leaves)
    leaves = _with_whole_experts(tables, leaves)
    members = _members(config, tables)
    saved = _saved(tables, members, leaves)
    dtypes = target_dtypes(leaves, dtype)
    kept = _layers_with(tables, leaves)
    names = {name: _tensors(tables, name, leaf, kept) for name, leaf in leaves.items()}
    targets = {it.removesuffix(A) for each in names.values() for it, _ in each if it.endswith(A)}
    for name, each in names.items():
        names[name] = [(tables.in_memory(_wrapped(tensor, targets)), shape) for tensor, shape in each]
    shapes = {tensor: (shape, dtypes[name]) for name, each in names.items() for tensor, shape in each}
    tied = config.logits_via_embedding and TABLE in leaves
    modules = {_module(tensor) for name in saved for tensor, _ in names[name]}
    if tied:
        shapes[_HEAD] = shapes[names[TABLE][0][0]]
        modules.add(_module(_HEAD))
    fields = config_fields(base, rank, alpha, *_ends_of(tables, members, targets, modules), tied)
    if times:
        fields["rank_pattern"] = {name: rank * count for name, count in times.items()}
        fields["alpha_pattern"] = {name: fields["lora_alpha"] * count for name, count in times.items()}
    if any(tensor.endswith(".bias") for name in leaves.keys() - saved for tensor, _ in names[name]):
        fields["bias"] = "all"
    (folder / CONFIG).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    above = {_ABOVE + tensor: it for tensor, it in sorted(shapes.items())}
    with SafetensorsFile(folder / PEFT_WEIGHTS, above) as file, progress(leaves.values(), "writing") as tick:
        for name, leaf in leaves.items():
            layout, turned = tables.layouts[name], head_to_reorder(config, tables.layouts[name], leaf.shape)
            for (tensor, _), value in zip(names[name], _values(tables, name, leaf, kept, tick), strict=True):
                array = layout.to_theirs(value, turned).astype(dtypes[name], copy=False)
                for target in (tensor, _HEAD) if tied and name == TABLE else (tensor,):
                    file.write(_ABOVE + target, array)


def _members(config: Config, tables: Tables) -> dict[str, set[str]]:
    """Returns a dict from the name of each module, with {} in place of the layer number, to the canonical names of its
    parameters."""
    members = dict[str, set[str]]()
    for path in names_of(joined(*make_model(config).abstract)):
        for name in itertools.accumulate(path.split("/"), "{}/{}".format):  # a quantized kernel has parts
            if name in tables.base:
                members.setdefault(_module(tables.base[name].name), set()).add(name)
    return members


def _saved(tables: Tables, members: Mapping[str, set[str]], leaves: Mapping[str, Leaf]) -> set[str]:
    """Returns the parameters for modules_to_save: those of modules that are fully trained and have no adapter.

    Raises:
      UserError: lists the parameters that PEFT cannot store. Outside of modules_to_save, PEFT can store
        parameters of a module with an adapter, and biases.
    """
    saved, problems = set[str](), []
    for name in leaves:
        if name not in tables.layouts:
            problems.append(f"{name}: the family declares no tensor for it")
        elif layout := tables.base.get(name):
            module = members[_module(layout.name)]
            adapted = any(it in tables.adapters and tables.adapters[it][0] in leaves for it in module)
            if layout.of_experts:
                problems.append(f"{name}: the matrices of experts are not modules")
            elif not adapted and module <= leaves.keys():
                saved.add(name)
            elif not adapted and not layout.name.endswith(".bias"):
                problems.append(f"{name}: it is trained without {', '.join(sorted(module - leaves.keys()))}")
    if problems:
        raise UserError("\n  ".join(["PEFT cannot store:", *problems]))
    return saved


def _wrapped(tensor: str, targets: Collection[str]) -> str:
    """Returns the name of a base tensor in the file. `targets`: the modules with an adapter."""
    module, _, last = tensor.rpartition(".")
    return f"{module}.base_layer.{last}" if module in targets else tensor


def _with_whole_experts(tables: Tables, leaves: Mapping[str, Leaf]) -> Mapping[str, Leaf]:
    """Returns `leaves` with adapters whose values are 0 added to experts of which gate or up has an adapter, but not
    all of gate, up and down. With transformers 5, peft 0.21 reads adapters of these experts only if all three matrices
    have one."""
    more = dict[str, Leaf]()
    for name, layout in tables.base.items():
        layer, _, last = name.rpartition("/")
        siblings = [tables.adapters.get(f"{layer}/{part}", ("", "")) for part in ("wi_0", "wi_1")]
        like = next(([leaves[half] for half in pair] for pair in siblings if pair[0] in leaves), None)
        if layout.of_experts and last in ("wi_0", "wi_1", "wo") and like and tables.adapters[name][0] not in leaves:
            (*lead, embed, rank), width = like[0].shape, like[1].shape[-1]
            into, out = (width, embed) if last == "wo" else (embed, width)
            for half, shape in zip(tables.adapters[name], ((*lead, into, rank), (*lead, rank, out)), strict=True):
                more[half] = Leaf(shape, like[0].dtype, [functools.partial(np.zeros, shape, like[0].dtype)])
    return {**leaves, **more}


def _layers_with(tables: Tables, leaves: Mapping[str, Leaf]) -> dict[str, list[bool]]:
    """Returns a dict from the name of each half (a or b) of an adapter to a list with, for each layer, whether the half
    is written. Returns {} if all adapters are zero, in which case all halves are written. In each layer, the adapters
    of either all or none of the experts' matrices are written."""
    kept, groups = dict[str, list[bool]](), dict[str, list[str]]()
    for name, pair in tables.adapters.items():
        if pair[0] in leaves:
            halves = [_layers(tables, half, leaves[half], lambda size: None) for half in pair]
            kept[name] = [bool(a.any() or b.any()) for a, b in zip(*halves, strict=True)]
            groups.setdefault(name.rpartition("/")[0] if tables.base[name].of_experts else name, []).append(name)
    for group in groups.values():
        trained = [any(layer) for layer in zip(*(kept[name] for name in group), strict=True)]
        kept |= dict.fromkeys(group, trained)
    if not any(map(any, kept.values())):
        return {}  # nothing is trained yet
    return {half: layers for name, layers in kept.items() for half in tables.adapters[name]}


def _layers(tables: Tables, name: str, leaf: Leaf, tick: Tick) -> Iterator[np.ndarray]:
    return iter([leaf.read(leaf.dtype, tick)]) if tables.place(name) is None else leaf.layers(tick)


def _tensors(
    tables: Tables, name: str, leaf: Leaf, kept: Mapping[str, Sequence[bool]]
) -> list[tuple[str, tuple[int, ...]]]:
    """Returns the names and the shapes of the tensors to write for a parameter."""
    tensors = tensors_of(tables.layouts[name], tables.place(name), leaf.shape)
    count = len(tensors) // len(kept[name]) if name in kept else 1
    return [it for i, it in enumerate(tensors) if name not in kept or kept[name][i // count]]


def _values(
    tables: Tables, name: str, leaf: Leaf, kept: Mapping[str, Sequence[bool]], tick: Tick
) -> Iterator[np.ndarray]:
    """Yields the values of the tensors that `_tensors` returns, in the same order."""
    for i, layer in enumerate(_layers(tables, name, leaf, tick)):
        if name not in kept or kept[name][i]:
            yield from layer if tables.layouts[name].of_experts else [layer]


def _ends_of(
    tables: Tables, members: Mapping[str, set[str]], targets: set[str], saved: set[str]
) -> tuple[list[str], list[str], list[str]]:
    """Returns target_modules, target_parameters and modules_to_save: short, unambiguous suffixes of names.

    peft compares a target with complete components at the end of a module's name, but a module to save with any suffix.
    If experts have gate_proj, peft 0.21 applies every target of this name to experts, so the matrices of other modules
    with this name are listed in target_parameters. The matrices of routers are listed there, too, because routers are
    not plain linear modules in transformers 5. Routers with the name gate are an exception, because peft knows them.
    """
    every, experts, routers = set[str](), set[str](), set[str]()
    for name in itertools.chain(*members.values()):
        for tensor in tables.layers(tables.base[name], name):
            if name.endswith(_ROUTER) and not _module(tensor).endswith(".gate"):
                routers.add(_module(tensor))
            if tables.base[name].of_experts:
                experts |= {_module(tensor).replace(EXPERT, str(e)) for e in range(tables.experts)}
            else:
                every.add(_module(tensor))
    words = {module.rpartition(".")[2] for module in experts}
    by_parameter = {it for it in targets - experts if it in routers or it.rpartition(".")[2] in words}
    every |= experts

    def ends(chosen: set[str]) -> list[str]:
        taken = {end for module in every - chosen for end in _ends(module)}
        return sorted({next(end for end in _ends(module) if end not in taken) for module in chosen})

    others = {_module(tables.in_memory(f"{module}.weight")) for module in every} - saved
    kept = {next(end for end in _ends(module) if not any(it.endswith(end) for it in others)) for module in saved}
    return ends(targets - by_parameter), [f"{end}.weight" for end in ends(by_parameter)], sorted(kept)


def _ends(module: str) -> list[str]:
    words = module.split(".")
    return [".".join(words[first:]) for first in range(len(words) - 1, -1, -1)]


def _module(tensor: str) -> str:
    return tensor.rpartition(".")[0]

"""Adapters of modules that merge several parameters (`models.huggingface.Merged`), in files of Hugging Face's PEFT.

In this trainer, every parameter has a separate adapter: in PEFT's axis order, a_i [r, in] and b_i [out_i, r]. The
adapter of a module that merges k parameters has one of two forms:

- if all a_i are equal, a is that matrix, and b stacks b_1, b_2, ... along outputs. peft trains this form, with rank r;
- otherwise, a [k r, in] stacks a_1, a_2, ..., and b [out, k r] has b_i in the columns that belong to a_i and zeros
  elsewhere.
  The product is the same as with separate adapters. Rank and alpha are k times the rank and alpha of other adapters
  (`rank_pattern`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainer.backends.registry import make_model
from trainer.config.errors import UserError, shortened
from trainer.config.keys import Config
from trainer.leaves.source import Leaf, names_of, whole
from trainer.models.huggingface import Layout, Merged
from trainer.weights.huggingface.merged import whole_of
from trainer.weights.huggingface.read import head_to_reorder
from trainer.weights.huggingface.safetensors_file import TensorPart
from trainer.weights.peft.tensor_names import A, B, Made, Named, Tables, below


@dataclass(frozen=True)
class MergedModule:
    """The parameters that a module merges.

    Attributes:
      name: the name of the merged tensor, with {} for the layer number.
      how: the declaration of the merge.
      parts: the canonical names of the parameters.
      sizes: the number of outputs of each parameter.
    """

    name: str
    how: Merged
    parts: tuple[str, ...]
    sizes: tuple[int, ...]

    def cut(self, i: int) -> np.ndarray:
        """Returns the indices of part i's outputs."""
        return self.how.cut(self.sizes, i)


def merged_modules(config: Config, tables: Tables) -> list[MergedModule]:
    """Returns the modules of `config` that merge several parameters."""
    found = dict[str, dict[int, str]]()
    hows = dict[str, Merged]()
    for name, layout in tables.base.items():
        if part := whole_of(layout.name, tables.merged):
            found.setdefault(part.name, {})[part.part] = name
            hows[part.name] = part.how
    if not found:
        return []
    floats = Config({**config, "enable_lora": False, "checkpoint_is_quantized": False})
    shapes = {name: leaf.shape for name, leaf in names_of(make_model(floats).abstract[0]).items()}
    modules = []
    for key, numbered in found.items():
        names = tuple(numbered[i] for i in sorted(numbered))
        if all(name in shapes for name in names):
            layers = [shapes[name][1:] if tables.place(name) else shapes[name] for name in names]
            sizes = tuple(tables.base[name].shape(it)[0] for name, it in zip(names, layers, strict=True))
            modules.append(MergedModule(key, hows[key], names, sizes))
    return modules


def unmerged(config: Config, tables: Tables, found: Mapping[str, Named], rank: int) -> dict[str, Named]:
    """Returns a file's tensors, with each tensor of a merged module replaced by one tensor for each of its parts.

    Args:
      found: the file's tensors, by their names without prefixes (`below`).
      rank: the rank of the adapters of modules that are not merged.

    Raises:
      UserError: the file has separate tensors for a part of a merged module.
    """
    result = dict(found)
    for module in merged_modules(config, tables):
        for tensors in zip(*(tables.layers(tables.base[name], name) for name in module.parts), strict=True):
            merged = whole_of(tensors[0], tables.merged)
            assert merged is not None
            _divide(module, below(merged.name), [below(tensor) for tensor in tensors], result, rank)
    return result


def _divide(module: MergedModule, name: str, parts: Sequence[str], result: dict[str, Named], rank: int) -> None:
    """Replaces the tensors of a merged module in `result` by separate tensors for each part of the module. Tensors with
    unexpected shapes are kept.

    Raises:
      UserError: a part has separate tensors.
    """
    above, stems = name.removesuffix(".weight"), [part.removesuffix(".weight") for part in parts]
    for key in [*parts, *(stem + half for stem in stems for half in (A, B))]:
        if key in result:
            raise UserError(f"{shortened(result[key].name)}: {above} of this model merges this module with others")
    own = result.get(name)
    if own is not None and own.tensor.shape[:1] == (sum(module.sizes),):
        del result[name]
        result |= {part: own._replace(tensor=TensorPart(own.tensor, 0, module.cut(i))) for i, part in enumerate(parts)}
    a, b = result.get(above + A), result.get(above + B)
    if a is None or b is None or len(a.tensor.shape) != 2 or b.tensor.shape != (sum(module.sizes), a.tensor.shape[0]):
        return
    alone = a.tensor.shape[0] == len(parts) * rank
    if not alone and a.tensor.shape[0] != rank:
        return
    del result[above + A], result[above + B]
    for i, stem in enumerate(stems):
        own_a, rows = a.tensor, TensorPart(b.tensor, 0, module.cut(i))
        own_b: TensorPart | Made = rows
        if alone:
            columns = np.arange(i * rank, (i + 1) * rank)
            own_a = TensorPart(a.tensor, 0, columns)
            own_b = Made((module.sizes[i], rank), b.tensor.dtype, _columns(b.name, rows, columns))
        result |= {stem + A: Named(a.name, own_a), stem + B: Named(b.name, own_b)}


def _columns(name: str, rows: TensorPart, columns: np.ndarray) -> Callable[[], np.ndarray]:
    def read() -> np.ndarray:
        values = rows.read(whole(rows.shape))
        if np.delete(values, columns, axis=1).any():
            raise UserError(
                f"{shortened(name)}: an adapter of a higher rank than the others, of a module that merges "
                "parameters: here every parameter has an adapter of the same rank"
            )
        return np.ascontiguousarray(values[:, columns])

    return read


def with_whole_modules(
    config: Config, tables: Tables, leaves: Mapping[str, Leaf]
) -> tuple[dict[str, Leaf], dict[str, int]]:
    """Returns a pair: `leaves`, in which merged modules replace their parts, and a dict from the end of a merged
    module's name to the rank of its adapter divided by the rank of other adapters. The dict is {} if all ranks are
    equal. Changes `tables` to match the new leaves.

    Raises:
      UserError: some parameters of a module are trained, and others are not.
    """
    result, times = dict(leaves), dict[str, int]()
    modules = merged_modules(config, tables)
    pairs = {module: [tables.adapters.get(name, ("", "")) for name in module.parts] for module in modules}
    shared = all(_is_shared(config, tables, [leaves[a] for a, _ in each if a in leaves]) for each in pairs.values())
    for module, each in pairs.items():
        first = module.parts[0]
        trained = [name for name in module.parts if name in leaves]
        if lacking := [name for name in module.parts if name not in leaves] if trained else []:
            raise UserError(f"PEFT cannot store:\n  {trained[0]}: it is trained without {', '.join(lacking)}")
        if trained:
            values = [_theirs(config, tables, name, result.pop(name)) for name in module.parts]
            result[first] = _leaf([module.how.joined(layer) for layer in zip(*values, strict=True)], tables, first)
        if any(a in leaves for a, _ in each):
            a, b = _adapter(config, tables, module, each, result, shared)
            result |= {each[0][0]: _leaf(a, tables, first), each[0][1]: _leaf(b, tables, first)}
            times |= {} if shared else {module.how.name: len(each)}
        for name, pair in zip(module.parts, each, strict=True):
            del tables.base[name]
            tables.adapters.pop(name, None)
            for it in (name, *pair):
                tables.layouts.pop(it, None)
        tables.base[first] = tables.layouts[first] = Layout(module.name)
        if each[0][0]:
            above = module.name.removesuffix(".weight")
            tables.adapters[first] = each[0]
            tables.layouts |= {each[0][0]: Layout(above + A), each[0][1]: Layout(above + B)}
    return result, times


def _theirs(config: Config, tables: Tables, name: str, leaf: Leaf) -> list[np.ndarray]:
    """Returns the tensors of a parameter in PEFT's form, one per layer."""
    layout, place = tables.layouts[name], tables.place(name)
    head = head_to_reorder(config, layout, leaf.shape)
    layers = leaf.layers(lambda size: None) if place else [leaf.read(leaf.dtype, lambda size: None)]
    return [layout.to_theirs(layer, head) for layer in layers]


def _leaf(layers: Sequence[np.ndarray], tables: Tables, name: str) -> Leaf:
    """Returns a leaf of the parameter `name` that consists of the tensors `layers`, one per layer."""
    stacked = (len(layers),) if tables.place(name) else ()
    return Leaf((*stacked, *layers[0].shape), layers[0].dtype, [lambda it=it: it for it in layers])  # type: ignore[misc]


def _is_shared(config: Config, tables: Tables, leaves: Sequence[Leaf]) -> bool:
    first, *others = [leaf.read(leaf.dtype, lambda size: None) for leaf in leaves] or [np.zeros(0)]
    return all(np.array_equal(first, other) for other in others)


def _adapter(
    config: Config,
    tables: Tables,
    module: MergedModule,
    pairs: Sequence[tuple[str, str]],
    leaves: dict[str, Leaf],
    shared: bool,
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Returns a pair of lists, with a and b of a merged module in each layer. Removes the parts' adapters from
    `leaves`."""
    found: list[Any] = [
        tuple(_theirs(config, tables, name, leaves.pop(name)) for name in pair) if pair[0] in leaves else None
        for pair in pairs
    ]
    (like_a, like_b), count = next(it for it in found if it), len(found)
    rank = like_a[0].shape[0]
    how, of_a, of_b = module.how._replace(axis=0), list[np.ndarray](), list[np.ndarray]()
    for layer in range(len(like_a)):
        a = [it[0][layer] if it else np.zeros_like(like_a[layer]) for it in found]
        b = [
            it[1][layer] if it else np.zeros((size, rank), like_b[layer].dtype)
            for it, size in zip(found, module.sizes, strict=True)
        ]
        if shared:
            of_a.append(like_a[layer])
            of_b.append(how.joined(b))
            continue
        of_a.append(np.concatenate(a))
        of_b.append(how.joined([np.pad(it, [(0, 0), (i * rank, (count - i - 1) * rank)]) for i, it in enumerate(b)]))
    return of_a, of_b

"""Relates the tensors in files of Hugging Face's PEFT to the base model's tensors.

r is the rank, e the number of experts. An adapter has the tensors MODULE.lora_A.weight [r, in] and MODULE.lora_B.weight
[out, r]; the adapted matrix is MODULE.weight of the base.
"""

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from trainer.config.errors import UserError, shortened
from trainer.config.keys import Config
from trainer.leaves.source import Box, whole
from trainer.models.adapters import adapter_names
from trainer.models.families import Place, hugging_face, place, stacks
from trainer.models.huggingface import EXPERT, Layout
from trainer.models.mtp_names import hugging_face_layouts
from trainer.weights.huggingface.read import tensors_of
from trainer.weights.huggingface.safetensors_file import StoredTensor

# Prefixes of a base tensor's name: from peft, multimodal models and torch's wrappers. "model." is a prefix, too,
# because a base without a head lacks it.
_ABOVE = re.compile(r"^(?:(?:base_model|model|module|language_model|_orig_mod)\.)+")
_ADAPTER = re.compile(r"(.+\.lora_[AB])(?:\.[^.]+)?\.weight")  # in memory, peft inserts the adapter's name
_WRAPPED = re.compile(r"\.(?:base_layer|modules_to_save(?:\.default)?)(?=\.)")
_BASE = ".original_module."  # in the name of the original copy of a trained parameter
_EXPERT_NUMBER = re.compile(r"\.\d+\.(?=[^.]+\.(?:lora_[AB]\.)?\w+$)")
A, B = ".lora_A.weight", ".lora_B.weight"


class Named(NamedTuple):
    """A tensor of a file."""

    name: str  # in the file
    tensor: Any  # has the interface `huggingface.read.Values`


@dataclass(frozen=True)
class Made:
    """Values that are computed from a file's values, with the interface `huggingface.read.Values`."""

    shape: tuple[int, ...]
    dtype: np.dtype
    make: Callable[[], np.ndarray]

    def read(self, box: Box) -> np.ndarray:
        return self.make()[box]


def below(name: str) -> str:
    """Returns the name of a tensor without prefixes (`_ABOVE`)."""
    return _ABOVE.sub("", name)


def by_base_name(tensors: Mapping[str, StoredTensor], where: str) -> dict[str, Named]:
    """Returns the tensors of a file by their names without prefixes (`below`).

    Raises:
      UserError: two tensors have the same name, for example tensors of two adapters.
    """
    found = dict[str, Named]()
    for name, tensor in tensors.items():
        if _BASE in name:
            continue
        adapter = _ADAPTER.fullmatch(below(name))
        key = f"{adapter[1]}.weight" if adapter else _WRAPPED.sub("", below(name))
        if key in found:
            raise UserError(f"{where}: {shortened(name)} and {shortened(found[key].name)} are the same parameter")
        found[key] = Named(name, tensor)
    return found


class Tables:
    """The layouts of a model's parameters, and of the possible adapters of its matrices.

    Attributes:
      layouts: layouts by canonical name.
      base: the layouts of parameters other than adapters.
      adapters: the names of a and b, by the canonical name of the matrix.
      experts: the number of experts.
      merged: see `HuggingFace.merged`. `layouts` names the parts of a merged tensor as separate tensors.
    """

    def __init__(self, config: Config):
        self._config, self._stacks = config, stacks(config)
        self.base = dict(hugging_face_layouts(config))
        self.layouts = dict(self.base)
        self.adapters = {name: adapter_names(name) for name, layout in self.base.items() if layout.inputs}
        for name, names in self.adapters.items():
            self.layouts |= dict(zip(names, self.base[name].of_adapter(), strict=True))
        self.experts = config.num_experts
        self._words = hugging_face(config).modules
        self.merged = hugging_face(config).merged

    def place(self, name: str) -> Place | None:
        """Returns the location of a canonical parameter in the stacks."""
        return place(self._stacks, name)

    def layers(self, layout: Layout, name: str) -> list[str]:
        """Returns the layout's tensor names, one for each layer of the canonical parameter `name`. They may contain
        `EXPERT`."""
        where = self.place(name)
        return [layout.name] if where is None else [layout.name.format(i) for i in where.layers]

    def tensors(self, name: str, shape: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
        """Returns the names, without prefixes (`below`), and the shapes of the tensors of a canonical parameter."""
        found = tensors_of(self.layouts[name], self.place(name), shape)
        return [(below(tensor), its) for tensor, its in found]

    def owner(self, key: str) -> str | None:
        """Returns the name of the canonical parameter to which the tensor `key` belongs (a name without prefixes, see
        `below`); None if it belongs to no parameter."""
        return self._owners.get(key) or self._owners.get(_EXPERT_NUMBER.sub(f".{EXPERT}.", key))

    @functools.cached_property
    def _owners(self) -> dict[str, str]:
        return {below(tensor): name for name, layout in self.layouts.items() for tensor in self.layers(layout, name)}

    def renamed(self, found: Mapping[str, Named]) -> dict[str, Named]:
        """Returns `found` with module names of transformers 5 replaced by the names in the base's files, where they
        differ."""

        def one(key: str) -> str:
            words = key.split(".")
            changed = len(words) > 2 and words[2] in self._words and key not in self._owners
            return ".".join([*words[:2], self._words[words[2]], *words[3:]]) if changed else key

        return {one(key): it for key, it in found.items()}

    def in_memory(self, tensor: str) -> str:
        """Returns the name that a base tensor has in memory with transformers 5, given its name in the base's files.
        Both names include "model.". The names of adapter tensors are unchanged, because transformers converts them
        itself."""
        words = tensor.split(".")
        names = {theirs: own for own, theirs in self._words.items()}
        if ".lora_" in tensor or len(words) < 4 or words[3] not in names:
            return tensor
        return ".".join([*words[:3], names[words[3]], *words[4:]])

    def unstacked(self, found: Mapping[str, Named]) -> dict[str, Named]:
        """Returns `found` with adapters of stacked experts replaced by the adapters of each expert.

        transformers 5 stacks `gate_up_proj` [e, 2 x mlp, embed] and `down_proj` [e, embed, mlp]. a is [e x r, in], and
        b is [out, r x e]. The adapters of gate and up share a.
        """
        result = dict(found)
        for name, layout in self.base.items():
            if layout.of_experts and layout.inputs:
                for tensor in self.layers(layout, name):
                    self._unstack(name, below(tensor), found, result)
        return result

    def _unstack(self, name: str, tensor: str, found: Mapping[str, Named], result: dict[str, Named]) -> None:
        container, _, last = tensor.partition(f".{EXPERT}.")
        width, embed, count = self._config.base_moe_mlp_dim, self._config.base_emb_dim, self._config.num_experts
        part = name.rpartition("/")[2]
        sizes = (width, embed) if part == "wo" else (embed, 2 * width)
        rows = {"wi_0": slice(0, width), "wi_1": slice(width, None)}.get(part, slice(None))
        for module in (container, f"{container}.base_layer"):  # with two adapters, peft nests one in the other
            a, b = found.get(module + A), found.get(module + B)
            if a is None or b is None or (a.tensor.shape[1], b.tensor.shape[0]) != sizes:
                continue
            rank = b.tensor.shape[1] // count
            if (a.tensor.shape[0], b.tensor.shape[1]) != (count * rank, rank * count):
                continue
            result.pop(module + A, None)
            result.pop(module + B, None)
            for e, (of_a, of_b) in enumerate(_experts(a.tensor, b.tensor, count, rank, rows)):
                own = f"{container}.{e}.{last.removesuffix('.weight')}"
                result |= {own + A: Named(a.name, of_a), own + B: Named(b.name, of_b)}


def _experts(a: StoredTensor, b: StoredTensor, count: int, rank: int, rows: slice) -> Iterator[tuple[Made, Made]]:
    out = len(range(*rows.indices(b.shape[0])))
    for e in range(count):
        of_a = functools.partial(_expert_a, a, slice(e * rank, (e + 1) * rank))
        of_b = functools.partial(_expert_b, b, count, e, rows)
        yield Made((rank, a.shape[1]), a.dtype, of_a), Made((out, rank), b.dtype, of_b)


def _expert_a(tensor: StoredTensor, rows: slice) -> np.ndarray:
    return tensor.read((rows, slice(0, tensor.shape[1])))


def _expert_b(tensor: StoredTensor, count: int, expert: int, rows: slice) -> np.ndarray:
    return _values(tensor).reshape(tensor.shape[0], -1, count)[rows, :, expert]


@functools.lru_cache(maxsize=2)  # a tensor of stacked experts is read once, not once per expert
def _values(tensor: StoredTensor) -> np.ndarray:
    return tensor.read(whole(tensor.shape))


def filled_up(key: str, it: Named, least: int, rank: int) -> Named:
    """Returns the tensor `key` of an adapter of rank `least`, padded with zeros to `rank`. Other tensors are
    unchanged."""
    axis, old = (0, it.tensor) if key.endswith(A) else (1, it.tensor)
    if least == rank or not key.endswith((A, B)) or len(old.shape) != 2 or old.shape[axis] != least:
        return it
    shape = tuple(rank if i == axis else size for i, size in enumerate(old.shape))
    more = [(0, new - size) for new, size in zip(shape, old.shape, strict=True)]
    return Named(it.name, Made(shape, old.dtype, lambda: np.pad(old.read(whole(old.shape)), more)))


def zeros(shape: tuple[int, ...], dtype: np.dtype) -> Made:
    """Returns zeros, with the interface `huggingface.read.Values`."""
    return Made(shape, dtype, lambda: np.zeros(shape, dtype))

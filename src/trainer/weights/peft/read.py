"""Folders of Hugging Face's PEFT: adapter_config.json and adapter_model.safetensors. Checked against peft 0.21.2."""

import itertools
import math
import shlex
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from trainer.checkpoint.sidecar import Base
from trainer.config.capabilities.lora_keys import ADAPTER
from trainer.config.dump import as_words
from trainer.config.errors import UserError, shortened
from trainer.config.json_files import shown
from trainer.config.keys import Config
from trainer.leaves.about import FIELDS, GENERATION
from trainer.leaves.source import Leaf, Shapes, check_tensors
from trainer.runtime.folders import check_folder
from trainer.weights.about_files import about_in
from trainer.weights.huggingface.read import head_to_reorder, is_copy, leaf_of
from trainer.weights.huggingface.safetensors_file import DTYPES
from trainer.weights.huggingface.weight_files import PEFT_WEIGHTS, tensors_in
from trainer.weights.peft.adapter_config import CONFIG, PeftConfig
from trainer.weights.peft.merged_modules import unmerged
from trainer.weights.peft.tensor_names import Named, Tables, below, by_base_name, filled_up, zeros

PICKLED = "adapter_model.bin"
TABLE, HEAD = "token_embedder/embedding", "decoder/logits_dense/kernel"


def is_peft(folder: Path) -> bool:
    """Returns whether a folder is in PEFT's format."""
    return (folder / CONFIG).is_file()


class PeftSource:
    """A `Source` of adapters, and of parameters that were trained together with them (modules_to_save).

    Attributes:
      rank, alpha: the product of an adapter is (alpha / rank) a b.
      base: the name or path of the adapted model, or "".
      origin: `base` as a `Base`; see `trainer.weights.adapters`.
    """

    kind = "PEFT"
    averaged = False
    length = None
    keys: Mapping[str, Any] = {}  # the base defines the model
    described: Mapping[str, Any] = {}

    def __init__(self, path: Path):
        """Reads the configuration and the header of the weights.

        Raises:
          UserError: a file is missing, damaged, a link out of the folder, or cannot be represented.
        """
        check_folder(path, (CONFIG, PEFT_WEIGHTS, FIELDS, GENERATION))
        self.path = self.tokenizer = path
        self.about = about_in(path)
        self._said = PeftConfig(path / CONFIG)
        self.rank, self.alpha, self.base = self._said.rank, self._said.alpha, self._said.base
        self.origin = Base(self.base, {})
        if not (path / PEFT_WEIGHTS).is_file():
            pickled = f"; reading {PICKLED} can run code in it: load it with peft, and save it again"
            raise UserError(f"{path}: no {PEFT_WEIGHTS}{pickled if (path / PICKLED).is_file() else ''}")
        tensors = tensors_in(path, path / PEFT_WEIGHTS)
        if wrong := [f"{shortened(name)}: {it.kind}" for name, it in tensors.items() if it.kind not in DTYPES]:
            raise UserError("\n  ".join([f"{path}: dtypes other than {', '.join(DTYPES)}:", *wrong[:20]]))
        self._found = by_base_name(tensors, str(path))

    def notes(self, config: Config) -> Sequence[str]:
        del config
        names = [f".{it.name}" for it in self._found.values()]
        lacking = [target for target in self._said.targets if not any(f".{target}.lora_" in name for name in names)]
        if not lacking:
            return self._said.notes
        shown = ", ".join(map(shortened, lacking))
        return [*self._said.notes, f"{self.path}: {PEFT_WEIGHTS} has no adapter of target_modules: {shown}"]

    def lora_keys(self, config: Config) -> dict[str, Any]:
        """Returns the keys with which a model of `config` has this folder's adapters and trains the same parameters.

        Raises:
          UserError: see `pattern`.
        """
        keys = {
            "enable_lora": True,
            "lora_rank": self.rank,
            "lora_alpha": self.alpha,
            "lora_module_path": self.pattern(config),
        }
        trained = self.trained(config)
        return keys | ({"trainable_parameters_mask": trained} if trained else {})

    def pattern(self, config: Config) -> str:
        """Returns the lora_module_path for the matrices that have an adapter in any of their layers.

        Raises:
          UserError: there is no adapter, or an adapter of a head that `config` ties to the embedding table.
        """
        groups = dict[str, list[str]]()
        for name in self._adapted(config, self._in(config)):
            layer, _, last = name.removesuffix("/kernel").rpartition("/")
            groups.setdefault(layer, []).append(last)
        each = [f"{layer}/" + (last[0] if len(last) == 1 else f"({'|'.join(last)})") for layer, last in groups.items()]
        return "|".join(each)

    def trained(self, config: Config) -> tuple[str, ...]:
        """Returns trainable_parameters_mask for the parameters that were trained together with the adapters."""
        found = self._in(config)
        names = dict.fromkeys(found.owners[key] for key, it in found.tensors.items() if self._is_trained(it.name))
        tied = (HEAD,) if config.logits_via_embedding else ()
        return tuple(f"^{name}$" for name in names if name and name not in tied and not ADAPTER.search(name))

    def held(self, config: Config, shapes: Shapes) -> Collection[str]:
        owners = set(self._in(config).owners.values())
        return [name for name in shapes if name in owners]

    def leaves(self, config: Config, shapes: Shapes) -> dict[str, Leaf]:
        """Returns the adapters in `shapes`, and the other parameters in `shapes` that the folder contains.

        In layers without an adapter, a and b are zero, and stay zero in training.

        Args:
          config: resolved.
          shapes: the shapes of all weights of the model, by canonical name.

        Raises:
          UserError: the model has other adapters, or tensors are missing, unexpected or have a wrong shape.
        """
        found = self._in(config)
        tables = found.tables
        adapted = set(itertools.chain(*(tables.adapters[name] for name in self._adapted(config, found))))
        self._check_keys(config, adapted, shapes)
        self._remove_tied_head(config, found)
        held = adapted.union(filter(None, found.owners.values()))
        wanted = {name: tables.tensors(name, shape) for name, shape in shapes.items() if name in held}
        lacking = _lacking(tables, wanted, found.tensors)
        check_tensors(
            {
                key if found.owners[key] else it.name: (it.tensor.shape, it.tensor.dtype.name)
                for key, it in found.tensors.items()
            },
            {key: shape for tensors in wanted.values() for key, shape in tensors if key not in lacking},
            str(self.path),
        )
        leaves = {}
        for name, tensors in wanted.items():
            dtype = next(found.tensors[key].tensor.dtype for key, _ in tensors if key in found.tensors)
            values = [
                found.tensors[key].tensor if key in found.tensors else zeros(shape, dtype) for key, shape in tensors
            ]
            layout, shape = tables.layouts[name], shapes[name]
            leaves[name] = leaf_of(values, layout, tables.place(name), shape, head_to_reorder(config, layout, shape))
        return leaves

    def _in(self, config: Config) -> "_Found":
        tables = Tables(config)
        if self._said.multiples and not tables.merged:
            ranks = shown(self._said.multiples)
            raise UserError(f"{self.path / CONFIG}: rank_pattern={ranks}: ranks that differ between matrices")
        found = unmerged(config, tables, tables.unstacked(tables.renamed(self._found)), self._said.least)
        found = {key: filled_up(key, it, self._said.least, self.rank) for key, it in found.items()}
        return _Found(tables, found, {key: tables.owner(key) for key in found})

    def _adapted(self, config: Config, found: "_Found") -> list[str]:
        """Returns the matrices that have an adapter. Raises UserError if there is none, or if one is of a tied head."""
        owners = set(found.owners.values())
        names = [name for name, pair in found.tables.adapters.items() if owners.intersection(pair)]
        if HEAD in names and config.logits_via_embedding:
            raise UserError(
                f"{self.path}: has an adapter of the head, which the configuration ties to the token embedding "
                "table; the adapter would untie them"
            )
        if not names:
            some = next((it.name for it in found.tensors.values()), "no tensor")
            raise UserError(f"{self.path}: no adapter of any matrix of this model; it has {shortened(some)}")
        return names

    def _check_keys(self, config: Config, adapted: Collection[str], shapes: Shapes) -> None:
        same = {name for name in shapes if ADAPTER.search(name)} == adapted
        if same and config.lora_rank == self.rank and math.isclose(config.lora_alpha, self.alpha, rel_tol=1e-6):
            return
        words = shlex.join(as_words(self.lora_keys(config)))
        raise UserError(f"{self.path}: its adapters differ from the configuration; to load them, give: {words}")

    def _is_trained(self, name: str) -> bool:
        """Returns whether a tensor of the file was trained, according to the configuration, and is not a copy of a base
        tensor."""
        if name.endswith(".bias") and self._said.biases:
            return True
        modules = tuple(below(module) for module in self._said.modules)
        parents = itertools.accumulate(below(name).split("."), "{}.{}".format)
        return ".base_layer." not in name and any(parent.endswith(modules) for parent in parents)

    def _remove_tied_head(self, config: Config, found: "_Found") -> None:
        if not config.logits_via_embedding or HEAD not in found.tables.layouts:
            return
        head, table = (below(found.tables.layouts[name].name) for name in (HEAD, TABLE))
        both = [found.tensors[key].tensor for key in (head, table) if key in found.tensors]
        if both and (len(both) == 1 or both[0].shape != both[1].shape or not is_copy(*both)):
            has = "different tensors" if len(both) == 2 else f"only {head if head in found.tensors else table}"
            raise UserError(
                f"{self.path}: the configuration ties the head to the token embedding table, but the folder has "
                f"{has}; with ensure_weight_tying=True, peft trains them as one"
            )
        found.tensors.pop(head, None)
        found.owners.pop(head, None)


class _Found(NamedTuple):
    """The tensors of a folder, and for each tensor its owner: the canonical name of the parameter to which it belongs
    in a model; None if the model has no such parameter. The keys of both dicts are the tensors' names without
    wrapper prefixes such as base_model., as the function `below` returns them."""

    tables: Tables
    tensors: dict[str, Named]
    owners: dict[str, str | None]


def _lacking(
    tables: Tables, wanted: Mapping[str, Sequence[tuple[str, tuple[int, ...]]]], found: Collection[str]
) -> set[str]:
    """Returns the names of the adapter tensors that are missing in pairs: those for which `found` contains neither a
    nor b of the same adapter."""
    absent = set[str]()
    for pair in tables.adapters.values():
        for half, other in zip(*(wanted.get(name, ()) for name in pair), strict=True):
            if half[0] not in found and other[0] not in found:
                absent |= {half[0], other[0]}
    return absent

"""Maps the parameter names of a block to the names in the block that it replaces."""

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from flax import traverse_util

from trainer.config.keys import Config
from trainer.layers.stack import MakeBlock
from trainer.models.families import block_class, stacks
from trainer.models.mtp import BLOCK, depths, last_block, part_path

T = TypeVar("T")


class Names:
    """Maps the canonical names of a model with replacement blocks to common names: the original model's names."""

    def __init__(self, table: Mapping[str, str]):
        """`table` maps paths in this model to common paths, as in {"decoder/layers/qkv": "decoder/layers/c_attn"}. A
        path is a parameter's name, or a prefix that several names share."""
        self._table = dict(table)

    def inverse(self) -> "Names":
        """Returns the map from common names to this model's names."""
        return Names({other: own for own, other in self._table.items()})

    def common(self, name: str) -> str:
        """Returns the common name for `name`, a parameter's name or one that contains it, such as `.../mu/NAME`."""
        for own, other in self._table.items():
            if (start := f"/{name}/".find(f"/{own}/")) >= 0:
                return name[:start] + other + name[start + len(own) :]
        return name

    def of(self, arrays: Mapping[str, T]) -> dict[str, T]:
        """Returns `arrays`, whose keys are this model's names, with common names as keys."""
        return {self.common(name): array for name, array in arrays.items()}

    def unused(self, names: Iterable[str]) -> list[str]:
        """Returns the paths in the table that match none of the canonical `names`."""
        names = [f"{name}/" for name in names]
        return [path for path in self._table if not any(name.startswith(f"{path}/") for name in names)]

    def shaped(self, arrays: Mapping[str, Any], like: Mapping[str, Any]) -> dict[str, Any]:
        """Returns `arrays`, whose keys are common names, after reshaping renamed arrays to their shapes in `like`.

        The shapes may differ because a block may merge axes, such as heads and head_dim for a plain matrix product.
        """

        def one(name: str, array: Any) -> Any:
            renamed = any(f"/{other}/" in f"/{name}/" for other in self._table.values())
            other = like.get(name)
            if not renamed or other is None or other.size != array.size:
                return array
            return array.reshape(other.shape)

        return {name: one(name, array) for name, array in arrays.items()}


def renamed(node: Any, names: Names) -> Any:
    """Returns `node`, a tree that contains trees of parameters, with common names in each parameter tree. Examples are
    a `TrainTree` and an optax state."""
    if isinstance(node, dict):
        if not isinstance(node.get("decoder"), dict):
            return {key: renamed(value, names) for key, value in node.items()}
        flat = names.of(traverse_util.flatten_dict(node, sep="/"))
        return traverse_util.unflatten_dict(flat, sep="/")
    if isinstance(node, tuple | list):
        parts = [renamed(part, names) for part in node]
        return type(node)(*parts) if hasattr(node, "_fields") else type(node)(parts)
    return node


def names_of_blocks(config: Config) -> Names:
    """Returns the map for the model of `config`, built from the attribute `PARAMETER_NAMES` that a block's
    class may have."""
    table: dict[str, str] = {}
    for stack in stacks(config):
        for block, path in zip(stack.blocks, stack.paths, strict=True):
            table |= _below(f"decoder/{path}", block)
    for k in depths(config):
        table |= _below(part_path(k, BLOCK), last_block(config)[1])
    return Names(table)


def _below(path: str, block: MakeBlock) -> dict[str, str]:
    own = getattr(block_class(block), "PARAMETER_NAMES", {})
    return {f"{path}/{name}": f"{path}/{other}" for name, other in own.items()}

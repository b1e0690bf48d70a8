"""What one block calls its parameters, in the words of another."""

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from flax import traverse_util

T = TypeVar("T")

_BLOCK = "decoder/layers/"


class Names:
    """Canonical names of a side, and what they are called on every side."""

    def __init__(self, within_block: Mapping[str, str]):
        """`within_block`: the block's own path of a parameter, or of several below it, within a layer -> the reference
        block's, as in {"qkv": "c_attn", "norm/scale": "ln_1/scale"}."""
        self._table = {f"{own}/": f"{other}/" for own, other in within_block.items()}

    def inverse(self) -> "Names":
        """From the reference block's names to the own ones."""
        return Names({other.removesuffix("/"): own.removesuffix("/") for own, other in self._table.items()})

    def common(self, name: str) -> str:
        """The common name of a parameter, or of what belongs to it, such as a moment: `.../mu/` and its name."""
        stem, found, rest = name.partition(_BLOCK)
        for own, other in self._table.items():
            if f"{rest}/".startswith(own):
                return stem + found + (other + f"{rest}/".removeprefix(own)).removesuffix("/")
        return name

    def of(self, arrays: Mapping[str, T]) -> dict[str, T]:
        """`arrays` under common names."""
        return {self.common(name): array for name, array in arrays.items()}

    def unused(self, names: Iterable[str]) -> list[str]:
        """The own paths under which none of the side's canonical `names` lies."""
        own = [f"{name.removeprefix(_BLOCK)}/" for name in names if name.startswith(_BLOCK)]
        return [path.removesuffix("/") for path in self._table if not any(name.startswith(path) for name in own)]

    def shaped(self, arrays: Mapping[str, Any], like: Mapping[str, Any]) -> dict[str, Any]:
        """`arrays` by common names, in the shapes of `like` where both blocks call a parameter by other names.

        Such a block may merge axes: heads and head_dim into one, for a plain matrix product.
        """

        def one(name: str, array: Any) -> Any:
            _, _, rest = name.partition(_BLOCK)
            renamed = any(f"{rest}/".startswith(other) for other in self._table.values())
            other = like.get(name)
            if not renamed or other is None or other.size != array.size:
                return array
            return array.reshape(other.shape)

        return {name: one(name, array) for name, array in arrays.items()}


def renamed(node: Any, names: Names) -> Any:
    """A tree in which trees of parameters lie (a `TrainTree`, optax's states), with common names in their layers."""
    if isinstance(node, dict):
        node = {key: renamed(value, names) for key, value in node.items()}
        if isinstance(layers := node.get("layers"), dict):
            flat = traverse_util.flatten_dict(layers, sep="/")
            flat = {names.common(_BLOCK + path).removeprefix(_BLOCK): leaf for path, leaf in flat.items()}
            node["layers"] = traverse_util.unflatten_dict(flat, sep="/")
        return node
    if isinstance(node, tuple | list):
        parts = [renamed(part, names) for part in node]
        return type(node)(*parts) if hasattr(node, "_fields") else type(node)(parts)
    return node


def names_of_block(block: Any) -> Names:
    """The names of a block's class, by its `PARAMETER_NAMES`, which most do without."""
    return Names(getattr(block, "PARAMETER_NAMES", {}))

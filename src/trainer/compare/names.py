"""What one block calls its parameters, in the words of another."""

from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")

_BLOCK = "decoder/layers/"


class Names:
    """Canonical names of a side, and what they are called on every side."""

    def __init__(self, within_block: Mapping[str, str]):
        """`within_block`: the block's own path of a parameter within a layer -> the reference block's."""
        self._table = {_BLOCK + own: _BLOCK + other for own, other in within_block.items()}

    def common(self, name: str) -> str:
        """The common name of a parameter, or of what belongs to it, such as a moment: `.../mu/` and its name."""
        stem, found, rest = name.partition(_BLOCK)
        return stem + self._table.get(found + rest, found + rest)

    def of(self, arrays: Mapping[str, T]) -> dict[str, T]:
        """`arrays` under common names."""
        return {self.common(name): array for name, array in arrays.items()}

    def shaped(self, arrays: Mapping[str, Any], like: Mapping[str, Any]) -> dict[str, Any]:
        """`arrays` by common names, where the block has names of its own in the shapes of `like`.

        Such a block may merge axes: heads and head_dim into one, for a plain matrix product.
        """
        renamed = set(self._table.values())

        def one(name: str, array: Any) -> Any:
            _, found, rest = name.partition(_BLOCK)
            other = like.get(name)
            if found + rest not in renamed or other is None or other.size != array.size:
                return array
            return array.reshape(other.shape)

        return {name: one(name, array) for name, array in arrays.items()}


def names_of_block(block: Any) -> Names:
    """The names of a block's class, by its `PARAMETER_NAMES`, which most do without."""
    return Names(getattr(block, "PARAMETER_NAMES", {}))

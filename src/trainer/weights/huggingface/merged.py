"""Tensors that merge several parameters (`trainer.models.huggingface.Merged`): their names, shapes and parts.

A part has a tensor name in its `Layout`, but no file contains a tensor with this name.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from trainer.config.errors import UserError
from trainer.models.huggingface import EACH, Merged
from trainer.weights.huggingface.packed_matrix import PackedMatrix
from trainer.weights.huggingface.quantization_config import Scheme
from trainer.weights.huggingface.safetensors_file import TensorPart

Shapes = Mapping[str, tuple[int, ...]]


class Whole(NamedTuple):
    """A merged tensor and one of its parts.

    Attributes:
      name: the tensor's name in the checkpoint.
      how: the declaration of the merge.
      part: the index of the part.
    """

    name: str
    how: Merged
    part: int


def whole_of(tensor: str, merged: Sequence[Merged]) -> Whole | None:
    """Returns the merged tensor that contains `tensor`, a name in a Layout; None if `tensor` is not merged."""
    for how in merged:
        if found := how.find(tensor):
            return Whole(found[0], how, found[1])
    return None


def stored_name(tensor: str, merged: Sequence[Merged]) -> str:
    """Returns the checkpoint's name for `tensor`, a name in a Layout, or for the merged tensor that contains it."""
    whole = whole_of(tensor, merged)
    return whole.name if whole else tensor


def wholes(shapes: Shapes, merged: Sequence[Merged]) -> dict[str, list[str]]:
    """Returns a dict from the name of each tensor in a checkpoint to the names of its parts, in order. A tensor that is
    not merged counts as its only part.

    Raises:
      UserError: the declaration is wrong: parts are missing, or cannot be divided into the declared groups.
    """
    parts: dict[str, dict[int, str]] = {}
    hows = dict[str, Merged]()
    for name in shapes:
        whole = whole_of(name, merged)
        parts.setdefault(whole.name if whole else name, {})[whole.part if whole else 0] = name
        if whole:
            hows[whole.name] = whole.how
    for name, how in hows.items():
        if len(parts[name]) < len(how.parts):
            lacking = [part for i, part in enumerate(how.parts) if i not in parts[name]]
            raise UserError(f"{name}: a Merged declares the parts {', '.join(lacking)}, but no Layout has these names")
        sizes = [shapes[part][how.axis] for part in parts[name].values()]
        if not how.fits(sizes) or (how.groups == EACH and len(set(sizes)) > 1):
            raise UserError(
                f"{name}: a Merged declares groups={how.groups}, which do not divide parts of {sizes} outputs"
            )
    return {name: [each[i] for i in sorted(each)] for name, each in parts.items()}


def whole_shapes(shapes: Shapes, merged: Sequence[Merged]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a checkpoint's tensors, given the shapes of their parts."""
    found = {}
    for name, parts in wholes(shapes, merged).items():
        whole = whole_of(parts[0], merged)
        shape = list(shapes[parts[0]])
        if whole:
            shape[whole.how.axis] = sum(shapes[part][whole.how.axis] for part in parts)
        found[name] = tuple(shape)
    return found


def with_parts(tensors: Mapping[str, Any], shapes: Shapes, merged: Sequence[Merged]) -> dict[str, Any]:
    """Returns `tensors`, by name, with merged tensors replaced by the parts in `shapes`. A tensor whose size differs
    from the total size of its parts is kept.

    Raises:
      UserError: a quantized matrix cannot be divided.
    """
    result = dict(tensors)
    for name, parts in wholes(shapes, merged).items():
        if (whole := whole_of(parts[0], merged)) is None or name not in tensors:
            continue
        tensor, axis = tensors[name], whole.how.axis
        sizes = [shapes[part][axis] for part in parts]
        if len(tensor.shape) != len(shapes[parts[0]]) or tensor.shape[axis] != sum(sizes):
            continue
        del result[name]
        for i, part in enumerate(parts):
            cut = whole.how.cut(sizes, i)
            quantized = isinstance(tensor, PackedMatrix)
            result[part] = tensor.outputs(cut) if quantized else TensorPart(tensor, axis % len(tensor.shape), cut)
    return result


def scheme_of_whole(tensor: str, parts: Sequence[tuple[Scheme | None, int]], concatenated: bool) -> Scheme | None:
    """Returns a merged tensor's scheme; None if the tensor is not quantized.

    Args:
      tensor: the merged tensor's name, for messages.
      parts: the scheme and the number of outputs of each part.
      concatenated: whether each part is contiguous in the merged tensor.

    Raises:
      UserError: the parts cannot be stored as one quantized matrix.
    """
    scheme = parts[0][0]
    rows = scheme.block[0] if scheme else 1
    if len(parts) == 1 or (rows == 1 and all(it == scheme for it, _ in parts)):
        return scheme
    if any(it != scheme for it, _ in parts):
        why = "its parts are stored in different ways"
    elif rows and concatenated and not any(out % rows for _, out in parts[:-1]):
        return scheme
    else:
        why = f"{rows or 'all'} outputs share a scale, so several parts would share one"
    raise UserError(f"{tensor}: cannot be written quantized: {why}; give dtype=float32 or dtype=bfloat16")

"""Where MaxText stores a parameter: the names of its tensors, and the part of a tensor that is the parameter."""

from typing import Any, NamedTuple

from trainer.config.keys import Config
from trainer.leaves.source import Shapes
from trainer.models.families import Place, maxtext
from trainer.models.family import Named
from trainer.models.patterns import LAYERS, REMAINDER


class Window(NamedTuple):
    """The part of a joined tensor of one layer that is one parameter; see `models.family.Joined`.

    Attributes:
      shape: the shape of the tensor.
      groups: the number of groups of entries on the last axis.
      start, stop: the range of the parameter's entries in each group.
    """

    shape: tuple[int, ...]
    groups: int
    start: int
    stop: int


class Stored(NamedTuple):
    """How a tensor contains a parameter.

    Attributes:
      layer: the shape of one layer of our parameter; outside of the stacks, the parameter's shape without its first
        axis.
      axis: the position of the axis of layers.
      layers: the length of the axis of layers; 0 if the tensor contains one layer and has no such axis.
      places, place: see `models.family.Named`.
      window: the parameter's part of a joined tensor; None if the tensor is not joined.
    """

    layer: tuple[int, ...]
    axis: int = 0
    layers: int = 0
    places: int = 0
    place: int = 0
    window: Window | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor."""
        layer = self.window.shape if self.window else self.layer
        stacked = tuple(size for size in (self.layers, self.places) if size)
        return (*layer[: self.axis], *stacked, *layer[self.axis :])

    @property
    def is_ours(self) -> bool:
        """Whether the tensor has our axes in our order."""
        return bool(self.layers) and not (self.axis or self.places or self.window)

    def view(self, value: Any) -> Any:
        """Returns the parameter's part of the tensor `value`: the axis of layers comes first, and the other axes are in
        our order, but may be split or merged. The part of a contiguous NumPy array is a view."""
        if self.window:
            _, groups, start, stop = self.window
            value = value.reshape(*value.shape[:-1], groups, -1)[..., start:stop]
        if self.places:
            value = value[(slice(None),) * (self.axis + bool(self.layers)) + (self.place,)]
        layers_first = sorted(range(value.ndim), key=lambda axis: axis != self.axis)
        return value.transpose(layers_first) if self.layers else value

    def spec(self, ours: list[Any]) -> list[Any]:
        """Returns how to shard the tensor's axes. Axes that are split or merged are not sharded. `ours`: how our axes
        are sharded, beginning with the axis of layers."""
        layers, *layer = ours
        if self.window:
            sizes = self.window.shape
            head = _equal(sizes, self.layer)
            tail = min(_equal(sizes[::-1], self.layer[::-1]), len(sizes) - head)
            layer = [*layer[:head], *[None] * (len(sizes) - head - tail), *layer[len(layer) - tail :]]
        stacked = [*([layers] if self.layers else []), *([None] if self.places else [])]
        return [*layer[: self.axis], *stacked, *layer[self.axis :]]


def _equal(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Returns the number of leading entries in which `a` and `b` agree."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def stored_as(config: Config, name: str, where: Place | None, shapes: Shapes, axis: int | None) -> Stored:
    """Returns how MaxText stores the canonical parameter `name`.

    Args:
      shapes: the shapes of all parameters of the layer.
      axis: the axis on which layers are stacked; None: they are not scanned.
    """
    layers, *layer = shapes[name]
    if where is None:
        return Stored(tuple(layer), layers=layers)
    window = _window(config, name, where, shapes)
    if axis is None:
        return Stored(tuple(layer), window=window)
    named = names_of(config, name, where)
    return Stored(tuple(layer), axis, 0 if left_over(where) else layers, named.places, named.place, window)


def _window(config: Config, name: str, where: Place, shapes: Shapes) -> Window | None:
    for joined in maxtext(config.decoder_block).joined:
        if where.path in joined.parts:
            above, groups = name.removesuffix(where.path), config[joined.groups] if joined.groups else 1
            parts = [joined.shape(shapes[above + part][1:]) for part in joined.parts]
            sizes = [part[-1] // groups for part in parts]
            start = sum(sizes[: joined.parts.index(where.path)])
            whole = (*parts[0][:-1], groups * sum(sizes))
            return Window(whole, groups, start, start + sizes[joined.parts.index(where.path)])
    return None


def left_over(where: Place) -> bool:
    """Returns whether layers follow the last complete repetition of the layer pattern. MaxText never stacks these."""
    return where.stack == REMAINDER


def names_of(config: Config, name: str, where: Place) -> Named:
    """Returns MaxText's names of a canonical parameter."""
    if own := maxtext(config.decoder_block).names:
        return own(name, where)
    each = [layer_name(where, i) for i in range(len(where.layers))]
    if left_over(where):
        name = f"decoder/{REMAINDER}/layers_{where.layers[0] - where.first}/{where.path}"
    return Named(name, each)


def layer_name(where: Place, index: int) -> str:
    """Returns MaxText's name for layer number `index` of a parameter whose layers are not scanned."""
    if left_over(where):
        return f"decoder/{LAYERS}_{where.layers[index]}/{where.path}"
    return f"decoder/{where.stack}_{where.layers[index] - where.first}/{where.path}"

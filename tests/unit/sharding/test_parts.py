"""The axes of the parts of a parameter."""

import jax
import jax.numpy as jnp
import pytest

from trainer.config import UserError
from trainer.sharding import Axes, axes_of_parts

KERNEL = Axes(("layers", "exp", "embed", "mlp"))
SHAPE = (2, 4, 6, 8)


def parts(**shapes):
    return {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}


def test_an_array_has_the_axes_of_its_parameter():
    assert axes_of_parts(KERNEL, jax.ShapeDtypeStruct(SHAPE, jnp.float32)) == KERNEL


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        (SHAPE, KERNEL),
        ((2, 4, 1, 8), ("layers", "exp", None, "mlp")),
        ((2, 4, 8), ("layers", "exp", "mlp")),
        ((2, 1, 1, 8), ("layers", None, None, "mlp")),
        ((2, 8), ("layers", "mlp")),
        ((2, 1), ("layers", None)),
        ((2,), ("layers",)),
    ],
)
def test_a_part_keeps_the_axes_that_it_has(shape, expected):
    found = axes_of_parts(KERNEL, parts(q=SHAPE, scale=shape))
    assert found == {"q": KERNEL, "scale": expected}
    assert all(isinstance(axes, Axes) for axes in found.values())


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((2, 4, 3, 8), KERNEL),
        ((2, 4, 2, 4), KERNEL),
        ((2, 4, 3, 1), ("layers", "exp", "embed", None)),
        ((2, 1, 2, 8), ("layers", None, "embed", "mlp")),
        ((2, 4, 6, 3), ("layers", "exp", "embed", None)),  # tiles of 3, 3 and 2: devices share one
    ],
)
def test_a_part_with_an_entry_for_each_tile_keeps_the_axes_that_it_divides_evenly(shape, expected):
    assert axes_of_parts(KERNEL, parts(q=SHAPE, scale=shape)) == {"q": KERNEL, "scale": expected}


def test_a_stack_of_one_layer_keeps_its_name():
    assert axes_of_parts(KERNEL, parts(q=(1, 4, 6, 8), scale=(1, 4, 3, 8)))["scale"] == KERNEL


# An axis of 6 cannot have 4 tiles, layers have none, and a part with an entry for each tile may not lack axes.
@pytest.mark.parametrize(
    "shape", [(2, 4, 4, 8), (1, 4, 3, 8), (2, 4, 3), (4, 6, 8), (), (2, 8, 6), (2, 4, 6, 8, 1), (2, 4, 0, 8)]
)
def test_a_part_that_does_not_fit_is_refused(shape):
    with pytest.raises(UserError, match=r"w \[layers, exp, embed, mlp\] of shape \[2, 4, 6, 8\]: its part scale of "):
        axes_of_parts(KERNEL, parts(q=SHAPE, scale=shape), "w")


def test_axes_of_equal_length_need_length_1():
    """Such a part may belong to either axis: its sharding would be a guess."""
    square = Axes(("embed", "mlp"))
    with pytest.raises(UserError, match="may lack one axis or another; give it length 1 in the axes that it lacks"):
        axes_of_parts(square, parts(q=(8, 8), scale=(8,)))
    assert axes_of_parts(square, parts(q=(8, 8), scale=(1, 8)))["scale"] == (None, "mlp")


def test_the_parts_together_have_the_shape_of_the_parameter():
    square = Axes(("embed", "mlp"))
    assert axes_of_parts(square, parts(left=(6, 1), right=(1, 8))) == {"left": ("embed", None), "right": (None, "mlp")}
    with pytest.raises(UserError, match="its part scale of shape"):
        axes_of_parts(square, parts(scale=(8,)))

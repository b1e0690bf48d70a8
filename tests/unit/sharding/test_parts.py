"""The axes of a parameter's parts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from trainer.config.errors import UserError
from trainer.sharding import Axes, axes_of_parts, named_sharding, on_mesh, with_own_tiles

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
        ((2, 4, 6, 3), ("layers", "exp", "embed", None)),  # tiles of 3, 3 and 2 entries: two devices share a tile
    ],
)
def test_a_part_with_an_entry_for_each_tile_keeps_the_axes_that_it_divides_evenly(shape, expected):
    assert axes_of_parts(KERNEL, parts(q=SHAPE, scale=shape)) == {"q": KERNEL, "scale": expected}


def mesh_of(devices):
    return jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("tensor",))


@pytest.mark.parametrize(("tiles", "spec"), [(3, None), (4, "tensor"), (6, "tensor"), (12, "tensor")])
def test_tiles_that_the_mesh_does_not_divide_are_replicated(tiles, spec):
    """An axis of 12 on 2 devices. Ordinary arrays whose axis the mesh does not divide are refused."""
    names = axes_of_parts(Axes(("mlp",)), parts(q=(12,), scale=(tiles,)))["scale"]
    assert named_sharding(mesh_of(2), names, (tiles,), {"mlp": ("tensor",)}).spec == PartitionSpec(spec)
    with pytest.raises(UserError, match="tensor 2 by the rule of mlp does not divide 3"):
        named_sharding(mesh_of(2), Axes(("mlp",)), (3,), {"mlp": ("tensor",)})


@pytest.mark.parametrize(("tiles", "found"), [(1, 1), (2, 4), (3, 12), (4, 4), (6, 12), (12, 12)])
def test_a_device_has_own_tiles(tiles, found):
    """An axis of 12 on 4 devices, with 3 entries each. Other parts and axes remain unchanged."""
    scale = np.arange(2 * tiles, dtype=np.float32).reshape(2, tiles)
    value = {"q": np.zeros((2, 12)), "scale": scale, "of_rows": np.zeros(2)}
    with on_mesh(mesh_of(4), {"mlp": ("tensor",)}):
        got = with_own_tiles(Axes((None, "mlp")), value)
    assert {name: part.shape for name, part in got.items()} == {"q": (2, 12), "scale": (2, found), "of_rows": (2,)}
    np.testing.assert_array_equal(np.repeat(got["scale"], 12 // found, 1), np.repeat(scale, 12 // tiles, 1))


def test_a_shorter_last_tile_of_a_sharded_axis_is_refused():
    value = parts(q=(2, 8), scale=(2, 3))
    with on_mesh(mesh_of(2), {"mlp": ("tensor",)}):
        assert with_own_tiles(Axes(("mlp", None)), value) == value
        with pytest.raises(UserError, match=r"experts \[2, 8\]: 3 tiles of axis 1 have unequal lengths, so mlp cannot"):
            with_own_tiles(Axes((None, "mlp")), value, "experts")


def test_a_stack_of_one_layer_keeps_its_name():
    assert axes_of_parts(KERNEL, parts(q=(1, 4, 6, 8), scale=(1, 4, 3, 8)))["scale"] == KERNEL


# An axis of 6 cannot have 4 tiles, the layers axis has no tiles, and a part with an entry for each tile may not lack
# axes.
@pytest.mark.parametrize(
    "shape", [(2, 4, 4, 8), (1, 4, 3, 8), (2, 4, 3), (4, 6, 8), (), (2, 8, 6), (2, 4, 6, 8, 1), (2, 4, 0, 8)]
)
def test_a_part_that_does_not_fit_is_refused(shape):
    with pytest.raises(UserError, match=r"w \[layers, exp, embed, mlp\] of shape \[2, 4, 6, 8\]: its part scale of "):
        axes_of_parts(KERNEL, parts(q=SHAPE, scale=shape), "w")


def test_axes_of_equal_length_need_length_1():
    """Such a part may belong to either axis, so its sharding would be a guess."""
    square = Axes(("embed", "mlp"))
    with pytest.raises(
        UserError, match="may lack either of two equally long axes; give it length 1 in the axes that it lacks"
    ):
        axes_of_parts(square, parts(q=(8, 8), scale=(8,)))
    assert axes_of_parts(square, parts(q=(8, 8), scale=(1, 8)))["scale"] == (None, "mlp")


def test_the_parts_together_have_the_shape_of_the_parameter():
    square = Axes(("embed", "mlp"))
    assert axes_of_parts(square, parts(left=(6, 1), right=(1, 8))) == {"left": ("embed", None), "right": (None, "mlp")}
    with pytest.raises(UserError, match="its part scale of shape"):
        axes_of_parts(square, parts(scale=(8,)))

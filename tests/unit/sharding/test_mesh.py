"""The mesh of a configuration."""

import jax
import pytest
from jax.sharding import AxisType
from support import tiny_config

from trainer.sharding import make_mesh


def mesh_of(devices, **axes):
    sizes = {f"ici_{axis}_parallelism": size for axis, size in axes.items()}
    return make_mesh(tiny_config("nnx", devices=devices, **sizes), jax.devices()[:devices])


@pytest.mark.parametrize(
    ("axes", "expected"),
    [
        ({"data": 2, "fsdp": 2, "tensor": 2}, (2, 2, 2)),
        ({"data": 1, "fsdp": -1, "tensor": 2}, (1, 4, 2)),
        ({"data": -1, "fsdp": 1, "tensor": 1}, (8, 1, 1)),
        ({}, (1, 8, 1)),
    ],
    ids=str,
)
def test_axes_have_the_sizes_of_the_configuration_the_outermost_first(axes, expected):
    mesh = mesh_of(8, **axes)
    assert tuple(mesh.shape.items()) == tuple(zip(("data", "fsdp", "tensor"), expected, strict=True))
    assert mesh.axis_types == (AxisType.Auto,) * 3
    # Row by row: neighbours along the innermost axis are neighbours in the list of devices.
    assert mesh.devices.ravel().tolist() == jax.devices()


def test_one_device():
    mesh = mesh_of(1)
    assert mesh.devices.shape == (1, 1, 1)

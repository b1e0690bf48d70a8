"""The mesh of a configuration."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from support import arguments, tiny_config

from trainer.config.derived import MESH_AXES
from trainer.config.errors import UserError
from trainer.config.load import load
from trainer.sharding import get_mesh_from_config, hardware, make_mesh, memory_kinds, slice_count
from trainer.sharding import mesh as mesh_module


def keys(within, over):
    sizes = {f"ici_{axis}_parallelism": size for axis, size in within.items()}
    return sizes | {f"dcn_{axis}_parallelism": size for axis, size in over.items()}


def mesh_of(devices, within, **over):
    return make_mesh(tiny_config("nnx", devices=devices, **keys(within, over)), jax.devices()[:devices])


def above_one(mesh):
    return {axis: size for axis, size in mesh.shape.items() if size > 1}


@pytest.mark.parametrize(
    ("axes", "expected"),
    [
        ({"data": 2, "fsdp": 2, "tensor": 2}, {"data": 2, "fsdp": 2, "tensor": 2}),
        ({"data": 1, "fsdp": -1, "tensor": 2}, {"fsdp": 4, "tensor": 2}),
        ({"data": -1, "fsdp": 1, "tensor": 1}, {"data": 8}),
        (
            {"fsdp": 2, "fsdp_transpose": 2, "tensor_sequence": 2},
            {"fsdp": 2, "fsdp_transpose": 2, "tensor_sequence": 2},
        ),
        ({}, {"fsdp": 8}),
    ],
    ids=str,
)
def test_axes_have_the_sizes_of_the_configuration_the_outermost_first(axes, expected):
    mesh = mesh_of(8, axes)
    assert mesh.axis_names == MESH_AXES
    assert above_one(mesh) == expected
    assert mesh.axis_types == (AxisType.Auto,) * len(MESH_AXES)
    # Row by row: neighbors along the innermost axis are neighbors in the list of devices.
    assert mesh.devices.ravel().tolist() == jax.devices()


def test_one_device():
    mesh = mesh_of(1, {})
    assert mesh.devices.size == 1


def test_slices_lie_outside_of_their_devices_on_every_axis():
    """Devices without slice information are divided into slices in their order."""
    devices = jax.devices()
    assert slice_count(devices) is None
    mesh = mesh_of(8, {"fsdp": 2, "tensor": 2}, fsdp=2)
    assert above_one(mesh) == {"fsdp": 4, "tensor": 2}
    ids = [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert mesh.devices.squeeze().tolist() == [[devices[i] for i in row] for row in ids]
    mesh = mesh_of(8, {"fsdp": 2, "fsdp_transpose": 2}, fsdp_transpose=2)
    ids = [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert mesh.devices.squeeze().tolist() == [[devices[i] for i in row] for row in ids]


class Chip:
    """The attributes that `_by_network` reads. Consecutive devices alternate between two slices."""

    device_kind, platform = "some accelerator", "gpu"

    def __init__(self, number):
        self.id, self.slice_index, self.process_index = number, number % 2, number % 2


def test_devices_that_know_their_slices_are_sorted_by_them():
    chips = [Chip(number) for number in range(8)]
    assert slice_count(chips) == 2
    grid = mesh_module._by_network(chips, (1, 2, 2), (2, 1, 1), False)
    assert np.vectorize(lambda chip: chip.id)(grid).tolist() == [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]
    grid = mesh_module._by_network(chips[::2], (1, 2, 2), (1, 1, 1), False)
    assert np.vectorize(lambda chip: chip.id)(grid).tolist() == [[[0, 2], [4, 6]]]


def test_hosts_of_gpus_that_are_only_compiled_for_are_slices():
    """JAX assigns slice 0 to all compile-only GPUs, but a slice per host to running GPUs."""
    absent = [Chip(number) for number in range(16)]
    for chip in absent:
        chip.process_index, chip.slice_index = chip.id // 4, 0
        chip.client = SimpleNamespace(runtime_type="compile_only_runtime")
    running = [Chip(number) for number in range(16)]
    for chip in running:
        chip.process_index, chip.slice_index = chip.id // 2, chip.id // 4  # two processes on each host
    assert slice_count(absent) == slice_count(running) == 4
    assert memory_kinds(absent) == ["device", "pinned_host"]
    for ici, dcn in (((1, 2, 2), (2, 1, 2)), ((4, 1, 1), (1, 4, 1)), ((2, 2, 1), (4, 1, 1))):
        grids = [mesh_module._by_network(chips, ici, dcn, False) for chips in (absent, running)]
        one, other = (np.vectorize(lambda chip: chip.id)(grid).tolist() for grid in grids)
        assert one == other


def test_a_mesh_that_the_network_does_not_have(monkeypatch):
    from jax.experimental import mesh_utils

    def refuse(shape, devices, *, allow_split_physical_axes):
        raise NotImplementedError("no assignment. More words.")

    monkeypatch.setattr(mesh_utils, "create_device_mesh", refuse)
    with pytest.raises(UserError, match="cannot form this mesh: no assignment; try allow_split_physical_axes=true"):
        mesh_module._by_network(jax.devices(), (8,), (1,), False)


def test_the_mesh_of_an_unresolved_configuration_is_that_of_the_resolved_one():
    words = keys({"fsdp": -1, "tensor": 2}, {"data": 2})
    unresolved = load(arguments("nnx", **words)).config
    expected = make_mesh(tiny_config("nnx", devices=8, **words), jax.devices())
    assert get_mesh_from_config(unresolved) == expected
    assert get_mesh_from_config(tiny_config("nnx", devices=8, **words), jax.devices()) == expected
    with pytest.raises(UserError, match="tensor 2, which does not divide the 1 device for"):
        get_mesh_from_config(load(arguments("nnx", ici_tensor_parallelism=2)).config, jax.devices()[:1])


@pytest.mark.parametrize(
    ("of_devices", "capability"),
    [(["9.0", "10.3"], (9, 0)), (["12.0"], (12, 0)), (["9.0", None], None), (["gfx942"], None), ([None], None)],
)
def test_the_lowest_compute_capability(of_devices, capability):
    devices = [SimpleNamespace(platform="gpu", compute_capability=of_device) for of_device in of_devices]
    assert hardware(devices)["capability"] == capability

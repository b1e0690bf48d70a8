"""The device mesh."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from trainer.config.derived import DCN, ICI, MESH_AXES
from trainer.config.errors import UserError
from trainer.config.keys import Config
from trainer.config.resolve import resolve
from trainer.runtime.programs import compile_anew
from trainer.sharding.capability import hardware, slice_count, slice_of


def get_mesh_from_config(config: Config, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Returns the mesh of `config`, resolved or not, over `devices` (default: all devices of all processes).

    Raises:
      UserError: the configuration does not fit the devices. The message lists all mistakes.
    """
    devices = jax.devices() if devices is None else devices
    return make_mesh(resolve(config, **hardware(devices)), devices)


def side_devices(config: Config, devices: Sequence[jax.Device]) -> Sequence[jax.Device]:
    """Returns the devices of one side of a comparison: as many of `devices` as the side's mesh needs, or all of
    `devices` if a mesh size is -1 or if there are several slices."""
    sizes = [config[key] for key in ICI.values()]
    if -1 in sizes or (slice_count(devices) or 1) > 1:  # with several slices, a DCN size may be -1
        return devices
    return devices[: math.prod(sizes) * abs(math.prod(config[key] for key in DCN.values()))]


def make_mesh(config: Config, devices: Sequence[jax.Device]) -> Mesh:
    """Returns a mesh of `devices` with the axes and sizes of a resolved configuration, the outermost axis first.

    In an axis that spans both slices and devices within slices, slices are outermost. CPU devices keep their order,
    which is by process. Axes have JAX's type Auto: the compiler propagates the shardings of `constrain` and of
    the state. A mesh of several CPU devices disables JAX's compilation cache (`runtime.programs`).

    Raises:
      UserError: the physical network cannot form this mesh.
    """
    compile_anew(devices)
    ici, dcn = (tuple(config[keys[axis]] for axis in MESH_AXES) for keys in (ICI, DCN))
    if devices[0].platform == "cpu":
        grid = _in_order(devices, ici, dcn)
    else:
        grid = _by_network(devices, ici, dcn, config.allow_split_physical_axes)
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def _in_order(devices: Sequence[jax.Device], ici: tuple[int, ...], dcn: tuple[int, ...]) -> np.ndarray:
    axes = len(ici)
    grid = np.asarray(devices).reshape(*dcn, *ici)
    pairs = grid.transpose([i for axis in range(axes) for i in (axis, axes + axis)])
    return pairs.reshape([outer * inner for outer, inner in zip(dcn, ici, strict=True)])


def _by_network(devices: Sequence[Any], ici: tuple[int, ...], dcn: tuple[int, ...], split: bool) -> np.ndarray:
    """Returns a grid in which neighbors on the mesh are neighbors in the network of the chips."""
    from jax.experimental import mesh_utils

    try:
        if max(dcn) > 1:
            by_process = any(slice_of(device) != device.slice_index for device in devices)
            return mesh_utils.create_hybrid_device_mesh(
                ici, dcn, devices, process_is_granule=by_process, allow_split_physical_axes=split
            )
        return mesh_utils.create_device_mesh(ici, devices, allow_split_physical_axes=split)
    except NotImplementedError as error:
        reason = str(error).partition(". ")[0]
        hint = "" if split else "; try allow_split_physical_axes=true"
        raise UserError(f"the devices' network cannot form this mesh: {reason}{hint}") from error

"""The device mesh."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from trainer.config import UserError, resolve
from trainer.config.derived import DCN, ICI, MESH_AXES


def get_mesh_from_config(config, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh that `config`, resolved or not, describes on `devices`; None for all devices of all processes.

    Raises:
      UserError: the configuration does not fit the devices; all mistakes at once.
    """
    devices = jax.devices() if devices is None else devices
    config = resolve(config, device_count=len(devices), platform=devices[0].platform, num_slices=slice_count(devices))
    return make_mesh(config, devices)


def slice_count(devices: Sequence[jax.Device]) -> int | None:
    """In how many slices `devices` lie; None where they know of no slices, as those of a CPU."""
    slices = {getattr(device, "slice_index", None) for device in devices}
    return None if None in slices else len(slices)


def side_devices(config, devices: Sequence[jax.Device]) -> Sequence[jax.Device]:
    """Those of `devices` that one side of a comparison takes: as many as its mesh needs where all of its sizes are
    written out, else all."""
    sizes = [config[key] for key in ICI.values()]
    if -1 in sizes or (slice_count(devices) or 1) > 1:  # over slices an open axis counts them
        return devices
    return devices[: math.prod(sizes) * abs(math.prod(config[key] for key in DCN.values()))]


def make_mesh(config, devices: Sequence[jax.Device]) -> Mesh:
    """A mesh of `devices` with the axes and sizes of a resolved configuration, the outermost axis first.

    An axis that has devices within slices and slices has the slices outside. Devices without slices are taken as such
    in their order, which is that of their processes. Axes are of JAX's automatic kind: the compiler propagates what
    `constrain` and the state's shardings say.

    Raises:
      UserError: the physical network has no such mesh.
    """
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
    """Neighbours on the mesh are neighbours on the chips' network."""
    from jax.experimental import mesh_utils

    try:
        if max(dcn) > 1:
            return mesh_utils.create_hybrid_device_mesh(ici, dcn, devices, allow_split_physical_axes=split)
        return mesh_utils.create_device_mesh(ici, devices, allow_split_physical_axes=split)
    except NotImplementedError as error:
        reason = str(error).partition(". ")[0]
        hint = "" if split else "; try allow_split_physical_axes=true"
        raise UserError(f"the devices' network has no such mesh, {reason}{hint}") from error

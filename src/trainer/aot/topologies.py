"""Creates the devices to compile for, which this machine may lack."""

import importlib.util

import jax

from trainer.aot.chips import CHIPS
from trainer.aot.gpus import TARGETS, plugin
from trainer.config.errors import UserError
from trainer.config.keys import Config
from trainer.config.topologies import Topology, find_topology
from trainer.runtime.platforms import prepare_compile_only_tpu

NO_LIBTPU = "needs libtpu, the TPU compiler, for Linux on x86-64: pip install 'trainer[tpu-aot]'"
NO_PLUGIN = "needs JAX's plugin for CUDA, which contains the GPU compiler: pip install 'trainer[gpu-aot]'"


def topology_of(config: Config) -> Topology:
    """Returns the topology that `compile_topology` names.

    Raises:
      UserError: `compile_topology` is empty.
    """
    if not config.compile_topology:
        raise UserError("compile_topology is empty: give the devices to compile for, such as v5e-16, h100-8 or cpu-8")
    topology = find_topology(config.compile_topology)
    assert isinstance(topology, Topology), topology  # the configuration has been checked, so the topology exists
    return topology


def devices_of(topology: Topology, num_slices: int = 1) -> list[jax.Device]:
    """Returns the devices of `num_slices` slices of `topology`.

    CPU devices are devices of this process. For TPUs and GPUs, the result can only be used to compile, not to run.

    Raises:
      UserError: the compiler for these devices is not installed, or this process has too few CPU devices.
    """
    if topology.platform == "cpu":
        return _simulated(topology)
    prepare_compile_only_tpu()
    from jax.experimental import topologies

    if topology.platform == "gpu":
        if plugin() is None:
            raise UserError(f"compile_topology={topology.name} {NO_PLUGIN}")
        hosts = f"{num_slices}x1x{topology.devices}"
        target = TARGETS[topology.kind].text(CHIPS[topology.kind])
        return topologies.get_topology_desc(platform="cuda", target_config=target, topology=hosts).devices
    if importlib.util.find_spec("libtpu") is None:
        raise UserError(f"compile_topology={topology.name} {NO_LIBTPU}")
    assert topology.generation is not None
    sides = "x".join(map(str, topology.shape))
    description = topologies.get_topology_desc(
        platform="tpu",
        topology_name=f"{topology.generation.libtpu_name}:{sides}",
        chip_config_name=topology.generation.chip_config,
        chips_per_host_bounds=(1, 1, 1) if max(topology.shape) == 1 else (2, 2, 1),
        num_slices=num_slices,
        wrap=topology.wrap,
    )
    return description.devices


def _simulated(topology: Topology) -> list[jax.Device]:
    devices = jax.devices("cpu")
    if len(devices) < topology.devices:
        raise UserError(
            f"compile_topology={topology.name}: this process has {len(devices)} CPU devices; start it with "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={topology.devices}"
        )
    return devices[: topology.devices]

"""The topologies that `compile_topology` can name, for which `trainer.aot` compiles.

TPU topologies have MaxText's names: the number counts TensorCores for v4, v5p and tpu7x (two per chip), and chips for
v5e and v6e. The number in the name of a GPU topology counts the GPUs of one host, which NVLink connects.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from trainer.config.errors import nearest

_TORI = """
2x2x1 2x2x2 2x2x4 2x4x4 4x4x4 4x4x8 4x4x12 4x8x8 4x4x20 4x8x12 4x4x28 8x8x8 4x12x12 4x8x20 4x4x44 8x8x12 4x4x52
4x8x28 4x12x20 8x8x16 4x4x68 8x12x12 4x4x76 8x8x20 4x12x28 4x8x44 4x4x92 8x12x16 4x20x20 4x8x52 12x12x12 8x8x28
4x4x116 8x12x20 4x4x124 8x16x16 4x12x44 4x8x68 4x20x28 12x12x16 4x4x148 4x8x76 4x12x52 8x16x20 4x4x164 8x12x28
4x4x172 8x8x44 12x12x20 4x8x92 4x4x188 12x16x16 4x28x28 8x20x20 4x12x68 8x8x52 4x4x212 12x12x24 4x20x44 8x16x28
4x12x76 4x8x116 4x4x236 12x16x20 4x4x244 4x8x124 12x12x28 16x16x16 4x20x52 8x12x44 8x8x68 4x12x92 8x20x28 12x16x24
4x8x148 12x20x20 8x8x76 4x28x44 8x12x52 16x16x20 12x12x36 4x8x164 12x16x28 4x20x68 4x8x172 4x12x116 8x16x44 12x20x24
4x28x52 8x8x92 4x12x124 4x8x188 4x20x76 16x16x24 12x24x24 16x20x28
"""


@dataclass(frozen=True)
class Generation:
    """One generation of TPUs: its names in libtpu, and the available slices.

    A slice's shape is the number of chips along each dimension of its network.
    """

    libtpu_name: str
    chip_config: str  # libtpu's name of the chip's mode; if a chip has two cores, it makes them one device or two
    shapes: tuple[str, ...]
    counted_per_chip: int  # how much each chip adds to the number in a topology's name
    devices_per_chip: int = 1


GENERATIONS = {
    "v4": Generation(
        "v4",
        "megacore_dense",
        (
            *("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x4x12", "4x8x8", "8x8x8", "8x8x12", "8x8x16"),
            "8x16x16",
        ),
        counted_per_chip=2,
    ),
    "v5p": Generation("v5", "megacore", tuple(_TORI.split()), counted_per_chip=2),
    "v5e": Generation(
        "v5e", "default", ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"), counted_per_chip=1
    ),
    "v6e": Generation(
        "v6e", "default", ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16"), counted_per_chip=1
    ),
    "tpu7x": Generation(
        "tpu7x",
        "default",
        ("1x1x1", *_TORI.split(), "16x16x32", "16x24x24"),
        counted_per_chip=2,
        devices_per_chip=2,
    ),
}
GPUS = ("a100", "h100", "h200", "b200")
GPUS_OF_HOST = (1, 2, 4, 8)
SIMULATED = "cpu"  # cpu-N: N simulated CPU devices


@dataclass(frozen=True)
class Topology:
    """One slice: TPUs, the GPUs of one host, or simulated CPU devices. Only TPUs have `generation` and `shape`."""

    name: str
    platform: str  # cpu, gpu or tpu
    devices: int
    generation: Generation | None = None
    shape: tuple[int, ...] = ()  # chips along each dimension

    @property
    def kind(self) -> str:
        """The part of the name before the number."""
        return self.name.partition("-")[0]

    @property
    def wrap(self) -> tuple[bool, bool, bool]:
        """Whether each dimension has wraparound links. In 2D, dimensions of size 16 have them. In 3D, all dimensions
        have them if the slice consists of 4x4x4 cubes; otherwise none has."""
        if len(self.shape) == 2:
            return (self.shape[0] == 16, self.shape[1] == 16, False)
        torus = all(side % 4 == 0 for side in self.shape)
        return (torus, torus, torus)


def topologies() -> Mapping[str, Topology]:
    """Returns a dict from the name of each slice of TPUs or GPUs to its topology."""
    gpus = [Topology(f"{kind}-{count}", "gpu", count) for kind in GPUS for count in GPUS_OF_HOST]
    by_name = {topology.name: topology for topology in gpus}
    for kind, generation in GENERATIONS.items():
        for text in generation.shapes:
            shape = tuple(int(side) for side in text.split("x"))
            chips = math.prod(shape)
            name = f"{kind}-{chips * generation.counted_per_chip}"
            by_name[name] = Topology(name, "tpu", chips * generation.devices_per_chip, generation, shape)
    return by_name


def find_topology(name: str) -> Topology | str:
    """Returns the topology called `name`, or an error message with the nearest name."""
    known = topologies()
    if name in known:
        return known[name]
    kind, dash, number = name.partition("-")
    count = int(number) if re.fullmatch(r"[1-9][0-9]{0,5}", number) else 0
    if kind == SIMULATED:
        if count:
            return Topology(name, "cpu", count)
        return f"there is no topology {name!r}; cpu-N means N simulated CPU devices, such as cpu-8"
    if name == "a3":
        return "MaxText's a3, the GPUs of one host, is h100-8 here"
    of_kind = [topology for topology in known if topology.startswith(f"{kind}-")]
    if not of_kind or not dash:
        kinds = ", ".join(f"{kind}-N" for kind in (*GENERATIONS, *GPUS, SIMULATED))
        return f"there is no topology {name!r}; allowed: {kinds}{nearest(name, known)}"
    if not count:
        return f"{number!r} is not a valid size; {kind} has {_shown(of_kind)}"
    most = GPUS_OF_HOST[-1]
    if kind in GPUS and count > most:
        hosts = f"compile_topology={kind}-{most} compile_topology_num_slices={-(-count // most)}"
        return f"a slice of GPUs is one host, with at most {most}; give {hosts}"
    close = min(of_kind, key=lambda other: abs(math.log(int(other.partition("-")[2]) / count)))
    return f"there is no slice {name}; {kind} has {_shown(of_kind)}; nearest: {close}"


def _shown(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 12 else f"{', '.join(names[:10])} ... {names[-1]}"

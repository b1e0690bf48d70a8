"""The smallest topology on which a model fits, if it fits on no mesh of the given one."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from trainer.aot.topologies import devices_of
from trainer.config.derived import DCN, ICI
from trainer.config.keys import Config
from trainer.config.topologies import GPUS, Topology, find_topology, topologies
from trainer.planning.candidate import Candidate
from trainer.planning.journal import Journal
from trainer.planning.search import Compile, Search
from trainer.planning.space import Changes, default_space

_MOST = 5  # topologies that are tried
_COMPILES = 2  # on each
_AXES = ("fsdp", "tensor")  # the mesh axes that shard parameters of every model


class Larger(NamedTuple):
    """A topology on which `candidate` fits."""

    topology: str
    slices: int
    candidate: Candidate


def smallest_that_fits(
    config: Config,
    fixed: Sequence[str],
    journal: Journal,
    compile_words: Compile,
    starts: Callable[[str, Changes], None],
) -> Larger | None:
    """Returns the smallest topology larger than compile_topology on which the model fits, sharded over fsdp and tensor,
    with remat_policy=full and the fewest rows; None if none of the next five does.

    Args:
      config: from `config.load`, not resolved.
      fixed: the keys that the command gives. Those of the mesh do not count.
      journal, compile_words: see `search.plan`.
      starts: called with the topology and the settings before each compilation.
    """
    mesh = {*ICI.values(), *DCN.values()}
    varied = {keys[axis] for keys in (ICI, DCN) for axis in _AXES}
    others = dict.fromkeys(mesh - varied, 1)
    for topology, slices in _larger(config):
        values = (
            dict(config.items()) | others | {"compile_topology": topology.name, "compile_topology_num_slices": slices}
        )
        larger = Config(values | dict.fromkeys(varied, 1))
        kept = [key for key in fixed if key not in mesh]
        space = default_space(larger, topology.devices, slices, [*kept, *others], {"remat_policy": ["full"]})
        search = Search(larger, space, devices_of(topology, slices), journal, compile_words, limit=_COMPILES)
        search.fewest_rows_first()
        search.run(lambda candidate, number: None, functools.partial(_starts, starts, topology.name))
        if search.best:
            return Larger(topology.name, slices, search.best)
    return None


def _starts(starts: Callable[[str, Changes], None], name: str, changes: Changes, number: int) -> None:
    starts(name, changes)


def _larger(config: Config) -> Iterator[tuple[Topology, int]]:
    """Yields the next larger topologies of the same kind: more devices of a slice, or for GPUs more hosts."""
    here, slices = find_topology(config.compile_topology), config.compile_topology_num_slices
    assert isinstance(here, Topology)
    same = [other for other in topologies().values() if other.kind == here.kind and other.devices > here.devices]
    found = [(other, slices) for other in sorted(same, key=lambda other: other.devices)]
    if here.kind in GPUS:
        whole = same[-1] if same else here
        found += [(whole, slices * 2**power) for power in range(1, _MOST + 1)]
    yield from found[:_MOST]

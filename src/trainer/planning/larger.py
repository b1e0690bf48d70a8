"""Finds the next larger topology on which a model fits, for a model that fits on no mesh of the given topology."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from trainer.aot.topologies import devices_of
from trainer.config.derived import DCN, ICI
from trainer.config.errors import UserError
from trainer.config.keys import Config
from trainer.config.topologies import Topology, find_topology, topologies
from trainer.planning.candidate import Candidate
from trainer.planning.search import Search
from trainer.planning.settings import settings_text
from trainer.planning.space import VARIED, Changes, default_space

_MOST = 5  # the maximum number of topologies that are tried
_COMPILES = 2  # the maximum number of compilations for each topology
_AXES = ("fsdp", "tensor")  # the mesh axes that shard the parameters of every model


class Larger(NamedTuple):
    """A topology on which `candidate` fits."""

    topology: str
    slices: int
    candidate: Candidate


def smallest_that_fits(
    search: Search, fixed: Iterable[str], searched: Mapping[str, Sequence[Any]], say: Callable[[str], None]
) -> Larger | None:
    """Returns the smallest topology larger than that of `search` on which the model fits, sharded over fsdp and tensor,
    with remat_policy=full and the fewest rows; None if it fits on none of the next five.

    Args:
      search: a search in which nothing fits.
      fixed: the keys that the command gives. Keys of the mesh and remat_policy are ignored.
      searched: the keys that the command searches, each with its values. The same keys are ignored.
      say: called with a line before each compilation.
    """
    mesh, varied = ({keys[axis] for keys in (ICI, DCN) for axis in axes} for axes in (VARIED, _AXES))
    others = dict.fromkeys(mesh - varied, 1)
    kept = [key for key in fixed if key not in (*mesh, "remat_policy")]
    wanted = {key: values for key, values in searched.items() if key not in mesh} | {"remat_policy": ["full"]}
    for topology, slices in _larger(search.config):
        there = {"compile_topology": topology.name, "compile_topology_num_slices": slices}
        config = Config({**search.config, **others, **dict.fromkeys(varied, 1), **there})
        devices = devices_of(topology, slices)
        with contextlib.suppress(UserError):  # this topology allows no such mesh
            space = default_space(config, topology.devices, slices, [*kept, *others], wanted)
            larger = Search(config, space, devices, search.journal, search.compiler, limit=_COMPILES, chip=search.chip)
            larger.keep_fewest_rows()
            larger.run(functools.partial(_starts, say, topology.name))
            if larger.best:
                return Larger(topology.name, slices, larger.best)
    return None


def _starts(say: Callable[[str], None], name: str, changes: Changes) -> None:
    say(f"nothing fits; compiling for {name}: {settings_text(changes)}")


def _larger(config: Config) -> Iterator[tuple[Topology, int]]:
    """Yields five larger topologies of the same kind, each with its number of slices.

    Topologies with more devices per slice come first; then the number of slices grows.
    """
    here, slices = find_topology(config.compile_topology), config.compile_topology_num_slices
    assert isinstance(here, Topology)
    same = [other for other in topologies().values() if other.kind == here.kind and other.devices > here.devices]
    found = [(other, slices) for other in sorted(same, key=lambda other: other.devices)]
    found += [(found[-1][0] if found else here, slices * 2**power) for power in range(1, _MOST + 1)]
    yield from found[:_MOST]

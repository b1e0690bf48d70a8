"""The keys of ahead-of-time compilation."""

from trainer.config.key_rows import Check, Place, Resume, Row
from trainer.config.keys import Config
from trainer.config.topologies import GPUS, find_topology


def _topology(config: Config) -> str | None:
    topology = find_topology(config.compile_topology) if config.compile_topology else None
    return topology if isinstance(topology, str) else None


def _slices(config: Config) -> str | None:
    simulated = config.compile_topology.startswith("cpu-")
    return (
        "simulated CPU devices have no slices: give cpu-N with the total number"
        if simulated and config.compile_topology_num_slices > 1
        else None
    )


def _saved(config: Config) -> str | None:
    gpus = config.compile_topology.partition("-")[0] in GPUS
    return (
        "a step that was compiled for GPUs without one is not saved: none has been loaded on a GPU yet, where its "
        "kernels could be wrong or slow; leave compiled_trainstep_file out"
        if gpus and config.compiled_trainstep_file
        else None
    )


ROWS = (
    Row(("compile_topology", "compile_topology_num_slices"), Resume.AROUND, step=False),
    Row(("compile_report_file",), Resume.AROUND, step=False, path=Place.ANY),
    Row(("compiled_trainstep_file",), Resume.AROUND, step=False, path=Place.ANY, code=True),
)
CHECKS: tuple[Check, ...] = (
    (("compile_topology",), _topology),
    (("compile_topology", "compile_topology_num_slices"), _slices),
    (("compile_topology", "compiled_trainstep_file"), _saved),
)

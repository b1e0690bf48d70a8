"""The keys of ahead-of-time compilation."""

from trainer.config.key_rows import Check, Place, Resume, Row, refused
from trainer.config.keys import Config
from trainer.config.topologies import GPUS, find_topology


def _topology(config: Config) -> str | None:
    topology = find_topology(config.compile_topology) if config.compile_topology else None
    return topology if isinstance(topology, str) else None


ROWS = (
    Row(("compile_topology", "compile_topology_num_slices"), Resume.AROUND, step=False),
    Row(("compile_report_file",), Resume.AROUND, step=False, path=Place.ANY),
    Row(("compiled_trainstep_file",), Resume.AROUND, step=False, path=Place.ANY, code=True),
)
CHECKS: tuple[Check, ...] = (
    (("compile_topology",), _topology),
    refused(
        ("compile_topology", "compile_topology_num_slices"),
        lambda c: c.compile_topology.startswith("cpu-") and c.compile_topology_num_slices > 1,
        "simulated CPU devices have no slices: give cpu-N with the total number of devices",
    ),
    refused(
        ("compile_topology", "compiled_trainstep_file"),
        lambda c: c.compile_topology.partition("-")[0] in GPUS and c.compiled_trainstep_file,
        "a step that is compiled ahead of time for GPUs is not saved: loading such a step is untested, and its kernels "
        "could be wrong or slow; leave compiled_trainstep_file out",
    ),
)

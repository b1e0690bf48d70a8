"""The keys of pipeline parallelism."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainer.config.derived import DCN, ICI, mesh_axes
from trainer.config.words import counted

STAGE = "stage"  # the mesh axis
MICROBATCHES, REPEATS, PER_STAGE = "num_pipeline_microbatches", "num_pipeline_repeats", "num_layers_per_pipeline_stage"
LAYERS, DELAY = "pipeline_parallel_layers", "pipeline_delay_activation_forwarding"
SCAN, SCAN_LAYERS = "scan_pipeline_iterations", "scan_layers_per_stage"
REMAT, REMAT_LAYERS = "set_remat_policy_on_pipeline_iterations", "set_remat_policy_on_layers_per_stage"
ONCE, PER_REPEAT = "pipeline_fsdp_ag_once", "pipeline_fsdp_ag_per_repeat"
KEYS = (MICROBATCHES, REPEATS, PER_STAGE, LAYERS, DELAY, SCAN, SCAN_LAYERS, REMAT, REMAT_LAYERS, ONCE, PER_REPEAT)


@dataclass(frozen=True)
class Pipeline:
    """How the layers of a stack run in a pipeline.

    Microbatch m passes stage s for the r-th time in iteration r x microbatches + m + delay x s.

    Attributes:
      repeats: how often a microbatch passes all stages.
      stages: the number of stages.
      layers: iterations of the stack's loop in each stage and repeat.
      microbatches: a multiple of `stages`.
      delay: iterations until the next stage has a result, 1 or 2.
      scan, scan_layers: whether the loop over iterations, and that over a stage's layers, is rolled.
      remat, remat_layers: whether an iteration of a stage, and each of its layers, is rematerialized.
    """

    repeats: int
    stages: int
    layers: int
    microbatches: int
    delay: int = 1
    scan: bool = True
    scan_layers: bool = False
    remat: bool = True
    remat_layers: bool = False

    @property
    def iterations(self) -> int:
        """The number of iterations in which each stage computes."""
        return self.repeats * self.microbatches + self.delay * (self.stages - 1)

    @property
    def bubble(self) -> float:
        """The share of the iterations in which a stage has nothing to do."""
        return self.delay * (self.stages - 1) / self.iterations

    def text(self, layers: int) -> str:
        """Returns the pipeline in words; `layers`: those of a stage in one repeat."""
        times = f"{counted(self.repeats, 'repeat')} x " if self.repeats > 1 else ""
        return (
            f"{counted(self.stages, 'stage')} x {times}{counted(layers, 'layer')}; {self.microbatches} microbatches in "
            f"{self.iterations} iterations, {self.bubble:.1%} of them idle (bubble)"
        )

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The leading axes of the stack's parameters."""
        return self.repeats, self.stages, self.layers


def stages(config: Mapping[str, Any]) -> int:
    """Returns the number of stages; 1 without a pipeline."""
    return mesh_axes(config)[STAGE]


def microbatches(config: Mapping[str, Any]) -> int:
    """Returns the number of microbatches of the pipeline."""
    return config[MICROBATCHES] if config[MICROBATCHES] > 0 else delay(config) * stages(config)


def delay(config: Mapping[str, Any]) -> int:
    """Returns the number of iterations until the next stage has a result."""
    return 2 if config[DELAY] else 1


def unpipelined(config: Any) -> Any:
    """Returns a configuration of the same model without a pipeline: its parameters are as in checkpoints. Its mesh is
    not that of the devices."""
    if stages(config) == 1:
        return config
    return type(config)({**config, ICI[STAGE]: 1, DCN[STAGE]: 1})

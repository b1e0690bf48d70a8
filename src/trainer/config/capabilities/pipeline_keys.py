"""The keys of pipeline parallelism: their checks, and the settings under which the keys have no effect."""

from dataclasses import dataclass

from trainer.config.derived import DCN, FSDP, ICI, mesh_axes
from trainer.config.key_rows import Check, Inert, Resume, Row, only_if, refused
from trainer.config.keys import Config
from trainer.config.numbers import multiples_around
from trainer.config.rules import make_rules
from trainer.config.tensors import EVERY_MODEL, tensors_of
from trainer.config.words import counted

STAGE = "stage"  # the mesh axis that separates the stages of a pipeline
SIZES = (ICI[STAGE], DCN[STAGE])
GATHERS = ONCE, PER_REPEAT = "pipeline_fsdp_ag_once", "pipeline_fsdp_ag_per_repeat"
KEYS = (
    "num_pipeline_microbatches",
    "num_pipeline_repeats",
    "num_layers_per_pipeline_stage",
    "pipeline_parallel_layers",
    "pipeline_delay_activation_forwarding",
    "scan_pipeline_iterations",
    "scan_layers_per_stage",
    "set_remat_policy_on_pipeline_iterations",
    "set_remat_policy_on_layers_per_stage",
    *GATHERS,
)
# The leading logical axes of a pipeline's arrays (two axes of parameters, then one of activations), each with the mesh
# axes to which the sharding rules must map it.
OF_PIPELINE = {"circular_repeats": (), "stages": (STAGE,), "activation_stage": (STAGE,)}


@dataclass(frozen=True)
class Pipeline:
    """How the layers of a stack run in a pipeline.

    Stage s processes repeat r of microbatch m in iteration r x microbatches + m + delay x s; all counts start at 0.

    Attributes:
      repeats: how many times a microbatch passes through all stages.
      stages: the number of stages.
      layers: the number of iterations of the stack's loop in each stage and repeat.
      microbatches: the number of microbatches, a multiple of `stages`.
      delay: the number of iterations until the next stage has the result of a stage: 1 or 2.
      scan: whether the loop over iterations is a scan; otherwise it is unrolled.
      scan_layers: whether the loop over a stage's layers is a scan; otherwise it is unrolled.
      remat: whether an iteration of a stage is rematerialized as a whole.
      remat_layers: whether each layer of a stage is rematerialized.
      per_repeat: whether weights are all-gathered over fsdp once for each repeat.
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
    per_repeat: bool = False

    @property
    def iterations(self) -> int:
        """The number of iterations of the pipeline, including those in which a stage is idle."""
        return self.repeats * self.microbatches + self.delay * (self.stages - 1)

    @property
    def bubble(self) -> float:
        """The share of the iterations in which a stage is idle."""
        return self.delay * (self.stages - 1) / self.iterations

    def text(self, layers: int) -> str:
        """Returns a description of the pipeline. `layers`: the number of layers of a stage in one repeat."""
        times = f"{counted(self.repeats, 'repeat')} x " if self.repeats > 1 else ""
        return (
            f"{counted(self.stages, 'stage')} x {times}{counted(layers, 'layer')}; {self.microbatches} microbatches in "
            f"{self.iterations} iterations, {self.bubble:.1%} of them idle (bubble)"
        )

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The sizes of the leading axes of the stack's parameters."""
        return self.repeats, self.stages, self.layers


def stages(config: Config) -> int:
    """Returns the number of stages; 1 without a pipeline. If the size of the stage axis within or across slices is
    still -1, the result is below 2."""
    return int(config[ICI[STAGE]] * config[DCN[STAGE]])


def delay(config: Config) -> int:
    """Returns the number of iterations until the next stage has the result of a stage."""
    return 2 if config.pipeline_delay_activation_forwarding else 1


def microbatches(config: Config) -> int:
    """Returns the number of microbatches of the pipeline; 1 without a pipeline."""
    return (
        config.num_pipeline_microbatches
        if config.num_pipeline_microbatches > 0 and stages(config) > 1
        else fewest(config)
    )


def fewest(config: Config) -> int:
    """Returns the smallest number of microbatches that the pipeline can have; 1 without a pipeline."""
    return delay(config) * stages(config) if stages(config) > 1 else 1


def nothing_to_gather(config: Config) -> bool:
    """Returns whether there is a pipeline, but no mesh axis over which weights would have to be all-gathered."""
    sizes = mesh_axes(config)
    return sizes[STAGE] > 1 and all(sizes[axis] == 1 for axis in FSDP)


def unpipelined(config: Config) -> Config:
    """Returns the configuration of the same model without a pipeline.

    With this configuration, parameters have the shapes in which checkpoints store them. Its mesh has one stage, so it
    does not match the devices.
    """
    if stages(config) == 1:
        return config
    return type(config)({**config, ICI[STAGE]: 1, DCN[STAGE]: 1})


def _microbatches(config: Config) -> str | None:
    given, count, least = config.num_pipeline_microbatches, stages(config), fewest(config)
    if given == -1 or (given % count == 0 and given >= least):
        return None
    fitting = multiples_around(given, count) if given // count * count >= least else str(least)
    twice = (
        f", at least {least}, because a result arrives one iteration later"
        if config.pipeline_delay_activation_forwarding
        else ""
    )
    return f"must be a multiple of the {counted(count, 'stage')}{twice}; nearest: {fitting}"


def _rules(config: Config) -> str | None:
    rules = make_rules(config.logical_axis_rules)
    problems = [
        f"the rule of {name} must be [{name},{axes[0] if axes else '[]'}] with a pipeline"
        for name, axes in OF_PIPELINE.items()
        if rules[name] != axes
    ]
    inside = [names for tensor, names in tensors_of(config).items() if tensor not in EVERY_MODEL or "between" in tensor]
    doubled = {name for names in inside for name in names if STAGE in rules[name]} - {"activation_batch"}
    if doubled:
        problems.append(
            f"the rule of {min(doubled)} names the mesh axis {STAGE}, which separates the stages of a pipeline: all "
            "arrays in it already have this axis"
        )
    return f"{'; '.join(problems)}; leave it out" if problems else None


ROWS = (Row(KEYS, Resume.LAYOUT),)
_ALL: tuple[Check, ...] = (
    (("num_pipeline_microbatches", "pipeline_delay_activation_forwarding"), _microbatches),
    (("logical_axis_rules",), _rules),
    refused(
        ("enable_streaming_diloco",),
        lambda c: c.enable_streaming_diloco,
        "a fragment is a set of layers, whose parameters would have to move between stages; set it to false",
    ),
)
CHECKS: tuple[Check, ...] = (
    refused(
        (ONCE, PER_REPEAT),
        lambda c: c[ONCE] and c[PER_REPEAT],
        "weights are gathered either once, or once for each repeat; set only one of them",
    ),
    *only_if(lambda c: stages(c) > 1, _ALL, shown=SIZES),
)
INERT = (
    Inert(KEYS, lambda c: all(c[key] == 1 for key in SIZES), f"there is one stage: {' and '.join(SIZES)} are 1"),
    Inert(
        ("scan_layers_per_stage",), lambda c: c.num_layers_per_pipeline_stage == 1, "num_layers_per_pipeline_stage=1"
    ),
    Inert(
        ("set_remat_policy_on_pipeline_iterations", "set_remat_policy_on_layers_per_stage"),
        lambda c: c.remat_policy == "none",
        "remat_policy=none",
    ),
)
INERT_HERE = (Inert(GATHERS, nothing_to_gather, "no weight of a stage is sharded over fsdp here"),)

"""The synchronization schedule of DiLoCo, and the checks of its keys."""

from typing import Any, NamedTuple

from trainer.config.derived import DCN, ICI
from trainer.config.key_rows import Check, Inert, Resume, Row, refused
from trainer.config.keys import Config
from trainer.config.rules import make_rules
from trainer.config.words import counted


class Schedule(NamedTuple):
    """When each fragment of the parameters synchronizes, and when islands merge the result into their parameters.

    An island is a group of devices with its own copy of the parameters. Plain DiLoCo has one fragment, and islands
    merge a synchronized fragment immediately.
    """

    period: int  # steps between two synchronizations of the same fragment
    fragments: int
    delay: int  # steps from a synchronization until islands merge its result into their parameters
    alpha: float  # the weight of an island's own parameters when it merges the outer parameters into them
    steps: int  # the number of steps of the run; all fragments synchronize after the last step

    @property
    def spacing(self) -> int:
        """The smallest number of steps between the synchronizations of two different fragments."""
        return self.period // self.fragments

    def offset(self, fragment: int) -> int:
        """Returns the offset of `fragment`, which synchronizes after each update t with t % period == offset."""
        return fragment * self.period // self.fragments

    def synchronizes(self, fragment: int, updates: Any) -> Any:
        """Returns whether `fragment` synchronizes after update number `updates`, an integer or an array."""
        return (updates % self.period == self.offset(fragment)) | (updates == self.steps)

    def any_synchronizes(self, updates: int) -> bool:
        """Returns whether any fragment synchronizes after update number `updates`."""
        return any(self.synchronizes(fragment, updates) for fragment in range(self.fragments))

    def arrives(self, fragment: int, in_flight: Any, updates: Any) -> Any:
        """Returns whether islands merge `fragment` into their parameters after update number `updates`.

        `in_flight`: if a synchronized fragment waits to be merged, the number of the update after which it
        synchronized; otherwise 0.
        """
        its = (in_flight > 0) & (in_flight % self.period == self.offset(fragment))
        return its & ((updates == in_flight + self.delay) | (updates == self.steps))


def schedule(config: Config) -> Schedule:
    """Returns the schedule of `config`."""
    streaming = (config.num_diloco_fragments, config.num_communication_overlapping_steps)
    fragments, delay = streaming if config.enable_streaming_diloco else (1, 0)
    alpha = config.communication_overlapping_alpha if config.enable_streaming_diloco else 0.0
    return Schedule(config.diloco_sync_period, fragments, delay, alpha, config.steps)


def timetable(config: Config) -> str:
    """Returns the schedule of `config` in words."""
    plan = schedule(config)
    if plan.fragments == 1:
        when, end = f"every {counted(plan.period, 'step')}", " and at the end"
    else:
        order = [*range(1, plan.fragments), 0]
        steps = [plan.offset(fragment) or plan.period for fragment in order]
        shown = [f"fragment {fragment} after step {step}" for fragment, step in zip(order, steps, strict=True)]
        if len(shown) > 6:
            shown[3:-1] = ["..."]
        when = f"in {plan.fragments} fragments: every {counted(plan.period, 'step')}, {', '.join(shown)}"
        end = ", and all at the end"
    late = f" (islands merge a fragment {counted(plan.delay, 'step')} later)" if plan.delay else ""
    return when + late + end


def _fragments(config: Config) -> str | None:
    plan, layers = schedule(config), config.base_num_decoder_layers
    if plan.fragments > layers + 1:
        return (
            f"{counted(layers, 'layer')} can be divided into at most {layers + 1} fragments: one for each layer, and "
            "one for the parameters outside of the layers"
        )
    if plan.fragments > plan.period:
        return (
            f"{plan.fragments} fragments cannot synchronize one after the other within {counted(plan.period, 'step')}; "
            f"give at most {plan.period} fragments, or a longer period"
        )
    return None


def _delay(config: Config) -> str | None:
    plan = schedule(config)
    if not plan.delay or plan.delay < plan.spacing:
        return None
    return (
        "islands must merge a fragment before the next one synchronizes: "
        f"{counted(plan.fragments, 'fragment')} in {counted(plan.period, 'step')} can be only "
        f"{plan.period} // {plan.fragments} = {counted(plan.spacing, 'step')} apart, so "
        f"num_communication_overlapping_steps must be less than {plan.spacing}"
    )


def _rules_of_islands(config: Config) -> str | None:
    crossing = [name for name, axes in make_rules(config.logical_axis_rules).items() if "diloco" in axes]
    return (
        f"the rule of {crossing[0]} names the mesh axis diloco, which separates the islands: every array of an island "
        "already has this axis, so no rule may name it; leave it out"
        if crossing
        else None
    )


_STREAMING = ("enable_streaming_diloco", "num_diloco_fragments", "diloco_sync_period")
# The keys that determine when fragments synchronize, and when and how islands merge them.
_OF_STREAMING = ("num_diloco_fragments", "num_communication_overlapping_steps", "communication_overlapping_alpha")
ROWS = (
    Row(
        ("diloco_sync_period", "enable_streaming_diloco", "use_sequential_layers", *_OF_STREAMING[:2]), Resume.TIMETABLE
    ),
    Row(("diloco_outer_lr", "diloco_outer_momentum", "diloco_outer_grad_dtype", _OF_STREAMING[2]), Resume.UPDATE),
)
CHECKS: tuple[Check, ...] = (
    (("logical_axis_rules",), _rules_of_islands),
    refused(
        ("enable_diloco", ICI["diloco"], DCN["diloco"]),
        lambda c: not c.enable_diloco and (c[ICI["diloco"]] != 1 or c[DCN["diloco"]] != 1),
        "only DiLoCo uses the mesh axis diloco; set enable_diloco=true, or leave both sizes at 1",
    ),
    refused(
        ("enable_diloco", "ema_decay"),
        lambda c: c.enable_diloco and c.ema_decay,
        "with DiLoCo, evaluation and export use the outer parameters, an average over islands; set ema_decay=0",
    ),
    refused(
        ("enable_diloco", "enable_streaming_diloco"),
        lambda c: c.enable_streaming_diloco and not c.enable_diloco,
        "streaming requires DiLoCo; set enable_diloco=true, too",
    ),
    ((*_STREAMING, "base_num_decoder_layers"), _fragments),
    ((*_STREAMING, "num_communication_overlapping_steps"), _delay),
)
INERT = (
    Inert(
        ("diloco_sync_period", "diloco_outer_lr", "diloco_outer_momentum", "diloco_outer_grad_dtype"),
        lambda c: not c.enable_diloco,
        "enable_diloco=false",
    ),
    Inert(_OF_STREAMING, lambda c: not c.enable_streaming_diloco, "enable_streaming_diloco=false"),
    Inert(
        ("use_sequential_layers",),
        lambda c: not c.enable_streaming_diloco or c.num_diloco_fragments <= 2,
        "only streaming DiLoCo with more than two fragments divides the layers",
    ),
)

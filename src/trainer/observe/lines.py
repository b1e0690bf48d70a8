"""The lines that report a step or an evaluation, for a terminal and for programs that parse MaxText's log."""

import math
import statistics
from array import array
from collections.abc import Mapping
from typing import Any, NamedTuple

from trainer.observe.series import number
from trainer.observe.text import Field, clock, perplexity, short_time, si

# The first steps of a process are not timed, because they include compilation and loading the first batches.
FIRST_STEPS = 2
# The weight of the newest step in the smoothed step time.
SMOOTHING = 0.05
# Measured terms that lines show, each with its label and its format.
_MEASURED = {
    "divergence": ("divergence", ".3f"),
    "reward": ("reward", ".3f"),
    "reward_margin": ("margin", ".2g"),
    "reward_accuracy": ("accuracy", ".0%"),
}


def last_measured(row: Mapping[str, Any], evaluated: Mapping[str, Any]) -> dict[str, str]:
    """Returns the measured terms of a run's last step and of its last evaluation, by name."""
    lines = {}
    for name, (word, form) in _MEASURED.items():
        if name in row:
            held_out = evaluated.get(f"eval_{name}")
            more = "" if held_out is None else f"; {number(held_out):{form}} in the last evaluation"
            lines[word] = f"{number(row[name]):{form}}{more}"
    return lines


def has_loss(row: Mapping[str, Any]) -> bool:
    """Returns whether the loss in a step's row measures quality. A policy's loss does not: it is always near 0."""
    return "reward" not in row


class Work(NamedTuple):
    """The work of one step. `tokens` includes padding, as in MaxText."""

    devices: int
    tokens: int  # rows x length
    flops_per_token: float  # model FLOPs; see `models.flops`
    peak: float | None = None  # FLOP/s of one device; None if unknown

    def tokens_per_second(self, step_time: float) -> float:
        """Returns tokens per second per device."""
        return self.tokens / self.devices / step_time if step_time else math.inf

    def flops_per_second(self, step_time: float) -> float:
        """Returns model FLOPs per second per device."""
        return self.flops_per_token * self.tokens_per_second(step_time)

    def utilization(self, step_time: float) -> str | None:
        """Returns model FLOPs divided by the peak (MFU), as a percentage; None if the peak is unknown."""
        return f"{self.flops_per_second(step_time) / self.peak:.1%}" if self.peak else None


class Pace:
    """The speed of the steps so far, except for the first two."""

    def __init__(self) -> None:
        self.steps = 0
        self.tokens = 0
        self._smoothed = 0.0
        self._times, self._rates = array("d"), array("d")

    def add(self, row: Mapping[str, float]) -> None:
        """Adds a step's row."""
        self.steps += 1
        self.tokens += int(row["tokens"])
        if self.steps == FIRST_STEPS + 1:
            self._times, self._rates = array("d"), array("d")
        self._times.append(row["step_time"])
        self._rates.append(row["tokens_per_second"])
        if self.steps > FIRST_STEPS:
            # This is a plain mean until there are enough steps for an exponential moving average.
            weight = max(SMOOTHING, 1 / len(self._times))
            self._smoothed += weight * (row["step_time"] - self._smoothed)

    def eta(self, steps_left: int) -> str:
        """Returns the remaining time as h:mm:ss; "?" during the first two steps."""
        if steps_left == 0:
            return clock(0)
        return clock(steps_left * self._smoothed) if self.steps > FIRST_STEPS else "?"

    def medians(self) -> tuple[float, float]:
        """Returns the median step time in seconds and the median tokens per second. Includes the first two steps only
        if there are no others."""
        return statistics.median(self._times), statistics.median(self._rates)


def step_fields(row: Mapping[str, float], total_steps: int, work: Work, eta: str) -> list[Field]:
    """Returns a step's fields for a terminal."""
    digits = len(str(total_steps))
    flops = si(work.flops_per_second(row["step_time"]), "FLOP/s") + ("/device" if work.devices > 1 else "")
    if (share := work.utilization(row["step_time"])) is not None:
        flops = f"MFU {share}"
    return [
        Field(f"{row['step']:>{digits}}/{total_steps}", style="dim"),
        Field(f"loss {row['loss']:.3f}", style="bold"),
        Field(f"lr {row['learning_rate']:.1e}", drop=5),
        Field(f"grad {row['grad_norm']:>#5.3g}", drop=4),
        *(Field(f"{word} {row[name]:>{form}}", drop=4) for name, (word, form) in _MEASURED.items() if name in row),
        *([Field(f"logit {row['max_logit']:>#5.3g}", drop=4)] if "max_logit" in row else []),
        *([Field(f"dropped {row['dropped_tokens']}", drop=4)] if "dropped_tokens" in row else []),
        Field(f"{si(row['tokens_per_second'], 'tok/s'):>11}", drop=2),
        Field(f"{flops:>12}", drop=6),
        Field(f"{short_time(row['step_time']):>6}", drop=3),
        Field(f"eta {eta}", drop=1),
    ]


def step_line(row: Mapping[str, float], total_steps: int, work: Work, eta: str) -> str:
    """Returns a step's line in MaxText's format, followed by additional fields."""
    step_time = row["step_time"]
    share, memory = work.utilization(step_time), row.get("memory")
    more = [
        *([f"MFU: {share}"] if share else []),
        *([f"memory: {si(memory, 'B')}"] if memory else []),
        f"data_wait: {row['data_wait']:.1%}",
        f"progress: {row['step'] + 1}/{total_steps}",
        f"eta: {eta}",
    ]
    measured = "".join(f"{name}: {row[name]:.3f}, " for name in _MEASURED if name in row)
    logits = f"max_logit: {row['max_logit']:.3f}, " if "max_logit" in row else ""
    dropped = f"dropped_tokens: {row['dropped_tokens']}, " if "dropped_tokens" in row else ""
    nats = row.get("lm_loss")
    cross_entropy = "" if nats is None else f"lm_loss: {nats:.3f}, perplexity: {perplexity(nats):.3f}, "
    return (
        f"completed step: {row['step']}, seconds: {step_time:.3f}, "
        f"TFLOP/s/device: {work.flops_per_second(step_time) / 1e12:.3f}, "
        f"Tokens/s/device: {work.tokens_per_second(step_time):.3f}, "
        f"total_weights: {int(row['tokens'])}, loss: {row['loss']:.3f}, "
        f"{cross_entropy}{measured}"
        f"grad_norm: {row['grad_norm']:.3f}, learning_rate: {row['learning_rate']:.3e}, "
        f"{logits}{dropped}{', '.join(more)}"
    )


def evaluation_fields(row: Mapping[str, float]) -> list[Field]:
    """Returns an evaluation's fields for a terminal."""
    fields = [
        Field(f"evaluation at step {row['step']}", style="green"),
        Field(f"loss {row['eval_loss']:.3f}", style="bold"),
    ]
    if "eval_perplexity" in row:
        fields.append(Field(f"perplexity {row['eval_perplexity']:.2f}", drop=1))
    for name, (word, form) in _MEASURED.items():
        if (value := row.get(f"eval_{name}")) is not None:
            fields.append(Field(f"{word} {value:{form}}", style="bold"))
    if "eval_bits_per_byte" in row:
        fields.append(Field(f"{row['eval_bits_per_byte']:.4f} bits per byte", style="bold"))
    return [
        *fields,
        Field(f"{int(row['eval_tokens']):,} tokens", drop=2),
        Field(short_time(row["eval_time"]), drop=3),
    ]


def evaluation_line(row: Mapping[str, float]) -> str:
    """Returns an evaluation's line in MaxText's format, followed by additional fields."""
    bits = f", bits_per_byte={row['eval_bits_per_byte']:.4f}" if "eval_bits_per_byte" in row else ""
    of_tokens = f"perplexity={row['eval_perplexity']:.3f}, " if "eval_perplexity" in row else ""
    of_tokens += "".join(f"{name}={row[f'eval_{name}']:.3f}, " for name in _MEASURED if f"eval_{name}" in row)
    return (
        f"Completed eval after train step {row['step']}, loss={row['eval_loss']:.3f}, "
        f"{of_tokens}total_weights={int(row['eval_tokens'])}"
        f"{bits}, seconds={row['eval_time']:.3f}"
    )

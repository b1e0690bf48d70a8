"""Progress output, for people and for programs that parse it."""

import math
import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from trainer.config.keys import Config
from trainer.config.words import counted, visible
from trainer.observe.banner import Needs, banner_rows, needs_rows
from trainer.observe.bar import BottomLine, bar
from trainer.observe.lines import (
    Pace,
    Work,
    evaluation_fields,
    evaluation_line,
    has_loss,
    last_measured,
    step_fields,
    step_line,
)
from trainer.observe.text import Field, clock, fit, rate, short_time

_MANY = 0.5  # warns if an update leaves at least this share of the parameters unchanged
LINES = 25  # the number of step lines that remain on a terminal
_STYLES = {"bold": "1", "dim": "2", "green": "32", "yellow": "33"}


class Console:
    """Writes a run's progress to `stream` (default: standard output) and flushes each line.

    On a terminal, a line contains as many fields as fit the width, in colour unless NO_COLOR is set. A bar at the
    bottom shows the newest step, and about LINES step lines remain above. With TERM=dumb there is no bar, and every
    step line remains. If `stream` is not a terminal, lines are complete, and lines of steps and evaluations have
    MaxText's format, so that programs that parse MaxText's log can parse this output.
    """

    def __init__(self, stream: TextIO | None = None, is_terminal: bool | None = None):
        self._stream = sys.stdout if stream is None else stream
        self._is_terminal = self._stream.isatty() if is_terminal is None else is_terminal
        moves = self._is_terminal and os.environ.get("TERM") != "dumb"
        self._colour = moves and not os.environ.get("NO_COLOR")
        self._bottom = BottomLine(self._stream) if moves else None
        self._pace = Pace()
        self._work: Work | None = None
        self._run_dir: Path | None = None
        self._first: Mapping[str, float] = {}
        self._last: Mapping[str, float] = {}
        self._skipped: dict[str, int] = {}  # the number of skipped updates by reason
        self._without_loss = 0
        self._warns_of_lost = True
        self._evaluated: Mapping[str, float] = {}

    def banner(self, config: Config, *, work: Work, run_dir: Path, warnings: Sequence[str] = (), **facts: Any) -> None:
        """Prints the summary of the run and each warning. Call it before the first `step`.

        `config`: resolved. `work`: the work of one step, from `work_of`. `facts`: the other arguments of `banner_rows`.
        """
        self._work, self._run_dir, self._peak = work, run_dir, config.learning_rate
        self._table(banner_rows(config, run_dir=run_dir, **facts))
        for warning in warnings:
            self._warn(warning)

    def needs(self, needs: Needs | None, steps_left: int) -> None:
        """Prints the rows of `needs_rows`. Call it after `banner`."""
        assert self._work is not None, "call banner first"
        self._table(needs_rows(self._work, needs, steps_left))

    def end_bar(self) -> None:
        """Removes the bar. Call it after the last step, even if the run fails."""
        if self._bottom is not None:
            self._bottom.end()

    def say(self, text: str) -> None:
        """Prints a line of text."""
        for line in self._wrapped(visible(text)):
            self._print(line)

    def step(self, row: Mapping[str, float], total_steps: int) -> None:
        """Prints a step's line. `row`: the step's row of metrics.jsonl. `total_steps`: the steps of the whole run."""
        assert self._work is not None, "call banner first"
        self._pace.add(row)
        self._first, self._last = self._first or row, row
        eta = self._pace.eta(total_steps - 1 - int(row["step"]))
        if self._is_terminal:
            self._dense_step(row, total_steps, step_fields(row, total_steps, self._work, eta))
        else:
            self._print(step_line(row, total_steps, self._work, eta))
        if not row["tokens"]:
            self._without_loss += 1
            if self._without_loss == 1:
                self._warn(f"step {row['step']}: no token in its batch contributes to the loss: its update is skipped")
        elif row["skipped"]:
            reason = _reason(row)
            self._skipped[reason] = self._skipped.get(reason, 0) + 1
            if self._skipped[reason] == 1:
                values = f"loss {row['loss']:.3g} and gradient norm {row['grad_norm']:.3g}"
                self._warn(f"step {row['step']} has {values}: its update is skipped ({reason})")
        elif row.get("lost_updates", 0) >= _MANY and row["learning_rate"] >= self._peak / 2 and self._warns_of_lost:
            # Without the condition on the learning rate, warm-up and decay would also cause warnings, although a low
            # learning rate is meant to change the parameters only a little.
            self._warns_of_lost = False
            self._warn(
                f"step {row['step']}: {row['lost_updates']:.0%} of the parameters did not change, because their update "
                "is below half the spacing of bfloat16 (lost_updates in metrics.jsonl): "
                "weight_stochastic_rounding=true lets such updates add up; weight_dtype=float32 keeps parameters in "
                "float32, and dtype=bfloat16 still computes in bfloat16"
            )

    def evaluation(self, row: Mapping[str, float]) -> None:
        """Prints an evaluation's line. `row`: the evaluation's row of metrics.jsonl."""
        self._evaluated = row
        if self._is_terminal:
            self._dense(evaluation_fields(row))
        else:
            self._print(evaluation_line(row))

    def summary(self, wall_time: float, files: Mapping[str, str] | None = None) -> None:
        """Prints a summary of this process's steps and evaluations, which took `wall_time` seconds. `files` maps
        labels to paths, which are also printed."""
        pace = self._pace
        steps = counted(pace.steps, "step")
        if self._first.get("step"):
            steps += f" ({self._first['step']} to {self._last['step']}, resumed)"
        rows = [("done", f"{steps}, {counted(pace.tokens, 'trained token')} in {clock(wall_time)}")]
        rows += [("skipped", f"{counted(count, 'update')}: {reason}") for reason, count in self._skipped.items()]
        if self._without_loss:
            rows.append(("skipped", f"{counted(self._without_loss, 'update')} whose batch had no token with a loss"))
        if pace.steps:
            step_time, tokens = pace.medians()
            rows += last_measured(self._last, self._evaluated).items()
            rows.append(("speed", f"{rate(tokens)}, {short_time(step_time)} per step (medians)"))
            if has_loss(self._last):
                rows.append(("last loss", f"{self._last['loss']:.4f}"))
        if self._evaluated and has_loss(self._last):
            text = f"loss {self._evaluated['eval_loss']:.4f}"
            if "eval_bits_per_byte" in self._evaluated:
                text += f", {self._evaluated['eval_bits_per_byte']:.4f} bits per byte"
            rows.append(("evaluation", text))
        if self._run_dir is not None:
            rows.append(("run", str(self._run_dir)))
        self._table([*rows, *(files or {}).items()])

    def sample(self, prompt: str, text: str) -> None:
        """Prints generated text between two delimiter lines. `text` begins with `prompt`."""
        prompt, text = visible(prompt), visible(text).rstrip("\n")
        self._print(self._styled(f"---- sample, continues {prompt!r} ----", "dim"))
        if text.startswith(prompt):
            text = self._styled(prompt, "bold") + text.removeprefix(prompt)
        self._print(text)
        self._print(self._styled("---- end of sample ----", "dim"))

    def _warn(self, text: str) -> None:
        for line in self._wrapped(visible(f"warning: {text}"), indent=" " * 9):
            self._print(self._styled(line, "yellow"))

    def _table(self, rows: Iterable[tuple[str, str]]) -> None:
        margin = 13
        for label, text in rows:
            first, *rest = self._wrapped(visible(f"{label:<{margin}}{text}"), indent=" " * margin)
            self._print(self._styled(first[:margin], "dim") + first[margin:])
            for line in rest:
                self._print(line)

    def _dense_step(self, row: Mapping[str, float], total_steps: int, fields: Sequence[Field]) -> None:
        done = int(row["step"]) + 1
        if done == total_steps:
            self.end_bar()
        if self._bottom is None or row is self._first or done == total_steps or not done % max(1, total_steps // LINES):
            self._dense(fields)
        if self._bottom is not None and done < total_steps:
            # One column less than the terminal's width, because a full line would start a new one.
            self._bottom.show(self._joined(fit([Field(bar(done, total_steps), drop=2), *fields], self._width() - 1)))

    def _dense(self, fields: Sequence[Field]) -> None:
        self._print(self._joined(fit(fields, self._width())))

    def _joined(self, fields: Sequence[Field]) -> str:
        return "  ".join(self._styled(text, style) for text, _, style in fields)

    def _wrapped(self, text: str, indent: str = "") -> list[str]:
        """Returns `text` wrapped to the terminal's width without breaking paths; one line if not on a terminal."""
        if not self._is_terminal:
            return [text]
        return textwrap.wrap(
            text, self._width(), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        ) or [""]

    def _width(self) -> int:
        return shutil.get_terminal_size().columns

    def _styled(self, text: str, style: str) -> str:
        return f"\x1b[{_STYLES[style]}m{text}\x1b[0m" if self._colour and style else text

    def _print(self, line: str) -> None:
        # A character that the stream cannot encode, for example in an ASCII log, must not end a run.
        encoding = self._stream.encoding or "utf-8"
        line = line.encode(encoding, "backslashreplace").decode(encoding)
        if self._bottom is None:
            print(line, file=self._stream, flush=True)
        else:
            self._bottom.above(line)


def _reason(row: Mapping[str, Any]) -> str:
    """Returns why the step of `row` was skipped."""
    words = {"loss": "loss", "grad_norm": "gradient norm"}
    if wrong := [word for name, word in words.items() if not math.isfinite(row[name])]:
        return f"{' and '.join(wrong)} not finite"
    if spikes := [word for name, word in words.items() if row.get(f"{name}_spike")]:
        return f"spike in {' and '.join(spikes)}"
    if any(math.isnan(loss) for loss in row.get("island_losses", ())):
        return "no token with a loss on an island"
    return "refused by an update rule"

"""Progress output, for people and for programs that parse it."""

import math
import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from trainer.config.words import counted
from trainer.observe.banner import banner_rows, work_of
from trainer.observe.lines import Pace, Work, evaluation_fields, evaluation_line, step_fields, step_line
from trainer.observe.text import Field, clock, fit, short_time, si, visible

_STYLES = {"bold": "1", "dim": "2", "green": "32", "yellow": "33"}


class Console:
    """Writes a run's progress to `stream` (standard output) and flushes each line.

    On a terminal, a line has the fields that fit its width, in colour unless NO_COLOR is set. Elsewhere lines are
    complete, and step and evaluation lines have MaxText's format, so that programs that parse MaxText's log can parse
    this one.
    """

    def __init__(self, stream: TextIO | None = None, is_terminal: bool | None = None):
        self._stream = sys.stdout if stream is None else stream
        self._is_terminal = self._stream.isatty() if is_terminal is None else is_terminal
        self._colour = self._is_terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self._pace = Pace()
        self._work: Work | None = None
        self._run_dir: Path | None = None
        self._first: Mapping[str, float] = {}
        self._last: Mapping[str, float] = {}
        self._skipped: dict[str, int] = {}  # updates by reason
        self._without_loss = 0
        self._evaluated: Mapping[str, float] = {}

    def banner(
        self,
        config: Any,
        *,
        device_kind: str,
        platform: str,
        process_count: int,
        parameters: int,
        flops_per_token: float,
        dataset: str,
        run_dir: Path,
        warnings: Sequence[str] = (),
    ) -> None:
        """Print the summary of the run and each warning. Call it before the first `step`.

        Args:
          config: resolved.
          device_kind, platform: of the mesh's devices, as JAX names them.
          parameters: how many the model has.
          flops_per_token: of one training step.
          dataset: one line on the data.
        """
        self._work, self._run_dir = work_of(config, flops_per_token), run_dir
        self._table(
            banner_rows(
                config,
                device_kind=device_kind,
                platform=platform,
                process_count=process_count,
                parameters=parameters,
                dataset=dataset,
                run_dir=run_dir,
            )
        )
        for warning in warnings:
            self._warn(warning)

    def say(self, text: str) -> None:
        """Print a line of text."""
        for line in self._wrapped(text):
            self._print(line)

    def step(self, row: Mapping[str, float], total_steps: int) -> None:
        """Print a step's line. `row` is as in metrics.jsonl; the run ends after `total_steps`."""
        assert self._work is not None, "call banner first"
        self._pace.add(row)
        self._first, self._last = self._first or row, row
        eta = self._pace.eta(total_steps - 1 - int(row["step"]))
        if self._is_terminal:
            self._dense(step_fields(row, total_steps, self._work, eta))
        else:
            self._print(step_line(row, self._work, eta))
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

    def evaluation(self, row: Mapping[str, float]) -> None:
        """Print an evaluation's line. `row` is as in metrics.jsonl."""
        self._evaluated = row
        if self._is_terminal:
            self._dense(evaluation_fields(row))
        else:
            self._print(evaluation_line(row))

    def summary(self, wall_time: float) -> None:
        """Print a summary of this process's steps and evaluations, after `wall_time` seconds."""
        pace = self._pace
        steps = counted(pace.steps, "step")
        if self._first.get("step"):
            steps += f" ({self._first['step']} to {self._last['step']}, resumed)"
        rows = [("done", f"{steps}, {counted(pace.tokens, 'token')} in {clock(wall_time)}")]
        rows += [("skipped", f"{counted(count, 'update')}: {reason}") for reason, count in self._skipped.items()]
        if self._without_loss:
            rows.append(("skipped", f"{counted(self._without_loss, 'update')} whose batch had no token with a loss"))
        if pace.steps:
            step_time, rate = pace.medians()
            rows.append(("speed", f"{si(rate, 'tok/s')}, {short_time(step_time)} per step (medians)"))
            rows.append(("last loss", f"{self._last['loss']:.4f}"))
        if self._evaluated:
            text = f"loss {self._evaluated['eval_loss']:.4f}"
            if "eval_bits_per_byte" in self._evaluated:
                text += f", {self._evaluated['eval_bits_per_byte']:.4f} bits per byte"
            rows.append(("evaluation", text))
        if self._run_dir is not None:
            rows.append(("run", str(self._run_dir)))
        self._table(rows)

    def sample(self, prompt: str, text: str) -> None:
        """Print text that the model generated between two delimiter lines; `text` begins with `prompt`."""
        prompt, text = visible(prompt), visible(text).rstrip("\n")
        self._print(self._styled(f"---- sample, continues {prompt!r} ----", "dim"))
        if text.startswith(prompt):
            text = self._styled(prompt, "bold") + text.removeprefix(prompt)
        self._print(text)
        self._print(self._styled("---- end of sample ----", "dim"))

    def _warn(self, text: str) -> None:
        for line in self._wrapped(f"warning: {text}", indent=" " * 9):
            self._print(self._styled(line, "yellow"))

    def _table(self, rows: Iterable[tuple[str, str]]) -> None:
        margin = 13
        for label, text in rows:
            first, *rest = self._wrapped(f"{label:<{margin}}{text}", indent=" " * margin)
            self._print(self._styled(first[:margin], "dim") + first[margin:])
            for line in rest:
                self._print(line)

    def _dense(self, fields: Sequence[Field]) -> None:
        self._print("  ".join(self._styled(text, style) for text, _, style in fit(fields, self._width())))

    def _wrapped(self, text: str, indent: str = "") -> list[str]:
        """`text` wrapped to the terminal's width without breaking paths; one line if the stream is not a terminal."""
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
        # A character that the stream cannot encode, such as in an ASCII log, must not end a run.
        encoding = self._stream.encoding or "utf-8"
        print(line.encode(encoding, "backslashreplace").decode(encoding), file=self._stream, flush=True)


def _reason(row: Mapping[str, Any]) -> str:
    """Why the step of `row` was skipped."""
    words = {"loss": "loss", "grad_norm": "gradient norm"}
    if wrong := [word for name, word in words.items() if not math.isfinite(row[name])]:
        return f"{' and '.join(wrong)} not finite"
    if spikes := [word for name, word in words.items() if row.get(f"{name}_spike")]:
        return f"spike in {' and '.join(spikes)}"
    if any(math.isnan(loss) for loss in row.get("island_losses", ())):
        return "no token with a loss on an island"
    return "refused by an update rule"

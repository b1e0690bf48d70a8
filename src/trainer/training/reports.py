"""The output of a run during training: the console, and metrics files, which only the first process writes."""

import contextlib
import datetime
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from trainer.aot.chips import chip_of
from trainer.config.capabilities.checkpoint_keys import best_of_tasks
from trainer.config.derived import has_rollouts
from trainer.config.flags import combination
from trainer.config.keys import Config
from trainer.objectives.distillation import PARAMS
from trainer.objectives.saved_logits import LOGITS, SavedTeacher
from trainer.observe.banner import devices_text, mesh_text, model_text, work_of
from trainer.observe.console import Console
from trainer.observe.events import EventsWriter
from trainer.observe.goodput import Timeline
from trainer.observe.lines import Work
from trainer.observe.metrics import METRICS_FILE, TASKS_FAILED, TASKS_TIME, MetricsWriter, TokensSeen, read_rows
from trainer.observe.metrics_file import MetricsFile, maxtext_row
from trainer.observe.profiler import Profiler
from trainer.observe.report_file import ReportFile
from trainer.observe.rundir import SAMPLES_FILE, RunDir
from trainer.observe.stragglers import Stragglers
from trainer.products.dequantized import parameter_count
from trainer.runtime.agreement import from_first, gather, gather_later, is_first
from trainer.runtime.supervision import ROLLOUTS
from trainer.state import table
from trainer.training.first_losses import FirstLosses
from trainer.training.loop import Reports
from trainer.training.run import Run
from trainer.training.start import Start


def run_work(run: Run) -> Work:
    """Returns the number of tokens and FLOPs of a step, with the devices' peak FLOP/s if known."""
    chip = chip_of(run.mesh.devices.flat[0].device_kind)
    return work_of(run.config, run.flops_per_token, chip.flops("bf16") if chip else None)


def teacher_text(run: Run) -> str:
    """Returns a description of the teacher of a run; "" if there is none."""
    teacher = getattr(run.objective, "teacher", None)
    if teacher is None:
        return ""
    if isinstance(teacher, SavedTeacher):
        return f"{teacher.saved[LOGITS].shape[-1]:,} of {teacher.vocab_size:,} logits; {run.config.teacher_logits_path}"
    parameters = parameter_count(teacher.frozen.abstract[PARAMS])
    return f"{model_text(teacher.config, parameters)}; {run.config.teacher_path}"


def start_entry(run: Run, begin: Start, sources: Mapping[str, str]) -> dict[str, Any]:
    """Returns the entry for this process in the run's starts.json.

    Args:
      begin: the initial state of this process.
      sources: the sources of the values of all keys; see `config.Loaded`.
    """
    device, shardings = run.mesh.devices.flat[0], run.table()
    return {
        "step": begin.updates,
        "time": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
        "devices": devices_text(run.config, device.device_kind, device.platform, jax.process_count()),
        "mesh": mesh_text(run.config),
        "combination": combination(run.config),
        "sources": {name: source for name, source in sources.items() if source != "default"},
        "sharding": {
            "columns": [column.replace("_", " ") for column in table.COLUMNS],
            "rows": table.cells(shardings["tensors"]),
            "totals": table.total_lines(shardings["totals"]),
        },
    }


def keep_sample(run_dir: RunDir, updates: int, prompt: str, text: str, say: Callable[[str], None]) -> None:
    """Appends a text sampled after `updates` updates to samples.jsonl, and rewrites the report."""
    if not is_first():
        return
    with MetricsWriter(run_dir.path, updates, SAMPLES_FILE) as samples:
        samples.write({"step": updates, "prompt": prompt, "text": text})
    ReportFile(run_dir.path, read_rows(run_dir.path / METRICS_FILE), say).write()
    run_dir.upload()


def metrics_files(config: Config, path: Path, name: str) -> list[MetricsFile]:
    """Returns the file that the key metrics_file names, as a list with one element; [] if the key is empty or this is
    not the first process.

    `path`, `name`: path and name of the run's folder. Raises UserError if the file is not writable.
    """
    found = []

    def check() -> None:
        if config.metrics_file:
            found.append(MetricsFile(config.metrics_file, path, name))

    from_first(check)
    return found


class _Files:
    """The files in which a run reports its steps. Only the first process opens them."""

    def __init__(self, run: Run, run_dir: RunDir, timeline: Timeline, say: Callable[[str], None]):
        self._config, self._work, self._run_dir, self._say = run.config, run_work(run), run_dir, say
        self._timeline = timeline
        self._metrics: MetricsWriter | None = None
        self._page: ReportFile | None = None
        self._with_maxtext_names: list[MetricsWriter | EventsWriter] = []

    def open(
        self, begin: Start, files: list[MetricsFile], stack: contextlib.ExitStack
    ) -> tuple[list[dict[str, Any]], bool, bool]:
        """Opens the files; `stack` closes them. Returns the result of `earlier_evaluations`."""
        updates, resumes = begin.updates, self._config.enable_checkpointing
        check = self._run_dir.check
        self._metrics = stack.enter_context(
            MetricsWriter(self._run_dir.path, updates, resumes=resumes, say=self._say, check=check)
        )
        self._page = ReportFile(self._run_dir.path, self._metrics.kept, self._say, self._timeline.goodput)
        stack.callback(self._write_page)  # even if the run fails
        for file in files:
            copy = file.open(updates, resumed=begin.resumed, resumes=resumes, say=self._say, check=check)
            self._with_maxtext_names.append(stack.enter_context(copy))
        if self._config.enable_tensorboard:
            events = EventsWriter(self._run_dir.path, updates, resumes=resumes, say=self._say, check=check)
            self._with_maxtext_names.append(stack.enter_context(events))
        return earlier_evaluations(self._metrics.kept, updates)

    def _write_page(self) -> None:
        if self._page and not (self._run_dir.lease and self._run_dir.lease.lost):
            self._page.write()

    @property
    def kept(self) -> Sequence[dict[str, Any]]:
        """The metrics rows of earlier processes of the run."""
        return self._metrics.kept if self._metrics else ()

    def write(self, row: Any) -> None:
        self._run_dir.check(look=False)
        if self._metrics and self._page:
            self._metrics.write(row)
            self._page.add(row)
        for writer in self._with_maxtext_names:
            clipped, name = self._config.gradient_clipping_threshold, self._run_dir.folder.name
            writer.write(maxtext_row(row, self._work, clipped, name))

    def sync(self) -> None:
        """Writes all rows to disk, and uploads them if the run's folder is in a bucket.

        Raises:
          UserError: see `RunDir.check`.
        """
        self._run_dir.check()
        if self._metrics and self._page:
            self._metrics.sync()
            self._page.refresh()
        for writer in self._with_maxtext_names:
            writer.sync()
        self._run_dir.upload()


def open_reports(
    run: Run,
    run_dir: RunDir,
    begin: Start,
    files: list[MetricsFile],
    console: Console,
    timeline: Timeline,
    stack: contextlib.ExitStack,
) -> Reports:
    """Returns the callbacks for `fit`. `stack` closes the output files; `files` are from `metrics_files`."""
    config = run.config
    stack.callback(console.end_bar)
    profiler = None
    if config.profiler:
        profiler = Profiler(config, run_dir.path, begin.updates, console.say, traces=is_first())
        stack.enter_context(profiler)
    written = _Files(run, run_dir, timeline, console.say)
    evaluations, unevaluated, untested = from_first(lambda: written.open(begin, files, stack))
    tokens = TokensSeen(written.kept)
    first = None if begin.resumed else FirstLosses(config, begin.updates, console.say)
    waits_for = ROLLOUTS if has_rollouts(config) else "data"

    def on_step(row: Any) -> None:
        timeline.step(row["step"] + 1, **{f"{waits_for}_wait": row["data_wait"] * row["step_time"]})
        if row["step"] + 1 == config.steps:
            timeline.end()
        written.write(tokens.add(row))
        console.step(row, config.steps)
        if first is not None:
            first.add(row["step"], row["loss"])
        if (row["step"] + 1) % config.log_period == 0:
            written.sync()

    def on_evaluation(row: Any) -> None:
        written.write(row)
        if TASKS_TIME not in row:
            console.evaluation(row)
        if warning := lacks_best(row, config):
            console.say(warning)

    def waiting(begins: bool) -> None:
        timeline.within(waits_for if begins else "")

    earlier, times = (evaluations, unevaluated, untested), _times(config, timeline, console.say)
    return Reports(on_step, on_evaluation, written.sync, *earlier, profiler, timeline.during, waiting, times)


def _times(
    config: Config, timeline: Timeline, say: Callable[[str], None]
) -> Callable[[int, float, float, float], None]:
    """Returns `Reports.times`, which detects stragglers; with a single process it does nothing."""
    hosts = gather(platform.node())
    if not hosts[1:]:
        return lambda *times: None
    return Stragglers(config.log_period, hosts, gather_later, say, timeline.add).add


def lacks_best(row: Mapping[str, Any], config: Config) -> str | None:
    """Returns a warning if the evaluation `row` should contain the metric of keep_best_metric but does not."""
    name, by_tasks = config.keep_best_metric.partition(":")[2], TASKS_TIME in row
    if not config.keep_best_checkpoints or name in row or by_tasks != best_of_tasks(config) or row.get(TASKS_FAILED):
        return None
    fields = [name for name in row if "/" in name or name.startswith("eval_")]
    there = ", ".join(name for name in fields if not name.endswith(("_stderr", "/samples", "_time", TASKS_FAILED)))
    return f"warning: keep_best_metric={config.keep_best_metric}: the evaluation has only {there}"


def earlier_evaluations(rows: Sequence[Mapping[str, Any]], updates: int) -> tuple[list[dict[str, Any]], bool, bool]:
    """Returns the fields `evaluations`, `unevaluated` and `untested` of `Reports` for a run that continues after
    `updates` updates.

    `rows`: the rows of the run's metrics.jsonl. If `updates` is 0, `unevaluated` and `untested` are False, because no
    run evaluates its initial state.
    """
    evaluations = [dict(row) for row in rows if isinstance(row.get("eval_loss"), float) or TASKS_TIME in row]
    newest = [row for row in rows if row["step"] == updates - 1]

    def lacks(field: str) -> bool:
        return bool(newest) and not any(field in row for row in newest)

    return evaluations, lacks("eval_loss"), lacks(TASKS_TIME)

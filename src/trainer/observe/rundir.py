"""The folder of a run: base_output_directory/run_name."""

import contextlib
import itertools
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

from trainer.config.errors import UserError
from trainer.config.words import counted
from trainer.observe.events import EVENTS_FILE
from trainer.observe.goodput import GOODPUT_FILE
from trainer.observe.metrics import METRICS_FILE, read_rows
from trainer.observe.profiler import TRACES
from trainer.observe.starts import STARTS_FILE, with_start
from trainer.runtime.agreement import from_first
from trainer.runtime.folders import replace_file, unfinished
from trainer.runtime.lease import LEASE_FILE, Lease
from trainer.runtime.lock import LOCK_FILE
from trainer.runtime.storage import entries, files_below, is_remote, remedy

CONFIG_FILE, REPORT_FILE, FINISHED_FILE, CHECKPOINTS = "config.yml", "report.html", "finished", "checkpoints"
SAMPLES_FILE = "samples.jsonl"  # one row per sample, with the step, the prompt and the text
ROLLOUTS = "rollouts"  # the folder of the files that `observe.rollouts` writes
EVALUATIONS = "evaluations"  # the folder of task evaluations, with one subfolder per evaluation
_FILES = (CONFIG_FILE, STARTS_FILE, METRICS_FILE, GOODPUT_FILE, EVENTS_FILE, SAMPLES_FILE, REPORT_FILE, FINISHED_FILE)
_GROWING = (EVENTS_FILE, GOODPUT_FILE)  # files to which a later run in this folder would append
OWN_FILES = (*_FILES, LOCK_FILE, LEASE_FILE)  # the files that a run writes into its folder, other than checkpoints
STARTS_OVER = "{} has no checkpoint yet: starting over"


class RunDir(NamedTuple):
    """A run's folder, owned exclusively while `lease` is open. As a context manager, it closes the lease on exit.

    If several processes train together, process 0 has the lease for all processes and writes all files.

    Attributes:
      path: the local folder where files are written.
      remote: the run's folder in a bucket, to which the files are copied; None for a local run.
    """

    path: Path
    lease: Lease | None
    remote: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Releases the lease."""
        if self.lease is not None:
            self.lease.close()

    def check(self, look: bool = True) -> None:
        """Raises UserError if another process has taken over this run; see `Lease.check`."""
        if self.lease is not None:
            self.lease.check(look)

    @property
    def folder(self) -> Any:
        """The run's folder in the configured base_output_directory, which contains the checkpoints: `remote` for a run
        in a bucket, otherwise `path`."""
        return self.path if self.remote is None else self.remote

    def upload(self) -> None:
        """Copies this process's files to the bucket, if the run is in one.

        Raises:
          UserError: copying fails; or another process has taken over this run (also checked for a local run).
        """
        self.check()
        if self.remote is not None and self.lease is not None:
            with remote_errors(self.remote):
                for name in _FILES:
                    if (self.path / name).exists():
                        (self.remote / name).parent.mkdir(parents=True, exist_ok=True)
                        (self.remote / name).write_bytes((self.path / name).read_bytes())
                for below in (TRACES, ROLLOUTS, EVALUATIONS):  # large files that are written once
                    for name in files_below(self.path / below):
                        copy = self.remote / below / name
                        if not copy.exists():
                            copy.parent.mkdir(parents=True, exist_ok=True)
                            copy.write_bytes((self.path / below / name).read_bytes())

    def download(self) -> Self:
        """Replaces the local files with those in the bucket, if the run is in one."""
        if self.remote is not None:
            for name in _FILES:
                if (self.remote / name).exists():
                    (self.path / name).parent.mkdir(exist_ok=True)
                    (self.path / name).write_bytes((self.remote / name).read_bytes())
                else:
                    (self.path / name).unlink(missing_ok=True)
        return self

    @property
    def finished(self) -> bool:
        """Whether an earlier process finished this run."""
        return from_first((self.path / FINISHED_FILE).exists)

    def begin(self, config_yml: str, start: Mapping[str, Any], *, resumed: bool, say: Callable[[str], None]) -> None:
        """Writes config.yml, adds `start` to starts.json and marks the run as unfinished.

        A run that does not resume from a checkpoint may find the metrics of an earlier run. If this run or the earlier
        run has checkpoints disabled, the earlier run's files are renamed. Otherwise the earlier run ended before its
        first checkpoint, and its metrics are overwritten.

        Args:
          config_yml: the resolved configuration.
          start: this process's entry in starts.json (see `training.reports.start_entry`). Its field `step` is the
            process's first step.
          resumed: whether the run resumes from one of its own checkpoints.
          say: called with a line if an earlier run's metrics are renamed or overwritten, or if rows of earlier steps
            are missing.

        Raises:
          UserError: existing metrics belong to a finished run whose checkpoints are gone; the disk is full; or another
            process has taken over this run.
        """
        from_first(lambda: self._begin(config_yml, start, resumed, say))

    def _begin(self, config_yml: str, start: Mapping[str, Any], resumed: bool, say: Callable[[str], None]) -> None:
        self.check()
        config = self.path / CONFIG_FILE
        with writing(config):
            for path in unfinished(self.path):
                path.unlink(missing_ok=True)
            if not resumed:
                if (self.path / METRICS_FILE).exists():
                    self._keep_earlier(config_yml, say)
                (self.path / SAMPLES_FILE).unlink(missing_ok=True)
            check_rows(self.path, self.folder, start["step"], say)
            starts = with_start(self.path / STARTS_FILE, start, resumed=resumed)
            (self.path / FINISHED_FILE).unlink(missing_ok=True)
            replace_file(self.path / STARTS_FILE, starts)
            replace_file(config, config_yml)
        if self.remote is not None:
            with remote_errors(self.remote):
                (self.remote / FINISHED_FILE).unlink(missing_ok=True)
                if not resumed:
                    (self.remote / SAMPLES_FILE).unlink(missing_ok=True)
            self.upload()

    def _keep_earlier(self, config_yml: str, say: Callable[[str], None]) -> None:
        """Renames the files of an earlier run, or reports that this run starts over."""
        if keeps_earlier(self.path, self.folder, config_yml):
            self._rename_earlier(say)
        else:
            say(STARTS_OVER.format(self.folder))

    def _rename_earlier(self, say: Callable[[str], None]) -> None:
        """Adds the next free number to the names of an earlier run's files, except its report."""
        taken = {path.name for path in entries(self.folder)}
        others = (CONFIG_FILE, EVENTS_FILE, STARTS_FILE, SAMPLES_FILE, GOODPUT_FILE)
        kept = [METRICS_FILE, *(name for name in others if (self.path / name).is_file())]
        number = next(
            n for n in itertools.count(1) if taken.isdisjoint(Path(_numbered_file(name, n)).parts[0] for name in kept)
        )
        # The metrics are renamed last, so that after an interruption the next process repeats the whole procedure.
        if self.remote is not None:
            for name in kept:
                copy = self.remote / _numbered_file(name, number)
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_bytes((self.path / name).read_bytes())
            for name in (METRICS_FILE, *_GROWING):
                (self.remote / name).unlink(missing_ok=True)
        for name in kept[1:]:
            (self.path / _numbered_file(name, number)).parent.mkdir(exist_ok=True)
            shutil.copyfile(self.path / name, self.path / _numbered_file(name, number))
        for name in _GROWING:
            (self.path / name).unlink(missing_ok=True)
        (self.path / METRICS_FILE).rename(self.path / _numbered_file(METRICS_FILE, number))
        *names, last = (_numbered_file(name, number) for name in kept)
        names_text = f"{', '.join(names)} and {last}" if names else last
        say(f"{self.folder} holds an earlier run without checkpoints: its files are kept as {names_text}")

    def finish(self) -> None:
        """Marks the run as finished, so that an empty run_name does not resume it."""
        from_first(self._finish)
        self.upload()

    def _finish(self) -> None:
        self.check()
        with writing(self.path / FINISHED_FILE):
            (self.path / FINISHED_FILE).touch()


def check_rows(path: Any, run_folder: Any, step: int, say: Callable[[str], None]) -> None:
    """Reports how many rows are missing in the metrics of a run that resumes at `step`.

    Args:
      path, run_folder: see `keeps_earlier`.

    Raises:
      UserError: the metrics or the samples are damaged.
    """
    metrics, samples = path / METRICS_FILE, path / SAMPLES_FILE
    rows = read_rows(metrics) if metrics.exists() else []
    if samples.exists():
        read_rows(samples)
    if missing := step - len({row["step"] for row in rows if "loss" in row and row["step"] < step}):
        what = "lacks" if metrics.exists() else "is missing, and with it"
        say(f"{run_folder / METRICS_FILE} {what} the rows of {counted(missing, 'earlier step')}")


def keeps_earlier(path: Any, run_folder: Any, config_yml: str) -> bool:
    """Returns whether a new run must rename existing metrics. If not, it may overwrite them.

    Args:
      path: the folder with an earlier process's metrics.
      run_folder: the same folder, as messages name it.
      config_yml: the configuration of the new run.

    Raises:
      UserError: the metrics belong to a finished run whose checkpoints are gone.
    """
    config = path / CONFIG_FILE
    earlier = config.read_bytes().decode("utf-8", "replace") if config.is_file() else ""
    if _without_checkpoints(earlier) or _without_checkpoints(config_yml):
        return True
    if (path / FINISHED_FILE).exists():
        raise UserError(
            f"{run_folder} holds the metrics of a finished run whose checkpoints are gone; choose another "
            "run_name, or remove the folder"
        )
    return False


@contextlib.contextmanager
def remote_errors(path: Any) -> Iterator[None]:
    """Turns an OSError into a UserError if `path` is in a bucket. Other errors pass through."""
    try:
        yield
    except OSError as error:
        if not is_remote(path):
            raise
        raise UserError(f"{path}: the bucket cannot be read or written: {error}") from error


@contextlib.contextmanager
def writing(file: Path) -> Iterator[None]:
    """Turns an OSError from writing `file` into a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write {file}: {error.strerror or error}; {remedy(error.errno)}") from error


def _without_checkpoints(config_yml: str) -> bool:
    return "enable_checkpointing: false" in config_yml.splitlines()


def _numbered_file(name: str, number: int) -> str:
    first, slash, rest = name.partition("/")
    if slash:  # the number is added to the subfolder, which TensorBoard shows as a run
        return f"{first}-{number}/{rest}"
    stem, _, ending = name.rpartition(".")
    return f"{stem}-{number}.{ending}"

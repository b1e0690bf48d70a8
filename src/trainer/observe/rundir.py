"""The folder of a run: base_output_directory/run_name."""

import contextlib
import itertools
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple, Self

from trainer.config import UserError
from trainer.observe.events import EVENTS_FILE
from trainer.observe.metrics import METRICS_FILE
from trainer.observe.profiler import TRACES
from trainer.runtime.agreement import agreed, from_first
from trainer.runtime.lock import LOCK_FILE, lock
from trainer.runtime.storage import entries, files_below, folder, is_remote, mirror, remedy

CONFIG_FILE, REPORT_FILE, FINISHED_FILE, CHECKPOINTS = "config.yml", "report.html", "finished", "checkpoints"
_FILES = (CONFIG_FILE, METRICS_FILE, EVENTS_FILE, REPORT_FILE, FINISHED_FILE)
OWN_FILES = (*_FILES, LOCK_FILE)  # what a run writes into its folder, apart from checkpoints
_NUMBERED = re.compile(r"run-(\d+)")


class RunDir(NamedTuple):
    """A run's folder, owned exclusively while `lock` is open; a context manager that closes it.

    When several processes train together, process 0 holds the lock for all of them and writes all files.

    Attributes:
      path: where files are written.
      remote: the run's folder in a bucket, to which the files are copied; None for a local run.
    """

    path: Path
    lock: IO[str] | None
    remote: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Releases the lock."""
        if self.lock is not None:
            self.lock.close()

    @property
    def place(self) -> Any:
        """The run's folder as the user knows it, with its checkpoints: in the bucket if there is one."""
        return self.path if self.remote is None else self.remote

    def upload(self) -> None:
        """Copies what this process wrote to the bucket, for a run in a bucket. Raises UserError if that fails."""
        if self.remote is not None and self.lock is not None:
            with _remote_errors(self.remote):
                for name in _FILES:
                    if (self.path / name).exists():
                        (self.remote / name).parent.mkdir(parents=True, exist_ok=True)
                        (self.remote / name).write_bytes((self.path / name).read_bytes())
                for name in files_below(self.path / TRACES):  # they are large, and written once
                    copy = self.remote / TRACES / name
                    if not copy.exists():
                        copy.parent.mkdir(parents=True, exist_ok=True)
                        copy.write_bytes((self.path / TRACES / name).read_bytes())

    def _download(self) -> Self:
        """Replaces the local files by those in the bucket."""
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

    def begin(self, config_yml: str, *, resumed: bool, say: Callable[[str], None]) -> None:
        """Writes config.yml and marks the run as unfinished.

        Existing metrics of a run without checkpoints are kept under a numbered name. Metrics of a run that ended before
        its first checkpoint are written again.

        Args:
          config_yml: the resolved configuration.
          resumed: the run resumes from one of its own checkpoints.
          say: receives a line about existing metrics that no checkpoint covers.

        Raises:
          UserError: existing metrics are of a finished run whose checkpoints are gone; or the disk is full.
        """
        from_first(lambda: self._begin(config_yml, resumed, say))

    def _begin(self, config_yml: str, resumed: bool, say: Callable[[str], None]) -> None:
        config = self.path / CONFIG_FILE
        with _writing(config):
            if not (self.path / METRICS_FILE).exists():
                if resumed:
                    say(f"{self.place / METRICS_FILE} is gone: the rows of earlier steps are missing in the new one")
            elif not resumed:
                self._keep_earlier(config_yml, say)
            temporary = self.path / f"{CONFIG_FILE}.tmp"
            (self.path / FINISHED_FILE).unlink(missing_ok=True)
            temporary.write_text(config_yml, encoding="utf-8")
            temporary.replace(config)
        if self.remote is not None:
            with _remote_errors(self.remote):
                (self.remote / FINISHED_FILE).unlink(missing_ok=True)
            self.upload()

    def _keep_earlier(self, config_yml: str, say: Callable[[str], None]) -> None:
        """Keeps the metrics of an earlier run, unless this run will write them again."""
        config = self.path / CONFIG_FILE
        earlier = config.read_bytes().decode("utf-8", "replace") if config.is_file() else ""
        if _without_checkpoints(earlier) or _without_checkpoints(config_yml):
            self._rename_earlier(say)
        elif (self.path / FINISHED_FILE).exists():
            raise UserError(
                f"{self.place} holds the metrics of a finished run whose checkpoints are gone; choose another "
                "run_name, or remove the folder"
            )
        else:
            say(f"{self.place} has no checkpoint yet: starting over")

    def _rename_earlier(self, say: Callable[[str], None]) -> None:
        """Keeps metrics.jsonl, config.yml and TensorBoard's events of an earlier run under the next free number."""
        taken = {path.name for path in entries(self.place)}
        kept = [METRICS_FILE, *(name for name in (CONFIG_FILE, EVENTS_FILE) if (self.path / name).is_file())]
        number = next(
            n for n in itertools.count(1) if taken.isdisjoint(Path(_numbered_file(name, n)).parts[0] for name in kept)
        )
        # The metrics are renamed last: until then, a restarted process repeats all of this.
        if self.remote is not None:
            for name in kept:
                copy = self.remote / _numbered_file(name, number)
                copy.parent.mkdir(parents=True, exist_ok=True)
                copy.write_bytes((self.path / name).read_bytes())
            for name in (METRICS_FILE, EVENTS_FILE):
                (self.remote / name).unlink(missing_ok=True)
        for name in kept[1:]:
            (self.path / _numbered_file(name, number)).parent.mkdir(exist_ok=True)
            shutil.copyfile(self.path / name, self.path / _numbered_file(name, number))
        (self.path / EVENTS_FILE).unlink(missing_ok=True)
        (self.path / METRICS_FILE).rename(self.path / _numbered_file(METRICS_FILE, number))
        names = " and ".join(_numbered_file(name, number) for name in kept)
        say(f"{self.place} holds an earlier run without checkpoints: its files are kept as {names}")

    def finish(self) -> None:
        """Marks the run as finished: an empty run_name does not resume it."""
        from_first(self._finish)
        self.upload()

    def _finish(self) -> None:
        with _writing(self.path / FINISHED_FILE):
            (self.path / FINISHED_FILE).touch()


def open_run(
    base_output_directory: str, run_name: str, config_yml: str, resumes: bool, say: Callable[[str], None]
) -> RunDir:
    """Choose the run's folder, create it if it is new, and lock it. Process 0 does so for all processes.

    A given name means base_output_directory/run_name; parent folders are created too. An empty `run_name` resumes the
    newest numbered run (run-0001, run-0002, ...) that has `config_yml` as its config.yml, is unfinished and is not
    locked by a live process; otherwise it takes the next number. `say` receives a line if it resumes one.

    Args:
      config_yml: the resolved configuration, as it is to be written.
      resumes: runs save checkpoints that they can resume from. If not, an empty name always takes the next number, and
        a name whose folder holds checkpoints is refused.

    Raises:
      UserError: the folder cannot be created or written, the name is outside `base_output_directory`, a live process
        has locked the run, or it cannot be resumed.
    """
    opened: list[RunDir] = []

    def choose() -> list[str]:
        opened.append(_open(base_output_directory, run_name, config_yml, resumes, say))
        path, place = str(opened[0].path.absolute()), str(opened[0].place)
        return [path, place if is_remote(opened[0].place) else path]

    path, place = from_first(choose)

    def check_shared() -> None:
        if place == path and not Path(path, LOCK_FILE).exists():
            raise UserError(
                f"process 0 created {path}, but this process cannot see it: base_output_directory must be a folder "
                "that all processes share, or a bucket"
            )

    agreed(check_shared)
    return opened[0] if opened else RunDir(Path(path), None, None if place == path else folder(place))


def expected_run(base_output_directory: str, run_name: str, config_yml: str, resumes: bool) -> Any:
    """The folder that `open_run` would choose with the same arguments, if no other process runs in one of them. Nothing
    is created or locked.

    Raises:
      UserError: the name is outside `base_output_directory`, or the run in it cannot be resumed.
    """
    base = folder(base_output_directory)
    if run_name:
        return _place_of(base, run_name, resumes)
    numbers = sorted(_numbers(base), reverse=True)
    fitting = (path for _, path in numbers if resumes and _fits(path, config_yml))
    return next(fitting, base / _name(numbers[0][0] + 1 if numbers else 1))


def _open(
    base_output_directory: str, run_name: str, config_yml: str, resumes: bool, say: Callable[[str], None]
) -> RunDir:
    base = folder(base_output_directory)
    try:
        with _remote_errors(base):
            if not is_remote(base):
                base.mkdir(parents=True, exist_ok=True)
            if run_name:
                return _named(base, run_name, resumes)
            return (resumes and _unfinished(base, config_yml, say)) or _numbered(base)
    except OSError as error:
        raise _unwritable(base_output_directory, error.strerror or str(error)) from error


def _locked(path: Any) -> RunDir | None:
    """The locked run of the folder `path`; None if a live process holds the lock."""
    if not is_remote(path):
        held = lock(path)
        return None if held is None else RunDir(path, held)
    local = mirror(path)
    local.mkdir(parents=True, exist_ok=True)
    held = lock(local)
    return None if held is None else RunDir(local, held, path)._download()


def _unfinished(base: Any, config_yml: str, say: Callable[[str], None]) -> RunDir | None:
    for _, path in sorted(_numbers(base), reverse=True):
        # Checked before locking, so as not to lock out a run's own process, and again once it is locked.
        if _fits(path, config_yml) and (run := _locked(path)):
            if _fits(path, config_yml):
                if (path / CONFIG_FILE).exists():
                    say(f"{path} has this configuration and is unfinished: resuming it")
                return run
            run.close()
    return None


def _fits(path: Any, config_yml: str) -> bool:
    """Whether a numbered run is unfinished and has this configuration, or ended before it wrote anything."""
    config = path / CONFIG_FILE
    if config.is_file():
        return config.read_bytes().decode("utf-8", "replace") == config_yml and not (path / FINISHED_FILE).exists()
    return path.is_dir() and not (path / METRICS_FILE).exists()


def _numbers(base: Any) -> list[tuple[int, Any]]:
    return [(int(match[1]), path) for path in entries(base) if (match := _NUMBERED.fullmatch(path.name))]


def _numbered(base: Any) -> RunDir:
    number = max((number for number, _ in _numbers(base)), default=0) + 1
    while True:
        path = base / _name(number)
        # If two processes race for a number, the loser finds the folder or its lock taken.
        with contextlib.suppress(FileExistsError):
            if not is_remote(path):
                path.mkdir()
            if run := _locked(path):
                return run
        number += 1


def _name(number: int) -> str:
    return f"run-{number:04}"


def _place_of(base: Any, run_name: str, resumes: bool) -> Any:
    """The folder of the run `run_name`; raises UserError if it may not be used."""
    path = base / run_name
    if os.path.isabs(run_name) or os.path.normpath(run_name).split(os.sep)[0] in (".", ".."):
        raise UserError(
            f"run_name={run_name} is not a folder within base_output_directory; give a name, or leave it empty"
        )
    if not resumes and any(entry.name.isdecimal() for entry in entries(path / CHECKPOINTS)):
        free = next(name for n in itertools.count(2) if not (base / (name := f"{run_name}-{n}")).exists())
        raise UserError(
            f"run_name={run_name}: {path} holds a run with checkpoints, and enable_checkpointing=false cannot resume "
            f"it; choose another name or leave it empty for the next free number; nearest: {free}"
        )
    return path


def _named(base: Any, run_name: str, resumes: bool) -> RunDir:
    path = _place_of(base, run_name, resumes)
    if not is_remote(path):
        path.mkdir(parents=True, exist_ok=True)
    run = _locked(path)
    if run is None:
        raise UserError(
            f"run_name={run_name}: another process is running in {path}; wait for it, or choose another name"
        )
    return run


@contextlib.contextmanager
def _remote_errors(path: Any) -> Iterator[None]:
    """Turns an OSError of a bucket into a UserError; other errors pass through."""
    try:
        yield
    except OSError as error:
        if not is_remote(path):
            raise
        raise UserError(f"{path}: the bucket cannot be read or written: {error}") from error


@contextlib.contextmanager
def _writing(file: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write {file}: {error.strerror or error}; {remedy(error.errno)}") from error


def _without_checkpoints(config_yml: str) -> bool:
    return "enable_checkpointing: false" in config_yml.splitlines()


def _numbered_file(name: str, number: int) -> str:
    first, slash, rest = name.partition("/")
    if slash:  # TensorBoard shows each folder as a run of its own.
        return f"{first}-{number}/{rest}"
    stem, _, ending = name.rpartition(".")
    return f"{stem}-{number}.{ending}"


def _unwritable(base_output_directory: str, why: str) -> UserError:
    return UserError(
        f"base_output_directory={base_output_directory}: cannot write there ({why}); choose a writable folder"
    )

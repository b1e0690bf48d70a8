"""The checkpoints of one run. Orbax writes checkpoints in the background, and commits each one completely or not at
all.

checkpoints/N contains the train state after N updates in canonical form, which is the same for NNX and Linen:
- state/: {params, opt_state, step, rest}, with optax's structure in opt_state;
- run/: the sidecar metadata (see `Sidecar`) and the metrics for retention;
- sums.json: checksums.

A save is committed by renaming its temporary folder to N, and a deletion begins by renaming N. So every folder
named N is a committed checkpoint. Folders in a bucket cannot be renamed. There, the file commit_success.txt marks a
committed checkpoint: it is written last and deleted first.
"""

import concurrent.futures
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self, TypeVar

import jax
from orbax.checkpoint import multihost
from orbax.checkpoint import v1 as ocp

from trainer.backends.base import TrainTree
from trainer.checkpoint.compare import check_structure
from trainer.checkpoint.disk import (
    EXPIRED,
    check_writable,
    disk_errors,
    forget_failures,
    identity,
    logged_failure,
    moved,
    read_errors,
    silence_orbax,
)
from trainer.checkpoint.retention import expired, standing
from trainer.checkpoint.sidecar import METRICS, Sidecar, SidecarFiles, read_sidecar
from trainer.checkpoint.sums import damaged, read_part, verify, write_sums
from trainer.config.errors import UserError
from trainer.config.keys import Config
from trainer.leaves.orbax import ITEMS
from trainer.observe.rundir import CHECKPOINTS
from trainer.runtime.agreement import agreed, from_first, is_first
from trainer.runtime.folders import check_folder
from trainer.runtime.storage import COMMITTED, absolute, entries, is_remote, remove_tree

T = TypeVar("T", bound=Any)  # a canonical train state, a NamedTuple

_UNCOMMITTED = ".orbax-checkpoint-tmp"
STATE, RUN = "state", "run"
_POLL = 0.2  # seconds
_PATIENCE = 1200  # seconds to wait for another process's part of a save; the same as in Orbax


class CheckpointManager:
    """Saves and lists the checkpoints of a run. As a context manager, it waits for the last save on exit."""

    def __init__(
        self, run_dir: Any, config: Config, say: Callable[[str], None], check: Callable[[], None] = lambda: None
    ):
        """Opens run_dir/checkpoints and removes uncommitted saves. Reports each removal to `say`.

        Args:
          run_dir: the run's folder, on this machine or in a bucket.
          check: called in the first process just before a save is committed. If `check` raises an error, the save fails
            with this error and is not committed.
        """
        self.directory = run_dir / CHECKPOINTS
        self._config = config
        agreed(lambda: check_writable(self.directory, jax.process_index()))
        self._identity = identity(self.directory)
        self._losses: dict[int, float | None] = {int(name): loss for name, loss in from_first(lambda: self._found(say))}
        with disk_errors(self.directory):
            self._orbax = ocp.training.Checkpointer(
                absolute(self.directory),
                context=_context(lambda: self._before_commit()),  # a lambda, because a method would be deep-copied
                preservation_policy=ocp.training.preservation_policies.PreserveAll(),
            )
        self._say, self._check = say, check
        self._saving: Any = None  # the folder of the latest save
        self._thread = ThreadPoolExecutor(1, "checkpoints")
        self._ending: Future[None] | None = None  # is done when the latest save has ended
        self._lost = False  # whether to stop waiting for a save, because it failed or was interrupted in this process

    @property
    def latest(self) -> int | None:
        """The number of updates in the newest checkpoint. Its save may still be in progress."""
        return max(self._losses, default=None)

    def path(self, updates: int) -> Any:
        """Returns the folder of the checkpoint after `updates` updates."""
        return self.directory / str(updates)

    def evaluated(self, updates: int, metrics: Mapping[str, Any]) -> None:
        """Records a checkpoint's evaluation metrics for retention, if the checkpoint was saved without them."""
        found = standing(metrics, self._config)
        if self._losses.get(updates, found) is None and found is not None:
            self._losses[updates] = found

    def save(self, updates: int, tree: Any, sidecar: Sidecar, metrics: Mapping[str, float]) -> None:
        """Starts to save `tree`, a canonical train state. Copies the state before returning, so that a step may donate
        it.

        Raises:
          UserError: this checkpoint or the previous one could not be written. Committed checkpoints are intact.
        """
        contents = {STATE: tree._asdict(), RUN: SidecarFiles(sidecar, metrics)}
        self.wait()
        if self._identity is not None and not self.directory.exists():
            raise moved(self.directory)  # without this check, Orbax would create the folder again
        forget_failures()
        self._saving = _being_saved(self.path(updates))
        with disk_errors(self.directory, self._identity):
            saving = self._orbax.save_checkpointables_async(updates, contents, force=True)
        self._losses[updates] = standing(metrics, self._config)
        self._ending = self._thread.submit(self._end, saving, updates)
        if not self._config.async_checkpointing:
            self.wait()

    def wait(self) -> None:
        """Returns when the last save is committed and expired checkpoints are deleted. Raises the errors of `save`."""
        ending = self._ending
        if ending is None or self._lost:
            return
        with disk_errors(self.directory, self._identity):
            try:
                self._watch(ending)
                ending.result()
            except Exception:
                self._lost = jax.process_count() > 1  # Orbax would wait for processes that wait for this one
                raise
            finally:
                if ending.done():  # not done if Ctrl-C interrupted the wait; `close` then waits again
                    self._ending = None

    def close(self) -> None:
        """Waits like `wait`, and closes the manager."""
        with disk_errors(self.directory, self._identity):
            try:
                self.wait()
            except KeyboardInterrupt:
                self._lost = True
                raise
            finally:
                self._thread.shutdown(wait=not self._lost)
                if not self._lost:
                    self._orbax.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is KeyboardInterrupt and self._ending is not None and not self._ending.done():
            self._say(
                f"interrupted: waiting for the checkpoint of update {self.latest}, which is being written; Ctrl-C "
                "again ends without it"
            )
        self.close()

    def _watch(self, ending: Future[None]) -> None:
        """If there are several processes, waits until a save ends. If the save fails in this process, raises the error
        immediately instead."""
        while jax.process_count() > 1 and concurrent.futures.wait([ending], _POLL).not_done:
            if error := logged_failure():
                raise error

    def _before_commit(self) -> None:
        _sum(self._saving)
        self._check()

    def _end(self, saving: Any, updates: int) -> None:
        """Waits for a save, then deletes expired checkpoints.

        Orbax is not used to delete checkpoints, because it deletes files in place: if the process were killed during
        the deletion, the folder would look like a damaged checkpoint.
        """
        if not is_first():
            try:
                _sum(self._saving)
            except jax.errors.JaxRuntimeError:  # raised by a barrier that the first process skips if a save fails
                saving.result()
                raise
        saving.result()
        for updates in expired(self._losses, self._config):
            del self._losses[updates]
            path = self.path(updates)
            if not is_first():
                continue
            if is_remote(path):
                (path / COMMITTED).unlink()
                remove_tree(path)
            else:
                remove_tree(path.rename(path.with_suffix(EXPIRED)))

    def _found(self, say: Callable[[str], None]) -> list[tuple[str, float | None]]:
        """Returns the name and the `standing` (see `retention`) of each committed checkpoint. Removes remnants of
        uncommitted saves and of deletions."""
        with read_errors(self.directory):
            found = committed(self.directory)
            for path in reversed(found):
                refuse_maxtexts(path)
        with disk_errors(self.directory):
            self._tidy(say)
        return [(path.name, self._loss(path)) for path in found]

    def _tidy(self, say: Callable[[str], None]) -> None:
        for path in entries(self.directory):
            if path.name.endswith(EXPIRED):
                remove_tree(path)
        for path in _uncommitted(self.directory):
            remove_tree(path)
            say(f"{path} was never committed: removed")

    def _loss(self, path: Any) -> float | None:
        """Returns the `standing` (see `retention`) of a checkpoint; None if it is unknown or not needed."""
        if not self._config.keep_best_checkpoints:
            return None
        try:
            return standing(read_part(path / RUN, METRICS), self._config)
        except (OSError, ValueError, AttributeError) as error:
            raise damaged(path, f"{RUN}/{METRICS}", f"cannot be read ({type(error).__name__}: {error})") from error


class SavedCheckpoints:
    """Read-only access to the checkpoints in a run's folder, to start another run from them."""

    def __init__(self, run_dir: Any):
        self._directory = run_dir / CHECKPOINTS
        found = from_first(lambda: [path.name for path in committed(self._directory)])
        self.latest: int | None = max(map(int, found), default=None)

    def path(self, updates: int) -> Any:
        """Returns the folder of the checkpoint after `updates` updates."""
        return self._directory / str(updates)


def inspect(path: Any) -> Sidecar:
    """Verifies the checkpoint at `path`, a folder checkpoints/N, and returns its sidecar metadata.

    Raises:
      UserError: a file of the checkpoint is damaged (the message names it), or MaxText wrote the checkpoint.
    """

    from_first(lambda: refuse_maxtexts(path))
    agreed(lambda: verify(path, jax.process_index(), jax.process_count()))
    return agreed(lambda: read_sidecar(path / RUN))


def restore(path: Any, abstract: T, say: Callable[[str], Any] = lambda line: None) -> T:
    """Reads the canonical train state of the checkpoint at `path`, which `inspect` verified.

    Args:
      path: a folder checkpoints/N.
      abstract: the wanted structure: a ShapeDtypeStruct with a sharding at each leaf. Fields that are None are not
        read. This also applies to fields of the `TrainTree` of DiLoCo's islands.
      say: receives a line if leaves are stored in bfloat16 but wanted in float32.

    Raises:
      UserError: the checkpoint has a different model or optimizer; the message names the first mismatch.
    """
    wanted = _fields(abstract)
    with _context():
        found = ocp.checkpointables_metadata(absolute(path)).metadata[STATE]
        wider = check_structure(path, _found_fields(found, abstract), wanted)
        loaded = ocp.load_checkpointables(absolute(path), {STATE: wanted})[STATE]
    if wider:
        more = f" and {len(wider) - 1} more" if len(wider) > 1 else ""
        say(f"{path}: {wider[0]}{more}: saved in bfloat16 and converted to float32, which changes no value")
    return _with_fields(abstract, loaded)


def _fields(tree: Any) -> dict[str, Any]:
    """Returns the fields of a train state that are not None, as a dict. The nested state of DiLoCo's islands is
    converted to a dict, too."""
    fields = {name: part for name, part in tree._asdict().items() if part is not None}
    return {name: _fields(part) if isinstance(part, TrainTree) else part for name, part in fields.items()}


def _found_fields(found: Mapping[str, Any], tree: Any) -> dict[str, Any]:
    """Returns the fields of `found`, the metadata of a checkpoint, that are also in `_fields(tree)`. A field that
    `found` lacks is None."""
    fields = {name: part for name, part in tree._asdict().items() if part is not None}
    return {
        name: _found_fields(found.get(name) or {}, part) if isinstance(part, TrainTree) else found.get(name)
        for name, part in fields.items()
    }


def _with_fields(tree: T, loaded: Mapping[str, Any]) -> T:
    """Returns `tree` with its `_fields` replaced by the fields in `loaded`."""
    before = {name: getattr(tree, name) for name in loaded}
    parts = {
        name: _with_fields(part, loaded[name]) if isinstance(part, TrainTree) else loaded[name]
        for name, part in before.items()
    }
    return tree._replace(**parts)


def newest(path: Any) -> Any:
    """Returns the newest committed checkpoint in a run's folder `path`, or `path` itself if it is a committed
    checkpoint. Returns None if there is no such checkpoint.

    Raises:
      UserError: see `check_folder`.
    """
    if (path / STATE).is_dir() and path not in _uncommitted(path.parent):
        check_folder(path)
        return path
    found = committed(path if path.name == CHECKPOINTS else path / CHECKPOINTS)
    if not found:
        return None
    check_folder(path, [str(found[-1].relative_to(path))])
    return found[-1]


def committed(folder: Any) -> list[Any]:
    """Returns the folders of the committed checkpoints in `folder`, the newest last."""
    found = [path for path in entries(folder) if path.name.isdecimal() and path.is_dir() and _complete(path)]
    return sorted(found, key=lambda path: int(path.name))


def written_by_maxtext(path: Any) -> bool:
    """Returns whether MaxText wrote the checkpoint `path`, a folder checkpoints/N."""
    return (path / ITEMS / "_METADATA").exists() and not (path / STATE).is_dir()


def refuse_maxtexts(path: Any) -> None:
    """Raises UserError if MaxText wrote the checkpoint `path`, a folder checkpoints/N."""
    if written_by_maxtext(path):
        place = "a copy of it on this machine" if is_remote(path) else path
        raise UserError(
            f"{path} was written by MaxText. Only the parameters of such checkpoints can be read: give "
            f"load_parameters_path={place}, and a run_name that has no checkpoints yet"
        )


def _uncommitted(folder: Any) -> list[Any]:
    """Returns folders of unfinished saves and, in a bucket, also remnants of deleted checkpoints."""
    if not is_remote(folder):
        return [path for path in entries(folder) if _UNCOMMITTED in path.name]
    return [path for path in entries(folder) if path.name.isdecimal() and not _complete(path)]


def _complete(path: Any) -> bool:
    return not is_remote(path) or (path / COMMITTED).exists()


def _sum(folder: Any) -> None:
    # The first process calls this after all files are written and before it commits the checkpoint. The other processes
    # call it as soon as the save has begun, and wait for the first one.
    meet = multihost.get_barrier_sync_fn()  # works in any thread; does nothing with a single process
    write_sums(
        folder, jax.process_index(), jax.process_count(), lambda place: meet(key=place, timeout_ms=1000 * _PATIENCE)
    )


def _being_saved(path: Any) -> Any:
    """Returns the folder in which the checkpoint `path` is being written."""
    return path if is_remote(path) else path.with_suffix(_UNCOMMITTED)


def _context(before_commit: Callable[[], None] | None = None) -> ocp.Context:
    silence_orbax()
    context = ocp.Context()
    context.pytree.loading.partial_load = True  # reads only the wanted leaves
    context.array.saving.use_compression = False  # saves in a third of the time, with 1/12 more disk space
    # The minimum bytes of the parts into which a replicated array is split, so that several devices share the write.
    # For smaller parts, compiling one slice per part takes longer than writing the array.
    context.array.saving.min_slice_bytes_for_replica_parallel = 1 << 20
    context.asynchronous.post_finalization_callback = before_commit
    # Otherwise, threads that write into a folder wait forever if the folder cannot be created.
    context.asynchronous.create_directories_asynchronously = False
    return context

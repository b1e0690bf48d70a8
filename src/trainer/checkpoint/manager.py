"""The checkpoints of one run: written by Orbax in the background, each committed whole or not at all.

checkpoints/N holds the train state after N updates in canonical form, the same whichever combination trained it:
state/ {params, opt_state, step, rest}, with optax's own structure under opt_state; run/ what must lie beside it (see
`Beside`); metrics/ the numbers that retention asks for; sums.json.
"""

import contextlib
import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from orbax.checkpoint import v1 as ocp

from trainer.backends import TrainTree
from trainer.checkpoint.beside import Beside, BesideFiles, read_beside
from trainer.checkpoint.compare import check_structure
from trainer.checkpoint.sums import verify, write_sums
from trainer.config import UserError

FOLDER = "checkpoints"
_UNCOMMITTED = ".orbax-checkpoint-tmp"
_STATE, _RUN = "state", "run"


class CheckpointManager:
    """Saves and lists the checkpoints in a run's folder; a context manager that waits for the last save at its end."""

    def __init__(self, run_dir: Path, config: Any, say: Callable[[str], None]):
        """Opens run_dir/checkpoints. Saves that never committed are cleared away, with a line to `say`."""
        self.directory = run_dir / FOLDER
        self._asynchronous = config.async_checkpointing
        # Orbax logs the tracebacks of what it raises, from its own threads.
        logging.getLogger("absl").setLevel(logging.CRITICAL)
        with _disk_errors(self.directory):
            for path in sorted(self.directory.glob(f"*{_UNCOMMITTED}")):
                shutil.rmtree(path)
                say(f"{path} was never committed: removed")
            self._orbax = ocp.training.Checkpointer(
                self.directory.absolute(),
                context=_context(self._write_sums),
                preservation_policy=_preservation(config),
            )

    @property
    def latest(self) -> int | None:
        """The number of updates that the newest committed checkpoint holds."""
        newest = self._orbax.latest
        return None if newest is None else newest.step

    def path(self, updates: int) -> Path:
        """The folder of the checkpoint of `updates`."""
        return self.directory / str(updates)

    def save(self, updates: int, tree: TrainTree, beside: Beside, metrics: Mapping[str, float]) -> None:
        """Begins to save; the arrays are copied when this returns, so that a step may be given their buffers.

        Raises:
          UserError: the disk did not take this checkpoint or the one before it. Those committed are intact.
        """
        contents = {_STATE: tree._asdict(), _RUN: BesideFiles(beside)}
        with _disk_errors(self.directory):
            saving = self._orbax.save_checkpointables_async(
                updates, contents, force=True, metrics=dict(metrics) or None
            )
            if not self._asynchronous and saving is not None:
                saving.result()

    def close(self) -> None:
        """Waits until the last save is committed. Raises UserError as `save` does."""
        with _disk_errors(self.directory):
            self._orbax.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _write_sums(self) -> None:
        # Called when all files are written and before the rename that commits; one save runs at a time.
        for folder in self.directory.glob(f"*{_UNCOMMITTED}"):
            write_sums(folder)


def inspect(path: Path) -> Beside:
    """What lies beside the arrays of checkpoints/N, at `path`.

    Raises:
      UserError: a file of the checkpoint is damaged; names the first one.
    """
    verify(path)
    return read_beside(path / _RUN)


def restore(path: Path, abstract: TrainTree) -> TrainTree:
    """The train state of the checkpoint at `path`, which `inspect` found to be whole.

    Args:
      path: a folder checkpoints/N.
      abstract: a ShapeDtypeStruct with a sharding at each leaf: the structure that is wanted, and where it shall live.
        A field that is None is not read.

    Raises:
      UserError: the checkpoint is of another model or optimizer; names the first mismatch.
    """
    wanted = {name: part for name, part in abstract._asdict().items() if part is not None}
    with _context():
        found = ocp.checkpointables_metadata(path.absolute()).metadata[_STATE]
        check_structure(path, {name: found.get(name) for name in wanted}, wanted)
        loaded = ocp.load_checkpointables(path.absolute(), {_STATE: wanted})[_STATE]
    return abstract._replace(**loaded)


def newest(path: Path) -> Path | None:
    """The newest committed checkpoint of a run's folder, or `path` itself if it is a checkpoint."""
    if (path / _STATE).is_dir():
        return path
    folder = path if path.name == FOLDER else path / FOLDER
    steps = [child for child in folder.glob("*") if child.name.isdecimal()] if folder.is_dir() else []
    return max(steps, key=lambda child: int(child.name), default=None)


def _context(before_commit: Callable[[], None] | None = None) -> ocp.Context:
    context = ocp.Context()
    context.pytree.loading.partial_load = True  # what is not wanted is not read
    context.array.saving.use_compression = False  # a third of the time for a twelfth more disk
    context.asynchronous.post_finalization_callback = before_commit
    return context


def _preservation(config: Any) -> Any:
    policies = ocp.training.preservation_policies
    if config.max_num_checkpoints_to_keep is None:
        return policies.PreserveAll()
    kept = [policies.LatestN(config.max_num_checkpoints_to_keep)]
    if config.checkpoint_keep_period:
        kept.append(policies.EveryNSteps(config.checkpoint_keep_period))
    if config.keep_best_checkpoints:
        kept.append(
            policies.BestN(
                get_metric_fn=lambda metrics: metrics["eval_loss"],
                n=config.keep_best_checkpoints,
                reverse=True,
                keep_checkpoints_without_metrics=False,
            )
        )
    return policies.AnyPreservationPolicy(kept)


@contextlib.contextmanager
def _disk_errors(directory: Path) -> Iterator[None]:
    """Makes a full or unwritable disk a UserError. Those of TensorStore are ValueErrors with the system's code."""
    try:
        yield
    except UserError:
        raise
    except (OSError, ValueError) as error:
        if not isinstance(error, OSError) and "os_error_code" not in str(error):
            raise
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"cannot write a checkpoint below {directory}: {reason}; the checkpoints that are committed there are "
            "intact: make room and give the same command again"
        ) from error

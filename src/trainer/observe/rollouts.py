"""Rollout files: rollouts/N.jsonl in a run's folder contains the completions of round N, counted from 0."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from trainer.observe.metrics import read_rows
from trainer.observe.rundir import ROLLOUTS, RunDir, remote_errors, writing
from trainer.runtime.folders import check_folder, replace_file, unfinished
from trainer.runtime.storage import entries

_LARGE = ("prompt_tokens", "tokens", "log_probs")


class RolloutFiles:
    """Writes the rollout files of a run."""

    def __init__(self, run_dir: RunDir):
        self._run_dir, self._folder, self._begun = run_dir, run_dir.path / ROLLOUTS, False

    def write(self, number: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Writes the completions of a round, one JSON object per line. Floats survive a round trip bit for bit.

        The first call also removes files that an earlier process left: the files of this and later rounds, and
        unfinished files.

        Raises:
          UserError: the disk is full.
        """
        path, remote = self._folder / f"{number:06d}.jsonl", self._run_dir.remote
        with writing(path):
            self._folder.mkdir(exist_ok=True)
            if not self._begun:
                _remove(self._folder, number)
        if not self._begun and remote is not None:
            with remote_errors(remote):
                _remove(remote / ROLLOUTS, number)
        self._begun = True
        with writing(path):
            replace_file(path, "".join(f"{json.dumps(dict(row))}\n" for row in rows))


def newest_rollouts(run_folder: Path) -> list[dict[str, Any]]:
    """Returns the completions of the newest round, or [] if there are none. Omits tokens and log-probabilities, which
    may be large. Raises UserError if the file is damaged."""
    check_folder(run_folder, (ROLLOUTS,))
    numbers = _numbers(run_folder / ROLLOUTS)
    rows = read_rows(numbers[max(numbers)]) if numbers else []
    return [{name: value for name, value in row.items() if name not in _LARGE} for row in rows]


def _remove(folder: Any, first: int) -> None:
    for path in [*unfinished(folder), *(path for number, path in _numbers(folder).items() if number >= first)]:
        path.unlink(missing_ok=True)


def _numbers(folder: Any) -> dict[int, Any]:
    if not folder.is_dir():
        return {}
    stems = {path: path.name.removesuffix(".jsonl") for path in entries(folder)}
    return {int(stem): path for path, stem in stems.items() if stem.isdecimal()}

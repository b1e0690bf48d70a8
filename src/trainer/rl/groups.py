"""NumPy computations on rollouts: advantages, and packing of sequences into rows.

The completions of one prompt form a group.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from trainer.data.batches import Batch, make_batch

_EPSILON = 1e-6  # added to the standard deviation of a group's rewards


class Rollout(NamedTuple):
    """A prompt with a completion.

    Attributes:
      prompt, completion: tokens, int32 [p] and [c]. The completion contains the stop token that ended it.
      log_probs: the log-probability of each completion token when it was sampled, float32 [c].
      truncated: whether the completion was cut off because it reached its length limit.
    """

    prompt: np.ndarray
    completion: np.ndarray
    log_probs: np.ndarray
    truncated: bool

    @property
    def pairs(self) -> int:
        """The number of (input, target) token pairs."""
        return len(self.prompt) + len(self.completion) - 1


def advantages(rewards: np.ndarray) -> np.ndarray:
    """Returns the advantage of each completion from `rewards` [groups, size], as float32 of the same shape.

    An advantage is (reward - mean of the group) / (standard deviation of the group + 1e-6); the standard deviation has
    size - 1 degrees of freedom (Shao et al. 2024, arXiv:2402.03300, 4.1.2). All advantages of a group are 0 if the
    group's rewards are all equal or the group has only one completion.
    """
    rewards = np.asarray(rewards, np.float64)
    differ = (rewards != rewards[:, :1]).any(axis=1, keepdims=True)
    centred = rewards - rewards.mean(axis=1, keepdims=True)
    variance = (centred**2).sum(axis=1, keepdims=True) / max(1, rewards.shape[1] - 1)
    return np.where(differ, centred / (np.sqrt(variance) + _EPSILON), 0).astype(np.float32)


def places(lengths: Sequence[int], row: int, align: int, *, together: bool = True) -> list[tuple[int, int]]:
    """Packs sequences into rows. Returns a pair for each sequence: the index of its row, and its start position in this
    row.

    Sequences are placed longest first, each in the first row with enough free space.

    Args:
      lengths: the lengths of the sequences, at most `row` each.
      row: the length of a row in tokens.
      align: the start position of every sequence is a multiple of this number.
      together: whether a row may hold several sequences.
    """
    fills: list[int] = []
    found = [(0, 0)] * len(lengths)
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        number = next((n for n, fill in enumerate(fills) if together and fill + lengths[i] <= row), len(fills))
        if number == len(fills):
            fills.append(0)
        found[i] = number, fills[number]
        fills[number] += lengths[i] + -lengths[i] % align
    return found


def packed(
    rollouts: Sequence[Rollout],
    values: Mapping[str, Sequence[float]],
    at: Sequence[tuple[int, int]],
    rows: int,
    length: int,
) -> Batch:
    """Returns a batch of `rows` rows of `length` tokens.

    The batch has the fields of the objective `objectives.next_token`, where only completion tokens contribute to the
    loss. It also has a field `old_log_probs`, with the `log_probs` of the rollouts, and a float field for each entry of
    `values`.

    Args:
      values: maps a field's name to one number per rollout, which is the field's value at all tokens of the completion.
      at: the row index and the start position of each rollout, as returned by `places`.
    """
    names = ("inputs", "targets", "segmentation", "loss")
    arrays = {name: np.zeros((rows, length), np.int32) for name in names}
    floats = {name: np.zeros((rows, length), np.float32) for name in ("old_log_probs", *values)}
    segments = [0] * rows
    # The rollouts are processed in the order of `at`, so that segment ids increase along a row.
    for i in sorted(range(len(rollouts)), key=lambda i: at[i]):
        rollout, (row, start) = rollouts[i], at[i]
        tokens = np.concatenate([rollout.prompt, rollout.completion])
        segments[row] += 1
        here = row, slice(start, start + rollout.pairs)
        arrays["inputs"][here], arrays["targets"][here] = tokens[:-1], tokens[1:]
        arrays["segmentation"][here] = segments[row]
        drawn = row, slice(start + len(rollout.prompt) - 1, start + rollout.pairs)
        arrays["loss"][drawn] = 1
        floats["old_log_probs"][drawn] = rollout.log_probs
        for name, of_each in values.items():
            floats[name][drawn] = of_each[i]
    return {**make_batch(*(arrays[name] for name in names)), **floats, "row": np.arange(rows, dtype=np.int32)}

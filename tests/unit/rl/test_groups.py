"""Advantages within groups, and rows of packed rollouts."""

import numpy as np
import pytest

from trainer.rl.groups import Rollout, advantages, packed, places


def test_advantages_are_normalized_within_each_group():
    rng = np.random.default_rng(0)
    rewards = rng.normal(size=(5, 4))
    found = advantages(rewards)
    for group, row in zip(rewards, found, strict=True):
        expected = (group - group.mean()) / (group.std(ddof=1) + 1e-6)
        np.testing.assert_allclose(row, expected, rtol=1e-6)
    assert found.dtype == np.float32


@pytest.mark.parametrize("rewards", [[[1.0]], [[0.3] * 4], [[1e30] * 3], [[0.1 + 0.2] * 2]])
def test_equal_rewards_and_groups_of_one_have_no_advantage(rewards):
    assert not advantages(np.array(rewards)).any()


def made(rng, longest):
    sizes = rng.integers(1, longest, 2)
    return Rollout(
        rng.integers(1, 50, sizes[0]).astype(np.int32),
        rng.integers(1, 50, sizes[1]).astype(np.int32),
        rng.normal(size=sizes[1]).astype(np.float32),
        truncated=False,
    )


@pytest.mark.parametrize(("align", "together"), [(1, True), (4, True), (1, False), (8, False)])
def test_every_token_is_in_one_place(align, together):
    rng = np.random.default_rng(align)
    rollouts = [made(rng, 9) for _ in range(30)]
    rewards, gains = rng.normal(size=(2, 30))
    at = places([rollout.pairs for rollout in rollouts], 24, align, together=together)
    rows = 1 + max(row for row, _ in at)
    assert rows == 30 if not together else rows < 25
    batch = packed(rollouts, {"rewards": rewards, "advantages": gains}, at, rows + 2, 24)
    assert not batch["inputs_segmentation"][rows:].any()
    assert batch["row"].tolist() == list(range(rows + 2))
    filled = 0
    for rollout, reward, gain, (row, start) in zip(rollouts, rewards, gains, at, strict=True):
        assert start % align == 0
        here, tokens = slice(start, start + rollout.pairs), [*rollout.prompt, *rollout.completion]
        segment = batch["inputs_segmentation"][row, start]
        assert (batch["inputs_segmentation"][row] == segment).sum() == rollout.pairs
        assert batch["inputs"][row, here].tolist() == tokens[:-1]
        assert batch["targets"][row, here].tolist() == tokens[1:]
        assert batch["inputs_position"][row, here].tolist() == list(range(rollout.pairs))
        drawn = np.arange(rollout.pairs) >= len(rollout.prompt) - 1
        assert (batch["targets_segmentation"][row, here] == np.where(drawn, segment, 0)).all()
        for name, values in (("old_log_probs", rollout.log_probs), ("advantages", gain), ("rewards", reward)):
            assert (batch[name][row, here][drawn] == np.float32(values)).all()
            assert not batch[name][row, here][~drawn].any()
        filled += rollout.pairs
    assert (batch["inputs_segmentation"] != 0).sum() == filled
    rising = np.diff(batch["inputs_segmentation"], axis=1)
    assert ((rising >= 0) | (batch["inputs_segmentation"][:, 1:] == 0)).all()


def test_places_are_as_few_rows_as_first_fit_of_falling_lengths_gives():
    assert places([3, 8, 5, 8, 2], 10, 1) == [(2, 5), (0, 0), (2, 0), (1, 0), (0, 8)]
    assert places([3, 8, 5], 12, 4) == [(0, 8), (0, 0), (1, 0)]

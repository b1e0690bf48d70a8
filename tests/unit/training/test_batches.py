"""Batches on devices: the fields that the objective derives, and the order of their tokens."""

import functools

import jax
import numpy as np
import pytest
from support import arguments, packed_batch

from trainer.config.load import load
from trainer.objectives.base import prepared
from trainer.ops.order import DUAL_CHUNK_SWAP, STRIPED, order, restored
from trainer.training.batches import check_batch, placed
from trainer.training.build import build

AXES = {"ici_context_parallelism": 2, "ici_fsdp_parallelism": 2, "per_device_batch_size": 1, "mtp_num_layers": 2}


@functools.cache
def made(**keys):
    return build(load(arguments("nnx", **AXES, **keys)).config, jax.devices()[:4])


@pytest.mark.parametrize(
    ("keys", "strategy"),
    [
        ({}, DUAL_CHUNK_SWAP),
        ({"context_parallel_strategy": "ring", "context_parallel_reorder_strategy": "striped"}, STRIPED),
        ({"context_parallel_load_balance": False}, None),
    ],
    ids=str,
)
def test_tokens_move_with_all_their_fields(keys, strategy):
    run = made(**keys)
    batch = packed_batch(run.config, run.rows)
    check_batch(run, batch, run.rows)
    on_devices, expected = placed(run, batch), prepared(run.objective, batch)
    assert on_devices.keys() == expected.keys() == run.abstract_batch(run.rows).keys() > batch.keys()
    found = {name: np.asarray(array) for name, array in on_devices.items()}
    for name, array in (restored(found, 2, strategy) if strategy else found).items():
        assert (array.dtype, array.tobytes()) == (np.int32, np.ascontiguousarray(expected[name]).tobytes()), name
    places = order(16, 2, strategy) if strategy else np.arange(16)
    for name in ("inputs", "mtp_targets"):
        for shard in on_devices[name].addressable_shards:
            assert shard.data.shape[:2] == (2, 8)
            rows, tokens, *_ = shard.index
            np.testing.assert_array_equal(shard.data, expected[name][rows][:, places[tokens]])


def test_the_tokens_ahead_are_those_before_the_order():
    """They are derived before tokens are reordered. Compared with a loop over the tokens."""
    run = made()
    batch = packed_batch(run.config, run.rows)
    found = prepared(run.objective, batch)
    segments, length = batch["inputs_segmentation"], 16
    for row, t, i in np.ndindex(run.rows, length, 2):
        ahead = t + i + 1
        inside = ahead < length and segments[row, t] != 0 and len(set(segments[row, t : ahead + 1])) == 1
        assert found["mtp_inputs_segmentation"][row, t, i] == (segments[row, t] if inside else 0)
        learnt = batch["targets_segmentation"][row, ahead] if inside else 0
        assert found["mtp_targets_segmentation"][row, t, i] == learnt
        if inside:
            assert found["mtp_inputs"][row, t, i] == batch["inputs"][row, ahead]
            assert found["mtp_targets"][row, t, i] == batch["targets"][row, ahead]

"""The train state of DiLoCo."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from support import ALL_COMBINATIONS, arguments, assert_equal_bits

from trainer.backends.base import TrainTree
from trainer.config.load import load
from trainer.state.diloco import DiLoCoTrainState, build_abstract_diloco_state, build_diloco_state
from trainer.training.build import build

SETTINGS = {
    "enable_diloco": True,
    "ici_diloco_parallelism": 2,
    "ici_data_parallelism": 2,
    "ici_tensor_parallelism": 2,
    "shard_optimizer_over_data": True,
    "per_device_batch_size": 1,
}


def made(combination, **overrides):
    return build(load(arguments(combination, **SETTINGS | overrides)).config, jax.devices())


@pytest.mark.parametrize("combination", ALL_COMBINATIONS)
def test_every_island_has_the_state_of_a_plain_run(combination):
    run = made(combination)
    island, native = run.codec.inner, run.abstract_state
    assert isinstance(native, DiLoCoTrainState)
    assert type(native.inner_state) is type(island.abstract)
    abstract, specs, shardings = build_abstract_diloco_state(run.config, island, run.mesh)
    assert jax.tree.structure(shardings) == jax.tree.structure(run.states.shardings) == jax.tree.structure(native)
    assert jax.tree.leaves(shardings) == jax.tree.leaves(run.states.shardings)
    of_one = jax.tree.map(lambda leaf: leaf.sharding, run.states.one)
    plain = zip(*map(jax.tree.leaves, (island.abstract, island.pack(of_one))), strict=True)
    inner = zip(*map(jax.tree.leaves, (abstract.inner_state, specs.inner_state)), strict=True)
    for (leaf, sharding), (found, spec) in zip(plain, inner, strict=True):
        assert (found.shape, found.dtype) == ((2, *leaf.shape), leaf.dtype)
        assert spec == PartitionSpec("diloco", *sharding.spec)
    outer = run.codec.unpack(run.states.shardings)
    stored = of_one.params
    assert outer.params == stored == outer.outer_opt_state[0].trace
    assert any("data" in sharding.spec for sharding in jax.tree.leaves(stored))  # Zero-1


@pytest.mark.parametrize("combination", ALL_COMBINATIONS)
def test_both_forms_hold_the_same_leaves_and_neither_is_taken_for_the_other(combination):
    run = made(combination)
    numbers = iter(range(10**6))
    native = jax.tree.map(lambda leaf: np.full(leaf.shape, next(numbers)), run.abstract_state)
    tree = run.codec.unpack(native)
    assert isinstance(tree.inner_state, TrainTree)
    assert jax.tree.structure(tree.inner_state.params) == jax.tree.structure(tree.params)
    assert_equal_bits(run.codec.pack(tree), native)
    with pytest.raises(ValueError, match="already canonical"):
        run.codec.unpack(tree)
    with pytest.raises(ValueError, match="already native: its inner_state is of type"):
        run.codec.pack(native)


def test_islands_begin_with_one_state():
    run = made("nnx", base_num_decoder_layers=1)
    island = run.codec.inner
    plain = jax.tree.map(lambda leaf: np.full(leaf.shape, 3, leaf.dtype), island.abstract)
    made_of = jax.jit(functools.partial(build_diloco_state, run.config, island))
    tree = jax.tree.map(np.asarray, run.codec.unpack(made_of(plain)))
    for n in (0, 1):
        assert_equal_bits(jax.tree.map(lambda x, n=n: x[n], tree.inner_state), island.unpack(plain))
    assert_equal_bits(tree.params, island.unpack(plain).params)
    assert not any(leaf.any() for leaf in jax.tree.leaves(tree.outer_opt_state))


def test_the_table_has_islands_and_outer_parameters():
    table = made("nnx").table()
    rows = {row["name"]: row for row in table["tensors"]}
    name = "params/decoder/layers/mlp/wi_0/kernel"
    assert rows[name]["shape"] == [2, 16, 32]
    assert rows[f"inner_state/{name}"]["shape"] == [2, 2, 16, 32]
    assert rows[f"inner_state/{name}"]["axes"][0] == "diloco"
    assert rows[f"outer_opt_state/0/trace/{name.removeprefix('params/')}"]["spec"] == rows[name]["spec"]
    totals, plain = table["totals"], made("nnx", enable_diloco=False, ici_diloco_parallelism=1, ici_data_parallelism=4)
    plain = plain.table()["totals"]
    assert totals["parameters"] == plain["parameters"]
    assert totals["parameters_bytes"] == 3 * plain["parameters_bytes"]
    assert totals["gradients_bytes"] == 2 * plain["gradients_bytes"]

"""Update rules as a user would add them: their state is in every native state, sharded, and saved."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compiler import unoptimized
from support import (
    ALL_COMBINATIONS,
    arguments,
    assert_equal_bits,
    compiled,
    copied,
    packed_batch,
    random_variables,
    state_from,
    tiny_config,
)
from without_model import OfParameters

from trainer.backends.base import TrainTree
from trainer.backends.registry import make_model
from trainer.checkpoint.manager import CheckpointManager, restore
from trainer.checkpoint.sidecar import Sidecar
from trainer.config.load import load
from trainer.layers.sown import MaxLogit, Total
from trainer.objectives.base import Sums, Weights
from trainer.objectives.next_token import NextToken
from trainer.ops.random import seed_key
from trainer.optim.rules import Rule, any_due, with_rules
from trainer.state.shardings import ParamShardings
from trainer.training.batches import placed
from trainer.training.build import build
from trainer.training.step import make_update

# Two stacks of blocks with a buffer.
KEYS = {"decoder_block": "two_kinds:family", "base_num_decoder_layers": 3}
SQUARES = "decoder/layers/layers_0/output_square_sum"


def average(state, old, new, sown):
    return jax.tree.map(lambda mean, param: (mean + param) / 2, state, new.params), new


def largest(state, old, new, sown):
    return jnp.maximum(state, sown["Total"][SQUARES]), new


def grow_rest(state, old, new, sown):
    return state + 1, new._replace(rest=jax.tree.map(lambda leaf: leaf + 1, old.rest))


AVERAGE = Rule("average", lambda params: params, average)
LARGEST = Rule("largest", lambda params: jnp.zeros(1), largest, (Total,))
COUNT = Rule("count", lambda params: jnp.zeros((), jnp.int32), grow_rest)


class Sowing(OfParameters):
    captures = (Total,)

    def sums(self, params, rest, batch, key, capture=(), sampled=None):
        total = jnp.sum(batch["targets"]).astype(jnp.float32)[None]
        return super().sums(params, rest, batch, key)._replace(sown={"Total": {SQUARES: total}})


def run_of(combination):
    axes = {"ici_data_parallelism": 2, "shard_optimizer_over_data": True}
    axes |= {"opt_type": "sgd", "gradient_clipping_threshold": 0}
    config = load(arguments(combination, **KEYS, **axes)).config
    return build(config, jax.devices()[:2], [AVERAGE, LARGEST, COUNT], lambda config, model: Sowing())


@functools.cache
def initial():
    run = run_of(ALL_COMBINATIONS[0])
    return copied(run.codec.unpack(compiled(run.codec.init, seed_key(0))(seed_key(0))))


@functools.cache
def trained():
    """Returns a run, its compiled step, and host copies of the train states before and after each of three steps."""
    run = run_of(ALL_COMBINATIONS[0])
    with unoptimized():
        step = run.compile()
    state = state_from(run, initial())
    trees = [copied(run.codec.unpack(state))]
    for i in range(3):
        state, _ = step(state, placed(run, packed_batch(run.config, run.rows, seed=i)), ())
        trees.append(copied(run.codec.unpack(state)))
    return run, step, trees


def test_a_step_updates_the_state_of_rules():
    """Only one combination: tests/integration/test_five_combinations.py shows that all have the same update program."""
    _, _, trees = trained()
    before, first, second, third = (tree.opt_state.rules for tree in trees)
    assert_equal_bits(before["average"], trees[0].params)
    jax.tree.map(lambda a, b, c: np.testing.assert_array_equal((a + b) / 2, c), *_averages(trees, 1))
    assert (first["largest"] > 0).all()
    assert third["count"] == 3
    assert jax.tree.leaves(trees[0].rest)
    assert_equal_bits(trees[2].rest, jax.tree.map(lambda leaf: leaf + 1 + 1, trees[0].rest))
    assert (third["largest"] >= second["largest"]).all()


@pytest.mark.parametrize("combination", ALL_COMBINATIONS)
def test_the_state_of_rules_is_part_of_every_train_state(combination, tmp_path):
    first, step, trees = trained()
    own = combination == ALL_COMBINATIONS[0]
    run = first if own else run_of(combination)
    # Zero-1 and the table recognize the subtrees with the parameters' structure.
    rows = {row["name"]: row for row in run.table()["tensors"]}
    for name, row in rows.items():
        if name.startswith("params/"):
            assert rows[name.replace("params/", "opt_state/rules/average/", 1)]["spec"] == row["spec"]
    assert any("data" in axes for row in rows.values() for axes in row["spec"])

    # A run that resumes from a checkpoint continues like the run that wrote it.
    tree = jax.device_put(trees[2], jax.tree.map(lambda leaf: leaf.sharding, _abstract(run)))
    with CheckpointManager(tmp_path, run.config, print) as manager:
        manager.save(2, tree, Sidecar("base_config: base.yml\n", None, "", {}), {})
    restored = restore(tmp_path / "checkpoints" / "2", _abstract(run))
    assert_equal_bits(copied(restored), trees[2])
    state = run.codec.pack(restored)
    assert_equal_bits(copied(run.codec.unpack(state)), trees[2])
    if own:
        state, _ = step(state, placed(run, packed_batch(run.config, run.rows, seed=2)), ())
        assert_equal_bits(copied(run.codec.unpack(state)), trees[3])


def _averages(trees, step):
    old, new = trees[step - 1].opt_state.rules["average"], trees[step].opt_state.rules["average"]
    return old, trees[step].params, new


def _abstract(run):
    return run.codec.unpack(run.abstract_args()[0])


def test_one_select_covers_parameters_optimizer_rules_and_rest():
    config = tiny_config("nnx", **KEYS)
    params, rest = jax.device_put(initial()[1::2])
    tx = with_rules(optax.adam(0.1), [COUNT, AVERAGE])
    tree = TrainTree(jnp.zeros((), jnp.int32), params, compiled(tx.init, params)(params), rest)
    here, one = jax.tree.map(lambda leaf: leaf.sharding, params), jnp.ones((), jnp.int32)
    squares = SimpleNamespace(  # compiles quickly
        captures=(),
        weights=lambda batch: Weights({"squares": one}, one),
        sums=lambda params, *_: Sums({"squares": sum(jnp.sum(x * x) for x in jax.tree.leaves(params))}, {}, {}),
    )
    update = make_update(config, tx, squares, ParamShardings(here, here), [COUNT, AVERAGE], here)
    batch = packed_batch(config, 2)
    update = compiled(update, tree, batch)
    new, metrics = update(tree, batch)
    assert (new.step, metrics["skipped"], new.opt_state.rules["count"]) == (1, 0, 1)
    assert_equal_bits(copied(new.rest), jax.tree.map(lambda leaf: leaf + 1, copied(rest)))
    averaged = jax.tree.map(lambda a, b: (a + b) / 2, copied(params), copied(new.params))
    assert_equal_bits(copied(new.opt_state.rules["average"]), averaged)

    norm = params["decoder"]["decoder_norm"]
    norm["scale"] = jax.device_put(np.full_like(norm["scale"], np.nan), norm["scale"].sharding)
    new, metrics = update(tree, batch)
    assert (new.step, metrics["skipped"]) == (1, 1)
    assert_equal_bits(copied(new._replace(step=tree.step)), copied(tree))


def every(interval, *sown):
    return Rule(f"every {interval}", lambda params: 0, average, sown, due=lambda step: step % interval == 0)


def test_a_step_measures_whenever_a_rule_that_reads_sown_values_is_due():
    def due(*rules):
        flags = [any_due(rules, np.int32(step)) for step in range(5)]
        return None if flags == [None] * 5 else [bool(flag) for flag in flags]

    assert due() is due(AVERAGE) is due(every(2)) is None
    assert due(AVERAGE, every(3, Total)) == [True, False, False, True, False]
    assert due(every(2, MaxLogit), every(3, Total)) == [True, False, True, True, True]
    assert due(every(2, Total), LARGEST) is None


def test_what_layers_sow_is_sampled_when_a_rule_is_due():
    config = tiny_config("nnx", qk_clip_interval=2)  # this step does not read the key
    model = make_model(config)
    params, rest = jax.device_put(random_variables(model))
    here = jax.tree.map(lambda leaf: leaf.sharding, params)
    path = "decoder/layers/self_attention/max_logit"
    rule = every(3, MaxLogit)._replace(
        init=lambda params: jnp.zeros(()), update=lambda state, old, new, sown: (sown["MaxLogit"][path].max(), new)
    )
    tx = with_rules(optax.sgd(0.0), [rule])
    tree = TrainTree(jnp.zeros((), jnp.int32), params, tx.init(params), rest)
    batch = packed_batch(config, 2)
    update = make_update(config, tx, NextToken(model.apply), ParamShardings(here, here), [rule], model.param_axes)
    update = compiled(update, tree, batch)
    found = [update(tree._replace(step=jnp.int32(i)), batch)[0].opt_state.rules[rule.name] for i in range(4)]
    assert found[0] == found[3] > -100
    assert max(found[1:3]) < -1e37


def test_without_rules_the_optimizer_is_as_it_was():
    tx = optax.adam(0.1)
    assert with_rules(tx, []) is tx

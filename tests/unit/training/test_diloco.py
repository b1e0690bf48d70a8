"""DiLoCo: what islands compute independently, and the result of a synchronization."""

import functools
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import arguments, assert_equal_bits, copied, first_tree, packed_batch, state_from, tiny_config

from trainer.aot.cost import analyze
from trainer.backends.base import TrainTree
from trainer.config.errors import RunStopped
from trainer.config.load import load
from trainer.optim.outer import make_outer_optimizer
from trainer.sharding import get_mesh_from_config
from trainer.state.diloco import DiLoCoTrainState, without_islands
from trainer.training.batches import placed
from trainer.training.build import build
from trainer.training.diloco import build_diloco_train_step
from trainer.training.finite import check_finite

ISLANDS = {"enable_diloco": True, "ici_diloco_parallelism": 2, "diloco_sync_period": 3}
# All features that a step can have.
EVERYTHING = {
    "opt_type": "muon",
    "gradient_accumulation_steps": 2,
    "mtp_num_layers": 1,
    "num_vocab_tiling": 2,
    "use_qk_clip": True,
    "qk_clip_threshold": 0.01,
    "qk_clip_interval": 2,
    "skip_step_on_spikes": True,
    "parameter_metrics_period": 2,
    "record_internal_nn_metrics": 1,
    "shard_optimizer_over_data": True,
    "ici_data_parallelism": 2,
    "dropout_rate": 0.1,
    "per_device_batch_size": 1,
    "warmup_steps_fraction": 0,
}
# A few of the features, which compile in a third of the time.
FEW = {name: EVERYTHING[name] for name in ("parameter_metrics_period", "dropout_rate", "warmup_steps_fraction")}
FEW |= {"opt_type": "sgd", "sgd_momentum": 0.9, "learning_rate": 0.1, "gradient_clipping_threshold": 0}
FEW |= {"per_device_batch_size": 1, "base_num_decoder_layers": 1, "ici_fsdp_parallelism": 2}
FEATURES = {"few": FEW, "everything": EVERYTHING}
FEW_COVER_IT = pytest.mark.rest(
    covered_by="few features; unit/training/test_experts.py traces more", cases=("everything",)
)


def made(devices, **overrides):
    return build(load(arguments("nnx", **overrides)).config, jax.devices()[:devices])


def batch_of(run, i, empty_from=None):
    """Returns batch i. In the rows from `empty_from` on, no token bears loss."""
    batch = packed_batch(run.config, run.rows, seed=i)
    if empty_from is not None:
        batch["targets_segmentation"][empty_from:] = 0
    return batch


def steps_of(run, step, batches):
    """Returns the canonical states and the metrics after each of `batches`."""
    state, found = state_from(run, first_tree(run)), []
    for i, batch in enumerate(batches):
        state, metrics = step(state, placed(run, batch), ())
        found.append((copied(run.codec.unpack(state)), run.computation.read(metrics, i)))
    return found


def assert_close(left, right, rtol=2e-5):
    """Compares leaves with a tolerance relative to their largest entries."""
    for (path, a), (_, b) in zip(*map(jax.tree_util.tree_leaves_with_path, (left, right)), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, atol=rtol * np.abs(b).max(initial=1e-3), rtol=0, err_msg=str(path))


def nesterov(config, params, velocity, islands):
    """Returns the outer update in float64: (parameters, velocity)."""
    lr, momentum = config.diloco_outer_lr, config.diloco_outer_momentum

    def one(param, velocity, *islands):
        grad = np.mean([np.float64(param) - island for island in islands], 0)
        velocity = momentum * velocity + grad
        return param - lr * (momentum * velocity + grad), velocity

    pairs = jax.tree.map(one, params, velocity, *islands)
    return jax.tree.transpose(jax.tree.structure(params), jax.tree.structure((0, 0)), pairs)


@functools.cache
def islands_and_plain_runs(features):
    """Runs three steps of two islands, and of two plain runs with one island's rows each. Also returns the islands'
    compiled step.

    In the last batch, the second island has no loss.
    """
    keys, devices = FEATURES[features], 2
    together, alone = made(2 * devices, **keys, **ISLANDS), made(devices, **keys)
    half = alone.rows
    assert together.rows == 2 * half
    batches = [batch_of(together, i, half if i == 2 else None) for i in range(3)]
    step, of_islands = alone.compile(), together.compile()
    parts = [[{k: v[part] for k, v in batch.items()} for batch in batches] for part in (slice(half), slice(half, None))]
    found = steps_of(together, of_islands, batches)
    return together, found, [steps_of(alone, step, part) for part in parts], of_islands


@FEW_COVER_IT
@pytest.mark.parametrize("features", FEATURES)
def test_an_island_trains_as_a_run_of_its_own(features):
    _, found, runs, _ = islands_and_plain_runs(features)
    for i in (0, 1):
        inner = found[i][0].inner_state
        for island, alone in enumerate(runs):
            assert_close(jax.tree.map(lambda x, n=island: x[n], inner), alone[i][0])
        assert_equal_bits(found[i][0].params, found[0][0].params)
        left, right = (jax.tree.leaves(jax.tree.map(lambda x, n=n: x[n], inner.params)) for n in (0, 1))
        assert any((a != b).any() for a, b in zip(left, right, strict=True))


@FEW_COVER_IT
@pytest.mark.parametrize("features", FEATURES)
def test_the_synchronization_is_a_nesterov_step_and_moments_stay(features):
    run, found, runs, _ = islands_and_plain_runs(features)
    before, after = found[1][0], found[2][0]
    last = [alone[2][0] for alone in runs]
    zeros = jax.tree.map(np.zeros_like, before.params)
    params, velocity = nesterov(run.config, before.params, zeros, [tree.params for tree in last])
    assert_close(after.params, params)
    assert_close(after.outer_opt_state[0].trace, velocity, rtol=1e-3)  # differences of rounded numbers
    for island, alone in enumerate(last):
        inner = jax.tree.map(lambda x, n=island: x[n], after.inner_state)
        assert_equal_bits(inner.params, after.params)
        assert_close(inner.opt_state, alone.opt_state)
        assert inner.step == after.step == 3


@FEW_COVER_IT
@pytest.mark.parametrize("features", FEATURES)
def test_the_metrics_of_islands(features):
    _, found, runs, _ = islands_and_plain_runs(features)
    for i, (_, row) in enumerate(found):
        alone = [rows[i][1] for rows in runs]
        np.testing.assert_allclose(row["island_losses"], [it["loss"] for it in alone], rtol=1e-5)
        assert row["tokens"] == sum(it["tokens"] for it in alone)
        assert row["skipped"] == (i == 2)
        assert ("outer_grad_norm" in row) == (i == 2)
        assert ("param_norm/decoder/decoder_norm/scale" in row) == (i != 1)
    np.testing.assert_allclose(found[0][1]["loss"], np.mean(found[0][1]["island_losses"]), rtol=1e-6)
    before = found[1][0].params
    moved = [
        np.concatenate([(np.float64(a) - b).ravel() for a, b in zip(*map(jax.tree.leaves, (before, it)), strict=True)])
        for it in (alone[2][0].params for alone in runs)
    ]
    last = found[2][1]
    np.testing.assert_allclose(last["outer_grad_norm"], np.linalg.norm(np.mean(moved, 0)), rtol=1e-4)
    np.testing.assert_allclose(last["island_distance"], [np.linalg.norm(it) for it in moved], rtol=1e-4)
    cosine = 2 * moved[0] @ moved[1] / (moved[0] @ moved[0] + moved[1] @ moved[1])
    np.testing.assert_allclose(last["island_cosine"], cosine, rtol=1e-3)


def test_only_a_synchronization_sends_between_islands():
    """Counts bytes: the float32 gradient of the outer parameters, and scalars for the metrics."""
    run, _, _, step = islands_and_plain_runs("few")
    found = analyze(step.as_text(), run.mesh).collectives
    across = [it for it in found if "diloco" in it.axes]
    assert across
    assert all(it.conditional for it in across)
    assert any(not it.conditional for it in found)
    assert {it.kind for it in across if it.size > 16} == {"all-reduce"}
    shards = [
        leaf.sharding.shard_shape(leaf.shape)
        for leaf in jax.tree.leaves(run.codec.unpack(run.abstract_args()[0]).params)
    ]
    assert sum(it.size * it.count for it in across if it.dtype == "f32" and it.size > 16) == pytest.approx(
        4 * sum(map(np.prod, shards)), rel=0.02
    )


def test_a_step_is_finite_only_if_it_is_on_every_island():
    run = made(2, **ISLANDS | {"steps": 4}, per_device_batch_size=1)
    for finite in ([1, 1], [0, 1], [1, 0], [0, 0]):
        # The nonfinite island may have no token with a loss; then no mean includes it.
        islands = {"finite": finite, "tokens": [5 * it for it in finite], "loss": [2.0, 3.0], "skipped": [0, 0]}
        metrics = {"islands": jax.tree.map(jnp.asarray, islands, is_leaf=lambda x: isinstance(x, list)), "outer": {}}
        row = {"step": 0, "grad_norm": 1.0, "learning_rate": 0.1} | run.computation.read(metrics, 0)
        assert row["finite"] == min(finite)
        with nullcontext() if all(finite) else pytest.raises(RunStopped, match="the update with learning_rate"):
            check_finite(run.config, row, "number 1", lambda: ["params/a"])


def test_what_has_no_gradient_is_evaluated_in_every_bit():
    rest = {"key": np.uint32([2**24 + 1, 2**32 - 1]), "scale": np.float32([0.1, 0.7]), "mask": np.array([True, False])}
    islands = jax.tree.map(lambda leaf: np.stack([leaf] * 3), rest)
    _, found = jax.jit(without_islands)(DiLoCoTrainState(TrainTree(0, {}, None, islands), {}, None, 0))
    assert_equal_bits(jax.tree.map(np.asarray, found), rest)


def planted(count, update, rest, **keys):
    """Returns the configuration of `count` islands, which synchronize every second step, their jitted step around
    `update`, and a first state with the parameters `w`."""
    keys = ISLANDS | {"diloco_sync_period": 2, "ici_diloco_parallelism": count, "steps": 5} | keys
    config = tiny_config("nnx", devices=count, **keys)
    replicated = jax.sharding.NamedSharding(
        get_mesh_from_config(config, jax.devices()[:count]), jax.sharding.PartitionSpec()
    )
    params, w = {"w": jnp.ones(3)}, {"w": jnp.ones((count, 3))}
    island = TrainTree(jnp.zeros(count, jnp.int32), w, (), jax.tree.map(lambda leaf: jnp.stack([leaf] * count), rest))
    state = DiLoCoTrainState(island, params, make_outer_optimizer(config).init(params), jnp.int32(0), None)
    return config, jax.jit(build_diloco_train_step(config, update, {"w": replicated})), state


@pytest.mark.parametrize(("count", "lr", "momentum"), [(1, 0.7, 0.8), (2, 1, 0)])
def test_all_synchronizations_against_numpy(count, lr, momentum):
    """The last step also synchronizes."""

    def moved(w, row):
        return w * np.float32([0.9, 0.8, 0.7]) + row

    def update(tree, batch, frozen):
        return tree._replace(params={"w": moved(tree.params["w"], batch["row"][0])}), {}

    outer = {"diloco_outer_lr": lr, "diloco_outer_momentum": momentum}
    config, step, state = planted(count, update, {}, **outer)
    params, velocity = {"w": np.ones(3)}, {"w": np.zeros(3)}
    islands = [params["w"]] * count
    for i in range(5):
        rows = np.float32(i + np.arange(count))
        state, metrics = step(state, {"row": rows}, ())
        islands = [moved(w, row) for w, row in zip(islands, rows, strict=True)]
        if i in (1, 3, 4):
            params, velocity = nesterov(config, params, velocity, [{"w": w} for w in islands])
            islands = [params["w"]] * count
        assert_close(state.params, params)
        assert_close(state.inner_state.params["w"], np.stack(islands))
        assert (metrics["outer"]["outer_grad_norm"] > 0) == (i in (1, 3, 4))
        assert ("island_cosine" in metrics["outer"]) == (count > 1)


def test_a_synchronization_averages_what_has_no_gradient():
    """The planted update adds the number of the batch's first row. Each island has two rows."""

    def update(tree, batch, frozen):
        return tree._replace(rest=jax.tree.map(lambda leaf: leaf + batch["row"][0], tree.rest)), {}

    _, step, state = planted(2, update, {"bias": jnp.zeros(())})
    found = []
    for _ in range(2):
        state, _ = step(state, {"row": jnp.arange(4)}, ())
        found.append(state.inner_state.rest["bias"].tolist())
    assert found == [[0, 2], [2, 2]]

"""Training with weight_dtype=bfloat16: what stays in float32, what rounding discards, and older checkpoints."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support import (
    ALL_COMBINATIONS,
    EVERY_MATRIX,
    arguments,
    assert_equal_bits,
    copied,
    first_tree,
    packed_batch,
    state_from,
)
from without_model import OfParameters

from trainer.checkpoint.manager import CheckpointManager
from trainer.checkpoint.sidecar import Sidecar
from trainer.config.dump import to_yaml
from trainer.config.load import load
from trainer.data.dataset import open_dataset
from trainer.ops.paths import by_name
from trainer.optim.rounding import applied
from trainer.training.batches import placed
from trainer.training.build import build
from trainer.training.diloco import build_diloco_train_step
from trainer.training.parameter_metrics import lost_updates
from trainer.training.start import start

NARROW = {"weight_dtype": "bfloat16", "warmup_steps_fraction": 0, "lr_schedule_type": "constant"}
ISLANDS = {"enable_diloco": True, "ici_diloco_parallelism": 2, "per_device_batch_size": 1, "diloco_sync_period": 1}


@functools.cache
def made(combination="nnx", devices=1, /, **keys):
    return build(load(arguments(combination, **NARROW | {"steps": 20} | keys)).config, jax.devices()[:devices])


def trained(run, steps):
    """Returns the canonical states before and after `steps` updates with one batch, and the last metrics."""
    before = first_tree(run)
    state, batch, step = state_from(run, before), placed(run, packed_batch(run.config, run.rows)), run.compile()
    for _ in range(steps):
        state, metrics = step(state, batch, ())
    return before, copied(run.codec.unpack(state)), metrics


def random_tree(run, dtype="float32"):
    """Returns a canonical state of `run` with random numbers that `dtype` can represent, and counts of 5."""
    rng = np.random.default_rng(0)

    def one(leaf):
        counts = np.issubdtype(leaf.dtype, np.integer)
        values = np.full(leaf.shape, 5) if counts else rng.normal(size=leaf.shape).astype(dtype)
        return jax.device_put(values.astype(leaf.dtype), leaf.sharding)

    return jax.tree.map(one, run.codec.unpack(run.abstract_args()[0]))


def cast(tree, dtypes):
    """Casts every float of `tree`, on its devices, to the dtype of its leaf in `dtypes`."""
    return jax.tree.map(lambda leaf, to: jax.device_put(np.asarray(leaf).astype(to), leaf.sharding), tree, dtypes)


@pytest.mark.parametrize("combination", ALL_COMBINATIONS)
def test_only_kernels_and_tables_have_weight_dtype(combination):
    keys = {
        "enable_lora": True,
        "lora_rank": 2,
        "lora_alpha": 4.0,
        "use_qk_norm": True,
        "decoder_block": "other_shapes:FAMILY",
    }
    for more in (keys, EVERY_MATRIX):
        for name, leaf in by_name(made(combination, **more).model.abstract[0]).items():
            narrow = "lora_" not in name and not name.endswith(("scale", "bias", "sinks"))
            assert leaf.dtype == ("bfloat16" if narrow else "float32"), name


def test_scales_move_where_kernels_do_not_and_a_metric_says_so():
    """Each update is below half the bfloat16 spacing of nearly all kernels and of a scale of 1; scales are float32."""
    config = load(arguments("nnx", **NARROW, steps=20, learning_rate=1e-5)).config
    run = build(config, jax.devices()[:1], make_objective=lambda config, model: OfParameters())
    before, after, metrics = trained(run, 3)
    for name, leaf in by_name(after.params).items():
        moved = leaf.astype(np.float32) != by_name(before.params)[name].astype(np.float32)
        assert moved.mean() == 1 if name.endswith("scale") else moved.mean() < 0.2, name
    assert 0.9 < metrics["lost_updates"] < 1


def test_averages_are_float32():
    state = made(ema_decay=0.9).codec.abstract
    rules = made(ema_decay=0.9).codec.unpack(state).opt_state.rules
    assert {leaf.dtype.name for leaf in jax.tree.leaves(rules["ema"].average)} == {"float32"}


@pytest.mark.parametrize(
    "keys", [{"weight_stochastic_rounding": True}, {"enable_lora": True, "lora_rank": 2, "lora_alpha": 4.0}]
)
def test_programs_that_round_no_trained_parameter_to_nearest_do_not_measure_it(keys):
    run = made(**keys)
    assert "lost_updates" not in jax.eval_shape(run.step, *run.abstract_args())[1]


def test_outer_parameters_are_float32_and_their_rounding_is_no_step_of_an_island():
    """No island moves, so the outer parameters remain between two bfloat16 numbers."""
    run = made("nnx", 2, **ISLANDS)
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(np.float32), first_tree(run).params)
    before = first_tree(run, jax.tree.map(lambda leaf: leaf * np.float32(1 + 2**-12), rounded))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(run.codec.unpack(run.abstract_state).params)} == {"float32"}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(before.outer_opt_state)} == {"float32"}
    step = build_diloco_train_step(run.config, lambda tree, *_: (tree, {}), run.param_shardings.storage)
    after = copied(jax.jit(step)(before, packed_batch(run.config, run.rows), ())[0])
    for name, leaf in by_name(after.params).items():
        np.testing.assert_allclose(leaf, by_name(before.params)[name], rtol=0, atol=1e-20, err_msg=name)
    kernel = "decoder/layers/mlp/wo/kernel"
    assert np.any(by_name(before.params)[kernel] != by_name(before.inner_state.params)[kernel][0].astype(np.float32))


def test_lost_updates_are_below_half_the_spacing():
    """Compared with a float64 sum that is rounded to nearest; zero updates are neither lost nor moved."""
    rng = np.random.default_rng(0)
    params = {
        "a": rng.normal(size=(64, 32)).astype(jnp.bfloat16),
        "b": np.float32(0),
        "c": np.array(-1.5, jnp.bfloat16),
    }
    updates = {"a": rng.normal(size=(64, 32)).astype(np.float32) * 2e-3, "b": np.float32(1), "c": np.float32(2**-9)}
    updates["a"][:8] = 0
    found = float(jax.jit(lost_updates)(params, updates)["lost_updates"])
    exact = np.asarray(params["a"], np.float64)
    spacing = 2.0 ** (np.floor(np.log2(np.abs(exact))) - 7)
    lost = ((np.abs(updates["a"]) < spacing / 2) & (updates["a"] != 0)).sum() + 1
    assert 0.2 < found < 0.8
    np.testing.assert_allclose(found, lost / (64 * 32 + 2), rtol=1e-6)
    assert lost_updates({"b": params["b"]}, {"b": updates["b"]}) == {}


def test_stochastic_rounding_is_exact_on_average_and_leaves_the_rest_alone():
    """A sum at 1/4 of the spacing rounds up in 1/4 of the cases; float32, zero updates and infinities are unchanged.

    The noise does not depend on the mesh.
    """
    config = made(weight_stochastic_rounding=True).config
    size, spacing = 40_000, 2.0**-7
    params = {
        "a": np.ones(size, jnp.bfloat16),
        "d": np.ones(size, jnp.bfloat16),
        "b": np.ones(3, np.float32),
        "c": np.full(size, -0.3, jnp.bfloat16),
    }
    changes = {"a": np.full(size, spacing / 4), "d": np.full(size, spacing / 4), "b": np.full(3, 1e-6)}
    updates = jax.tree.map(np.float32, changes | {"c": np.r_[np.inf, np.nan, np.zeros(size - 2)]})
    update = jax.jit(functools.partial(applied, config))
    found, again, later = (copied(update(params, updates, step)) for step in (0, 0, 1))
    assert_equal_bits(found, again)
    mesh = jax.make_mesh((2,), ("fsdp",), axis_types=(jax.sharding.AxisType.Auto,))
    at = {name: NamedSharding(mesh, P("fsdp" if leaf.size == size else None)) for name, leaf in params.items()}
    assert_equal_bits(found, copied(update(*jax.device_put((params, updates), (at, at)), 0)))
    up = found["a"] == np.float32(1 + spacing)
    assert np.all(up | (found["a"] == 1))
    assert abs(up.mean() - 0.25) < 0.01
    assert np.mean(later["a"] == found["a"]) < 0.8
    assert np.mean(found["d"] == found["a"]) < 0.8  # each parameter has different noise
    assert_equal_bits(found["b"], params["b"] + updates["b"])
    assert np.isinf(found["c"][0])
    assert np.isnan(found["c"][1])
    assert_equal_bits(found["c"][2:], params["c"][2:])


@pytest.mark.parametrize(
    ("combination", "more"), [("nnx", {}), (ALL_COMBINATIONS[-1], {}), ("nnx", {"opt_type": "adafactor"})]
)
def test_a_checkpoint_with_every_float_in_bfloat16_resumes_with_one_line(tmp_path, combination, more):
    """Older versions saved norms, adapters and second moments in weight_dtype."""
    run = made(combination, **more)
    wanted = jax.tree.map(lambda leaf: leaf.dtype, run.codec.unpack(run.abstract_state))
    narrow = jax.tree.map(lambda dtype: dtype if np.issubdtype(dtype, np.integer) else jnp.dtype("bfloat16"), wanted)
    tree = cast(random_tree(run), narrow)
    dataset, lines = open_dataset(run.config, print), []
    sidecar = Sidecar(to_yaml(run.config), {"identity": dataset.identity, "row": 0}, dataset.fingerprint, {})
    with CheckpointManager(tmp_path, run.config, print) as manager:
        manager.save(5, tree, sidecar, {})
        manager.wait()
        begun = start(run, dataset, manager, lines.append, schedule_given=False)
    found = run.codec.unpack(begun.state)
    assert jax.tree.map(lambda leaf: leaf.dtype, found) == wanted
    assert_equal_bits(copied(found), copied(cast(tree, wanted)))
    widened, done = lines
    assert "params/decoder/decoder_norm/scale and " in widened
    assert widened.endswith("more: saved in bfloat16 and converted to float32, which changes no value")
    assert done.endswith("5 of 20 updates are done")


def test_outer_parameters_of_earlier_versions_resume(tmp_path):
    run, lines = made("nnx", 2, **ISLANDS), []
    tree, dataset = random_tree(run, "bfloat16"), open_dataset(run.config, print)
    old = tree._replace(params=cast(tree.params, jax.tree.map(lambda leaf: jnp.dtype("bfloat16"), tree.params)))
    sidecar = Sidecar(to_yaml(run.config), {"identity": dataset.identity, "row": 0}, dataset.fingerprint, {})
    with CheckpointManager(tmp_path, run.config, print) as manager:
        manager.save(5, old, sidecar, {})
        manager.wait()
        begun = start(run, dataset, manager, lines.append, schedule_given=False)
    assert_equal_bits(copied(run.codec.unpack(begun.state)), copied(tree))
    assert sum("saved in bfloat16" in line for line in lines) == 1
    other = made(load_full_state_path=str(tmp_path), per_device_batch_size=2)
    state = start(other, open_dataset(other.config, print), None, print, schedule_given=False).state
    dtypes = jax.tree.map(lambda leaf: leaf.dtype, tree.inner_state.params)
    assert_equal_bits(copied(other.codec.unpack(state).params), copied(cast(tree.params, dtypes)))

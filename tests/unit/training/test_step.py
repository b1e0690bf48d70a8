"""The training step: accumulation, the trainable part, the mesh, and the compiled program."""

import functools
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compiler import unoptimized
from support import (
    arguments,
    assert_equal_bits,
    copied,
    first_tree,
    packed_batch,
    state_from,
    tiny_config,
    zeros,
)

from trainer.backends.base import TrainTree
from trainer.backends.registry import make_model
from trainer.config.load import load
from trainer.layers.sown import Total
from trainer.objectives.base import Sums, Weights
from trainer.objectives.forward import hidden_states
from trainer.objectives.next_token import NextToken
from trainer.ops.paths import by_name
from trainer.optim.optimizer import make_optimizer
from trainer.state.shardings import ParamShardings
from trainer.training.batches import placed
from trainer.training.build import build
from trainer.training.step import dropout_key, make_update


def gradients(devices=1, **overrides):
    """Returns gradients, computed from the parameter change of an SGD step with rate 1.

    All calls use the same parameters and the same 16 rows.
    """
    settings = {"opt_type": "sgd", "learning_rate": 1.0, "lr_schedule_type": "constant", "warmup_steps_fraction": 0}
    settings |= {"gradient_clipping_threshold": 0, "dropout_rate": 0.2, "attention_dropout_rate": 0.2}
    settings |= {"z_loss_multiplier": 0.1, "label_smoothing": 0.2, "record_internal_nn_metrics": 1}
    run = build(load(arguments("nnx", **settings | overrides)).config, jax.devices()[:devices])
    assert run.rows == 16
    state = state_from(run, initial())
    before = initial().params
    step = run.step.lower(*run.abstract_args()).compile()
    state, metrics = step(state, placed(run, packed_batch(run.config, 16)), ())
    after = copied(run.codec.unpack(state).params)
    change = jax.tree.map(lambda a, b: a - b, before, after)
    assert all(np.any(leaf != 0) for leaf in jax.tree.leaves(change))
    return change, jax.device_get(metrics)


@functools.cache
def initial():
    """Returns the first state of all runs in this file."""
    run = build(load(arguments("nnx", opt_type="sgd", gradient_clipping_threshold=0)).config, jax.devices()[:1])
    return first_tree(run)


@functools.cache
def by_default():
    """Returns the run of TINY, whose step compiles once for several tests, and its first state."""
    run = build(load(arguments("nnx")).config, jax.devices()[:1])
    return run, first_tree(run, initial().params)


def few(params):
    """Returns a subtree with the MLP and last norm, for which an optimizer compiles faster."""
    decoder = params["decoder"]
    return {"decoder": {"layers": {"mlp": decoder["layers"]["mlp"]}, "decoder_norm": decoder["decoder_norm"]}}


def first_of_few(config):
    """Returns the optimizer of `config`, and the first state of a run with few parameters."""
    tx, params = make_optimizer(config, few(make_model(config).param_axes)), few(initial().params)
    opt_state = zeros(jax.eval_shape(tx.init, params))
    return tx, jax.device_put(TrainTree(np.int32(0), params, opt_state, {}))


def update_of(config, tx, tree, loss):
    """Returns the update of a step without a model: its loss is the sum of `loss` over all parameters."""
    one = jnp.ones((), jnp.int32)
    objective = SimpleNamespace(
        captures=(),
        weights=lambda batch: Weights({"lm_loss": one}, one),
        sums=lambda params, *_: Sums({"lm_loss": sum(jnp.sum(loss(leaf)) for leaf in jax.tree.leaves(params))}, {}, {}),
    )
    here = jax.tree.map(lambda leaf: leaf.sharding, tree.params)
    return make_update(config, tx, objective, ParamShardings(here, here), [], here)


@functools.cache
def reference():
    return gradients(per_device_batch_size=16)


MESH = {"ici_data_parallelism": 2, "ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2}


@pytest.mark.rest(covered_by="all at once", cases=("microbatches", "tiles", "data", "fsdp"))
@pytest.mark.parametrize(
    ("devices", "microbatches", "keys"),
    [
        (8, 2, MESH | {"num_vocab_tiling": 4}),
        (1, 4, {}),
        (1, 1, {"num_vocab_tiling": 8}),
        (8, 1, {"ici_data_parallelism": 8, "ici_fsdp_parallelism": 1}),
        (8, 1, {"ici_fsdp_parallelism": 8}),
    ],
    ids=["all at once", "microbatches", "tiles", "data", "fsdp"],
)
def test_meshes_microbatches_and_tiles_give_the_same_gradients(devices, microbatches, keys):
    """Tiles are parts of the tokens in the loss."""
    tokens = (packed_batch(tiny_config("nnx"), 16)["targets_segmentation"] != 0).sum(1)
    parts = [tokens[j::microbatches].sum() for j in range(microbatches)]
    assert len(set(parts)) == microbatches, "the microbatches should hold unequal numbers of real tokens"

    expected, expected_metrics = reference()
    rows = {"per_device_batch_size": 16 // microbatches // devices, "gradient_accumulation_steps": microbatches}
    actual, metrics = gradients(devices, **rows, **keys)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert np.abs(a - b).max() <= min(1e-5 * np.abs(b).max(), 2e-6 * max(np.abs(b).max(), 1))
    for name in ("loss", "lm_loss", "z_loss", "label_smoothing_loss", "grad_norm", "tokens"):
        rtol = 1e-6 if name == "loss" else 1e-5
        np.testing.assert_allclose(metrics[name], expected_metrics[name], rtol=rtol)


def test_gradients_equal_finite_differences():
    config = tiny_config("nnx", z_loss_multiplier=1e-2)
    params, rest, batch = initial().params, initial().rest, packed_batch(config, 4)
    objective = NextToken(make_model(config).apply, config.z_loss_multiplier)

    def loss(params):
        return sum(objective.sums(params, rest, batch, None).minimized.values())

    grads = copied(jax.jit(jax.grad(loss))(params))
    rng = np.random.default_rng(0)
    direction = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), params)
    slope = sum(np.vdot(g, d) for g, d in zip(jax.tree.leaves(grads), jax.tree.leaves(direction), strict=True))

    @jax.jit
    def at(t):
        return loss(jax.tree.map(lambda p, d: p + t * d, params, direction))

    h = 2e-3
    one, minus_one, two, minus_two = (float(at(n * h)) for n in (1, -1, 2, -2))
    difference = (8 * (one - minus_one) - (two - minus_two)) / (12 * h)
    np.testing.assert_allclose(difference, slope, rtol=5e-3)


def test_loss_terms_and_statistics():
    _, metrics = reference()
    config, tree = tiny_config("nnx", dropout_rate=0.2, attention_dropout_rate=0.2), initial()
    model, batch = make_model(config), packed_batch(config, 16)

    @jax.jit
    def forward(params):
        hidden, sown = hidden_states(model.apply, params, tree.rest, batch, dropout_key(config, tree.step), (Total,))
        return model.apply(params, tree.rest, hidden, method="head")[0], sown

    logits, sown = forward(tree.params)
    logits = np.asarray(logits, np.float64)
    real = batch["targets_segmentation"] != 0
    log_z = np.log(np.exp(logits).sum(-1))
    nll = log_z - np.take_along_axis(logits, batch["targets"][..., None], -1)[..., 0]
    np.testing.assert_allclose(metrics["tokens"], real.sum())
    np.testing.assert_allclose(metrics["lm_loss"], nll[real].mean(), rtol=1e-5)
    np.testing.assert_allclose(metrics["z_loss"], 0.1 * (log_z[real] ** 2).mean(), rtol=1e-5)
    smoothing = 0.2 * ((log_z - logits.mean(-1)) - nll)[real].mean()
    np.testing.assert_allclose(metrics["label_smoothing_loss"], smoothing, rtol=1e-5)
    terms = metrics["lm_loss"] + metrics["z_loss"] + metrics["label_smoothing_loss"]
    np.testing.assert_allclose(metrics["loss"], terms, rtol=1e-6)
    assert metrics["decoder/layers/output_mean"].shape == (config.base_num_decoder_layers,)
    totals = sown["Total"]
    assert totals["decoder/layers/output_count"].tolist() == [real.sum() * config.base_emb_dim] * 2
    variance = totals["decoder/layers/output_square_sum"] / totals["decoder/layers/output_count"]
    np.testing.assert_allclose(
        metrics["decoder/layers/output_stddev"] ** 2 + metrics["decoder/layers/output_mean"] ** 2, variance, rtol=1e-4
    )


SGD = {"opt_type": "sgd", "learning_rate": 1.0, "lr_schedule_type": "constant", "warmup_steps_fraction": 0}
SGD |= {"gradient_clipping_threshold": 0}


def test_gradients_wait_in_grad_dtype():
    """They are rounded after the sum over microbatches, and the update receives the rounded gradients."""
    config = tiny_config("nnx", **SGD, gradient_accumulation_steps=3, grad_dtype="bfloat16")
    tx, tree = first_of_few(config)
    update, batch = jax.jit(update_of(config, tx, tree, lambda leaf: leaf * leaf / 2)), packed_batch(config, 12)
    new, metrics = update(tree, batch)
    before, grads = copied(tree.params), jax.tree.map(lambda leaf: np.asarray(leaf + leaf + leaf), tree.params)
    rounded = jax.tree.map(lambda grad: grad.astype(jnp.bfloat16).astype(np.float32), grads)
    assert_equal_bits(copied(new.params), jax.tree.map(lambda p, grad: p - grad, before, rounded))
    norms = [
        np.sqrt(sum(np.sum(np.square(leaf, dtype=float)) for leaf in jax.tree.leaves(it))) for it in (rounded, grads)
    ]
    assert abs(norms[1] / norms[0] - 1) > 1e-5, "they can be told apart"
    np.testing.assert_allclose(metrics["grad_norm"], norms[0], rtol=1e-6)
    assert_not_finite_is_skipped(lambda tree: update(tree, batch), tree)


def assert_not_finite_is_skipped(update, tree, broken=np.nan):
    """Checks that `update` only counts the step if one parameter makes the loss and all gradients nonfinite."""
    bad = copied(tree)
    bad.params["decoder"]["decoder_norm"]["scale"][0] = broken
    after, metrics = copied(update(bad))
    assert metrics["skipped"] == 1
    assert not np.isfinite(metrics["loss"])
    assert after.step == bad.step + 1
    assert_equal_bits(after.params, bad.params)
    assert_equal_bits(after.opt_state, bad.opt_state)


@pytest.mark.parametrize(("stored", "held"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_the_optimizer_gets_gradients_in_grad_dtype(stored, held):
    seen = []

    def update(grads, state, params):
        seen.extend(leaf.dtype for leaf in jax.tree.leaves(grads))
        return grads, state

    config = tiny_config("nnx", weight_dtype=stored, grad_dtype=held)
    params = jax.device_put(jax.tree.map(lambda leaf: leaf.astype(jnp.dtype(stored)), initial().params))
    tree = initial()._replace(params=params, opt_state=optax.EmptyState())
    tx = optax.GradientTransformation(lambda params: optax.EmptyState(), update)
    jax.eval_shape(update_of(config, tx, tree, jnp.sin), tree, packed_batch(config, 2))
    assert set(seen) == {jnp.dtype(held)}


def test_only_trainable_parameters_move_and_have_moments():
    config = tiny_config("nnx", trainable_parameters_mask="[mlp/wo, decoder_norm]")
    tx, before = first_of_few(config)
    after, metrics = jax.jit(update_of(config, tx, before, jnp.sin))(before, packed_batch(config, 2))
    old, new = by_name(before.params), by_name(after.params)
    moved = {name for name in old if not np.array_equal(old[name], new[name])}
    assert moved == {"decoder/layers/mlp/wo/kernel", "decoder/decoder_norm/scale"} < old.keys()
    moments = [leaf for leaf in jax.tree.leaves(before.opt_state) if leaf.ndim]
    assert len(moments) == 2 * len(moved)
    assert metrics["grad_norm"] > 0


@pytest.mark.parametrize("broken", ["nan", "inf"])
def test_a_step_that_is_not_finite_leaves_no_trace_but_its_count(broken):
    run, tree = by_default()
    batch = placed(run, packed_batch(run.config, run.rows))

    def step(tree):
        state, metrics = run.step(state_from(run, tree), batch, ())
        return run.codec.unpack(state), metrics

    after, metrics = step(tree)
    assert metrics["skipped"] == 0
    assert_not_finite_is_skipped(step, after, float(broken))


# The second moment of a zero gradient is 0. Without epsilon, Adam computes 0 / 0.
ZERO_BY_ZERO = {"adam_eps": 0.0, "warmup_steps_fraction": 0.0}
OVERFLOW = {"learning_rate": 1e38, "adam_weight_decay": 100.0, "warmup_steps_fraction": 0.0}


@pytest.mark.parametrize(("keys", "loss"), [(ZERO_BY_ZERO, lambda leaf: 0 * leaf), (OVERFLOW, jnp.sin)])
def test_an_update_that_is_not_finite_is_told_though_its_gradient_is(keys, loss):
    config = tiny_config("nnx", **keys)
    tx, tree = first_of_few(config)
    tree, metrics = jax.jit(update_of(config, tx, tree, loss))(tree, packed_batch(config, 2))
    assert np.isfinite([metrics["loss"], metrics["grad_norm"], metrics["learning_rate"]]).all()
    assert (metrics["skipped"], metrics["finite"]) == (0, 0)
    assert not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(copied(tree.params)))


def test_optimizer_state_that_is_not_finite_is_told():
    """With an optimizer whose parameters stay finite."""

    def update(grads, state, params):
        return jax.tree.map(jnp.zeros_like, grads), state / 0

    tx = optax.GradientTransformation(lambda params: jnp.ones(()), update)
    config = tiny_config("nnx")
    tree = jax.device_put(initial()._replace(opt_state=np.ones((), np.float32)))
    update = update_of(config, tx, tree, jnp.square)
    tree, metrics = jax.jit(update)(tree, packed_batch(config, 2))
    assert metrics["finite"] == 0
    assert tree.opt_state == np.inf


def test_finite_steps_are_those_of_the_optimizer_alone():
    """The select between the new and the old state changes no bit of an accepted step."""
    config = tiny_config("nnx")
    tx, tree = first_of_few(config)

    def plain(tree, batch):
        grads = jax.tree.map(jnp.cos, tree.params)
        updates, opt_state = tx.update(grads, tree.opt_state, tree.params)
        return tree._replace(step=tree.step + 1, params=optax.apply_updates(tree.params, updates), opt_state=opt_state)

    batch = packed_batch(config, 2)
    update = update_of(config, tx, tree, jnp.sin)
    with unoptimized():
        (found, metrics), expected = (jax.jit(it)(tree, batch) for it in (update, plain))
    assert metrics["skipped"] == 0
    assert_equal_bits(copied(found), copied(expected))


def test_compiled_once_and_donated():
    run, tree = by_default()
    state = first = state_from(run, tree)
    for i in range(3):
        state, _ = run.step(state, placed(run, packed_batch(run.config, run.rows, seed=i)), ())
    assert run.step._cache_size() == 1
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(first))


def test_parameters_and_moments_are_really_sharded():
    """test_shardings.py shows that the initial state has these shardings."""
    axes = {"ici_data_parallelism": 1, "ici_fsdp_parallelism": 4, "ici_tensor_parallelism": 2}
    run = build(load(arguments("nnx", per_device_batch_size=1, **axes)).config, jax.devices())
    tree = run.codec.unpack(run.abstract_args()[0])
    kernel = tree.params["decoder"]["layers"]["mlp"]["wi_0"]["kernel"]
    layers, width, hidden = kernel.shape
    assert kernel.sharding.shard_shape(kernel.shape) == (layers, width // 4, hidden // 2)

    def numbers(of, shape_of):
        return sum(math.prod(shape_of(leaf)) for leaf in jax.tree.leaves(of))

    total, on_each = numbers(tree, np.shape), numbers(tree, lambda leaf: leaf.sharding.shard_shape(leaf.shape))
    norms = [leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree) if "norm" in jax.tree_util.keystr(path)]
    assert on_each <= total / 8 + numbers(norms, np.shape) + 16


def test_initialized_sharded_and_never_whole_on_one_device():
    axes = {"ici_data_parallelism": 1, "ici_fsdp_parallelism": 8}
    sizes = {"vocab_size": 4096, "base_emb_dim": 64, "per_device_batch_size": 1}
    run = build(load(arguments("nnx", **axes, **sizes)).config, jax.devices())
    init = jax.jit(run.init).lower().compile()
    table = 4096 * 64 * 4
    memory = init.memory_analysis()
    assert memory.output_size_in_bytes < 3 * table / 8 * 1.3  # parameters and two moments
    assert memory.temp_size_in_bytes < table / 2


@functools.cache
def traced(tied):
    keys = {"logits_via_embedding": tied, "remat_policy": "none", "per_device_batch_size": 1}
    run = build(load(arguments("nnx", **keys)).config, jax.devices())
    return str(jax.make_jaxpr(run.step)(*run.abstract_args()))


@pytest.mark.parametrize("tied", [True, False])
def test_the_gradient_of_the_head_is_reduced_early(tied):
    head = f"f32[{'64,16' if tied else '16,64'}]"
    barriers = [line for line in traced(tied).splitlines() if "optimization_barrier" in line]
    assert [line for line in barriers if head in line], barriers


def test_no_remat_recomputes_no_product():
    """Neither does the code around the loss. tests/unit/layers/test_remat.py counts the products for every policy."""
    # The loop body has 7 projections and 2 attention products, each with two products in the backward pass. The head
    # has one forward and two backward products.
    assert traced(True).count("dot_general") == 3 * 9 + 3


def test_the_learning_rate_in_the_metrics_is_that_of_the_step_itself():
    """With gradients of 1, the rate is the amount that SGD subtracts."""
    config = tiny_config("nnx", opt_type="sgd", steps=8, warmup_steps_fraction=0.5, gradient_clipping_threshold=0)
    tx, tree = first_of_few(config)
    update = jax.jit(update_of(config, tx, tree, lambda leaf: leaf))
    rates = []
    for _ in range(4):
        before = np.asarray(tree.params["decoder"]["decoder_norm"]["scale"])
        tree, metrics = update(tree, packed_batch(config, 2))
        moved = before - np.asarray(tree.params["decoder"]["decoder_norm"]["scale"])
        rates.append(float(metrics["learning_rate"]))
        np.testing.assert_allclose(moved, rates[-1], atol=2e-7)  # rounding of parameters near 1
    assert np.diff(rates).min() > 1e-4, "they can be told apart"

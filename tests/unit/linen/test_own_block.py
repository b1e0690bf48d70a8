"""A team's hand-written Linen block in the Linen decoder stacks."""

import functools
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiler import unoptimized
from flax import linen
from support import assert_equal_bits, compiled, copied, packed_batch, random_params, tiny_config

from trainer.backends.registry import make_model
from trainer.config.errors import UserError
from trainer.layers.sown import SownValue, Total
from trainer.objectives.base import prepared
from trainer.objectives.next_token import NextToken
from trainer.objectives.registry import make_objective
from trainer.ops.random import seed_key
from trainer.weights.model_keys import check_words, model_config
from trainer.weights.open import weight_shapes

GUIDES = Path(__file__).parents[3] / "docs" / "guides"
LINEN, NNX = "team_block:LinenBlock", "team_block:NNXBlock"
LINEN_STACKS = ("nnx_linen_decoder", "bridged_linen_decoder", "linen")


@pytest.fixture(autouse=True)
def in_the_guides(monkeypatch):
    monkeypatch.syspath_prepend(str(GUIDES))


def model_of(combination, block, **keys):
    config = tiny_config(combination, decoder_block=block, remat_policy="full", **keys)
    return config, make_model(config)


def value_and_grads(config, model, capture=()):
    """Returns a function of parameters and a dropout key (or None) that returns ((loss, sown), gradients)."""
    objective = NextToken(model.apply)

    def loss(params, key):
        sums = objective.sums(params, {}, packed_batch(config, 4), key, capture)
        return sums.minimized["lm_loss"], sums.sown

    return jax.value_and_grad(loss, has_aux=True)


def initial(model):
    return copied(compiled(model.init, seed_key(0))(seed_key(0))[0])


@functools.cache
def lowered(combination, scan=True):
    """Returns the lowered loss and gradients, the initial parameters, and their axes."""
    config, model = model_of(combination, LINEN, scan_layers=scan)
    params = initial(model)
    return jax.jit(value_and_grads(config, model)).lower(params, None), params, model.param_axes


@functools.cache
def trained(scan=True):
    program, params, _ = lowered("linen", scan)
    with unoptimized():
        return copied(program.compile()(params, None)), params


@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("combination", LINEN_STACKS[:-1])
def test_the_same_program_in_every_linen_stack(combination, scan):
    (reference, *first), (program, *found) = lowered("linen", scan), lowered(combination, scan)
    assert program.as_text() == reference.as_text()
    assert_equal_bits(found[0], first[0])
    assert found[1] == first[1]


def test_its_axes_and_gradients():
    axes = lowered("linen")[2]
    assert axes["decoder"]["layers"]["c_attn"] == {"bias": ("layers", None), "kernel": ("layers", "embed", "mlp")}
    assert all(np.any(leaf) for leaf in jax.tree.leaves(trained()[0][1]))


def test_unrolled_it_starts_the_same_and_computes_the_same():
    ((value, _), grads), params = trained(scan=False)
    ((rolled, _), rolled_grads), rolled_params = trained()
    assert_equal_bits(params, rolled_params)
    np.testing.assert_allclose(value, rolled, rtol=1e-6)  # see tests/unit/models/test_blocks.py
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max()), grads, rolled_grads)


def renamed(params):
    """Returns the Linen block's parameters under the NNX block's names."""
    import team_block

    layers = params["decoder"]["layers"]
    names = team_block.NNXBlock.PARAMETER_NAMES
    return params | {"decoder": params["decoder"] | {"layers": {ours: layers[its] for ours, its in names.items()}}}


def test_the_nnx_block_that_takes_its_place_computes_the_same():
    ((value, _), grads), params = trained()
    program, same = (
        jax.jit(value_and_grads(*model_of(combination, NNX))).lower(renamed(params), None)
        for combination in ("nnx", "linen")
    )
    assert program.as_text() == same.as_text()
    with unoptimized():
        other = copied(program.compile()(renamed(params), None))
    assert_equal_bits(other[1], renamed(grads))
    assert other[0][0] == value


class Minimum(SownValue):
    """A user-defined type of sown values."""

    combine = staticmethod(jnp.min)


class Sowing(linen.Module):
    """Sows like a built-in block, and draws dropout from Linen's own generators."""

    config: object

    @linen.compact
    def __call__(self, x, cache, context):
        x = linen.Dropout(0.5, deterministic=context.key is None)(x + linen.Dense(x.shape[-1])(x))
        self.sow("Total", "outputs", x.sum())
        self.sow("Minimum", "least", x.min())
        return x, cache


def test_what_it_sows_arrives_and_dropout_draws_from_the_key(monkeypatch):
    monkeypatch.setitem(sys.modules, "sowing", SimpleNamespace(Sowing=Sowing))
    results = []
    for combination, scan in (("linen", True), ("nnx_linen_decoder", True), ("linen", False)):
        config, model = model_of(combination, "sowing:Sowing", scan_layers=scan)
        params = random_params(model.abstract[0])
        step = compiled(value_and_grads(config, model, (Total, Minimum)), params, seed_key(1))
        results.append([copied(step(params, seed_key(seed))) for seed in (1, 2)])
    assert_equal_bits(*results[:2])
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), results[1][0][0], results[2][0][0])
    losses = {float(loss) for (loss, _), _ in results[0]}
    assert len(losses) == 2
    (_, sown), _ = results[0][0]
    assert sown["Total"]["decoder/layers/outputs"].shape == (config.base_num_decoder_layers,)
    assert np.all(sown["Minimum"]["decoder/layers/least"] < 0)


@pytest.mark.parametrize(
    ("combination", "change"), [("nnx", "nnx_linen_decoder"), ("bridged", "bridged_linen_decoder")]
)
def test_an_nnx_stack_refuses_it_and_says_how_to_change(combination, change):
    with pytest.raises(UserError, match=rf"LinenBlock is not an nnx.Module; .* \(combination {change}\)"):
        model_of(combination, LINEN)


def test_export_finds_its_parameters_under_flags_with_a_linen_stack():
    words = [f"decoder_block={LINEN}", "base_num_decoder_layers=2"]
    with pytest.raises(UserError, match="set pure_nnx_decoder=false"):
        weight_shapes(model_config({}, words, ""))
    words.append("pure_nnx_decoder=false")
    config = model_config({}, words, "")
    check_words({}, words, config, "")
    shapes = weight_shapes(config)
    assert {name.rpartition("/")[0] for name in shapes} >= {"decoder/layers/c_attn", "decoder/layers/ln_1"}
    assert shapes["decoder/layers/c_attn/kernel"][0] == 2


class Boxed(linen.Module):
    """Names its axes with Linen's older kind of box."""

    config: object

    @linen.compact
    def __call__(self, x, cache, context):
        init = linen.with_partitioning(linen.initializers.lecun_normal(), ("embed", "mlp"))
        return x + linen.Dense(x.shape[-1], kernel_init=init, name="mix")(x), cache


class WithStatistics(linen.Module):
    config: object

    @linen.compact
    def __call__(self, x, cache, context):
        return linen.BatchNorm(use_running_average=False)(x), cache


def test_axes_named_by_the_older_kind_of_box(monkeypatch):
    """Runs in every combination with a Linen stack; other stacks refuse the block."""
    monkeypatch.setitem(sys.modules, "boxed", SimpleNamespace(Boxed=Boxed))
    for combination in LINEN_STACKS:
        _, model = model_of(combination, "boxed:Boxed")
        axes = model.param_axes["decoder"]["layers"]
        assert axes == {"mix": {"bias": ("layers", None), "kernel": ("layers", "embed", "mlp")}}


@pytest.mark.parametrize("combination", LINEN_STACKS)
def test_what_a_block_may_not_hold(combination, monkeypatch):
    monkeypatch.setitem(sys.modules, "statistics_block", SimpleNamespace(Block=WithStatistics))
    with pytest.raises(UserError, match="has state that a forward pass would update: batch_stats"):
        model_of(combination, "statistics_block:Block")


def test_what_is_no_module_at_all():
    with pytest.raises(UserError, match="neither an nnx"):
        model_of("linen", "pathlib:Path")


@functools.cache
def with_modules(combination, block):
    """Returns the lowered loss and gradients, abstract result, parameters and axes of a model with a
    multi-token-prediction module."""
    config = tiny_config(combination, decoder_block=block, mtp_num_layers=1, dropout_rate=0.5, remat_policy="full")
    model = make_model(config)
    params = initial(model)
    objective = make_objective(config, model)
    batch = prepared(objective, packed_batch(config, 4))

    def loss(params, key):
        sums = objective.sums(params, {}, batch, key, (Total,))
        return sums.minimized["mtp_loss"].sum(), sums.sown

    program = jax.jit(jax.value_and_grad(loss, has_aux=True)).lower(params, seed_key(1))
    return program, program.out_info, params, model.param_axes


@pytest.mark.rest(covered_by="the block in a plain stack")
@pytest.mark.parametrize("block", [LINEN, "sowing:Sowing"])
def test_modules_of_multi_token_prediction_hold_it(monkeypatch, block):
    monkeypatch.setitem(sys.modules, "sowing", SimpleNamespace(Sowing=Sowing))
    program, shapes, params, axes = with_modules("linen", block)
    for combination in LINEN_STACKS[:-1]:
        other = with_modules(combination, block)
        assert other[0].as_text() == program.as_text()
        assert other[1] == shapes
        assert_equal_bits(other[2], params)
        assert other[3] == axes
    if block == LINEN:
        own = axes["mtp_block"]["mtp_layer_1"]["mtp_1_transformer_layer"]
        assert own["c_attn"] == {"bias": (None,), "kernel": ("embed", "mlp")}
        _, grads = program.compile()(params, seed_key(1))
        assert all(np.any(leaf) for leaf in jax.tree.leaves(grads["mtp_block"]))
    else:
        assert shapes[0][1]["Total"]["mtp_block/mtp_layer_1/mtp_1_transformer_layer/outputs"].shape == ()


@pytest.mark.rest(covered_by="the block in a plain stack")
def test_modules_hold_the_nnx_block_that_takes_its_place(monkeypatch):
    axes = [with_modules(combination, NNX)[3] for combination in ("nnx", "linen", "bridged_linen_decoder")]
    assert axes[0] == axes[1] == axes[2]
    texts = [with_modules(combination, NNX)[0].as_text() for combination in ("nnx", "linen", "bridged_linen_decoder")]
    assert texts[0] == texts[1] == texts[2]

"""The examples of docs/guides/extending.md: a family, a product, an objective and an optimizer, each in one file."""

import importlib
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support import (
    ALL_COMBINATIONS,
    arguments,
    assert_equal_bits,
    copied,
    lowered_update,
    packed_batch,
    state_from,
    tiny_config,
)

from trainer.config.errors import UserError
from trainer.config.load import load
from trainer.leaves.source import names_of
from trainer.objectives.base import Weights
from trainer.optim.keys import Given
from trainer.optim.registry import OPTIMIZERS
from trainer.products.context import Context
from trainer.training.batches import placed
from trainer.training.build import build
from trainer.training.evaluate import summarize


@pytest.fixture
def guides(monkeypatch):
    """Returns a function that imports docs.guides.NAME, like `python -m` in the repository's folder."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3]))
    return lambda name: importlib.import_module(f"docs.guides.{name}")


def test_the_family_is_the_same_program_in_nnx_and_in_linen(guides):
    guides("own_family")
    own = {"decoder_block": "docs.guides.own_family:FAMILY", "base_num_decoder_layers": 2, "dropout_rate": 0.1}
    ends = (ALL_COMBINATIONS[0], ALL_COMBINATIONS[-1])  # the other combinations consist of parts of these two
    runs = [build(load(arguments(name, **own)).config, jax.devices()[:1]) for name in ends]
    assert len({lowered_update(run).as_text() for run in runs}) == 1
    names = {name for name in names_of(runs[0].codec.unpack(runs[0].abstract_state).params) if "norm" in name}
    assert names == {"decoder/layers/norm/scale", "decoder/decoder_norm/scale"}


@pytest.mark.rest(covered_by="adapters of every kind in unit/training/test_lora.py")
def test_adapters_for_queries_and_experts_train_alike_in_nnx_and_linen(guides):
    """Also with experts sharded over devices. The base has the same initial values as without adapters."""
    guides("own_product")
    keys = {"num_experts": 4, "num_experts_per_tok": 2, "base_moe_mlp_dim": 16, "base_num_decoder_layers": 1}
    keys |= {"learning_rate": 1e-2, "sharding_tolerance": 1, "per_device_batch_size": 8}
    own = keys | {"decoder_block": "docs.guides.own_product:FAMILY", "trainable_parameters_mask": "[product]"}
    mesh = {"ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2, "ici_expert_parallelism": 2}

    def run_of(combination, devices=1, **keys):
        return build(load(arguments(combination, **keys)).config, jax.devices()[:devices])

    def trained(run, tree):
        state, step, losses = state_from(run, tree), run.compile(), []
        for i in range(3):
            state, metrics = step(state, placed(run, packed_batch(run.config, 8)), ())
            losses.append(float(run.computation.read(metrics, i)["loss"]))
        return losses, names_of(copied(run.codec.unpack(state).params))

    first, last = (run_of(name, **own) for name in (ALL_COMBINATIONS[0], ALL_COMBINATIONS[-1]))
    tree = copied(first.codec.unpack(first.init()))
    (losses, params), (others, other) = (trained(run, tree) for run in (first, last))
    assert losses == others
    assert_equal_bits(params, other)
    assert losses[2] < losses[1] < losses[0]
    before = names_of(tree.params)
    assert {name for name in before if "product" in name} == {
        f"decoder/layers/{layer}/{side}"
        for layer in ("self_attention/query/product", "MoeBlock_0/product/wi_0")
        for side in ("down", "up")
    }
    assert all((params[name] == before[name]).all() == ("product" not in name) for name in before)
    plain = run_of(ALL_COMBINATIONS[0], decoder_block="mixtral", **keys)
    base = names_of(copied(plain.codec.unpack(plain.init()).params))
    assert_equal_bits(base, {name: before[name] for name in base})
    spread = run_of(ALL_COMBINATIONS[0], 8, **own | mesh | {"per_device_batch_size": 1})
    np.testing.assert_allclose(trained(spread, tree)[0], losses, rtol=1e-5)


def test_both_branches_of_the_family_read_the_same_norm(guides):
    config = tiny_config(ALL_COMBINATIONS[0])
    block = guides("own_family").ParallelBlock(config, nnx.Rngs(0))
    x = np.random.default_rng(0).normal(size=(2, 16, config.base_emb_dim)).astype(np.float32)
    batch = packed_batch(config, 2)
    context = Context(batch["inputs_position"], batch["inputs_segmentation"], batch["row"], None)

    def added(*zero):
        changed = nnx.clone(block)
        for layer in zero:
            kernel = {"mlp": changed.mlp.wo, "attention": changed.self_attention.out}[layer].kernel
            kernel[...] = jnp.zeros_like(kernel[...])
        return changed(x, None, context)[0] - x

    zeros = (), ("mlp",), ("attention",), ("mlp", "attention")
    both, attention, mlp, neither = jax.jit(lambda: [added(*zero) for zero in zeros])()
    np.testing.assert_allclose(both, attention + mlp, atol=1e-5)  # float32 sums
    assert not np.any(neither)
    assert np.abs(mlp).max() > 0.01


def test_the_objective_by_its_formula(guides):
    rng = np.random.default_rng(0)
    logits, target = rng.normal(size=(2, 5, 7)), rng.integers(7, size=(2, 5))
    segments = np.array([[1, 1, 1, 2, 2], [1, 1, 0, 0, 0]])

    def apply(params, rest, *inputs, method=None, **others):
        return jnp.asarray(logits, jnp.float32), {}, None

    batch = dict.fromkeys(("inputs", "inputs_position", "inputs_segmentation"), segments)
    batch |= {"row": np.arange(2), "targets": target, "targets_segmentation": segments}
    focal = guides("own_objective").Focal(apply)
    minimized, measured, tokens = jax.jit(
        lambda: (*focal.sums(None, None, batch, None)[:2], focal.weights(batch).tokens)
    )()
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    log_p = np.log(np.take_along_axis(p, target[..., None], -1)[..., 0])
    seen = segments != 0
    np.testing.assert_allclose(minimized["focal_loss"], (-((1 - np.exp(log_p)) ** 2) * log_p)[seen].sum(), 1e-5)
    np.testing.assert_allclose(measured["lm_loss"], -log_p[seen].sum(), 1e-5)
    assert tokens == 7


def test_the_objectives_program_trains(guides, capsys):
    words = arguments(ALL_COMBINATIONS[0], steps=1, per_device_batch_size=1, eval_interval=1)
    guides("own_objective").main(words)
    first, last = capsys.readouterr().out.splitlines()[-2:]
    row = dict(word.split("=") for word in first.split())
    assert 0 < float(row["loss"]) < float(row["lm_loss"])
    assert last.startswith("step=0 eval_loss=")
    words += ["z_loss_multiplier=0.1", "label_smoothing=0.1", "mtp_num_layers=1"]
    with pytest.raises(SystemExit):
        guides("own_objective").main(words)
    said = capsys.readouterr().err
    for key in ("z_loss_multiplier=0.1", "label_smoothing=0.1", "mtp_num_layers=1"):
        assert f"{key}: the objective Focal does not read it" in said


def test_evaluation_reports_what_an_objective_measures(guides):
    """It does not report the cross entropy a second time."""

    class Measuring(guides("own_objective").Focal):
        def weights(self, batch):
            terms, tokens = super().weights(batch)
            return Weights(terms | {"first": jnp.float32(4)}, tokens)

        def sums(self, *given, **how):
            found = super().sums(*given, **how)
            return found._replace(measured=found.measured | {"first": jnp.float32(2)})

    def apply(params, rest, *inputs, method=None, **others):
        return jnp.zeros((1, 3, 7)), {}, None

    batch = dict.fromkeys(("inputs", "inputs_position", "inputs_segmentation"), np.ones((1, 3), int))
    batch |= {"row": np.arange(1), "targets": np.ones((1, 3), int), "targets_segmentation": np.ones((1, 3), int)}
    means = jax.jit(lambda: Measuring(apply).evaluation(None, None, batch))()
    metrics = summarize([{"means": means, "bytes": 0}])
    assert (metrics["eval_first"], "eval_lm_loss" in metrics) == (0.5, False)


def test_the_optimizer_by_its_formula(guides, monkeypatch):
    keys = SimpleNamespace(signum_b1=0.9, signum_weight_decay=0.5, mu_dtype="float32")
    given = Given(lambda step: 0.01 * (step + 1), lambda params: {"w": True, "scale": False}, None)
    signum = guides("own_optimizer").signum
    optimizer = signum(keys, given)
    params = {"w": np.full(4, 2.0, np.float32), "scale": np.full(4, 2.0, np.float32)}
    state, mean, rng = jax.jit(optimizer.init)(params), np.zeros(4), np.random.default_rng(0)
    update = jax.jit(optimizer.update)
    for step in range(3):
        gradient = rng.normal(size=4)
        mean = 0.9 * mean + 0.1 * gradient
        tree = dict.fromkeys(params, gradient.astype(np.float32))
        updates, state = update(tree, state, params)
        rate = 0.01 * (step + 1)
        np.testing.assert_allclose(updates["w"], -rate * (np.sign(mean) + 0.5 * 2.0), rtol=1e-6)
        np.testing.assert_allclose(updates["scale"], -rate * np.sign(mean), rtol=1e-6)

    # A registered optimizer's state is in the train state of every combination, sharded like its parameters.
    monkeypatch.setitem(OPTIMIZERS, "sgd", lambda _, given: signum(keys, given))
    run = build(load(arguments(ALL_COMBINATIONS[0], opt_type="sgd", ici_fsdp_parallelism=2)).config, jax.devices()[:2])
    rows = {row["name"]: row["spec"] for row in run.table()["tensors"]}
    means = {name.partition("/ema/")[2]: at for name, at in rows.items() if "/ema/" in name}
    assert means == {name.removeprefix("params/"): at for name, at in rows.items() if name.startswith("params/")}


def test_an_own_family_with_experts_needs_their_width(guides):
    guides("own_product")
    words = arguments("nnx", decoder_block="docs.guides.own_product:FAMILY", num_experts=4)
    with pytest.raises(UserError, match="base_moe_mlp_dim=-1: the hidden width of an expert is missing"):
        build(load(words).config, jax.devices()[:1])

"""Regression tests, in every combination, for what broke in MaxText when NNX became its default.

The numbers are MaxText's issues and pull requests. Weights that no mapping covers (#4566) are tested in
tests/unit/checkpoint, and scanned against unrolled layers (#4369) in test_covering.py.
"""

import re
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from support import ALL_COMBINATIONS, LAST_CASE, arguments, copied, first_tree, packed_batch, state_from, tiny_config

from trainer.backends.registry import make_model
from trainer.config.errors import UserError
from trainer.config.load import load
from trainer.leaves.source import names_of
from trainer.models import families
from trainer.training.batches import placed
from trainer.training.build import build

EXPERTS = {
    **{"decoder_block": "deepseek", "attention_type": "mla", "kv_lora_rank": 8, "qk_nope_head_dim": 8},
    **{"qk_rope_head_dim": 4, "v_head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "base_num_kv_heads": 4},
    **{"base_moe_mlp_dim": 8, "shared_experts": 1, "first_num_dense_layers": 1, "base_num_decoder_layers": 3},
    **{"load_balance_loss_weight": 0.1, "router_z_loss_weight": 0.01, "logits_via_embedding": False},
}
ADAPTER = {"decoder_block": "docs.guides.own_product:FAMILY", "num_experts": 4, "base_moe_mlp_dim": 8}
CASES = {"experts": EXPERTS | {"mtp_num_layers": 1}, "adapter": ADAPTER}


@pytest.mark.rest(covered_by="nnx; one program in unit/training/test_frozen.py", cases=LAST_CASE)
@pytest.mark.parametrize("combination", ALL_COMBINATIONS)
def test_losses_gradients_and_norm_of_a_step_that_freezes_parameters(combination):
    """Four faults of MaxText.

    Router losses (#4829) and multi-token losses (#4525) were silently 0.
    A step compiled twice (#4174), and the gradient norm counted frozen parameters (#5290).
    """
    keys = EXPERTS | {"mtp_num_layers": 1, "trainable_parameters_mask": "[mtp_block,gate]", "per_device_batch_size": 2}
    keys |= {"opt_type": "sgd", "learning_rate": 1.0, "lr_schedule_type": "constant", "warmup_steps_fraction": 0}
    run = build(load(arguments(combination, **keys, gradient_clipping_threshold=0)).config, jax.devices()[:1])
    tree = first_tree(run)
    batch = placed(run, packed_batch(run.config, 2))
    state, metrics = run.step(state_from(run, tree), batch, ())
    first, after = run.computation.read(metrics, 0), copied(run.codec.unpack(state)).params
    run.step(state, batch, ())
    assert run.step._cache_size() == 1

    for name in ("moe_lb_loss", "router_z_loss", "mtp_loss"):
        assert first[name] > 0, name
    total = first["lm_loss"] + first["moe_lb_loss"] + first["router_z_loss"] + first["mtp_loss"]
    np.testing.assert_allclose(first["loss"], total, rtol=1e-6)
    before = names_of(tree.params)
    # With a learning rate of 1, SGD subtracts the gradient.
    grads = {name: before[name].astype(np.float64) - leaf for name, leaf in names_of(after).items()}
    changed = {name for name, leaf in grads.items() if np.any(leaf)}
    assert changed == {name for name in before if re.search("mtp_block|gate", name)}
    norm = np.sqrt(sum(np.sum(leaf**2) for leaf in grads.values()))
    np.testing.assert_allclose(first["grad_norm"], norm, rtol=1e-5)


def forward_of(combination, keys):
    """Returns a model, and its forward pass as a function of (params, rest)."""
    config = tiny_config(combination, **keys)
    batch = packed_batch(config, 2)
    inputs = [batch[name] for name in ("inputs", "inputs_position", "inputs_segmentation", "row")]
    model = make_model(config)
    return model, lambda params, rest: model.apply(params, rest, *inputs)[0]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("combination", ALL_COMBINATIONS)
def test_no_loop_over_layers_returns_parameters(combination, name):
    """#4405, and #5129 with adapters: the scan returned the layers' parameters as an additional output."""
    model, forward = forward_of(combination, CASES[name])
    stacked = {leaf.shape for name, leaf in names_of(model.abstract[0]).items() if families.in_stack(name)}
    scans = list(loops(jax.make_jaxpr(forward)(*model.abstract).jaxpr))
    assert scans
    for scan in scans:
        outputs = {out.aval.shape for out in scan.outvars}
        assert not outputs & stacked, outputs & stacked


def loops(jaxpr):
    """Yields the scans over a stack of two layers.

    Skips scans whose results are unused, which lowering removes: a bridged Linen decoder draws its initial parameters
    again.
    """
    live = set(jaxpr.outvars)
    for equation in reversed(jaxpr.eqns):
        if live.isdisjoint(equation.outvars):
            continue
        live.update(var for var in equation.invars if not hasattr(var, "val"))
        if equation.primitive.name == "scan" and equation.params["length"] == 2:
            yield equation
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from loops(inner)


class Scale(nnx.Param):
    """A subclass of Param."""


class Statistic(nnx.Variable):
    """A Variable that is not a Param."""


class Block(nnx.Module):
    """Computes x + x * scale, where scale is an instance of a Param subclass."""

    kind = Scale

    def __init__(self, config, rngs):
        self.scale = self.kind(jnp.ones(config.base_emb_dim), out_sharding=("norm",), eager_sharding=False)

    def __call__(self, x, cache, context):
        return x + x * self.scale, cache


class BlockWithStatistic(Block):
    """A block with a Variable that would receive no gradient."""

    kind = nnx.Param

    def __init__(self, config, rngs):
        super().__init__(config, rngs)
        self.statistic = Statistic(jnp.zeros(config.base_emb_dim))


class LinenBlockWithStatistic(linen.Module):
    """The Linen counterpart of BlockWithStatistic."""

    config: object

    @linen.compact
    def __call__(self, x, cache, context):
        scale = self.param("scale", linen.initializers.ones, x.shape[-1:])
        self.variable("statistics", "mean", jnp.zeros, x.shape[-1:])
        return x + x * scale, cache


@pytest.mark.parametrize("combination", ALL_COMBINATIONS)
def test_a_subclass_of_param_is_trained_and_other_variables_are_refused(combination, monkeypatch):
    """Such a Variable would silently receive no gradient."""
    blocks = (Block, BlockWithStatistic, LinenBlockWithStatistic)
    own = SimpleNamespace(**{block.__name__: block for block in blocks})
    monkeypatch.setitem(sys.modules, "own_blocks", own)
    config = tiny_config(combination, decoder_block="own_blocks:Block")
    if combination == ALL_COMBINATIONS[0]:
        model = make_model(config)
        params = jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), model.abstract[0])
        batch = packed_batch(config, 1)
        inputs = [batch[name] for name in ("inputs", "inputs_position", "inputs_segmentation", "row")]
        grads = names_of(jax.jit(jax.grad(lambda params: jnp.sum(model.apply(params, {}, *inputs)[0])))(params))
        assert np.all(grads["decoder/layers/scale"] != 0)
    else:
        with pytest.raises(UserError, match=r"scale is a Scale.* type nnx.Param or Buffer, not of a subclass"):
            make_model(config)
    for block in (BlockWithStatistic, LinenBlockWithStatistic):
        if block is BlockWithStatistic or combination != ALL_COMBINATIONS[0]:
            with pytest.raises(UserError, match=r"state that a forward pass would update|needs a Linen decoder stack"):
                make_model(tiny_config(combination, decoder_block=f"own_blocks:{block.__name__}"))

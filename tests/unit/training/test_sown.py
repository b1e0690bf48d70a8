"""Sown values under gradient accumulation."""

import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support import ALL_COMBINATIONS, LAST_CASE, compiled, packed_batch, random_params, tiny_config

from trainer.backends.base import TrainTree
from trainer.backends.registry import make_model
from trainer.layers.sown import Activation, Maximum, SownValue, Total, check_captured, sow
from trainer.models.llama2 import block as llama2
from trainer.objectives.next_token import NextToken
from trainer.state.shardings import ParamShardings
from trainer.training.step import make_gradients


class Minimum(SownValue):
    """A user-defined type of sown values."""

    combine = staticmethod(jnp.min)


class Block(llama2.Block):
    """Sows a maximum and a minimum in addition to the family's totals."""

    def __call__(self, x, *args):
        x, cache = super().__call__(x, *args)
        sow(self, Maximum, "output_max", jnp.max(x))
        sow(self, Minimum, "output_min", jnp.min(x))
        return x, cache


def sown(combination, microbatches, capture):
    config = tiny_config(combination, decoder_block="sowing:Block", gradient_accumulation_steps=microbatches)
    model = make_model(config)
    params = jax.device_put(random_params(model.abstract[0]), jax.devices()[0])
    tree = TrainTree(np.int32(0), params, None, {})
    here = jax.tree.map(lambda leaf: leaf.sharding, params)
    gradients = make_gradients(config, NextToken(model.apply), ParamShardings(here, here), capture)
    batch = packed_batch(config, 8)
    found = compiled(lambda *args: gradients(*args).sown, tree, batch)
    return jax.device_get(found(tree, batch))


@pytest.mark.rest(covered_by="nnx; one program", cases=LAST_CASE)
@pytest.mark.parametrize("combination", sorted({ALL_COMBINATIONS[0], ALL_COMBINATIONS[-1]}))
def test_accumulated_they_are_those_of_the_whole_batch(combination, monkeypatch):
    monkeypatch.setitem(sys.modules, "sowing", SimpleNamespace(Block=Block))
    whole, accumulated = (sown(combination, n, (Total, Maximum, Minimum)) for n in (1, 4))
    assert set(whole["Maximum"]) == {"decoder/layers/output_max"}
    assert np.all(whole["Minimum"]["decoder/layers/output_min"] < whole["Maximum"]["decoder/layers/output_max"])
    assert "decoder/layers/output_square_sum" in whole["Total"]
    # Sums are added in another order.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), accumulated, whole)


@pytest.mark.parametrize("microbatches", [1, 4])
def test_hidden_states_are_refused(microbatches, monkeypatch):
    monkeypatch.setitem(sys.modules, "sowing", SimpleNamespace(Block=Block))
    with pytest.raises(ValueError, match="Activation: does not combine across microbatches"):
        sown(ALL_COMBINATIONS[0], microbatches, (Total, Activation))


def test_two_types_of_one_name_are_refused():
    with pytest.raises(ValueError, match="two sown types have the same name"):
        check_captured((Total, type("Total", (SownValue,), {"combine": staticmethod(jnp.min)})))


@pytest.mark.parametrize("combination", sorted({ALL_COMBINATIONS[0], ALL_COMBINATIONS[-1]}))
def test_other_types_are_refused(combination, monkeypatch):
    """NNX would return them, and Linen would not."""
    monkeypatch.setitem(sys.modules, "sowing", SimpleNamespace(Block=Block))
    with pytest.raises(ValueError, match=r"Intermediate: not a sown type; derive it from .*SownValue"):
        sown(combination, 1, (Total, nnx.Intermediate))
    with pytest.raises(ValueError, match="Intermediate: not a sown type"):
        check_captured((Total,), (nnx.Intermediate,))

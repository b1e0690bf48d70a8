"""config/tensors.py lists the model's logical axes without building the model. These tests compare the two."""

import jax
import pytest
from support import ALL_COMBINATIONS, packed_batch, tiny_config

from trainer import sharding
from trainer.backends.registry import make_model
from trainer.config.keys import Config
from trainer.config.tensors import EVERY_MODEL, TENSORS, tensors_of
from trainer.models import FAMILIES


def model_axes(combination: str, tied: bool, **overrides) -> dict[str, tuple[str | None, ...]]:
    """Returns the logical axes of every parameter by name."""
    model = make_model(tiny_config(combination, logits_via_embedding=tied, **overrides))
    leaves = jax.tree_util.tree_leaves_with_path(model.param_axes)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): tuple(leaf) for path, leaf in leaves}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("combination", ALL_COMBINATIONS)
def test_the_table_has_the_axes_of_the_models_parameters(combination, tied):
    parameters = model_axes(combination, tied)
    named = {tensor for tensor in TENSORS if "/" in tensor}  # the other tensors are activations
    if tied:
        named.remove("decoder/logits_dense/kernel")
    found = {tensor: axes for name, axes in parameters.items() for tensor in named if name.endswith(tensor)}
    assert found == {tensor: TENSORS[tensor] for tensor in named}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("combination", ALL_COMBINATIONS)
def test_the_table_leaves_out_no_parameter_whose_axes_could_meet(combination, tied):
    """The axes of a parameter outside the table are a subset of the axes of some entry."""
    missing = {
        name: axes
        for name, axes in model_axes(combination, tied, use_qk_norm=True).items()
        if not any(set(axes) <= set(known) for known in TENSORS.values())
    }
    assert missing == {}


def axes_of_tensors(monkeypatch, decoder_block: str) -> tuple[dict[str, tuple], set[tuple]]:
    """Returns the logical axes of every parameter by name, and of the arrays that the forward pass constrains."""
    config = tiny_config(ALL_COMBINATIONS[0], decoder_block=decoder_block, base_num_decoder_layers=3)
    parameters = model_axes(ALL_COMBINATIONS[0], tied=False, decoder_block=decoder_block, base_num_decoder_layers=3)
    activations, constrain = set(), sharding.constrain

    def recorded(x, names):
        activations.add(tuple(name for name in names if name))
        return constrain(x, names)

    monkeypatch.setattr(sharding, "constrain", recorded)
    model = make_model(config)
    inputs = [packed_batch(config, 2)[name] for name in ("inputs", "inputs_position", "inputs_segmentation", "row")]

    def logits(params, rest):
        hidden, _, _ = model.apply(params, rest, *inputs)
        return model.apply(params, rest, hidden, method="head")[0]

    jax.eval_shape(logits, *model.abstract)
    return parameters, activations


_KEYS = {"fused_qkv": True, "interleave_moe_layer_step": 1}
DENSE = [name for name in FAMILIES if tensors_of(Config({"decoder_block": name, **_KEYS})) == TENSORS]


@pytest.mark.parametrize("decoder_block", DENSE)
def test_these_families_have_exactly_the_tensors_of_the_table(decoder_block, monkeypatch):
    parameters, activations = axes_of_tensors(monkeypatch, decoder_block)
    for tensor, axes in TENSORS.items():
        found = {parameters[name] for name in parameters if name.endswith(tensor)} if "/" in tensor else activations
        assert axes in found, tensor
    assert activations == {axes for tensor, axes in TENSORS.items() if "/" not in tensor}


def test_a_family_with_experts_has_the_parameters_of_its_table():
    keys = {"decoder_block": "mixtral", "num_experts": 2, "num_experts_per_tok": 1, "base_moe_mlp_dim": 32}
    parameters = model_axes(ALL_COMBINATIONS[0], tied=False, **keys)
    for tensor, axes in tensors_of(Config(keys | {"interleave_moe_layer_step": 1})).items():
        if "/" in tensor:
            assert {parameters[name] for name in parameters if name.endswith(tensor)} == {axes}, tensor


def test_every_model_has_the_other_tensors(monkeypatch):
    parameters, activations = axes_of_tensors(monkeypatch, "two_kinds:family")
    for tensor in EVERY_MODEL:
        assert TENSORS[tensor] == parameters[tensor] if "/" in tensor else TENSORS[tensor] in activations

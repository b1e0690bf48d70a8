"""config/rules.py knows the model's logical axes without building it; here the two are held together."""

import jax
import pytest
from support import ALL_COMBINATIONS, tiny_config

from trainer.backends import make_model
from trainer.config.rules import TENSORS


def model_axes(combination: str, tied: bool, **overrides) -> dict[str, tuple[str | None, ...]]:
    """The logical axes of every parameter, by its name."""
    model = make_model(tiny_config(combination, logits_via_embedding=tied, **overrides))
    leaves = jax.tree_util.tree_leaves_with_path(model.param_axes)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): tuple(leaf) for path, leaf in leaves}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("combination", ALL_COMBINATIONS)
def test_the_table_has_the_axes_of_the_models_parameters(combination, tied):
    parameters = model_axes(combination, tied)
    named = {tensor for tensor in TENSORS if "/" in tensor}  # the others are activations
    if tied:
        named.remove("decoder/logits_dense/kernel")
    found = {tensor: axes for name, axes in parameters.items() for tensor in named if name.endswith(tensor)}
    assert found == {tensor: TENSORS[tensor] for tensor in named}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("combination", ALL_COMBINATIONS)
def test_the_table_leaves_out_no_parameter_whose_axes_could_meet(combination, tied):
    """A parameter that the table does not name shares its axes with one that it does."""
    missing = {
        name: axes
        for name, axes in model_axes(combination, tied, use_qk_norm=True).items()
        if not any(set(axes) <= set(known) for known in TENSORS.values())
    }
    assert missing == {}

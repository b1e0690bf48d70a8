"""A decoder block given by import path."""

import abc
import functools
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from flax import nnx
from support import ALL_COMBINATIONS, arguments, assert_equal_bits, compiled, copied, packed_batch, tiny_config

from trainer.backends.registry import make_model
from trainer.config.errors import UserError
from trainer.config.load import load
from trainer.models import FAMILIES
from trainer.models.caches import takes_cache
from trainer.models.families import hugging_face, stacks
from trainer.objectives.next_token import NextToken
from trainer.ops.random import seed_key
from trainer.training.build import build

GUIDES = Path(__file__).parents[3] / "docs" / "guides"
OWN = "team_block:NNXBlock"


@pytest.fixture(autouse=True)
def in_the_guides(monkeypatch):
    """Puts the guides folder on the path, as `python -m` does with the current folder."""
    monkeypatch.syspath_prepend(str(GUIDES))


@functools.cache
def gradients(combination, scan):
    config = tiny_config(combination, decoder_block=OWN, scan_layers=scan, base_num_decoder_layers=3)
    model = make_model(config)
    params, rest = jax.jit(model.init)(seed_key(0))
    objective = NextToken(model.apply)

    def loss(params):
        return objective.sums(params, rest, packed_batch(config, 4), None).minimized["lm_loss"]

    results = compiled(jax.value_and_grad(loss), params)(params)
    return copied(results), copied(params), model.param_axes


@pytest.mark.parametrize("combination", ALL_COMBINATIONS)
def test_an_nnx_block_trains_in_every_combination(combination):
    results, params, axes = gradients(combination, True)
    reference = gradients("nnx", True)
    assert_equal_bits(results, reference[0])
    assert_equal_bits(params, reference[1])
    assert axes == reference[2]
    assert axes["decoder"]["layers"]["qkv"] == {"bias": ("layers", None), "kernel": ("layers", "embed", "mlp")}
    assert all(np.any(leaf) for leaf in jax.tree.leaves(results[1]))


def test_unrolled():
    (value, grads), params, _ = gradients("nnx", False)
    (rolled_value, rolled_grads), rolled_params, _ = gradients("nnx", True)
    assert_equal_bits(params, rolled_params)
    # In an unrolled loop, the compiler reorders the sums of a block that ends in a plain product.
    np.testing.assert_allclose(value, rolled_value, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max()), grads, rolled_grads)


def test_its_size_is_counted_from_its_parameters():
    run = build(load(arguments("nnx", decoder_block=OWN)).config, jax.devices()[:1])
    matrices = 16 * 96 + 32 * 16 + 16 * 32 + 32 * 16
    assert run.parameters == 64 * 16 + 16 + 2 * (matrices + 96 + 16 + 32 + 16 + 4 * 16)
    assert run.flops_per_token == 6 * (2 * matrices + 64 * 16)
    family_run = build(load(arguments("nnx")).config, jax.devices()[:1])
    assert family_run.parameters == sum(x.size for x in jax.tree.leaves(family_run.abstract_state["model"]))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("team_block:NNXblock", "team_block has no NNXblock; nearest: NNXBlock"),
        ("team_blocks:NNXBlock", "there is no module team_blocks; Python searches the current folder"),
        ("json.team_block:NNXBlock", "there is no module json.team_block"),
        ("team_block:attend", "this is not a block class, a Family, or the Facts of a family"),
    ],
)
def test_a_path_that_leads_nowhere(name, message):
    with pytest.raises(UserError) as error:
        stacks(tiny_config("nnx", decoder_block=name))
    assert str(error.value).startswith(f"decoder_block={name}: {message}")


class Called(nnx.Module):
    def __call__(self, x, cache, context):
        return x, cache


class WithStatistics(Called):
    def __init__(self, config, rngs):
        self.norm = nnx.BatchNorm(config.base_emb_dim, rngs=rngs)


class WithGenerator(Called):
    def __init__(self, config, rngs):
        self.dense = nnx.Linear(config.base_emb_dim, config.base_emb_dim, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)


class WithNothing(Called):
    def __init__(self, config, rngs):
        del config, rngs


@pytest.mark.parametrize("combination", [ALL_COMBINATIONS[0], ALL_COMBINATIONS[-1]])
@pytest.mark.parametrize(
    ("block", "message"),
    [
        (WithStatistics, "has state that a forward pass would update: norm/mean, norm/var"),
        (WithGenerator, "has state that a forward pass would update: dropout/rngs/"),
        (WithNothing, "has no parameters"),
    ],
)
def test_what_a_block_may_not_hold(block, message, combination, monkeypatch):
    monkeypatch.setitem(sys.modules, "blocks_of_a_test", SimpleNamespace(Block=block))
    config = tiny_config(combination, decoder_block="blocks_of_a_test:Block")
    with pytest.raises(UserError, match=f"decoder_block=blocks_of_a_test:Block {message}"):
        make_model(config)


class Abstract(Called, abc.ABC):
    @abc.abstractmethod
    def attend(self): ...


class WithAnotherCall(nnx.Module):
    def __init__(self, config, rngs):
        del config, rngs

    def __call__(self, x):
        return x


class WithSixArguments(WithAnotherCall):
    """A block with the call signature of earlier versions."""

    def __call__(self, x, cache, position, segment, row, key):
        return x, cache


class WithMoreArguments(Called):
    def __init__(self, config, rngs, width):
        del config, rngs, width


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (nnx.Linear, r"it cannot be called as Linear\(config, rngs\) \(missing a required"),
        (nnx.Module, "is not a block: Module has no __call__"),
        (nnx.Dropout, r"it cannot be called as Dropout\(config, rngs\) \(too many"),
        (WithAnotherCall, r"it cannot be called as block\(x, cache, context\)"),
        (
            WithSixArguments,
            r"it cannot be called as block\(x, cache, context\), where context has the fields positions, segments, "
            r"rows, key, sampled, ranks, documents \(missing a required argument: 'segment'\)",
        ),
        (WithMoreArguments, "missing a required argument: 'width'"),
        (Abstract, "the class Abstract is abstract"),
        (dict, "dict is not an nnx.Module"),
        (len, "this is not a block class"),
        (nnx, "this is not a block class"),
    ],
)
def test_what_is_no_block_is_refused_before_it_is_built(block, message, monkeypatch):
    monkeypatch.setitem(sys.modules, "blocks_of_a_test", SimpleNamespace(Block=block))
    with pytest.raises(UserError, match=f"decoder_block=blocks_of_a_test:Block.*{message}"):
        stacks(tiny_config("nnx", decoder_block="blocks_of_a_test:Block"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import not_installed_anywhere\n", "there is no module not_installed_anywhere, which broken_block imports;"),
        ("from json import nothing_of_that_name\n", "importing broken_block fails: ImportError: cannot import name"),
        ("\n1 / 0\n", "importing broken_block fails: ZeroDivisionError: division by zero .*broken_block.py:2"),
        ("def f(:\n", "importing broken_block fails: SyntaxError"),
        ("import sys\nsys.exit(0)\n", "importing broken_block fails: SystemExit"),
    ],
)
def test_a_module_that_cannot_be_imported(text, message, tmp_path, monkeypatch):
    (tmp_path / "broken_block.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError, match=f"decoder_block=broken_block:Block: {message}"):
        stacks(tiny_config("nnx", decoder_block="broken_block:Block"))
    assert "broken_block" not in sys.modules


def test_what_is_not_known_of_it():
    with pytest.raises(UserError, match="declares no parameter names of Hugging Face"):
        hugging_face(tiny_config("nnx", decoder_block=OWN))
    assert not takes_cache(tiny_config("nnx", decoder_block=OWN))


@pytest.mark.parametrize("name", ["lama2", "team_block", "team_block:", "a b:C", ":Block"])
def test_what_is_no_import_path(name):
    with pytest.raises(UserError, match=rf"allowed: {', '.join(FAMILIES)} or package\.module:name"):
        load([f"decoder_block={name}"])

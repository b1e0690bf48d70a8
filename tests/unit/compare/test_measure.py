"""The common starting state of all sides of a comparison."""

import jax
import numpy as np
import pytest
from support import ALL_COMBINATIONS, arguments, assert_equal_bits, copied

from trainer.compare import measure
from trainer.config.errors import UserError
from trainer.config.load import load
from trainer.leaves.source import names_of
from trainer.models import transformer
from trainer.models.llama2 import block as llama2
from trainer.models.names import Names
from trainer.training.build import build
from trainer.training.start import Start

LAST = ALL_COMBINATIONS[-1]


def program(combination, **keys):
    run = build(load(arguments(combination, base_num_decoder_layers=1, **keys)).config, jax.devices()[:1])
    return measure.Program(combination, run, Names({}))


def trained(program, updates=5):
    """Returns a random state, like one after `updates` updates."""
    rng = np.random.default_rng(0)
    run = program.run
    tree = jax.tree.map(lambda x: rng.integers(1, 9, x.shape).astype(x.dtype), run.codec.unpack(run.abstract_state))
    return Start(run.codec.pack(tree), updates)


@pytest.fixture(scope="module")
def left():
    return program("nnx")


def test_a_trained_state_is_moved_whole_to_another_combination(left):
    begin, right = trained(left), program(LAST)
    moved = measure.state(right, measure.take(left, begin))
    assert_equal_bits(copied(right.run.codec.unpack(moved)), copied(left.run.codec.unpack(begin.state)))


def test_a_trained_state_of_another_optimizer_is_refused(left):
    snapshot = measure.take(left, trained(left))
    with pytest.raises(
        UserError, match=rf"{LAST}: its optimizer state has a different structure.*load_parameters_path"
    ):
        measure.state(program(LAST, opt_type="sgd"), snapshot)


def test_training_does_not_pay_for_what_is_sown_for_comparisons(left, monkeypatch):
    step = left.run.step.lower(*left.run.abstract_args()).as_text()
    for module in (llama2, transformer):
        monkeypatch.setattr(module, "sow", lambda *args: None)
    other = program("nnx").run
    assert other.step.lower(*other.abstract_args()).as_text() == step


def test_at_step_0_only_parameters_are_moved_and_what_is_lacking_is_initial(left):
    snapshot = measure.take(left, trained(left, updates=0))
    assert snapshot.later is None
    right = program(LAST, opt_type="sgd", use_qk_norm=True)
    found = names_of(copied(right.run.codec.unpack(measure.state(right, snapshot)).params))
    lacking = {name for name in found if name not in snapshot.params}
    assert lacking == {f"decoder/layers/self_attention/{name}_norm/scale" for name in ("query", "key")}
    for name, value in found.items():
        np.testing.assert_array_equal(value, 1 if name in lacking else snapshot.params[name])

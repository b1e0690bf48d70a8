"""Comparisons of programs: a program equals itself, and each side is measured with its own program."""

import jax
import pytest
from support import arguments

from trainer.compare import measure, programs
from trainer.compare.difference import BITS
from trainer.compare.programs import compare_programs
from trainer.config.load import load
from trainer.config.sides import Side


def compared(measures, left, **rights):
    """Returns the comparisons of `rights` with `left`. Each side is given by the keys in which it differs from a tiny
    model."""
    small = {"base_num_decoder_layers": 1, "opt_type": "sgd", "gradient_clipping_threshold": 0}
    sides = [Side(name, (), load(arguments("nnx", **small | keys))) for name, keys in {"left": left, **rights}.items()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "MEASURES", measures)
        return compare_programs(sides, jax.devices()[:1], BITS, lambda line: None).comparisons


def test_each_side_is_measured_with_its_own_program_and_compared_with_the_left_one():
    sides = {"same": {}, "other": {"weight_dtype": "bfloat16"}, "again": {}}
    same, other, again = compared((measure.parameters,), {}, **sides)
    assert [it.right for it in (same, other, again)] == list(sides)
    assert same.bits
    assert again.bits
    (parameters,) = other.quantities
    differing = [it for it in parameters.differences if not it.equal]  # norms are float32 on both sides
    assert {it.name.rpartition("/")[2] for it in differing} == {"kernel", "embedding"}
    assert {it.note for it in differing} == {"float32 against bfloat16"}
    assert other.first == f"parameters: {differing[0].where}"

"""How the base of adapters is recognized."""

import functools

import jax
import numpy as np
import pytest

from trainer.checkpoint.base import checked, digests
from trainer.checkpoint.sidecar import Base
from trainer.checkpoint.source import Leaf, whole
from trainer.config import UserError

VALUES = np.random.default_rng(0).standard_normal((3, 4, 5)).astype(np.float32)


def digest(values, kind="float32"):
    return digests({("a", "kernel"): jax.numpy.asarray(values)})[kind]["a/kernel"]


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_every_value_counts_at_its_place(kind):
    changed, swapped = VALUES.copy(), VALUES.copy()
    changed[2, 3, 4] += 0.1
    swapped[0, 0, :2] = VALUES[0, 0, 1::-1]
    assert len({digest(each, kind) for each in (VALUES, changed, swapped, VALUES[::-1])}) == 4


def test_every_parameter_has_its_hash():
    found = digests({("a",): jax.numpy.asarray(VALUES), ("b",): jax.numpy.asarray(VALUES[0])})
    assert {kind: [*of_names] for kind, of_names in found.items()} == {"float32": ["a", "b"], "bfloat16": ["a", "b"]}


@pytest.mark.parametrize("count", [1, 3])
def test_a_base_is_checked_while_it_is_read(count):
    def leaf(values):
        layers = [values] if count == 1 else [*values]
        return Leaf(values.shape, values.dtype, [functools.partial(np.array, layer) for layer in layers])

    base = Base("/base", digests({("a", "kernel"): jax.numpy.asarray(VALUES)}))
    read = functools.partial(Leaf.read, dtype=np.dtype(np.float32), tick=lambda size: None)
    np.testing.assert_array_equal(read(checked("a/kernel", leaf(VALUES), base, "run")), VALUES)
    with pytest.raises(UserError, match="run: its adapters were trained on a base with other values: a/kernel"):
        read(checked("a/kernel", leaf(VALUES[::-1]), base, "run"))
    other = checked("b/kernel", leaf(VALUES[::-1]), base, "run")  # which the base does not have
    assert read(other)[whole(VALUES.shape)].shape == VALUES.shape

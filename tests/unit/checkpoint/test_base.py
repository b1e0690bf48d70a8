"""How the base of adapters is recognized."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trainer.backends.base import TrainTree
from trainer.checkpoint.base import checked, digests, with_base, without_base
from trainer.checkpoint.sidecar import Base
from trainer.config.errors import UserError
from trainer.leaves.source import Leaf, whole
from trainer.state.diloco import DiLoCoTrainState

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
    mixed = {("a",): jax.numpy.asarray(VALUES), ("b",): jax.numpy.asarray(VALUES[0], "bfloat16")}
    assert digests(mixed).keys() == {"bfloat16"}


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
    other = checked("b/kernel", leaf(VALUES[::-1]), base, "run")  # not in the base
    assert read(other)[whole(VALUES.shape)].shape == VALUES.shape


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_base_of_float32_may_be_read_from_a_copy_of_two_bytes(dtype):
    """A bfloat16 copy is compared with the rounded base. float16 rounds differently, so a float16 copy is compared
    exactly."""
    base = Base("/base", digests({("kernel",): jax.numpy.asarray(VALUES.astype("float16").astype(np.float32))}))
    copy = VALUES.astype("float16").astype(jnp.dtype(dtype))
    found = checked("kernel", Leaf(copy.shape, copy.dtype, [lambda: copy]), base, "run").parts[0]()
    np.testing.assert_array_equal(found, copy)


def test_the_state_of_islands_around_a_base_comes_back():
    """The base has no outer momentum: if the base were restored in the momentum's place, the next synchronization would
    move the base."""
    base = jnp.asarray(VALUES)
    params = {"kernel": base, "lora": base[0] + 1}
    momentum = {"kernel": jnp.zeros_like(base), "lora": base[0] + 2}
    islands = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), params)
    inner = TrainTree(jnp.zeros(2, jnp.int32), islands, ({"mu": islands["lora"]},), {})
    state = DiLoCoTrainState(inner, params, ({"trace": momentum},), jnp.zeros((), jnp.int32))
    saved = without_base(state, {("kernel",)})
    assert len(jax.tree.leaves(saved)) == len(jax.tree.leaves(state)) - 3
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)
    jax.tree.map(np.testing.assert_array_equal, with_base(saved, abstract, {("kernel",): base}), state)

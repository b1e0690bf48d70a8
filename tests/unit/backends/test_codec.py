"""The codec is a bijection by path, for any optimizer and any kind of leaf."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from jax.sharding import PartitionSpec
from optimizers import OPTIMIZERS
from support import ALL_COMBINATIONS, assert_equal_bits, tiny_config

from trainer.backends.base import StateCodec
from trainer.backends.permutation import Permutation
from trainer.backends.registry import make_model
from trainer.config.keys import Config
from trainer.config.schema import schema
from trainer.optim.optimizer import make_optimizer


@pytest.fixture(scope="module", params=ALL_COMBINATIONS)
def config(request):
    return tiny_config(request.param)


@pytest.fixture(scope="module")
def model(config):
    return make_model(config)


@pytest.mark.parametrize("name", [*OPTIMIZERS, *(f"opt_type={choice}" for choice in schema().keys["opt_type"].choices)])
def test_bijection_for_every_optimizer(config, model, name):
    own = Config({**config, "opt_type": name.partition("=")[2]})
    tx = OPTIMIZERS.get(name) or make_optimizer(own, model.param_axes)
    codec = StateCodec(model, tx)
    # The model makes its parameters in the same way for all optimizers, so they are traced for one of them.
    params = () if name == next(iter(OPTIMIZERS)) else model.abstract
    native = jax.eval_shape(codec.init, jax.random.key(0), *params)
    assert {type(leaf) for leaf in jax.tree.leaves(codec.abstract)} == {jax.ShapeDtypeStruct}
    assert jax.tree.structure(codec.abstract) == jax.tree.structure(native)
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(codec.abstract)] == [
        (x.shape, x.dtype) for x in jax.tree.leaves(native)
    ]
    tree = codec.unpack(native)

    # optax's own structure over the dict, with optax's dtypes.
    expected = jax.eval_shape(tx.init, tree.params)
    assert jax.tree.structure(tree.opt_state) == jax.tree.structure(expected)
    assert [x.dtype for x in jax.tree.leaves(tree.opt_state)] == [x.dtype for x in jax.tree.leaves(expected)]
    assert tree.step.dtype == jnp.int32

    # Leaves are numbered: each one arrives once, and returns to its place.
    leaves, structure = jax.tree.flatten(native)
    numbered = structure.unflatten(list(range(len(leaves))))
    unpacked = codec.unpack(numbered)
    assert sorted(jax.tree.leaves(unpacked)) == list(range(len(leaves)))
    assert jax.tree.leaves(codec.pack(unpacked)) == list(range(len(leaves)))
    assert jax.tree.structure(codec.pack(unpacked)) == structure

    # Each leaf is where its shape is expected.
    for kept, shape in zip(jax.tree.leaves(unpacked.params), jax.tree.leaves(tree.params), strict=True):
        assert leaves[kept].shape == shape.shape


class Quantized(struct.PyTreeNode):
    """A leaf that is itself a pytree."""

    value: object
    scale: object


@pytest.mark.parametrize(
    "make_leaf",
    [
        lambda x: np.zeros(x.shape, x.dtype),
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype),
        lambda x: PartitionSpec(*[None] * x.ndim),
        lambda x: None,
        lambda x: ("a", "tuple"),
        lambda x: Quantized(np.ones(x.shape, np.int8), 2.0),
    ],
    ids=["arrays", "abstract", "specs", "none", "tuples", "pytrees"],
)
def test_leaves_may_be_anything(model, make_leaf):
    codec = StateCodec(model, OPTIMIZERS["clipped"])
    native = jax.eval_shape(codec.init, jax.random.key(0))
    replaced = jax.tree.map(make_leaf, native)
    tree = codec.unpack(replaced)
    shape = codec.unpack(native).params["token_embedder"]["embedding"]
    expected = make_leaf(shape)
    found = tree.params["token_embedder"]["embedding"]
    assert type(found) is type(expected)
    assert jax.tree.structure(codec.pack(tree)) == jax.tree.structure(replaced)
    assert repr(jax.tree.leaves(codec.pack(tree))) == repr(jax.tree.leaves(replaced))


class Pair(NamedTuple):
    first: int
    second: int


def test_matches_by_path_and_not_by_position():
    codec = Permutation(
        {"b": 0, "a": {"x": 0}}, {"z": {"x": 0}, "b": 0}, lambda path: ("z", "x") if path[0] == "a" else path
    )
    assert codec.unpack({"b": 1, "a": {"x": 2}}) == {"z": {"x": 2}, "b": 1}
    assert codec.pack({"z": {"x": 2}, "b": 1}) == {"b": 1, "a": {"x": 2}}
    assert Permutation(Pair(0, 0), {"second": 0, "first": 0}).unpack(Pair(1, 2)) == {"second": 2, "first": 1}


def test_different_paths_are_named():
    with pytest.raises(ValueError, match=r"only_here.*only_there"):
        Permutation({"only_here": 0}, {"only_there": 0})


def test_state_that_is_no_parameter_goes_to_rest():
    """A model with a counter. The codec of each train state carries it, although none of our blocks has one yet."""
    from flax import nnx

    from trainer.backends.base import tree_mode
    from trainer.backends.nnx_model import canonical

    class Counting(nnx.Module):
        def __init__(self):
            self.kernel = nnx.Param(jnp.ones(3))
            self.seen = nnx.BatchStat(jnp.zeros(2))

    with tree_mode():
        _, state = nnx.split({"model": Counting()})
    codec = Permutation(
        state,
        {"params": {"kernel": 0}, "rest": {"seen": 0}},
        lambda path: canonical(path, {("kernel",)}),
    )
    tree = codec.unpack(state)
    assert_equal_bits(tree, {"params": {"kernel": np.ones(3, np.float32)}, "rest": {"seen": np.zeros(2, np.float32)}})
    assert_equal_bits(codec.pack(tree), state)

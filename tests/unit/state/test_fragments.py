"""Fragments of the parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from support import arguments, assert_equal_bits

from trainer.config.errors import UserError
from trainer.config.load import load
from trainer.models.families import stacks
from trainer.ops.paths import by_name
from trainer.state.fragments import fragments

TWO_KINDS = {"decoder_block": "two_kinds:family", "base_num_decoder_layers": 5}


def made(count, **overrides):
    keys = {"enable_diloco": True, "enable_streaming_diloco": True, "num_diloco_fragments": count}
    return load(arguments("nnx", **keys | overrides)).config


def numbered(config):
    """Returns an optimizer state with a tree like the parameters, whose entries are distinct numbers."""
    numbers = iter(range(10**6))

    def leaf(*shape):
        return np.array([next(numbers) for _ in range(int(np.prod(shape)))], np.int32).reshape(shape)

    layers = {stack.name: {"mlp": {"kernel": leaf(stack.count, 2)}} for stack in stacks(config)}
    decoder = {**layers, "decoder_norm": {"scale": leaf(3)}}
    params = {"decoder": decoder, "token_embedder": {"embedding": leaf(4, 2)}}
    return (optax.TraceState(params), optax.EmptyState())


@pytest.mark.parametrize("sequential", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("family", [{"base_num_decoder_layers": 5}, TWO_KINDS])
def test_each_parameter_is_in_one_fragment(count, family, sequential):
    config = made(count, use_sequential_layers=sequential, **family)
    tree, found = numbered(config), fragments(config)
    islands = jax.tree.map(lambda leaf: np.stack([leaf, leaf + 1000]), tree)

    @jax.jit
    def results():
        parts = [fragment.part(tree) for fragment in found]
        negated = [it.put(tree, jax.tree.map(jnp.negative, part)) for it, part in zip(found, parts, strict=True)]
        of_islands = [fragment.part(islands, 1) for fragment in found]
        put = [it.put(islands, part, 1) for it, part in zip(found, of_islands, strict=True)]
        return parts, negated, of_islands, put

    parts, negated, of_islands, put = jax.tree.map(np.asarray, results())
    assert len(parts) == count
    numbers = np.concatenate([leaf.ravel() for part in parts for leaf in jax.tree.leaves(part)])
    assert sorted(numbers) == list(range(len(numbers)))
    assert all(len(jax.tree.leaves(part)) for part in parts)
    for i, part in enumerate(parts):
        expected = jax.tree.map(lambda leaf, part=part: np.where(np.isin(leaf, list(_all(part))), -leaf, leaf), tree)
        assert_equal_bits(negated[i], expected)
        assert_equal_bits(of_islands[i], jax.tree.map(lambda leaf: np.stack([leaf, leaf + 1000]), part))
        assert_equal_bits(put[i], islands)


def test_modules_within_others_may_be_called_as_the_stacks_are():
    """They are not decoder layers: they are in a block, outside of the stacks, or in multi-token prediction."""
    own = {
        "decoder": {"layers": {"w": np.arange(5, dtype=np.int32)}, "shift_layers": {"w": np.arange(5, dtype=np.int32)}}
    }
    of_layers = [jax.tree.map(lambda x, n=n: np.stack([x] * n), own) for n in (2, 1)]
    stacked = dict(zip(("layers", "shift_layers"), of_layers, strict=True))
    others = {"adapter": own, "mtp_layer_1": own}
    tree = {"decoder": stacked | others, "mtp_block": others, **others}
    outside, first, second = fragments(made(3, **TWO_KINDS))
    one = jax.tree.map(lambda x: x[None], own)
    expected = [{"decoder": others, "mtp_block": others, **others}]
    expected += [{"decoder": {"layers": one, "shift_layers": one}}, {"decoder": {"layers": one}}]
    for part, parameters in zip((outside, first, second), expected, strict=True):
        assert_equal_bits(by_name(part.part(tree)), by_name(parameters))


def _all(part):
    return {number for leaf in jax.tree.leaves(part) for number in leaf.ravel()}


@pytest.mark.parametrize(("sequential", "expected"), [(False, [[0, 3], [1, 4], [2]]), (True, [[0], [1, 2], [3, 4]])])
def test_layers_are_strided_or_follow_one_another(sequential, expected):
    config = made(4, use_sequential_layers=sequential, base_num_decoder_layers=5)
    assert [list(it.layers["decoder", "layers"]) for it in fragments(config)] == [[], *expected]
    assert [it.outside for it in fragments(config)] == [True, False, False, False]


def test_a_family_may_have_fewer_stacked_layers_than_layers():
    config = made(5, **TWO_KINDS | {"base_num_decoder_layers": 4})
    total = sum(stack.count for stack in stacks(config))
    assert total < 4
    with pytest.raises(UserError, match=f"have {total} layers, which can be divided into at most {total + 1} "):
        fragments(config)


def test_a_fragment_is_sharded_over_its_layers_only_where_they_divide():
    mesh = jax.make_mesh((2, 2), ("data", "fsdp"), devices=jax.devices()[:4])
    stack = NamedSharding(mesh, PartitionSpec("data", "fsdp"))
    tree = {"decoder": {"layers": {"w": stack}, "decoder_norm": {"scale": NamedSharding(mesh, PartitionSpec("fsdp"))}}}
    outside, two, one = fragments(made(3, base_num_decoder_layers=3))
    assert outside.shardings(tree)["decoder"] == {
        "layers": {"w": None},
        "decoder_norm": tree["decoder"]["decoder_norm"],
    }
    assert two.shardings(tree)["decoder"]["layers"]["w"] == stack
    assert one.shardings(tree)["decoder"]["layers"]["w"].spec == PartitionSpec(None, "fsdp")

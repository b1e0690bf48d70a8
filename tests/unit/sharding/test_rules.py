"""Mapping logical names to mesh axes, for one array."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support import tiny_config

from trainer.config.errors import UserError
from trainer.sharding import (
    Axes,
    constrain,
    make_mesh,
    make_rules,
    memory_order,
    named_sharding,
    on_mesh,
    on_tpu,
    spec,
    take,
)

RULES = make_rules([["batch", ["data", "fsdp"]], ["embed", "fsdp"], ["heads", ["tensor"]], ["norm", []], ["mlp", None]])


def test_rules_hold_tuples_of_mesh_axes():
    assert RULES == {"batch": ("data", "fsdp"), "embed": ("fsdp",), "heads": ("tensor",), "norm": (), "mlp": ()}


def test_the_rules_of_a_resolved_configuration_can_be_read():
    rules = make_rules(tiny_config("nnx").logical_axis_rules)
    assert rules["activation_batch"] == ("stage", "data", "fsdp", "fsdp_transpose", "expert")
    assert rules["embed"] == ("fsdp", "expert", "context", "context_usp_ulysses")
    assert rules["layers"] == ()


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([], P()),
        (["batch"], P(("data", "fsdp"))),
        (["embed", "heads"], P("fsdp", "tensor")),
        (["heads", "embed"], P("tensor", "fsdp")),
        (["norm", "embed"], P(None, "fsdp")),
        ([None, "heads", None], P(None, "tensor", None)),
        ([None, None], P(None, None)),
        (["norm", "mlp", "norm"], P(None, None, None)),
    ],
)
def test_spec(names, expected):
    assert spec(names, RULES) == expected
    assert spec(Axes(names), RULES) == expected


@pytest.mark.parametrize("names", [["batch", "embed"], ["embed", "norm", "batch"], ["heads", "heads"]])
def test_two_axes_of_an_array_on_one_mesh_axis_are_refused(names):
    axis = "tensor" if "heads" in names else "fsdp"
    expected = rf"kernel \[{', '.join(names)}\]: {names[0]} and {names[-1]} both map to mesh axis {axis}"
    with pytest.raises(UserError, match=expected):
        spec(names, RULES, "kernel")
    shape = range(2, 2 + len(names))
    with pytest.raises(UserError, match=rf"\] of shape \[2, .*\]: {names[0]} and {names[-1]} both map"):
        named_sharding(jax.make_mesh((1, 1), ("data", "fsdp")), names, tuple(shape), RULES, "kernel")


def test_a_name_without_a_rule_is_refused():
    expected = r"kernel \[embed, head\]: no rule for the logical axis head; .* batch, .*, mlp; nearest: heads"
    with pytest.raises(UserError, match=expected):
        spec(["embed", "head"], RULES, "kernel")


def test_an_axis_that_its_mesh_axes_do_not_divide_is_refused():
    mesh = jax.make_mesh((2, 2), ("data", "fsdp"), (AxisType.Auto,) * 2)
    rules = {"batch": ("data", "fsdp"), "embed": ("fsdp",)}
    assert named_sharding(mesh, ["batch", None], (8, 3), rules) == NamedSharding(mesh, P(("data", "fsdp"), None))
    expected = r"kernel \[None, batch\] of shape \[4, 6\]: data 2 x fsdp 2 by the rule of batch does not divide 6"
    with pytest.raises(UserError, match=expected):
        named_sharding(mesh, [None, "batch"], (4, 6), rules, "kernel")
    with (
        on_mesh(mesh, rules),
        pytest.raises(UserError, match=r"\[3, 2\]: fsdp 2 by the rule of embed does not divide 3"),
    ):
        constrain(jnp.ones((3, 2)), ["embed", None])


def test_axes_are_a_leaf_where_a_tuple_is_a_node():
    assert jax.tree.leaves({"a": Axes(("embed", None))}) == [("embed", None)]
    assert jax.tree.leaves({"a": ("embed", "mlp")}) == ["embed", "mlp"]


def test_without_a_mesh_the_helpers_are_the_plain_operations():
    x = jnp.arange(6.0).reshape(3, 2)
    assert constrain(x, ["no such name", None]) is x
    np.testing.assert_array_equal(take(x, jnp.array([[2, 0]]), [None] * 3), x[jnp.array([[2, 0]])])
    assert "sharding_constraint" not in str(jax.make_jaxpr(lambda x: constrain(x, ["embed", None]))(x))


def test_on_a_mesh_they_place_their_result_and_only_inside_of_the_context():
    config = tiny_config("nnx", devices=8, ici_data_parallelism=2, ici_fsdp_parallelism=2, ici_tensor_parallelism=2)
    mesh = make_mesh(config, jax.devices())
    table = jnp.arange(32.0).reshape(8, 4)
    with on_mesh(mesh, RULES):
        placed = jax.jit(lambda x: constrain(x, ["batch", "heads"]))(table)
        rows = jax.jit(lambda x: take(x, jnp.array([[1, 7], [0, 3]]), ["embed", None, "heads"]))(table)
        with pytest.raises(ValueError, match="no rule"):
            constrain(table, ["head", None])
    assert placed.sharding.spec == P(("data", "fsdp"), "tensor")
    assert {shard.data.shape for shard in placed.addressable_shards} == {(2, 2)}
    assert {shard.data.shape for shard in rows.addressable_shards} == {(1, 2, 2)}
    np.testing.assert_array_equal(placed, table)
    np.testing.assert_array_equal(rows, np.asarray(table)[[[1, 7], [0, 3]]])
    assert constrain(table, ["head", None]) is table


@pytest.mark.parametrize(
    ("shape", "order"),
    [
        ((), ()),
        ((5,), (0,)),
        ((4096, 128), (0, 1)),
        ((80, 28672, 64), (0, 2, 1)),  # 64 columns would be padded to 128
        ((80, 64, 28672), (0, 1, 2)),
        ((80, 64, 128, 64), (0, 1, 3, 2)),
        ((80, 64, 64, 128), (0, 1, 2, 3)),
        ((3, 8, 8), (0, 1, 2)),  # no order needs less memory
        ((48, 96, 3, 12, 256), (0, 2, 3, 1, 4)),  # 12 rows would be padded to 16
        ((48, 3, 12, 256), (1, 2, 0, 3)),
        ((80, 64, 4, 128), (0, 1, 2, 3)),  # tiles of 4 rows exist
        ((36, 2048, 1, 128), (0, 2, 3, 1)),  # one axis is sufficient
        ((32, 4096, 3, 12), (2, 3, 0, 1)),
    ],
)
def test_the_order_in_which_a_tpu_pads_least(shape, order):
    assert memory_order(shape) == order


def test_the_platform_is_that_of_the_mesh(monkeypatch):
    def mesh(platform):
        return types.SimpleNamespace(devices=np.array([types.SimpleNamespace(platform=platform)]))

    with on_mesh(mesh("tpu"), {}):
        assert on_tpu()
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert on_tpu()
    with on_mesh(mesh("cpu"), {}):
        assert not on_tpu()

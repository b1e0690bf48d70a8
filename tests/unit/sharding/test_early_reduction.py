import importlib.util
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compiler import TPU_QUICKLY
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from trainer.aot import dump
from trainer.aot.topologies import devices_of
from trainer.config.errors import UserError
from trainer.config.topologies import find_topology
from trainer.layers.dense import Embed
from trainer.ops.losses import cross_entropy
from trainer.sharding import Axes, constrain, on_mesh, reduce_gradient_early, shard_mapped

RULES = {"batch": ("data",), "embed": ("data",), "vocab": ()}


def gradients(names):
    """Returns newly jitted gradients of a product's sum of squares with respect to input and matrix."""
    rng = np.random.default_rng(0)
    x, matrix = (rng.normal(size=shape).astype(np.float32) for shape in ((16, 8), (8, 4)))

    def loss(x, matrix):
        if names is not None:
            x, matrix = reduce_gradient_early(x, matrix, names)
        return jnp.sum((x @ matrix) ** 2)

    fn = jax.jit(jax.grad(loss, argnums=(0, 1)))
    return fn(x, matrix), str(jax.make_jaxpr(fn)(x, matrix))


def test_the_gradients_stay_and_that_of_the_matrix_comes_first():
    expected, plain = gradients(None)
    off_mesh, text = gradients(("embed", "vocab"))
    assert "optimization_barrier" not in plain + text
    mesh = jax.make_mesh((8,), ("data",), (AxisType.Auto,))
    with on_mesh(mesh, RULES):
        early, text = gradients(("embed", "vocab"))
    for a, b, c in zip(expected, off_mesh, early, strict=True):
        np.testing.assert_array_equal(b, a)
        np.testing.assert_allclose(c, a, rtol=1e-5, atol=1e-5)  # sums over devices are added in another order
    assert early[1].sharding.is_equivalent_to(NamedSharding(mesh, P("data", None)), 2)
    # The input gradient and the resharded weight gradient pass through the barrier; nothing bypasses it.
    before, _, after = text.partition("optimization_barrier")
    assert before.count("sharding_constraint") == 1
    assert "sharding_constraint" not in after


def test_inside_of_shard_mapped_it_does_nothing():
    """Each device there has a local gradient: a barrier would only separate it from the sum to which it is added."""
    names = (Axes(("batch", None)), Axes((None, None)))

    def loss(x, matrix):
        return jnp.sum(jnp.matmul(*reduce_gradient_early(x, matrix, ("embed", "vocab"))))[None]

    with on_mesh(jax.make_mesh((8,), ("data",), (AxisType.Auto,)), RULES):
        mapped = shard_mapped(jax.grad(lambda *args: loss(*args)[0]), names, names[0], check=False)
        assert "optimization_barrier" not in str(jax.make_jaxpr(mapped)(jnp.ones((16, 8)), jnp.ones((8, 4))))


@pytest.mark.rest(covered_by="the other tests of this file")
def test_a_tpu_with_more_rows_than_a_matrix_gathers_it_once(monkeypatch):
    """Otherwise libtpu holds two copies of the product."""
    mesh = jax.make_mesh((8,), ("data",), (AxisType.Auto,))

    def program(rows):
        def loss(x, matrix):
            x, matrix = reduce_gradient_early(x, matrix, ("embed", "vocab"), (None, "vocab"), ("batch",))
            return jnp.sum((x @ matrix) ** 2)

        x, matrix = jnp.ones((rows, 8)), jnp.arange(32.0).reshape(8, 4)
        with on_mesh(mesh, RULES):
            fn = jax.jit(jax.grad(loss, argnums=(0, 1)))
            return fn(x, matrix), str(jax.make_jaxpr(fn)(x, matrix)).count("sharding_constraint[")

    expected, plain = program(128)
    assert plain == 1  # this is not a TPU
    monkeypatch.setattr("trainer.sharding.gradients.on_tpu", lambda: True)
    assert program(64)[1] == 1  # eight rows per device
    found, count = program(128)
    assert count == 3  # the matrix, its all-gathered gradient, its gradient in storage sharding
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_array_equal(b, a)
    assert found[1].sharding.is_equivalent_to(expected[1].sharding, 2)


@pytest.mark.parametrize(("rows", "gathers"), [(128, False), (136, True)])
def test_rows_are_compared_with_all_axes_that_multiply_them(monkeypatch, rows, gathers):
    """A matrix [2, 8, 4] has 16 input entries, although the last axis of x has 8."""
    monkeypatch.setattr("trainer.sharding.gradients.on_tpu", lambda: True)

    def early(x, matrix):
        return reduce_gradient_early(x, matrix, ("heads", "embed", "vocab"), (None, None, "vocab"), ("batch",))

    with on_mesh(jax.make_mesh((8,), ("data",), (AxisType.Auto,)), RULES | {"heads": ()}):
        text = str(jax.make_jaxpr(early)(jnp.ones((rows, 2, 8)), jnp.ones((2, 8, 4))))
    assert ("sharding_constraint[" in text) == gathers


def test_its_names_obey_the_rules():
    with (
        on_mesh(jax.make_mesh((8,), ("data",), (AxisType.Auto,)), RULES),
        pytest.raises(UserError, match=r"\[batch, embed\] of shape \[8, 4\]: batch and embed both map"),
    ):
        gradients(("batch", "embed"))


@pytest.mark.rest(covered_by="the other tests of this file")
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="there is no libtpu but for Linux on x86-64")
def test_a_tpu_with_more_rows_than_the_head_holds_the_logits_and_the_gathered_head():
    """Without the all-gather, libtpu splits the forward product into a ring, which holds four copies of the logits."""
    mesh = Mesh(np.array(devices_of(find_topology("v5e-16"))).reshape(8, 2), ("fsdp", "tensor"), (AxisType.Auto,) * 2)
    rules = {"activation_batch": ("fsdp",), "activation_length": (), "activation_embed": ("tensor",)}
    rules |= {"activation_vocab": ("tensor",), "vocab": ("tensor",), "embed": ("fsdp",)}
    rows, tokens, width, vocab = 64, 1024, 256, 24576
    make = partial(Embed, vocab, width, dtype=jnp.bfloat16, weight_dtype=jnp.float32)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0))))

    def loss(x, table, target):
        x = x.astype(jnp.float32)
        x *= jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True))
        head = nnx.merge(graphdef, jax.tree.unflatten(jax.tree.structure(state), [table]))
        logits = head.attend(constrain(x.astype(jnp.bfloat16), ("activation_batch", None, "activation_embed")))
        return jnp.sum(cross_entropy(logits, target)[0])

    hidden, table, target = (
        NamedSharding(mesh, P(*axes)) for axes in (("fsdp", None, "tensor"), ("tensor", "fsdp"), ("fsdp",))
    )
    shapes = ((rows, tokens, width), jnp.bfloat16), ((vocab, width), jnp.float32), ((rows, tokens), jnp.int32)
    args = [
        jax.ShapeDtypeStruct(*shape, sharding=at) for shape, at in zip(shapes, (hidden, table, target), strict=True)
    ]
    with on_mesh(mesh, rules), dump.uncached():  # a program for an absent TPU cannot be read back from the cache
        lowered = jax.jit(jax.grad(loss, (0, 1)), out_shardings=(hidden, table)).lower(*args)
        compiled = lowered.compile(TPU_QUICKLY)
    logits, gathered = (2 * count * vocab // 2 for count in (rows // 8 * tokens, width))
    text = compiled.as_text()
    # Part of the matrix may be in VMEM.
    assert logits <= compiled.memory_analysis().temp_size_in_bytes <= logits + gathered
    assert "windowed_dot_general" not in text
    assert text.count("calls=%all-reduce-scatter") == 1  # for the head gradient

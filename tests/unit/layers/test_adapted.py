"""Low-rank adapters of single products: values, gradients, and the update merged into a matrix."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from trainer.config.errors import UserError
from trainer.layers.adapted import Adapted, GroupedAdapted, delta
from trainer.models.adapters import apply_lora_on_base_params, kernel_of, unapply_lora_from_base_params
from trainer.products.context import Context
from trainer.products.dequantized import Storage, dequantized
from trainer.products.plain import Kernel, grouped_product, product

RANK, SCALE = 3, 0.5
DENSE = Kernel((4, 2), (5,), ("heads", "kv", "embed"), name="decoder/layers/self_attention/out/kernel")
EXPERTS = Kernel((6,), (5,), ("exp", "embed_moe", "mlp"), groups=2, name="decoder/layers/MoeBlock_0/wi_0")


def adapted(kernel, inner=None, *, random=True):
    kind, plain = (GroupedAdapted, grouped_product) if kernel.groups else (Adapted, product)
    made = kind(inner or plain, kernel, rank=RANK, scale=SCALE, dtype=jnp.dtype("float32"), rngs=nnx.Rngs(0))
    if random:
        made.lora_b.set_value(jnp.asarray(normal(*made.lora_b.get_value().shape, seed=1)))
    return made


def normal(*shape, seed):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def inputs(kernel):
    groups = (kernel.groups,) if kernel.groups else ()
    x = normal(*groups, 7, *kernel.in_shape, seed=2)
    return x, normal(*groups, *kernel.in_shape, *kernel.out_shape, seed=3)


def called(made, kernel, x, weights):
    graph, state = nnx.split(made)

    @jax.jit
    def call(state, x, weights):
        made = nnx.merge(graph, state)
        return made(x, weights, None, None) if kernel.groups else made(x, len(kernel.in_shape), weights, None, None)

    return call(state, x, weights)


def plainly(kernel, x, weights):
    """Returns the product without an adapter."""
    plain = functools.partial(grouped_product, sizes=None) if kernel.groups else bare
    return jax.jit(plain)(x, weights)


def bare(x, weights):
    return product(x, 2, weights)


@pytest.mark.parametrize("kernel", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_a_zero_b_keeps_the_bits(kernel):
    made, (x, weights) = adapted(kernel, random=False), inputs(kernel)
    np.testing.assert_array_equal(called(made, kernel, x, weights), plainly(kernel, x, weights))
    a, bound = np.asarray(made.lora_a.get_value()), 1 / np.sqrt(np.prod(kernel.in_shape))
    assert 0.8 * bound < np.abs(a).max() <= bound


@pytest.mark.parametrize("kernel", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_added_to_the_matrix_it_is_the_same_product(kernel):
    made, (x, weights) = adapted(kernel), inputs(kernel)
    merged = weights + np.asarray(made.delta(weights.ndim))
    expected = plainly(kernel, x, merged)
    np.testing.assert_allclose(called(made, kernel, x, weights), expected, rtol=1e-5, atol=1e-6)
    if not kernel.groups:
        np.testing.assert_array_equal(made.array(weights, jnp.dtype("float32")), merged)
        assert made.array(weights, jnp.dtype("bfloat16")).dtype == "bfloat16"


def test_sorted_rows_of_experts():
    made, (x, weights) = adapted(EXPERTS), inputs(EXPERTS)
    rows, sizes, merged = x.reshape(14, 6), np.array([9, 5]), weights + np.asarray(made.delta(3))
    expected = [rows[i] @ merged[int(i >= 9)] for i in range(14)]
    graph, state = nnx.split(made)
    found = jax.jit(lambda state: nnx.merge(graph, state)(rows, weights, sizes))(state)
    np.testing.assert_allclose(found, np.stack(expected), rtol=1e-5, atol=1e-5)


def test_gradients_in_closed_form():
    """For sum(g y) with y = x W + s x a b, the gradients are s x^T g b^T for a, s (x a)^T g for b, and g (W + s a b)^T
    for x."""
    made, (x, weights) = adapted(DENSE), inputs(DENSE)
    a, b = made.lora_a.get_value(), made.lora_b.get_value()
    g = normal(7, 5, seed=4)

    def loss(a, b, x):
        here = adapted(DENSE)  # a trace may change only variables created inside it
        here.lora_a.set_value(a)
        here.lora_b.set_value(b)
        return jnp.sum(g * here(x, 2, weights))

    of_a, of_b, of_x = jax.jit(jax.grad(loss, (0, 1, 2)))(a, b, x)
    flat_x, flat_a, flat_w = (np.asarray(array, np.float64).reshape(*shape) for array, shape in _flat(x, a, weights))
    g, b = np.asarray(g, np.float64), np.asarray(b, np.float64)
    np.testing.assert_allclose(of_a.reshape(8, RANK), SCALE * flat_x.T @ g @ b.T, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(of_b, SCALE * (flat_x @ flat_a).T @ g, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(of_x.reshape(7, 8), g @ (flat_w + SCALE * flat_a @ b).T, rtol=1e-5, atol=1e-5)


def _flat(x, a, weights):
    return (x, (7, 8)), (a, (8, RANK)), (weights, (8, 5))


def test_each_row_uses_its_own_ranks():
    made, (_, weights) = adapted(DENSE), inputs(DENSE)
    x = normal(3, 2, 4, 2, seed=5)
    ranks = np.array([[True, False, False], [False, True, True], [False, False, False]])[:, None]
    graph, state = nnx.split(made)
    context = Context(None, None, None, None, ranks=ranks)
    found = jax.jit(lambda state: nnx.merge(graph, state)(x, 2, weights, None, context))(state)
    a, b = (np.asarray(it.get_value()) for it in (made.lora_a, made.lora_b))
    for row, used in enumerate(ranks[:, 0]):
        own = weights + np.asarray(delta(a[..., used], b[used], SCALE, 3)) if used.any() else weights
        np.testing.assert_allclose(found[row], np.tensordot(x[row], own, 2), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kernel", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_over_a_stored_kernel(kernel):
    inner = dequantized(Storage("nf4", (2, 1)), kernel, rngs=nnx.Rngs(0))
    made, (x, weights) = adapted(kernel, inner), inputs(kernel)
    stored = jax.jit(made.store)(weights)
    both = (called(it, kernel, x, stored) for it in (made, adapted(kernel, inner, random=False)))
    found, expected = np.subtract(*both), called(adapted(kernel), kernel, x, np.zeros_like(weights))
    np.testing.assert_allclose(found, expected, atol=1e-5)


def tree(value, path):
    for name in reversed(path.split("/")):
        value = {name: value}
    return value


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adding_and_taking_away(dtype):
    weights = jnp.asarray(inputs(DENSE)[1].astype(jnp.dtype(dtype)))
    made = adapted(DENSE)
    factors = {"lora_a": made.lora_a.get_value(), "lora_b": made.lora_b.get_value()}
    base = tree({"kernel": weights, "bias": jnp.ones(5)}, "decoder/layers/self_attention/out")
    lora = tree(factors, "decoder/layers/self_attention/out/product")
    merged = apply_lora_on_base_params(base, lora, SCALE)
    found = merged["decoder"]["layers"]["self_attention"]["out"]
    np.testing.assert_array_equal(found["kernel"], (weights.astype("float32") + made.delta(3)).astype(dtype))
    assert found["kernel"].dtype == dtype
    assert found["bias"] is base["decoder"]["layers"]["self_attention"]["out"]["bias"]
    back = unapply_lora_from_base_params(merged, lora, SCALE)["decoder"]["layers"]["self_attention"]["out"]
    np.testing.assert_allclose(
        back["kernel"].astype("float32"), weights.astype("float32"), atol={"float32": 1e-6}.get(dtype, 0.05)
    )
    kept = unapply_lora_from_base_params(merged, lora, SCALE, kept=base)["decoder"]["layers"]["self_attention"]["out"]
    assert kept["kernel"] is weights
    with pytest.raises(UserError, match="no decoder/layers/self_attention/out/kernel in the base"):
        apply_lora_on_base_params({"decoder": {}}, lora, SCALE)
    whole = apply_lora_on_base_params(base, tree(jnp.zeros(5), "decoder/layers/self_attention/out/bias"))
    assert not whole["decoder"]["layers"]["self_attention"]["out"]["bias"].any()
    with pytest.raises(UserError, match="out/bias was replaced"):
        unapply_lora_from_base_params(whole, tree(jnp.zeros(5), "decoder/layers/self_attention/out/bias"))


def test_names():
    assert kernel_of("decoder/layers/mlp/wo/product/lora_b") == "decoder/layers/mlp/wo/kernel"
    assert kernel_of("decoder/layers/MoeBlock_0/product/wi_0/lora_a") == "decoder/layers/MoeBlock_0/wi_0"

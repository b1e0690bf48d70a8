"""Quantized products, compared with Qwix, NumPy integers and explicit formulas; experts, compared with dense layers."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from qwix._src.core import dot_general_qt
from support import ALL_COMBINATIONS, tiny_config

from trainer import sharding
from trainer.config.errors import UserError
from trainer.layers.dense import INPUT
from trainer.models.families import axis_rules
from trainer.products.context import Context
from trainer.products.plain import Kernel
from trainer.products.quantized import DEVICES, Calibration, Recipe, _How, _noise, quantized
from trainer.sharding import make_mesh, on_mesh

RECIPES = {
    "int8": Recipe("int8", "int8"),
    "int4": Recipe("int4", "int4"),
    "fp8": Recipe("float8_e4m3fn", "float8_e5m2"),
    "fp8 of AMD": Recipe("float8_e4m3fnuz", "float8_e5m2fnuz"),
    "per tensor": Recipe("float8_e4m3fn", "float8_e5m2", per_channel=False),
    "clipped": Recipe("int8", "int8", Calibration("absmax,0.7", "fixed,-1,1", "rms,2", "fixed,0.05")),
}
DENSE = Kernel((32,), (3, 16), (None, None, None), name="decoder/layers/self_attention/query/kernel")
EXPERTS = Kernel((32,), (16,), ("exp", None, None), 4)
OF_WI = ("embed_moe", "mlp")
SIZES = np.array([10, 0, 25, 15], np.int32)


def draw(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


X, KERNEL = draw(4, 64, 32), draw(32, 3, 16, seed=1) / 5


def made(recipe, kernel=DENSE):
    return quantized(recipe, kernel, rngs=None)


def value_and_grads(fn, *args):
    """Differentiates a function that is nonlinear in the product, so that each output has a different gradient."""
    return jax.jit(jax.value_and_grad(lambda *args: jnp.sum(jnp.sin(3 * fn(*args))), tuple(range(len(args)))))(*args)


def dense(recipe, x=X, kernel=KERNEL, context=None):
    product = made(recipe)
    return value_and_grads(lambda x, kernel: product(x, 1, kernel, None, context), x, kernel)


def by_qwix(recipe, x=X, kernel=KERNEL):
    methods, whole = recipe.calibration, not recipe.per_channel
    config = dot_general_qt.DotGeneralQtConfig(
        lhs_qtype=jnp.dtype(recipe.forward),
        rhs_qtype=jnp.dtype(recipe.forward),
        dlhs_grad_qtype=jnp.dtype(recipe.backward),
        drhs_grad_qtype=jnp.dtype(recipe.backward),
        lhs_calibration_method=methods.activation,
        rhs_calibration_method=methods.weight,
        dlhs_grad_calibration_method=methods.gradient,
        drhs_grad_calibration_method=methods.weight_gradient,
        lhs_disable_channelwise_axes=whole,
        rhs_disable_channelwise_axes=whole,
        dlhs_grad_disable_channelwise_axes=whole,
        drhs_grad_disable_channelwise_axes=whole,
    )
    dims = (((x.ndim - 1,), (0,)), ((), ()))
    return value_and_grads(lambda x, kernel: dot_general_qt.dot_general_qt(x, kernel, dims, config), x, kernel)


def assert_same_bits(left, right):
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        np.testing.assert_array_equal(a, b, strict=True)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*((name, "float32") for name in RECIPES), *((name, "bfloat16") for name in ("int8", "fp8", "clipped"))],
)
def test_a_dense_product_has_the_bits_of_qwix(name, dtype):
    """Result and gradients equal those of Qwix's training product, which does not support experts (decision 25)."""
    x, kernel = X.astype(dtype), KERNEL.astype(dtype)
    assert_same_bits(dense(RECIPES[name], x, kernel), by_qwix(RECIPES[name], x, kernel))


def test_int8_is_the_arithmetic_of_integers():
    """The result is exactly NumPy's integer product times the scales; only integers are multiplied."""
    rng = np.random.default_rng(0)
    integers = [rng.integers(-127, 128, shape) for shape in ((4, 64, 32), (32, 3, 16))]
    scales = 2.0 ** -rng.integers(0, 5, (4, 64, 1)), 2.0 ** -rng.integers(0, 5, (1, 3, 16))
    x, kernel = ((value * scale).astype(np.float32) for value, scale in zip(integers, scales, strict=True))
    x[..., :1], kernel[:1] = (
        127.5 * scales[0],
        127.5 * scales[1],
    )  # the largest values determine the scales, and round to 127
    integers[0][..., 0], integers[1][0] = 127, 127
    expected = np.tensordot(*integers, 1) * scales[0][..., None] * scales[1]
    product = made(RECIPES["int8"])
    program = jax.jit(lambda x, kernel: product(x, 1, kernel)).lower(x, kernel)
    np.testing.assert_array_equal(program.compile()(x, kernel), expected)
    text = program.as_text()
    assert text.count("stablehlo.dot_general") == 1
    assert "(tensor<4x64x32xi8>, tensor<32x3x16xi8>) -> tensor<4x64x3x16xi32>" in text


def rounded(x, axes):
    """Returns x divided by its scale over `axes` and rounded to integers, and the scale."""
    scale = np.abs(x).max(axes, keepdims=True) / 127.5
    return np.clip(np.round(x / scale), -128, 127), scale


def close(found, expected):
    """Tolerates float32 values that round to the neighbouring integer."""
    return np.linalg.norm(np.reshape(found, expected.shape) - expected) < 5e-3 * np.linalg.norm(expected)


@functools.partial(jax.jit, static_argnums=0)
def forward_and_back(fn, args, gradient):
    out, pull = jax.vjp(fn, *args)
    return out, pull(gradient)


def pulled(fn, *args, seed=2):
    """Returns the result, a random output gradient, and the gradients of the arguments."""
    shape = jax.eval_shape(fn, *args)
    gradient = draw(*shape.shape, seed=seed).astype(shape.dtype)
    out, grads = forward_and_back(fn, args, gradient)
    return out, gradient, grads


def test_gradients_are_straight_through_and_by_hand():
    """Each gradient is the product of the quantized output gradient with a quantized operand.

    Rounding counts as the identity. Before the output gradient is quantized, it is multiplied by the scales of the axis
    that is summed over.
    """
    product = made(RECIPES["int8"])
    _, gradient, found = pulled(lambda x, kernel: product(x, 1, kernel), X, KERNEL)
    x, kernel, gradient = (
        np.reshape(np.float64(a), shape) for a, shape in ((X, (256, 32)), (KERNEL, (32, 48)), (gradient, (256, 48)))
    )
    (qx, sx), (qk, sk) = rounded(x, 1), rounded(kernel, 0)
    (to_x, scale_x), (to_kernel, scale_kernel) = rounded(gradient * sk, 1), rounded(gradient * sx, 0)
    assert close(found[0], to_x @ qk.T * scale_x)
    assert close(found[1], qx.T @ to_kernel * scale_kernel)
    assert not close(found[0], gradient @ kernel.T)
    assert not close(found[1], x.T @ gradient)


def test_a_value_outside_of_its_range_has_no_gradient():
    recipe = Recipe("int8", "int8", Calibration("fixed,1", "fixed,0.2"))
    _, (to_x, to_kernel) = dense(recipe)
    np.testing.assert_array_equal(np.abs(X) > 1, to_x == 0)
    np.testing.assert_array_equal(np.abs(KERNEL) > 0.2, to_kernel == 0)


@pytest.mark.rest(covered_by="int8, and dense layers", cases=("fp8", "per tensor", "clipped"))
@pytest.mark.parametrize("name", ["int8", "fp8", "per tensor", "clipped"])
def test_experts_multiply_as_dense_layers(name):
    """Each expert's rows, in both forms of the product: equal numbers of rows per expert, and rows sorted by expert."""
    recipe = RECIPES[name]
    x, product = draw(50, 32), made(recipe, EXPERTS)
    kernel = draw(4, 32, 16, seed=1) * np.float32([0.2, 1, 0.1, 0.02])[:, None, None]  # different scales
    alone = made(recipe, Kernel((32,), (16,), (None, None)))

    def of_expert(rows, kernel, gradient):
        out, pull = jax.vjp(lambda x, kernel: alone(x, 1, kernel), rows, kernel)
        return out, *pull(gradient)

    of_experts = jax.jit(lambda *args: [of_expert(*each) for each in zip(*args, strict=True)])
    batch = x[:48].reshape(4, 12, 32)
    out, gradient, grads = pulled(lambda x, kernel: product(x, kernel, None), batch, kernel)
    expected = [np.stack(parts) for parts in zip(*of_experts(batch, kernel, gradient), strict=True)]
    np.testing.assert_allclose(out, expected[0], rtol=1e-6)
    for found, exact in zip(grads, expected[1:], strict=True):
        np.testing.assert_allclose(found, exact, rtol=0 if recipe.per_channel else 1e-6)
    out, gradient, (to_x, to_kernel) = pulled(lambda x, kernel: product(x, kernel, SIZES), x, kernel)
    ends = np.cumsum(SIZES)
    rows = [slice(end - size, end) for end, size in zip(ends, SIZES, strict=True)]
    used = [i for i in range(4) if SIZES[i]]
    each = of_experts([x[rows[i]] for i in used], kernel[used], [gradient[rows[i]] for i in used])
    out, to_x, to_kernel = map(np.asarray, (out, to_x, to_kernel))
    assert not to_kernel[1].any()  # an expert without rows
    plain = [(x[those] @ kernel[i], gradient[those] @ kernel[i].T) for i, those in enumerate(rows)]
    for i, those in enumerate(rows if name != "clipped" else ()):  # also with one scale for the rows of all experts
        for found, exact in zip((out[those], to_x[those]), plain[i], strict=True):
            assert np.linalg.norm(found - exact) <= 0.2 * np.linalg.norm(exact)
    if recipe.per_channel:
        np.testing.assert_allclose(out, np.concatenate([out for out, *_ in each]), rtol=1e-6)
        assert_same_bits(to_x, np.concatenate([one for _, one, _ in each]))
    if name == "int8":  # the scales of the kernel gradient cover the rows of all experts
        (qx, sx) = rounded(np.float64(x), 1)
        integers, scale = rounded(np.float64(gradient) * sx, 0)
        assert close(to_kernel, np.stack([qx[those].T @ integers[those] for those in rows]) * scale)


@pytest.mark.rest(covered_by="sorted rows", cases=("batch",))
@pytest.mark.parametrize("sizes", [None, SIZES], ids=["batch", "sorted"])
def test_experts_are_mapped_over_islands(sizes):
    """`jax.vmap` over inputs, with and without an axis of the kernel."""
    x = draw(2, 4, 12, 32) if sizes is None else draw(2, 50, 32)
    kernel, product = draw(4, 32, 16, seed=1), made(RECIPES["int8"], EXPERTS)
    grads = jax.jit(jax.grad(lambda x, kernel: jnp.sum(jnp.sin(product(x, kernel, sizes))), (0, 1)))
    each = [grads(one, kernel) for one in x]
    stacked = functools.partial(jax.tree.map, lambda *parts: np.stack(parts))
    assert_same_bits(jax.jit(jax.vmap(grads, (0, None)))(x, kernel), stacked(*each))
    both = np.stack([kernel, 2 * kernel])
    each = [grads(*pair) for pair in zip(x, both, strict=True)]
    assert_same_bits(jax.jit(jax.vmap(grads))(x, both), stacked(*each))


def test_parts_of_the_rows_have_scales_of_their_own():
    """With one part per row, the kernel gradient is the sum over rows, however the rows are batched."""
    x, exact = draw(4, 128, 32), jax.jit(functools.partial(dense, RECIPES["int8"]))
    _, (_, whole) = dense(Recipe("int8", "int8", parts=4), x)
    each = [exact(x[i : i + 1])[1][1] for i in range(4)]
    np.testing.assert_allclose(whole, np.sum(each, 0), rtol=1e-4, atol=1e-5)
    assert not np.allclose(whole, exact(x)[1][1], rtol=1e-3)
    # On one device, there is one part; and all parts multiply integers.
    assert_same_bits(dense(Recipe("int8", "int8", parts=DEVICES), x), exact(x))
    product = made(Recipe("int8", "int8", parts=4))
    text = jax.jit(jax.grad(lambda kernel: product(x, 1, kernel).sum())).lower(KERNEL).as_text()
    assert "tensor<4x128x32xi8>, tensor<4x128x3x16xi8>" in text
    with pytest.raises(UserError, match=r"shard_count=8: a microbatch has 512 tokens.* at least 128"):
        dense(Recipe("int8", "int8", parts=8), x)


@pytest.mark.parametrize("parts", [1, DEVICES], ids=["whole", "of devices"])
def test_a_scale_is_over_the_whole_axis_or_of_a_device(parts):
    """8 devices, which split rows by 4 and inputs or outputs by 2, equal one device with as many parts."""
    config = tiny_config(ALL_COMBINATIONS[0], devices=8, ici_data_parallelism=4, ici_tensor_parallelism=2)
    x, gradient = draw(8, 128, 32), draw(8, 128, 64, seed=2)
    rows = INPUT[:2]

    def of(name):
        return name and f"activation_{name}"

    def made_on(parts, inputs, outputs):
        product = made(Recipe("int8", "int8", parts=parts))

        def fn(x, values, gradient):
            x, values = sharding.constrain(x, (*rows, of(inputs))), sharding.constrain(values, (inputs, outputs))
            out, pull = jax.vjp(lambda x, values: product(x, 1, values), x, values)
            return out, *pull(sharding.constrain(gradient, (*rows, of(outputs))))

        return jax.jit(fn)

    for inputs, outputs in ((None, "mlp"), ("mlp", None)):
        args = x, draw(32, 64, seed=1), gradient
        with on_mesh(make_mesh(config, jax.devices()[:8]), axis_rules(config)):
            compiled = made_on(parts, inputs, outputs).lower(*args).compile()
        found, whole, parted = compiled(*args), *(made_on(count, inputs, outputs)(*args) for count in (1, 4))
        found, whole, parted = jax.device_get((found, whole, parted))
        expected, other = (whole, parted) if parts == 1 else (parted, whole)
        for a, b in zip(found, expected, strict=True):
            assert close(a, b)
        assert np.linalg.norm(found[2] - other[2]) > 3 * np.linalg.norm(found[2] - expected[2])
        # Only with one scale, devices exchange ranges over rows: one range for each output of a device.
        ranges = re.findall(r"f32\[(?:1,)*([0-9]+)\]\S* all-reduce", compiled.as_text())
        assert inputs or ("32" in ranges) == (parts == 1), ranges


@pytest.mark.parametrize("noise", ["uniform", "low_bit_uniform"])
def test_stochastic_rounding_has_the_right_mean_and_follows_the_row(noise):
    recipe = Recipe("int4", "int4", rounding=noise)
    zeros, gradient = np.zeros((4, 64), np.int32), draw(4, 64, 3, 16, seed=3)

    def gradients(product):
        def grads(key, rows):
            context = None if key is None else Context(zeros[rows], zeros[rows], rows, key)
            pull = jax.vjp(lambda x, kernel: product(x, 1, kernel, None, context), X[rows], KERNEL)[1]
            return pull(gradient[rows])

        return grads

    every, grads = np.arange(4), gradients(made(recipe))
    exact = gradients(made(Recipe("int4", "int8")))
    other = gradients(quantized(recipe, DENSE._replace(name="another"), rngs=None))

    @jax.jit
    def drawn(keys):
        """Returns four kinds of gradients: per key; to nearest; exact; and for the first key.

        The last kind uses half of the rows, and another matrix.
        """
        many, first = jax.vmap(lambda key: grads(key, every))(keys), keys[0]
        return many, grads(None, every), exact(None, every), grads(first, every[2:])[0], other(first, every)[0]

    found = drawn(jax.random.split(jax.random.key(5), 60))
    (to_x, to_kernel), nearest, exact, half, another = jax.device_get(found)
    assert not (to_x[0] == to_x[1]).all()
    for mean, one, goal in zip((to_x.mean(0), to_kernel.mean(0)), nearest, exact, strict=True):
        assert np.linalg.norm(mean - goal) < 0.3 * np.linalg.norm(one - goal)
    np.testing.assert_array_equal(to_x[0][2:], half)  # a row's noise depends only on its index, so a batch may be split
    assert not (another == to_x[0]).all()


def test_experts_round_stochastically_and_each_gradient_has_its_noise():
    recipe = Recipe("int8", "int8", rounding="uniform")
    x, kernel, zeros = draw(50, 32), draw(4, 32, 16, seed=1), np.zeros((2, 8), np.int32)
    product = made(recipe, EXPERTS)

    def grads(key):
        context = Context(zeros, zeros, np.arange(2), key)
        return pulled(lambda x, kernel: product(x, kernel, SIZES, context), x, kernel)[2]

    one, other, nearest = map(jax.jit(grads), (jax.random.key(1), jax.random.key(2), None))
    for a, b, c in zip(one, other, nearest, strict=True):
        assert not (a == b).all()
        assert not (a == c).all()
    how, keys = _How(recipe, rows=2), jax.random.split(jax.random.key(3), 4)
    first, second = jax.jit(lambda keys: [_noise(how, keys, number, (4, 8, 16)) for number in (0, 1)])(keys)
    assert first.shape == (4, 8)
    assert not (first == second).any()


@pytest.mark.parametrize(
    ("method", "per_channel", "inputs", "outputs"),
    [
        *(("rms,2", per_channel, *names) for per_channel in (True, False) for names in (OF_WI, OF_WI[::-1])),
        ("absmax", True, *OF_WI),
        ("absmax", False, *OF_WI[::-1]),
    ],
)
def test_devices_that_share_the_hidden_units_of_experts_share_their_scales(method, per_channel, inputs, outputs):
    """Each device has half of the inputs or outputs; the result and the gradients equal those of one device."""
    kernel = Kernel((32,), (16,), ("exp", inputs, outputs), 4)
    product = quantized(Recipe("int8", "int8", Calibration(*[method] * 4), per_channel), kernel, rngs=None)
    config = tiny_config(ALL_COMBINATIONS[0], devices=2, ici_tensor_parallelism=2, ici_fsdp_parallelism=1)
    x, value, gradient = draw(50, 32, seed=4), draw(4, 32, 16, seed=5), draw(50, 16, seed=6)

    def fn(x, value, gradient):
        out, pull = jax.vjp(lambda x, value: product(x, value, SIZES), x, value)
        return out, *pull(gradient)

    shares = {"mlp": "activation_mlp"}
    rows, columns = (sharding.Axes((None, shares.get(name))) for name in (inputs, outputs))
    of_kernel = sharding.Axes((None, rows[1], columns[1]))

    def summed(*args):
        out, to_x, to_kernel = fn(*args)
        split = sharding.mesh_axes("activation_mlp")
        return (
            (jax.lax.psum(out, split) if inputs == "mlp" else out),
            (to_x if inputs == "mlp" else jax.lax.psum(to_x, split)),
            to_kernel,
        )

    with on_mesh(make_mesh(config, jax.devices()[:2]), axis_rules(config)):
        run = sharding.shard_mapped(summed, (rows, of_kernel, columns), (columns, rows, of_kernel), check=False)
        found = jax.jit(run)(x, value, gradient)
    for a, b in zip(found, jax.jit(fn)(x, value, gradient), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-2 * np.abs(b).max() if method == "absmax" else 1e-4 * np.abs(b).max())


def test_a_sum_that_int32_may_not_hold_is_refused():
    x, kernel = np.ones((1, 140_000, 1), np.float32), Kernel((1,), (1,), (None, None))

    @functools.partial(jax.jit, static_argnums=0)
    def to_kernel(parts):
        product = quantized(Recipe("int8", "int8", parts=parts), kernel, rngs=None)
        return jax.vjp(lambda kernel: product(x, 1, kernel), jnp.ones((1, 1)))[1](jnp.asarray(x))[0]

    with pytest.raises(
        UserError, match="a sum of 140,000 products of integers may overflow int32; the limit is 131,071"
    ):
        to_kernel(1)
    np.testing.assert_allclose(to_kernel(DEVICES), 140_000, rtol=0.02)

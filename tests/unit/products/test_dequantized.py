"""Kernels that are stored quantized: their values, compared with NumPy, and products with them."""

import dataclasses
import functools
from math import prod

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from qwix._src.core.qarray import HowToQuantize
from qwix.contrib import padded_ptq
from support import random_variables, tiny_config

from trainer.backends.registry import make_model
from trainer.config.errors import UserError
from trainer.layers.mla import LatentAttention
from trainer.models.caches import init_cache
from trainer.products.dequantized import (
    NF4,
    Packed,
    Storage,
    dequantize,
    dequantized,
    float_shape,
    parameter_count,
    with_awq_scale,
)
from trainer.products.plain import Kernel

SHAPES = [((64,), (48,)), ((4, 32), (64,)), ((64,), (4, 32))]
STORAGES = {
    "int8": Storage("int8"),
    "int4": Storage("int4", (32, 1)),
    "two heads share a scale": Storage("int4", (64, 1)),
    "zero points": Storage("int4", (16, 1), "minmax"),
    "zero points of outputs": Storage("int8", method="minmax"),
    "fp8": Storage("float8_e4m3fn"),
    "fp8 blocks": Storage("float8_e4m3fn", (32, 16)),
    "nf4": Storage(NF4, (32, 1)),
    "awq": Storage("int4", (32, 1), awq=True),
}


def kernel_of(inputs, outputs, groups=0):
    names = [None] * (len(inputs) + len(outputs) + bool(groups))
    return Kernel(inputs, outputs, tuple(names), groups, "mlp/wo/kernel")


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@functools.partial(jax.jit, static_argnums=(0, 1, 3))
def stored_as(storage, kernel, value, stacked=0, scale=None):
    """Returns the stored form of `value`. With AWQ, `scale` (default: 1) contains the scales of the inputs."""
    stored = storage.store(kernel, value, stacked)
    return stored if scale is None or not storage.awq else with_awq_scale(stored.array, scale, kernel)


floats = jax.jit(functools.partial(dequantize, dtype=jnp.dtype(jnp.float32)))


@functools.cache
def example(name, kernel, *first):
    """Returns a random kernel stored as STORAGES[name], with random AWQ scales, and its dequantized values."""
    shape = (*first, *kernel.in_shape)
    scale = 1 + np.abs(normal(*shape, seed=2))
    stored, values = _with_floats(STORAGES[name], kernel, normal(*shape, *kernel.out_shape), scale)
    return stored, np.asarray(values, np.float64)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _with_floats(storage, kernel, value, scale):
    stored = stored_as(storage, kernel, value, 0, scale)
    return stored, floats(stored)


def test_int8_is_numpys():
    value = normal(3, 64, 48)
    found = stored_as(Storage("int8"), kernel_of((64,), (48,)), value, 1)
    scale = np.abs(value).max(1, keepdims=True) / np.float32(127.5)
    np.testing.assert_allclose(found.scale, scale, rtol=1e-6)
    expected = np.clip(np.round(value / np.asarray(found.scale)), -128, 127)
    assert (np.abs(expected - np.asarray(found.qvalue, np.float32)) <= (np.abs(value / scale) % 1 > 0.499)).all()
    np.testing.assert_array_equal(floats(found), np.asarray(found.qvalue, np.float32) * np.asarray(found.scale))


def test_blocks_have_their_own_scales():
    value = normal(64, 48)
    found = stored_as(Storage("float8_e4m3fn", (32, 16)), kernel_of((64,), (48,)), value)
    largest = np.abs(value).reshape(2, 32, 3, 16).max((1, 3))
    np.testing.assert_allclose(found.scale, largest / 448, rtol=1e-6)
    expected = (value / np.kron(np.asarray(found.scale), np.ones((32, 16)))).astype(ml_dtypes.float8_e4m3fn)
    assert (expected == np.asarray(found.qvalue)).mean() > 0.999  # a tie may round either way


def test_zero_points_hold_the_range():
    value = normal(64, 48) + 3
    found = stored_as(Storage("int4", (16, 1), "minmax"), kernel_of((64,), (48,)), value)
    tiles = value.reshape(4, 16, 48)
    step = (np.maximum(tiles.max(1), 0) - np.minimum(tiles.min(1), 0)) / 15
    error = np.abs(np.asarray(floats(found)) - value).reshape(4, 16, 48).max(1)
    assert (error <= 1.01 * step).all()
    plain = floats(stored_as(Storage("int4", (16, 1)), kernel_of((64,), (48,)), value))
    assert error.mean() < np.abs(np.asarray(plain) - value).mean()


def test_nf4_takes_the_nearest_number_and_packs_two_in_a_byte():
    from qwix._src.core.numerics import get_nf4_buckets

    value = normal(2, 4, 32, 64)
    kernel = kernel_of((4, 32), (64,))
    found = stored_as(Storage(NF4, (32, 1)), kernel, value, 1)
    assert isinstance(found, Packed)
    assert found.codes.shape == (2, 4, 16, 64)
    assert found.codes.dtype == jnp.uint8
    scale = np.abs(value).max(2, keepdims=True)
    nearest = np.abs(np.asarray(get_nf4_buckets()) - (value / scale)[..., None]).argmin(-1)
    codes = np.asarray(found.codes)
    np.testing.assert_array_equal(np.stack([codes & 15, codes >> 4], 3).reshape(nearest.shape), nearest)
    np.testing.assert_allclose(floats(found), np.asarray(get_nf4_buckets())[nearest] * scale, rtol=1e-6)


@pytest.mark.parametrize("inputs_outputs", SHAPES, ids=str)
@pytest.mark.parametrize("name", STORAGES)
def test_a_product_is_that_of_the_dequantized_kernel(name, inputs_outputs):
    """With 2 rows, scales are applied after the product; with 200 rows, before it."""
    inputs, outputs = inputs_outputs
    kernel = kernel_of(inputs, outputs)
    stored, whole = example(name, kernel)
    xs = [normal(1, rows, *inputs, seed=1) for rows in (2, 200)]
    product = dequantized(STORAGES[name], kernel, rngs=None)
    products = jax.jit(lambda xs, stored: [product(x, len(inputs), stored, None, None) for x in xs])(xs, stored)
    for x, found in zip(xs, products, strict=True):
        rows = x.shape[1]
        expected = x.reshape(rows, -1).astype(np.float64) @ whole.reshape(prod(inputs), -1)
        assert found.shape == (1, rows, *outputs)
        assert found.dtype == jnp.float32
        atol = 2e-6 * np.abs(expected).max()
        np.testing.assert_allclose(found.reshape(rows, -1), expected, atol=atol, err_msg=str(rows))


@pytest.mark.parametrize("name", STORAGES)
def test_a_product_of_few_rows_scales_no_kernel(name):
    """A TPU would write a scaled kernel to memory before the product, and read it again."""
    kernel, storage = kernel_of((4, 32), (64,)), STORAGES[name]
    stored, _ = example(name, kernel)
    product = dequantized(storage, kernel, rngs=None)
    for rows, scaled in ((4, False), (200, storage.block[0] > 0)):
        program = jax.make_jaxpr(lambda x, stored: product(x, 2, stored, None, None))(normal(rows, 4, 32), stored)
        sizes = [eqn.outvars[0].aval.size for eqn in program.eqns if eqn.primitive.name == "mul"]
        assert (max(sizes) >= 4 * 32 * 64) == (scaled or rows * 64 >= 4 * 32 * 64), (rows, sizes)


@pytest.mark.parametrize("name", STORAGES)
def test_experts_multiply_with_their_own_kernels(name):
    kernel, storage = kernel_of((64,), (48,), groups=3), STORAGES[name]
    layers = stored_as(storage, kernel, normal(2, 3, 64, 48), 1)
    sorted_rows, sizes, batch = normal(10, 64, seed=1), np.array([4, 0, 6]), normal(3, 5, 64, seed=1)
    product = dequantized(storage, kernel, rngs=None)

    @jax.jit
    def of_second_layer(layers):
        stored = jax.tree.map(lambda part: part[1], layers)
        found = product(sorted_rows, stored, jnp.asarray(sizes), None), product(batch, stored, None, None)
        return *found, dequantize(stored, jnp.dtype(jnp.float32))

    of_sorted, of_batch, whole = map(np.asarray, of_second_layer(layers))
    expected = np.concatenate([sorted_rows[:4] @ whole[0], sorted_rows[4:] @ whole[2]])
    np.testing.assert_allclose(of_sorted, expected, atol=1e-4)
    np.testing.assert_allclose(of_batch, batch @ whole, atol=1e-4)


@pytest.mark.parametrize("groups", [0, 3])
@pytest.mark.parametrize("name", ["int8", "nf4", "awq"])
def test_products_in_bfloat16_are_rounded_a_few_times(name, groups):
    """The weight, the input or the result is rounded: about 2^-9.2 each, relative to a typical result.

    Sums are in float32.
    """
    kernel, first = kernel_of((64,), (48,), groups), (groups,) if groups else ()
    stored, whole = example(name, kernel, *first)
    product = dequantized(STORAGES[name], kernel, rngs=None)
    apply = jax.jit(lambda x, stored: product(x, stored, None) if groups else product(x, 1, stored))
    for rows in (200,) if groups else (2, 200):
        x = normal(*first, rows, 64, seed=1).astype(jnp.bfloat16)
        found = apply(x, stored)
        assert found.dtype == jnp.bfloat16
        expected = np.asarray(x, np.float64) @ whole
        error = np.asarray(found, np.float64) - expected
        assert np.square(error).mean() < 2**-16 * np.square(expected).mean(), rows


@pytest.mark.parametrize("name", STORAGES)
def test_scales_are_no_parameters(name):
    values = np.zeros((2, 64, 48), np.float32)
    stored = jax.eval_shape(lambda values: stored_as(STORAGES[name], kernel_of((64,), (48,)), values, 1), values)
    assert float_shape(stored) == values.shape
    assert parameter_count({"mlp": {"kernel": stored, "bias": np.zeros((2, 48))}}) == 2 * 64 * 48 + 2 * 48


def test_the_tiles_of_a_type_of_ones_own_need_not_divide_its_kernel():
    how = HowToQuantize(qtype=jnp.int8, channelwise_axes=(1,), tiled_axes={0: 6})
    assert parameter_count(jax.eval_shape(lambda: padded_ptq.quantize(jnp.ones((16, 32)), how))) == 16 * 32


def test_blocks_that_fit_badly_are_refused():
    with pytest.raises(UserError, match=r"weight_block_size: blocks of 32 do not fit mlp/wo/kernel.*only 2 could"):
        Storage("int4", (32, 1)).store(kernel_of((50,), (8,)), jnp.zeros((50, 8)))
    found = jax.eval_shape(lambda: Storage("int4", (128, 1)).store(kernel_of((4, 48), (8,)), jnp.ones((4, 48, 8))))
    assert found.scale.shape == (4, 3, 8)  # the largest block size that divides a head
    with pytest.raises(UserError, match="mlp/wo/kernel is float, and the product needs"):
        dequantized(Storage("int8"), kernel_of((4,), (4,)), rngs=None)(jnp.ones((1, 4)), 1, jnp.ones((4, 4)))


def test_inputs_with_a_scale_each():
    """`weight_block_size=[1,1]`. AWQ and GPTQ read the number; 0 would mean one scale for all inputs."""
    kernel = Kernel((4, 16), (8,), (None, None, None), name="out")
    assert [Storage("int8", (block, 1)).of_inputs(kernel) for block in (0, 1, 16, 32, 64)] == [0, 1, 16, 32, 64]


def test_latent_attention_over_a_cache_expands_no_keys(monkeypatch):
    """Queries are multiplied by the dequantized matrix instead. The result equals a forward pass over all tokens."""
    keys = {"decoder_block": "deepseek", "attention_type": "mla", "base_num_kv_heads": 4, "kv_lora_rank": 16}
    keys |= {"qk_rope_head_dim": 4, "num_experts": 4, "base_moe_mlp_dim": 8, "shared_experts": 1}
    keys |= {"base_num_decoder_layers": 1, "attention": "dot_product"}
    keys |= {"weight_quantization_algorithm": "awq"}
    keys |= {"checkpoint_is_quantized": True, "quantization": "int8", "max_target_length": 8}
    config = tiny_config("nnx", **keys)
    model = make_model(config)
    params, rest = random_variables(model)
    tokens = np.arange(8, dtype=np.int32)[None] * 7 % config.vocab_size

    def run(cache, first, last):
        positions = np.arange(first, last)[None]
        inputs = tokens[:, first:last], positions, np.ones_like(positions), np.zeros(1, np.int32)
        return jax.jit(lambda params, cache: model.apply(params, rest, *inputs, cache=cache)[::2])(params, cache)

    whole, _ = run(None, 0, 8)
    begin, cache = run(jax.jit(lambda: init_cache(config, 1, 8))(), 0, 5)
    monkeypatch.setattr(LatentAttention, "_keys_and_values", None)
    end, _ = run(dataclasses.replace(cache, filled=True), 5, 8)
    np.testing.assert_allclose(np.concatenate([begin, end], 1), whole, atol=2e-5 * np.abs(whole).max())


@pytest.mark.parametrize("name", STORAGES)
def test_scales_are_applied_in_float32_before_the_kernel_is_rounded(name):
    """Including AWQ's scales."""
    kernel = kernel_of((64,), (48,))
    stored, _ = example(name, kernel)
    rounded = jax.jit(functools.partial(dequantize, dtype=jnp.dtype(jnp.bfloat16)))
    np.testing.assert_array_equal(rounded(stored), np.asarray(floats(stored)).astype(jnp.bfloat16))
    coarse = getattr(stored, "array", stored)
    coarse = dataclasses.replace(coarse, scale=coarse.scale.astype(jnp.bfloat16))
    fine = dataclasses.replace(coarse, scale=coarse.scale.astype(jnp.float32))
    for of_dtype in (rounded, floats):
        np.testing.assert_array_equal(of_dtype(coarse), of_dtype(fine))

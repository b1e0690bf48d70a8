"""Kernels that are stored quantized: their values, against NumPy, and products with them."""

import dataclasses
from math import prod

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from qwix._src.core.qarray import HowToQuantize
from qwix.contrib import padded_ptq
from support import tiny_config

from trainer.backends import make_model
from trainer.config import UserError
from trainer.layers.mla import LatentAttention
from trainer.models.caches import init_cache
from trainer.products import Kernel
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


def test_int8_is_numpys():
    value = normal(3, 64, 48)
    found = Storage("int8").store(kernel_of((64,), (48,)), jnp.asarray(value), stacked=1)
    scale = np.abs(value).max(1, keepdims=True) / np.float32(127.5)
    np.testing.assert_allclose(found.scale, scale, rtol=1e-6)
    expected = np.clip(np.round(value / np.asarray(found.scale)), -128, 127)
    assert (np.abs(expected - np.asarray(found.qvalue, np.float32)) <= (np.abs(value / scale) % 1 > 0.499)).all()
    np.testing.assert_array_equal(
        dequantize(found, jnp.dtype(jnp.float32)), np.asarray(found.qvalue, np.float32) * np.asarray(found.scale)
    )


def test_blocks_have_their_own_scales():
    value = normal(64, 48)
    found = Storage("float8_e4m3fn", (32, 16)).store(kernel_of((64,), (48,)), jnp.asarray(value))
    largest = np.abs(value).reshape(2, 32, 3, 16).max((1, 3))
    np.testing.assert_allclose(found.scale, largest / 448, rtol=1e-6)
    expected = (value / np.kron(np.asarray(found.scale), np.ones((32, 16)))).astype(ml_dtypes.float8_e4m3fn)
    assert (expected == found.qvalue).mean() > 0.999  # a quotient between two numbers may round either way


def test_zero_points_hold_the_range():
    value = normal(64, 48) + 3
    found = Storage("int4", (16, 1), "minmax").store(kernel_of((64,), (48,)), jnp.asarray(value))
    tiles = value.reshape(4, 16, 48)
    step = (np.maximum(tiles.max(1), 0) - np.minimum(tiles.min(1), 0)) / 15
    error = np.abs(np.asarray(dequantize(found, jnp.dtype(jnp.float32))) - value).reshape(4, 16, 48).max(1)
    assert (error <= 1.01 * step).all()
    plain = dequantize(Storage("int4", (16, 1)).store(kernel_of((64,), (48,)), jnp.asarray(value)), jnp.float32)
    assert error.mean() < np.abs(np.asarray(plain) - value).mean()


def test_nf4_takes_the_nearest_number_and_packs_two_in_a_byte():
    from qwix._src.core.numerics import get_nf4_buckets

    value = normal(2, 4, 32, 64)
    kernel = kernel_of((4, 32), (64,))
    found = Storage(NF4, (32, 1)).store(kernel, jnp.asarray(value), stacked=1)
    assert isinstance(found, Packed)
    assert found.codes.shape == (2, 4, 16, 64)
    assert found.codes.dtype == jnp.uint8
    scale = np.abs(value).max(2, keepdims=True)
    nearest = np.abs(np.asarray(get_nf4_buckets()) - (value / scale)[..., None]).argmin(-1)
    codes = np.asarray(found.codes)
    np.testing.assert_array_equal(np.stack([codes & 15, codes >> 4], 3).reshape(nearest.shape), nearest)
    np.testing.assert_allclose(
        dequantize(found, jnp.dtype(jnp.float32)), np.asarray(get_nf4_buckets())[nearest] * scale, rtol=1e-6
    )


@pytest.mark.parametrize("rows", [2, 200])
@pytest.mark.parametrize("inputs_outputs", SHAPES, ids=str)
@pytest.mark.parametrize("name", STORAGES)
def test_a_product_is_that_of_the_dequantized_kernel(name, inputs_outputs, rows):
    """2 rows are multiplied before scales are applied, 200 after."""
    inputs, outputs = inputs_outputs
    kernel, storage = kernel_of(inputs, outputs), STORAGES[name]
    stored = storage.store(kernel, jnp.asarray(normal(*inputs, *outputs)))
    if storage.awq:
        scale = jnp.asarray(1 + np.abs(normal(*inputs, seed=2)))
        stored = with_awq_scale(stored.array, scale, kernel)
    x = normal(1, rows, *inputs, seed=1)
    product = jax.jit(dequantized(storage, kernel, rngs=None), static_argnums=(1, 3, 4))
    whole = np.asarray(dequantize(stored, jnp.dtype(jnp.float32)), np.float64)
    expected = x.reshape(rows, -1).astype(np.float64) @ whole.reshape(prod(inputs), -1)
    found = product(x, len(inputs), stored, None, None)
    assert found.shape == (1, rows, *outputs)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found.reshape(rows, -1), expected, atol=2e-6 * np.abs(expected).max())


@pytest.mark.parametrize("name", STORAGES)
def test_a_product_of_few_rows_scales_no_kernel(name):
    """A TPU would write a scaled kernel to memory before the product, and read it again."""
    kernel, storage = kernel_of((4, 32), (64,)), STORAGES[name]
    stored = storage.store(kernel, jnp.asarray(normal(4, 32, 64)))
    product = dequantized(storage, kernel, rngs=None)
    for rows, scaled in ((4, False), (200, storage.block[0] > 0)):
        program = jax.make_jaxpr(lambda x, stored: product(x, 2, stored, None, None))(normal(rows, 4, 32), stored)
        sizes = [eqn.outvars[0].aval.size for eqn in program.eqns if eqn.primitive.name == "mul"]
        assert (max(sizes) >= 4 * 32 * 64) == (scaled or rows * 64 >= 4 * 32 * 64), (rows, sizes)


@pytest.mark.parametrize("name", STORAGES)
def test_experts_multiply_with_their_own_kernels(name):
    kernel, storage = kernel_of((64,), (48,), groups=3), STORAGES[name]
    stored = storage.store(kernel, jnp.asarray(normal(2, 3, 64, 48)), stacked=1)
    stored = jax.tree.map(lambda part: part[1], stored)
    whole = np.asarray(dequantize(stored, jnp.dtype(jnp.float32)))
    product = dequantized(storage, kernel, rngs=None)
    x, sizes = normal(10, 64, seed=1), np.array([4, 0, 6])
    expected = np.concatenate([x[:4] @ whole[0], x[4:] @ whole[2]])
    np.testing.assert_allclose(product(x, stored, jnp.asarray(sizes), None), expected, atol=1e-4)
    x = normal(3, 5, 64, seed=1)
    np.testing.assert_allclose(product(x, stored, None, None), x @ whole, atol=1e-4)


@pytest.mark.parametrize("groups", [0, 3])
@pytest.mark.parametrize("name", ["int8", "nf4", "awq"])
def test_products_in_bfloat16_are_rounded_a_few_times(name, groups):
    """The weight, the input or the result: about 2^-9.2 each, as a share of the typical result. Sums are in float32."""
    storage, kernel = STORAGES[name], kernel_of((64,), (48,), groups)
    first = (groups,) if groups else ()
    stored = storage.store(kernel, jnp.asarray(normal(*first, 64, 48)))
    if storage.awq:
        stored = with_awq_scale(stored.array, jnp.asarray(1 + np.abs(normal(*first, 64, seed=2))), kernel)
    whole = np.asarray(dequantize(stored, jnp.dtype(jnp.float32)), np.float64)
    product = dequantized(storage, kernel, rngs=None)
    for rows in (200,) if groups else (2, 200):
        x = jnp.asarray(normal(*first, rows, 64, seed=1)).astype(jnp.bfloat16)
        found = jax.jit(lambda x, stored: product(x, stored, None) if groups else product(x, 1, stored))(x, stored)
        assert found.dtype == jnp.bfloat16
        expected = np.asarray(x, np.float64) @ whole
        error = np.asarray(found, np.float64) - expected
        assert np.square(error).mean() < 2**-16 * np.square(expected).mean(), rows


@pytest.mark.parametrize("name", STORAGES)
def test_scales_are_no_parameters(name):
    storage, values = STORAGES[name], jnp.zeros((2, 64, 48))
    stored = storage.store(kernel_of((64,), (48,)), values, stacked=1)
    assert float_shape(stored) == values.shape
    assert parameter_count({"mlp": {"kernel": stored, "bias": jnp.zeros((2, 48))}}) == 2 * 64 * 48 + 2 * 48


def test_the_tiles_of_a_type_of_ones_own_need_not_divide_its_kernel():
    how = HowToQuantize(qtype=jnp.int8, channelwise_axes=(1,), tiled_axes={0: 6})
    assert parameter_count(padded_ptq.quantize(jnp.ones((16, 32)), how)) == 16 * 32


def test_blocks_that_fit_badly_are_refused():
    with pytest.raises(UserError, match=r"weight_block_size: blocks of 32 do not fit mlp/wo/kernel.*only 2 could"):
        Storage("int4", (32, 1)).store(kernel_of((50,), (8,)), jnp.zeros((50, 8)))
    found = Storage("int4", (128, 1)).store(kernel_of((4, 48), (8,)), jnp.ones((4, 48, 8)))
    assert found.scale.shape == (4, 3, 8)  # the largest part of a block that divides a head
    with pytest.raises(UserError, match="mlp/wo/kernel is float, and the product needs"):
        dequantized(Storage("int8"), kernel_of((4,), (4,)), rngs=None)(jnp.ones((1, 4)), 1, jnp.ones((4, 4)))


def test_inputs_with_a_scale_each():
    """As `weight_block_size=[1,1]` asks. AWQ and GPTQ read the number; 0 would mean one scale for all inputs."""
    kernel = Kernel((4, 16), (8,), (None, None, None), name="out")
    assert [Storage("int8", (block, 1)).of_inputs(kernel) for block in (0, 1, 16, 32, 64)] == [0, 1, 16, 32, 64]


@pytest.mark.parametrize("form", [{}, {"weight_quantization_algorithm": "awq"}])
def test_latent_attention_over_a_cache_expands_no_keys(form, monkeypatch):
    """Its queries are multiplied with the dequantized matrix instead, and the result is that of the whole text."""
    keys = {"decoder_block": "deepseek", "attention_type": "mla", "base_num_kv_heads": 4, "kv_lora_rank": 16}
    keys |= {"qk_rope_head_dim": 4, "num_experts": 4, "base_moe_mlp_dim": 8, "shared_experts": 1}
    keys |= {
        "checkpoint_is_quantized": True,
        "quantization": "int8",
        "max_target_length": 8,
        "attention": "dot_product",
    }
    config = tiny_config("nnx", **keys | form)
    model = make_model(config)
    params, rest = jax.jit(model.init)(jax.random.key(0))
    tokens = np.arange(8, dtype=np.int32)[None] * 7 % config.vocab_size

    def run(cache, first, last):
        positions = jnp.arange(first, last)[None]
        inputs = tokens[:, first:last], positions, jnp.ones_like(positions), jnp.zeros(1, jnp.int32)
        return jax.jit(lambda params, cache: model.apply(params, rest, *inputs, cache=cache)[::2])(params, cache)

    whole, _ = run(None, 0, 8)
    begin, cache = run(init_cache(config, 1, 8), 0, 5)
    monkeypatch.setattr(LatentAttention, "_keys_and_values", None)
    end, _ = run(dataclasses.replace(cache, filled=True), 5, 8)
    np.testing.assert_allclose(np.concatenate([begin, end], 1), whole, atol=2e-5 * np.abs(whole).max())


@pytest.mark.parametrize("name", STORAGES)
def test_scales_are_applied_in_float32_before_the_kernel_is_rounded(name):
    """Those of AWQ, too."""
    storage, kernel = STORAGES[name], kernel_of((64,), (48,))
    stored = storage.store(kernel, jnp.asarray(normal(64, 48)))
    if storage.awq:
        stored = with_awq_scale(stored.array, jnp.asarray(1 + np.abs(normal(64, seed=2))), kernel)
    exact = dequantize(stored, jnp.dtype(jnp.float32)).astype(jnp.bfloat16)
    np.testing.assert_array_equal(dequantize(stored, jnp.dtype(jnp.bfloat16)), exact)
    coarse = dataclasses.replace(storage, awq=False).store(kernel, jnp.asarray(normal(64, 48)))
    coarse = dataclasses.replace(coarse, scale=coarse.scale.astype(jnp.bfloat16))
    fine = dataclasses.replace(coarse, scale=coarse.scale.astype(jnp.float32))
    for dtype in map(jnp.dtype, (jnp.bfloat16, jnp.float32)):
        np.testing.assert_array_equal(dequantize(coarse, dtype), dequantize(fine, dtype))

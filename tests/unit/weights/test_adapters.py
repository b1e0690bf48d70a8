"""How adapters are merged into a matrix when it is read."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import ALL_COMBINATIONS, tiny_config

from trainer.config.keys import Config
from trainer.leaves.source import Leaf
from trainer.products.dequantized import Storage, dequantize
from trainer.products.plain import Kernel
from trainer.weights.adapters import Initial, _merged
from trainer.weights.stored import quantized_on_load

SCALE = 0.5


@pytest.mark.parametrize("parts", [1, 2])
def test_they_are_added_in_float32_and_rounded_once(parts):
    """Also for a bfloat16 matrix, read to the host or to a device."""
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 6, 3)).astype(np.float32), rng.normal(size=(2, 3, 5)).astype(np.float32)
    kernel = rng.normal(size=(2, 6, 5)).astype(jnp.bfloat16)
    layers = [kernel] if parts == 1 else [*kernel]

    def leaf(value, layers):
        puts = [lambda like, layer=layer: jax.device_put(layer.astype(like.dtype)) for layer in layers]
        return Leaf(value.shape, value.dtype, [functools.partial(np.array, layer) for layer in layers], puts)

    found = _merged(leaf(kernel, layers), leaf(a, [a]), leaf(b, [b]), SCALE, None)
    at = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    expected = (kernel.astype(np.float32) + SCALE * (a @ b)).astype(jnp.bfloat16)
    for read, put, wanted in zip(found.parts, found.puts, [expected] if parts == 1 else expected, strict=True):
        on_device = put(jax.ShapeDtypeStruct(wanted.shape, wanted.dtype, sharding=at))
        for value in (read(), np.asarray(on_device)):
            assert value.dtype == jnp.bfloat16
            np.testing.assert_array_equal(value, wanted)


def test_under_qlora_they_are_added_to_what_the_stored_kernel_stands_for():
    """Both when the kernel is read to the host and when it is read to a device."""
    rng, at = np.random.default_rng(0), jax.sharding.SingleDeviceSharding(jax.devices()[0])
    kernel, a, b = (rng.normal(size=shape).astype(np.float32) for shape in ((6, 5), (6, 3), (3, 5)))
    store = functools.partial(Storage("int8").store, Kernel((6,), (5,), (None, None)))

    def leaf(value):
        return Leaf(value.shape, value.dtype, [lambda: value], [lambda like: jax.device_put(value.astype(like.dtype))])

    found = _merged(leaf(kernel), leaf(a), leaf(b), SCALE, store)
    stored = jax.jit(lambda kernel: dequantize(store(kernel), jnp.dtype("float32")))(kernel)
    expected = np.asarray(stored) + SCALE * (a @ b)
    assert np.abs(expected - kernel - SCALE * (a @ b)).max() > 1e-3
    on_device = found.puts[0](jax.ShapeDtypeStruct(kernel.shape, kernel.dtype, sharding=at))
    for value in (found.parts[0](), on_device):
        np.testing.assert_allclose(value, expected, rtol=1e-6, atol=1e-6)


def test_initial_parameters_are_drawn_with_the_seed_of_their_run():
    run = SimpleNamespace(path="run", tokenizer=None, described={}, length=None, about=None, seed=7)
    source = Initial(run, lambda config: {"kernel": jnp.full(2, config["init_weights_seed"])})
    found = source.leaves({"init_weights_seed": 0}, {"kernel": (2,)})
    np.testing.assert_array_equal(found["kernel"].parts[0](), [7, 7])


def test_a_base_that_is_stored_is_not_quantized_again():
    """As when QLoRA adapters are served over quantized weights (`with_adapters`)."""
    stored = tiny_config(ALL_COMBINATIONS[0], checkpoint_is_quantized=True, quantization="int8")
    qlora = {"enable_lora": True, "lora_rank": 2, "lora_alpha": 4.0, "lora_weight_qtype": "int8"}
    for config, count in ((stored, 0), (tiny_config(ALL_COMBINATIONS[0]), 7)):
        assert len(quantized_on_load(Config({**config, **qlora}))) == count

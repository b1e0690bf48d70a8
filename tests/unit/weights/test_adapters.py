"""What adapters add to a matrix that is read."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trainer.leaves.source import Leaf
from trainer.weights.adapters import _merged

SCALE = 0.5


@pytest.mark.parametrize("parts", [1, 2])
def test_they_are_added_in_float32_and_rounded_once(parts):
    """Also to a matrix in bfloat16, whether it is read to the host or to a device."""
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 6, 3)).astype(np.float32), rng.normal(size=(2, 3, 5)).astype(np.float32)
    kernel = rng.normal(size=(2, 6, 5)).astype(jnp.bfloat16)
    layers = [kernel] if parts == 1 else [*kernel]

    def leaf(value, layers):
        puts = [lambda like, layer=layer: jnp.asarray(layer, like.dtype) for layer in layers]
        return Leaf(value.shape, value.dtype, [functools.partial(np.array, layer) for layer in layers], puts)

    found = _merged(leaf(kernel, layers), leaf(a, [a]), leaf(b, [b]), SCALE, None)
    at = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    expected = (kernel.astype(np.float32) + SCALE * (a @ b)).astype(jnp.bfloat16)
    for read, put, wanted in zip(found.parts, found.puts, [expected] if parts == 1 else expected, strict=True):
        on_device = put(jax.ShapeDtypeStruct(wanted.shape, wanted.dtype, sharding=at))
        for value in (read(), np.asarray(on_device)):
            assert value.dtype == jnp.bfloat16
            np.testing.assert_array_equal(value, wanted)

"""8-bit arrays: each entry is within half a step of its scale, and nothing exceeds the range of fp8."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trainer.ops.scaled import scaled

INT8, FP8 = jnp.dtype("int8"), jnp.dtype("float8_e4m3fn")
X = np.random.default_rng(0).normal(size=(64, 3, 8)) * np.exp2(np.random.default_rng(1).integers(-20, 20, (64, 3, 1)))


@functools.partial(jax.jit, static_argnums=(1, 2))
def held_and_array(x, stored, axes):
    held = scaled(x, stored, axes)
    return held, held.array()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("axes", [(-1,), (-1, -2)])
@pytest.mark.parametrize("stored", [INT8, FP8])
def test_each_entry_is_within_half_a_step(stored, axes, dtype):
    x = X.astype(jnp.dtype(dtype))
    x[0] = 0
    held, array = jax.device_get(held_and_array(x, stored, axes))
    exact, value, scale = (np.asarray(it, np.float64) for it in (x, held.value, held.scale))
    assert held.value.dtype == stored
    assert held.scale.shape == (64, 1 if len(axes) == 2 else 3, 1)
    assert held.scale.dtype == dtype
    # fp8 has 3 bits after the leading one, and steps of 2^-9 below 2^-6. Rounding a scale to bfloat16 changes it by at
    # most 2^-9 of its value, which may put the largest entry beyond 127 or 448.
    step = (
        1.0 if stored == INT8 else np.maximum(np.exp2(np.floor(np.log2(np.maximum(np.abs(value), 2**-6)))) / 8, 2**-9)
    )
    beyond = 0.0 if dtype == "float32" else float(2**-8 * (127 if stored == INT8 else 448))
    assert (np.abs(exact - value * scale) <= scale * (step / 2 + beyond * (np.abs(value) >= 127)) * (1 + 1e-6)).all()
    # `array` computes in the array's dtype.
    np.testing.assert_allclose(np.asarray(array, np.float64), value * scale, rtol=2**-8)
    assert (value[0] == 0).all()


def test_a_scale_that_is_rounded_down_gives_no_nan():
    """fp8 has no infinity: casting a value above 448 gives NaN."""
    x = np.linspace(1, 2, 1001)[:, None].astype(jnp.bfloat16)
    held, array = held_and_array(x, FP8, (-1,))
    assert (np.asarray(held.scale, np.float64) * 448 < np.asarray(x, np.float64)).any()
    np.testing.assert_allclose(np.asarray(array, np.float64), np.asarray(x, np.float64), rtol=2**-7)

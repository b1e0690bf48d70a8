"""Quantization of one kernel by AWQ and GPTQ, compared with NumPy and Qwix's function."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from qwix.contrib import gptq_core

from trainer.config.errors import UserError
from trainer.products import calibrated
from trainer.products.calibrated import How, awq, gptq, values
from trainer.products.dequantized import Storage
from trainer.products.plain import Kernel

INT4 = How("int4", block=32)


@functools.cache
def kernel_and_inputs(inputs=64, outputs=12):
    """Returns a kernel [in, out], and correlated activations [n, in] with some large inputs."""
    rng = np.random.default_rng(0)
    mixed = rng.normal(size=(256, 8)) @ rng.normal(size=(8, inputs)) + 0.3 * rng.normal(size=(256, inputs))
    kernel, x = rng.normal(size=(inputs, outputs)), mixed * np.exp(rng.normal(size=inputs))
    return kernel.astype(np.float32), x.astype(np.float32)


def error(kernel, quantized, x):
    """Returns tr((W - Q)^T H (W - Q)) with H = x^T x: the squared error of the product."""
    return np.square(x.astype(np.float64) @ (kernel - np.asarray(quantized, np.float64))).sum()


def in_numpy(kernel, block):
    """Returns the kernel [in, out], quantized to int4 with a scale per `block` inputs and dequantized."""
    tiles = kernel.reshape(-1, block, kernel.shape[1])
    scale = np.abs(tiles).max(1, keepdims=True) / 7.5
    return (np.clip(np.round(tiles / scale), -8, 7) * scale).reshape(kernel.shape)


def assert_rounded(found, kernel, block):
    """Skips negative maxima of a block: -7.5 scales become -7 or -8, depending on the last bit."""
    tiles = kernel.reshape(-1, block, kernel.shape[1])
    sure = (tiles > -0.999 * np.abs(tiles).max(1, keepdims=True)).reshape(kernel.shape)
    assert sure.mean() > 0.95
    np.testing.assert_allclose(np.where(sure, found, 0), np.where(sure, in_numpy(kernel, block), 0), rtol=1e-5)


def by_grid(kernel, mean_abs, block):
    """Tries 20 powers of the activations' magnitudes as scales, and returns the scales with the least error."""
    best = np.inf, None
    for power in np.linspace(0, 1, 20):
        scale = np.clip(mean_abs / mean_abs.max(), 1e-4, None) ** power
        scale /= np.sqrt(scale.max() * scale.min())
        off = (kernel - in_numpy(kernel * scale[:, None], block) / scale[:, None]) * mean_abs[:, None]
        best = min(best, (np.square(off).mean(), tuple(scale)))
    return np.array(best[1])


def rounded(kernel, how):
    """Returns the kernel, or each of several, quantized without calibration."""
    storage = Storage(how.dtype, (how.block, 1), how.method)
    groups = len(kernel) if kernel.ndim == 3 else 0
    of = Kernel(kernel.shape[-2:-1], kernel.shape[-1:], (None,) * kernel.ndim, groups)
    return jax.jit(functools.partial(storage.store, of))(kernel)


def test_the_scales_of_awq():
    """They equal those of a NumPy search, and the error of the product is below that of plain rounding."""
    kernel, x = kernel_and_inputs()
    mean_abs = np.abs(x).mean(0)
    found, scales = awq(kernel, mean_abs, INT4)
    np.testing.assert_allclose(scales, by_grid(kernel.astype(np.float64), mean_abs.astype(np.float64), 32), rtol=1e-4)
    assert np.ptp(scales) > 0.1
    assert_rounded(values(found), kernel * np.asarray(scales)[:, None], 32)
    assert error(kernel, values(found, scales), x) < 0.8 * error(kernel, values(rounded(kernel, INT4)), x)


@pytest.mark.parametrize("block", [8, 0])
def test_gptq_is_the_one_of_qwix(block, monkeypatch):
    """With the same block size as here. Qwix unrolls all columns, so only a small kernel compiles quickly."""
    monkeypatch.setattr(calibrated, "COLUMNS", 4)
    kernel, x = kernel_and_inputs(16, 6)
    hessian, how = x.T @ x, How("int8", block)
    found = gptq(kernel, hessian, how)
    whole = jax.jit(lambda *args: gptq_core.quantize_weight(*args, how.of_rows(), blocksize=4)[0].T)
    expected = whole(jnp.asarray(kernel.T), hessian)
    np.testing.assert_array_equal(found.qvalue, expected.qvalue)
    np.testing.assert_allclose(found.scale, expected.scale, rtol=1e-5)


def test_experts():
    """Each expert is quantized separately. An expert without tokens, and an always-zero input, are rounded."""
    kernel, x = kernel_and_inputs(32, 6)
    x = np.where(np.arange(32) == 5, 0, x)
    kernels = np.stack([kernel, kernel[::-1]])
    hessians, mean_abs = (np.stack([it, np.zeros_like(it)]) for it in (x.T @ x, np.abs(x).mean(0)))
    alone, nearest = gptq(kernel, hessians[0], INT4), rounded(kernels, INT4)
    found = gptq(kernels, hessians, INT4)
    assert (found.qvalue.dtype, found.qvalue.shape, found.scale.shape) == (jnp.int4, (2, 32, 6), (2, 1, 6))
    assert error(kernel, values(alone), x) < 0.5 * error(kernel, values(nearest)[0], x)
    np.testing.assert_array_equal(found.qvalue[0], alone.qvalue)
    np.testing.assert_array_equal(found.qvalue[1], nearest.qvalue[1])
    np.testing.assert_array_equal(found.qvalue[0, 5], nearest.qvalue[0, 5])
    assert (found.qvalue[0] != nearest.qvalue[0]).any()
    scaled, scales = awq(kernels, mean_abs, INT4)
    assert scales.shape == (2, 32)
    np.testing.assert_array_equal(scales[1], 1)
    np.testing.assert_array_equal(scaled.qvalue[1], nearest.qvalue[1])
    np.testing.assert_allclose(values(scaled, scales)[0], values(*awq(kernel, mean_abs[0], INT4)), rtol=1e-6)


def test_refusals():
    kernel, x = kernel_and_inputs()
    with pytest.raises(UserError, match=r"mlp/wo/kernel: its 64 inputs are not a multiple of 48"):
        gptq(kernel, x.T @ x, How("int4", 48), "mlp/wo/kernel")
    with pytest.raises(UserError, match=r"mlp/wo/kernel: GPTQ has no asymmetric form"):
        gptq(kernel, x.T @ x, How("int4", 32, "minmax"), "mlp/wo/kernel")
    with pytest.raises(UserError, match=r"mlp/wo/kernel: GPTQ cannot invert the Hessian"):
        gptq(kernel, -(x.T @ x), INT4, "mlp/wo/kernel")

"""Inputs for attention ops, and functions that run and compare the ops."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trainer.ops.attention import Mask


def inputs(
    rows: int,
    length: int,
    heads: int,
    kv_heads: int,
    width: int,
    *,
    value_width: int | None = None,
    dtype: Any = np.float32,
    seed: int = 0,
) -> tuple[jax.Array, jax.Array, jax.Array, Mask]:
    """Returns queries, keys, values and the mask of rows with three segments each, followed by padding (segment 0).

    `value_width`: the width of the values, at most `width`; by default `width`.
    """
    rng = np.random.default_rng(seed)
    query = rng.normal(size=(rows, length, heads, width))
    key, value = rng.normal(size=(2, rows, length, kv_heads, width))
    ends = np.sort(rng.choice(np.arange(1, length), (rows, 3), replace=False), axis=1)
    place = np.arange(length)
    segment = (place[None, :, None] >= ends[:, None, :]).sum(-1)
    start = np.where(segment > 0, np.take_along_axis(ends, np.maximum(segment - 1, 0), axis=1), 0)
    position, segment = place - start, np.where(segment < 3, segment + 1, 0)
    ids = [x.astype(np.int32) for x in (position, position, segment, segment)]
    arrays = [x.astype(dtype) for x in (query, key, value[..., :value_width])]
    return *jax.device_put(arrays), Mask(*jax.device_put(ids))


def value_and_grads(op: Callable[..., jax.Array], args: tuple, **how: Any) -> dict[str, np.ndarray]:
    """Returns the op's result and the gradients of a weighted sum of it, in float32. With `how["sinks"]`, it includes
    the gradient of the sinks. Padding has no weight and is set to 0."""
    query, key, value, mask = args
    sinks = how.pop("sinks", None)
    shape = (*query.shape[:3], value.shape[3])
    weight = np.random.default_rng(1).normal(size=shape) * (np.asarray(mask.query_segment) > 0)[..., None, None]

    def loss(query, key, value, sinks):
        out = op(query, key, value, mask, **how, **({} if sinks is None else {"sinks": sinks}))
        return jnp.sum(out.astype(jnp.float32) * weight), out

    gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2, 3), has_aux=True))
    (_, out), grads = jax.device_get(gradients(query, key, value, sinks))
    return {"out": np.where(weight != 0, out.astype(np.float32), 0)} | {
        name: grad.astype(np.float32)
        for name, grad in zip(("query", "key", "value", "sinks"), grads, strict=True)
        if grad is not None
    }


def assert_close(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray], tolerance: float) -> None:
    """Checks that each array differs by at most `tolerance` times the other array's largest entry."""
    for name, array in expected.items():
        assert array.any(), name
        np.testing.assert_allclose(actual[name], array, rtol=0, atol=tolerance * np.abs(array).max(), err_msg=name)

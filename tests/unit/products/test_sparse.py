"""Which weights are selected, compared with NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trainer.products.plain import Kernel
from trainer.products.sparse import largest

DENSE, OUT, EXPERTS = Kernel((24,), (2, 5), ()), Kernel((4, 6), (5,), ()), Kernel((24,), (7,), (), 3)


def by_numpy(value, above, inputs, n, m):
    """Sorts every block of inputs. `above`: the number of axes before the inputs."""
    lead, whole = value.shape[:above], np.abs(np.float64(value))
    blocks = whole.reshape(*lead, inputs // m, m, -1)
    order = np.argsort(-blocks, axis=-2, kind="stable")
    mask = np.zeros(blocks.shape, bool)
    np.put_along_axis(mask, order[..., :n, :], True, axis=-2)
    return mask.reshape(value.shape)


@pytest.mark.parametrize(("n", "m"), [(2, 4), (3, 8)])
@pytest.mark.parametrize(("kernel", "shape"), [(DENSE, (24, 2, 5)), (OUT, (2, 4, 6, 5)), (EXPERTS, (2, 3, 24, 7))])
def test_the_largest_of_each_block_along_the_summed_axis(kernel, shape, n, m):
    above = len(shape) - len(kernel.in_shape) - len(kernel.out_shape)
    for dtype in (jnp.float32, jnp.bfloat16):
        value = np.random.default_rng(0).normal(size=shape).astype(dtype)
        value[..., :2, :] = 0  # equal magnitudes
        mask = jax.jit(largest, static_argnums=(0, 2, 3))(kernel, value, n, m)
        np.testing.assert_array_equal(mask, by_numpy(value, above, 24, n, m), strict=True)
        assert (np.asarray(mask).reshape(*shape[:above], 24 // m, m, -1).sum(-2) == n).all()

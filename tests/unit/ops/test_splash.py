"""The splash kernel in Pallas's interpreter against the reference op, and its lowering for an absent TPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import assert_close, inputs, value_and_grads

from trainer.config.capabilities.splash_tiles import Tiles
from trainer.ops.attention import Dropout, dot_product_attention
from trainer.ops.splash import splash_attention, splash_kernel

interpreted = functools.partial(splash_attention, interpret=True)


@pytest.mark.parametrize(
    ("window", "kv_heads", "tiles", "keys"),
    [
        (
            21,
            1,
            Tiles(block_kv=128, block_q_dkv=128, block_kv_dkv_compute=128, block_kv_dq=128, q_layout="SEQ_MINOR"),
            {"soft_cap": 2.0, "sinks": jnp.array([-1.0, 2.0])},
        ),
        (
            0,
            2,
            Tiles(block_q=128, block_kv_compute=128, block_kv_dkv=128, block_q_dq=128, k_layout="SEQ_MINOR"),
            {"scale": 0.2},
        ),
        (
            21,
            1,
            Tiles(use_fused_bwd_kernel=True, block_q_dkv=128, block_kv_dkv_compute=128, v_layout="SEQ_MINOR"),
            {"scale": 0.2},
        ),
    ],
    ids=["sinks, soft cap", "no window", "fused"],
)
def test_splash_equals_the_reference_op(window, kv_heads, tiles, keys):
    """Also with other tiles and layouts, and with values narrower than keys, as in multi-head latent attention."""
    args = inputs(1, 256, 2, kv_heads, 192, value_width=128)
    expected = value_and_grads(dot_product_attention, args, window=window, **keys)
    assert_close(value_and_grads(interpreted, args, window=window, tiles=tiles, **keys), expected, 1e-5)
    keys = {name: value for name, value in keys.items() if name != "sinks"}
    assert kernels(splash_attention, args, **keys, tiles=tiles) == (2 if tiles.use_fused_bwd_kernel else 3)


def test_splash_in_bfloat16_differs_by_its_rounding():
    exact = value_and_grads(dot_product_attention, inputs(2, 256, 2, 1, 64), window=20)
    args = inputs(2, 256, 2, 1, 64, dtype=jnp.bfloat16)
    assert_close(value_and_grads(interpreted, args, window=20), exact, 0.02)


def test_the_blocks_that_the_kernel_visits_grow_with_the_window_and_not_with_the_length():
    def visits(length, window):
        """Returns the visited key blocks per query block, in the forward kernel and in both backward kernels."""
        kernel = splash_kernel(length, 1, window=window, soft_cap=0.0)
        infos = kernel.fwd_mask_info, kernel.dq_mask_info, kernel.dkv_mask_info
        return [int((np.asarray(info.block_mask) > 0).sum()) / (length // 512) for info in infos]

    assert visits(2048, 0) == [2.5] * 3  # half of the 4 x 4 blocks, plus half of the diagonal, over 4
    # The first query blocks have fewer predecessors, which saves the same number of visits for any row length.
    assert visits(2048, 513) == [2 - 1 / 4] * 3
    assert visits(4096, 513) == [2 - 1 / 8] * 3
    assert visits(4096, 1537) == [4 - (1 + 2 + 3) / 8] * 3


def test_what_splash_does_not_support_is_refused():
    args = inputs(1, 256, 1, 1, 128)
    with pytest.raises(ValueError, match="does not support dropout"):
        interpreted(*args, Dropout(jax.random.key(0), jnp.arange(1), 0.1))
    with pytest.raises(ValueError, match="multiple of 128, not 200"):
        interpreted(*inputs(1, 200, 1, 1, 128))


def kernels(op, args, **how):
    """Returns the number of kernels that a TPU runs for the op's gradients."""
    query, key, value, mask = args

    def loss(query, key, value):
        return (op(query, key, value, mask, **how).astype(jnp.float32) ** 2).sum()

    step = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    text = step.trace(query, key, value).lower(lowering_platforms=("tpu",)).as_text()
    return text.count("@tpu_custom_call")


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_splash_lowers_to_tpu_kernels(dtype):
    args = inputs(2, 256, 4, 2, 64, dtype=dtype)
    # The forward pass, the gradient of queries, and the gradient of keys and values.
    assert kernels(splash_attention, args, window=100, soft_cap=2.0) == 3


def test_tiles_change_the_program_and_the_fused_kernel_leaves_one_out():
    args = inputs(1, 512, 2, 1, 64)
    fused = Tiles(use_fused_bwd_kernel=True, block_q_dq=128)
    assert kernels(splash_attention, args, tiles=fused) == 2
    sizes = splash_kernel(512, 2, window=0, soft_cap=0.0, tiles=Tiles(block_q=128, k_layout="SEQ_MINOR")).kwargs
    assert (sizes["block_sizes"].block_q, sizes["block_sizes"].block_kv) == (128, 512)
    assert sizes["block_sizes"].k_layout.name == "SEQ_MINOR"


def test_a_policy_that_keeps_the_context_runs_the_forward_kernel_once():
    args = inputs(1, 128, 1, 1, 128)
    policies = jax.checkpoint_policies
    assert kernels(jax.checkpoint(splash_attention, policy=policies.nothing_saveable), args) == 4
    assert kernels(jax.checkpoint(splash_attention, policy=policies.save_only_these_names("context")), args) == 3

"""Attention on NVIDIA GPUs: cuDNN's fused kernel, by way of `jax.nn.dot_product_attention`."""

from typing import Literal

import jax

from trainer.ops.attention import Dropout, Mask


def cudnn_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: Mask,
    dropout: Dropout | None = None,
    *,
    window: int = 0,
    soft_cap: float = 0.0,
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> jax.Array:
    """`dot_product_attention` without dropout and soft cap, in bfloat16: [b, t, h, d].

    The kernel knows the causal mask and the window, which count places in the row and not `mask`'s positions: keys must
    stand where their queries stand, with positions that grow by one along a segment. JAX gives it segments as a bias
    on the scores only: b t s bfloat16 numbers (128 MB a row of 8192 tokens) and, in the backward pass, as many for the
    bias's gradient, which cuDNN always writes. One bias serves all heads, so that is 1 / h of the square of scores, and
    the compiler may share it between layers. The statistics of the softmax that the backward pass needs have no name
    for `jax.checkpoint`: under a policy that keeps named tensors the forward pass runs again. `implementation` "xla" is
    the same call on any platform.

    Raises:
      ValueError: dropout, a soft cap, or another dtype.
    """
    if dropout is not None or soft_cap:
        raise ValueError("cudnn_attention has neither dropout of attention weights nor a soft cap")
    if query.dtype != jax.numpy.bfloat16:
        raise ValueError(f"cudnn_attention takes bfloat16, not {query.dtype}")
    same_segment = mask.query_segment[:, None, :, None] == mask.key_segment[:, None, None, :]
    return jax.nn.dot_product_attention(
        query,
        key,
        value,
        mask=same_segment,
        scale=query.shape[-1] ** -0.5,
        is_causal=True,
        local_window_size=(window - 1, 0) if window else None,
        implementation=implementation,
    )

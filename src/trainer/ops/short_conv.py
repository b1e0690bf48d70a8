"""A short causal convolution of each channel, which does not reach across the start of a document."""

import jax
import jax.numpy as jnp


def short_conv(
    x_btc: jax.Array, kernel_wc: jax.Array, document_bt: jax.Array, before_bwc: jax.Array | None = None
) -> jax.Array:
    """Returns, for each token, the kernel-weighted sum of the token and the preceding w - 1 tokens that are in its
    document.

    Args:
      x_btc: [b, t, ...channels].
      kernel_wc: [w, ...channels]; the last entry multiplies the token itself.
      document_bt: see `ops.documents.document_numbers`.
      before_bwc: the w - 1 tokens before the row, which belong to document 0; None: zeros.

    Returns:
      [b, t, ...channels], in the dtype of `x_btc`, summed in float32.
    """
    width, tokens = len(kernel_wc), x_btc.shape[1]
    extended = with_before(x_btc, width, before_bwc)
    numbers = jnp.pad(document_bt, ((0, 0), (width - 1, 0)))
    total = jnp.zeros(x_btc.shape, jnp.float32)
    for i in range(width):
        same = (numbers[:, i : i + tokens] == document_bt).reshape(*document_bt.shape, *[1] * (x_btc.ndim - 2))
        total += jnp.where(same, extended[:, i : i + tokens], 0).astype(jnp.float32) * kernel_wc[i].astype(jnp.float32)
    return total.astype(x_btc.dtype)


def with_before(x_btc: jax.Array, width: int, before_bwc: jax.Array | None) -> jax.Array:
    """Returns `x_btc` preceded by the `width` - 1 tokens before the row: [b, width - 1 + t, ...channels]."""
    if before_bwc is None:
        return jnp.pad(x_btc, ((0, 0), (width - 1, 0), *[(0, 0)] * (x_btc.ndim - 2)))
    return jnp.concatenate([before_bwc.astype(x_btc.dtype), x_btc], axis=1)

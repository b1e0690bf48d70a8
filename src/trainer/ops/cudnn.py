"""Attention on NVIDIA GPUs: cuDNN's fused kernels."""

from typing import Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from trainer.ops.attention import Dropout, Mask, scale_of
from trainer.ops.cudnn_kernels import Fused, fused_attention
from trainer.ops.documents import part_of_token


def cudnn_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: Mask,
    dropout: Dropout | None = None,
    *,
    window: int = 0,
    soft_cap: float = 0.0,
    scale: float | None = None,
    sinks: jax.Array | None = None,
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> jax.Array:
    """Computes `dot_product_attention` without dropout, soft cap or sinks, in bfloat16: [b, t, h, d].

    The kernel applies the causal mask and the window by index in the row, not by the positions of `mask`: query i and
    key i must be the same token, and positions must grow by one along a segment. If `mask.documents` is given and the
    kernel can address the documents, the documents define the segments, and the results of padding tokens are
    undefined, but finite. Otherwise, the segments become a bias on the scores, which all heads share: b t s bfloat16
    numbers (128 MB per row of 8192 tokens), in the forward and in the backward pass.

    The residuals have the checkpoint name "context" (`jax.ad_checkpoint.checkpoint_name`), so the forward kernel is not
    rerun if the rematerialization policy saves "context". `implementation="xla"` computes the same function on any
    platform.

    Raises:
      ValueError: the call requests dropout, a soft cap or sinks, or the dtype is not bfloat16.
    """
    if dropout is not None or soft_cap or sinks is not None:
        raise ValueError("cudnn_attention supports neither dropout of attention weights nor a soft cap nor sinks")
    if query.dtype != jnp.bfloat16:
        raise ValueError(f"cudnn_attention requires bfloat16, not {query.dtype}")
    scale, documents, same_segment, length = scale_of(scale, query.shape[-1]), _readable(mask, query, value), None, None
    if documents is None:
        same_segment = mask.query_segment[:, None, :, None] == mask.key_segment[:, None, None, :]
    elif not documents.shape[1]:
        documents = None
    if implementation == "cudnn":
        # JAX adds the same number to masked scores. It is finite, and the kernel can subtract two such numbers without
        # overflow.
        bias = None if same_segment is None else jnp.where(same_segment, 0, -(2.0**41)).astype(query.dtype)
        return fused_attention(Fused(scale, window), query, key, value, bias, documents)
    if documents is not None and documents.shape[1] == 1:
        length = documents[:, 0]
    elif documents is not None:
        part = part_of_token(documents, query.shape[1])
        same_segment = part[:, None, :, None] == part[:, None, None, :]
    narrower = key.shape[-1] - value.shape[-1]
    attended = jax.nn.dot_product_attention(
        query,
        key,
        jnp.pad(value, ((0, 0), (0, 0), (0, 0), (0, max(narrower, 0)))),
        mask=same_segment,
        scale=scale,
        is_causal=True,
        query_seq_lengths=length,
        key_value_seq_lengths=length,
        local_window_size=(window - 1, 0) if window else None,
        implementation="xla",
    )
    return checkpoint_name(attended[..., : value.shape[-1]], "context")


def _readable(mask: Mask, query: jax.Array, value: jax.Array) -> jax.Array | None:
    """Returns `mask.documents`, or None if there are several documents per row and the kernel cannot address them. The
    kernel addresses documents by int32 offsets, counted in array entries. Queries and results share one array of
    offsets, and so do keys and values; therefore, all widths must be equal."""
    if mask.documents is None or mask.documents.shape[1] < 2:
        return mask.documents
    return mask.documents if value.shape[-1] == query.shape[-1] and query.size < 2**31 else None

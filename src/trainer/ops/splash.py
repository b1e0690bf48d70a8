"""Attention on TPU: JAX's splash attention, a Pallas kernel that never materializes the score matrix."""

import jax
import jax.numpy as jnp

from trainer.config.tiles import AUTOMATIC, LANES, OF_DQ, Tiles
from trainer.ops.attention import Dropout, Mask, scale_of


def splash_attention(
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
    tiles: Tiles = AUTOMATIC,
    interpret: bool = False,
) -> jax.Array:
    """Computes `dot_product_attention` without dropout, for lengths that are a multiple of 128: [b, t, h, d].

    The causal mask and the window are static, and the kernel skips blocks of scores that they mask out. They apply by
    index in the row, not by the positions of `mask`: key i must belong to query i, and positions must grow by one along
    a segment. The residuals of the backward pass are named "context" (`jax.ad_checkpoint.checkpoint_name`), so a
    rematerialization policy that saves "context" does not run the kernel a second time. `tiles` are adapted to the
    length. `interpret` runs the kernel on any platform, slowly.

    Raises:
      ValueError: dropout, or a length that is not a multiple of 128.
    """
    if dropout is not None:
        raise ValueError("splash_attention does not support dropout of attention weights")
    if query.shape[1] != key.shape[1] or query.shape[1] % LANES:
        raise ValueError(f"splash_attention takes lengths that are a multiple of {LANES}, not {query.shape[1]}")
    from jax.experimental.pallas.ops.tpu.splash_attention import SegmentIds

    kernel = splash_kernel(*query.shape[1:3], window=window, soft_cap=soft_cap, tiles=tiles, interpret=interpret)
    # The kernel itself does not scale the scores.
    query = (query.astype(jnp.float32) * scale_of(scale, query.shape[-1])).astype(query.dtype)
    heads_first = (x.swapaxes(1, 2) for x in (query, key, value))
    segments = SegmentIds(mask.query_segment, mask.key_segment)
    out = jax.vmap(kernel, in_axes=(0, 0, 0, 0, None))(*heads_first, segments, sinks)
    return out.swapaxes(1, 2)


def splash_kernel(
    length: int, heads: int, *, window: int, soft_cap: float, tiles: Tiles = AUTOMATIC, interpret: bool = False
):
    """Returns JAX's kernel for one row: (queries [h, t, d], keys and values [k, t, d], segments) -> [h, t, d]."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    shape = (length, length)
    one = splash.LocalMask(shape, (window - 1, 0), offset=0) if window else splash.CausalMask(shape)
    sizes = tiles.fitted(length)._asdict()
    layouts = {name: splash.QKVLayout[sizes[name]] for name in ("q_layout", "k_layout", "v_layout")}
    unused = dict.fromkeys(OF_DQ) if tiles.use_fused_bwd_kernel else {}
    return splash.make_splash_mha(
        splash.MultiHeadMask([one] * heads),
        block_sizes=splash.BlockSizes(**{**sizes, **layouts, **unused}),
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=soft_cap or None,
        residual_checkpoint_name="context",
        interpret=interpret,
    )

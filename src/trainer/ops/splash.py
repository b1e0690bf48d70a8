"""Attention on TPU: JAX's splash attention, a Pallas kernel that never materializes the score matrix."""

from typing import Any

import jax
import jax.numpy as jnp

from trainer.config.capabilities.splash_tiles import AUTOMATIC, LANES, OF_DQ, Tiles
from trainer.ops.attention import Dropout, Mask, scale_of
from trainer.ops.order import in_true_order, order


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
    among: tuple[tuple[str, ...], str] | None = None,
    interpret: bool = False,
) -> jax.Array:
    """Computes `dot_product_attention` without dropout, for lengths that are a multiple of 128: [b, t, h, d].

    The causal mask and the window are static, and the kernel skips fully masked blocks of scores. Both apply by index
    in the row, not by the positions of `mask`: query i and key i must be the same token, and positions must grow by one
    along a segment. The residuals of the backward pass have the checkpoint name "context"
    (`jax.ad_checkpoint.checkpoint_name`), so the kernel is not rerun if the rematerialization policy saves "context".
    The tile sizes `tiles` are adapted to the length. `interpret` runs the kernel on any platform, slowly.

    `among` is for calls inside `sharding.shard_mapped`: a pair of the mesh axes over which a row's queries are split,
    and the name of the order of the row's tokens (`ops.order`; "" for the original order). In these calls, keys and
    values are those of the whole row, in the same order.

    Raises:
      ValueError: dropout is given, a row's queries and keys have different lengths, or the length is not a multiple
        of 128.
    """
    if dropout is not None:
        raise ValueError("splash_attention does not support dropout of attention weights")
    axes, strategy = among or ((), "")
    devices = jax.lax.axis_size(axes) if axes else 1
    if query.shape[1] * devices != key.shape[1]:
        raise ValueError(f"splash_attention got {query.shape[1] * devices} queries and {key.shape[1]} keys per row")
    if query.shape[1] % LANES:
        raise ValueError(f"splash_attention requires a length that is a multiple of {LANES}, not {query.shape[1]}")
    from jax.experimental.pallas.ops.tpu.splash_attention import SegmentIds

    if strategy:
        key, value, segments = (in_true_order(x, devices, strategy) for x in (key, value, mask.key_segment))
        mask = mask._replace(key_segment=segments)
    kernel = splash_kernel(
        key.shape[1],
        query.shape[2],
        window=window,
        soft_cap=soft_cap,
        tiles=tiles,
        devices=devices,
        strategy=strategy,
        interpret=interpret,
    )
    kernel = _of_device(kernel, axes, devices)
    # The queries are scaled here, because the kernel does not scale the scores.
    query = (query.astype(jnp.float32) * scale_of(scale, query.shape[-1])).astype(query.dtype)
    heads_first = (x.swapaxes(1, 2) for x in (query, key, value))
    segments = SegmentIds(mask.query_segment, mask.key_segment)
    out = jax.vmap(kernel, in_axes=(0, 0, 0, 0, None))(*heads_first, segments, sinks)
    return out.swapaxes(1, 2)


def splash_kernel(
    length: int,
    heads: int,
    *,
    window: int,
    soft_cap: float,
    tiles: Tiles = AUTOMATIC,
    devices: int = 1,
    strategy: str = "",
    interpret: bool = False,
):
    """Returns JAX's kernel for one row: (queries [h, t, d], keys and values [k, t, d], segments) -> [h, t, d].

    The queries are split over `devices`, in the order `strategy`: see `_of_device`.
    """
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    shape = (length, length)
    one = splash.LocalMask(shape, (window - 1, 0), offset=0) if window else splash.CausalMask(shape)
    if strategy:
        one.q_sequence = order(length, devices, strategy).astype(one.q_sequence.dtype)
    sizes = tiles.fitted(length // devices)._asdict()
    layouts = {name: splash.QKVLayout[sizes[name]] for name in ("q_layout", "k_layout", "v_layout")}
    unused = dict.fromkeys(OF_DQ) if tiles.use_fused_bwd_kernel else {}
    return splash.make_splash_mha(
        splash.MultiHeadMask([one] * heads),
        block_sizes=splash.BlockSizes(**{**sizes, **layouts, **unused}),
        head_shards=1,
        q_seq_shards=devices,
        attn_logits_soft_cap=soft_cap or None,
        residual_checkpoint_name="context",
        interpret=interpret,
    )


def _of_device(kernel: Any, axes: tuple[str, ...], devices: int) -> Any:
    """Returns the kernel for this device's queries, with this device's part of the metadata on mask tiles."""
    if devices == 1:
        return kernel

    def part(x: jax.Array | None, axis: int) -> jax.Array | None:
        if x is None:
            return None
        size = x.shape[axis] // devices
        return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(axes) * size, size, axis)

    def of_mask(info: Any) -> Any:
        if info is None:
            return None
        tiles = {name: part(getattr(info, name), 1) for name in ("data_next", "mask_next", "block_mask")}
        return info._replace(**tiles, q_sequence=part(info.q_sequence, 0))

    masks, settings = kernel.tree_flatten()
    return kernel.tree_unflatten(settings, map(of_mask, masks))

"""Self-attention with grouped queries, RoPE or learned positions, packed segments and a key-value cache."""

import functools
from collections.abc import Callable, Collection
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from trainer import sharding
from trainer.config.capabilities.kernels import KERNELS
from trainer.config.capabilities.splash_tiles import AUTOMATIC, Tiles
from trainer.config.errors import UserError
from trainer.layers import across as split
from trainer.layers.across import GATHERED, HEADS, KEYS, QUERIES, QUERY_ROWS, Across, mask_axes
from trainer.layers.cache import Cache, own_mask
from trainer.layers.dense import INPUT, RESIDUAL, Dense, dense_maker
from trainer.layers.norm import RMSNorm, normalized
from trainer.layers.param import EXACT, param
from trainer.layers.sown import MaxLogit, captures, sow
from trainer.ops.attention import Dropout, Mask, dot_product_attention
from trainer.ops.blockwise import blockwise_attention
from trainer.ops.cudnn import cudnn_attention
from trainer.ops.invariant import invariant_attention
from trainer.ops.max_logits import BLOCK, max_logits
from trainer.ops.ring import Ring
from trainer.ops.rope import Rope, Rotation, rope
from trainer.ops.splash import splash_attention
from trainer.ops.temperature import Temperature
from trainer.products.context import Context

OPS = {
    "dot_product": dot_product_attention,
    "blockwise": blockwise_attention,
    "invariant": invariant_attention,
    "splash": splash_attention,
    "cudnn_flash_jax": cudnn_attention,
}

QKV = sharding.Axes((*QUERY_ROWS, None, "activation_heads", None))
GATE = "gate_proj"  # the rematerialization name of the gate's projection, for `Family.projections`


class Scores(NamedTuple):
    """How a layer computes attention from queries, keys and values.

    `op`: a name in OPS. `window`, `soft_cap`, `scale`: see `ops.attention`. `tiles`: the tiles of the op splash.
    `across`: how attention runs if rows are split over devices. `chunked`: whether `window` is the size of chunks
    (`Mask.in_chunks`).
    """

    op: str
    window: int = 0
    soft_cap: float = 0.0
    scale: float | None = None
    tiles: Tiles = AUTOMATIC
    dropout_rate: float = 0.0
    across: Across = GATHERED
    chunked: bool = False

    def attend(
        self,
        queries: jax.Array,
        keys: jax.Array,
        values: jax.Array,
        mask: Mask,
        context: Context,
        sinks: jax.Array | None = None,
    ) -> jax.Array:
        """Returns the op's result, with the rematerialization name "context". `sinks`: see `ops.attention`."""
        drop, mask = None, self._chunked(mask)
        if context.key is not None and self.dropout_rate:
            drop = Dropout(context.key, context.rows, self.dropout_rate)
        attend: Callable[..., jax.Array]
        attend = functools.partial(OPS[self.op], window=self.window, soft_cap=self.soft_cap, scale=self.scale)
        if self.op == "splash":
            attend = functools.partial(attend, tiles=self.tiles)
        if self.op in ("dot_product", "blockwise"):
            attend = functools.partial(attend, sums=sharding.sum_dtype(values))
        arrays = queries, keys, values, mask
        kernel, is_split = KERNELS[self.op].per_device, split.is_split()
        in_blocks = is_split and self.op == "blockwise"
        if is_split:
            ring = Ring((), self.window, self.soft_cap, self.scale) if in_blocks else None
            attended = split.attend(self.across, attend, arrays, drop, sinks, ring=ring, kernel=kernel)
        elif kernel:  # the compiler cannot shard attention kernels, which have no dropout
            names = QUERIES, KEYS, KEYS, mask_axes(mask), None if sinks is None else HEADS
            run = sharding.shard_mapped(lambda *args: attend(*args[:4], sinks=args[4]), names, QUERIES, check=False)
            attended = run(*arrays, sinks)
        else:
            attended = attend(*arrays, drop, sinks=sinks)
        # Attention kernels and ring attention name their residuals, such as the result, with `checkpoint_name`.
        return attended if kernel or in_blocks else checkpoint_name(attended, "context")

    @property
    def ring(self) -> int:
        """The length of a ring cache, which equals the window; 0 if the cache keeps all positions."""
        return 0 if self.op == "invariant" else self.window  # in a ring, the order of sums would vary

    def over_cache(self) -> "Scores":
        """Returns these settings with an op that supports attention to a cache, where keys and queries have different
        positions."""
        return self if KERNELS[self.op].over_cache else self._replace(op="dot_product")

    def largest(self, queries: jax.Array, keys: jax.Array, mask: Mask, context: Context) -> jax.Array:
        """Returns the largest logit of each head, for `layers.sown.MaxLogit`; see `ops.max_logits`."""
        mask = self._chunked(mask)
        if split.is_split():
            ring = Ring((), self.window, scale=self.scale)
            return split.largest(queries, keys, mask, ring, context.sampled)
        # With one tile for the whole row, XLA merges this product of queries and keys with the same product in the op
        # dot_product, unless `context.sampled` puts it in a `cond`.
        block = queries.shape[1] if self.op == "dot_product" and context.sampled is None else BLOCK
        return max_logits(queries, keys, mask, window=self.window, scale=self.scale, block=block, when=context.sampled)

    def _chunked(self, mask: Mask) -> Mask:
        return mask.in_chunks(self.window) if self.chunked else mask


class KVCache(NamedTuple):
    """Keys and values of the positions so far, each [b, s, k, d]: one layer's cache entries (`layers.cache`)."""

    key: jax.Array
    value: jax.Array


class Attention(nnx.Module):
    """Multi-head self-attention. The factor 1 / sqrt(head_dim) is applied to the scores and is not part of the weights.

    Args:
      rope: the rotary position embedding; None for no rotation.
      op: a name in OPS. `tiles`: the tiles of the op splash.
      window, soft_cap: see `ops.attention`; 0 for none. `chunked`: whether `window` is a chunk size
        (`ops.attention.Mask.in_chunks`).
      scale: the factor on the scores; None for 1 / sqrt(head_dim).
      temperature: a factor on queries that depends on their position within their document; None for none.
      sinks: whether each head has a learned sink (`ops.attention`), initially 0.
      qk_norm_epsilon: epsilon of a norm of each head's queries and keys (Henry et al. 2020, arXiv:2010.04245); None for
        no norm. `qk_norm_offset`: see `RMSNorm`.
      qk_norm_over_heads: whether one norm spans all heads of a token's queries, and another all heads of the token's
        keys (OLMo 2, arXiv:2501.00656), instead of one norm per head.
      qk_norm_rotated: epsilon of a norm without parameters of each head's queries and keys, after RoPE; None for none.
      gated: whether the result of each head is multiplied by the sigmoid of `gating`, a projection of the input.
      bias: whether all projections have a bias, or the names of the projections with a bias.
      fused: whether one matrix `qkv_proj` computes queries, keys and values; requires heads == kv_heads.

    Raises:
      UserError: the op does not support sinks.
    """

    def __init__(
        self,
        width: int,
        *,
        heads: int,
        kv_heads: int,
        head_dim: int,
        rope: Rope | Rotation | None,
        op: str = "dot_product",
        window: int = 0,
        chunked: bool = False,
        soft_cap: float = 0.0,
        scale: float | None = None,
        temperature: Temperature | None = None,
        sinks: bool = False,
        tiles: Tiles = AUTOMATIC,
        qk_norm_epsilon: float | None = None,
        qk_norm_offset: float = 0.0,
        qk_norm_over_heads: bool = False,
        qk_norm_rotated: float | None = None,
        dropout_rate: float = 0.0,
        across: Across = GATHERED,
        gated: bool = False,
        dtype: jnp.dtype,
        weight_dtype: jnp.dtype,
        bias: bool | Collection[str] = False,
        fused: bool = False,
        rngs: nnx.Rngs,
    ):
        if sinks and not KERNELS[op].sinks:
            raise UserError(f"attention={op} does not support sinks; choose attention=blockwise")

        self.heads, self.kv_heads, self.head_dim, self.dtype, self.fused = heads, kv_heads, head_dim, dtype, fused
        self.scores = Scores(op, window, soft_cap, scale, tiles, dropout_rate, across, chunked)
        self.rope, self.temperature = rope, temperature
        dense = dense_maker(bias, dtype=dtype, weight_dtype=weight_dtype, rngs=rngs)
        self._add_projections(width, dense)
        self.gated = gated
        if gated:
            self.gating = dense("gating", [width], [heads, head_dim], ("embed", "q_heads", "kv"))
        self.has_sinks = sinks
        if sinks:
            self.sinks: nnx.Variable = param(jnp.zeros(heads, EXACT), ("q_heads",))
        self.norms_heads, self.over_heads = qk_norm_epsilon is not None, qk_norm_over_heads
        self.norm_rotated = qk_norm_rotated
        if qk_norm_epsilon is not None:
            norm = functools.partial(
                RMSNorm, epsilon=qk_norm_epsilon, offset=qk_norm_offset, dtype=dtype, weight_dtype=weight_dtype
            )
            self.query_norm = norm(head_dim * heads if qk_norm_over_heads else head_dim)
            self.key_norm = norm(head_dim * kv_heads if qk_norm_over_heads else head_dim)

    def _add_projections(self, width: int, dense: Callable[..., Dense]) -> None:
        heads, kv_heads, head_dim = self.heads, self.kv_heads, self.head_dim
        if self.fused:
            assert heads == kv_heads, (heads, kv_heads)
            self.qkv_proj = dense("qkv_proj", [width], [3, heads, head_dim], ("embed", "qkv", "q_heads", "kv"))
        else:
            self.query = dense("query", [width], [heads, head_dim], ("embed", "q_heads", "kv"))
            self.key = dense("key", [width], [kv_heads, head_dim], ("embed", "kv_heads", "kv_head_dim"))
            self.value = dense("value", [width], [kv_heads, head_dim], ("embed", "kv_heads", "kv_head_dim"))
        self.out = dense("out", [heads, head_dim], [width], ("heads", "kv", "embed"))

    def logit_factors(self, eta_h: jax.Array) -> dict[str, jax.Array]:
        """See `layers.clip.Clipped`.

        The product of the factors of a head's query and key is the head's entry of `eta_h`. If heads share a key, the
        key's factor is the square root of the smallest of the entries of these heads.

        Raises:
          UserError: scaling weights does not scale logits, because queries and keys are normalized or a cap applies.
        """
        normed = self.norms_heads or self.norm_rotated is not None
        if normed or self.scores.soft_cap:
            why = "their norms undo any scaling of the weights" if normed else "the soft cap already bounds logits"
            raise UserError(f"use_qk_clip=true: attention heads cannot be clipped: {why}")
        if self.fused:
            root_h = jnp.sqrt(eta_h)
            # [3, heads, 1], for a kernel [embed, 3, heads, head_dim] and for a bias [3, heads, head_dim].
            return {"qkv_proj": jnp.stack([root_h, root_h, jnp.ones_like(root_h)])[..., None]}
        eta_kg = eta_h.reshape(self.kv_heads, -1)
        key_k1 = jnp.sqrt(eta_kg.min(axis=1, keepdims=True))
        # [heads, 1], for a kernel [embed, heads, head_dim] and for a bias [heads, head_dim].
        return {"query": (eta_kg / key_k1).reshape(-1, 1), "key": key_k1}

    def init_cache(self, rows: int, length: int) -> KVCache:
        """Returns an empty cache for `rows` rows of up to `length` positions. With a window, the
        cache is a ring of at most the window's length (`Scores.ring`)."""
        size = min(length, self.scores.ring) if self.scores.ring else length
        empty = jnp.zeros((rows, size, self.kv_heads, self.head_dim), self.dtype)
        return KVCache(empty, empty)

    def cache_axes(self) -> KVCache:
        """Returns the logical axes of the arrays of `init_cache`."""
        return KVCache(KEYS, KEYS)  # type: ignore[arg-type]  # axes, not arrays

    def projected(self, x_bte: jax.Array, context: Context) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns queries [b, t, heads, d], keys and values [b, t, kv_heads, d], before norms and rotation."""
        if self.fused:
            qkv = self.qkv_proj(x_bte, QKV, context)
            queries, keys, values = (
                sharding.constrain(qkv[:, :, i], names) for i, names in enumerate((QUERIES, KEYS, KEYS))
            )
        else:
            queries = self.query(x_bte, QUERIES, context)
            keys, values = self.key(x_bte, KEYS, context), self.value(x_bte, KEYS, context)
        return (
            checkpoint_name(queries, "query_proj"),
            checkpoint_name(keys, "key_proj"),
            checkpoint_name(values, "value_proj"),
        )

    def _normed(self, norm: RMSNorm, x_bthd: jax.Array) -> jax.Array:
        if not self.over_heads:
            return norm(x_bthd)
        return norm(x_bthd.reshape(*x_bthd.shape[:2], -1)).reshape(x_bthd.shape)

    def __call__(self, x_bte: jax.Array, cache: Cache | None, context: Context) -> tuple[jax.Array, Cache | None]:
        """Returns the result of causal attention within each segment, [b, t, e], and the updated cache.

        With a cache, each row is one segment, unless `Cache.rows` is given. Keys and values are written to the cache at
        their positions. If the cache is `filled`, each query attends to all cached positions up to its own position.
        """
        position_bt = context.positions
        x_bte = sharding.constrain(x_bte, INPUT)
        queries, keys, values = self.projected(x_bte, context)
        if self.norms_heads:
            queries, keys = self._normed(self.query_norm, queries), self._normed(self.key_norm, keys)
        if self.rope is not None:
            queries, keys = rope(queries, position_bt, self.rope), rope(keys, position_bt, self.rope)
        if self.norm_rotated is not None:
            queries, keys = (normalized(x, self.norm_rotated).astype(x.dtype) for x in (queries, keys))
        if self.temperature is not None:
            queries = self.temperature.tempered(queries, position_bt)

        scores, mask = self.scores, own_mask(context)
        if cache is None and captures(self, MaxLogit):
            sow(self, MaxLogit, "max_logit", scores.largest(queries, keys, mask, context))
        if cache is not None:
            if cache.filled:
                scores = scores.over_cache()
            queries = cache.parted(queries)
            cache, (keys, values), mask = cache.extend(KVCache(keys, values), context, scores.ring)
        sinks = self.sinks.get_value() if self.has_sinks else None
        attended = scores.attend(queries, keys, values, mask, context, sinks)
        if cache is not None:
            attended = cache.joined(attended, x_bte.shape[1])
        if self.gated:
            gate = checkpoint_name(self.gating(x_bte, QUERIES, context), GATE)
            attended = attended * jax.nn.sigmoid(gate)
        out = self.out(attended, RESIDUAL, context)
        return checkpoint_name(out, "out_proj"), cache

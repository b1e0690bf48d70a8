"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1)."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from trainer import sharding
from trainer.config.capabilities.splash_tiles import AUTOMATIC, Tiles
from trainer.config.errors import UserError
from trainer.layers.across import GATHERED, KEY_ROWS, KEYS, QUERIES, Across
from trainer.layers.attention import Scores
from trainer.layers.cache import Cache, own_mask
from trainer.layers.dense import INPUT, RESIDUAL, ROWS, Dense
from trainer.layers.norm import RMSNorm
from trainer.layers.sown import MaxLogit, captures, sow
from trainer.ops.attention import Mask
from trainer.ops.rope import Rope, rope, score_scale
from trainer.ops.temperature import Temperature
from trainer.products.context import Context

# The rematerialization names of this layer's matrix products, in addition to the names in `layers.attention`.
PROJECTIONS = ("query_wa_proj", "kv_wa_proj")
LATENT = sharding.Axes((*ROWS, None))
CACHED = sharding.Axes((*KEY_ROWS, None))


class LatentCache(NamedTuple):
    """Latents and keys of the positions so far: one layer's cache entries (`layers.cache`)."""

    latent: jax.Array  # [b, s, r], normalized
    key: jax.Array  # [b, s, d], the rotated part, which all heads share


class LatentAttention(nnx.Module):
    """Self-attention whose keys and values are projections of one narrow latent per token.

    Below, nope, rope and value are the arguments nope_dim, rope_dim and value_dim. The first nope entries of a head's
    query and key are not rotated. The last rope entries are rotated, and this part of the key is the same for all
    heads. Scores are scaled by 1 / sqrt(nope + rope) and, with YaRN, by `ops.rope.score_scale`. A cache stores the
    latents and the rotated keys. Queries that attend to a cache are projected to the width of the latents ("absorbed"
    projections), so that cached keys and values need not be expanded to heads.

    Parameters, with MaxText's names: query [width, heads, nope + rope], or wq_a [width, q_rank], q_norm and wq_b
    [q_rank, heads, nope + rope]; wkv_a [width, kv_rank + rope], kv_norm, wkv_b [kv_rank, heads, nope + value];
    out [heads, value, width].

    A family with this layer declares four logical axes (`models.family.Family.axes`): q_lora_up_proj and
    kv_lora_up_proj for the outputs of the projections to latents, and q_lora and kv_lora for the inputs of the
    projections from latents.
    """

    def __init__(
        self,
        width: int,
        *,
        heads: int,
        q_rank: int,
        kv_rank: int,
        nope_dim: int,
        rope_dim: int,
        value_dim: int,
        rope: Rope,
        mscale: float = 1.0,
        norm_epsilon: float,
        op: str = "dot_product",
        window: int = 0,
        soft_cap: float = 0.0,
        temperature: Temperature | None = None,
        tiles: Tiles = AUTOMATIC,
        dropout_rate: float = 0.0,
        across: Across = GATHERED,
        dtype: jnp.dtype,
        weight_dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        """`q_rank`: width of the query latents; 0: queries are projected directly from the input. `kv_rank`: width of
        the latents of keys and values. `norm_epsilon`: epsilon of the norms of latents. `mscale`: see
        `ops.rope.score_scale`. For the other arguments see `layers.attention.Attention`."""
        dense = functools.partial(Dense, dtype=dtype, weight_dtype=weight_dtype, rngs=rngs)
        norm = functools.partial(RMSNorm, epsilon=norm_epsilon, dtype=dtype, weight_dtype=weight_dtype)
        self.heads, self.q_rank, self.kv_rank, self.nope_dim, self.rope_dim = heads, q_rank, kv_rank, nope_dim, rope_dim
        self.rope, self.temperature = rope, temperature
        scale = (nope_dim + rope_dim) ** -0.5 * score_scale(rope, mscale)
        self.scores = Scores(op, window, soft_cap, scale, tiles, dropout_rate, across)
        if q_rank:
            self.wq_a = dense([width], [q_rank], ("embed", "q_lora_up_proj"))
            self.q_norm = norm(q_rank)
            self.wq_b = dense([q_rank], [heads, nope_dim + rope_dim], ("q_lora", "q_heads", "kv"))
        else:
            self.query = dense([width], [heads, nope_dim + rope_dim], ("embed", "q_heads", "kv"))
        self.wkv_a = dense([width], [kv_rank + rope_dim], ("embed", "kv_lora_up_proj"))
        self.kv_norm = norm(kv_rank)
        self.wkv_b = dense([kv_rank], [heads, nope_dim + value_dim], ("kv_lora", "kv_heads", "kv_head_dim"))
        self.out = dense([heads, value_dim], [width], ("heads", "kv", "embed"))

    def logit_factors(self, eta_h: jax.Array) -> dict[str, jax.Array]:
        """See `layers.clip.Clipped`.

        The unrotated parts of a head's query and key each get the square root of the head's entry of `eta_h`. The
        rotated part of the query gets the whole entry, because all heads share the rotated part of the key (Kimi K2,
        arXiv:2507.20534, section 2.1).

        Raises:
          UserError: the logits are capped, so scaling weights does not scale them.
        """
        if self.scores.soft_cap:
            raise UserError("use_qk_clip=true: attention heads cannot be clipped: the soft cap already bounds logits")
        eta_h1 = eta_h[:, None]
        root_hd = jnp.broadcast_to(jnp.sqrt(eta_h1), (self.heads, self.nope_dim))
        query = jnp.concatenate([root_hd, jnp.broadcast_to(eta_h1, (self.heads, self.rope_dim))], axis=1)
        values = self.wkv_b.kernel.shape[-1] - self.nope_dim
        key = jnp.concatenate([root_hd, jnp.ones((self.heads, values))], axis=1)
        return {"wq_b" if self.q_rank else "query": query, "wkv_b": key}

    def init_cache(self, rows: int, length: int) -> LatentCache:
        """Returns an empty cache for `rows` rows of up to `length` positions. With a window, the
        cache is a ring of at most the window's length (`Scores.ring`)."""
        dtype, ring = self.wkv_a.dtype, self.scores.ring
        size = min(length, ring) if ring else length
        return LatentCache(*(jnp.zeros((rows, size, width), dtype) for width in (self.kv_rank, self.rope_dim)))

    def cache_axes(self) -> LatentCache:
        """Returns the logical axes of the arrays of `init_cache`."""
        return LatentCache(CACHED, CACHED)  # type: ignore[arg-type]  # axes, not arrays

    def __call__(self, x_bte: jax.Array, cache: Cache | None, context: Context) -> tuple[jax.Array, Cache | None]:
        """Returns the result of causal attention within each segment, [b, t, e], and the updated cache.

        For calls with a cache see `layers.attention.Attention`.
        """
        x_bte = sharding.constrain(x_bte, INPUT)
        query, query_rope = self._queries(x_bte, context)
        latent, key_rope = self._latents(x_bte, context)
        seen, mask, filled = LatentCache(latent, key_rope), own_mask(context), False
        if cache is not None:
            filled = cache.filled
            query, query_rope = cache.parted(query), cache.parted(query_rope)
            cache, seen, mask = cache.extend(seen, context, self.scores.ring)
        if cache is not None and filled:
            ranks = None if context.ranks is None else cache.parted(context.ranks)
            attended = self._over_cache(query, query_rope, seen, mask, context._replace(ranks=ranks))
        else:
            queries = jnp.concatenate([query, query_rope], axis=-1)
            keys, values = self._keys_and_values(*seen, context)
            if cache is None and captures(self, MaxLogit):
                sow(self, MaxLogit, "max_logit", self.scores.largest(queries, keys, mask, context))
            attended = self.scores.attend(queries, keys, values, mask, context)
        if cache is not None:
            attended = cache.joined(attended, x_bte.shape[1])
        return checkpoint_name(self.out(attended, RESIDUAL, context), "out_proj"), cache

    def _queries(self, x_bte: jax.Array, context: Context) -> tuple[jax.Array, jax.Array]:
        """Returns the unrotated parts of queries [b, t, h, nope], and the rotated parts [b, t, h, rope]."""
        if self.q_rank:
            latent = checkpoint_name(self.wq_a(x_bte, LATENT, context), "query_wa_proj")
            queries = self.wq_b(self.q_norm(latent), QUERIES, context)
        else:
            queries = self.query(x_bte, QUERIES, context)
        query, query_rope = jnp.split(checkpoint_name(queries, "query_proj"), [self.nope_dim], axis=-1)
        query_rope = rope(query_rope, context.positions, self.rope)
        if self.temperature is None:
            return query, query_rope
        tempered = functools.partial(self.temperature.tempered, position_bt=context.positions)
        return tempered(query), tempered(query_rope)

    def _latents(self, x_bte: jax.Array, context: Context) -> tuple[jax.Array, jax.Array]:
        """Returns the normalized latents [b, t, r], and the rotated keys [b, t, rope]."""
        projected = checkpoint_name(self.wkv_a(x_bte, LATENT, context), "kv_wa_proj")
        latent, key_rope = jnp.split(projected, [self.kv_rank], axis=-1)
        return self.kv_norm(latent), rope(key_rope[:, :, None], context.positions, self.rope)[:, :, 0]

    def _keys_and_values(
        self, latent_bsr: jax.Array, key_rope_bsd: jax.Array, context: Context
    ) -> tuple[jax.Array, jax.Array]:
        """Returns keys and values per head: [b, s, h, nope + rope] and [b, s, h, value]."""
        key, values = jnp.split(self.wkv_b(latent_bsr, KEYS, context), [self.nope_dim], axis=-1)
        key, values = checkpoint_name(key, "key_proj"), checkpoint_name(values, "value_proj")
        shared = jnp.broadcast_to(key_rope_bsd[:, :, None], (*key.shape[:3], self.rope_dim))
        return sharding.constrain(jnp.concatenate([key, shared], axis=-1), KEYS), values

    def _over_cache(
        self, query: jax.Array, query_rope: jax.Array, cached: LatentCache, mask: Mask, context: Context
    ) -> jax.Array:
        """Returns the result for queries over all cached positions: [b, t, h, value]."""
        scores = self.scores.over_cache()
        # Projections are not absorbed if each sequence selects its adapter, and thus has different matrices, or if the
        # op is "invariant", which must compute the same sums as training, where nothing is absorbed.
        absorbs = context.ranks is None and self.scores.op != "invariant"
        kernel = self.wkv_b.matrix(query.dtype) if absorbs else None
        if kernel is None:
            keys, values = self._keys_and_values(*cached, context)
            return scores.attend(jnp.concatenate([query, query_rope], axis=-1), keys, values, mask, context)
        to_key, to_value = jnp.split(kernel, [self.nope_dim], axis=-1)
        # For a query q, a latent c and a projection W: q (W c) = (q W) c, and the weighted sum of W c is W times the
        # weighted sum of c. So one key head suffices: its keys are the latents followed by the rotated keys, and its
        # values are the latents.
        queries = jnp.concatenate([_einsum("bthd,rhd->bthr", query, to_key), query_rope], axis=-1)
        keys, values = jnp.concatenate(cached, axis=-1)[:, :, None], cached.latent[:, :, None]
        return _einsum("bthr,rhd->bthd", scores.attend(queries, keys, values, mask, context), to_value)


def _einsum(subscripts: str, x: jax.Array, matrix: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, x, matrix, preferred_element_type=sharding.sum_dtype(x)).astype(x.dtype)

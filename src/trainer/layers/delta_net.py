"""Gated DeltaNet, a recurrent layer (Yang et al. 2024, arXiv:2412.06464, as in Qwen3-Next)."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from trainer import sharding
from trainer.layers.attention import GATE
from trainer.layers.cache import Cache
from trainer.layers.dense import INPUT, RESIDUAL, ROWS, Dense
from trainer.layers.norm import RMSNorm
from trainer.layers.param import EXACT, lecun_normal, param
from trainer.ops.delta_rule import gated_delta_rule
from trainer.ops.documents import document_numbers
from trainer.ops.short_conv import short_conv, with_before
from trainer.products.context import Context

KEYS = sharding.Axes((*ROWS, "activation_kv_heads", None))
VALUES = sharding.Axes((*ROWS, "activation_heads", None))
PER_HEAD = sharding.Axes((*ROWS, "activation_heads"))
_MEMORY = sharding.Axes(("activation_batch", "activation_heads", None, None))
_EPSILON = 1e-6  # the epsilon for scaling queries and keys to unit norm, as in the published models
# The rematerialization names of this layer's matrix products, in addition to the names in `layers.attention`.
PROJECTIONS = (GATE, "decay_proj", "beta_proj")


class DeltaCache(NamedTuple):
    """The state after the tokens so far, which has a fixed size: one layer's cache entries (`layers.cache`).

    `memory`: float32 [b, heads, k, v], see `ops.delta_rule`. `query`, `key`, `value`: the last inputs of the
    convolutions over w tokens, [b, w - 1, heads, d].
    """

    memory: jax.Array
    query: jax.Array
    key: jax.Array
    value: jax.Array


class ShortConv(nnx.Module):
    """A causal depthwise convolution over `width` tokens of a document, followed by SiLU."""

    def __init__(self, width: int, heads: int, size: int, name: str, *, weight_dtype: jnp.dtype, rngs: nnx.Rngs):
        """`name`: the logical name of the head axis."""
        drawn = lecun_normal(rngs.params(), (width, heads * size), weight_dtype)
        self.kernel = param(drawn.reshape(width, heads, size), (None, name, None))

    def __call__(self, x_bthd: jax.Array, document_bt: jax.Array, before: jax.Array | None) -> jax.Array:
        return jax.nn.silu(short_conv(x_bthd, self.kernel.get_value(), document_bt, before))


class GatedDeltaNet(nnx.Module):
    """Each token corrects and then reads a memory [key_dim, value_dim] per head, which is 0 when a document begins.

    Queries, keys and values are projections of the input, convolved over the last tokens. Queries and keys are scaled
    to unit norm. Consecutive value heads share the query and key of one key head. The results of each value head are
    normalized, multiplied by SiLU of a gate, and projected to the width of the input. The beta and the decay of each
    head control how the memory changes (`ops.delta_rule`), and are computed as follows:

        beta = sigmoid(beta projection);  decay = -exp(A_log) softplus(decay projection + dt_bias)

    A_log, dt_bias and the scale of the norm are float32, and the delta rule is computed in float32.

    Args:
      conv: the number of tokens that a convolution spans.
      chunk: the number of tokens that are processed at once; it changes results only by rounding.
    """

    packs_rows = True  # see `models.caches.packs_rows`

    def __init__(
        self,
        width: int,
        *,
        key_heads: int,
        value_heads: int,
        key_dim: int,
        value_dim: int,
        conv: int,
        chunk: int,
        epsilon: float,
        dtype: jnp.dtype,
        weight_dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        self.key_heads, self.value_heads, self.key_dim, self.value_dim = key_heads, value_heads, key_dim, value_dim
        self.width, self.chunk, self.dtype = conv, chunk, dtype

        def dense(shape: tuple[int, ...], *names: str) -> Dense:
            return Dense([width], shape, ("embed", *names), dtype=dtype, weight_dtype=weight_dtype, rngs=rngs)

        def short(heads: int, size: int, name: str) -> ShortConv:
            return ShortConv(conv, heads, size, name, weight_dtype=weight_dtype, rngs=rngs)

        self.query = dense((key_heads, key_dim), "kv_heads", "kv_head_dim")
        self.key = dense((key_heads, key_dim), "kv_heads", "kv_head_dim")
        self.value = dense((value_heads, value_dim), "q_heads", "kv")
        self.gating = dense((value_heads, value_dim), "q_heads", "kv")
        self.decay, self.beta = (dense((value_heads,), "q_heads") for _ in range(2))
        self.query_conv, self.key_conv = (short(key_heads, key_dim, "kv_heads") for _ in range(2))
        self.value_conv = short(value_heads, value_dim, "q_heads")
        rates = jax.random.uniform(rngs.params(), (value_heads,), EXACT, 0.01, 16)
        self.A_log = param(jnp.log(rates), ("q_heads",))
        self.dt_bias = param(jnp.ones(value_heads, EXACT), ("q_heads",))
        self.norm = RMSNorm(value_dim, epsilon=epsilon, dtype=dtype, weight_dtype=weight_dtype)
        names = ("heads", "kv", "embed")
        self.out = Dense([value_heads, value_dim], [width], names, dtype=dtype, weight_dtype=weight_dtype, rngs=rngs)

    def init_cache(self, rows: int, length: int) -> DeltaCache:
        """Returns the state before the first token of `rows` sequences."""
        del length
        memory = jnp.zeros((rows, self.value_heads, self.key_dim, self.value_dim), jnp.float32)
        keys = jnp.zeros((rows, self.width - 1, self.key_heads, self.key_dim), self.dtype)
        values = jnp.zeros((rows, self.width - 1, self.value_heads, self.value_dim), self.dtype)
        return DeltaCache(memory, keys, keys, values)

    def cache_axes(self) -> DeltaCache:
        """Returns the logical axes of the arrays of `init_cache`."""
        keys, values = (sharding.Axes(("activation_batch", None, *names[2:])) for names in (KEYS, VALUES))
        return DeltaCache(_MEMORY, keys, keys, values)  # type: ignore[arg-type]  # axes, not arrays

    def __call__(self, x_bte: jax.Array, cache: Cache | None, context: Context) -> tuple[jax.Array, Cache | None]:
        """[b, t, e] -> [b, t, e]. Also returns the cache with the state after the last token of each cache row."""
        x_bte = sharding.constrain(x_bte, INPUT)
        context = context._replace(positions=sharding.constrain(context.positions, ROWS))
        projected = {
            "query": checkpoint_name(self.query(x_bte, KEYS, context), "query_proj"),
            "key": checkpoint_name(self.key(x_bte, KEYS, context), "key_proj"),
            "value": checkpoint_name(self.value(x_bte, VALUES, context), "value_proj"),
        }
        gate = checkpoint_name(self.gating(x_bte, VALUES, context), GATE)
        decay = checkpoint_name(self.decay(x_bte, PER_HEAD, context), "decay_proj").astype(jnp.float32)
        beta = checkpoint_name(self.beta(x_bte, PER_HEAD, context), "beta_proj").astype(jnp.float32)
        # Padding leaves the state unchanged.
        real = (context.segments != 0)[..., None]
        decay = jnp.where(real, -jnp.exp(self.A_log[...]) * jax.nn.softplus(decay + self.dt_bias[...]), 0)
        beta = jnp.where(real, jax.nn.sigmoid(beta), 0)

        document_bt = document_numbers(context.positions, context.segments)
        before = cache.read() if cache is not None and cache.filled else None
        convolved = (
            getattr(self, f"{name}_conv")(x, document_bt, None if before is None else getattr(before, name))
            for name, x in projected.items()
        )
        at_br = None if cache is None else _last_tokens(cache, context)
        packed = cache is not None and cache.rows is not None
        memory = None if before is None else before.memory
        rule = (*convolved, decay, beta, document_bt, memory)
        out, memory = self._rule(*rule, at_br=at_br if packed else None)
        if cache is not None:
            inputs = (self._last_inputs(name, x, before, document_bt, at_br) for name, x in projected.items())
            state = DeltaCache(memory[0] if packed else memory, *(x[0] if packed else x[:, 0] for x in inputs))
            cache = cache.replace(state)
        out = checkpoint_name(out.astype(self.dtype), "context")
        gated = self.norm(out) * jax.nn.silu(gate.astype(jnp.float32))
        return checkpoint_name(self.out(gated.astype(self.dtype), RESIDUAL, context), "out_proj"), cache

    def _rule(
        self, queries: jax.Array, keys: jax.Array, values: jax.Array, *rest: Any, at_br: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """Applies `ops.delta_rule`, with the heads of queries and keys repeated to match the value heads."""
        share = self.value_heads // self.key_heads
        queries, keys = (sharding.constrain(jnp.repeat(_unit(x), share, axis=2), VALUES) for x in (queries, keys))
        return gated_delta_rule(queries * self.key_dim**-0.5, keys, values, *rest, chunk=self.chunk, at_br=at_br)

    def _last_inputs(
        self, name: str, x_bthd: jax.Array, before: DeltaCache | None, document_bt: jax.Array, at_br: Any
    ) -> jax.Array:
        """Returns the last w - 1 inputs of a convolution up to each of r tokens per row: [b, r, w - 1, heads, d].

        `at_br`: the indices of the r tokens in their rows. Inputs from before the token's document are zeros.
        """
        given = with_before(x_bthd, self.width, None if before is None else getattr(before, name))
        numbers = jnp.pad(document_bt, ((0, 0), (self.width - 1, 0)))

        def up_to(at: jax.Array, given: jax.Array, numbers: jax.Array) -> jax.Array:
            last = jax.lax.dynamic_slice_in_dim(given, at + 1, self.width - 1)
            same = jax.lax.dynamic_slice_in_dim(numbers, at + 1, self.width - 1) == numbers[at + self.width - 1]
            return jnp.where(same[:, None, None], last, 0)

        return jax.vmap(jax.vmap(up_to, in_axes=(0, None, None)))(at_br, given, numbers)


def _unit(x: jax.Array) -> jax.Array:
    """Returns `x` scaled to unit norm along the last axis, in float32."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt((x * x).sum(axis=-1, keepdims=True) + _EPSILON)


def _last_tokens(cache: Cache, context: Context) -> jax.Array:
    """Returns, for each cache row, the index of its last token in this call's row of tokens, or -1 if it has none: int
    [b, 1], or [1, cache rows] if the call packs the tokens of several cache rows in one row."""
    index, real = jnp.arange(context.segments.shape[1]), context.segments != 0
    if cache.rows is None:
        return jnp.where(real, index, -1).max(axis=1)[:, None]
    count = jax.tree.leaves(cache.entries)[0].shape[1]
    own = real & (cache.rows == jnp.arange(count)[:, None])
    return jnp.where(own, index, -1).max(axis=1)[None]

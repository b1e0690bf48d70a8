"""Ring attention: attention over keys on several devices (Liu et al. 2023, arXiv:2310.01889).

Each device has the queries, keys and values of its tokens. Keys and values travel around the ring of devices, and each
device accumulates the results of its queries with an online softmax over the keys seen so far (Milakov and Gimelshein
2018, arXiv:1805.02867), in float32. Neither the forward nor the backward pass materializes keys or scores of the whole
row. With one device, this is blockwise attention with arbitrary query and key positions.

Shapes: b rows, t queries and s keys of a device, h query heads, k key heads, g = h / k, d and v the widths of keys and
values; n blocks (index i) of c queries, and m blocks (index j) of c keys.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from trainer.ops.attention import Dropout, Mask, scale_of, visible

BLOCK = 512  # the maximum side length of a tile of scores, in tokens
_NOWHERE = -1, -2  # segments of padding queries and of padding keys, which match no segment
_LOWEST = float(jnp.finfo(jnp.float32).min)


class Ring(NamedTuple):
    """Static parameters.

    Attributes:
      axes: the mesh axes of the ring, inside `sharding.shard_mapped`; () if all keys are on this device.
      window, soft_cap, scale: see `ops.attention`.
      block: the maximum side length of a tile of scores, in tokens.
      rate, whole, length: for dropout: the rate, `Dropout.whole`, and the number of keys on a device.
      together: whether to send all arrays as one array of bytes.
    """

    axes: tuple[str, ...] = ()
    window: int = 0
    soft_cap: float = 0.0
    scale: float | None = None
    block: int = BLOCK
    rate: float = 0.0
    whole: tuple[int, int] | None = None
    length: int = 0
    together: bool = False

    @property
    def devices(self) -> int:
        """The number of devices of the ring."""
        return jax.lax.axis_size(self.axes) if self.axes else 1

    def source(self, step: int | jax.Array) -> jax.Array | int:
        """Returns the index of the device whose keys this device has in step `step` of the ring: in step 0, its own
        index."""
        return (jax.lax.axis_index(self.axes) - step) % self.devices if self.axes else 0

    def passed_on(self, arrays: Any) -> Any:
        """Sends the arrays to the next device, and returns the previous device's arrays."""
        count = self.devices
        pairs = [(at, (at + 1) % count) for at in range(count)]
        if not self.together:
            return jax.lax.ppermute(arrays, self.axes, pairs)
        leaves, structure = jax.tree.flatten(arrays)
        passed = jax.lax.ppermute(jnp.concatenate([_bytes(x).reshape(-1) for x in leaves]), self.axes, pairs)
        ends = itertools.accumulate(x.size * x.dtype.itemsize for x in leaves)
        parts = zip(jnp.split(passed, list(ends)[:-1]), leaves, strict=True)
        return jax.tree.unflatten(
            structure, [jax.lax.bitcast_convert_type(part.reshape(_bytes(x).shape), x.dtype) for part, x in parts]
        )


def _bytes(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.uint8)


class _Keys(NamedTuple):
    """Keys and values in m blocks, which travel around the ring."""

    key: jax.Array  # [m, b, c, k, d]
    value: jax.Array  # [m, b, c, k, v]
    position: jax.Array  # [m, b, c]
    segment: jax.Array  # [m, b, c]


class _Queries(NamedTuple):
    """Queries in n blocks."""

    query: jax.Array  # [n, b, c, k, g, d]
    position: jax.Array  # [n, b, c]
    segment: jax.Array  # [n, b, c]


class _Sums(NamedTuple):
    """The softmax of n blocks of queries over the keys so far, float32."""

    largest: jax.Array  # [n, b, k, g, c], the largest logit
    weight: jax.Array  # [n, b, k, g, c], the sum of exp(logit - largest)
    total: jax.Array  # [n, b, k, g, c, v], the sum of exp(logit - largest) * value


def ring_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: Mask,
    dropout: Dropout | None = None,
    *,
    ring: Ring,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Computes `ops.attention.dot_product_attention` for the queries of this device: [b, t, h, v].

    Keys may have arbitrary positions. Tiles of scores in which no query sees a key are skipped. The backward pass sends
    keys and values around the ring again, with float32 sums of their gradients. The residuals of the backward pass have
    the checkpoint name "context".

    Args:
      query, key, value, mask: the arrays for this device's tokens.
      dropout: requires that the devices' tokens are in the order of the ring.
      ring: the parameters of the ring. Its dropout parameters are overridden by those of `dropout`.
      sinks: see `ops.attention`.
    """
    drop = None
    if dropout is not None:
        ring = ring._replace(rate=dropout.rate, whole=dropout.whole, length=key.shape[1])
        drop = dropout.key, dropout.row, jnp.asarray(dropout.first_head), jnp.asarray(dropout.first_query)
    queries, keys = _cut(ring, query, key, value, mask)
    if sinks is not None:
        sinks = sinks.astype(jnp.float32).reshape(key.shape[2], -1, 1)
        sinks = jnp.broadcast_to(sinks, _shape(queries)) + _full(queries, (), 0)
    return _joined(_attention(ring, queries, keys, sinks, drop), query.shape[1])


def ring_largest(query: jax.Array, key: jax.Array, mask: Mask, ring: Ring) -> jax.Array:
    """Returns each head's largest logit over the device's queries and all keys, float32 [h]; see `ops.max_logits`."""
    query, key = jax.lax.stop_gradient((query, key))
    queries, keys = _cut(ring, query, key, key[..., :0], mask)

    def step(largest: jax.Array, keys: _Keys, _: Any) -> jax.Array:
        def of_queries(largest: jax.Array, queries: _Queries) -> tuple[jax.Array, None]:
            def tile(largest: jax.Array, _: None, seen: jax.Array, keys: _Keys, __: Any) -> tuple[jax.Array, None]:
                counts = (seen & (queries.segment != 0)[:, :, None])[:, None, None]
                logits = jnp.where(counts, _logits(ring, queries, keys), _LOWEST)
                return jnp.maximum(largest, logits.max(axis=(0, 3, 4))), None

            return _over_keys(ring, tile, largest, queries, keys)[0], None

        return jax.lax.scan(of_queries, largest, queries)[0]

    start = _full(queries, queries.query.shape[3:5], _LOWEST)
    return _around(ring, step, start, keys).reshape(query.shape[2])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(ring: Ring, queries: _Queries, keys: _Keys, sinks: jax.Array | None, drop: Any) -> jax.Array:
    """Returns the results, [n, b, k, g, c, v], in the dtype of the values. `sinks`: [n, b, k, g, c]."""
    return _forward(ring, queries, keys, sinks, drop)[0]


def _forward(ring: Ring, queries: _Queries, keys: _Keys, sinks: jax.Array | None, drop: Any) -> tuple[jax.Array, Any]:
    shape = _shape(queries)
    width = keys.value.shape[-1]
    start = _Sums(*(_full(queries, *of) for of in ((shape, _LOWEST), (shape, 0), ((*shape, width), 0))))
    if sinks is not None:
        start = start._replace(largest=sinks, weight=start.weight + 1)

    def step(sums: _Sums, keys: _Keys, source: Any) -> _Sums:
        def of_queries(_: None, xs: Any) -> tuple[None, _Sums]:
            index, queries, sums = xs

            def tile(sums: _Sums, _: None, seen: jax.Array, keys: _Keys, at: Any) -> tuple[_Sums, None]:
                logits = jnp.where(seen[:, None, None], _capped(ring, queries, keys)[0], _LOWEST)
                largest = jnp.maximum(sums.largest, logits.max(axis=-1))
                weights = jnp.where(seen[:, None, None], jnp.exp(logits - largest[..., None]), 0)
                kept = _dropped(ring, drop, weights, index, source, at).astype(keys.value.dtype)
                values = _einsum("bkgcs,bskv->bkgcv", kept, keys.value)
                before = jnp.exp(sums.largest - largest)
                weight = before * sums.weight + weights.sum(-1)
                return _Sums(largest, weight, before[..., None] * sums.total + values), None

            return None, _over_keys(ring, tile, sums, queries, keys)[0]

        return jax.lax.scan(of_queries, None, (jnp.arange(shape[0]), queries, sums))[1]

    sums = _around(ring, step, start, keys)
    # Only padding queries see no keys. Their sum of weights is 0.
    out = (sums.total / jnp.where(sums.weight > 0, sums.weight, 1)[..., None]).astype(keys.value.dtype)
    log_sum = sums.largest + jnp.log(sums.weight)
    out, log_sum = checkpoint_name(out, "context"), checkpoint_name(log_sum, "context")
    return out, (queries, keys, sinks, drop, out, log_sum)


def _backward(ring: Ring, residuals: Any, out_grad: jax.Array) -> Any:
    queries, keys, sinks, drop, out, log_sum = residuals
    scale = scale_of(ring.scale, keys.key.shape[-1])
    delta = (out_grad.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1)

    def step(query_grad: jax.Array, keys: _Keys, source: Any) -> tuple[jax.Array, Any]:
        def of_queries(sums: Any, xs: Any) -> tuple[Any, jax.Array]:
            index, queries, out_grad, log_sum, delta, query_grad = xs

            def tile(query_grad: jax.Array, sums: Any, seen: jax.Array, keys: _Keys, at: Any) -> tuple[jax.Array, Any]:
                logits, slope = _capped(ring, queries, keys)
                weights = jnp.where(seen[:, None, None], jnp.exp(logits - log_sum[..., None]), 0)
                drop_at = functools.partial(_dropped, ring, drop, index=index, source=source, at=at)
                value_grad = _einsum("bkgcs,bkgcv->bskv", drop_at(weights).astype(out_grad.dtype), out_grad)
                weight_grad = drop_at(_einsum("bkgcv,bskv->bkgcs", out_grad, keys.value))
                logit_grad = (weights * (weight_grad - delta[..., None]) * slope * scale).astype(keys.key.dtype)
                key_grad = _einsum("bkgcs,bckgd->bskd", logit_grad, queries.query)
                query_grad += _einsum("bkgcs,bskd->bckgd", logit_grad, keys.key)
                return query_grad, (sums[0] + key_grad, sums[1] + value_grad)

            query_grad, sums = _over_keys(ring, tile, query_grad, queries, keys, sums)
            return sums, query_grad

        start = _full(queries, keys.key.shape, 0), _full(queries, keys.value.shape, 0)
        xs = jnp.arange(len(out)), queries, out_grad, log_sum, delta, query_grad
        sums, query_grad = jax.lax.scan(of_queries, start, xs)
        return query_grad, sums

    def one(state: Any, index: jax.Array) -> tuple[Any, None]:
        keys, query_grad, sums = state
        sent, arrived = ring.passed_on((keys, sums))
        query_grad, own = step(query_grad, keys, ring.source(index))
        return (sent, query_grad, jax.tree.map(jnp.add, arrived, own)), None

    sent = ring.passed_on(keys) if ring.devices > 1 else keys
    query_grad, sums = step(_full(queries, queries.query.shape, 0), keys, ring.source(0))
    if ring.devices > 1:
        (_, query_grad, sums), _ = jax.lax.scan(one, (sent, query_grad, sums), jnp.arange(1, ring.devices))
        sums = ring.passed_on(sums)
    sink_grad = None if sinks is None else -jnp.exp(sinks - log_sum) * delta
    of_queries = _Queries(query_grad.astype(queries.query.dtype), None, None)  # type: ignore[arg-type]
    of_keys = _Keys(sums[0].astype(keys.key.dtype), sums[1].astype(keys.value.dtype), None, None)  # type: ignore[arg-type]
    return of_queries, of_keys, sink_grad, None


_attention.defvjp(_forward, _backward)


def _around(ring: Ring, step: Callable[..., Any], carry: Any, keys: _Keys) -> Any:
    """Returns `carry` after `carry = step(carry, keys, source)` for the keys of each device of the ring. Keys are sent
    to the next device before the step, so that communication and computation overlap."""

    def one(state: Any, index: jax.Array) -> tuple[Any, None]:
        keys, carry = state
        sent = ring.passed_on(keys)
        return (sent, step(carry, keys, ring.source(index))), None

    last = ring.devices - 1
    if last:
        (keys, carry), _ = jax.lax.scan(one, (keys, carry), jnp.arange(last))
    return step(carry, keys, ring.source(last))


def _over_keys(
    ring: Ring, tile: Callable[..., Any], carry: Any, queries: _Queries, keys: _Keys, of_keys: Any = None
) -> tuple[Any, Any]:
    """Returns `carry` and `of_keys` [m, ...] after `carry, of_keys[j] = tile(carry, of_keys[j], seen, keys, at)` for
    each block j of keys in which a query sees a key. `seen`: for each query and each key of block j, whether the query
    sees the key. `at`: the index of block j's first key among the keys of a device."""

    def one(carry: Any, xs: Any) -> tuple[Any, Any]:
        index, keys, own = xs
        seen = visible(Mask(queries.position, keys.position, queries.segment, keys.segment), ring.window)
        at = index * keys.key.shape[1]
        return jax.lax.cond(seen.any(), lambda: tile(carry, own, seen, keys, at), lambda: (carry, own))

    return jax.lax.scan(one, carry, (jnp.arange(len(keys.key)), keys, of_keys))


def _capped(ring: Ring, queries: _Queries, keys: _Keys) -> tuple[jax.Array, jax.Array | float]:
    """Returns a tile's logits, float32 [b, k, g, c, c], and their derivative with respect to the uncapped logits."""
    logits = _logits(ring, queries, keys)
    if not ring.soft_cap:
        return logits, 1.0
    capped = jnp.tanh(logits / ring.soft_cap)
    return ring.soft_cap * capped, 1 - capped**2


def _logits(ring: Ring, queries: _Queries, keys: _Keys) -> jax.Array:
    return _einsum("bckgd,bskd->bkgcs", queries.query, keys.key) * scale_of(ring.scale, keys.key.shape[-1])


def _dropped(ring: Ring, drop: Any, weights: jax.Array, index: Any, source: Any, at: Any) -> jax.Array:
    """Returns the weights of a tile [b, k, g, c, c] after dropout. `index`: the block of the tile's queries. The tile's
    keys are those of device `source` from index `at` on."""
    if drop is None:
        return weights
    rows, kv_heads, group, each, width = weights.shape
    dropout = Dropout(drop[0], drop[1], ring.rate, ring.whole, *drop[2:])
    keep = dropout.keep(index * each + jnp.arange(each), kv_heads * group, width, source * ring.length + at)
    return jnp.where(keep.reshape(rows, kv_heads, group, each, width), weights / (1 - ring.rate), 0.0)


def _cut(ring: Ring, query: jax.Array, key: jax.Array, value: jax.Array, mask: Mask) -> tuple[_Queries, _Keys]:
    # Without the barrier, JAX would compute the masks of all tiles before a loop over layers, and keep them.
    query, mask = jax.lax.optimization_barrier((query, mask))
    rows, length, heads, width = query.shape
    query = query.reshape(rows, length, key.shape[2], heads // key.shape[2], width)
    cut = functools.partial(_blocks, ring.block)
    return (
        _Queries(cut(query), cut(mask.query_position), cut(mask.query_segment, _NOWHERE[0])),
        _Keys(cut(key), cut(value), cut(mask.key_position), cut(mask.key_segment, _NOWHERE[1])),
    )


def _blocks(block: int, x: jax.Array, fill: int = 0) -> jax.Array:
    """Divides `x` [b, t, ...] into blocks [n, b, c, ...], with padding at the end of the row."""
    rows, length = x.shape[:2]
    count = -(-length // block)
    each = -(-length // count)
    padding = [(0, 0), (0, count * each - length), *((0, 0) for _ in x.shape[2:])]
    return jnp.pad(x, padding, constant_values=fill).reshape(rows, count, each, *x.shape[2:]).swapaxes(0, 1)


def _joined(x: jax.Array, length: int) -> jax.Array:
    """Joins the blocks `x` [n, b, k, g, c, v] into rows [b, t, h, v], without padding."""
    count, rows, kv_heads, group, each, width = x.shape
    return x.transpose(1, 0, 4, 2, 3, 5).reshape(rows, count * each, kv_heads * group, width)[:, :length]


def _shape(queries: _Queries) -> tuple[int, ...]:
    """Returns the sizes [n, b, k, g, c]."""
    count, rows, each, kv_heads, group, _ = queries.query.shape
    return count, rows, kv_heads, group, each


def _full(queries: _Queries, shape: tuple[int, ...], value: float) -> jax.Array:
    """Returns a float32 array filled with `value`. Its type varies over the same mesh axes as the queries, because a
    loop's carry must have the type of the loop's results."""
    zero = ((queries.query.ravel()[0] > 0) & False).astype(jnp.float32)
    return jnp.full(shape, value, jnp.float32) + zero


def _einsum(subscripts: str, *operands: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, *operands, preferred_element_type=jnp.float32)

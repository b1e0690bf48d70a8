"""Three ways to dispatch tokens to their experts and to combine the results.

The three functions are `dropless`, `every_expert` and `within_capacity`. Each takes x_btw, its routing, and `apply`,
which runs the experts. The result is a `Dispatched`, which contains the weighted sum of the experts' results for each
token. Shapes: b rows, t tokens, w width, e experts, k chosen experts per token, c slots per expert. `apply(rows,
sizes)` returns an array with the shape of `rows`. If `sizes` is None, rows are [e, n, w]. Otherwise, rows are [n, w],
sorted by expert, and `sizes`, int32 [e], contains the number of rows for each expert.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from trainer.ops.routing import Routing

Apply = Callable[[jax.Array, jax.Array | None], jax.Array]


class Dispatched(NamedTuple):
    """The result, float32 [b, t, w], and the number of dropped choices of real tokens in each row, int32 [b]."""

    out: jax.Array
    dropped: jax.Array


def dropless(x_btw: jax.Array, routing: Routing, apply: Apply, experts: int) -> Dispatched:
    """Sorts tokens by expert into groups of any size. Padding tokens are included, but their results have no effect."""
    rows, _, width = x_btw.shape
    x_nw, order, size_e = by_expert(x_btw, routing, experts)
    out_btkw = permuted(apply(x_nw, size_e), jnp.argsort(order)).reshape(*routing.expert.shape, width)
    return Dispatched(_weighted(out_btkw, routing.weight), jnp.zeros(rows, jnp.int32))


def weighing_inputs(dispatch: Callable[..., Dispatched]) -> Callable[..., Dispatched]:
    """Wraps `dispatch`, one of this module's three functions, so that weights multiply the experts' inputs instead of
    the results. Each choice of a token becomes a separate token with one expert."""

    def run(x_btw: jax.Array, routing: Routing, *args: Any, **how: Any) -> Dispatched:
        rows, length, chosen = routing.expert.shape
        x_btkw = (x_btw[:, :, None].astype(jnp.float32) * routing.weight[..., None]).astype(x_btw.dtype)
        expert = routing.expert.reshape(rows, -1, 1)
        if "real_bt" in how:
            how["real_bt"] = jnp.repeat(how["real_bt"], chosen, axis=1)
        one = Routing(expert, jnp.ones_like(expert, jnp.float32))
        found = dispatch(x_btkw.reshape(rows, length * chosen, -1), one, *args, **how)
        return found._replace(out=found.out.reshape(x_btkw.shape).sum(2))

    return run


def by_expert(x_btw: jax.Array, routing: Routing, experts: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the n = b t k choices sorted by expert: their tokens [n, w]; their order [n], as indices into the
    flattened [b, t, k]; and the number of choices for each expert, int32 [e]."""
    expert_n = routing.expert.reshape(-1)
    order = jnp.argsort(expert_n)  # stable
    size_e = jnp.zeros(experts, jnp.int32).at[expert_n].add(1)
    # Because tokens are copied first, `order` contains each index once. So the backward pass permutes gradients and
    # then adds the k gradients of each token.
    copies_nw = jnp.repeat(x_btw.reshape(-1, x_btw.shape[-1]), routing.expert.shape[-1], axis=0)
    return permuted(copies_nw, order), order, size_e


def permuted(x: jax.Array, order: jax.Array) -> jax.Array:
    """Returns `x` [n, ...] permuted by `order`, which contains each index once."""
    return x.at[order].get(unique_indices=True, mode="promise_in_bounds")


def with_bias(out: jax.Array, bias_ew: jax.Array, sizes: jax.Array | None) -> jax.Array:
    """Adds to each row of the experts' result the float32 bias of its expert. Rows past the last group get an arbitrary
    bias.

    Adds in float32, because the gradient of a bias is summed over rows in the dtype of the addition. In bfloat16 the
    gradient was off by 31 % with 4096 rows.
    """
    if sizes is None:
        own = bias_ew[:, None]
    else:
        expert_n = jnp.repeat(jnp.arange(len(sizes)), sizes, total_repeat_length=len(out))
        own = bias_ew.at[expert_n].get(mode="promise_in_bounds", indices_are_sorted=True)
    return (out.astype(jnp.float32) + own).astype(out.dtype)


def _weighted(out_btkw: jax.Array, weight_btk: jax.Array) -> jax.Array:
    return jnp.einsum("btkw,btk->btw", out_btkw.astype(jnp.float32), weight_btk)


def every_expert(x_btw: jax.Array, routing: Routing, apply: Apply, experts: int) -> Dispatched:
    """Runs all experts on all tokens. This is the reference for the other two functions."""
    rows, length, width = x_btw.shape
    one_hot = jax.nn.one_hot(routing.expert, experts, dtype=jnp.float32)
    weight_bte = jnp.einsum("btke,btk->bte", one_hot, routing.weight)
    out = apply(jnp.broadcast_to(x_btw.reshape(1, -1, width), (experts, rows * length, width)), None)
    out = out.astype(jnp.float32).reshape(experts, rows, length, width)
    return Dispatched(jnp.einsum("ebtw,bte->btw", out, weight_bte), jnp.zeros(rows, jnp.int32))


def slots(length: int, chosen: int, experts: int, factor: float) -> int:
    """Returns an expert's capacity in tokens per row, by MaxText's formula: ceil(length k / e) times `factor`, rounded
    down, but at least 1.

    The result is at most the row's length, because no token chooses an expert twice.
    """
    return min(length, max(1, int(math.ceil(length * chosen / experts) * factor)))


def within_capacity(
    x_btw: jax.Array, routing: Routing, apply: Apply, experts: int, *, real_bt: jax.Array, factor: float
) -> Dispatched:
    """Lets each expert process, in each row, the first `slots` real tokens that chose it. Other choices are dropped:
    they add nothing, and the weights of the token's other experts do not change."""
    rows, length, width = x_btw.shape
    chosen = routing.expert.shape[-1]
    capacity = slots(length, chosen, experts, factor)
    expert_bn = routing.expert.reshape(rows, -1)  # n = t k, the choices of one token after another
    real_bn = jnp.repeat(real_bt, chosen, axis=1)
    mine_bne = jax.nn.one_hot(expert_bn, experts, dtype=jnp.int32) * real_bn[..., None]
    place_bn = jnp.sum((jnp.cumsum(mine_bne, axis=1) - mine_bne) * mine_bne, axis=-1)
    kept_bn = real_bn & (place_bn < capacity)
    end = experts * capacity
    slot_bn = jnp.where(kept_bn, expert_bn * capacity + place_bn, end)  # `end`, past the last slot, if dropped
    token_n = jnp.repeat(jnp.arange(length), chosen)

    def fill(slot_n: jax.Array) -> jax.Array:
        return jnp.full(end, length).at[slot_n].set(token_n, mode="drop")

    token_bs = jax.vmap(fill)(slot_bn)  # the token of each slot; `length` for an empty slot
    taken_bsw = jax.vmap(_rows_or_zero)(x_btw, token_bs)
    taken_enw = taken_bsw.reshape(rows, experts, capacity, width).swapaxes(0, 1).reshape(experts, -1, width)
    out_bsw = apply(taken_enw, None).reshape(experts, rows, capacity, width).swapaxes(0, 1).reshape(rows, end, width)
    out_btkw = jax.vmap(_rows_or_zero)(out_bsw, slot_bn).reshape(rows, length, chosen, width)
    dropped_b = jnp.sum(real_bn & ~kept_bn, axis=1, dtype=jnp.int32)
    return Dispatched(_weighted(out_btkw, routing.weight), dropped_b)


def _rows_or_zero(table: jax.Array, index: jax.Array) -> jax.Array:
    """Returns the rows of `table` at `index`; a row of zeros for an index past the table's end."""
    return jnp.take(table, index, axis=0, mode="fill", fill_value=0)

"""Expert parallelism: tokens are sent to the devices of their experts, and the results are sent back.

All functions here compute one device's part, in a region in which the mesh axes `Spread.axes` are manual. Shapes: d
devices along these axes; e experts; l = e / d experts per device; m choices (a choice is a token with one of its chosen
experts); c choices that a device sends to each device in a round; w width. Device i has the experts i l to
(i + 1) l - 1.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from trainer.ops.experts import Apply, Dispatched, by_expert, permuted
from trainer.ops.inexact import inexact
from trainer.ops.routing import Routing

# `experts.Apply` with an additional first argument: the matrices of the device's experts, a pytree
Experts = Callable[[Any, jax.Array, jax.Array | None], jax.Array]


class Spread(NamedTuple):
    """The placement of experts on devices.

    Attributes:
      axes: the mesh axes over which experts are sharded; () or axes of size 1 if each device has all experts.
      peers: all mesh axes along which devices have different tokens. All devices along these axes run the same number
        of rounds.
      buffer: sets the number of choices in a round; see `round_size`.
    """

    axes: tuple[str, ...]
    peers: tuple[str, ...]
    buffer: float

    @property
    def devices(self) -> int:
        """The number of devices along `axes`, d."""
        return jax.lax.axis_size(self.axes) if self.axes else 1


def round_size(choices: int, devices: int, buffer: float) -> int:
    """Returns c: `buffer` times `choices` / `devices`, rounded up, but at most `choices`. If `buffer` is -1, c is
    `choices`, so that one round suffices."""
    return choices if buffer < 0 else min(choices, math.ceil(buffer * choices / devices))


def on_owners(apply: Apply, spread: Spread) -> Apply:
    """Returns a function that runs all experts on rows [e, n, w]. It sends each expert's rows to the expert's device,
    runs `apply` there, which runs the device's experts, and sends the results back."""

    def everywhere(rows: jax.Array, sizes: jax.Array | None) -> jax.Array:
        assert sizes is None
        there = jax.lax.all_to_all(rows, spread.axes, split_axis=0, concat_axis=1, tiled=True)
        return jax.lax.all_to_all(apply(there, sizes), spread.axes, split_axis=1, concat_axis=0, tiled=True)

    return everywhere


def dropless(
    x_btw: jax.Array, routing: Routing, apply: Experts, kernels: Any, experts: int, spread: Spread
) -> Dispatched:
    """Computes `experts.dropless`. In each round, a device sends at most `round_size` choices to each device. The pair
    of devices with the most choices determines the number of rounds.

    The device that computes the result of a choice multiplies it by the choice's weight, and sends it back in the dtype
    of `x_btw`. Only the inputs are kept for the backward pass, which recomputes the experts' results.
    """
    rows, _, width = x_btw.shape
    x_mw, order, size_e = by_expert(x_btw, routing, experts)
    weight_m = permuted(routing.weight.reshape(-1), order)
    out_mw = _rounds(apply, spread, kernels, x_mw, weight_m, _plan(size_e, spread, len(order)))
    out_btkw = permuted(out_mw, jnp.argsort(order)).reshape(*routing.expert.shape, width)
    return Dispatched(out_btkw.astype(jnp.float32).sum(2), jnp.zeros(rows, jnp.int32))


class _Plan(NamedTuple):
    """The choices that devices exchange.

    Attributes:
      start_d, count_d: this device sends to device i the count_d[i] choices from index start_d[i] on.
      arriving_dl: the number of choices that each device sends to each expert of this device.
      rounds: the number of rounds, the same on all peers.
    """

    start_d: jax.Array
    count_d: jax.Array
    arriving_dl: jax.Array
    rounds: jax.Array


def _plan(size_e: jax.Array, spread: Spread, choices: int) -> _Plan:
    size_dl = size_e.reshape(spread.devices, -1)
    count_d = size_dl.sum(1)
    arriving_dl = jax.lax.all_to_all(size_dl, spread.axes, split_axis=0, concat_axis=0, tiled=True)
    # All devices run the same number of rounds, so that none leaves the loop while others communicate.
    rounds = jax.lax.pmax(-(-count_d.max() // round_size(choices, spread.devices, spread.buffer)), spread.peers)
    return _Plan(jnp.cumsum(count_d) - count_d, count_d, arriving_dl, rounds)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _rounds(
    apply: Experts, spread: Spread, kernels: Any, x_mw: jax.Array, weight_m: jax.Array, plan: _Plan
) -> jax.Array:
    """Returns the weighted results, [m, w], of the choices `x_mw`, which are sorted by expert. The backward pass is
    written by hand, because JAX cannot differentiate a loop with a data-dependent number of rounds."""

    def body(at: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        number, out_mw = at
        index_dc, size_dl = _round(plan, number, spread, len(x_mw))
        back = _there_and_back(apply, spread, kernels, _at(x_mw, index_dc), _at(weight_m, index_dc), size_dl)
        return number + 1, _put(out_mw, index_dc, back)

    return _while(plan, body, jnp.zeros_like(x_mw))


def _rounds_forward(apply: Experts, spread: Spread, *args: Any) -> Any:
    return _rounds(apply, spread, *args), args


def _rounds_backward(apply: Experts, spread: Spread, kept: Any, cotangent_mw: jax.Array) -> Any:
    kernels, x_mw, weight_m, plan = kept
    trained, join = inexact(kernels)

    def body(at: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
        number, (of_kernels, of_x, of_weight) = at
        index_dc, size_dl = _round(plan, number, spread, len(x_mw))

        def run(trained: Any, x_dcw: jax.Array, weight_dc: jax.Array) -> jax.Array:
            return _there_and_back(apply, spread, join(trained), x_dcw, weight_dc, size_dl)

        _, pull = jax.vjp(run, trained, _at(x_mw, index_dc), _at(weight_m, index_dc))
        more, of_sent, of_weights = pull(_at(cotangent_mw, index_dc))
        of_kernels = jax.tree.map(jnp.add, of_kernels, more)
        return number + 1, (of_kernels, _put(of_x, index_dc, of_sent), _put(of_weight, index_dc, of_weights))

    of_kernels, *others = _while(plan, body, jax.tree.map(jnp.zeros_like, (trained, x_mw, weight_m)))
    return join(of_kernels, None), *others, None


_rounds.defvjp(_rounds_forward, _rounds_backward)


def _while(plan: _Plan, body: Callable[[Any], Any], start: Any) -> Any:
    with jax.named_scope("expert_exchange"):
        return jax.lax.while_loop(lambda at: at[0] < plan.rounds, body, (jnp.int32(0), start))[1]


def _round(plan: _Plan, number: jax.Array, spread: Spread, choices: int) -> tuple[jax.Array, jax.Array]:
    """Returns the indices of the choices that this device sends in a round, [d, c], and the number of choices that
    arrive from each device for each expert of this device, [d, l].

    If fewer than c choices remain for a device, its other indices are distinct, and past the last choice."""
    size = round_size(choices, spread.devices, spread.buffer)
    begin = number * size
    slot_c = begin + jnp.arange(size)
    index_dc = plan.start_d[:, None] + slot_c
    past = choices + jnp.arange(index_dc.size).reshape(index_dc.shape)
    end_dl = jnp.cumsum(plan.arriving_dl, axis=1)
    first_dl = end_dl - plan.arriving_dl
    size_dl = jnp.clip(end_dl - begin, 0, size) - jnp.clip(first_dl - begin, 0, size)
    return jnp.where(slot_c < plan.count_d[:, None], index_dc, past), size_dl


def _at(x: jax.Array, index: jax.Array) -> jax.Array:
    return x.at[index].get(mode="fill", fill_value=0, unique_indices=True)


def _put(x: jax.Array, index: jax.Array, values: jax.Array) -> jax.Array:
    return x.at[index].set(values, mode="drop", unique_indices=True)


def _there_and_back(
    apply: Experts, spread: Spread, kernels: Any, x_dcw: jax.Array, weight_dc: jax.Array, size_dl: jax.Array
) -> jax.Array:
    """Sends the choices `x_dcw` to the devices of their experts, runs the experts there, and returns the weighted
    results, which are sent back: [d, c, w].

    Of the slots that arrive from device i, the first size_dl[i, 0] are for this device's first expert, and so on; the
    last slots are empty."""
    swap = functools.partial(jax.lax.all_to_all, axis_name=spread.axes, split_axis=0, concat_axis=0, tiled=True)
    x_dcw, weight_dc = swap(x_dcw), swap(weight_dc)
    place_c = jnp.arange(x_dcw.shape[1])
    # The index of a slot's expert equals the number of experts whose last slot comes before this slot. An empty slot
    # gets index l and is sorted to the end.
    expert_dc = jnp.sum(place_c[:, None] >= jnp.cumsum(size_dl, axis=1)[:, None, :], axis=-1)
    order = jnp.argsort(expert_dc.reshape(-1))
    out = apply(kernels, permuted(x_dcw.reshape(-1, x_dcw.shape[-1]), order), size_dl.sum(0))
    out_dcw = permuted(out, jnp.argsort(order)).reshape(x_dcw.shape)
    return swap((out_dcw.astype(jnp.float32) * weight_dc[..., None]).astype(x_dcw.dtype))

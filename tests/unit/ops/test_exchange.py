"""Experts sharded over devices against the same experts on one device: results and gradients, for any load balance."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from trainer.ops import exchange, experts
from trainer.ops.grouped import grouped_matmul
from trainer.ops.routing import Routing

ROWS, LENGTH, WIDTH, EXPERTS, CHOSEN = 8, 4, 6, 8, 2
RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS, LENGTH, WIDTH)).astype(np.float32)
MATRIX = RNG.normal(size=(EXPERTS, WIDTH, WIDTH)).astype(np.float32)
WEIGHT = RNG.uniform(size=(ROWS, LENGTH, CHOSEN)).astype(np.float32)
ROUTES = {
    "random": np.argsort(RNG.uniform(size=(ROWS, LENGTH, EXPERTS)))[..., :CHOSEN],
    "every token to the experts of one device": np.broadcast_to([5, 4], WEIGHT.shape),
    "two devices get nothing": np.broadcast_to([1, 6], WEIGHT.shape),
}
ROWS_OF = PartitionSpec(("data", "expert"))


def run(kernel, rows, sizes):
    product = jnp.einsum("gnk,gkm->gnm", rows, kernel) if sizes is None else grouped_matmul(rows, kernel, sizes)
    return jnp.tanh(product)


def squares(dispatch, x, weight, kernel, expert):
    found = dispatch(x, Routing(expert, weight), kernel)
    return jnp.sum(found.out**2), found.dropped


def alone(how, *args):
    def dispatch(x, routing, kernel):
        return how(x, routing, functools.partial(run, kernel), EXPERTS)

    return squares(dispatch, *args)


def spread(how, buffer, *args):
    """Computes the same as `alone` on 2 x 4 devices."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "expert"))
    over = exchange.Spread(("expert",), ("data", "expert"), buffer)

    def dispatch(x, routing, kernel):
        if how is experts.dropless:
            return exchange.dropless(x, routing, run, kernel, EXPERTS, over)
        return how(x, routing, exchange.on_owners(functools.partial(run, kernel), over), EXPERTS)

    def local(*args):
        total, dropped = squares(dispatch, *args)
        return jax.lax.psum(total, ("data", "expert")), dropped

    specs = (ROWS_OF, ROWS_OF, PartitionSpec("expert"), ROWS_OF)
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(PartitionSpec(), ROWS_OF), check_vma=False)(*args)


@pytest.mark.parametrize(("capacity", "buffer"), [(False, 1.0), (False, -1.0), (True, -1.0)])
def test_results_and_gradients_are_those_of_one_device(capacity, buffer):
    """With a buffer of 1, a device with 8 choices sends 2 to each device per round, so up to 4 rounds are needed."""

    def jitted(side, *args, rows):
        real = jnp.ones((rows, LENGTH), bool)
        how = functools.partial(experts.within_capacity, real_bt=real, factor=1.0) if capacity else experts.dropless
        return jax.jit(jax.value_and_grad(functools.partial(side, how, *args), (0, 1, 2), has_aux=True))

    one, many = jitted(alone, rows=ROWS), jitted(spread, buffer, rows=1)
    for name, expert in ROUTES.items():
        args = X, WEIGHT, MATRIX, jnp.asarray(expert, jnp.int32)
        (total, dropped), gradients = many(*args)
        (expected, lost), others = one(*args)
        np.testing.assert_allclose(total, expected, rtol=1e-5, err_msg=name)
        np.testing.assert_array_equal(dropped, lost)
        assert (lost.sum() > 0) == capacity
        for found, other in zip(gradients, others, strict=True):
            np.testing.assert_allclose(found, other, atol=2e-5, err_msg=name)


def test_places_of_a_round():
    sizes = [exchange.round_size(choices, 4, buffer) for choices, buffer in ((64, 1), (64, 1.5), (10, 1.26), (64, -1))]
    assert [*sizes, exchange.round_size(64, 4, 100)] == [16, 24, 4, 64, 64]

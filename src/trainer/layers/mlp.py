"""The feed-forward layer."""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from trainer import sharding
from trainer.layers.dense import INPUT, RESIDUAL, ROWS, Dense, product
from trainer.ops.dropout import dropout

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
    "tanh": jnp.tanh,
    "sigmoid": jax.nn.sigmoid,
    "linear": lambda x: x,
}

HIDDEN = sharding.Axes((*ROWS, "activation_mlp"))
# Of the matrices: those that project to hidden units, and the one that projects back.
WI, WO = ("embed", "mlp"), ("mlp", "embed")


class MLP(nnx.Module):
    """The product of `activations`, each of a projection of its own, projected back: with ("silu", "linear") the gated
    unit SwiGLU (Shazeer 2020, arXiv:2002.05202), with one activation the plain MLP.

    The projections are called wi_0, wi_1, ... (wi where there is one) and wo.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        activations: Sequence[str],
        *,
        dropout_rate: float,
        dtype: jnp.dtype,
        weight_dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        dense = functools.partial(Dense, dtype=dtype, weight_dtype=weight_dtype, rngs=rngs)
        self.activations = tuple(activations)
        self.dropout_rate = dropout_rate
        for name in self._projections():
            setattr(self, name, dense([width], [hidden], WI))
        self.wo = dense([hidden], [width], WO)

    def _projections(self) -> list[str]:
        return ["wi"] if len(self.activations) == 1 else [f"wi_{i}" for i in range(len(self.activations))]

    def __call__(self, x_bte: jax.Array, row_b: jax.Array, key: jax.Array | None) -> jax.Array:
        x_bte = sharding.constrain(x_bte, INPUT).astype(self.wo.dtype)
        names = self._projections()
        wis = tuple(getattr(self, name).weights() for name in names)
        units = _Units(self.activations, tuple(f"mlp{name}" for name in names), self.dropout_rate)
        out = _mlp(units, x_bte, wis, self.wo.weights(), row_b, key)
        return checkpoint_name(sharding.constrain(out, RESIDUAL), "mlpwo")


class _Units(NamedTuple):
    """How hidden units are made of projections that are called `names`."""

    activations: tuple[str, ...]
    names: tuple[str, ...]
    dropout_rate: float

    def activate(self, *projected: jax.Array) -> jax.Array:
        """Projections, each [b, t, f] -> hidden units [b, t, f], before dropout."""
        factors = (ACTIVATIONS[name](x) for name, x in zip(self.activations, projected, strict=True))
        return functools.reduce(operator.mul, factors)

    def projection_bars(self, projected: tuple[jax.Array, ...], hidden_bar: jax.Array) -> tuple[jax.Array, ...]:
        """The gradients of `projected`, each [b, t, f], from that of what `activate` makes of them."""
        return jax.vjp(self.activate, *projected)[1](hidden_bar)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mlp(
    units: _Units,
    x_bte: jax.Array,
    wis: tuple[jax.Array, ...],
    wo: jax.Array,
    row_b: jax.Array,
    key: jax.Array | None,
) -> jax.Array:
    """Hidden units from `x_bte` times each of `wis` [e, f], times `wo` [f, e]: [b, t, e].

    Differentiable in reverse mode only, and to be differentiated inside of the same `on_mesh`: the backward pass places
    its gradients by the mesh that is current when it is traced.
    """
    return _mlp_forward(units, x_bte, wis, wo, row_b, key)[0]


def _mlp_forward(units: _Units, x_bte, wis, wo, row_b, key):
    projected = tuple(
        checkpoint_name(sharding.constrain(product(x_bte, 1, wi), HIDDEN), name)
        for name, wi in zip(units.names, wis, strict=True)
    )
    hidden = dropout(units.activate(*projected), key, row_b, units.dropout_rate)
    return product(hidden, 1, wo), (x_bte, wis, wo, projected, row_b, key)


def _mlp_backward(units: _Units, kept, out_bar):
    """One after the other the gradients of `wo`, of the input and of each of `wis`. That of a matrix is summed over
    devices, and placed as the matrix is, before anything goes on.

    The compiler else makes those of all matrices first, beside the gathered matrices that the input's is yet to be
    made with, and holds them whole until the end of the layer (docs/decisions/0009).
    """
    x_bte, wis, wo, projected, row_b, key = kept
    out_bar = sharding.constrain(out_bar, INPUT)  # gathered once for both products with it
    # Linear, entry by entry: its own transpose.
    drop = functools.partial(dropout, key=key, row_b=row_b, rate=units.dropout_rate)

    wo_bar = sharding.constrain(_matrix_bar(drop(units.activate(*projected)), out_bar), WO)
    wo_bar, out_bar, projected = jax.lax.optimization_barrier((wo_bar, out_bar, projected))

    hidden_bar = sharding.constrain(drop(_input_bar(out_bar, wo)), HIDDEN)
    x_bars = map(_input_bar, units.projection_bars(projected, hidden_bar), wis)
    x_bar = sharding.constrain(functools.reduce(operator.add, x_bars), INPUT)

    hidden_bar, projected, x_bar = jax.lax.optimization_barrier((hidden_bar, projected, x_bar))

    wi_bars = []
    for i in range(len(wis)):
        # Made once more, inside of the product: held, each would take as much as a projection.
        projection_bar = units.projection_bars(projected, hidden_bar)[i]
        wi_bar = sharding.constrain(_matrix_bar(x_bte, projection_bar), WI)
        wi_bar, hidden_bar, projected, x_bar = jax.lax.optimization_barrier((wi_bar, hidden_bar, projected, x_bar))
        wi_bars.append(wi_bar)
    return x_bar, tuple(wi_bars), wo_bar, None, None


_mlp.defvjp(_mlp_forward, _mlp_backward)


def _input_bar(out_bar: jax.Array, matrix: jax.Array) -> jax.Array:
    """The gradient [b, t, i] of what was multiplied by `matrix` [i, o], from that of the product [b, t, o]."""
    x = jax.ShapeDtypeStruct((*out_bar.shape[:-1], matrix.shape[0]), out_bar.dtype)
    return jax.linear_transpose(lambda x: product(x, 1, matrix), x)(out_bar)[0]


def _matrix_bar(x: jax.Array, out_bar: jax.Array) -> jax.Array:
    """The gradient [i, o] of the matrix that `x` [b, t, i] was multiplied by, from that of the product [b, t, o]."""
    matrix = jax.ShapeDtypeStruct((x.shape[-1], out_bar.shape[-1]), x.dtype)
    return jax.linear_transpose(lambda matrix: product(x, 1, matrix), matrix)(out_bar)[0]

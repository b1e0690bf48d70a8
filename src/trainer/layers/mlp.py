"""The feed-forward layer."""

import functools
import operator
from collections.abc import Callable, Collection, Iterable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from trainer import sharding
from trainer.config.capabilities.layer_keys import ACTIVATIONS as NAMES
from trainer.layers.dense import INPUT, RESIDUAL, ROWS, dense_maker
from trainer.ops.dropout import dropout
from trainer.products.context import Context

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    name: (lambda x: x) if name == "linear" else getattr(jax.nn, name) for name in NAMES
}

# Computes the hidden units from the results of the input projections, one argument each.
Combine = Callable[..., jax.Array]


def hidden_units(projected: Iterable[jax.Array], activations: Sequence[str], combine: Combine | None) -> jax.Array:
    """Returns `combine(*projected)`; if `combine` is None, the product of the activated projections."""
    if combine is not None:
        return combine(*projected)
    factors = [ACTIVATIONS[name](x) for name, x in zip(activations, projected, strict=True)]
    return functools.reduce(operator.mul, factors)


HIDDEN = sharding.Axes((*ROWS, "activation_mlp"))


class MLP(nnx.Module):
    """Projects the input once per activation in `activations`, applies each activation to its projection, multiplies
    the results elementwise, and projects back to the input's width: [b, t, width] -> [b, t, width].

    ("silu", "linear") is the gated unit SwiGLU (Shazeer 2020, arXiv:2002.05202). A single activation is the plain MLP.

    The input projections are named wi_0, wi_1, ... (wi if there is only one), the output projection wo, and the
    optional norm of the input mlp_layer_norm.
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
        bias: bool | Collection[str] = False,
        norm: nnx.Module | None = None,
        combine: Combine | None = None,
        rngs: nnx.Rngs,
    ):
        """`bias`: whether all projections have a bias, or the names of the projections with a bias. `norm`: the norm of
        the input. `combine`: if given, it computes the hidden units, and only the length of `activations` is used, as
        the number of projections."""

        dense = dense_maker(bias, dtype=dtype, weight_dtype=weight_dtype, rngs=rngs)
        self.combine = combine
        self.mlp_layer_norm = norm
        self.activations = tuple(activations)
        self.dropout_rate = dropout_rate
        for name in self._projections():
            setattr(self, name, dense(name, [width], [hidden], ("embed", "mlp")))
        self.wo = dense("wo", [hidden], [width], ("mlp", "embed"))

    def _projections(self) -> list[str]:
        return ["wi"] if len(self.activations) == 1 else [f"wi_{i}" for i in range(len(self.activations))]

    def __call__(self, x_bte: jax.Array, context: Context) -> jax.Array:
        if self.mlp_layer_norm is not None:
            x_bte = self.mlp_layer_norm(x_bte)
        x_bte = sharding.constrain(x_bte, INPUT)
        names = self._projections()
        projected = (checkpoint_name(getattr(self, name)(x_bte, HIDDEN, context), f"mlp{name}") for name in names)
        hidden = hidden_units(projected, self.activations, self.combine)
        hidden = dropout(hidden, context.key, context.rows, self.dropout_rate)
        return checkpoint_name(self.wo(hidden, RESIDUAL, context), "mlpwo")

"""Linear maps and the embedding table."""

from collections.abc import Sequence
from math import prod

import jax
import jax.numpy as jnp
from flax import nnx

from trainer import sharding
from trainer.layers.param import param
from trainer.products import MakeProduct, plain

ROWS = sharding.Axes(("activation_batch", "activation_length"))
# The input of layers with weights, with complete rows, and the residual stream between layers.
INPUT = sharding.Axes((*ROWS, "activation_embed"))
RESIDUAL = sharding.Axes(("activation_batch", "activation_norm_length", "activation_embed"))


class Dense(nnx.Module):
    """A linear map from the last `len(in_shape)` axes of its input to `out_shape`, without a bias.

    Initial weights: normal, truncated at two standard deviations, variance 1 / fan-in (LeCun et al. 1998).
    """

    def __init__(
        self,
        in_shape: Sequence[int],
        out_shape: Sequence[int],
        names: Sequence[str | None],
        *,
        dtype: jnp.dtype,
        weight_dtype: jnp.dtype,
        settles: bool = False,
        make_product: MakeProduct = plain,
        rngs: nnx.Rngs,
    ):
        """`names`: the logical name of each axis of the kernel, first the inputs', then the outputs'. `settles`: its
        gradient is reduced over devices immediately (`sharding.settle_gradient`)."""
        self.inputs = len(in_shape)
        self.settled_names = tuple(names) if settles else None
        self.dtype = dtype
        init = jax.nn.initializers.lecun_normal()
        # The initializer takes fan-in from the last axis but one: draw a matrix, then shape it.
        kernel = init(rngs.params(), (prod(in_shape), prod(out_shape)), weight_dtype)
        self.kernel = param(kernel.reshape(*in_shape, *out_shape), names)
        self.product = make_product(in_shape, out_shape, names, rngs=rngs)

    def __call__(self, x: jax.Array, out_names: Sequence[str | None]) -> jax.Array:
        """x [..., *in_shape] -> [..., *out_shape], its axes called `out_names`."""
        kernel = self.kernel[...]
        if self.settled_names is not None:
            outputs = self.settled_names[self.inputs :]
            gathered, rows = (*[None] * self.inputs, *outputs), out_names[: -len(outputs)]
            kernel = kernel.astype(self.dtype)
            x, kernel = sharding.settle_gradient(x, kernel, self.settled_names, gathered, rows)
        return sharding.constrain(self.product(x.astype(self.dtype), self.inputs, kernel), out_names)


TABLE = sharding.Axes(("vocab", "embed"))


class Embed(nnx.Module):
    """The embedding table [vocab, embed]; initial entries are standard normal."""

    def __init__(
        self,
        vocab: int,
        width: int,
        *,
        dtype: jnp.dtype,
        weight_dtype: jnp.dtype,
        make_product: MakeProduct = plain,
        rngs: nnx.Rngs,
    ):
        """`make_product`: of the head, if the table is also the head (`attend`)."""
        self.dtype = dtype
        table = jax.random.normal(rngs.params(), (vocab, width), weight_dtype)
        self.embedding = param(table, TABLE)
        self.product = make_product([width], [vocab], TABLE[::-1], rngs=rngs)

    def __call__(self, id_bt: jax.Array) -> jax.Array:
        """The rows of the table for `id_bt`: [b, t, e]."""
        return sharding.take(self.embedding[...], id_bt, RESIDUAL, self.dtype, TABLE)

    def attend(self, x_bte: jax.Array) -> jax.Array:
        """Logits [b, t, v]: products of `x_bte` with every row of the table."""
        table = self.embedding[...].astype(self.dtype)
        x_bte, table = sharding.settle_gradient(x_bte, table, TABLE, (TABLE[0], None), ROWS)
        return sharding.constrain(self.product(x_bte.astype(self.dtype), 1, table.T), (*ROWS, "activation_vocab"))

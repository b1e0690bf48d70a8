"""Linear maps and the embedding table."""

import functools
from collections.abc import Callable, Collection, Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from trainer import sharding
from trainer.config.errors import UserError
from trainer.layers.matrices import WithMatrices
from trainer.layers.param import EXACT, lecun_normal, param
from trainer.products.context import Context
from trainer.products.plain import EarlyReduction, Kernel, Product, product, stored

ROWS = sharding.Axes(("activation_batch", "activation_length"))
# INPUT: the axes of the input of a layer with matrices. RESIDUAL: the axes of the activations between layers, where a
# row's tokens can be sharded over further mesh axes.
INPUT = sharding.Axes((*ROWS, "activation_embed"))
RESIDUAL = sharding.Axes(("activation_batch", "activation_norm_length", "activation_embed"))


class Dense(WithMatrices):
    """A linear map from the last `len(in_shape)` axes of its input to `out_shape`.

    Weights are initialized from a normal distribution, truncated at two standard deviations, with variance 1 / fan-in
    (LeCun et al. 1998). A bias is initialized to zero.
    """

    def __init__(
        self,
        in_shape: Sequence[int],
        out_shape: Sequence[int],
        names: Sequence[str | None],
        *,
        dtype: jnp.dtype,
        weight_dtype: jnp.dtype,
        bias: bool = False,
        reduces_early: bool = False,
        rngs: nnx.Rngs,
    ):
        """`names`: the logical name of each axis of the kernel, inputs before outputs. `bias`: whether to add a bias of
        shape `out_shape`. `reduces_early`: whether to reduce the kernel's gradient over devices immediately
        (`sharding.reduce_gradient_early`)."""
        self.inputs = len(in_shape)
        self.names, self.reduces_early = tuple(names), reduces_early
        self.dtype = dtype
        # The initializer uses the second-to-last axis as fan-in, so draw a matrix and reshape it.
        kernel = lecun_normal(rngs.params(), (prod(in_shape), prod(out_shape)), weight_dtype)
        self.kernel = param(kernel.reshape(*in_shape, *out_shape), names)
        if bias:
            self.bias: nnx.Variable = param(jnp.zeros(out_shape, EXACT), names[len(in_shape) :])
        self.adds_bias = bias
        self.product: Product = product

    def kernels(self) -> dict[str, Kernel]:
        shape = self.kernel.get_value().shape
        return {"kernel": Kernel(shape[: self.inputs], shape[self.inputs :], self.names)}

    def use(self, name: str, product: Any) -> None:
        self.product = product  # the assignment unwraps `nnx.data`
        self.kernel.set_value(stored(self.product, self.kernel.get_value()))

    def matrix(self, dtype: jnp.dtype) -> jax.Array | None:
        """Returns the kernel in `dtype`, [*in, *out]; None if the product cannot return it as an array."""
        kernel = self.kernel.get_value()
        if self.product is product:
            return kernel.astype(dtype)
        return self.product.array(kernel, dtype) if hasattr(self.product, "array") else None

    def __call__(self, x: jax.Array, out_names: Sequence[str | None], context: Context | None = None) -> jax.Array:
        """Maps x [..., *in_shape] to [..., *out_shape] with the logical axes `out_names`. `context`: passed to the
        product."""
        early: EarlyReduction | None = None
        inputs, outputs = self.names[: self.inputs], self.names[self.inputs :]
        if self.reduces_early:
            gathered, rows = (*[None] * self.inputs, *outputs), out_names[: -len(outputs)]
            early = functools.partial(sharding.reduce_gradient_early, names=self.names, gathered=gathered, rows=rows)
        rows = ROWS if x.ndim - self.inputs == 2 else out_names[: -len(outputs)]
        x = sharding.for_product(x.astype(self.dtype), rows, inputs)
        out = self.product(x, self.inputs, self.kernel.get_value(), early, context)
        out = sharding.for_product(out, rows, outputs)
        if self.adds_bias:
            # In float32, because the gradient of the bias is summed over rows in the dtype of this addition.
            out = (out.astype(jnp.float32) + self.bias.get_value()).astype(out.dtype)
        return sharding.constrain(out, out_names)


def dense_maker(bias: bool | Collection[str], **settings: Any) -> Callable[..., Dense]:
    """Returns `make(name, in_shape, out_shape, names)`, which makes a projection with the given `settings`.

    `bias`: whether all projections have a bias, or the names of the projections with a bias.
    """

    def make(name: str, in_shape: Sequence[int], out_shape: Sequence[int], names: Sequence[str]) -> Dense:
        return Dense(in_shape, out_shape, names, bias=bias if isinstance(bias, bool) else name in bias, **settings)

    return make


TABLE = sharding.Axes(("vocab", "embed"))


class Embed(WithMatrices):
    """The embedding table [vocab, embed]. Initially, looked-up rows are standard normal.

    The table must be an array, because lookups, unlike products, cannot read a quantized format. A tied head (`attend`)
    converts the table to the storage format of the head's product in each call.
    """

    def __init__(
        self,
        vocab: int,
        width: int,
        *,
        dtype: jnp.dtype,
        weight_dtype: jnp.dtype,
        scale: float = 1.0,
        rngs: nnx.Rngs,
    ):
        """`scale`: the factor on looked-up rows."""
        self.dtype, self.scale = dtype, scale
        table = jax.random.normal(rngs.params(), (vocab, width), weight_dtype)
        self.embedding = param(table if scale == 1 else table / scale, TABLE)
        self.product: Product = product  # the head's product, if the table is also the head (`attend`)

    def kernels(self) -> dict[str, Kernel]:
        vocab, width = self.embedding.get_value().shape
        return {"embedding": Kernel((width,), (vocab,), TABLE[::-1])}

    def use(self, name: str, product: Any) -> None:
        """Sets the product of a tied head. The table stays an array."""
        self.product = product

    def __call__(self, id_bt: jax.Array) -> jax.Array:
        """Returns the rows of the table for `id_bt`, multiplied by `scale` in the rows' dtype: [b, t, e]. `id_bt` may
        have further leading axes."""
        names = (*(None,) * (id_bt.ndim - 2), *RESIDUAL)
        rows = sharding.take(self._table(), id_bt, names, self.dtype, TABLE)
        return rows if self.scale == 1 else rows * jnp.asarray(self.scale, self.dtype)

    def attend(self, x_bte: jax.Array) -> jax.Array:
        """Returns logits [b, t, v]: products of `x_bte` with every row of the table."""

        def reduce_early(x_bte: jax.Array, table: jax.Array) -> tuple[jax.Array, jax.Array]:
            # Reduce the gradient in the table's layout [v, e]: with [e, v], a step on v5e-4 accesses 18 % more bytes.
            return sharding.reduce_gradient_early(x_bte, table, TABLE, (TABLE[0], None), ROWS)

        def of_transposed(x_bte: jax.Array, transposed_ev: jax.Array) -> tuple[jax.Array, jax.Array]:
            x_bte, table = reduce_early(x_bte, transposed_ev.T)
            return x_bte, table.T

        x_bte = sharding.for_product(x_bte.astype(self.dtype), ROWS, TABLE[1:])
        if self.product is product:
            logits = product(x_bte, 1, self._table(), reduce_early, transposed=True)
        else:
            logits = self.product(x_bte, 1, stored(self.product, self._table().T), of_transposed, None)
        logits = sharding.for_product(logits, ROWS, TABLE[:1])
        return sharding.constrain(logits, (*ROWS, "activation_vocab"))

    def _table(self) -> Any:
        table = self.embedding.get_value()
        if not isinstance(table, jax.Array | np.ndarray):
            raise UserError(
                f"token_embedder/embedding is stored as {type(table).__name__}, but rows can only be looked up in an "
                "array; keep the table as an array: the product of a tied head may still quantize it in each call, and "
                "with logits_via_embedding=false the head has a separate matrix"
            )
        return table


class PositionEmbed(nnx.Module):
    """A learned position embedding: a table [length, embed]. Initial entries are standard normal."""

    def __init__(self, length: int, width: int, *, dtype: jnp.dtype, weight_dtype: jnp.dtype, rngs: nnx.Rngs):
        """`length`: the number of positions."""
        self.dtype = dtype
        self.embedding = param(jax.random.normal(rngs.params(), (length, width), weight_dtype), TABLE)

    def __call__(self, position_bt: jax.Array) -> jax.Array:
        """Returns the rows of the table for `position_bt`: [b, t, e]."""
        return sharding.take(self.embedding.get_value(), position_bt, RESIDUAL, self.dtype, TABLE)

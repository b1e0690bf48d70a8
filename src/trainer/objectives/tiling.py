"""Computes a function of hidden states without storing the logits of all tokens at once.

Shapes: b rows, t tokens of a row, e the width of hidden states; n tiles of c tokens on each device.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from trainer import sharding
from trainer.layers.dense import INPUT, ROWS
from trainer.ops.inexact import inexact
from trainer.products.plain import in_dtype

Path = tuple[str, ...]
PerToken = Callable[..., Any]

_OVER = ("activation_batch", "activation_length")  # the logical axes whose mesh axes shard the tokens
_SAME = sharding.Axes(())  # replicated over the mesh axes of _OVER


@dataclass(frozen=True, eq=False)
class Tiling:
    """How the tokens of a device are split into tiles, and which parameters form the output head.

    Attributes:
      tiles: the number of tiles, which divides the number of tokens of a device.
      matrix: the canonical path of the head's matrix. Parameters stored next to the matrix are also part of the head.
      param_axes: the logical axes of the model's parameters.
      dtype: the dtype in which the head multiplies by its matrix.
    """

    tiles: int
    matrix: Path
    param_axes: Any
    dtype: jnp.dtype


def in_tiles(
    fn: PerToken,
    tiling: Tiling,
    params: Any,
    rest: Any,
    hidden_bte: jax.Array,
    tokens: Any,
    others: Sequence[tuple[Tiling, Any, Any]] = (),
) -> Any:
    """Returns `fn(params, rest, hidden_bte, tokens, *others)`, a pytree of arrays [b, t, ...], computed tile by tile.

    Of each model's `params` and `rest`, `fn` must read only the output head. It must compute each token independently.
    A custom VJP (docs/decisions/0014) computes gradients with respect to the head's parameters and `hidden_bte`. It
    saves only its arguments, and its backward pass calls `fn` again for each tile. Each device sums the head's gradient
    over its tiles in float32. One all-reduce after the last tile adds the devices' sums. Forward-mode differentiation
    is not supported.

    Args:
      tokens: a pytree of arrays [b, t, ...] without gradient.
      others: further models whose heads `fn` reads, without gradients. Each is (tiling, params, rest); `fn` receives
        (params, rest) of each.
    """
    tiled = _Tiled(fn, tiling, [_Head(tiling, params, rest), *(_Head(*other) for other in others)])

    @jax.custom_vjp
    def call(head: Any, hidden: jax.Array, buffers: Any, tokens: Any) -> Any:
        return tiled.forward(head, hidden, buffers, tokens)

    def forward(*args: Any) -> Any:
        return tiled.forward(*args), args

    def backward(args: Any, grads: Any) -> Any:
        return *tiled.backward(args, grads), None, None

    call.defvjp(forward, backward)
    (head, rest), *fixed = (
        one.parts(*weights)
        for one, weights in zip(tiled.heads, [(params, rest), *(o[1:] for o in others)], strict=True)
    )
    return call(head, hidden_bte, (rest, fixed), tokens)


class _Head:
    """The output head of a model: the part of its weights that a tile reads."""

    def __init__(self, tiling: Tiling, params: Any, rest: Any):
        """Keeps only the shapes and dtypes of `params` and `rest`."""
        self.params, self.rest = _abstract(params), _abstract(rest)
        self.path, self.matrix, self.dtype = tiling.matrix[:-1], tiling.matrix[-1], tiling.dtype
        self.names = _at(tiling.param_axes, self.path)

    def parts(self, params: Any, rest: Any) -> tuple[Any, Any]:
        """Returns the head's parameters, and its buffers, which have no gradients."""
        return _at(params, self.path), _at(rest, self.path)

    def whole(self, head: Any, buffers: Any) -> tuple[Any, Any]:
        """Returns (params, rest) with the given head and buffers; all other leaves are abstract."""
        return _with(self.params, self.path, head), _with(self.rest, self.path, buffers)

    def in_dtype(self, head: Any) -> Any:
        # Casting a float32 matrix to bfloat16 before the all-gather halves the transferred bytes.
        return head | {self.matrix: in_dtype(head[self.matrix], self.dtype)}

    def constrained(self, head: Any) -> Any:
        return jax.tree.map(lambda names, leaf: _if_any(sharding.constrain, leaf, names), self.names, head)


class _Tiled:
    """The forward and backward pass. `head`: the trained head's parameters; `buffers`: its buffers, and the parts of
    the other heads."""

    def __init__(self, fn: PerToken, tiling: Tiling, heads: Sequence[_Head]):
        self.fn, self.tiling, self.heads = fn, tiling, heads
        self.same_mesh = sharding.same_mesh()

    def forward(self, head: Any, hidden_bte: jax.Array, buffers: Any, tokens: Any) -> Any:
        """Returns the values of all tokens."""
        run = sharding.shard_mapped(self._forward, (_SAME, INPUT, _SAME, ROWS), ROWS, over=_OVER, check=False)
        return run(*self._in_dtype(head, hidden_bte, buffers), tokens)

    def backward(self, args: Any, grads: Any) -> tuple[Any, jax.Array]:
        """Returns gradients of the head and the hidden states, from `forward`'s arguments and the values' gradients."""
        head, hidden_bte, buffers, tokens = args
        with self.same_mesh():  # JAX traces the backward pass later, outside of the caller's mesh
            run = sharding.shard_mapped(
                self._backward, (_SAME, INPUT, _SAME, ROWS, ROWS), (_SAME, INPUT), over=_OVER, check=False
            )
            sums, hidden_grad = run(*self._in_dtype(head, hidden_bte, buffers), tokens, inexact(grads)[0])
            # Without the barrier, the compiler delays the reduction over devices and keeps each device's sums in memory
            # throughout the backward pass.
            sums, hidden_grad = jax.lax.optimization_barrier((self.heads[0].constrained(sums), hidden_grad))
        return jax.tree.map(lambda leaf, total: _if_any(lambda x: x.astype(leaf.dtype), total), head, sums), hidden_grad

    def _in_dtype(self, head: Any, hidden_bte: jax.Array, buffers: Any) -> tuple[Any, jax.Array, Any]:
        own, fixed = buffers
        cast = [(other.in_dtype(part), rest) for other, (part, rest) in zip(self.heads[1:], fixed, strict=True)]
        return self.heads[0].in_dtype(head), hidden_bte, (own, cast)

    def _forward(self, head: Any, hidden_bte: jax.Array, buffers: Any, tokens: Any) -> Any:
        """Runs on each device for the device's tokens."""
        head, buffers, tiles = *self._constrained(head, buffers), self._cut(hidden_bte, tokens)
        values = jax.lax.map(lambda tile: self._values(head, buffers, *tile), tiles)
        return jax.tree.map(lambda value: value.reshape(*hidden_bte.shape[:2], *value.shape[2:]), values)

    def _backward(self, head: Any, hidden_bte: jax.Array, buffers: Any, tokens: Any, grads: Any) -> Any:
        """Runs on each device for the device's tokens, then sums the head's gradient over devices."""
        head, buffers = self._constrained(head, buffers)
        trained, join = inexact(head)

        def add(sums: Any, tile: Any) -> tuple[Any, jax.Array]:
            hidden_ce, tokens, grads = tile

            def values(trained: Any, hidden_ce: jax.Array) -> Any:
                return inexact(self._values(join(trained), buffers, hidden_ce, tokens))[0]

            _, pull = jax.vjp(values, trained, hidden_ce)
            head_grad, hidden_grad = pull(grads)
            head_grad = join(head_grad, None)
            return jax.tree.map(lambda total, grad: total + grad.astype(total.dtype), sums, head_grad), hidden_grad

        zeros = join([jnp.zeros(leaf.shape, jnp.float32) for leaf in trained], None)
        tiles = (*self._cut(hidden_bte, tokens), self._cut_all(grads))
        sums, hidden_grad = jax.lax.scan(add, self.heads[0].constrained(zeros), tiles)
        # XLA's CPU compiler fails at an all-reduce over one device.
        axes = dict.fromkeys(it for name in _OVER for it in sharding.mesh_axes(name) if jax.lax.axis_size(it) > 1)
        return jax.lax.psum(sums, tuple(axes)), hidden_grad.reshape(hidden_bte.shape)

    def _values(self, head: Any, buffers: Any, hidden_ce: jax.Array, tokens: Any) -> Any:
        """Returns the values of one tile, arrays [c]."""
        own, fixed = buffers
        params, rest = self.heads[0].whole(head, own)
        others = (other.whole(*parts) for other, parts in zip(self.heads[1:], fixed, strict=True))
        row = jax.tree.map(lambda leaf: leaf[None], tokens)
        return jax.tree.map(lambda value: value[0], self.fn(params, rest, hidden_ce[None], row, *others))

    def _constrained(self, head: Any, buffers: Any) -> tuple[Any, Any]:
        own, fixed = buffers
        others = [(other.constrained(part), rest) for other, (part, rest) in zip(self.heads[1:], fixed, strict=True)]
        return self.heads[0].constrained(head), (own, others)

    def _cut(self, hidden_bte: jax.Array, tokens: Any) -> tuple[jax.Array, Any]:
        return self._cut_all((sharding.constrain(hidden_bte, INPUT), tokens))

    def _cut_all(self, arrays: Any) -> Any:
        """Reshapes arrays [b, t, ...] to [n, c, ...]."""
        tiles = self.tiling.tiles
        return jax.tree.map(lambda x: x.reshape(tiles, x.shape[0] * x.shape[1] // tiles, *x.shape[2:]), arrays)


def _if_any(fn: Callable[..., jax.Array], leaf: jax.Array | None, *args: Any) -> jax.Array | None:
    """Returns `fn(leaf, *args)`; None if `leaf` is None, as the gradients of integer arrays are."""
    return None if leaf is None else fn(leaf, *args)


def _abstract(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def _at(tree: Any, path: Path) -> Any:
    """Returns the subtree of a nested dict at `path`; {} if it is missing."""
    for name in path:
        tree = tree.get(name, {})
    return tree


def _with(tree: Mapping[str, Any], path: Path, subtree: Any) -> Any:
    """Returns `tree` with `subtree` at `path`; `tree` itself if `subtree` is empty."""
    if not path or not subtree:
        return subtree or tree
    return {**tree, path[0]: _with(tree.get(path[0], {}), path[1:], subtree)}

"""Computes a function of hidden states without storing the logits of all tokens at once.

Shapes: b rows, t tokens of a row, e width; n tiles of c tokens on each device.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from trainer import sharding
from trainer.layers.dense import INPUT, ROWS
from trainer.ops.inexact import inexact
from trainer.products.plain import in_dtype

Path = tuple[str, ...]
PerToken = Callable[[Any, Any, jax.Array, jax.Array], Any]

_OVER = ("activation_batch", "activation_length")  # the logical axes whose mesh axes shard the tokens
_SAME = sharding.Axes(())  # replicated over the mesh axes of _OVER


@dataclass(frozen=True, eq=False)
class Tiling:
    """How the tokens of a device are split into tiles, and which parameters form the output head.

    Attributes:
      tiles: the number of tiles, which divides the number of tokens of a device.
      matrix: canonical path of the head's matrix. Parameters stored next to the matrix are also part of the head.
      param_axes: the logical axes of the model's parameters.
      dtype: the dtype of the head's product.
    """

    tiles: int
    matrix: Path
    param_axes: Any
    dtype: jnp.dtype


def in_tiles(fn: PerToken, tiling: Tiling, params: Any, rest: Any, hidden_bte: jax.Array, target_bt: jax.Array) -> Any:
    """Returns `fn(params, rest, hidden_bte, target_bt)`, a pytree of arrays [b, t], computed tile by tile.

    `fn` must read only the output head's part of `params` and `rest`, and compute each token independently. A custom
    VJP (docs/decisions/0014) computes gradients with respect to the head's parameters and `hidden_bte`. It saves only
    these two, and its backward pass calls `fn` again for each tile. Each device sums the head's gradient over its tiles
    in float32. One all-reduce after the last tile adds the devices' sums. Supports reverse mode only.
    """
    path = tiling.matrix[:-1]
    tiled = _Tiled(fn, tiling, _abstract(params), _abstract(rest))

    @jax.custom_vjp
    def call(head: Any, hidden: jax.Array, buffers: Any, target: jax.Array) -> Any:
        return tiled.forward(head, hidden, buffers, target)

    def forward(*args: Any) -> Any:
        return tiled.forward(*args), args

    def backward(args: Any, grads: Any) -> Any:
        return *tiled.backward(args, grads), None, None

    call.defvjp(forward, backward)
    return call(_at(params, path), hidden_bte, _at(rest, path), target_bt)


class _Tiled:
    """The forward and backward pass. `head` is the tree of the head's parameters; `buffers` have no gradients."""

    def __init__(self, fn: PerToken, tiling: Tiling, params: Any, rest: Any):
        """`params` and `rest` supply the shapes of the parts that `fn` does not read."""
        self.fn, self.tiling, self.params, self.rest = fn, tiling, params, rest
        self.path, self.matrix = tiling.matrix[:-1], tiling.matrix[-1]
        self.names = _at(tiling.param_axes, self.path)
        self.same_mesh = sharding.same_mesh()

    def forward(self, head: Any, hidden_bte: jax.Array, buffers: Any, target_bt: jax.Array) -> Any:
        """Returns the values of all tokens."""
        run = sharding.shard_mapped(self._forward, (_SAME, INPUT, _SAME, ROWS), ROWS, over=_OVER, check=False)
        return run(self._in_dtype(head), hidden_bte, buffers, target_bt)

    def backward(self, args: Any, grads: Any) -> tuple[Any, jax.Array]:
        """Returns gradients of the head and the hidden states, from `forward`'s arguments and the values' gradients."""
        head, *others = args
        with self.same_mesh():  # JAX traces the backward pass later
            run = sharding.shard_mapped(
                self._backward, (_SAME, INPUT, _SAME, ROWS, ROWS), (_SAME, INPUT), over=_OVER, check=False
            )
            sums, hidden_grad = run(self._in_dtype(head), *others, inexact(grads)[0])
            # Without the barrier the compiler reduces over devices late and keeps the sums in memory through the
            # backward pass.
            sums, hidden_grad = jax.lax.optimization_barrier((self._constrained(sums), hidden_grad))
        return jax.tree.map(lambda leaf, total: _if_any(lambda x: x.astype(leaf.dtype), total), head, sums), hidden_grad

    def _in_dtype(self, head: Any) -> Any:
        # Cast before the all-gather, which halves the bytes of a float32 matrix under bfloat16.
        return head | {self.matrix: in_dtype(head[self.matrix], self.tiling.dtype)}

    def _forward(self, head: Any, hidden_bte: jax.Array, buffers: Any, target_bt: jax.Array) -> Any:
        """Runs on one device, for its tokens."""
        head, tiles = self._constrained(head), self._cut(hidden_bte, target_bt)
        values = jax.lax.map(lambda tile: self._values(head, buffers, *tile), tiles)
        return jax.tree.map(lambda value: value.reshape(target_bt.shape), values)

    def _backward(self, head: Any, hidden_bte: jax.Array, buffers: Any, target_bt: jax.Array, grads: Any) -> Any:
        """Runs on one device, for its tokens. Then sums the head's gradient over devices."""
        trained, join = inexact(self._constrained(head))

        def add(sums: Any, tile: Any) -> tuple[Any, jax.Array]:
            hidden_ce, target_c, grads = tile

            def values(trained: Any, hidden_ce: jax.Array) -> Any:
                return inexact(self._values(join(trained), buffers, hidden_ce, target_c))[0]

            _, pull = jax.vjp(values, trained, hidden_ce)
            head_grad, hidden_grad = pull(grads)
            head_grad = join(head_grad, None)
            return jax.tree.map(lambda total, grad: total + grad.astype(total.dtype), sums, head_grad), hidden_grad

        zeros = join([jnp.zeros(leaf.shape, jnp.float32) for leaf in trained], None)
        tiles = (*self._cut(hidden_bte, target_bt), self._cut_all(grads))
        sums, hidden_grad = jax.lax.scan(add, self._constrained(zeros), tiles)
        axes = tuple(dict.fromkeys(axis for name in _OVER for axis in sharding.mesh_axes(name)))
        return jax.lax.psum(sums, axes), hidden_grad.reshape(hidden_bte.shape)

    def _values(self, head: Any, buffers: Any, hidden_ce: jax.Array, target_c: jax.Array) -> Any:
        """Returns the values of one tile, arrays [c]."""
        params, rest = _with(self.params, self.path, head), _with(self.rest, self.path, buffers)
        return jax.tree.map(lambda value: value[0], self.fn(params, rest, hidden_ce[None], target_c[None]))

    def _constrained(self, head: Any) -> Any:
        return jax.tree.map(lambda names, leaf: _if_any(sharding.constrain, leaf, names), self.names, head)

    def _cut(self, hidden_bte: jax.Array, target_bt: jax.Array) -> tuple[jax.Array, jax.Array]:
        return self._cut_all((sharding.constrain(hidden_bte, INPUT), target_bt))

    def _cut_all(self, arrays: Any) -> Any:
        """Reshapes arrays [b, t, ...] to [n, c, ...]."""
        tiles = self.tiling.tiles
        return jax.tree.map(lambda x: x.reshape(tiles, x.shape[0] * x.shape[1] // tiles, *x.shape[2:]), arrays)


def _if_any(fn: Callable[..., jax.Array], leaf: jax.Array | None, *args: Any) -> jax.Array | None:
    """Returns `fn(leaf, *args)`; None for None, the gradient of integers."""
    return None if leaf is None else fn(leaf, *args)


def _abstract(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def _at(tree: Any, path: Path) -> Any:
    """Returns the subtree of a nested dict at `path`; {} if there is none."""
    for name in path:
        tree = tree.get(name, {})
    return tree


def _with(tree: Mapping[str, Any], path: Path, subtree: Any) -> Any:
    """Returns `tree` with `subtree` at `path`; `tree` itself if `subtree` is empty."""
    if not path or not subtree:
        return subtree or tree
    return {**tree, path[0]: _with(tree.get(path[0], {}), path[1:], subtree)}

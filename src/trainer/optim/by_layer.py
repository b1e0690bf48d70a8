"""Applies an optimizer that works on whole arrays to each layer of a stacked array separately."""

from collections.abc import Iterator
from typing import Any

import jax
import optax
from jax.tree_util import tree_map_with_path

from trainer.ops.paths import by_name, name_of
from trainer.sharding import leading


def by_layer(tx: optax.GradientTransformation, param_axes: Any) -> optax.GradientTransformation:
    """Returns `tx`, applied to each layer of a stacked parameter separately, as if layers were separate arrays.

    `tx` must treat parameters independently of each other. In the state of `tx`, the arrays for a parameter must have
    names that end with the parameter's name.

    Args:
      param_axes: the logical axes of every parameter. The leading axes of a stacked parameter stack layers.
    """
    stacked = {name: leading(axes) for name, axes in by_name(param_axes).items() if leading(axes)}

    def init(params: Any) -> Any:
        fn = tx.init
        for of_params, of_state in maps(params):
            fn = jax.vmap(fn, (of_params,), of_state)
        return fn(params)

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        fn = tx.update
        for of_params, of_state in maps(params):
            fn = jax.vmap(fn, (of_params, of_state, of_params), (of_params, of_state))
        return fn(grads, state, params)

    def maps(params: Any) -> Iterator[tuple[Any, Any]]:
        """Yields the axes for each `jax.vmap`, as a tree for the parameters and a tree for the state: 0 at the leaves
        to map, None at the others. Stacks with leading axes of the same sizes share one `jax.vmap` per leading axis."""
        layers = {name: leaf.shape[: stacked[name]] for name, leaf in by_name(params).items() if name in stacked}

        def single(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape[stacked.get(name_of(path), 0) :], leaf.dtype)

        state = jax.eval_shape(tx.init, tree_map_with_path(single, params))

        def owner(path: Any) -> str | None:
            names = (name_of(path[start:]) for start in range(len(path)))
            return next((name for name in names if name in layers), None)

        for sizes in sorted(set(layers.values())):
            here = {name for name, n in layers.items() if n == sizes}
            axes = (
                tree_map_with_path(lambda path, _, here=here: 0 if name_of(path) in here else None, params),
                tree_map_with_path(lambda path, _, here=here: 0 if owner(path) in here else None, state),
            )
            yield from [axes] * len(sizes)

    return optax.GradientTransformation(init, update)

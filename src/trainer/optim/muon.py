"""Muon for matrices, AdamW for all other parameters."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers

from trainer.ops.paths import by_name, name_of
from trainer.optim.adamw import nadamw
from trainer.optim.axes import matrix_axes
from trainer.optim.keys import Given, from_names
from trainer.sharding import STAGES

NS_STEPS = 5  # Newton-Schulz iterations

Dimensions = Callable[[Any], Any]  # maps a tree of params to a tree of MuonDimensionNumbers


def muon(keys: Any, given: Given) -> optax.GradientTransformation:
    """Returns Muon: momentum orthogonalized by Newton-Schulz iterations, with decoupled weight decay (Jordan 2024,
    https://kellerjordan.github.io/posts/muon), as in `optax.contrib.muon`.

    Parameters that are not matrices inside the model (`optim.axes.matrix_axes`) get `nadamw`, because optax, and
    therefore MaxText, uses Nesterov momentum for both groups of parameters. Both groups have the same learning rate.
    Unlike optax, this function supports a choice of the iterations' dtype, and weight decay masks for both groups.
    """
    dims_of = by_name(dimension_numbers(given.param_axes), is_leaf=_is_dims)
    dims = from_names(dims_of.__getitem__)
    matrices = optax.chain(
        bias_corrected_nesterov(keys.muon_beta, jnp.dtype(keys.mu_dtype)),
        stages_first(given.param_axes, orthogonalized(dims, jnp.dtype(keys.muon_newton_schulz_dtype), keys.adam_eps)),
        scaled_by_shape(dims, keys.muon_consistent_rms),
        optax.add_decayed_weights(keys.muon_weight_decay, given.decayed),
        optax.scale_by_learning_rate(given.schedule),
    )
    labels = from_names(lambda name: "nadamw" if dims_of[name] is None else "muon")
    return optax.partition({"muon": matrices, "nadamw": nadamw(keys, given)}, labels)


def dimension_numbers(param_axes: Any) -> Any:
    """Returns, for each parameter, its input and output axes as a matrix, or None if Muon does not update it.

    The result depends only on logical axes (`optim.axes.matrix_axes`). A parameter's other axes stack matrices, and
    each matrix is orthogonalized separately.

    Args:
      param_axes: a tree with the logical axes of a parameter, `sharding.Axes`, at each leaf.
    """

    def one(names: Any) -> MuonDimensionNumbers | None:
        pair = matrix_axes(names)
        return None if pair is None else MuonDimensionNumbers(*pair)

    return jax.tree.map(one, param_axes)


def bias_corrected_nesterov(beta: float, dtype: Any) -> optax.GradientTransformation:
    """Returns the transformation that replaces each gradient by the bias-corrected moving average of gradients, as it
    would be after one more step with the current gradient (Nesterov momentum)."""

    def init(params: Any) -> optax.EmaState:
        return optax.EmaState(jnp.zeros((), jnp.int32), optax.tree.zeros_like(params, dtype=dtype))

    def update(grads: Any, state: optax.EmaState, params: Any = None) -> tuple[Any, optax.EmaState]:
        del params
        count = optax.safe_increment(state.count)
        mu = optax.tree.update_moment(grads, state.ema, beta, 1)
        ahead = jax.tree.map(
            lambda m, g: beta * m + (1 - beta) * g,
            optax.tree.bias_correction(mu, beta, optax.safe_increment(count)),
            optax.tree.bias_correction(grads, beta, count),
        )
        return ahead, optax.EmaState(count, optax.tree.cast(mu, dtype))

    return optax.GradientTransformation(init, update)


def orthogonalized(dims: Dimensions, dtype: jnp.dtype, eps: float) -> optax.GradientTransformation:
    """Replaces each matrix U S V^T of the updates by approximately U V^T.

    Divides each matrix by (its Frobenius norm + `eps`), then runs five Newton-Schulz iterations in `dtype`, float32 or
    bfloat16, with matrix products in that precision. The singular values of the result are about 0.7 to 1.2, except
    those that were close to 0.
    """
    # optax implements the iterations as part of its momentum. With beta=0 the momentum is the gradient.
    iterations = optax.contrib.scale_by_muon(
        ns_steps=NS_STEPS, beta=0.0, eps=eps, nesterov=False, weight_dimension_numbers=dims
    )

    def update(updates: Any, params: Any = None) -> Any:
        del params
        matrices = optax.tree.cast(updates, dtype)
        # By default, a TPU multiplies float32 matrices in bfloat16, and a GPU in TF32.
        with jax.default_matmul_precision(dtype.name):
            result, _ = iterations.update(matrices, iterations.init(matrices))
        return optax.tree.cast_like(result, updates)

    return optax.stateless(update)


def stages_first(param_axes: Any, tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns `tx` applied to arrays with a pipeline's stage axis moved to the front. `tx` merges the axes that stack
    matrices; if the stage axis came after the axis of the pipeline's repeats, the merged axis could not be sharded by
    stage."""
    staged = {name for name, axes in by_name(param_axes).items() if STAGES in axes}

    def swapped(tree: Any) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: leaf.swapaxes(0, 1) if name_of(path) in staged else leaf, tree
        )

    return optax.stateless(lambda updates, _: swapped(tx.update(swapped(updates), optax.EmptyState())[0]))


def scaled_by_shape(dims: Dimensions, consistent_rms: float | None) -> optax.GradientTransformation:
    """Scales the updates by shape.

    Multiplies by `consistent_rms` sqrt(max(inputs, outputs)) (Liu et al. 2025, arXiv:2502.16982), so that the entries
    of an orthogonal matrix get the root mean square `consistent_rms`. If `consistent_rms` is None, multiplies by
    sqrt(max(1, outputs / inputs)).
    """

    def scaled(update: jax.Array, of: MuonDimensionNumbers) -> jax.Array:
        inputs, outputs = (math.prod(update.shape[axis] for axis in axes) for axes in of)
        if consistent_rms is None:
            return update * math.sqrt(max(1, outputs / inputs))
        return update * (consistent_rms * math.sqrt(max(inputs, outputs)))

    return optax.stateless(lambda updates, _: jax.tree.map(scaled, updates, dims(updates)))


def _is_dims(node: Any) -> bool:
    return node is None or isinstance(node, MuonDimensionNumbers)

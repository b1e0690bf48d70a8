"""Computes the masks of N:M weight sparsity from the magnitudes of the weights."""

from collections.abc import Sequence
from typing import Any

import jax

from trainer.config.keys import Config
from trainer.layers.sparse import mask_name
from trainer.ops.paths import by_name
from trainer.optim.rules import Rule
from trainer.products.plain import Kernel
from trainer.products.sparse import largest

NAME = "weight_sparsity"


def weight_sparsity(config: Config, kernels: Sequence[Kernel]) -> Rule:
    """Returns the rule that computes the masks of `kernels` from the updated parameters (`products.sparse.largest`).

    It computes them after `weight_sparsity_start_step` steps, and again every `weight_sparsity_update_step` steps.
    Skipped steps count, but do not change the masks. The rule has no state, because the masks are in `TrainTree.rest`.
    """
    n, m, start, every = (
        config[key]
        for key in (
            "weight_sparsity_n",
            "weight_sparsity_m",
            "weight_sparsity_start_step",
            "weight_sparsity_update_step",
        )
    )
    mask_of = {kernel.name: mask_name(kernel) for kernel in kernels}

    def made(weights: dict[str, jax.Array], masks: dict[str, jax.Array]) -> dict[str, jax.Array]:
        # Layer by layer: sorting a whole stack at once would take several times its memory.
        return {
            mask_of[kernel.name]: jax.lax.map(lambda layer, k=kernel: largest(k, layer, n, m), weights[kernel.name])
            for kernel in kernels
        }

    def update(state: Any, old: Any, new: Any, sown: Any) -> tuple[Any, Any]:
        steps, params, rest = old.step + 1, by_name(new.params), by_name(new.rest)
        due = (steps >= start) & ((steps - start) % every == 0)
        weights, masks = {name: params[name] for name in mask_of}, {name: rest[name] for name in mask_of.values()}
        found = rest | jax.lax.cond(due, made, lambda weights, masks: masks, weights, masks)
        return state, new._replace(rest=jax.tree.unflatten(jax.tree.structure(new.rest), found.values()))

    return Rule(NAME, lambda params: {}, update)

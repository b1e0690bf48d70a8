"""Steps that were left out because something in them is not finite: what it was, in words."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from trainer.config import RunStopped
from trainer.training.build import Run
from trainer.training.step import all_finite


def check_finite(config: Any, row: Mapping[str, Any], batch: str, not_finite: Callable[[], Sequence[str]]) -> None:
    """Ends the run at a step that was left out, if the configuration says so.

    Args:
      row: the metrics of the step.
      batch: which batch it took, in words.
      not_finite: the names of arrays of the train state that hold a NaN or an infinity.

    Raises:
      RunStopped: says what was not finite: the loss or the gradient, the update, or the state before it.
    """
    if not row["skipped"] or not row["tokens"]:  # without a token that bears loss there is no loss
        return
    values = {name: row[name] for name in ("loss", "grad_norm")}
    nan, inf = (any(wrong(value) for value in values.values()) for wrong in (math.isnan, math.isinf))
    # Of an update nobody knows which of the two it has.
    kinds = {"abort_on_nan_loss": nan or not inf, "abort_on_inf_loss": inf or not nan}
    keys = [key for key, found in kinds.items() if found and config[key]]
    if not keys:
        return
    bad = " and ".join(f"{name} {value}" for name, value in values.items() if not math.isfinite(value))
    what, advice = bad, "Lower learning_rate"
    if not bad:
        what = (
            f"loss {row['loss']:.6g} and grad_norm {row['grad_norm']:.6g} are finite, and the update with "
            f"learning_rate {row['learning_rate']:.6g} is not"
        )
        advice = "Lower learning_rate, raise adam_eps"
    if names := not_finite():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        what += f". The state that this process began with is not finite: {names[0]}{more}"
        advice = "Begin with other parameters or another checkpoint"
    raise RunStopped(
        f"step {row['step']}: {what}. Its batch is {batch} (data_shuffle_seed={config.data_shuffle_seed}). The update "
        f"was left out, and the checkpoints are as they were. {advice}, or set "
        f"{' and '.join(f'{key}=false' for key in keys)} to leave such updates out and go on"
    )


def names_not_finite(run: Run, state: Any) -> list[str]:
    """The names of parameters and optimizer state in a native train state that hold a NaN or an infinity."""
    tree = run.codec.unpack(state)

    def finite(tree: Any) -> dict[str, jax.Array]:
        tree = run.fetch(tree)
        leaves = jax.tree_util.tree_leaves_with_path({"params": tree.params, "opt_state": tree.opt_state})
        return {jax.tree_util.keystr(path, simple=True, separator="/"): all_finite(leaf) for path, leaf in leaves}

    found = jax.device_get(jax.jit(run.placed(finite), out_shardings=run.replicated)(tree))
    return [name for name, is_finite in found.items() if not is_finite]

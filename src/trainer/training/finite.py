"""Stops a run whose loss, gradient or update is not finite, and names the arrays that are not finite."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from trainer.config.capabilities.optimizers import TRAITS
from trainer.config.errors import RunStopped
from trainer.config.keys import Config
from trainer.ops.paths import by_name
from trainer.training.run import Run
from trainer.training.step import all_finite


def check_finite(config: Config, row: Mapping[str, Any], batch: str, not_finite: Callable[[], Sequence[str]]) -> None:
    """Ends the run after a non-finite step, if the configuration requires it or the new state is not finite.

    Args:
      row: the metrics of the step, including `skipped` and `finite`; see `step.make_update`.
      batch: a description of the step's batch.
      not_finite: returns the names of the arrays of the train state that contain a NaN or an infinity.

    Raises:
      RunStopped: names the non-finite part: the loss or the gradient, the update, or the state before the step.
    """
    bad = {name: row[name] for name in ("loss", "grad_norm") if not math.isfinite(row[name])}
    nan, inf = (any(wrong(value) for value in bad.values()) for wrong in (math.isnan, math.isinf))
    kinds = {"abort_on_nan_loss": nan, "abort_on_inf_loss": inf}
    keys = [key for key, found in kinds.items() if config[key] and found]
    lost = not row["finite"]
    # If no token of a batch contributes to the loss, the loss is NaN. This is not an error.
    if not lost and (not keys or not row["tokens"]):
        return
    its_batch = f"Its batch is {batch} (data_shuffle_seed={config.data_shuffle_seed})"
    if not lost:
        found = " and ".join(f"{name} {value}" for name, value in bad.items())
        accepting = " and ".join(f"{key}=false" for key in keys)
        raise RunStopped(
            f"step {row['step']}: {found}. {its_batch}. The update was skipped, and the checkpoints are unaffected. "
            f"Lower learning_rate under another run_name, or set {accepting} to skip such updates and continue"
        )
    epsilon = " or raise adam_eps" if "adam_eps" in TRAITS[config.opt_type].reads else ""
    first, *others = not_finite()
    where = f"{first} and {len(others)} more" if others else first
    if row["skipped"]:
        raise RunStopped(
            f"step {row['step']}: the state before this step contains a NaN or an infinity in {where}. "
            "Start from other parameters or another checkpoint"
        )
    raise RunStopped(
        f"step {row['step']}: loss {row['loss']:.6g} and grad_norm {row['grad_norm']:.6g} are finite, but the update "
        f"with learning_rate {row['learning_rate']:.6g} is not: {where}. {its_batch}. No checkpoint contains this "
        f"update. Lower learning_rate{epsilon} under another run_name; "
        "load_full_state_path starts that run from a checkpoint of this run"
    )


def names_not_finite(run: Run, state: Any) -> list[str]:
    """Returns the names of the arrays in a native train state that contain a NaN or an infinity."""
    tree = run.codec.unpack(state)

    def finite(tree: Any) -> dict[str, jax.Array]:
        return {name: all_finite(leaf) for name, leaf in by_name(run.states.fetch(tree)).items()}

    found = jax.device_get(jax.jit(run.sharded(finite), out_shardings=run.replicated)(tree))
    return [name for name, is_finite in found.items() if not is_finite]

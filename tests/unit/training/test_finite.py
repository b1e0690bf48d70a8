"""The messages about a step with nonfinite values."""

import math

import jax
import ml_collections
import numpy as np
import pytest
from support import arguments, first_tree

from trainer.config.errors import RunStopped
from trainer.config.load import load
from trainer.training.build import build
from trainer.training.finite import check_finite, names_not_finite

ROW = {"step": 7, "loss": 2.5, "grad_norm": 1.25, "learning_rate": 0.001, "tokens": 100, "skipped": 0, "finite": 1}
LOST = {"finite": 0}
KEYS = ("abort_on_nan_loss", "abort_on_inf_loss")


def said(row, nan=True, inf=True, names=("params/a",)):
    """Returns the message, or None."""
    others = {"data_shuffle_seed": 0, "opt_type": "adamw"}
    config = ml_collections.ConfigDict(dict(zip(KEYS, (nan, inf), strict=True)) | others)
    try:
        check_finite(config, ROW | row, "number 8", lambda: list(names))
    except RunStopped as stopped:
        return str(stopped)
    return None


def test_a_step_that_is_finite_is_no_reason_to_look_at_the_state():
    config = ml_collections.ConfigDict({"abort_on_nan_loss": True, "abort_on_inf_loss": True})
    check_finite(config, ROW, "number 8", lambda: pytest.fail("the state was looked at"))


def test_the_loss_and_the_gradient():
    assert said({"loss": math.nan, "skipped": 1}) == (
        "step 7: loss nan. Its batch is number 8 (data_shuffle_seed=0). The update was skipped, and the checkpoints "
        "are unaffected. Lower learning_rate under another run_name, or set abort_on_nan_loss=false to skip such "
        "updates and continue"
    )
    both = said({"loss": math.nan, "grad_norm": math.inf, "skipped": 1})
    assert both.startswith("step 7: loss nan and grad_norm inf. Its batch")
    assert "set abort_on_nan_loss=false and abort_on_inf_loss=false to skip" in both


@pytest.mark.parametrize("stop", [True, False])
def test_the_update_alone(stop):
    assert said(LOST, stop, stop, ["params/a", "params/b"]) == (
        "step 7: loss 2.5 and grad_norm 1.25 are finite, but the update with learning_rate 0.001 is not: params/a and "
        "1 more. Its batch is number 8 (data_shuffle_seed=0). No checkpoint contains this update. Lower "
        "learning_rate or raise adam_eps under another run_name; load_full_state_path starts that run from a "
        "checkpoint of this run"
    )


@pytest.mark.parametrize(
    ("row", "nan", "inf", "stops"),
    [
        ({"loss": math.nan}, True, False, True),
        ({"loss": math.nan}, False, True, False),
        ({"loss": math.nan, "tokens": 0}, True, True, False),
        ({"grad_norm": math.inf}, False, True, True),
        ({"grad_norm": math.inf}, True, False, False),
        ({"loss": math.nan, "grad_norm": math.inf}, False, True, True),
    ],
)
def test_whether_it_stops(row, nan, inf, stops):
    assert (said(row | {"skipped": 1}, nan, inf) is not None) == stops


def test_a_state_that_was_not_finite_before():
    assert said({"loss": math.nan, "skipped": 1} | LOST, False, False) == (
        "step 7: the state before this step contains a NaN or an infinity in params/a. Start from other "
        "parameters or another checkpoint"
    )


def test_names_of_arrays():
    run = build(load(arguments("nnx")).config, jax.devices()[:1])
    tree = first_tree(run)
    tree.params["decoder"]["layers"]["mlp"]["wo"]["kernel"][1, 2, 3] = np.inf
    tree.opt_state[1][0].nu["token_embedder"]["embedding"][5] = np.nan
    state = jax.device_put(run.codec.pack(tree), run.states.shardings)
    with jax.transfer_guard("disallow"):
        found = names_not_finite(run, state)
    assert found == ["opt_state/1/0/nu/token_embedder/embedding", "params/decoder/layers/mlp/wo/kernel"]

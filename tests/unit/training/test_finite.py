"""What is said of a step that is not finite."""

import math

import jax
import ml_collections
import numpy as np
import pytest
from support import arguments, copied

from trainer.config import RunStopped, load
from trainer.training import build
from trainer.training.finite import check_finite, names_not_finite

ROW = {"step": 7, "loss": 2.5, "grad_norm": 1.25, "learning_rate": 0.001, "tokens": 100, "skipped": 1}
KEYS = ("abort_on_nan_loss", "abort_on_inf_loss")


def said(row, nan=True, inf=True, names=()):
    """The message, or None."""
    config = ml_collections.ConfigDict(dict(zip(KEYS, (nan, inf), strict=True)) | {"data_shuffle_seed": 0})
    try:
        check_finite(config, ROW | row, "number 8", lambda: list(names))
    except RunStopped as stopped:
        return str(stopped)
    return None


def test_a_step_that_was_applied_is_no_reason_to_ask():
    config = ml_collections.ConfigDict({"abort_on_nan_loss": True})
    check_finite(config, ROW | {"skipped": 0}, "number 8", lambda: pytest.fail("the state was looked at"))


def test_the_loss_and_the_gradient():
    assert said({"loss": math.nan}) == (
        "step 7: loss nan. Its batch is number 8 (data_shuffle_seed=0). The update was left out, and the checkpoints "
        "are as they were. Lower learning_rate, or set abort_on_nan_loss=false to leave such updates out and go on"
    )
    both = said({"loss": math.nan, "grad_norm": math.inf})
    assert both.startswith("step 7: loss nan and grad_norm inf. Its batch")
    assert "set abort_on_nan_loss=false and abort_on_inf_loss=false to leave" in both


def test_the_update_alone():
    assert said({}).startswith(
        "step 7: loss 2.5 and grad_norm 1.25 are finite, and the update with learning_rate 0.001 is not. Its batch is"
    )
    assert "Lower learning_rate, raise adam_eps, or set abort_on_nan_loss=false and abort_on_inf" in said({})


@pytest.mark.parametrize(
    ("row", "nan", "inf", "stops"),
    [
        ({"loss": math.nan}, True, False, True),
        ({"loss": math.nan}, False, True, False),
        ({"grad_norm": math.inf}, False, True, True),
        ({"grad_norm": math.inf}, True, False, False),
        ({"loss": math.nan, "grad_norm": math.inf}, False, True, True),
        ({}, True, False, True),
        ({}, False, True, True),
        ({}, False, False, False),
    ],
)
def test_whether_it_stops(row, nan, inf, stops):
    assert (said(row, nan, inf) is not None) == stops


def test_a_state_that_was_not_finite_before():
    message = said({"loss": math.nan}, names=["params/a", "params/b"])
    assert "step 7: loss nan. The state that this process began with is not finite: params/a and 1 more. Its" in message
    assert "Begin with other parameters or another checkpoint, or set" in message


def test_names_of_arrays():
    run = build(load(arguments("nnx")).config, jax.devices()[:1])
    tree = copied(run.codec.unpack(run.init()))
    tree.params["decoder"]["layers"]["mlp"]["wo"]["kernel"][1, 2, 3] = np.inf
    tree.opt_state[1][0].nu["token_embedder"]["embedding"][5] = np.nan
    state = jax.device_put(run.codec.pack(tree), run.state_shardings)
    with jax.transfer_guard("disallow"):
        found = names_not_finite(run, state)
    assert found == ["opt_state/1/0/nu/token_embedder/embedding", "params/decoder/layers/mlp/wo/kernel"]

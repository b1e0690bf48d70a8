"""An objective of somebody's own, with fields, weights and a measure, through the whole of a run."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support import arguments, compiled, packed_batch, tiny_config

from trainer.backends import make_model
from trainer.config import load
from trainer.objectives import Field, NextToken, Sums, hidden_states, target_log_probs
from trainer.runtime.place import place
from trainer.training import build


@dataclass(frozen=True)
class Rewarded(NextToken):
    """Minimizes minus the reward-weighted log-probability, by row; its cross entropy is only measured."""

    fields = NextToken.fields | {"reward": Field(("rows",), "float32"), "mark": Field(("rows", "length", 3), "float32")}

    def weights(self, batch):
        return super().weights(batch) | {"policy_loss": jnp.sum(jnp.abs(batch["reward"]))}

    def sums(self, params, rest, batch, key, capture=()):
        hidden, sown = hidden_states(self.apply, params, rest, batch, key, capture)
        log_probs = target_log_probs(self.apply, params, rest, hidden, batch["targets"])
        log_prob = jnp.where(batch["targets_segmentation"] != 0, log_probs.target, 0)
        policy = -jnp.sum(batch["reward"] * log_prob.sum(-1)) + 0 * jnp.sum(batch["mark"])
        return Sums({"policy_loss": policy}, {"lm_loss": -jnp.sum(log_prob)}, sown)


def batch_of(config, rows):
    rng = np.random.default_rng(1)
    batch = packed_batch(config, rows)
    mark = rng.normal(size=(rows, config.max_target_length, 3)).astype(np.float32)
    return batch | {"reward": rng.normal(size=rows).astype(np.float32), "mark": mark}


def metrics_of(microbatches):
    keys = {"gradient_accumulation_steps": microbatches, "per_device_batch_size": 4 // microbatches}
    run = build(load(arguments("nnx", **keys)).config, jax.devices()[:1])
    step = run.step.lower(*run.abstract_args()).compile()
    key = jax.random.key(0)
    state = compiled(run.codec.init, key)(key)
    _, metrics = step(state, place(batch_of(run.config, run.rows), run.batch_shardings))
    return jax.device_get(metrics)


def test_what_is_measured_is_reported_and_not_minimized(monkeypatch):
    monkeypatch.setattr("trainer.objectives.registry.NextToken", Rewarded)
    whole, accumulated = (metrics_of(n) for n in (1, 2))
    assert whole["loss"] == whole["policy_loss"] != whole["lm_loss"]
    assert whole["lm_loss"] == pytest.approx(np.log(64), rel=0.2)  # of random parameters
    for name in ("loss", "lm_loss", "grad_norm"):
        assert accumulated[name] == pytest.approx(whole[name], rel=1e-5)  # sums in another order


def test_batches_hold_the_fields_of_the_objective(monkeypatch):
    monkeypatch.setattr("trainer.objectives.registry.NextToken", Rewarded)
    axes = {"ici_data_parallelism": 2, "ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2}
    run = build(load(arguments("nnx", **axes)).config, jax.devices())
    batch, at = run.abstract_batch(8), run.batch_shardings
    assert (batch["reward"].shape, batch["reward"].dtype) == ((8,), np.float32)
    assert (batch["mark"].shape, batch["mark"].dtype) == ((8, 16, 3), np.float32)
    assert at["reward"].spec == at["row"].spec
    assert at["mark"].spec == P(*at["inputs"].spec, None)
    assert place(batch_of(run.config, 8), at).keys() == batch.keys()


def test_log_probabilities_of_targets():
    config = tiny_config("nnx")
    model = make_model(config)
    params, rest = compiled(model.init, jax.random.key(0))(jax.random.key(0))
    batch = packed_batch(config, 2)

    def both(params):
        hidden, _ = hidden_states(model.apply, params, rest, batch, None, ())
        logits, _, _ = model.apply(params, rest, hidden, method="head")
        return target_log_probs(model.apply, params, rest, hidden, batch["targets"]), jax.nn.log_softmax(logits)

    log_probs, expected = compiled(both, params)(params)
    expected = np.take_along_axis(np.asarray(expected), batch["targets"][..., None], -1)[..., 0]
    np.testing.assert_allclose(log_probs.target, expected, rtol=1e-5)  # rounding of float32

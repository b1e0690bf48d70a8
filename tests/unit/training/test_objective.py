"""An objective of somebody's own, with fields, weights and a measure, through the whole of a run."""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support import arguments, compiled, packed_batch, tiny_config

from trainer.backends import make_model
from trainer.config import load
from trainer.objectives import Evaluation, Field, Mean, NextToken, Sums, hidden_states, target_log_probs
from trainer.observe import maxtext_row
from trainer.observe.lines import Work, evaluation_line, step_line
from trainer.ops.ahead import shift_left
from trainer.runtime.place import place
from trainer.training import build
from trainer.training.evaluate import summarize


@dataclass(frozen=True)
class Rewarded(NextToken):
    """Minimizes minus the reward-weighted log-probability, by row; its cross entropy is only measured."""

    fields = NextToken.fields | {"reward": Field(("rows",), "float32"), "mark": Field(("rows", "length", 3), "float32")}

    def weights(self, batch):
        return super().weights(batch) | {"policy_loss": jnp.sum(jnp.abs(batch["reward"]))}

    def sums(self, params, rest, batch, key, capture=(), sampled=None):
        hidden, sown = hidden_states(self.apply, params, rest, batch, key, capture, sampled)
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


@dataclass(frozen=True)
class Preference:
    """Minus the log-probability of preferring one text to another, by the difference of their log-probabilities. None
    of its terms is a cross entropy, and its batches have no targets. Token 0 is padding."""

    apply: object
    captures: ClassVar = ()
    fields: ClassVar = {"chosen": Field(), "rejected": Field(), "row": Field(("rows",))}

    def weights(self, batch):
        return dict.fromkeys(("preference_loss", "accuracy"), jnp.sum(batch["chosen"].any(axis=1), dtype=jnp.int32))

    def tokens(self, batch):
        return sum(jnp.sum(shift_left(batch[name]) != 0, dtype=jnp.int32) for name in ("chosen", "rejected"))

    def sums(self, params, rest, batch, key, capture=(), sampled=None):
        def log_prob(name):
            ids = batch[name]
            positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
            given = {"inputs": ids, "inputs_position": positions, "inputs_segmentation": (ids != 0).astype(jnp.int32)}
            hidden, sown = hidden_states(self.apply, params, rest, given | {"row": batch["row"]}, key, capture, sampled)
            found = target_log_probs(self.apply, params, rest, hidden, shift_left(ids)).target
            return jnp.where(shift_left(ids) != 0, found, 0).sum(axis=1), sown

        (chosen, sown), (rejected, _) = log_prob("chosen"), log_prob("rejected")
        pair, margin = batch["chosen"].any(axis=1), chosen - rejected
        loss = jnp.where(pair, -jax.nn.log_sigmoid(margin), 0)
        right = jnp.sum(pair & (margin > 0), dtype=jnp.int32)
        return Sums({"preference_loss": loss.sum()}, {"accuracy": right}, sown)

    def evaluation(self, params, rest, batch):
        sums, pairs = self.sums(params, rest, batch, None), self.weights(batch)["accuracy"]
        return Evaluation(
            Mean(sums.minimized["preference_loss"], pairs), others={"accuracy": Mean(sums.measured["accuracy"], pairs)}
        )


def test_an_objective_without_a_cross_entropy_trains_and_evaluates():
    rng = np.random.default_rng(0)
    pairs = {name: rng.integers(1, 64, (4, 16)).astype(np.int32) for name in ("chosen", "rejected")}
    pairs["rejected"][:, 9:] = pairs["chosen"][3] = pairs["rejected"][3] = 0  # the last row is no pair
    pairs["row"] = np.arange(4, dtype=np.int32)
    rows, found = {}, {}
    for parts in (1, 2):
        keys = {
            "gradient_accumulation_steps": parts,
            "per_device_batch_size": 4 // parts,
            "eval_per_device_batch_size": 4,
        }
        config = load(arguments("nnx", **keys, opt_type="sgd", learning_rate=0.1, warmup_steps_fraction=0)).config
        run = build(config, jax.devices()[:1], make_objective=lambda config, model: Preference(model.apply))
        step, batch = run.compile(), place(pairs, run.batch_shardings)
        state = run.init()
        if parts == 1:
            lengths = jnp.ones(run.config.vocab_size, jnp.int32)
            (params, rest), evaluate = (
                run.codec.unpack(state)[1::2],
                run.eval_step.lower(state, batch, lengths).compile(),
            )
            expected = preference(run.model, jax.device_get(params), rest, pairs)
            found = summarize([jax.device_get(evaluate(state, batch, lengths))] * 2)
        rows[parts] = []
        for _ in range(3):
            state, metrics = step(state, batch)
            rows[parts].append({name: value.item() for name, value in jax.device_get(metrics).items()})
    assert found == {
        "eval_loss": pytest.approx(np.logaddexp(0, -expected).mean(), rel=1e-5),  # rounding of float32
        "eval_accuracy": pytest.approx((expected > 0).mean()),
        "eval_tokens": 2 * 3 * (15 + 8),
    }
    first = rows[1][0]
    assert first["loss"] == first["preference_loss"] == pytest.approx(found["eval_loss"], rel=1e-6)
    assert first["tokens"] == 3 * (15 + 8)
    assert rows[1][2]["loss"] < 0.9 * first["loss"]
    for one, other in zip(rows[1], rows[2], strict=True):
        assert other == {name: pytest.approx(value, rel=1e-4) for name, value in one.items()}  # sums in another order
    row = first | {"step": 0, "step_time": 1.0, "tokens_per_second": 1.0}
    work = Work(devices=1, tokens=1, flops_per_token=1.0)
    assert "lm_loss" not in step_line(row, work, "?")
    assert "perplexity" not in evaluation_line(found | {"step": 0, "eval_time": 1.0})
    for written in (maxtext_row(row, work, 1.0, "run"), maxtext_row(found | {"step": 0}, work, 1.0, "run")):
        assert not any("perplexity" in name or "lm_loss" in name for name in written)


def preference(model, params, rest, pairs):
    """For each pair the difference of log-probabilities, float64, from the logits of each text alone."""

    def log_prob(ids):
        ids = ids[ids != 0][None]
        at, one = np.arange(ids.shape[1])[None], np.ones_like(ids)
        hidden, _, _ = model.apply(params, rest, ids, at, one, np.zeros(1, np.int32))
        logits = np.asarray(model.apply(params, rest, hidden, method="head")[0][0, :-1], np.float64)
        return (np.take_along_axis(logits, ids[0, 1:, None], -1)[:, 0] - np.log(np.exp(logits).sum(-1))).sum()

    return np.array([log_prob(pairs["chosen"][i]) - log_prob(pairs["rejected"][i]) for i in range(3)])

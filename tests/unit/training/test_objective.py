"""A user's objective, with its fields, weights and a measured term, through a whole run."""

import functools
from contextlib import nullcontext
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support import arguments, compiled, first_tree, packed_batch, state_from, tiny_config

from trainer.backends.registry import make_model
from trainer.config.errors import UserError
from trainer.config.load import load
from trainer.data.dataset import open_dataset
from trainer.objectives.base import Evaluation, Field, Mean, Sums, Weights
from trainer.objectives.forward import hidden_states, target_log_probs
from trainer.objectives.next_token import NextToken
from trainer.observe.lines import Work, evaluation_line, step_line
from trainer.observe.metrics_file import maxtext_row
from trainer.runtime.place import place
from trainer.training.batches import held_out_batches, placed
from trainer.training.build import build
from trainer.training.loop import Reports, evaluate, fit
from trainer.training.start import Start


@dataclass(frozen=True)
class Rewarded(NextToken):
    """Minimizes the negative reward-weighted log-probability of each row. Its cross entropy is only measured."""

    fields = NextToken.fields | {"reward": Field(("rows",), "float32"), "mark": Field(("rows", "length", 3), "float32")}

    def weights(self, batch):
        terms, tokens = super().weights(batch)
        return Weights(terms | {"policy_loss": jnp.sum(jnp.abs(batch["reward"]))}, tokens)

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


@functools.cache
def initial():
    """Returns the first state of all runs in this file."""
    config = load(arguments("nnx", opt_type="sgd", gradient_clipping_threshold=0)).config
    return first_tree(build(config, jax.devices()[:1]))


def test_what_is_measured_is_reported_and_not_minimized(monkeypatch):
    """Means over microbatches are compared with those of the whole batch."""
    monkeypatch.setattr("trainer.objectives.registry.NextToken", Rewarded)
    keys = {"gradient_accumulation_steps": 2, "per_device_batch_size": 2}
    keys |= {"opt_type": "sgd", "gradient_clipping_threshold": 0}
    run = build(load(arguments("nnx", **keys)).config, jax.devices()[:1])
    batch, tree = batch_of(run.config, run.rows), initial()
    _, found = run.step(state_from(run, tree), placed(run, batch), ())
    assert found["loss"] == found["policy_loss"] != found["lm_loss"]
    sums = jax.jit(lambda params: run.objective.sums(params, tree.rest, batch, None)[:2])(tree.params)
    weights = run.objective.weights(batch).terms
    for name, total in (sums[0] | sums[1]).items():
        assert found[name] == pytest.approx(float(total / weights[name]), rel=1e-5)  # sums in another order
    assert found["lm_loss"] == pytest.approx(np.log(64), rel=0.2)  # with random parameters


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
    _, params, _, rest = initial()
    batch = packed_batch(config, 2)

    def both(params):
        hidden, _ = hidden_states(model.apply, params, rest, batch, None, ())
        logits, _, _ = model.apply(params, rest, hidden, method="head")
        return target_log_probs(model.apply, params, rest, hidden, batch["targets"]), jax.nn.log_softmax(logits)

    log_probs, expected = compiled(both, params)(params)
    expected = np.take_along_axis(np.asarray(expected), batch["targets"][..., None], -1)[..., 0]
    np.testing.assert_allclose(log_probs.target, expected, rtol=1e-5)  # float32 rounding


def following(ids):
    return jnp.pad(ids[:, 1:], ((0, 0), (0, 1)))


@dataclass(frozen=True)
class Preference:
    """The negative log-probability of preferring one text, from the difference of two texts' log-probabilities.

    No term is a cross entropy, and batches have no targets. Token 0 is padding.
    """

    apply: object
    captures: ClassVar = ()
    fields: ClassVar = {"chosen": Field(), "rejected": Field()}

    def weights(self, batch):
        pairs = jnp.sum(batch["chosen"].any(axis=1), dtype=jnp.int32)
        tokens = sum(jnp.sum(following(batch[name]) != 0, dtype=jnp.int32) for name in ("chosen", "rejected"))
        return Weights(dict.fromkeys(("preference_loss", "accuracy"), pairs), tokens)

    def sums(self, params, rest, batch, key, capture=(), sampled=None):
        def log_prob(name):
            ids = batch[name]
            positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
            given = {"inputs": ids, "inputs_position": positions, "inputs_segmentation": (ids != 0).astype(jnp.int32)}
            hidden, sown = hidden_states(self.apply, params, rest, given | {"row": batch["row"]}, key, capture, sampled)
            found = target_log_probs(self.apply, params, rest, hidden, following(ids)).target
            return jnp.where(following(ids) != 0, found, 0).sum(axis=1), sown

        (chosen, sown), (rejected, _) = log_prob("chosen"), log_prob("rejected")
        pair, margin = batch["chosen"].any(axis=1), chosen - rejected
        loss = jnp.where(pair, -jax.nn.log_sigmoid(margin), 0)
        right = jnp.sum(pair & (margin > 0), dtype=jnp.int32)
        return Sums({"preference_loss": loss.sum()}, {"accuracy": right}, sown)

    def evaluation(self, params, rest, batch):
        sums, weights = self.sums(params, rest, batch, None), self.weights(batch)
        pairs = weights.terms["accuracy"]
        right = Mean(sums.measured["accuracy"], pairs)
        return Evaluation(weights.tokens, Mean(sums.minimized["preference_loss"], pairs), others={"accuracy": right})


class Pairs:
    """A source that repeats one batch of pairs and reads the state; see `training.BatchSource`."""

    waited, updates, metrics = 0.0, 1, {}

    def __init__(self, pairs, look=lambda state: None):
        self.pairs, self.look, self.seen = pairs, look, []

    def take(self, state, interrupted):
        self.seen.append(self.look(state()))
        return self.pairs, None

    def held_out(self, state):
        return [self.pairs] * 2


def preference_run(**keys):
    keys |= {"steps": 3}
    keys |= {"opt_type": "sgd", "gradient_clipping_threshold": 0, "learning_rate": 0.1, "warmup_steps_fraction": 0}
    config = load(arguments("nnx", **keys)).config
    run = build(config, jax.devices()[:1], make_objective=lambda config, model: Preference(model.apply))
    return run, open_dataset(run.config, print)


def test_an_objective_without_a_cross_entropy_trains_and_evaluates():
    rng = np.random.default_rng(0)
    pairs = {name: rng.integers(1, 64, (4, 16)).astype(np.int32) for name in ("chosen", "rejected")}
    pairs["rejected"][:, 9:] = pairs["chosen"][3] = pairs["rejected"][3] = 0  # the last row is not a pair
    pairs["row"] = np.arange(4, dtype=np.int32)
    rows, evaluations = [], []
    run, dataset = preference_run(eval_interval=3, learning_rate_schedule_steps=20)
    reports = Reports(rows.append, evaluations.append, lambda: None)
    state, *others = run.abstract_args()
    step = run.step_on_leaves.lower(jax.tree.leaves(state), *others).compile()
    source = Pairs(pairs, lambda state: jax.device_get(run.codec.unpack(state).step))
    start = Start(state_from(run, initial()))
    end = fit(run, step, start, dataset, reports, source=lambda *_: nullcontext(source))
    assert source.seen == [0, 1, 2]  # the states before each update
    _, params, _, rest = run.codec.unpack(end.state)
    expected = preference(run.model, jax.device_get(params), rest, pairs)
    (found,) = evaluations
    assert found == {
        "step": 2,
        "eval_loss": pytest.approx(np.logaddexp(0, -expected).mean(), rel=1e-5),  # float32 rounding
        "eval_accuracy": pytest.approx((expected > 0).mean()),
        "eval_tokens": 2 * 3 * (15 + 8),
        "eval_time": found["eval_time"],
    }
    first, *_, last = rows
    assert first["loss"] == first["preference_loss"]
    assert first["tokens"] == 3 * (15 + 8)
    assert found["eval_loss"] < last["loss"] < 0.9 * first["loss"]
    work = Work(devices=1, tokens=1, flops_per_token=1.0)
    assert "lm_loss" not in step_line(first, 10, work, "?")
    assert "perplexity" not in evaluation_line(found)
    for written in (maxtext_row(first, work, 1.0, "run"), maxtext_row(found, work, 1.0, "run")):
        assert not any("perplexity" in name or "lm_loss" in name for name in written)


def test_batches_without_the_fields_of_the_objective_are_refused_before_a_step():
    run, dataset = preference_run(eval_interval=1)
    reports = Reports(print, print, lambda: None)
    ends = r"the objective does not read inputs, targets, .*targets_segmentation$"
    missing = r"objective Preference: no chosen \(int32\[4, 16\]\); no rejected \(int32\[4, 16\]\); " + ends
    with pytest.raises(UserError, match=missing):
        fit(run, print, Start([]), dataset, reports)
    with pytest.raises(UserError, match=missing):
        evaluate(run, [], held_out_batches(run, dataset), None, 0)
    wrong = {"chosen": np.zeros((4, 8), np.int32), "rejected": np.zeros((4, 16)), "row": np.zeros(4, np.int32)}
    is_wrong = r"chosen is int32\[4, 8\] instead of int32\[4, 16\]; rejected is float64\[4, 16\] instead of int32"
    with pytest.raises(UserError, match=is_wrong):
        fit(run, print, Start([]), dataset, reports, source=lambda *_: nullcontext(Pairs(wrong)))


def preference(model, params, rest, pairs):
    """Returns the float64 difference of log-probabilities of each pair, from separate logits of each text."""

    @jax.jit
    def forward(params, ids):
        at, one = np.arange(ids.shape[1])[None], np.ones(ids.shape, np.int32)
        hidden, _, _ = model.apply(params, rest, ids, at, one, np.zeros(1, np.int32))
        return model.apply(params, rest, hidden, method="head")[0]

    def log_prob(ids):
        ids = ids[ids != 0][None]
        logits = np.asarray(forward(params, ids)[0, :-1], np.float64)
        return (np.take_along_axis(logits, ids[0, 1:, None], -1)[:, 0] - np.log(np.exp(logits).sum(-1))).sum()

    return np.array([log_prob(pairs["chosen"][i]) - log_prob(pairs["rejected"][i]) for i in range(3)])

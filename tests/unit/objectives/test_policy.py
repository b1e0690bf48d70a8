"""The reinforcement learning objective against a NumPy implementation that loops over sequences."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import assert_equal_bits

from trainer.layers.sown import Maximum
from trainer.objectives.policy import DRIFT, Policy
from trainer.rl.groups import Rollout, packed, places

VOCABULARY, WIDTH, LENGTH = 11, 6, 20
AGGREGATIONS = ("token-mean", "sequence-mean", "sequence-mean-token-mean")


def apply(params, rest, x, *args, method="", capture=(), **_):
    """A model whose logits depend only on the current token."""
    if method == "head":
        return x @ params["head"], {}, None
    return jnp.asarray(params["embedding"])[x], {kind.__name__: {} for kind in capture}, None


def policy(algorithm="grpo", aggregation="token-mean", beta=0.0, temperature=1.0):
    return Policy(apply, 0.2, 0.3, beta, algorithm == "gspo-token", aggregation, temperature)


def parameters(seed):
    rng = np.random.default_rng(seed)
    embedding, head = rng.normal(size=(VOCABULARY, WIDTH)), rng.normal(size=(WIDTH, VOCABULARY))
    return {"embedding": embedding.astype(np.float32), "head": head.astype(np.float32)}


def log_probs(params, rollout, temperature):
    """Returns the log-probabilities of a completion, float64 [c]."""
    params = {name: np.asarray(leaf, np.float64) for name, leaf in params.items()}
    tokens = np.concatenate([rollout.prompt, rollout.completion])
    logits = params["embedding"][tokens[:-1]] @ params["head"] / temperature
    logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return logs[np.arange(len(tokens) - 1), tokens[1:]][len(rollout.prompt) - 1 :]


def some_rollouts(temperature=1.0, count=9, old=1):
    """Returns rollouts with the log-probabilities of other parameters, their advantages, and their rewards."""
    rng = np.random.default_rng(3)
    found = []
    for _ in range(count):
        prompt, completion = (
            rng.integers(0, VOCABULARY, n).astype(np.int32) for n in (rng.integers(1, 5), rng.integers(1, 8))
        )
        rollout = Rollout(prompt, completion, np.zeros(0, np.float32), truncated=False)
        found.append(rollout._replace(log_probs=log_probs(parameters(old), rollout, temperature).astype(np.float32)))
    return found, rng.normal(size=count), rng.normal(size=count)


def batch_of(rollouts, gains, rewards, align=1, spare=0):
    at = places([rollout.pairs for rollout in rollouts], LENGTH, align)
    rows = 1 + max(row for row, _ in at) + spare
    return packed(rollouts, {"rewards": rewards, "advantages": gains}, at, rows, LENGTH)


def expected(params, reference, rollouts, gains, rewards, objective):
    """Returns the loss terms and the measured values by name."""
    totals, counts = {"policy_loss": [], "kl_loss": []}, []
    clipped, kls, drift = 0, [], 0.0
    for rollout, gain in zip(rollouts, gains, strict=True):
        new = log_probs(params, rollout, objective.temperature)
        change = new - rollout.log_probs
        drift = max(drift, np.abs(change).max())
        ratio = np.exp(np.full(len(new), change.mean()) if objective.of_sequences else change)
        bounded = np.clip(ratio, 1 - objective.low, 1 + objective.high)
        loss = -np.minimum(ratio * gain, bounded * gain)
        clipped += (bounded * gain < ratio * gain).sum()
        d = log_probs(reference, rollout, objective.temperature) - new
        kl = np.exp(d) - d - 1
        kls += kl.tolist()
        counts.append(len(new))
        for name, values in (("policy_loss", loss), ("kl_loss", objective.beta * kl)):
            mean = objective.aggregation == "sequence-mean-token-mean"
            totals[name].append(values.mean() if mean else values.sum())
    divisor = sum(counts) if objective.aggregation == "token-mean" else len(counts)
    return {
        **{name: sum(values) / divisor for name, values in totals.items()},
        "clip_fraction": clipped / sum(counts),
        "kl": np.mean(kls),
        "reward": np.mean(rewards),
        "completion_tokens": np.mean(counts),
        DRIFT: drift,
    }


def found(params, reference, batch, objective, parts=1):
    """Returns the objective's counterpart of `expected`, summed over `parts` microbatches as in a step."""
    weights = objective.weights(batch)
    terms, drift = {}, 0.0
    for part in range(parts):
        rows = {name: array[part::parts] for name, array in batch.items()}
        sums = objective.sums(params, {}, rows, None, (Maximum,), frozen=reference)
        for name, total in (sums.minimized | sums.measured).items():
            terms[name] = terms.get(name, 0) + total / weights.terms[name]
        drift = jnp.maximum(drift, sums.sown["Maximum"][DRIFT])
    return terms | {DRIFT: drift}


CASES = [
    *itertools.product(("grpo", "gspo-token"), AGGREGATIONS, (0.0,), (1.0,)),
    *itertools.product(("grpo",), AGGREGATIONS, (0.3,), (1.3,)),
]


@jax.jit
def found_of_all(params, reference, batch):
    """Returns the results for each case over one and two microbatches, from one program."""
    cases = itertools.product(CASES, (1, 2))
    return {(case, parts): found(params, reference, batch, policy(*case), parts) for case, parts in cases}


@pytest.mark.parametrize(("algorithm", "aggregation", "beta", "temperature"), CASES)
def test_all_terms_are_those_of_numpy(algorithm, aggregation, beta, temperature):
    case = algorithm, aggregation, beta, temperature
    params, reference = parameters(0), parameters(2)
    rollouts, gains, rewards = some_rollouts(temperature)
    # Empty rows, gaps between sequences, and microbatches change nothing.
    sparse = batch_of(rollouts, gains, rewards, align=4, spare=2)
    rows = len(sparse["row"]) // 2 * 2
    assert rows >= 4
    sparse = {name: array[:rows] for name, array in sparse.items()}
    dense = batch_of(rollouts, gains, rewards)
    dense = batch_of(rollouts, gains, rewards, spare=rows - len(dense["row"]))
    results = found_of_all(params, reference, dense)
    terms, wanted = results[case, 1], expected(params, reference, rollouts, gains, rewards, policy(*case))
    assert {**dict.fromkeys(("kl", "kl_loss"), None), **terms}.keys() == wanted.keys()
    for name, value in terms.items():
        np.testing.assert_allclose(value, wanted[name], rtol=2e-5, err_msg=name)
    assert terms["clip_fraction"] > 0.2
    others = found_of_all(params, reference, sparse)
    for other in (others[case, 1], others[case, 2], results[case, 2]):
        for name, value in other.items():
            np.testing.assert_allclose(value, terms[name], rtol=1e-5, err_msg=name)


@functools.cache
def gradients_of_all():
    """Returns the gradients of each case, from one program."""
    batch = batch_of(*some_rollouts())

    def loss(params, reference, case):
        terms = found(params, reference, batch, policy(*case, 0.1))
        return terms["policy_loss"] + terms["kl_loss"]

    cases = list(itertools.product(("grpo", "gspo-token"), AGGREGATIONS))
    grads = jax.jit(lambda *args: {case: jax.grad(loss)(*args, case) for case in cases})
    return jax.device_get(grads(parameters(0), parameters(2)))


@pytest.mark.parametrize("algorithm", ["grpo", "gspo-token"])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_the_gradient_is_that_of_finite_differences(algorithm, aggregation):
    objective = policy(algorithm, aggregation, 0.1)
    params, reference, direction = parameters(0), parameters(2), parameters(5)
    rollouts, gains, rewards = some_rollouts()
    grads = gradients_of_all()[algorithm, aggregation]
    slope = sum(np.vdot(grads[name], direction[name]) for name in grads)

    def at(step):
        moved = {
            name: np.asarray(leaf, np.float64) + step * np.asarray(direction[name]) for name, leaf in params.items()
        }
        terms = expected(moved, reference, rollouts, gains, rewards, objective)
        return terms["policy_loss"] + terms["kl_loss"]

    np.testing.assert_allclose(slope, (at(1e-5) - at(-1e-5)) / 2e-5, rtol=1e-4)


def test_first_updates_have_the_ratio_1_and_the_plain_policy_gradient():
    objective, params = policy(beta=0.2), parameters(0)
    rollouts, gains, rewards = some_rollouts(old=0)
    batch = batch_of(rollouts, gains, rewards)
    assert jax.jit(lambda params: found(params, params, batch, objective))(params)[DRIFT] < 1e-6
    log_ratios = jax.jit(lambda params: objective._log_probs(params, {}, batch, None)[0])(params)
    batch["old_log_probs"] = np.where(batch["targets_segmentation"] != 0, log_ratios, 0)
    terms = jax.jit(lambda params: found(params, params, batch, objective))(params)
    assert terms[DRIFT] == terms["kl"] == terms["kl_loss"] == terms["clip_fraction"] == 0
    gains = batch["advantages"].sum() / (batch["targets_segmentation"] != 0).sum()
    np.testing.assert_allclose(terms["policy_loss"], -gains, rtol=1e-6)


def test_evaluation_is_the_mean_reward():
    rollouts, gains, rewards = some_rollouts()
    found = jax.jit(lambda batch: policy().evaluation({}, {}, batch))(batch_of(rollouts, gains, rewards, spare=1))
    assert found.tokens == sum(len(rollout.completion) for rollout in rollouts)
    np.testing.assert_allclose(-found.loss.total / found.loss.weight, rewards.mean(), rtol=1e-6)
    assert found.cross_entropy is None
    assert_equal_bits(found.others["reward"].total, -np.asarray(found.loss.total))

"""DPO and ORPO: closed forms, the gradient, packing, accumulation and tiling, and 50 steps of TRL."""

import itertools
import json
import math
from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest
from support import arguments, first_tree, pinned, state_from

from trainer.config.dump import as_words
from trainer.config.load import load
from trainer.data.batches import make_batch
from trainer.data.documents import Counts, Document
from trainer.data.packing import Packing
from trainer.leaves.source import nested, parted
from trainer.objectives.base import Frozen
from trainer.objectives.policy import Policy
from trainer.objectives.preference import Dpo, Orpo, of_pairs
from trainer.objectives.reference import is_reference
from trainer.training.batches import placed
from trainer.training.build import build
from trainer.training.step import make_gradients
from trainer.weights.model_keys import model_config
from trainer.weights.open import open_source, weight_shapes

TESTS = Path(__file__).parents[2]
GOLDEN, MODEL = json.loads((TESTS / "preferences" / "trl.json").read_text()), TESTS / "goldens" / "llama"
COLUMNS = {"train_data_columns": "[chosen,rejected]", "eval_data_columns": "[chosen,rejected]"}
KEYS = COLUMNS | {
    "use_dpo": True,
    "remat_policy": "none",
    "grain_packing_type": "best_fit",
    "opt_type": "sgd",
    "gradient_clipping_threshold": 0,
}
NO_REFERENCE = np.zeros((1, 6), np.float32)


def rows_of(pairs, length, together=True):
    """Returns a batch of the pairs, packed as `trainer.data` packs them. A pair is a prompt and two answers."""

    def side(prompt, answer):
        loss = np.arange(1, len(prompt) + len(answer)) >= len(prompt)
        return Document(np.array([*prompt, *answer], np.int32), loss)

    documents = [
        side(pair["prompt"], pair["chosen"])._replace(after=(side(pair["prompt"], pair["rejected"]),)) for pair in pairs
    ]
    packing = Packing(length, "best_fit", together)
    rows = [packed.row for packed in packing.rows(((None, document) for document in documents), Counts())]
    fields = (np.stack([row[name] for row in rows]) for name in ("inputs", "targets", "segmentation", "loss"))
    return make_batch(*fields) | {"row": np.arange(len(rows), dtype=np.int32)}


def two_pairs():
    """Returns one row with two pairs, whose answers have 1, 2, 1 and 1 tokens, and a third pair without a rejected
    answer; and the log-probabilities of its targets."""
    segments = np.array([[1, 2, 2, 3, 4, 5]], np.int32)
    batch = {"inputs_segmentation": segments, "targets_segmentation": segments}
    return batch, np.log(np.array([[0.5, 0.25, 0.5, 0.125, 0.5, 0.9]], np.float32))


def sums(objectives, batch, logs, reference=None):
    """Returns the terms of each objective, from one program."""
    terms = jax.jit(lambda logs, batch: [objective.terms(batch, logs, reference) for objective in objectives])
    return jax.device_get(terms(logs, batch))


def test_the_loss_of_dpo_is_its_closed_form():
    batch, logs = two_pairs()
    pairs, weights = jax.jit(lambda batch: (of_pairs(None, batch), Dpo(None).weights(batch)))(batch)
    assert [x.tolist() for x in pairs] == [[[1, 1, 1]], [[2, 1, 0]]]
    assert int(weights.terms["dpo_loss"]) == 2
    assert int(weights.tokens) == 5  # not counting the answer without a partner
    smoothings = (0.0, 0.25)
    terms = sums([Dpo(None, smoothing, beta=2.0) for smoothing in smoothings], batch, logs, NO_REFERENCE)
    for smoothing, (found, rewards) in zip(smoothings, terms, strict=True):
        margins = 2 * math.log(0.5 / (0.25 * 0.5)), 2 * math.log(0.125 / 0.5)
        expected = [
            (1 - smoothing) * math.log1p(math.exp(-margin)) + smoothing * math.log1p(math.exp(margin))
            for margin in margins
        ]
        np.testing.assert_allclose(found["dpo_loss"][0, :2], expected, rtol=1e-6)
        np.testing.assert_allclose(rewards.chosen[0, :2], [2 * math.log(0.5), 2 * math.log(0.125)], rtol=1e-6)
        np.testing.assert_allclose(rewards.rejected[0, :2], [2 * math.log(0.125), 2 * math.log(0.5)], rtol=1e-6)


def test_the_loss_of_orpo_is_its_closed_form():
    batch, logs = two_pairs()
    ((found, rewards),) = sums([Orpo(None, 0.25, weight=3.0)], batch, logs)
    odds = [p / (1 - p) for p in (0.5, math.sqrt(0.125), 0.125, 0.5)]
    ratios = [math.log(odds[0] / odds[1]), math.log(odds[2] / odds[3])]
    expected = [3 * (0.75 * math.log1p(math.exp(-ratio)) + 0.25 * math.log1p(math.exp(ratio))) for ratio in ratios]
    np.testing.assert_allclose(found["odds_ratio_loss"][0, :2], expected, rtol=1e-6)
    np.testing.assert_allclose(found["sft_loss"][0, :2], [math.log(2), math.log(8)], rtol=1e-6)
    np.testing.assert_allclose(rewards.rejected[0, :2], [1.5 * math.log(0.125), 3 * math.log(0.5)], rtol=1e-6)


def test_the_likelihood_of_orpo_can_include_the_prompt():
    logs = np.log(np.array([[0.5, 0.25, 0.5, 0.5]], np.float32))
    batch = {"inputs_segmentation": np.array([[1, 1, 2, 2]]), "targets_segmentation": np.array([[0, 1, 0, 2]])}
    terms = sums([Orpo(None, answer_only=answer_only) for answer_only in (True, False)], batch, logs)
    found = [minimized["sft_loss"][0, 0] for minimized, _ in terms]
    np.testing.assert_allclose(found, [math.log(4), math.log(8) / 2], rtol=1e-6)


@jax.jit
def of_both(logs, batch):
    """Returns the losses and gradients of ORPO and DPO, and the terms of ORPO with weight 1."""

    def loss(logs, objective, reference):
        return sum(term[0, :2].sum() for term in objective.terms(batch, logs, reference).minimized.values())

    both = ((Orpo(None), None), (Dpo(None), NO_REFERENCE))
    found = [jax.value_and_grad(loss)(logs, objective, reference) for objective, reference in both]
    return found, Orpo(None, weight=1.0).terms(batch, logs, None).minimized


@pytest.mark.parametrize("log_p", [0.0, -1e-8, -1e-6, -1e-3, -0.7, -20.0, -200.0])
def test_certain_and_impossible_answers_have_finite_losses_and_gradients(log_p):
    batch, logs = two_pairs()
    logs = np.where(batch["inputs_segmentation"] == 1, log_p, logs).astype(np.float32)
    found, odds = jax.device_get(of_both(logs, batch))
    assert all(np.isfinite(it).all() for it in jax.tree.leaves(found))
    if -100 < log_p < -1e-5:
        p = math.exp(log_p)
        ratio = math.log(p / -math.expm1(log_p)) - math.log(math.sqrt(0.125) / (1 - math.sqrt(0.125)))
        np.testing.assert_allclose(odds["odds_ratio_loss"][0, 0], math.log1p(math.exp(-ratio)), rtol=1e-5)


def test_the_gradient_of_two_tokens_is_its_closed_form():
    """d loss / d log p(chosen) = -beta sigmoid(-margin), and its negative for the rejected token."""
    batch = {name: np.array([[1, 2]], np.int32) for name in ("inputs_segmentation", "targets_segmentation")}
    logs, reference = np.array([[-1.0, -3.0]], np.float32), np.array([[-2.0, -1.0]], np.float32)
    loss = lambda logs: Dpo(None, beta=0.5).terms(batch, logs, reference).minimized["dpo_loss"].sum()  # noqa: E731
    pull = 0.5 / (1 + math.exp(0.5 * (1 + 2)))
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(logs), [[-pull, pull]], rtol=1e-6)


def test_a_policy_is_its_reference_only_if_no_value_differs():
    params, first = {"a": np.ones(3), "b": np.ones(2), "base": np.ones(2)}, {"a": np.ones(3), "b": np.ones(2)}
    same = jax.jit(is_reference)
    assert same(params, first | {"base": None})
    assert not same(params | {"b": np.array([1.0, 2.0])}, first | {"base": None})


@cache
def built(**keys):
    """Returns a run with 32 tokens per row, and its compiled gradients."""
    run = build(load(arguments("nnx", **(KEYS | {"max_target_length": 32} | keys))).config, jax.devices()[:1])
    return run, jax.jit(make_gradients(run.config, run.objective, run.param_shardings))


@cache
def first_state():
    """Returns the initial state on the host, which all configurations share."""
    return first_tree(built()[0])


def some_pairs(count, seed=0):
    rng = np.random.default_rng(seed)

    def some():
        return rng.integers(0, 64, rng.integers(1, 6)).tolist()

    return [{"prompt": some(), "chosen": some(), "rejected": [*some(), 7]} for _ in range(count)]


def moved(tree, scale=0.05):
    """Returns `tree` with slightly perturbed parameters."""
    rng = np.random.default_rng(1)
    params = jax.tree.map(lambda x: (x + scale * rng.normal(size=x.shape)).astype(x.dtype), tree.params)
    return tree._replace(params=params)


def padded(batch, rows=8):
    """Returns `batch` padded with empty rows, so that one program serves all batch sizes."""
    count = rows - len(batch["row"])
    more = {name: np.pad(array, [(0, count), *[(0, 0)] * (array.ndim - 1)]) for name, array in batch.items()}
    return more | {"row": np.arange(rows, dtype=np.int32)}


def gradients(batch, policy_of=moved, **keys):
    run, fn = built(**keys)
    tree = first_state()
    frozen = tree.params if run.frozen.of_parameters else ()
    return jax.device_get(fn(policy_of(tree), placed(run, padded(batch)), frozen))


@pytest.mark.parametrize("keys", [{}, {"scan_layers": False, "dtype": "bfloat16"}], ids=str)
def test_equal_policy_and_reference_give_log_2_and_accuracy_0(keys):
    found = gradients(rows_of(some_pairs(8), 32), lambda tree: tree, **keys)
    assert found.loss == pytest.approx(math.log(2), abs=2e-7)  # float32
    for name in ("chosen_reward", "rejected_reward", "reward_margin", "reward_accuracy"):
        assert found.means[name] == 0
    assert max(np.abs(grad).max() for grad in jax.tree.leaves(found.grads)) > 1e-4


def test_equal_parameters_have_equal_log_probabilities_whatever_two_programs_compute():
    calls = itertools.count(1)

    def apply(params, rest, x, *args, method="", capture=(), **_):
        if method == "head":
            return next(calls) * x * params["w"], {}, None
        return jax.nn.one_hot(x, 64), {}, None

    @jax.jit
    def sums(params, first, batch):
        return Dpo(apply, frozen=Frozen((), (), None)).sums(params, {}, batch, None, frozen=first)

    first, batch = {"w": np.ones(64, np.float32)}, rows_of(some_pairs(8), 32)
    other = {"w": np.where(np.arange(64) == 3, 2, first["w"])}
    for params, equal in ((first, True), (other, False)):
        found = sums(params, first, batch).measured
        assert (found["reward_accuracy"] == found["reward_margin"] == 0) == equal


@pytest.mark.parametrize("name", ["dpo", "grpo"])
def test_the_reference_has_neither_dropout_nor_another_key(name):
    keys = []

    def apply(params, rest, x, *args, method="", capture=(), key=None, **_):
        if method == "head":
            return x @ params["w"], {}, None
        keys.append(key)
        return jax.nn.one_hot(x, 64), {}, None

    first, own = {"w": np.eye(64, dtype=np.float32)}, jax.random.key(0)
    batch = rows_of(some_pairs(8), 32)
    batch |= dict.fromkeys(("old_log_probs", "advantages", "rewards"), np.zeros((len(batch["row"]), 32), np.float32))
    frozen = Frozen((), (), None)
    made = {
        "dpo": Dpo(apply, frozen=frozen),
        "grpo": Policy(apply, 0.2, 0.2, 0.1, False, "token-mean", 1.0, frozen),
    }
    jax.eval_shape(lambda: made[name].sums(first, {}, batch, own, frozen=first))
    assert keys == [own, None]


def close(left, right, tolerance=1e-5):
    """Allows for the rounding of sums in another order."""
    assert left.loss == pytest.approx(right.loss, rel=tolerance)
    for name, value in left.means.items():
        assert value == pytest.approx(right.means[name], rel=tolerance, abs=tolerance)
    for one, other in zip(*map(jax.tree.leaves, (left.grads, right.grads)), strict=True):
        np.testing.assert_allclose(one, other, atol=tolerance * np.abs(other).max())


@pytest.mark.rest(covered_by="dpo", cases=("orpo",))
@pytest.mark.parametrize("algo", ["dpo", "orpo"])
def test_neither_packing_nor_microbatches_nor_tiles_change_it(algo):
    pairs = some_pairs(8)
    alone = rows_of(pairs, 32, together=False)
    assert alone["inputs_segmentation"].max() == 2
    expected = gradients(alone, dpo_algo=algo)
    packed = rows_of(pairs, 32)
    assert len(packed["row"]) < 8
    assert packed["inputs_segmentation"].max() > 2
    close(gradients(packed, dpo_algo=algo), expected)
    close(gradients(alone, dpo_algo=algo, num_vocab_tiling=4, gradient_accumulation_steps=4), expected)


def test_evaluation_is_the_step_without_an_update():
    (run, _), tree = built(), first_state()
    batch = rows_of(some_pairs(8), 32, together=False)
    policy, expected = moved(tree), gradients(batch)
    found = jax.jit(run.objective.evaluation)(policy.params, policy.rest, placed(run, batch), frozen=tree.params)
    assert found.loss.total / found.loss.weight == pytest.approx(expected.loss, rel=1e-5)
    for name, mean in found.others.items():
        assert mean.total / mean.weight == pytest.approx(expected.means[name], rel=1e-5)


@pytest.mark.parametrize("name", ["dpo-smoothed", "orpo"])
def test_fifty_steps_are_those_of_trl(name):
    there = GOLDEN["runs"][name]
    keys = {"learning_rate": there["learning_rate"], "lr_schedule_type": "constant"}
    keys |= {"warmup_steps_fraction": 0, "max_target_length": 64, "per_device_batch_size": 4, "dtype": "float32"}
    keys |= {"dpo_algo": there["algo"], "dpo_label_smoothing": there.get("label_smoothing", 0.0)}
    keys |= {"dpo_beta" if there["algo"] == "dpo" else "dpo_orpo_lambda": there["beta"]}
    keys |= {"sft_train_on_completion_only": there["algo"] == "dpo"}  # TRL's ORPO trains on prompts, too
    source = open_source(str(MODEL))
    config = model_config(source.keys, as_words(KEYS | pinned("nnx") | keys), str(MODEL))
    leaves = source.leaves(config, weight_shapes(config))
    weights = {name: leaf.read(np.dtype(np.float32), lambda size: None) for name, leaf in leaves.items()}
    run = build(config, jax.devices()[:1])
    tree = first_tree(run, parted(nested(weights), run.model.abstract[1])[0])
    state, other = state_from(run, tree), state_from(run, tree)
    frozen = run.frozen.make(run.codec.unpack(other).params)
    step, found = run.step.lower(*run.abstract_args()).compile(), []
    pairs = GOLDEN["pairs"]
    for i in range(50):
        batch = rows_of([pairs[(4 * i + j) % len(pairs)] for j in range(4)], 64, together=False)
        state, metrics = step(state, placed(run, batch), frozen)
        found.append(jax.device_get(metrics))
    names = {"loss": "loss", "chosen_reward": "chosen", "rejected_reward": "rejected", "reward_margin": "margins"}
    for ours, theirs in (names | {"reward_accuracy": "accuracies"}).items():
        expected = np.array(there["values"][theirs])
        here = np.array([metrics[ours] for metrics in found])
        # Adam amplifies rounding, which depends on the processor; measured: 1.5e-5.
        np.testing.assert_allclose(here, expected, atol=5e-5 * np.abs(expected).max(), err_msg=ours)

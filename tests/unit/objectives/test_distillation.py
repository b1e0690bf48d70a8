"""Distillation: terms and gradients against float64; tiles, microbatches, vocabularies; 30 steps of TRL's GKD.

`ops/test_divergence.py` compares the divergences themselves with their definitions.
"""

import copy
import dataclasses
import json
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import (
    ALL_COMBINATIONS,
    TINY,
    arguments,
    first_tree,
    lowered_update,
    packed_batch,
    pinned,
    state_from,
)

from trainer.config.dump import as_words
from trainer.config.errors import UserError
from trainer.config.load import load
from trainer.config.resolve import resolve
from trainer.data.batches import make_batch
from trainer.leaves.source import nested, parted
from trainer.objectives.distillation import KNOWN, Schedule, known_so_far
from trainer.ops.divergence import divergence_of
from trainer.training.batches import placed
from trainer.training.build import build
from trainer.training.step import make_gradients
from trainer.weights.model_keys import load_model_keys
from trainer.weights.open import open_source, weight_shapes
from trainer.weights.teacher_files import load_teacher, with_teacher

TESTS = Path(__file__).parents[2]
GOLDEN, MODEL = json.loads((TESTS / "distillation" / "trl.json").read_text()), TESTS / "goldens" / "llama"
TEACHER = {"base_emb_dim": 24, "base_num_decoder_layers": 3, "base_mlp_dim": 40, "logits_via_embedding": False}
SIZES = (
    *("base_emb_dim", "base_num_query_heads", "base_num_kv_heads", "base_mlp_dim", "base_num_decoder_layers"),
    *("head_dim", "vocab_size", "logits_via_embedding"),
)
KEYS = {"use_distill": True, "remat_policy": "none", "vocab_size": 64, "distill_alpha": 0.7, "distill_temperature": 1.5}
SGD = {"opt_type": "sgd", "gradient_clipping_threshold": 0}
LOSSES = ("forward_kl", "reverse_kl", "jensen_shannon")


@cache
def built(combination="nnx", devices=1, vocab_size=64, **keys):
    """Returns a run whose teacher has `vocab_size` tokens."""
    sizes = {name: TINY[name] for name in SIZES} | TEACHER | {"vocab_size": vocab_size}
    words = arguments(combination, **KEYS | {"teacher_overrides": sizes} | keys)
    return build(load(words).config, jax.devices()[:devices])


def drawn(abstract, seed=3, scale=0.5):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: (scale * rng.normal(size=leaf.shape)).astype(leaf.dtype), abstract)


def example(run):
    """Returns an initial state, the teacher's arrays, and a batch with padding and tokens without loss."""
    batch = packed_batch(run.config, run.rows)
    batch["targets_segmentation"][1, ::3] = 0
    return first_tree(run), jax.device_put(drawn(run.frozen.abstract)), batch


PROGRAMS = {}  # by the id of the run, which is kept


def gradients(run, tree, frozen, batch):
    if id(run) not in PROGRAMS:
        fn = jax.jit(run.sharded(make_gradients(run.config, run.objective, run.param_shardings)))
        PROGRAMS[id(run)] = run, fn
    return jax.device_get(PROGRAMS[id(run)][1](tree, placed(run, batch), frozen))


def evaluated(run, tree, frozen, batch):
    """Returns the means that an evaluation reports. It computes no gradients."""
    evaluation = jax.jit(run.sharded(run.objective.evaluation))
    found = evaluation(tree.params, tree.rest, placed(run, batch), frozen=frozen)
    return {name: float(mean.total / mean.weight) for name, mean in found.others.items()}


@cache
def forward(vocab_size=None):
    """Returns `(params, rest, batch) -> logits`, for the student or the teacher with `vocab_size` tokens."""
    run = built(vocab_size=vocab_size or 64)
    apply = run.objective.teacher.apply if vocab_size else run.model.apply

    def logits(params, rest, batch):
        inputs = (batch["inputs"], batch["inputs_position"], batch["inputs_segmentation"], batch["row"])
        hidden = apply(params, rest, *inputs)[0]
        return apply(params, rest, hidden, method="head")[0]

    return jax.jit(run.sharded(logits))


def float64_logits(*arguments, vocab_size=None):
    """Returns float64 logits of the model in float32; see `forward`."""
    return np.asarray(forward(vocab_size)(*arguments), np.float64)


def log_softmax(x):
    return x - np.logaddexp.reduce(x, axis=-1, keepdims=True)


@pytest.mark.parametrize("name", LOSSES)
def test_terms_are_those_of_float64(name):
    # The first run is that of other tests, too.
    run = built(**({"distill_loss": name, "distill_jensen_shannon_weight": 0.3} if name != LOSSES[0] else {}))
    tree, frozen, batch = example(run)
    found = gradients(run, tree, frozen, batch)
    own = float64_logits(tree.params, tree.rest, batch)
    theirs = float64_logits(frozen["params"], frozen["rest"], batch, vocab_size=64)
    real = batch["targets_segmentation"] != 0

    def mean(values):
        return values[real].mean()

    log_p, log_q = log_softmax(theirs / 1.5), log_softmax(own / 1.5)
    mixture = np.log(0.3 * np.exp(log_p) + 0.7 * np.exp(log_q))

    def kl(a, b):
        return np.sum(np.exp(a) * (a - b), -1)

    divergence = {
        "forward_kl": kl(log_p, log_q),
        "reverse_kl": kl(log_q, log_p),
        "jensen_shannon": 0.3 * kl(log_p, mixture) + 0.7 * kl(log_q, mixture),
    }[name]
    nll, teacher_nll = (
        -np.take_along_axis(log_softmax(x), batch["targets"][..., None], -1)[..., 0] for x in (own, theirs)
    )
    expected = {
        "divergence": mean(divergence),
        "distill_loss": 0.7 * 1.5**2 * mean(divergence),
        "lm_loss": mean(nll),
        "label_loss": 0.3 * mean(nll),
        "teacher_lm_loss": mean(teacher_nll),
    }
    assert {name: float(value) for name, value in found.means.items()} == pytest.approx(expected, rel=2e-5)
    assert found.loss == pytest.approx(expected["distill_loss"] + expected["label_loss"], rel=2e-5)


def close(left, right, tolerance=1e-5):
    """Allows for the rounding of sums in another order."""
    assert left.loss == pytest.approx(right.loss, rel=tolerance)
    for name, value in left.means.items():
        assert value == pytest.approx(right.means[name], rel=tolerance, abs=tolerance)
    for one, other in zip(*map(jax.tree.leaves, (left.grads, right.grads)), strict=True):
        np.testing.assert_allclose(one, other, atol=tolerance * np.abs(other).max())


OTHERS = {
    "mesh": {"devices": 8, "per_device_batch_size": 0.5, "num_vocab_tiling": 2}
    | {f"ici_{axis}_parallelism": 2 for axis in ("fsdp", "tensor", "context")},
    "Zero-1": {"devices": 4, "per_device_batch_size": 1, "ici_data_parallelism": 4, "ici_fsdp_parallelism": 1}
    | {"shard_optimizer_over_data": True},
}


@pytest.mark.parametrize("case", OTHERS)
def test_the_mesh_does_not_change_it(case):
    run = built()
    tree, frozen, batch = example(run)
    found = gradients(built(**OTHERS[case]), tree, frozen, batch)
    close(found, gradients(run, tree, frozen, batch))


def test_the_memory_of_a_step_in_tiles():
    """A tiled step needs at most the memory of tiled training plus one forward pass, plus half of one row's logits."""
    sizes = {"vocab_size": 2048, "max_target_length": 128, "per_device_batch_size": 2, "num_vocab_tiling": 16, **SGD}
    with_teacher = KEYS | {"teacher_overrides": TEACHER | {"vocab_size": 2048}}
    run, plain = (build(load(arguments("nnx", **k | sizes)).config, jax.devices()[:1]) for k in (with_teacher, {}))
    hidden = jax.jit(run.sharded(run.objective.teacher_hidden))
    forward = hidden.lower(run.frozen.abstract, run.abstract_batch(run.rows)).compile()
    taught, trained, once = (x.memory_analysis().temp_size_in_bytes for x in (run.compile(), plain.compile(), forward))
    assert taught <= trained + once + 128 * 2048 * 4 / 2


@pytest.mark.parametrize("shape", ["linear", "cosine"])
def test_schedules_are_maxtexts(shape):
    schedule = Schedule(0.2, 0.9, shape, 10)
    for step in (0, 3, 10, 15):
        progress = min(step / 10, 1)
        by_cosine = 0.9 + (0.2 - 0.9) * 0.5 * (1 + np.cos(np.pi * progress))
        expected = 0.2 + 0.7 * progress if shape == "linear" else by_cosine
        assert schedule(jnp.int32(step)) == pytest.approx(expected, abs=1e-6)
    assert schedule(None) == 0.2
    assert Schedule(0.2, 0.2, "constant", 10)(jnp.int32(5)) == 0.2


def test_neither_tiles_nor_microbatches_nor_a_schedule_change_it():
    """At step 5 of 10, the schedules have the constants of other runs."""
    ends = {"distill_alpha": 1.0, "distill_alpha_schedule": "linear", "distill_alpha_end": 0.4, "steps": 10}
    ends |= {"distill_temperature": 2.0, "distill_temperature_schedule": "linear", "distill_temperature_end": 1.0}
    run = built(num_vocab_tiling=4, gradient_accumulation_steps=2, per_device_batch_size=2, **ends)
    tree, frozen, batch = example(run)
    late = gradients(run, tree._replace(step=np.int32(5)), frozen, batch)
    close(late, gradients(built(), tree, frozen, batch))


@pytest.mark.parametrize("vocab_size", [56, 72])
def test_a_teacher_with_fewer_or_more_tokens(vocab_size):
    """Only tokens of both vocabularies are compared, and only up to the first input that the teacher lacks."""
    run = built(vocab_size=vocab_size)
    tree, frozen, batch = example(run)
    found = evaluated(run, tree, frozen, batch)
    shared, readable = min(vocab_size, 64), np.minimum(batch["inputs"], vocab_size - 1)
    own, at = float64_logits(tree.params, tree.rest, batch), batch | {"inputs": readable}
    theirs = float64_logits(frozen["params"], frozen["rest"], at, vocab_size=vocab_size)
    log_p, log_q = (log_softmax(x[..., :shared] / 1.5) for x in (theirs, own))
    real = batch["targets_segmentation"] != 0
    known = real & known_so_far(batch["inputs"] < shared, batch["inputs_segmentation"])
    assert known.sum() < real.sum() if vocab_size < 64 else (known == real).all()
    expected = np.sum(np.exp(log_p) * (log_p - log_q), -1)[known].sum() / real.sum()
    assert found["divergence"] == pytest.approx(expected, rel=2e-5)
    in_both = known & (batch["targets"] < shared)
    nll = -np.take_along_axis(log_softmax(theirs), np.minimum(batch["targets"], vocab_size - 1)[..., None], -1)[..., 0]
    assert found["teacher_lm_loss"] == pytest.approx(nll[in_both].mean(), rel=2e-5)
    assert (KNOWN in run.objective.prepare(batch)) == (vocab_size < 64)


def test_texts_are_read_up_to_an_unknown_token_of_their_segment():
    known = np.array([[1, 0, 1, 1, 0, 0, 1, 1]], bool)
    segments = np.array([[1, 1, 1, 2, 2, 3, 3, 0]])
    assert known_so_far(known, segments).tolist() == [[True, False, False, True, False, False, False, True]]


@pytest.mark.rest(covered_by="the last combination", cases=ALL_COMBINATIONS[1:-1])
@pytest.mark.parametrize("combination", ALL_COMBINATIONS[1:])
def test_all_combinations_have_the_same_program(combination):
    everything = {"num_vocab_tiling": 4, "mtp_num_layers": 1, "distill_alpha_schedule": "linear"}
    everything |= {"distill_alpha_end": 0.9, "gradient_accumulation_steps": 2, "per_device_batch_size": 2, **SGD}
    assert lowered_update(built(combination, **everything)).as_text() == reference_text(**everything)


@cache
def reference_text(**keys):
    return lowered_update(built(ALL_COMBINATIONS[0], **keys)).as_text()


def test_objectives_that_wrap_others_can_be_copied():
    run = built(mtp_num_layers=1)
    assert copy.copy(run.objective).teacher is run.objective.teacher


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        (
            {"distill_vocab_size": 65, "teacher_overrides": TEACHER | {"vocab_size": 64}},
            "has only 64 tokens",
        ),
        ({"teacher_overrides": {"steps": 5}}, "steps is not a key of the teacher's model"),
        ({"distill_alpha": 0.0}, "nothing would be learned"),
        ({"use_dpo": True, "dataset_type": "grain"}, "use_dpo=true"),
        ({"ici_pipeline_parallelism": 2}, "does not run in a pipeline"),
        ({"distill_alpha_schedule": "linear"}, "set the value at the end"),
        ({"distill_alpha_schedule": "linear", "distill_alpha_end": 1.5}, r"distill_alpha_end=1.5 .*\[0, 1\]"),
        ({"distill_temperature_schedule": "cosine", "distill_temperature_end": 0.0}, "distill_temperature_end=0.0"),
        ({"teacher_overrides": {"load_parameters_path": "x"}}, "is teacher_path"),
        ({"teacher_overrides": {"max_target_length": 8}}, "same value for student and teacher"),
        ({"teacher_overrides": {}}, "there is no teacher"),
    ],
)
def test_what_is_refused(keys, problem):
    with pytest.raises(UserError, match=problem):
        build(load(arguments("nnx", **KEYS | keys)).config, jax.devices()[:1])


def test_a_step_without_a_teacher_is_not_compiled():
    """Reads the command as trainer.train_compile does."""
    with pytest.raises(UserError, match="there is no teacher"):
        build(with_teacher(load(arguments("nnx", **KEYS))).config, jax.devices()[:1])


def test_a_teacher_that_the_mesh_does_not_divide():
    keys = KEYS | {"ici_tensor_parallelism": 2, "ici_fsdp_parallelism": 1, "per_device_batch_size": 2}
    keys |= {"teacher_overrides": TEACHER | {"base_mlp_dim": 41, "vocab_size": 64}}
    with pytest.raises(UserError, match=r"(?s)the teacher: .*base_mlp_dim=41"):
        build(load(arguments("nnx", **keys)).config, jax.devices()[:2])


def rows_of(sequences, length=32):
    """Returns a batch with one sequence per row; only completions bear loss."""
    fields = np.zeros((4, len(sequences), length), np.int32)
    for row, sequence in enumerate(sequences):
        prompt, tokens = len(sequence["prompt"]), [*sequence["prompt"], *sequence["completion"]]
        count = len(tokens) - 1
        fields[:2, row, :count] = tokens[:-1], tokens[1:]
        fields[2, row, :count], fields[3, row, :count] = 1, np.arange(count) >= prompt - 1
    inputs, targets, segments, bears_loss = fields
    return make_batch(inputs, targets, segments, bears_loss.astype(bool)) | {
        "row": np.arange(len(sequences), dtype=np.int32)
    }


def teacher_of(run):
    return load_teacher(run.config.teacher_path, run.objective.teacher.config, run.frozen.abstract, print)


def weights_at(place, config):
    source = open_source(str(place))
    leaves = source.leaves(config, weight_shapes(config))
    return {name: leaf.read(np.dtype(np.float32), lambda size: None) for name, leaf in leaves.items()}


def test_thirty_steps_are_those_of_trl():
    """TRL lacks the factor T^2, so its learning rate is T^2 times ours. The gradients of the other divergences are
    tested in ops/test_divergence.py."""
    there = GOLDEN["runs"]["jensen-shannon-0.3-temperature-2"]
    square = there["temperature"] ** 2
    keys = {"use_distill": True, "teacher_path": str(TESTS / "distillation" / "teacher"), "distill_alpha": 1.0}
    keys |= {"distill_temperature": there["temperature"], "distill_loss": "jensen_shannon"}
    keys |= {"distill_jensen_shannon_weight": there["beta"], "dtype": "float32"}
    keys |= {"learning_rate": there["learning_rate"] / square, "lr_schedule_type": "constant", **SGD}
    keys |= {"warmup_steps_fraction": 0, "max_target_length": 32, "per_device_batch_size": 4}
    loaded = with_teacher(load_model_keys(open_source(str(MODEL)).keys, as_words(pinned("nnx") | keys), str(MODEL)))
    config = resolve(loaded.config, device_count=1, platform="cpu")
    run = build(config, jax.devices()[:1])
    tree = first_tree(run, parted(nested(weights_at(MODEL, config)), run.model.abstract[1])[0])
    state, frozen, found = state_from(run, tree), teacher_of(run), []
    step = run.step.lower(*run.abstract_args()).compile()
    sequences = GOLDEN["sequences"]
    for i in range(30):
        batch = rows_of([sequences[(4 * i + j) % len(sequences)] for j in range(4)])
        state, metrics = step(state, placed(run, batch), frozen)
        found.append(float(metrics["loss"]) / square)
    np.testing.assert_allclose(found, there["losses"], rtol=5e-5)  # float32 rounding, which training amplifies


def test_a_custom_divergence_replaces_it():
    run = built()
    twice = dataclasses.replace(run.objective, divergence=lambda *x: 2 * divergence_of("forward_kl", 0.5)(*x))
    tree, frozen, batch = example(run)
    found = evaluated(run._replace(objective=twice), tree, frozen, batch)
    expected = gradients(run, tree, frozen, batch)
    assert found["divergence"] == pytest.approx(2 * expected.means["divergence"])

"""Distillation from saved logits: all logits reproduce the teacher's loss, and k of them match a float64 formula."""

import functools

import jax
import numpy as np
import pytest
from compiler import EXACT
from support import arguments, assert_equal_bits, packed_batch, random_params

from trainer.config.capabilities.invariant_keys import compiler_options
from trainer.config.errors import UserError
from trainer.config.load import load
from trainer.data.dataset import Dataset
from trainer.data.streams import PreparedStream
from trainer.data.teacher_logits import with_logits
from trainer.training.batches import placed
from trainer.training.build import build
from trainer.training.saved_logits import save_logits
from trainer.weights.teacher_files import with_teacher

SIZE, ROWS = 10, 4
TEACHER = {"base_emb_dim": 32, "base_mlp_dim": 16, "vocab_size": 64, "base_num_decoder_layers": 1}
TILES = {"num_vocab_tiling": 2}
INVARIANT = {"batch_invariant": True, "max_target_length": 128}


class Rows:
    """A source with the rows of `packed_batch`."""

    size = SIZE

    def __init__(self, config):
        self.all, self.length = packed_batch(config, SIZE), config.max_target_length
        del self.all["row"]

    def rows(self, indices):
        return {name: values[indices] for name, values in self.all.items()}


def run_of(devices=1, **keys):
    own = {"use_distill": True, "base_num_decoder_layers": 1, "per_device_batch_size": ROWS // devices, **keys}
    if "teacher_logits_path" not in keys:
        own["teacher_overrides"] = TEACHER
    return build(with_teacher(load(arguments("nnx", **own))).config, jax.devices()[:devices])


def saved(folder, k, devices=1, **keys):
    """Returns a run with a random teacher, and the rows with the teacher's k largest logits."""
    run = run_of(devices, save_teacher_logits=folder, teacher_logits_k=k, **keys)
    weights = jax.tree.map(
        lambda leaf, like: jax.device_put(3 * leaf, like.sharding),
        random_params(run.frozen.abstract),
        run.frozen.abstract,
    )
    open_stream = functools.partial(PreparedStream, seed=0, shuffle=True)
    rows = Dataset(None, None, {"order": ""}, "", open_stream, source=Rows(run.config))
    save_logits(run, rows, lambda: weights, lambda line: None)
    return run, weights, with_logits(rows, str(folder))


def first_batch(rows):
    return next(rows.train_stream(rows=ROWS))[0]


def hidden_of(run):
    """Returns random hidden states of the student."""
    shape = ROWS, run.config.max_target_length, run.config.base_emb_dim
    return np.random.default_rng(2).normal(size=shape).astype(np.float32)


def loss(run, batch, params, teacher=None):
    """Returns the sums of the run's loss terms for random hidden states of the student.

    With tiles, which have a custom backward pass, also returns the gradient of the minimized sum with respect to the
    parameters and these states, except with batch_invariant.
    """
    frozen = {} if teacher is None else {"frozen": teacher}

    def of(params, hidden, batch, frozen):
        minimized, measured = run.objective.of_hidden(params, {}, hidden, batch, **frozen)
        return sum(minimized.values()), (minimized, measured)

    if run.objective.tiling and not run.config.batch_invariant:
        of = jax.value_and_grad(of, argnums=(0, 1), has_aux=True)
    options = EXACT | compiler_options(run.config, "cpu") if run.config.batch_invariant else {}
    step = jax.jit(run.sharded(of), compiler_options=options)
    return step(params, hidden_of(run), placed(run, batch), frozen)


@pytest.mark.parametrize(
    ("devices", "keys"),
    [
        (2, TILES | {"distill_temperature": 2.0, "distill_temperature_schedule": "linear"}),
        (1, INVARIANT | TILES),
        (1, {"distill_vocab_size": 60}),
    ],
    ids=["2 devices, tiles", "batch_invariant, tiles", "a part of the vocabulary"],
)
def test_all_logits_give_the_loss_of_the_teacher(tmp_path, devices, keys):
    if "distill_temperature_schedule" in keys:
        keys = keys | {"distill_temperature_end": 1.0}
    run, weights, rows = saved(tmp_path / "out", 100, devices, **keys)
    batch, params = first_batch(rows), random_params(run.model.abstract[0])
    own = run_of(devices, teacher_logits_path=tmp_path / "out", **keys)
    assert own.frozen.abstract == ()
    found, wanted = loss(own, batch, params), loss(run, batch, params, weights)
    if "batch_invariant" in keys:
        assert_equal_bits(found, wanted)
    else:  # another program, which may add in another order
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), found, wanted)


def test_k_logits_and_the_mass_of_the_others(tmp_path):
    keys = {"distill_temperature": 2.0, "distill_vocab_size": 60, "vocab_size": 80, "num_vocab_tiling": 4}
    run, teacher, rows = saved(tmp_path / "out", 5, **keys)
    own = run_of(teacher_logits_path=tmp_path / "out", **keys | {"distill_vocab_size": -1, "distill_alpha": 1.0})
    batch, params = first_batch(rows), random_params(own.model.abstract[0])
    (_, (minimized, measured)), _ = loss(own, batch, params)

    def logits(run, params, rest, hidden):
        return np.asarray(run.apply(params, rest, hidden, method="head")[0], np.float64)[..., :60] / 2

    student = logits(own.model, params, {}, hidden_of(own))
    of_teacher = run.sharded(run.objective.teacher_hidden)(teacher, placed(run, batch))
    teachers = logits(run.objective.teacher, teacher["params"], teacher["rest"], of_teacher)

    p, q = (np.exp(x) / np.exp(x).sum(-1, keepdims=True) for x in (teachers, student))
    likely = np.argsort(-p, axis=-1)[..., :5]
    p, q = (np.take_along_axis(x, likely, -1) for x in (p, q))
    p, q = (np.concatenate([x, 1 - x.sum(-1, keepdims=True)], -1) for x in (p, q))
    kl = (p * np.log(p / q)).sum(-1)
    wanted = 0.0
    for row in range(ROWS):
        for token in range(own.config.max_target_length):
            segment = batch["inputs_segmentation"][row]
            before = (segment == segment[token]) & (np.arange(len(segment)) <= token)
            if segment[token] and (batch["inputs"][row][before] < 60).all():
                wanted += kl[row, token]
    assert wanted > 1
    np.testing.assert_allclose(measured["divergence"], wanted, rtol=1e-5)  # float32 rounding
    np.testing.assert_allclose(minimized["distill_loss"], 4 * wanted, rtol=1e-5)
    assert "teacher_lm_loss" not in measured

    def tokens(**changes):
        run_of(teacher_logits_path=tmp_path / "out", **keys | changes)

    with pytest.raises(UserError, match=r"distill_temperature is 2\.0 in the saved logits and 1\.0 in this run"):
        tokens(distill_temperature=1.0)
    with pytest.raises(UserError, match="distill_vocab_size is 60 in the saved logits and 40 in this run"):
        tokens(vocab_size=40, distill_vocab_size=-1)
    with pytest.raises(UserError, match="schedule is constant in the saved logits and linear in this run"):
        tokens(distill_temperature_schedule="linear", distill_temperature_end=1.0)

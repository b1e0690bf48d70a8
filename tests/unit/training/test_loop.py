"""The loop around a step, with steps and evaluations that compute nothing."""

import contextlib
import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import arguments

from trainer.checkpoint.save import is_due
from trainer.config import load
from trainer.data import open_dataset
from trainer.objectives import Evaluation, Mean
from trainer.training import Reports, Start, build, fit
from trainer.training import loop as module
from trainer.training.batches import LoadedAhead, held_out_batches
from trainer.training.loop import evaluate

STEP, EVALUATION = 1.0, 1000.0  # seconds on the clock below


class Loop:
    """Runs `fit` with a tiny configuration. Every step takes STEP seconds, every evaluation batch EVALUATION
    seconds."""

    def __init__(self, monkeypatch, **keys):
        config = load(arguments("nnx", **keys)).config
        self.clock, self.batches, self.losses = 0.0, 0, itertools.count(5)
        self.steps, self.evaluations, self.saved = [], [], {}
        self.run = build(config, jax.devices()[:1])._replace(eval_step=self._eval_step)
        self.dataset = open_dataset(self.run.config, print)
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=self._now))
        monkeypatch.setattr(module, "maybe_save_checkpoint", self._save)

    def fit(self, source=None):
        reports = Reports(self.steps.append, self.evaluations.append, lambda: None)
        fit(self.run, self._step, Start([]), self.dataset, reports, source=source)

    def _now(self):
        self.clock += 1e-3  # so that no two readings are equal
        return self.clock

    def _step(self, leaves, batch, frozen):
        self.clock += STEP
        values = {"loss": 1.0, "grad_norm": 1.0, "skipped": 0, "finite": 1, "tokens": 8, "learning_rate": 0.1}
        return leaves, {name: np.asarray(value) for name, value in values.items()}

    def _eval_step(self, state, batch, frozen, table):
        self.clock += EVALUATION
        self.batches += 1
        mean = Mean(np.asarray(float(next(self.losses))), np.asarray(1))
        return {"means": Evaluation(np.asarray(1), mean, mean), "bytes": np.asarray(0)}

    def _save(self, manager, state, updates, *, config, before, initial=False, **_):
        if is_due(config, updates, initial=initial):
            self.saved[updates] = dict(before())


def test_a_checkpoint_gets_the_evaluation_of_its_own_step_or_none(monkeypatch):
    loop = Loop(monkeypatch, steps=8, eval_interval=4, eval_steps=1, checkpoint_period=2)
    loop.fit()
    assert [(row["step"], row["eval_loss"]) for row in loop.evaluations] == [(3, 5.0), (7, 6.0)]
    assert loop.saved == {2: {}, 4: {"eval_loss": 5.0}, 6: {}, 8: {"eval_loss": 6.0}}


def test_a_steps_time_has_no_evaluation_in_it(monkeypatch):
    loop = Loop(monkeypatch, steps=6, eval_interval=2, eval_steps=1, checkpoint_period=100)
    loop.fit()
    assert [row["step"] for row in loop.steps] == list(range(6))
    assert all(row["step_time"] < EVALUATION for row in loop.steps)
    assert [row["eval_time"] for row in loop.evaluations] == pytest.approx([EVALUATION] * 3, abs=0.1)


@pytest.mark.parametrize("asked_after", [1, 3])
def test_a_signal_within_an_evaluation_takes_no_further_batch(monkeypatch, asked_after):
    class Asked:
        @property
        def requested(self):
            return loop.batches >= asked_after

    loop = Loop(monkeypatch, eval_interval=1, eval_steps=-1)
    assert evaluate(loop.run, [], held_out_batches(loop.run, loop.dataset), None, 0, Asked()) is None
    assert loop.batches == asked_after
    loop.batches = -1000
    assert evaluate(loop.run, [], held_out_batches(loop.run, loop.dataset), None, 0, Asked()) is not None
    assert loop.batches + 1000 > 3, "there are more batches than that"


def test_batches_may_come_from_a_source_that_looks_at_the_state(monkeypatch):
    class Source:
        waited, updates, metrics = 0.0, 1, {"temperature": 3.5}

        def __init__(self, run, dataset, start):
            self.stream = dataset.train_stream(start.position, rows=run.rows)

        def take(self, state, interrupted):
            assert state() == []
            assert not interrupted()
            taken.append(len(loop.steps))  # reported one step late
            return next(self.stream)

    loop, taken = Loop(monkeypatch, steps=4), []
    loop.fit(lambda *args: contextlib.nullcontext(Source(*args)))
    assert taken == [0, 0, 1, 2]
    assert [row["temperature"] for row in loop.steps] == [3.5] * 4


class OnDevices(LoadedAhead):
    """A source that computes on devices with values of the host, for training and for evaluation."""

    def take(self, state, interrupted):
        batch, position = super().take(state, interrupted)
        return self.computed(batch), position

    def held_out(self, state):
        return map(self.computed, super().held_out(state))

    def computed(self, batch):
        return {name: np.asarray(jnp.asarray(x) + np.int32(0)) for name, x in batch.items()}


def test_a_source_may_compute_on_devices(monkeypatch):
    loop = Loop(monkeypatch, steps=2, eval_interval=2, eval_steps=1)
    loop.fit(OnDevices)
    assert (len(loop.steps), len(loop.evaluations)) == (2, 1)


@pytest.mark.parametrize("part", ["_step", "_eval_step"])
def test_a_step_that_transfers_implicitly_fails(monkeypatch, part):
    """A value that the step takes from the host is a mistake that would only make every step slower."""
    step = getattr(Loop, part)

    def transferring(self, *args):
        jnp.zeros(3) + np.ones(3, np.float32)
        return step(self, *args)

    monkeypatch.setattr(Loop, part, transferring)
    loop = Loop(monkeypatch, steps=2, eval_interval=2, eval_steps=1)
    with pytest.raises(jax.errors.JaxRuntimeError, match="Disallowed host-to-device transfer"):
        loop.fit(OnDevices)

"""The loop around a step, with steps and evaluations that compute nothing."""

import contextlib
import functools
import itertools
import os
import signal
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from manager_cases import SIDECAR, small_tree
from support import arguments, tiny_config

from trainer.checkpoint.manager import CheckpointManager
from trainer.checkpoint.save import is_due
from trainer.config.load import load
from trainer.data.dataset import open_dataset
from trainer.objectives.base import Evaluation, Mean
from trainer.training import loop as module
from trainer.training.batches import LoadedAhead, held_out_batches
from trainer.training.build import build
from trainer.training.loop import Reports, evaluate, fit
from trainer.training.reports import earlier_evaluations
from trainer.training.start import Start

STEP, EVALUATION = 1.0, 1000.0  # seconds on the simulated clock below


@functools.cache
def built():
    return build(load(arguments("nnx")).config, jax.devices()[:1])


class Loop:
    """Runs `fit` with a tiny configuration. A step takes STEP seconds, and an evaluation batch EVALUATION seconds."""

    def __init__(self, monkeypatch, **keys):
        self.clock, self.batches, self.losses = 0.0, 0, itertools.count(5)
        self.steps, self.evaluations, self.saved = [], [], {}
        self.run = built()._replace(config=tiny_config("nnx", **keys), eval_step=self._eval_step)
        self.dataset = open_dataset(self.run.config, print)
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=self._now))
        monkeypatch.setattr(module, "maybe_save_checkpoint", self._save)

    def fit(self, source=None, start=None, manager=None, earlier=((), False)):
        reports = Reports(self.steps.append, self.evaluations.append, lambda: None, *earlier)
        return fit(self.run, self._step, start or Start([]), self.dataset, reports, manager, source)

    def _now(self):
        self.clock += 1e-3  # so that no two clock readings are equal
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

    def _save(self, manager, state, updates, *, config, before, initial=False, force=False, **_):
        saved = manager is not None and manager.latest == updates
        if not saved and (force or is_due(config, updates, initial=initial)):
            self.saved[updates] = dict(before())
            if manager is not None:
                manager.save(updates, small_tree(), SIDECAR, self.saved[updates])


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


def test_the_first_ctrl_c_saves_and_ends(monkeypatch):
    loop, step = Loop(monkeypatch, steps=9, eval_interval=-1, checkpoint_period=100), Loop._step

    def interrupted(*args):
        if len(loop.steps) == 2:  # reported one step late
            signal.raise_signal(signal.SIGINT)
        return step(loop, *args)

    monkeypatch.setattr(loop, "_step", interrupted)
    handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        end = loop.fit()
    finally:
        signal.signal(signal.SIGINT, handler)
    assert (list(loop.saved), end.signal) == ([4], signal.SIGINT)


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
    """A source that computes on devices with host values, for training and for evaluation."""

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
    """A step that reads a host value is a mistake that would otherwise only slow down every step."""
    step = getattr(Loop, part)

    def transferring(self, *args):
        jnp.zeros(3) + np.ones(3, np.float32)
        return step(self, *args)

    monkeypatch.setattr(Loop, part, transferring)
    loop = Loop(monkeypatch, steps=2, eval_interval=2, eval_steps=1)
    with pytest.raises(jax.errors.JaxRuntimeError, match="Disallowed host-to-device transfer"):
        loop.fit(OnDevices)


class Killed(BaseException):
    pass


class Processes:
    """Successive processes of one run, which saves every 5 updates and keeps the newest and the best checkpoint.

    The folder contains what the processes leave.
    """

    def __init__(self, folder):
        self.folder, self.rows = folder, []

    def run(self, losses, terminated=False, killed=0, **keys):
        """Runs one process, whose evaluations return `losses`.

        `terminated`: it receives SIGTERM in the first evaluation; `killed`: the update in which it is killed.
        """
        keys = {"steps": 10, "eval_interval": 5, "eval_steps": 1, "checkpoint_period": 5} | keys
        with pytest.MonkeyPatch.context() as patch:
            loop = Loop(patch, **keys, max_num_checkpoints_to_keep=1, keep_best_checkpoints=1)
            loop.losses, step, eval_step = iter(losses), loop._step, loop._eval_step

            def killing(*args):
                if len(loop.steps) == killed - start.updates - 1 > 0:
                    raise Killed
                return step(*args)

            def terminating(*args):
                if terminated:
                    os.kill(os.getpid(), signal.SIGTERM)
                return eval_step(*args)

            loop._step, loop.run = killing, loop.run._replace(eval_step=terminating)
            with contextlib.suppress(Killed), CheckpointManager(self.folder, loop.run.config, print) as manager:
                done = manager.latest or 0
                start = Start([], done, resumed=manager.latest is not None)
                kept = [row for row in self.rows if row["step"] < done]
                try:
                    loop.fit(start=start, manager=manager, earlier=earlier_evaluations(kept, done))
                finally:
                    self.rows = kept + loop.steps + loop.evaluations

    @property
    def checkpoints(self):
        return sorted(int(path.name) for path in (self.folder / "checkpoints").iterdir())

    @property
    def evaluations(self):
        return {row["step"]: row["eval_loss"] for row in self.rows if "eval_loss" in row}


@pytest.mark.parametrize(
    "processes",
    [
        [{"losses": [9.0], "terminated": True}, {"losses": [1.0, 2.0]}],
        [{"losses": [], "eval_interval": -1, "steps": 5}, {"losses": [1.0, 2.0]}],
        [{"losses": [9.0], "terminated": True}, {"losses": [1.0], "killed": 8}, {"losses": [2.0]}],
        [{"losses": [9.0], "terminated": True}, {"losses": [9.0], "terminated": True}, {"losses": [1.0, 2.0]}],
        [{"losses": [1.0], "killed": 8}, {"losses": [2.0]}],
        [{"losses": [9.0], "terminated": True, "steps": 5}, {"losses": [1.0], "steps": 5}, {"losses": [2.0]}],
    ],
    ids=["terminated", "not evaluated", "killed after it", "terminated twice", "evaluated before", "in the last one"],
)
def test_the_best_checkpoint_is_kept_if_a_later_process_evaluated_it(processes, tmp_path):
    run = Processes(tmp_path)
    for process in processes:
        run.run(**process)
    assert run.checkpoints == [5, 10]
    assert run.evaluations == {4: 1.0, 9: 2.0}
    assert [row["step"] for row in run.rows if "loss" in row] == list(range(10))


@pytest.mark.parametrize("loss", [3.0, float("nan")])
def test_a_checkpoint_that_a_later_process_evaluated_is_not_kept_for_a_worse_loss(loss, tmp_path):
    run = Processes(tmp_path)
    run.run([9.0], terminated=True)
    run.run([loss, 2.0])
    assert run.checkpoints == [10]


def test_the_state_that_a_run_began_with_is_not_evaluated_when_it_is_resumed(tmp_path):
    run = Processes(tmp_path)
    run.run([], killed=2, save_checkpoint_on_start=True)
    assert run.checkpoints == [0]
    run.run([1.0, 2.0])
    assert run.evaluations == {4: 1.0, 9: 2.0}

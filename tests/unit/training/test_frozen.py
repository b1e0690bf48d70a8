"""`step(state, batch, frozen)`: an objective with a reference model, which no step changes."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import (
    ALL_COMBINATIONS,
    arguments,
    assert_equal_bits,
    copied,
    first_tree,
    lowered_update,
    packed_batch,
    state_from,
    tiny_config,
)
from without_model import OfParameters

from trainer.aot import executable
from trainer.aot.compilation import compile_step
from trainer.aot.text import report_text
from trainer.checkpoint.manager import CheckpointManager
from trainer.checkpoint.save import maybe_save_checkpoint
from trainer.checkpoint.sidecar import Sidecar
from trainer.config.dump import to_yaml
from trainer.config.errors import UserError
from trainer.config.load import load
from trainer.data.dataset import open_dataset
from trainer.objectives.base import Evaluation, Frozen, Mean, Sums, Weights
from trainer.objectives.reference import first_parameters, reference_parameters
from trainer.objectives.router import WithRouters
from trainer.ops.paths import by_name
from trainer.ops.random import seed_key
from trainer.training.batches import placed
from trainer.training.build import build
from trainer.training.loop import Reports, fit
from trainer.training.start import start
from trainer.weights.contents import contents_of

SGD = {
    "base_num_decoder_layers": 1,
    "learning_rate_schedule_steps": 3,  # so that one program is valid for runs of other lengths
    "opt_type": "sgd",
    "learning_rate": 0.5,
    "gradient_clipping_threshold": 0,
    "warmup_steps_fraction": 0,
}
MESH = {"ici_data_parallelism": 2, "ici_fsdp_parallelism": 2, "shard_optimizer_over_data": True}
ISLANDS = {"enable_diloco": True, "ici_diloco_parallelism": 2, "diloco_sync_period": 3}
TWO = {"ici_fsdp_parallelism": 1, "per_device_batch_size": 2}
ACCUMULATED = {"gradient_accumulation_steps": 2, "per_device_batch_size": 2}


@dataclass(frozen=True)
class Anchored(OfParameters):
    """A function of the parameters, plus their squared distance from the initial ones."""

    model: Any = None
    seed: int = 0

    @property
    def frozen(self):
        def make(abstract):
            at = jax.tree.map(lambda leaf: leaf.sharding, abstract)
            return jax.jit(lambda key: self.model.init(key)[0], out_shardings=at)(seed_key(self.seed))

        return Frozen(self.model.abstract[0], self.model.param_axes, make)

    def weights(self, batch):
        terms, tokens = super().weights(batch)
        return Weights(terms | {"distance": tokens}, tokens)

    def sums(self, params, rest, batch, key, capture=(), sampled=None, *, frozen):
        own = super().sums(params, rest, batch, key, capture, sampled)
        pairs = zip(jax.tree.leaves(params), jax.tree.leaves(frozen), strict=True)
        distance = sum(jnp.sum((ours - theirs) ** 2) for ours, theirs in pairs)
        return own._replace(minimized=own.minimized | {"distance": distance * self.weights(batch).tokens})

    def evaluation(self, params, rest, batch, *, frozen):
        sums, tokens = self.sums(params, rest, batch, None, frozen=frozen), self.weights(batch).tokens
        nats, distance = (Mean(sums.minimized[name], tokens) for name in ("lm_loss", "distance"))
        return Evaluation(tokens, nats, nats, {"distance": distance})


@dataclass(frozen=True)
class AnchoredToBeginning(Anchored):
    """The same, with the run's first parameters as the reference."""

    config: Any = None

    @property
    def frozen(self):
        return first_parameters(self.config, self.model)

    def sums(self, params, rest, batch, key, capture=(), sampled=None, *, frozen):
        reference = reference_parameters(params, frozen)
        return super().sums(params, rest, batch, key, capture, sampled, frozen=reference)


@functools.cache
def made(combination="nnx", devices=1, /, **keys):
    config = load(arguments(combination, **SGD | keys)).config
    return build(
        config,
        jax.devices()[:devices],
        make_objective=lambda config, model: Anchored(model=model, seed=config.init_weights_seed),
    )


@functools.cache
def compiled(make, *args, **keys):
    """Returns the compiled step of the run that `make` builds."""
    return make(*args, **keys).compile_on_leaves()


def trained(run, step, batches):
    """Returns the metrics of a step on each batch, and the arrays `frozen` before the first and after the last step.

    The reference is the run's first parameters.
    """
    frozen, rows = run.frozen.make(), []
    before = copied(frozen)
    leaves, structure = jax.tree.flatten(state_from(run, first_tree(run, before)))
    for i, batch in enumerate(batches):
        old = run.codec.unpack(structure.unflatten(leaves))
        leaves, metrics = step(leaves, placed(run, batch), frozen)
        rows.append(run.computation.read(metrics, i))
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old.params))
    return rows, before, frozen


@functools.cache
def plain():
    run = made()
    return trained(run, compiled(made), [packed_batch(run.config, 4, seed=i) for i in range(3)])


@functools.cache
def program_text(combination):
    return lowered_update(made(combination, 4, **MESH, **ACCUMULATED)).as_text()


@pytest.mark.parametrize("combination", ALL_COMBINATIONS[1:])
def test_all_combinations_have_the_same_program(combination):
    assert program_text(combination) == program_text(ALL_COMBINATIONS[0])


def test_the_loss_has_the_distance_from_the_beginning():
    rows = plain()[0]
    for row in rows:
        assert row["loss"] == pytest.approx(row["lm_loss"] + row["distance"])
    assert abs(rows[0]["distance"]) < 1e-6 < min(rows[1]["distance"], rows[2]["distance"])  # 0 except for rounding


def repeated(batch, times):
    return {name: np.concatenate([x] * times) for name, x in batch.items()}


@pytest.mark.rest(covered_by="its program; a run that resumes")
def test_meshes_accumulation_and_islands_read_the_same_arrays():
    """Both islands have the rows of the plain run, so before synchronization each trains like the plain run."""
    expected, reference, _ = plain()
    for devices, keys in ((4, MESH | {"per_device_batch_size": 1}), (1, ACCUMULATED), (4, ISLANDS | MESH | TWO)):
        run, step = made("nnx", devices, **keys), compiled(made, "nnx", devices, **keys)
        rows, before, _ = trained(run, step, [repeated(packed_batch(run.config, 4, i), run.rows // 4) for i in (0, 1)])
        assert_equal_bits(before, reference)
        for row, other in zip(rows, expected, strict=False):
            losses = row.get("island_losses", row["loss"])
            np.testing.assert_allclose(losses, other["loss"], rtol=1e-5)  # summed in another order
            np.testing.assert_allclose(row["distance"], other["distance"], rtol=1e-3, atol=1e-6)
    for leaf in jax.tree.leaves(run.frozen.abstract):
        assert "diloco" not in jax.tree.leaves(tuple(leaf.sharding.spec))


def test_a_skipped_step_and_donation_leave_it_alone():
    run = made()
    batches = [packed_batch(run.config, 4, seed=i) for i in range(2)]
    batches[1]["targets_segmentation"][:] = 0
    rows, before, frozen = trained(run, compiled(made), batches)
    assert [row["skipped"] for row in rows] == [0, 1]
    assert_equal_bits(frozen, before)


def test_a_run_that_resumes_makes_it_again(tmp_path):
    keys = {"enable_checkpointing": True, "steps": 3, "eval_interval": 3, "eval_steps": 1}
    run = made()._replace(config=tiny_config("nnx", **SGD | keys))
    dataset, rows, evaluations = open_dataset(run.config, print), [], []
    reports = Reports(rows.append, evaluations.append, lambda: None)
    first = start(run, dataset, None, print, schedule_given=False)
    reference = copied(first.frozen)
    end = fit(run, compiled(made), first, dataset, reports)
    assert abs(rows[0]["distance"]) < 1e-6 < rows[-1]["distance"]
    assert evaluations[0]["eval_distance"] > 0
    with CheckpointManager(tmp_path, run.config, print) as manager:
        side = Sidecar(to_yaml(run.config), {"identity": dataset.identity, "row": 0}, dataset.fingerprint, {})
        what = {"config": run.config, "codec": run.codec, "sidecar": lambda: side}
        assert maybe_save_checkpoint(manager, end.state, 3, force=True, **what)
        manager.wait()
        found = start(run, dataset, manager, print, schedule_given=False)
    assert found.updates == 3
    assert_equal_bits(found.frozen, reference)
    names = {tensor.name for tensor in contents_of(str(tmp_path / "checkpoints" / "3")).tensors}
    assert len(names) == len(jax.tree.leaves(run.abstract_state))


@pytest.mark.rest(covered_by="its program; a run that resumes")
def test_the_reports_and_the_executable_have_it(tmp_path):
    run = made("nnx", 2, ici_fsdp_parallelism=2)
    compiled, report = compile_step(run, lambda: run.step.lower(*run.abstract_args()), 1)
    found = run.table()
    of_params = [(row["name"], row["spec"]) for row in found["tensors"] if row["name"].startswith("params/")]
    of_frozen = [(row["name"], row["spec"]) for row in found["tensors"] if row["name"].startswith("frozen/")]
    assert [(name.removeprefix("params/"), at) for name, at in of_params] == [
        (name.removeprefix("frozen/"), at) for name, at in of_frozen
    ]
    assert found["totals"]["frozen_bytes"] == found["totals"]["parameters_bytes"]
    assert report.state["frozen"] == report.state["parameters"] == found["totals"]["frozen_bytes_per_device"]
    assert sum(report.state.values()) == pytest.approx(report.memory.arguments, rel=0.01)
    assert "  frozen" in report_text(report)

    path, devices, args = tmp_path / "step", list(run.mesh.devices.flat), run.abstract_args()
    origin = executable.origin_of(run.config, devices, args)
    executable.save(path, compiled, origin)
    loaded = executable.load(path, origin, args, devices)
    batch, tree = placed(run, packed_batch(run.config, run.rows)), first_tree(run)
    _, metrics = loaded(jax.tree.leaves(state_from(run, tree)), batch, run.frozen.make())
    assert_equal_bits(metrics, compiled(state_from(run, tree), batch, run.frozen.make())[1])


def test_without_a_declaration_there_is_nothing():
    run = build(load(arguments("nnx")).config, jax.devices()[:1])
    assert (run.frozen.abstract, run.frozen.make(), run.abstract_args()[2]) == ((), (), ())
    assert not [row for row in run.table()["tensors"] if row["name"].startswith("frozen")]


def test_router_losses_pass_it_on():
    class Inner:
        frozen = Frozen((), (), lambda abstract: ())
        captures = ()

        def sums(self, *args, frozen):
            return Sums({"frozen": frozen}, {}, {"RouterLoss": {}})

        def evaluation(self, *args, frozen):
            return frozen

    both = WithRouters(Inner(), 0.0, 0.0)
    assert both.frozen is Inner.frozen
    assert both.sums(None, None, {}, None, frozen=3).minimized == {"frozen": 3}
    assert both.evaluation(None, None, {}, frozen=4) == 4


@functools.cache
def anchored(**keys):
    """Returns a run whose reference is its first parameters."""
    return build(
        load(arguments("nnx", **SGD | keys)).config,
        jax.devices()[:1],
        make_objective=lambda config, model: AnchoredToBeginning(model=model, config=config),
    )


def begun(folder, **keys):
    """Returns the run `anchored` with `keys`, and its state after two updates."""
    keys = {"steps": 2, "dataset_type": "synthetic", "eval_interval": -1, "checkpoint_period": 1} | keys
    run = anchored()._replace(config=tiny_config("nnx", **SGD | keys))
    dataset, rows = open_dataset(run.config, print), []
    with CheckpointManager(folder, run.config, print) as manager:
        begin = start(run, dataset, manager, print, schedule_given=False)
        frozen = copied(begin.frozen)
        reports = Reports(rows.append, rows.append, lambda: None)
        end = fit(run, compiled(anchored), begin, dataset, reports, manager)
    return run, frozen, rows, end.state


def test_the_reference_is_the_beginning_also_in_a_run_that_resumes(tmp_path):
    run, frozen, rows, _ = begun(tmp_path / "whole")
    assert_equal_bits(frozen, run.codec.unpack(run.init()).params)
    assert abs(rows[0]["distance"]) < 1e-6 < rows[1]["distance"]
    begun(tmp_path / "cut", steps=1)
    _, again, resumed, _ = begun(tmp_path / "cut")
    assert_equal_bits(again, frozen)
    assert resumed[0]["loss"] == rows[1]["loss"]


def test_the_reference_of_adapters_has_only_the_first_adapters():
    run = anchored(enable_lora=True, lora_rank=2, lora_alpha=2.0)
    params = run.codec.unpack(state_from(run, first_tree(run))).params
    frozen = run.frozen.make(params)
    assert {name.rpartition("/")[2] for name in by_name(frozen)} == {"lora_a", "lora_b"}
    assert_equal_bits(reference_parameters(params, frozen), params)


def test_a_reference_that_changed_is_refused(tmp_path):
    model = {"load_parameters_path": str(tmp_path / "model")}
    begun(tmp_path / "model", steps=1)
    begun(tmp_path / "run", steps=1, **model)
    begun(tmp_path / "run", steps=2, **model)
    begun(tmp_path / "model", steps=2)
    with pytest.raises(UserError, match="its reference was a model with other values"):
        begun(tmp_path / "run", steps=3, **model)

"""Zero-1 in the compiled step: memory per device, collectives, and equal training results."""

import functools
import math
import re

import jax
import numpy as np
import optax
import pytest
from compiler import TPU_QUICKLY
from run_cases import RUN, assert_equal, killed_at, rows_of, train
from support import ALL_COMBINATIONS, LAST_CASE, arguments, copied, first_tree, packed_batch, state_from

from trainer.aot.cost import analyze
from trainer.config.load import load
from trainer.state.shardings import tensors
from trainer.training.batches import placed
from trainer.training.build import build

DATA = {"ici_data_parallelism": 8, "ici_fsdp_parallelism": 1, "per_device_batch_size": 2}
SGD = {"opt_type": "sgd", "learning_rate": 0.1, "lr_schedule_type": "constant", "warmup_steps_fraction": 0}
ROWS = 16


@functools.cache
def compiled(combination=ALL_COMBINATIONS[0], **overrides):
    run = build(load(arguments(combination, **{**DATA, **overrides})).config, jax.devices())
    return run, run.step.lower(*run.abstract_args()).compile()


def state_bytes(run):
    """Returns (bytes per device, total bytes, names of replicated arrays) of parameters and optimizer state."""
    trees = (tensors(run.model, run.abstract_state), run.abstract_state, run.states.shardings)
    here = total = 0
    whole = []
    for tensor, leaf, sharding in zip(*map(jax.tree.leaves, trees), strict=True):
        part = math.prod(sharding.shard_shape(leaf.shape))
        here, total = here + part * leaf.dtype.itemsize, total + leaf.size * leaf.dtype.itemsize
        if part == leaf.size:
            whole.append(tensor.name)
    return here, total, whole


def batch_bytes(run):
    """Returns the size of the step's batch on a device. Dropout is off here, so row indices are not read."""
    args = [leaf for name, leaf in run.abstract_args()[1].items() if name != "row"]
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in args)


def collectives(program, kind):
    """Returns (shape, or shapes if combined; enclosing computation) of every collective of a kind."""
    found, computation = [], ""
    for line in program.as_text().splitlines():
        if line.startswith(("%", "ENTRY")):
            computation = line.split()[0]
        if match := re.search(rf"= (\(.*?\)|\S+?)(?:{{\S+)? {kind}(?:-start)?\(", line):
            found.append((match[1], computation))
    return found


def test_a_device_holds_its_part_of_parameters_and_optimizer():
    for overrides, parts in (({}, 1), ({"shard_optimizer_over_data": True}, 8)):
        run, program = compiled(**overrides)
        here, total, whole = state_bytes(run)
        counts = ["step", "opt_state/1/0/count", "opt_state/1/2/count"]  # of steps, Adam, schedule
        held_whole = 4 * len(counts)
        assert here == (total - held_whole) // parts + held_whole
        assert (sorted(whole) == sorted(counts)) or parts == 1
        # The program's arguments are exactly this state and the batch, and it returns the state in the same memory.
        memory = program.memory_analysis()
        assert memory.argument_size_in_bytes == here + batch_bytes(run)
        assert memory.alias_size_in_bytes >= here - held_whole


@pytest.mark.parametrize("microbatches", [1, 2])
def test_parameters_are_gathered_once_outside_of_every_loop(microbatches):
    halves = {"per_device_batch_size": 1, "gradient_accumulation_steps": 2} if microbatches == 2 else {}
    run, program = compiled(shard_optimizer_over_data=True, **halves)
    shapes = [f"f32[{','.join(map(str, leaf.shape))}]" for leaf in jax.tree.leaves(params_of(run))]
    found = collectives(program, "all-gather")
    assert sorted(shape for shape, _ in found) == sorted(shapes)
    assert {computation for _, computation in found} == {"ENTRY"}
    assert collectives(program, "all-reduce")  # gradients are all-reduced; shows that the search finds collectives


def update_program(**overrides):
    """Returns the run, and its compiled optimizer update alone."""
    run = build(load(arguments(ALL_COMBINATIONS[0], **DATA, **overrides)).config, jax.devices())
    tree = run.codec.unpack(run.abstract_args()[0])

    def update(grads, opt_state, params):
        updates, opt_state = run.codec.tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    stored = jax.tree.map(lambda leaf: leaf.sharding, (tree.params, tree.opt_state))
    return run, jax.jit(update, out_shardings=stored).lower(tree.params, tree.opt_state, tree.params).compile()


def test_muons_matrices_stay_whole_on_a_device_and_are_not_gathered():
    zero1 = {"opt_type": "muon", "shard_optimizer_over_data": True}
    run, program = update_program(**zero1, base_num_decoder_layers=8)
    found = {(collective.kind, collective.size) for collective in analyze(program.as_text(), run.mesh).collectives}
    assert found == {("all-reduce", 4)}  # scalars for the global gradient norm
    _, _, whole = state_bytes(run)
    assert not [name for name in whole if name.endswith("kernel")]


def params_of(run):
    return run.codec.unpack(run.abstract_state).params


def test_plain_data_parallelism_gathers_nothing():
    assert collectives(compiled()[1], "all-gather") == []


@functools.cache
def trained(combination=ALL_COMBINATIONS[0], **overrides):
    """Returns the losses and gradient norms of three SGD steps, and the final parameters."""
    run, program = compiled(combination, **SGD, **overrides)
    state, rows = state_from(run, first_tree(run)), []
    for i in range(3):
        state, metrics = program(state, placed(run, packed_batch(run.config, ROWS, seed=i)), ())
        rows.append([float(metrics["loss"]), float(metrics["grad_norm"])])
    return rows, copied(run.codec.unpack(state).params)


@pytest.mark.rest(covered_by="nnx; one program", cases=LAST_CASE)
@pytest.mark.parametrize("combination", sorted({ALL_COMBINATIONS[0], ALL_COMBINATIONS[-1]}))
def test_it_learns_what_data_parallelism_learns(combination):
    rows, params = trained()
    split_rows, split_params = trained(combination, shard_optimizer_over_data=True)
    np.testing.assert_allclose(split_rows, rows, rtol=1e-6)
    # Sums over devices are added in another order.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), split_params, params)


@pytest.mark.rest(covered_by="collectives of the program on CPU devices")
def test_a_tpu_gathers_the_matrices_of_a_small_model_in_the_dtype_of_the_products(monkeypatch):
    """Compiled ahead of time: casting precedes the all-gather, which therefore sends half the bytes of float32.

    The compiler decides this. It all-gathers larger matrices in float32 (docs/benchmarks/sharding.md).
    """
    pytest.importorskip("libtpu", reason="there is no libtpu but for Linux on x86-64")
    from jax.experimental import topologies

    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    described = {"chip_config_name": "default", "chips_per_host_bounds": (2, 2, 1), "num_slices": 1}
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4", **described).devices
    sizes = {"base_emb_dim": 128, "base_mlp_dim": 256, "head_dim": 32, "vocab_size": 512, "max_target_length": 128}
    words = arguments(ALL_COMBINATIONS[0], **DATA, **sizes, shard_optimizer_over_data=True, remat_policy="full")
    run = build(load(words).config, devices)
    program = run.step.lower(*run.abstract_args()).compile(TPU_QUICKLY)
    found = {shape for shape, _ in collectives(program, "all-gather")}
    matrices = [leaf.shape for leaf in jax.tree.leaves(params_of(run)) if leaf.size > 1024]
    assert len(matrices) == 8
    for shape in matrices:
        text = ",".join(map(str, shape))
        assert f"bf16[{text}]" in found
        assert f"f32[{text}]" not in found


@pytest.mark.rest(covered_by="what a device holds")
def test_a_run_goes_on_from_its_parts_and_without_them(tmp_path):
    keys = {"learning_rate_schedule_steps": 4, "checkpoint_period": 2, "eval_interval": -1, "run_name": RUN.name}
    parts = DATA | {"per_device_batch_size": 1, "shard_optimizer_over_data": True}
    straight, resumed, one_device = (tmp_path / name for name in ("straight", "resumed", "one_device"))
    straight.mkdir()
    for folder in (straight, resumed):
        code, output = train(folder, devices=8, steps=4, **keys | parts)
        assert code == 0, output
        if folder is straight:
            killed_at(2, straight / RUN, resumed)
            killed_at(2, straight / RUN, one_device)
    assert_equal(resumed / RUN, straight / RUN, 4)
    code, output = train(one_device, steps=4, **keys)
    assert code == 0, output
    assert "2 of 4 updates are done" in output
    expected = [row["loss"] for row in rows_of(straight / RUN)]
    np.testing.assert_allclose([row["loss"] for row in rows_of(one_device / RUN)], expected, rtol=1e-5)

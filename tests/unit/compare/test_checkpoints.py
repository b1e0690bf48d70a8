"""Compares two checkpoints, leaf by leaf."""

import json

import jax
import ml_collections
import numpy as np
import optax
import pytest
from bucket import bucket  # noqa: F401, a fixture
from checkpoint_cases import config_of, random_params
from support import zeros

from trainer import parity
from trainer.backends.base import TrainTree
from trainer.checkpoint.manager import CheckpointManager
from trainer.checkpoint.sidecar import Sidecar
from trainer.config.dump import to_yaml
from trainer.leaves.source import Leaf
from trainer.runtime import storage
from trainer.state.diloco import DiLoCoTrainState
from trainer.weights.params.write import write_params

SETTINGS = {
    "async_checkpointing": False,
    "max_num_checkpoints_to_keep": None,
    "checkpoint_keep_period": 0,
    "keep_best_checkpoints": 0,
    "keep_best_metric": "min:eval_loss",
}


def saved(folder, changes=(), *, updates=3, tx=None):
    """Returns a run's folder with one checkpoint. `changes` are (layer, value) of one parameter."""
    kernel = np.ones((4, 2, 2), np.float32)
    for layer, value in changes:
        kernel[layer, 0, 0] = value
    params = {"decoder": {"layers": {"kernel": kernel}, "decoder_norm": np.ones(3, np.float32)}}
    opt_state = zeros(jax.eval_shape((tx or optax.adam(0.1)).init, params))
    tree = jax.device_put(TrainTree(np.int32(updates), params, opt_state, {}))
    with CheckpointManager(folder, ml_collections.ConfigDict(SETTINGS), say=print) as manager:
        manager.save(updates, tree, Sidecar(to_yaml(config_of()), {"row": 3}, "corpus 1", {}), {})
    return folder


def compared(capsys, *words):
    code = 0
    try:
        parity.main([*map(str, words), "--json"])
    except SystemExit as ended:
        code = ended.code
    said = capsys.readouterr()
    return code, json.loads(said.out) if said.out else said.err


def test_equal_checkpoints(tmp_path, capsys):
    left, right = saved(tmp_path / "a"), saved(tmp_path / "b")
    code, report = compared(capsys, left, right / "checkpoints" / "3")
    quantities = report["comparisons"][0]["quantities"]
    assert (code, report["equal"]) == (0, True)
    assert {name: len(it["arrays"]) for name, it in quantities.items()} == {
        "parameters": 5,  # four layers and a norm
        "optimizer state": 11,  # two moments for each, and a count
        "step": 1,
    }


def test_a_checkpoint_in_a_bucket(tmp_path, capsys, bucket):  # noqa: F811
    saved(storage.folder("gs://bucket/a"))
    code, report = compared(capsys, "gs://bucket/a", saved(tmp_path / "b"))
    assert (code, report["equal"]) == (0, True)
    assert ["left", "gs://bucket/a/checkpoints/3"] in report["compared"]


def test_a_difference_is_found_in_its_layer(tmp_path, capsys):
    left, right = saved(tmp_path / "a"), saved(tmp_path / "b", [(2, 1.5), (3, 9.0)])
    code, report = compared(capsys, left, right)
    (comparison,) = report["comparisons"]
    assert (code, comparison["first"]) == (1, "parameters: decoder/layers/kernel, layer 2")
    parameters = comparison["quantities"]["parameters"]
    assert (parameters["absolute"], parameters["relative"]) == (8.0, 8 / 9)
    assert comparison["quantities"]["optimizer state"]["bits"]
    assert compared(capsys, left, right, "atol=8")[0] == 0


def test_islands_are_compared_too(tmp_path, capsys):
    def saved_islands(folder, **changes):
        params, step = jax.device_put(({"decoder": {"layers": {"kernel": np.ones((4, 2), np.float32)}}}, np.int32(3)))
        opt_state = jax.device_put(zeros(jax.eval_shape(optax.sgd(0.1, momentum=0.9).init, params)))
        tree = TrainTree(step, params, opt_state, {})
        islands = jax.device_put(jax.tree.map(lambda leaf: np.stack([leaf, leaf]), tree))
        state = DiLoCoTrainState(islands, params, opt_state, step, step)._replace(**changes)
        with CheckpointManager(folder, ml_collections.ConfigDict(SETTINGS), say=print) as manager:
            manager.save(3, state, Sidecar(to_yaml(config_of()), {"row": 3}, "corpus 1", {}), {})
        return state

    state = saved_islands(tmp_path / "a")
    saved_islands(tmp_path / "b")
    inner = state.inner_state._replace(params=jax.tree.map(lambda x: x.at[1].add(1), state.inner_state.params))
    momentum = jax.tree.map(lambda x: x + 1, state.outer_opt_state)
    saved_islands(tmp_path / "c", inner_state=inner, outer_opt_state=momentum, in_flight=state.step + 1)
    assert compared(capsys, tmp_path / "a", tmp_path / "b")[0] == 0
    code, report = compared(capsys, tmp_path / "a", tmp_path / "c")
    assert code == 1
    quantities = report["comparisons"][0]["quantities"]
    different = {name for name, it in quantities.items() if not it["bits"]}
    assert different == {"outer optimizer state", "islands", "fragment in flight"}
    leaves = {"a/params/w": Leaf((2,), np.dtype("float32"), [lambda: np.ones(2, np.float32)])}
    (tmp_path / "alone").mkdir()
    write_params(tmp_path / "alone", config_of(), leaves, None)
    _, report = compared(capsys, tmp_path / "alone", tmp_path / "a")
    assert dict(report["compared"])["left out"].startswith("fragment in flight, islands")


def test_another_optimizer_has_other_leaves(tmp_path, capsys):
    code, report = compared(capsys, saved(tmp_path / "a"), saved(tmp_path / "b", tx=optax.sgd(0.1, momentum=0.9)))
    assert code == 1
    assert "only on the" in report["comparisons"][0]["quantities"]["optimizer state"]["first"]


def test_parameters_alone_are_compared_with_a_run_s(tmp_path, capsys):
    config = config_of()
    for folder, seed in (("a", 0), ("b", 0), ("c", 1)):
        leaves = {
            name: Leaf(value.shape, value.dtype, [lambda value=value: value])
            for name, value in random_params(config, seed=seed).items()
        }
        (tmp_path / folder).mkdir()
        write_params(tmp_path / folder, config, leaves, None)
    assert compared(capsys, tmp_path / "a", tmp_path / "b")[0] == 0
    assert compared(capsys, tmp_path / "a", tmp_path / "c")[0] == 1
    code, report = compared(capsys, tmp_path / "a", saved(tmp_path / "run"))
    assert code == 1  # another model
    assert list(report["comparisons"][0]["quantities"]) == ["parameters"]
    assert ["left out", "optimizer state, step: on one side only"] in report["compared"]


@pytest.mark.parametrize("damage", [False, True])
def test_what_is_missing_or_damaged_ends_with_code_2(tmp_path, capsys, damage):
    left, right = saved(tmp_path / "a"), tmp_path / "b"
    if damage:
        folder = saved(right) / "checkpoints" / "3"
        victim = max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
        victim.write_bytes(victim.read_bytes()[:-1])
    code, message = compared(capsys, left, right)
    assert code == 2
    assert ("damaged" if damage else "there is no such folder") in message

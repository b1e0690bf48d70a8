"""Parameters in this trainer's format: which arrays of a tree are read."""

import numpy as np
import pytest
from checkpoint_cases import config_of

from trainer.config.errors import UserError
from trainer.leaves import orbax
from trainer.optim.average import AVERAGE
from trainer.weights.model_keys import model_yaml
from trainer.weights.params.read import CONFIG, TREE, ParamsSource

TRAINED, FROZEN, BIAS = "decoder/mlp/kernel", "decoder/norm/scale", "decoder/moe/gate/bias"
OTHERS = {f"opt_state/mu/{TRAINED}": 8.0, f"opt_state/rules/other/average/{TRAINED}": 9.0}


def source(folder, values, **how):
    """Returns a source whose tree has arrays with the given values."""
    folder.mkdir(exist_ok=True)
    with orbax.writer(folder / TREE) as write:
        write({path: np.full((2, 3), value, np.float32) for path, value in values.items()})
    (folder / CONFIG).write_text(model_yaml(config_of()), encoding="utf-8")
    return ParamsSource(folder, **how)


def read(found):
    """Returns the value of each array that the source provides for a model's weights."""
    leaves = found.leaves(config_of(), dict.fromkeys((TRAINED, FROZEN, BIAS), (2, 3)))
    arrays = {name: leaf.read(leaf.dtype, lambda *args: None) for name, leaf in leaves.items()}
    assert all(len(set(array.ravel().tolist())) == 1 for array in arrays.values())
    return {name: array[0, 0] for name, array in arrays.items()}


def test_averages_come_with_the_routers_bias_and_with_what_has_no_average(tmp_path):
    stored = {f"params/{TRAINED}": 1, f"params/{FROZEN}": 2, f"rest/{BIAS}": 3, f"{AVERAGE}/{TRAINED}": 4} | OTHERS
    trained = source(tmp_path / "run", stored)
    assert trained.averaged
    assert read(trained) == {TRAINED: 1, FROZEN: 2, BIAS: 3}
    assert read(ParamsSource(tmp_path / "run", average=True)) == {TRAINED: 4, FROZEN: 2, BIAS: 3}


def test_without_averages_none_are_read(tmp_path):
    stored = {f"params/{TRAINED}": 1, f"params/{FROZEN}": 2, f"rest/{BIAS}": 3} | OTHERS
    assert not source(tmp_path / "run", stored).averaged
    with pytest.raises(UserError, match="contains no averaged parameters: it was trained with ema_decay=0"):
        ParamsSource(tmp_path / "run", average=True)


def test_leaves_are_written_together_up_to_a_size(tmp_path, monkeypatch):
    from orbax.checkpoint import v1 as ocp

    written, save = [], ocp.partial.save
    monkeypatch.setattr(ocp.partial, "save", lambda path, tree, **how: (written.append(tree), save(path, tree, **how)))
    monkeypatch.setattr(orbax, "_TOGETHER", 100)
    values = {name: np.full(size, size, np.float32) for name, size in {"a": 10, "b": 20, "c": 100, "d": 5}.items()}
    with orbax.writer(tmp_path / TREE) as write:
        for name, value in values.items():
            write({name: value})
            assert sum(map(len, written)) == {"a": 0, "b": 2, "c": 3, "d": 3}[name]
    found = {name: reader() for name, reader in orbax.readers(tmp_path / TREE).items()}
    assert found.keys() == values.keys()
    assert all(np.array_equal(found[name], value) for name, value in values.items())


def test_small_leaves_are_read_together(tmp_path, monkeypatch):
    from orbax.checkpoint import v1 as ocp

    read, load = [], ocp.load
    monkeypatch.setattr(orbax, "_SMALL", 50)
    monkeypatch.setattr(
        ocp,
        "load",
        lambda abstract_state, **how: read.append({*abstract_state}) or load(abstract_state=abstract_state, **how),
    )
    values = {name: np.full(size, size, np.float32) for name, size in {"a": 10, "b": 20, "c": 5}.items()}
    with orbax.writer(tmp_path / TREE) as write:
        write(values)
    tree = orbax.Tree(tmp_path / TREE, orbax.headers(tmp_path / TREE))
    assert all(np.array_equal(tree.read(name), value) for name, value in values.items())
    assert read == [{"a", "c"}, {"b"}]

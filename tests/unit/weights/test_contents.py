"""trainer.inspect shows the contents of each kind of checkpoint."""

import math
import shutil

import jax
import numpy as np
import optax
import pytest
from checkpoint_cases import (
    BFLOAT16,
    config_of,
    hf_tensors,
    maxtext_params,
    maxtext_run,
    random_params,
    shapes_of,
    write_hf,
    write_maxtext,
)
from manager_cases import settings
from safetensors.numpy import save_file
from support import zeros

from trainer import inspect
from trainer.backends.base import TrainTree
from trainer.checkpoint.manager import CheckpointManager
from trainer.checkpoint.sidecar import Sidecar
from trainer.config.dump import to_yaml
from trainer.config.errors import UserError
from trainer.leaves.source import Leaf, nested
from trainer.state.diloco import DiLoCoTrainState
from trainer.weights.contents import contents_of
from trainer.weights.params.write import write_params


@pytest.fixture(scope="module")
def config():
    return config_of(logits_via_embedding=False)


@pytest.fixture(scope="module")
def params(config):
    return random_params(config)


def trained(params):
    arrays = nested(params)
    opt_state = zeros(jax.eval_shape(optax.adam(0.1).init, arrays))
    return jax.device_put(TrainTree(np.int32(3), arrays, opt_state, {}))


def save(folder, config, tree):
    sidecar = Sidecar(to_yaml(config), {"row": 24}, "corpus 1", {"tokenizer.json": b"{}"})
    with CheckpointManager(folder, settings(), say=print) as manager:
        manager.save(3, tree, sidecar, {})
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory, config, params):
    return save(tmp_path_factory.mktemp("run"), config, trained(params))


def assert_norms(contents, params):
    """Compares with separate norms of each layer of a stack."""
    found = {tensor.name: tensor for tensor in contents.tensors if tensor.part == "params"}
    assert found.keys() == params.keys()
    for name, value in params.items():
        layers = list(value) if "/layers/" in name else [value]
        wanted = [float(np.linalg.norm(layer.astype(np.float64).ravel())) for layer in layers]
        assert found[name].shape == value.shape
        assert found[name].dtype == value.dtype.name
        np.testing.assert_allclose(found[name].norms(), wanted, rtol=1e-12)


def said(capsys, *words):
    inspect.main([*map(str, words)])
    return capsys.readouterr().out


def test_a_run(run, config, params, capsys):
    contents = contents_of(str(run))
    assert (contents.step, contents.position, contents.fingerprint) == (3, {"row": 24}, "corpus 1")
    assert contents.tokenizer == ("tokenizer.json",)
    assert contents.keys["base_emb_dim"] == config.base_emb_dim
    assert_norms(contents, params)
    text = said(capsys, run / "checkpoints" / "3")
    values = sum(value.size for value in params.values())
    assert f"parameters: {len(params)} arrays, {values:,} values" in text
    assert f"optimizer state of adamw: {2 * len(params) + 1} arrays, {2 * values + 1:,} values" in text
    assert "step           3 updates" in text
    assert "row: 24; fingerprint corpus 1" in text
    whole = math.sqrt(sum(float(np.sum(value.astype(np.float64) ** 2)) for value in params.values()))
    assert f"norm of all: {whole:.6g}" in text
    assert max(map(len, text.splitlines())) <= 160


def test_headers_alone(run, capsys, monkeypatch):
    monkeypatch.setattr("trainer.weights.contents.Tensor.norms", None)
    text = said(capsys, run, "norms=false")
    assert "checksums      not compared" in text
    assert " norm " not in text


def test_islands(tmp_path, config, params, capsys):
    tree = trained(params)
    inner = jax.device_put(jax.tree.map(lambda leaf: np.stack([leaf, leaf]), tree))
    outer = jax.device_put(zeros(jax.eval_shape(optax.sgd(0.7, momentum=0.9).init, tree.params)))
    save(tmp_path, config, DiLoCoTrainState(inner, tree.params, outer, jax.device_put(np.int32(3))))
    contents = contents_of(str(tmp_path))
    assert contents.kind == "a checkpoint of a DiLoCo run"
    assert_norms(contents, params)
    text = said(capsys, tmp_path, "norms=false")
    assert f"islands: parameters: {len(params)} arrays, {2 * sum(it.size for it in params.values()):,} values" in text
    assert "outer optimizer state: " in text


def test_parameters_alone_in_bfloat16(tmp_path, config, params):
    values = {name: value.astype(BFLOAT16) for name, value in params.items()}
    leaves = {name: Leaf(it.shape, it.dtype, [lambda it=it: it]) for name, it in values.items()}
    write_params(tmp_path, config, leaves, None)
    contents = contents_of(str(tmp_path))
    assert contents.kind == "parameters only, from trainer.export"
    assert contents.step is None
    assert_norms(contents, values)


def test_hugging_face(tmp_path, config, params, capsys):
    folder = write_hf(tmp_path / "hf", config, hf_tensors(params), shards=2)
    contents = contents_of(str(folder))
    assert contents.kind == "a Hugging Face directory"
    assert contents.keys["base_num_decoder_layers"] == config.base_num_decoder_layers
    assert_norms(contents, params)
    assert "base_emb_dim=" in said(capsys, folder)


def test_one_safetensors_file(tmp_path, capsys):
    rng = np.random.default_rng(0)
    values = {
        "w.weight": rng.normal(size=(5, 7)).astype(np.float32),
        "half": rng.normal(size=(3, 2, 2)).astype(BFLOAT16),
        "double": rng.normal(size=4),
        "ids": np.arange(-2, 9),
        "mask": np.array([[True, False, True]]),
        "scalar": np.array(2.5, np.float16),
        "empty": np.zeros((0, 3), np.int8),
    }
    path = tmp_path / "some.safetensors"
    save_file(values, path)
    contents = contents_of(str(path))
    assert {it.name: (it.shape, it.dtype, it.nbytes) for it in contents.tensors} == {
        name: (it.shape, it.dtype.name, it.nbytes) for name, it in values.items()
    }
    for tensor in contents.tensors:
        expected = np.linalg.norm(values[tensor.name].astype(np.float64).ravel())
        np.testing.assert_allclose(tensor.norms(), [expected], rtol=1e-12)
    (tmp_path / "config.json").touch()
    text = said(capsys, path)
    assert "a safetensors file" in text
    assert "has a config.json: inspect that folder" in text
    with pytest.raises(SystemExit):
        inspect.main([str(tmp_path / "other.safetensors")])
    assert "other.safetensors: there is no such folder" in capsys.readouterr().err
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(UserError, match="weights cannot be read"):
        contents_of(str(path))


@pytest.mark.parametrize("layout", ["run", "nnx", "unscanned"])
def test_maxtexts(tmp_path, config, params, layout, capsys):
    stored = maxtext_params(config, params, scanned=layout != "unscanned")
    if layout == "unscanned":
        path = write_maxtext(tmp_path / "items", stored)
    else:
        path = maxtext_run(tmp_path / "run", stored, nnx=layout == "nnx", full=layout == "run")
    contents = contents_of(str(path))
    assert contents.kind == "a MaxText checkpoint"
    assert contents.step == (None if layout == "nnx" else 3)
    found = {tensor.name: tensor for tensor in contents.tensors if tensor.part == "params"}
    assert found.keys() == stored.keys()
    for name, value in stored.items():
        np.testing.assert_allclose(found[name].norms(), [np.linalg.norm(value.astype(np.float64).ravel())], rtol=1e-12)
    assert "as MaxText stores them" in said(capsys, path, "norms=false")


def test_what_is_no_checkpoint_or_damaged_is_one_message(tmp_path, config, params, capsys):
    hf = write_hf(tmp_path / "hf", config, hf_tensors(params))
    weights = hf / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    run = save(tmp_path / "run", config, trained({"decoder/decoder_norm/scale": np.ones(3, np.float32)}))
    (run / "checkpoints" / "3" / "run" / "config.yml").write_text("steps: 3\n")
    words = ([], ["a", "b"], [str(tmp_path / "none")], [str(tmp_path)], [str(hf)], [str(run)], [str(run), "norms=x"])
    for given in words:
        with pytest.raises(SystemExit) as ended:
            inspect.main(given)
        text = capsys.readouterr()
        assert (ended.value.code, text.out) == (2, ""), given
        assert text.err.startswith("error: "), given


def test_a_strip_of_a_large_array_is_squared_at_a_time(monkeypatch, run, params):
    monkeypatch.setattr("trainer.weights.contents._STRIP", 7)
    assert_norms(contents_of(str(run), verify=False), params)


def test_every_parameter_of_the_model_is_there(run, config):
    names = {it.name for it in contents_of(str(run), verify=False).tensors if it.part == "params"}
    assert names == shapes_of(config).keys()


@pytest.mark.parametrize("verify", [True, False])
def test_a_checkpoint_that_its_run_deletes_meanwhile_is_not_called_damaged(run, tmp_path, monkeypatch, verify):
    """A run renames and deletes the folder: here, after the folder was found, or after its headers were read."""
    folder = shutil.copytree(run, tmp_path / "run")
    checkpoint, aside = folder / "checkpoints/3", folder / "checkpoints/3.expired"
    tensor = contents_of(str(folder), verify=verify).tensors[0]
    checkpoint.rename(aside)
    said = f"^{checkpoint}.* was removed while it was read, probably by a run that deletes its old checkpoints"
    with pytest.raises(UserError, match=said):
        tensor.norms()
    monkeypatch.setattr("trainer.weights.contents.newest", lambda path: checkpoint)
    with pytest.raises(UserError, match=said):
        contents_of(str(folder), verify=verify)

"""Multi-token prediction modules in the layout of Qwen3-Next and Qwen 3.5.

The expected values come from transformers' class (mtp.npz, see scripts/write_goldens.py).
"""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from checkpoint_cases import assert_same, random_params, read_hf, shapes_of
from safetensors.numpy import load_file, save_file

from trainer import export
from trainer.backends.registry import make_model
from trainer.config.errors import UserError
from trainer.layers.sown import MtpHidden
from trainer.leaves.source import Leaf, nested, parted
from trainer.models.mtp import hidden_path
from trainer.objectives.forward import hidden_states
from trainer.objectives.multi_token import MultiToken
from trainer.weights.huggingface.write import write_huggingface
from trainer.weights.model_keys import model_config
from trainer.weights.open import open_source

GOLDENS = Path(__file__).parents[2] / "goldens"
CASE = GOLDENS / "qwen3-5-moe"
FIELD = "mtp_num_hidden_layers"


def folder_of(path, case=CASE, more=None, **fields):
    """Writes a golden with additional tensors `more` and fields of config.json."""
    shutil.copytree(case, path)
    save_file(load_file(case / "model.safetensors") | (more or {}), path / "model.safetensors")
    data = json.loads((case / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(data | fields))
    return path


def golden():
    """Returns the module's tensors, and its logits."""
    arrays = np.load(CASE / "mtp.npz")
    return {name: arrays[name] for name in arrays.files if name != "logits"}, arrays["logits"]


def read(path, *words):
    source = open_source(str(path))
    config = model_config(source.keys, ["dtype=float32", *words], str(path))
    leaves = source.leaves(config, shapes_of(config))
    return source, config, {name: leaf.read(leaf.dtype, lambda count: None) for name, leaf in leaves.items()}


def test_a_module_computes_what_transformers_computes(tmp_path):
    """The module's experts are stored as one tensor, the model's experts separately. The export has the same values."""
    tensors, logits = golden()
    path = folder_of(tmp_path / "theirs", more=tensors, **{FIELD: 1})
    source, config, weights = read(path, "max_target_length=20", "attention=dot_product")
    assert source.keys["mtp_num_layers"] == 1
    model = make_model(config)
    params, rest = parted(nested(weights), model.abstract[1])
    expected = np.load(CASE / "expected.npz")
    fields = ("inputs", "inputs_position", "inputs_segmentation", "targets", "targets_segmentation")
    batch = {name: expected[f"rows/{name}"] for name in fields} | {"row": np.arange(2, dtype=np.int32)}
    batch = MultiToken(None, 1, 1.0).prepare(batch)

    @jax.jit
    def computed(params, batch):
        _, sown = hidden_states(model.apply, params, rest, batch, None, (MtpHidden,))
        return model.apply(params, rest, sown[MtpHidden.__name__][hidden_path(1)], method="head")[0]

    found = np.asarray(computed(params, batch))[:, :-1]  # the last token has no successor
    assert np.abs(found - logits).max() <= 1e-5 * np.abs(logits).max()

    export.main([str(path), str(tmp_path / "ours"), "format=hf"])
    assert json.loads((tmp_path / "ours" / "config.json").read_text())[FIELD] == 1
    own = read_hf(tmp_path / "ours")
    assert own["mtp.layers.0.mlp.experts.1.up_proj.weight"].shape == (6, 16)
    assert {name: own[name] for name in tensors if name in own} == {
        name: pytest.approx(it, abs=0) for name, it in tensors.items() if ".experts." not in name
    }
    assert_same(read(tmp_path / "ours")[2], weights)


@pytest.mark.parametrize("case", ["qwen3-next", "qwen3-5"])
def test_modules_are_written_and_read(case, tmp_path):
    """Also into a folder with a tower: modules have no prefix there, or are copied if the weights contain none."""
    keys = open_source(str(GOLDENS / case)).keys | {"base_num_decoder_layers": 2, "mtp_num_layers": 1}
    config = model_config(keys, [], "")
    params, out = random_params(config), tmp_path / "out"
    leaves = {name: Leaf(it.shape, it.dtype, [lambda it=it: it]) for name, it in params.items()}
    out.mkdir()
    write_huggingface(out, config, leaves, None)
    assert len([name for name in read_hf(out) if name.startswith("mtp.")]) == {"qwen3-next": 29, "qwen3-5": 15}[case]
    assert_same(read(out)[2], params)
    if case == "qwen3-next":
        return
    whole = out.rename(tmp_path / "whole")
    data, tensors = json.loads((whole / "config.json").read_text()), read_hf(whole)
    outer = {"model_type": "qwen3_5", "text_config": data, "tie_word_embeddings": True}
    (whole / "config.json").write_text(json.dumps(outer))
    tensors = {name.replace("model.", "model.language_model.", 1): it for name, it in tensors.items()}
    tensors["model.visual.x"] = np.ones(3, np.float32)
    save_file(tensors, whole / "model.safetensors")
    for words in ([], ["mtp_num_layers=0"]):
        back = tmp_path / f"back{len(words)}"
        export.main([str(whole), str(tmp_path / f"params{len(words)}"), "format=params", *words])
        export.main([str(tmp_path / f"params{len(words)}"), str(back), "format=hf", f"like={whole}"])
        assert_same(read_hf(back), tensors)


def test_a_module_without_tensors_is_none(tmp_path):
    source, config, _ = read(folder_of(tmp_path / "it", **{FIELD: 1}))
    assert config.mtp_num_layers == 0
    said = f"{source.path}: config.json has {FIELD}=1, but the files have no tensors of a module"
    assert source.notes(config) == (said,)


def test_a_module_of_a_model_whose_last_layer_is_recurrent_is_refused(tmp_path):
    path = folder_of(tmp_path / "it", GOLDENS / "qwen3-5", {"mtp.fc.weight": np.ones((16, 32), np.float32)})
    with pytest.raises(UserError, match="like the last layer, which is recurrent; the format requires"):
        read(path)
    assert read(path, "mtp_num_layers=0")[2]
    leaves = {"token_embedder/embedding": Leaf((64, 16), np.dtype(np.float32), [])}
    for modules, said in {1: "which is recurrent", 2: "mtp_num_layers=2: the format has at most 1"}.items():
        config = model_config(open_source(str(path)).keys, [f"mtp_num_layers={modules}"], "")
        with pytest.raises(UserError, match=said):
            write_huggingface(tmp_path, config, leaves, "float32")

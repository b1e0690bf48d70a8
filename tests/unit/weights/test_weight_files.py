"""Several weight files in a Hugging Face directory: which are read, and contradictions between them."""

import json
from pathlib import Path

import numpy as np
import pytest
from checkpoint_cases import FAMILIES, abstract_of, config_of, hf_tensors, random_params, write_hf
from safetensors.numpy import save_file

from trainer.config.errors import UserError
from trainer.weights.huggingface.weight_files import model_tensors
from trainer.weights.load import load_parameters
from trainer.weights.open import open_source

INDEX = "model.safetensors.index.json"
A, B, C = ({name: np.arange(3, dtype=np.float32) + i} for i, name in enumerate("abc"))


def shards(folder: Path, index: dict[str, str], **files: dict[str, np.ndarray]) -> Path:
    for name, tensors in files.items():
        save_file(tensors, folder / f"{name}.safetensors")
    weight_map = {tensor: f"{name}.safetensors" for tensor, name in index.items()}
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return folder


def refusal(folder: Path) -> str:
    with pytest.raises(UserError) as error:
        model_tensors(folder)
    return str(error.value)


def test_of_a_tensor_in_two_shards_that_of_the_index_is_read(tmp_path: Path):
    index = {"a": "x", "b": "y"}
    assert model_tensors(shards(tmp_path, index, x=A, y=B | A))["a"].path.name == "x.safetensors"
    for other in (A["a"] + 1, A["a"].astype(np.float16), A["a"].view(np.int32), A["a"][:2]):
        message = refusal(shards(tmp_path, index, x=A, y=B | {"a": other}))
        assert message == (
            f"{tmp_path / INDEX} and its files contradict each other:\n  a in y.safetensors differs from the one "
            "in x.safetensors, which the index names"
        )


def test_an_index_that_does_not_list_what_its_files_have(tmp_path: Path):
    assert "\n  c is in y.safetensors, but not in the index" in refusal(
        shards(tmp_path, {"a": "x", "b": "y"}, x=A, y=B | C)
    )
    # A tied head or buffer may be in the index but in no file, and a buffer may be in a file but not in the index.
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": A["a"]}
    assert model_tensors(shards(tmp_path, {"a": "y", "b": "y"}, x=A, y=B | buffer)).keys() == {"b"}
    assert refusal(shards(tmp_path, {"a": "x", "b": "y", "c": "x"}, x=A, y=B | C)).endswith(
        "\n  c is assigned to x.safetensors, which has no such tensor; it is in y.safetensors"
    )
    message = refusal(shards(tmp_path, {"a": "x", "b": "z"}, x=A))
    assert message.startswith(f"{tmp_path}: weights cannot be read:\n  {tmp_path / 'z.safetensors'}: ")


def test_which_of_several_forms_is_read(tmp_path: Path):
    config = config_of(decoder_block="llama2", **FAMILIES["llama2"])
    tensors = hf_tensors(random_params(config))
    path = write_hf(tmp_path / "hf", config, tensors, shards=2)

    def line() -> list[str]:
        lines: list[str] = []
        load_parameters(str(path), config, abstract_of(config), lines.append)
        return [text.removeprefix(f"{path}: ") for text in lines if "weights are read from" in text]

    assert not line()
    save_file(tensors, path / "consolidated.safetensors")
    save_file(tensors, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text("{}")
    assert line() == [
        f"weights are read from the 2 files of {INDEX}, not from adapter_model.safetensors, consolidated.safetensors; "
        "the adapter is not added to the weights"
    ]
    (path / "adapter_model.safetensors").unlink()
    save_file({name: it * 2 for name, it in tensors.items()}, path / "model.safetensors")
    assert line() == [
        "weights are read from model.safetensors, not from consolidated.safetensors, model-00001-of-00002.safetensors, "
        "model-00002-of-00002.safetensors"
    ]
    (path / "pytorch_model.bin").write_bytes(b"")
    assert line()[0].endswith(", pytorch_model.bin")
    found = model_tensors(path)
    assert {tensor.path.name for tensor in found.values()} == {"model.safetensors"}
    # An index that names model.safetensors and other files belongs with model.safetensors.
    index = dict.fromkeys(tensors, "model.safetensors") | {"a": "extra.safetensors"}
    save_file(A, path / "extra.safetensors")
    (path / INDEX).write_text(json.dumps({"weight_map": index}))
    assert model_tensors(path)["a"].path.name == "extra.safetensors"


def test_an_adapter_beside_the_only_file_of_its_base(tmp_path: Path):
    config = config_of(decoder_block="llama2", **FAMILIES["llama2"])
    path = write_hf(tmp_path / "hf", config, hf_tensors(random_params(config)))
    (path / "model.safetensors").rename(path / "weights.safetensors")
    save_file(A, path / "adapter_model.safetensors")
    assert open_source(str(path)).kind == "Hugging Face"

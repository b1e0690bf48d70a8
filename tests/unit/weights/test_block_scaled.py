"""Block-scaled 8-bit weights, as in the published files of DeepSeek-V3."""

import ml_dtypes
import numpy as np
import pytest
from checkpoint_cases import (
    FAMILIES,
    abstract_of,
    assert_same,
    config_of,
    hf_tensors,
    random_params,
    shapes_of,
    write_hf,
)

from trainer.config.errors import UserError
from trainer.weights.huggingface.packed import with_matrices
from trainer.weights.huggingface.quantization_config import Recipe, Scheme, recipe
from trainer.weights.huggingface.safetensors_file import stored_tensors
from trainer.weights.load import load_parameters
from trainer.weights.open import open_source

# Neither divides the size of a matrix, so the last blocks are incomplete.
ROWS, COLUMNS = 12, 20
SAID = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [ROWS, COLUMNS]}


def quantized(matrix):
    """Returns a matrix as float8 values and scales, and the values that they represent, block by block."""
    counts = [-(-size // part) for size, part in zip(matrix.shape, (ROWS, COLUMNS), strict=True)]
    scales = np.random.default_rng(matrix.size).uniform(0.01, 2, counts).astype(np.float32)
    values, meant = np.zeros(matrix.shape, ml_dtypes.float8_e4m3fn), np.zeros_like(matrix)
    for i, j in np.ndindex(*counts):
        block = np.s_[i * ROWS : (i + 1) * ROWS, j * COLUMNS : (j + 1) * COLUMNS]
        values[block] = (matrix[block] / scales[i, j]).astype(values.dtype)
        meant[block] = values[block].astype(np.float32) * scales[i, j]
    return values, scales, meant


def as_published(tensors):
    """Returns a file's tensors and the values that they represent: layer matrices in 8 bits, others unchanged."""
    stored, meant = dict(tensors), dict(tensors)
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and ".layers." in name:
            stored[name], stored[f"{name}_scale_inv"], meant[name] = quantized(tensor)
    return stored, meant


def test_they_are_read_as_the_product_with_their_scales(tmp_path):
    config = config_of(decoder_block="qwen3_moe", **FAMILIES["qwen3_moe"])
    stored, meant = as_published(hf_tensors(random_params(config)))
    path = write_hf(tmp_path / "8 bits", config, stored, shards=2, quantization_config=SAID)
    lines = []
    found = load_parameters(str(path), config, abstract_of(config), lines.append)
    plain = write_hf(tmp_path / "plain", config, meant)
    assert_same(found, {name: leaf.read(leaf.dtype, lambda _: None) for name, leaf in leaves(plain, config).items()})
    eight = sum(name.endswith("_scale_inv") for name in stored)
    assert [line for line in lines if f"{eight} matrices are stored as fp8 in blocks of 12 x 20;" in line]


def leaves(path, config):
    return open_source(str(path)).leaves(config, shapes_of(config))


def test_a_part_is_that_part_of_the_whole(tmp_path):
    from safetensors.numpy import save_file

    values, scales, meant = quantized(np.random.default_rng(0).normal(size=(40, 50)).astype(np.float32))
    save_file({"w.weight": values, "w.weight_scale_inv": scales}, tmp_path / "file")
    scheme = Scheme("fp8", (ROWS, COLUMNS), "inverse")
    tensor = with_matrices(stored_tensors(tmp_path / "file"), Recipe({"Linear": scheme}), tmp_path)["w.weight"]
    for box in (np.s_[0:40, 0:50], np.s_[11:13, 19:21], np.s_[12:24, 20:40], np.s_[25:40, 45:50], np.s_[0:1, 3:50]):
        np.testing.assert_array_equal(tensor.read(box), meant[box])


def test_what_does_not_fit_is_refused(tmp_path):
    config = config_of(decoder_block="llama2", **FAMILIES["llama2"])
    stored, _ = as_published(hf_tensors(random_params(config)))
    name = "model.layers.1.mlp.down_proj.weight"

    def refusal(folder, change):
        path = write_hf(tmp_path / folder, config, {**stored, **change}, quantization_config=SAID)
        with pytest.raises(UserError) as error:
            load_parameters(str(path), config, abstract_of(config), print)
        return str(error.value)

    wrong = np.ones((1, 1), np.float32)
    assert f"{name}_scale_inv: found [1, 1], wanted [" in refusal("shape", {f"{name}_scale_inv": wrong})
    alone = refusal("alone", {f"{name}_scale_inv": wrong.astype(np.int8)})
    assert f"{name}_scale_inv: stored as I8, wanted F32 or F16 or BF16" in alone


@pytest.mark.parametrize(
    "said",
    [
        {"bits": 4},
        SAID | {"fmt": "e5m2"},
        SAID | {"weight_block_size": [0, 4]},
        SAID | {"weight_block_size": 4},
        SAID | {"expert_dtype": "fp4"},
    ],
)
def test_other_quantizations_are_not_taken_for_it(said):
    refused = []
    assert recipe({"quantization_config": SAID}, refused).schemes["Linear"].block == (ROWS, COLUMNS)
    assert not refused
    recipe({"quantization_config": said}, refused)
    assert len(refused) == 1

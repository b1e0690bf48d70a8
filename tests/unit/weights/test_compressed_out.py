"""Writing quantized matrices in the layout of compressed-tensors."""

import ml_dtypes
import numpy as np
import pytest

from trainer.config.errors import UserError
from trainer.weights.huggingface.compressed_tensors import arrays_of, quantization_config, scheme_of, tensors_of
from trainer.weights.huggingface.packed import with_matrices
from trainer.weights.huggingface.quantization_config import recipe
from trainer.weights.huggingface.safetensors_file import SafetensorsFile, file_metadata, stored_tensors

CASES = {
    "int4 in groups": ("int4", (1, 4)),
    "int4 per output": ("int4", (1, 0)),
    "int8 in groups": ("int8", (1, 4)),
    "int8 per output": ("int8", (1, 0)),
    "fp8 per output": ("fp8", (1, 0)),
    "fp8 in blocks": ("fp8", (3, 4)),
    "fp8 with one scale": ("fp8", (0, 0)),
}
NAME = "model.layers.0.mlp.up_proj.weight"


def random(kind, block, shape, seed=0):
    rng = np.random.default_rng(seed)
    tiles = [-(-size // (part or size)) for size, part in zip(shape, block, strict=True)]
    scales = rng.uniform(0.01, 2, tiles).astype(np.float32)
    if kind == "fp8":
        return rng.normal(size=shape).astype(ml_dtypes.float8_e4m3fn), scales
    half = 8 if kind == "int4" else 128
    return rng.integers(-half, half, shape).astype(np.int8), scales


def written(path, matrices):
    """Writes {name: (codes, scales, scheme)}, and returns the tensors read back."""
    tensors, arrays = {}, {}
    for name, (codes, scales, scheme) in matrices.items():
        tensors |= tensors_of(name, codes.shape, scheme)
        arrays |= arrays_of(name, codes, scales, scheme)
    assert {name: (it.shape, it.dtype) for name, it in arrays.items()} == tensors
    with SafetensorsFile(path, tensors) as file:
        for name, array in arrays.items():
            file.write(name, array)
    assert file_metadata(path)
    refused = []
    said = quantization_config({name: scheme for name, (_, _, scheme) in matrices.items()}, ["lm_head.weight"])
    found = recipe({"quantization_config": said}, refused)
    assert not refused
    return with_matrices(stored_tensors(path), found, path), found


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("shape", [(6, 8), (5, 12), (1, 4)])
def test_what_is_written_is_read(case, shape, tmp_path):
    kind, block = CASES[case]
    codes, scales = random(kind, block, shape)
    tensors, _ = written(tmp_path / "file", {NAME: (codes, scales, scheme_of(kind, block))})
    matrix = tensors[NAME]
    assert tensors.keys() == {NAME}
    assert (matrix.shape, matrix.kind_of_codes) == (shape, kind)
    found = matrix.parts(tuple(slice(0, size) for size in shape))
    np.testing.assert_array_equal(found[0], codes)
    np.testing.assert_array_equal(found[1], scales)
    assert found[2] is None


def test_several_schemes(tmp_path):
    schemes = [scheme_of(*CASES[case]) for case in ("int4 in groups", "int4 in groups", "fp8 per output")]
    matrices = {f"m.{i}.weight": (*random(it.kind, it.block, (6, 8), i), it) for i, it in enumerate(schemes)}
    tensors, found = written(tmp_path / "file", matrices)
    assert [it.words for it in found.schemes_of([f"m.{i}" for i in range(3)])] == [it.words for it in schemes]
    assert found.schemes_of(["lm_head"]) == [None]
    assert [tensors[name].kind_of_codes for name in matrices] == ["int4", "int4", "fp8"]


def test_what_has_no_layout():
    for kind, block, words in (
        ("int2", (1, 0), "kind int2"),
        ("int8", (0, 0), "int8 with scales of"),
        ("int4", (2, 4), "int4 with scales of"),
        ("fp8", (0, 4), "fp8 with scales of"),
    ):
        with pytest.raises(UserError, match=words):
            scheme_of(kind, block)
    with pytest.raises(UserError, match=f"{NAME}: 10 inputs are not a multiple of 4"):
        tensors_of(NAME, (4, 10), scheme_of("int4", (1, 4)))

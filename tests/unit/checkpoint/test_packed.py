"""Matrices that other programs stored quantized (tests/packed, see scripts/write_packed.py)."""

import json
from pathlib import Path

import numpy as np
import pytest

from trainer.checkpoint.packed import with_matrices
from trainer.checkpoint.safetensors_file import file_metadata, stored_tensors
from trainer.models.huggingface_quantized import recipe

FOLDER = Path(__file__).parents[2] / "packed"
CASES = sorted(path.stem for path in FOLDER.iterdir())
assert len(CASES) == 15


def golden(case):
    """Returns the matrix of a golden, and the values that the program that wrote it computes."""
    file = FOLDER / f"{case}.safetensors"
    refused = []
    found = recipe(
        json.loads(json.dumps({"quantization_config": json.loads(file_metadata(file)["quantization_config"])})), refused
    )
    assert not refused
    tensors = with_matrices(stored_tensors(file), found, file)
    assert tensors.keys() == {"m.weight", "values"}
    return tensors["m.weight"], tensors["values"].all_values()


def boxes(shape, seed):
    """Returns the box of the whole matrix, and random ones."""
    rng = np.random.default_rng(seed)
    starts = [[int(rng.integers(0, size)) for size in shape] for _ in range(20)]
    ends = [[int(rng.integers(start + 1, size + 1)) for start, size in zip(it, shape, strict=True)] for it in starts]
    cuts = [tuple(map(slice, *it)) for it in zip(starts, ends, strict=True)]
    return [tuple(slice(0, size) for size in shape), *cuts]


@pytest.mark.parametrize("case", CASES)
def test_every_part_has_the_values_of_the_program_that_wrote_it(case):
    matrix, values = golden(case)
    assert matrix.shape == values.shape
    for box in boxes(values.shape, len(case)):
        np.testing.assert_array_equal(matrix.read(box).astype(values.dtype), values[box])

"""MXFP4, the format of gpt-oss's published experts."""

import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from checkpoint_cases import config_of, shapes_of
from safetensors.numpy import load_file, save_file

from trainer.config.errors import UserError
from trainer.config.json_files import read_object
from trainer.leaves.source import Leaf
from trainer.weights.huggingface.mxfp4 import Blocks, with_blocks
from trainer.weights.huggingface.packed import with_matrices
from trainer.weights.huggingface.quantization_config import Recipe
from trainer.weights.huggingface.safetensors_file import StoredTensor, stored_tensors
from trainer.weights.huggingface.write import write_huggingface
from trainer.weights.open import open_source

GOLDEN = Path(__file__).parents[2] / "goldens" / "mxfp4.safetensors"  # see scripts/write_goldens.py
GPT_OSS = {
    **{"base_emb_dim": 64, "base_moe_mlp_dim": 32, "num_experts": 3, "num_experts_per_tok": 2, "attention_bias": True},
    **{"mlp_activations_limit": 7.0, "sliding_window_size": 5, "rope_type": "yarn", "rope_factor": 4.0},
    **{"original_max_position_embeddings": 8, "logits_via_embedding": False},
}


def test_every_part_has_the_values_of_transformers():
    tensors = with_matrices(stored_tensors(GOLDEN), Recipe({}, mxfp4=True), GOLDEN)
    found, values = tensors["m"], tensors["values"].all_values().view(ml_dtypes.bfloat16)
    assert found.shape == values.shape == (2, 96, 5)
    for inputs in (slice(0, 96), slice(32, 64), slice(5, 70), slice(95, 96)):
        box = slice(1, 2), inputs, slice(1, 4)
        np.testing.assert_array_equal(found.read(box).view(np.uint16), values[box].view(np.uint16))


def test_a_folder_has_the_weights_of_its_values(tmp_path):
    """Gate and up outputs alternate in a matrix of blocks."""
    config = config_of(decoder_block="gpt_oss", **GPT_OSS)
    rng, plain, packed = np.random.default_rng(0), tmp_path / "plain", tmp_path / "packed"
    leaves = {}
    for name, shape in shapes_of(config).items():
        value = rng.normal(size=shape).astype(ml_dtypes.bfloat16)
        parts = value if "layers" in name else [value]
        leaves[name] = Leaf(shape, value.dtype, [lambda part=part: part for part in parts])
    plain.mkdir()
    write_huggingface(plain, config, leaves, None)
    shutil.copytree(plain, packed)
    data = read_object(packed / "config.json") | {"quantization_config": {"quant_method": "mxfp4"}}
    (packed / "config.json").write_text(json.dumps(data))
    tensors = load_file(plain / "model.safetensors")
    stored = dict(tensors)
    experts = [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]
    for name in experts:
        count, inputs, outputs = stored.pop(name).shape
        stored[f"{name}_blocks"] = rng.integers(0, 256, (count, outputs, inputs // 32, 16), np.uint8)
        stored[f"{name}_scales"] = rng.integers(118, 130, (count, outputs, inputs // 32), np.uint8)
    save_file(stored, packed / "model.safetensors")
    for name, it in with_blocks(stored_tensors(packed / "model.safetensors")).items():
        if isinstance(it, Blocks):
            tensors[name] = np.ascontiguousarray(it.read(tuple(slice(0, size) for size in it.shape)))
    save_file(tensors, plain / "model.safetensors")
    source = open_source(str(packed))
    assert "checkpoint_is_quantized" not in source.keys
    assert source.notes(config) == (f"{packed}: 4 tensors of experts are stored as MXFP4; they are read as bfloat16",)
    others = open_source(str(plain)).leaves(config, shapes_of(config))
    for name, leaf in source.leaves(config, shapes_of(config)).items():
        one, other = (it.read(np.dtype(ml_dtypes.bfloat16), lambda _: None) for it in (leaf, others[name]))
        assert one.tobytes() == other.tobytes(), name


@pytest.mark.parametrize(
    ("kind", "scales", "message"),
    [("U8", (2, 5, 2), r"m_blocks: \[2, 5, 3, 16\] with scales \[2, 5, 2\]"), ("I8", (2, 5, 3), "stored as I8")],
)
def test_tensors_that_do_not_fit(kind, scales, message):
    tensors = {
        "m_blocks": StoredTensor(GOLDEN, kind, (2, 5, 3, 16), 0, 480),
        "m_scales": StoredTensor(GOLDEN, "U8", scales, 0, 30),
    }
    with pytest.raises(UserError, match=message):
        with_blocks(tensors)

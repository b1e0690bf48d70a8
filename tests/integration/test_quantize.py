"""`python -m trainer.quantize`, and models whose weights are stored quantized, as a user runs them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_cases import abstract_of, config_of, hf_tensors, random_params, shapes_of, words, write_hf
from support import ALL_COMBINATIONS, packed_batch, pinned

from trainer import export, generate, inspect, quantize
from trainer.backends import make_model
from trainer.checkpoint import load_parameters, names_of, nested, open_source, orbax
from trainer.checkpoint.stored import stored_kernels, with_arrays
from trainer.config import UserError, load, resolve
from trainer.inference import MaxEngine
from trainer.products.dequantized import dequantize

EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "base_moe_mlp_dim": 24}
LATENT = {
    "attention_type": "mla",
    "base_num_kv_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "shared_experts": 1,
    "first_num_dense_layers": 1,
    "base_num_decoder_layers": 3,
    "rope_type": "yarn",
    "mtp_num_layers": 1,
}
MODELS = {
    "llama2": {"logits_via_embedding": False},
    "mixtral": EXPERTS | {"logits_via_embedding": False},
    "deepseek": EXPERTS | LATENT | {"logits_via_embedding": False},
    "gemma2": {"logits_via_embedding": True, "sliding_window_size": 5},
}
INT4 = "quantization=int4 weight_block_size=[8,1]"
CASES = [
    ("llama2", "quantization=int8 quantize_logits_proj=true", True),
    ("llama2", f"{INT4} weight_quantization_calibration_method=minmax unquantized_modules=[mlp/wo]", False),
    ("mixtral", "quantization=nf4 weight_block_size=[8,1]", True),
    ("deepseek", "quantization=fp8 weight_block_size=[8,8] quantize_mtp=true quantize_router_proj=true", True),
    ("gemma2", INT4, True),
]


@functools.cache
def params_of(block):
    """A folder's content: the configuration and values of a tiny model, small enough for stable logits."""
    config = config_of(decoder_block=block, **MODELS[block])
    values = {name: value * 0.3 for name, value in random_params(config).items()}
    return config, values


def written(tmp_path, block):
    """Writes the model as parameters, and returns the folder."""
    from trainer.checkpoint import Leaf, write_params

    config, values = params_of(block)
    folder = tmp_path / "float"
    folder.mkdir()
    leaves = {
        name: Leaf(value.shape, value.dtype, [lambda value=value: value], buffer=name.endswith("gate/bias"))
        for name, value in values.items()
    }
    write_params(folder, config, leaves, None, {})
    return config, values, folder


def stored_config(config, path, combination=ALL_COMBINATIONS[0]):
    keys = {name: value for name, value in open_source(str(path)).keys.items()}
    from trainer.config.dump import as_words

    flags = as_words(pinned(combination))
    loaded = load(["base.yml", "dataset_type=synthetic", *as_words(keys), *flags, f"rope_interleave={config.rope_interleave}"])
    return resolve(loaded.config, device_count=1, platform="cpu")


def logits(config, weights):
    model = make_model(config)
    rest = names_of(model.abstract[1])
    flat = {name: weights[name] for name in names_of(model.abstract[0])}
    params = jax.tree_util.tree_map(lambda leaf: leaf, model.abstract[0])
    from trainer.checkpoint import filled

    params = filled(params, flat)
    rest = filled(model.abstract[1], {name: weights[name] for name in rest})
    batch = packed_batch(config, 2)
    inputs = (batch["inputs"], batch["inputs_position"], batch["inputs_segmentation"], batch["row"])

    @jax.jit
    def run(params, rest):
        hidden, _, _ = model.apply(params, rest, *inputs)
        return model.apply(params, rest, hidden, method="head")[0]

    return np.asarray(run(params, rest))


def failure(capsys, command, *argv):
    with pytest.raises(SystemExit) as exit_:
        command([str(word) for word in argv])
    assert exit_.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(("block", "how", "scanned"), CASES)
def test_what_is_written_loads_as_it_is_and_as_floats(tmp_path, block, how, scanned, capsys):
    config, values, folder = written(tmp_path, block)
    out = tmp_path / "out"
    quantize.main([str(folder), str(out), *how.split()])
    assert "matrices with" in capsys.readouterr().out
    stored = stored_config(config, out)
    stored = type(stored)(dict(stored.items()) | {"scan_layers": scanned})
    kernels = stored_kernels(stored)
    assert ("decoder/logits_dense/kernel" in kernels) == ("quantize_logits_proj" in how)
    assert any(name.startswith("mtp_block") for name in kernels) == ("quantize_mtp" in how)
    assert any(name.endswith("gate/kernel") for name in kernels) == ("quantize_router" in how)
    assert any("mlp/wo" in name for name in kernels) == (block != "mixtral" and "unquantized" not in how)

    said = []
    model = make_model(stored)
    on_device = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=jax.devices()[0])  # noqa: E731
    from trainer.checkpoint import joined

    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0])), joined(*model.abstract))
    parts = names_of(load_parameters(str(out), stored, abstract, said.append))
    floats = names_of(load_parameters(str(out), config, abstract_of(config), said.append))
    assert any("they are read as float32" in line for line in said)
    for name, kernel in kernels.items():
        arrays = {part: parts[part] for part in names_of(nested({name: kernel}))}
        expected = dequantize(with_arrays(name, kernel, arrays), jnp.dtype(jnp.float32))
        np.testing.assert_array_equal(floats[name], expected)
        error = np.abs(np.asarray(expected) - values[name]).max() / np.abs(values[name]).max()
        assert 0 < error < (0.25 if "4" in how else 0.07), name
    for name in values.keys() - kernels.keys():
        np.testing.assert_array_equal(floats[name], values[name])
    config = type(config)(dict(config.items()) | {"scan_layers": scanned})
    found, expected = logits(stored, parts), logits(config, floats)
    np.testing.assert_allclose(found, expected, atol=3e-5 * np.abs(expected).max())
    assert np.abs(expected - logits(config, values)).max() > 1e-3 * np.abs(expected).max()

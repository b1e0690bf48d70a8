"""`python -m trainer.quantize`, and models with stored quantized weights, as a user runs them."""

import functools
import importlib.util
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_cases import abstract_of, config_of, random_params
from compiler import TPU_QUICKLY
from support import ALL_COMBINATIONS, arguments, packed_batch, pinned

from trainer import export, inspect, quantize
from trainer.aot.topologies import devices_of, topology_of
from trainer.backends.registry import make_model
from trainer.config.dump import as_words
from trainer.config.errors import UserError
from trainer.config.load import load
from trainer.config.resolve import resolve
from trainer.inference.max_engine import MaxEngine
from trainer.leaves.source import Leaf, filled, joined, names_of, nested
from trainer.products.dequantized import dequantize
from trainer.weights.load import load_parameters
from trainer.weights.open import open_source
from trainer.weights.params.write import write_params
from trainer.weights.stored import stored_kernels, with_arrays

pytestmark = pytest.mark.usefixtures("equal_programs")

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
    "qwen3": {
        "use_qk_norm": True,
        "logits_via_embedding": True,
        "normalize_embedding_logits": False,
        "rope_interleave": True,
    },
}
INT4 = "quantization=int4 weight_block_size=[8,1]"
CASES = [
    ("llama2", "quantization=int8 quantize_logits_proj=true", True),
    ("llama2", f"{INT4} weight_quantization_calibration_method=minmax unquantized_modules=[mlp/wo]", False),
    ("mixtral", "quantization=nf4 weight_block_size=[8,1]", True),
    ("deepseek", "quantization=fp8 weight_block_size=[4,4] quantize_mtp=true quantize_router_proj=true", True),
    ("gemma2", INT4, True),
]


@functools.cache
def params_of(block):
    """Returns the configuration and values of a tiny model, small enough for stable logits."""
    config = config_of(decoder_block=block, **MODELS[block])
    return config, {name: value * 0.3 for name, value in random_params(config).items()}


def written(folder, block):
    """Writes the model, and returns its configuration and values."""
    config, values = params_of(block)
    folder.mkdir()
    leaves = {name: Leaf(value.shape, value.dtype, [lambda value=value: value]) for name, value in values.items()}
    write_params(folder, config, leaves, None)
    return config, values


def stored_config(path, combination=ALL_COMBINATIONS[0], **keys):
    """Returns the configuration of the stored model in a folder."""
    keys = {**open_source(str(path)).keys, **pinned(combination), **keys}
    loaded = load(["base.yml", "dataset_type=synthetic", *as_words(keys)])
    return resolve(loaded.config, device_count=1, platform="cpu")


def loaded_parts(path, config, say=lambda line: None):
    """Returns the weights in a folder by name, for a model of `config`."""
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=device), joined(*make_model(config).abstract)
    )
    return names_of(load_parameters(str(path), config, abstract, say))


def logits(config, weights):
    model = make_model(config)
    params, rest = (filled(tree, {name: weights[name] for name in names_of(tree)}) for tree in model.abstract)
    batch = packed_batch(config, 2)
    inputs = [batch[name] for name in ("inputs", "inputs_position", "inputs_segmentation", "row")]

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


def values_of(kernels, parts):
    """Returns the dequantized kernels."""
    stored = {
        name: with_arrays(name, kernel, {part: parts[part] for part in names_of(nested({name: kernel}))})
        for name, kernel in kernels.items()
    }
    return jax.jit(lambda found: {name: dequantize(one, jnp.dtype(jnp.float32)) for name, one in found.items()})(stored)


@pytest.mark.rest(covered_by="llama2 and mixtral", cases=("deepseek", "gemma2"))
@pytest.mark.parametrize(("block", "how", "scanned"), CASES)
def test_what_is_written_loads_as_it_is_and_as_floats(tmp_path, block, how, scanned, capsys):
    folder, out = tmp_path / "float", tmp_path / "out"
    config, values = written(folder, block)
    quantize.main([str(folder), str(out), *how.split()])
    assert "matrices with" in capsys.readouterr().out
    stored = stored_config(out, scan_layers=scanned, rope_interleave=config.rope_interleave)
    kernels, said = stored_kernels(stored), []
    assert ("decoder/logits_dense/kernel" in kernels) == ("quantize_logits_proj" in how)
    assert any(name.startswith("mtp_block") for name in kernels) == ("quantize_mtp" in how)
    assert any(name.endswith("gate/kernel") for name in kernels) == ("quantize_router" in how)
    assert any("mlp/wo" in name for name in kernels) == (block != "mixtral" and "unquantized" not in how)
    parts = loaded_parts(out, stored)
    floats = names_of(load_parameters(str(out), config, abstract_of(config), said.append))
    assert any("they are read as float32" in line for line in said)
    for name, expected in values_of(kernels, parts).items():
        np.testing.assert_array_equal(floats[name], expected)
        error = np.abs(np.asarray(expected) - values[name]).max() / np.abs(values[name]).max()
        assert 0 < error < (0.25 if "4" in how else 0.07), name
    for name in values.keys() - kernels.keys():
        np.testing.assert_array_equal(floats[name], values[name])
    config = type(config)(dict(config.items()) | {"scan_layers": scanned})
    found, expected = logits(stored, parts), logits(config, floats)
    np.testing.assert_allclose(found, expected, atol=3e-5 * np.abs(expected).max())
    assert np.abs(expected - logits(config, values)).max() > 1e-3 * np.abs(expected).max()


@pytest.mark.rest(covered_by="llama2 and qwen3", cases=("mixtral",))
@pytest.mark.parametrize(
    ("block", "how", "kind"),
    [
        ("llama2", f"{INT4} unquantized_modules=[mlp/wo]", "pack-quantized"),
        ("mixtral", "quantization=fp8 weight_block_size=[8,8] quantize_logits_proj=true", "float-quantized"),
        ("qwen3", "quantization=int8", "pack-quantized"),
    ],
)
def test_hugging_face_in_and_out(tmp_path, capsys, block, how, kind):
    """A folder in the compressed-tensors layout has the same integers and scales, whatever RoPE's entry order."""
    folder, out, hf, back = (tmp_path / name for name in ("float", "out", "hf", "back"))
    config, _ = written(folder, block)
    quantize.main([str(folder), str(out), *how.split()])
    capsys.readouterr()
    export.main([str(out), str(hf), "format=hf"])
    count = re.search(r": .* parameters, format=hf", capsys.readouterr().out)[0]
    said = json.loads((hf / "config.json").read_text())["quantization_config"]
    assert said["format"] == kind
    assert ("lm_head" in said["ignore"]) == ("quantize_logits" not in how)
    assert any("down_proj" in name for name in said["ignore"]) == ("unquantized" in how)
    stored = stored_config(out, rope_interleave=config.rope_interleave)
    again = stored_config(hf, rope_interleave=config.rope_interleave)
    ours, theirs = loaded_parts(out, stored), loaded_parts(hf, again)
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        np.testing.assert_array_equal(array, theirs[name], err_msg=name)
    export.main([str(hf), str(back), "format=hf", "dtype=float32"])
    assert count in capsys.readouterr().out, "scales are no parameters"
    floats = names_of(load_parameters(str(back), config, abstract_of(config), print))
    for name, value in values_of(stored_kernels(stored), ours).items():
        np.testing.assert_array_equal(floats[name], value)
    other = type(config)(dict(config.items()) | {"rope_interleave": not config.rope_interleave})
    floats, same = (names_of(load_parameters(str(path), other, abstract_of(other), print)) for path in (back, out))
    for name, value in floats.items():
        np.testing.assert_array_equal(value, same[name], err_msg=name)


@pytest.mark.rest(covered_by="unit/calibration/test_layerwise.py")
@pytest.mark.parametrize("algorithm", ["awq", "gptq"])
def test_calibration_writes_what_loads(tmp_path, algorithm, capsys):
    """Calibrates on rows of random tokens. AWQ's scales, and the errors that GPTQ compensates, change values."""
    folder, out, nearest = (tmp_path / name for name in ("float", "out", "nearest"))
    config, values = written(folder, "mixtral")
    how = [*INT4.split(), f"weight_quantization_algorithm={algorithm}"]
    text = ["dataset_type=synthetic", "max_target_length=32", "calibration_rows=12"]
    quantize.main([str(folder), str(out), *how, *text])
    assert "layer 2 of 2" in capsys.readouterr().out
    quantize.main([str(folder), str(nearest), *INT4.split()])
    stored = stored_config(out, rope_interleave=config.rope_interleave)
    kernels, parts = stored_kernels(stored), loaded_parts(out, stored)
    found = values_of(kernels, parts)
    floats = names_of(load_parameters(str(nearest), config, abstract_of(config), print))
    for name, value in found.items():
        assert (np.asarray(value) != np.asarray(floats[name])).any(), name
        assert np.abs(np.asarray(value) - values[name]).max() < 0.5 * np.abs(values[name]).max()
    expected = logits(config, {**values, **{name: np.asarray(value) for name, value in found.items()}})
    np.testing.assert_allclose(logits(stored, parts), expected, atol=3e-5 * np.abs(expected).max())


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="there is no libtpu but for Linux on x86-64")
def test_a_decode_step_of_a_tpu_holds_no_float_kernel():
    """Its arguments are the integers, and all temporaries together are smaller than one bfloat16 kernel."""
    keys = {"base_emb_dim": 256, "base_mlp_dim": 8192, "head_dim": 128, "base_num_decoder_layers": 2}
    keys |= {"weight_dtype": "bfloat16", "per_device_batch_size": 8, "max_target_length": 128}
    keys |= {"compile_topology": "v5e-1", "checkpoint_is_quantized": True, "quantization": "int4"}
    config = load(arguments(ALL_COMBINATIONS[0], **keys)).config
    engine = MaxEngine(config, devices_of(topology_of(config), 1))
    compiled, report = engine.aot_compile(TPU_QUICKLY)
    kernels = stored_kernels(engine.config)
    assert len(kernels) == 7
    weights = sum(kernel.qvalue.size for kernel in kernels.values())
    others = [leaf for name, leaf in names_of(joined(*engine.served.model.abstract)).items() if "/qvalue" not in name]
    cache = jax.tree.leaves(jax.eval_shape(engine.init_decode_state))
    expected = weights / 2 + sum(leaf.size * leaf.dtype.itemsize for leaf in [*others, *cache])
    assert report.memory.arguments == pytest.approx(expected, rel=0.02)  # small arrays are padded to tiles
    assert all(f"s4[{','.join(map(str, kernel.qvalue.shape))}]" in compiled.as_text() for kernel in kernels.values())
    largest = max(kernel.qvalue.size for kernel in kernels.values()) // 2  # of one layer

    assert report.memory.temporaries < 2 * largest, "as many bytes as the kernel has in bfloat16"


def test_what_a_command_refuses(tmp_path, capsys):
    folder, out, new = (tmp_path / name for name in ("float", "out", "new"))
    config, _ = written(folder, "llama2")
    quantize.main([str(folder), str(out), *INT4.split(), "weight_quantization_calibration_method=minmax"])
    for words, said in (
        (["quantization=int5"], "quantization=int5: allowed: int8, int4"),
        (
            ["quantization=int8", "unquantized_modules=[mpl]"],
            "unquantized_modules: mpl matches no matrix; the matrices",
        ),
        (["quantization=int8", "unquantized_modules=[decoder]"], "no matrix is quantized"),
        (["quantization=int8", "weight_block_size=[7,1]"], "blocks of 7 do not fit"),
        (["quantization=int8", "calibration_rows=8"], "weight_quantization_algorithm=rounding reads no text"),
        (["quantization=int8", "checkpoint_is_quantized=False"], "this command's output is quantized"),
        (["quantization=int8", "learning_rate=1"], "learning_rate: not a key of the model"),
        (["quantization=int8", "base_emb_dim=8"], "contains a different model"),
    ):
        assert said in failure(capsys, quantize.main, folder, new, *words)
        assert not new.exists()
    assert "exists and is not an empty folder" in failure(capsys, quantize.main, folder, out, "quantization=int8")
    assert "zero points are not written" in failure(capsys, export.main, out, new, "format=hf")
    export.main([str(out), str(tmp_path / "floats"), "format=hf", "dtype=bfloat16"])
    export.main([str(out), str(tmp_path / "maxtext"), "format=maxtext"])
    assert "leave checkpoint_is_quantized out" in failure(
        capsys, export.main, out, new, "format=maxtext", "checkpoint_is_quantized=true"
    )
    export.main([str(out), str(tmp_path / "copy"), "format=params"])
    stored = stored_config(out, rope_interleave=config.rope_interleave)
    ours, copy = loaded_parts(out, stored), loaded_parts(tmp_path / "copy", stored)
    for name, array in ours.items():
        np.testing.assert_array_equal(array, copy[name])
    with pytest.raises(UserError, match="contains float weights, but checkpoint_is_quantized=true"):
        loaded_parts(folder, stored)
    with pytest.raises(UserError, match="quantized weights cannot be reordered"):
        loaded_parts(out, stored_config(out, rope_interleave=not config.rope_interleave))
    inspect.main([str(out)])
    assert "checkpoint_is_quantized=true" in capsys.readouterr().out

"""Models with matrices that are stored quantized: on meshes, and in all combinations."""

import functools

import jax
import numpy as np
import pytest
from stored_qwix import FROZEN
from support import ALL_COMBINATIONS, assert_equal_bits, copied, model_of, packed_batch, tiny_config

from trainer.config.errors import UserError
from trainer.inference.max_engine import MaxEngine
from trainer.inference.served import serve
from trainer.inference.weights import canonical
from trainer.leaves.source import Leaf, names_of
from trainer.products.dequantized import dequantize, is_stored
from trainer.training.build import build
from trainer.weights import placing
from trainer.weights.params.write import write_params

ENDS = sorted({ALL_COMBINATIONS[0], ALL_COMBINATIONS[-1]})
STORED = {"checkpoint_is_quantized": True}
RECIPES = {
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4", "weight_block_size": "[4,1]"},  # 6 groups of hidden units
    "3 groups": {"quantization": "int4", "weight_block_size": "[8,1]"},  # split over 2 devices
    "zero points": {"quantization": "int4", "weight_block_size": "[8,1]"}
    | {"weight_quantization_calibration_method": "minmax"},
    "fp8 blocks": {"quantization": "fp8", "weight_block_size": "[8,8]"},
    "nf4": {"quantization": "nf4", "weight_block_size": "[8,1]"},
    "awq": {"quantization": "int4", "weight_block_size": "[8,1]", "weight_quantization_algorithm": "awq"},
}
UNITS = {"int8": 32, "int4": 2, "fp8": 32, "nf4": 0.5}
DENSE = {"ici_data_parallelism": 2, "ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2}
EXPERT = {"ici_expert_parallelism": 2, "ici_tensor_parallelism": 2}
MODELS = {
    "llama2": {"base_mlp_dim": 24},
    "mixtral": {"decoder_block": "mixtral", "num_experts": 4, "num_experts_per_tok": 2, "base_moe_mlp_dim": 24}
    | {"quantize_router_proj": False},
}
SIZES = {"base_num_decoder_layers": 1, "logits_via_embedding": False, "quantize_logits_proj": True}
ROUNDING = 1e-5  # of sums in another order, relative to the largest logit


def config_of(model, combination="nnx", devices=1, **keys):
    keys = MODELS[model] | SIZES | {"per_device_batch_size": 8 / devices} | keys
    return tiny_config(combination, devices=devices, **keys)


def inputs_of(config, length):
    batch = packed_batch(config, 8)
    return *(batch[name][:, :length] for name in ("inputs", "inputs_position", "inputs_segmentation")), batch["row"]


def logits_of(served):
    """Returns a compiled function from params and inputs to logits."""

    @jax.jit
    @served.on_mesh
    def logits(params, inputs):
        hidden = served.model.apply(params, {}, *inputs)[0]
        return served.model.apply(params, {}, hidden, method="head")[0]

    return logits


@functools.cache
def float_logits(model):
    return logits_of(serve(config_of(model, quantize_logits_proj=False), jax.devices()[:1]))


def random_params(abstract, recipe, seed=0):
    """Returns random stored parameters, whose kernels have a standard deviation of about 0.25."""
    rng = np.random.default_rng(seed)
    unit = UNITS[RECIPES[recipe]["quantization"]]

    def one(path, like):
        name = jax.tree_util.keystr(path)
        normal, factor = rng.normal(size=like.shape), rng.uniform(0.5, 2, like.shape)
        if like.dtype == np.uint8:
            return rng.integers(0, 256, like.shape, np.uint8)
        if "kernel" not in name and "MoeBlock_0" not in name:
            normal = 1 + normal / 8 if "norm" in name else normal
        elif like.dtype != np.float32:
            normal = np.clip(normal, -3, 3) * unit
        elif "scale" in name:
            normal = factor if "awq" in name else factor * 0.2 / unit
        else:
            normal *= 0.25
        return normal.astype(like.dtype)

    return jax.tree_util.tree_map_with_path(one, abstract)


@jax.jit
def as_floats(params):
    def one(value):
        return dequantize(value, np.dtype(np.float32)) if is_stored(value) else value

    return jax.tree.map(one, params, is_leaf=is_stored)


@pytest.mark.parametrize(
    ("model", "mesh", "recipe", "length"),
    [
        # One token per row: scales are applied after the product.
        *(("llama2", DENSE, name, 1) for name in ("int4", "zero points", "nf4", "awq")),
        *(("llama2", DENSE, name, 16) for name in ("3 groups", "fp8 blocks")),
        *(("mixtral", EXPERT, name, 16) for name in ("int8", "3 groups", "nf4", "awq")),
    ],
)
def test_logits_on_a_mesh_are_those_of_one_device(model, mesh, recipe, length):
    devices = jax.devices()[: 8 if mesh is DENSE else 4]
    served = serve(config_of(model, devices=len(devices), **STORED, **RECIPES[recipe], **mesh), devices)
    abstract, _ = served.abstract_variables
    params = random_params(abstract, recipe)
    on_mesh = jax.tree.map(lambda part, like: jax.device_put(part, like.sharding), params, abstract)
    inputs = inputs_of(served.config, length)
    found, expected = logits_of(served)(on_mesh, inputs), float_logits(model)(as_floats(params), inputs)
    np.testing.assert_allclose(found, expected, atol=ROUNDING * np.abs(expected).max())


def test_a_folder_is_loaded_onto_a_mesh_and_draws_a_token(tmp_path, monkeypatch):
    """The mesh does not divide the groups. The token equals that of the float model with the same values."""
    keys = STORED | RECIPES["3 groups"] | {"load_parameters_path": tmp_path, "return_log_prob": True}
    engine = MaxEngine(config_of("llama2", ENDS[0], devices=8, decode_sampling_strategy="greedy", **keys, **DENSE))
    params = random_params(engine.served.model.abstract[0], "3 groups")
    leaves = {name: Leaf(it.shape, it.dtype, [lambda it=it: it]) for name, it in names_of(params).items()}
    write_params(tmp_path, engine.config, leaves, None)

    monkeypatch.setattr(placing, "SMALL", 0)  # devices stack the layers of large leaves
    variables = engine.load_params(say=print)
    loaded, _ = canonical(variables)
    assert_equal_bits(copied(loaded), params)
    _, first = engine.prefill(variables, engine.padded([5, 0, 17]), 3)
    row = np.array([[5, 0, 17, *[0] * 13]])
    inputs = row, np.arange(16)[None], np.ones_like(row), np.zeros(1, np.int32)
    logits = np.asarray(float_logits("llama2")(as_floats(params), inputs))[0].astype(np.float64)
    assert first.tokens[0] == logits[2].argmax()
    expected = logits[2].max() - np.log(np.exp(logits[2]).sum())
    np.testing.assert_allclose(first.log_probs[0], expected, atol=10 * ROUNDING)

    specs = {name: list(it.sharding.spec) for name, it in names_of(loaded).items()}
    kernel, scale = (specs[f"decoder/layers/mlp/wo/kernel/{part}"] for part in ("qvalue", "scale"))
    assert "tensor" in str(kernel[1])
    assert scale == [kernel[0], None, kernel[2]]
    assert specs["decoder/layers/mlp/wi_0/kernel/scale"] == specs["decoder/layers/mlp/wi_0/kernel/qvalue"]


@pytest.mark.parametrize(("recipe", "combinations"), [("nf4", ENDS), ("awq", ALL_COMBINATIONS)])
def test_all_combinations_store_the_same(recipe, combinations):
    """Names, shapes, dtypes and axes are equal; the first and the last combination also have equal bits."""
    models = [model_of(config_of("mixtral", it, **STORED, **RECIPES[recipe])) for it in combinations]
    first, *others = models
    assert jax.tree.structure(first.param_axes) == jax.tree.structure(first.abstract[0])
    for other in others:
        assert other.abstract[0] == first.abstract[0]
        assert other.param_axes == first.param_axes


def test_logits_have_the_same_program_in_all_combinations():
    served = [serve(config_of("mixtral", it, **STORED, **RECIPES["3 groups"]), jax.devices()[:1]) for it in ENDS]
    params = random_params(served[0].model.abstract[0], "3 groups")
    left, right = (logits_of(it).lower(params, inputs_of(it.config, 16)).as_text() for it in served)
    assert left == right


def test_integers_are_refused_in_training():
    message = r"wi_0/kernel/qvalue and 7 more: integers and .* cannot be trained.*checkpoint_is_quantized=false reads"
    for recipe in ("int8", "fp8 blocks"):
        with pytest.raises(UserError, match=message):
            build(config_of("llama2", **STORED, **RECIPES[recipe]), jax.devices()[:1])
    run = build(config_of("llama2", **STORED, **RECIPES["int4"], **FROZEN), jax.devices()[:1])
    with pytest.raises(UserError, match=r"wi_0/kernel/qvalue contains 4-bit integers, which .* do not accept on CPUs"):
        run.check_arguments()
    build(config_of("llama2", **STORED, **RECIPES["nf4"], **FROZEN), jax.devices()[:1]).check_arguments()

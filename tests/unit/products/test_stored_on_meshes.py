"""Models whose matrices are stored quantized: on meshes, and in all combinations."""

import functools

import jax
import numpy as np
import pytest
from support import packed_batch, tiny_config

from trainer.inference.served import serve
from trainer.ops.paths import by_name
from trainer.products.dequantized import dequantize, is_stored

STORED = {"checkpoint_is_quantized": True}
RECIPES = {
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4", "weight_block_size": "[4,1]"},  # 6 groups of hidden units
    "3 groups": {"quantization": "int4", "weight_block_size": "[8,1]"},  # on 2 devices
    "zero points": {"quantization": "int4", "weight_block_size": "[8,1]"}
    | {"weight_quantization_calibration_method": "minmax"},
    "fp8 blocks": {"quantization": "fp8", "weight_block_size": "[8,8]"},
    "nf4": {"quantization": "nf4", "weight_block_size": "[8,1]"},
    "awq": {"quantization": "int4", "weight_block_size": "[8,1]", "weight_quantization_algorithm": "awq"},
}
DENSE = {"ici_data_parallelism": 2, "ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2}
EXPERT = {"ici_expert_parallelism": 2, "ici_tensor_parallelism": 2}
MODELS = {
    "llama2": {"base_mlp_dim": 24},
    "mixtral": {"decoder_block": "mixtral", "num_experts": 4, "num_experts_per_tok": 2, "base_moe_mlp_dim": 24},
}
SIZES = {"base_num_decoder_layers": 1, "logits_via_embedding": False, "quantize_logits_proj": True}
ROUNDING = 1e-5  # of sums in another order, as a share of the largest logit


def config_of(model, combination="nnx", devices=1, **keys):
    keys = MODELS[model] | SIZES | {"per_device_batch_size": 8 / devices} | keys
    return tiny_config(combination, devices=devices, **keys)


def logits_of(served, length):
    """Returns a compiled function from params, rest to logits of 8 rows."""
    batch = packed_batch(served.config, 8)
    inputs = [batch[field][:, :length] for field in ("inputs", "inputs_position", "inputs_segmentation")]

    @jax.jit
    @served.on_mesh
    def logits(params, rest):
        hidden = served.model.apply(params, rest, *inputs, batch["row"])[0]
        return served.model.apply(params, rest, hidden, method="head")[0]

    return logits


@functools.cache
def float_logits(model, length):
    keys = {"quantize_logits_proj": False}
    return logits_of(serve(config_of(model, **keys), jax.devices()[:1]), length)


def with_values(params, seed=0):
    """Returns stored params with random scales of AWQ."""
    rng = np.random.default_rng(seed)

    def one(path, part):
        is_scale = "awq_scale" in jax.tree_util.keystr(path)
        return part * rng.uniform(0.5, 2, part.shape).astype(np.float32) if is_scale else part

    return jax.tree_util.tree_map_with_path(one, params)


def as_floats(params):
    def one(value):
        return dequantize(value, np.dtype(np.float32)) if is_stored(value) else value

    return jax.jit(lambda params: jax.tree.map(one, params, is_leaf=is_stored))(params)


@pytest.mark.parametrize(
    ("model", "mesh", "recipe", "length"),
    [
        *(("llama2", DENSE, name, length) for name in RECIPES for length in (1, 16)),
        *(("mixtral", EXPERT, name, 16) for name in RECIPES),
    ],
)
def test_logits_on_a_mesh_are_those_of_one_device(model, mesh, recipe, length):
    devices = jax.devices()[: 8 if mesh is DENSE else 4]
    served = serve(config_of(model, devices=len(devices), **STORED, **RECIPES[recipe], **mesh), devices)
    params, rest = jax.jit(served.model.init)(jax.random.key(0))
    params = with_values(params)
    abstract, _ = served.abstract_variables
    on_mesh = jax.tree.map(lambda part, like: jax.device_put(part, like.sharding), params, abstract)
    found = logits_of(served, length)(on_mesh, rest)
    expected = float_logits(model, length)(as_floats(params), rest)
    np.testing.assert_allclose(found, expected, atol=ROUNDING * np.abs(expected).max())

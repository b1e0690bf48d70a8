"""Small checkpoints in other formats, written by hand, so that the trainer's reader is not tested with its own
writer."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from support import ALL_COMBINATIONS, TINY, pinned

from trainer.config.load import load
from trainer.config.resolve import resolve
from trainer.leaves.source import names_of, nested
from trainer.weights.open import weight_shapes

MODEL = {key: TINY[key] for key in TINY if key.startswith(("base_", "head_dim", "vocab_size"))}
EXPERTS = {"num_experts": 3, "num_experts_per_tok": 2, "base_moe_mlp_dim": 24}
FAMILIES = {
    "llama2": {"logits_via_embedding": False},
    "mistral": {"attention_type": "local_sliding", "sliding_window_size": 5, "logits_via_embedding": False},
    "qwen3": {"use_qk_norm": True, "logits_via_embedding": True, "normalize_embedding_logits": False},
    "phi3": {"logits_via_embedding": False},
    "mixtral": EXPERTS | {"logits_via_embedding": False},
    "qwen3_moe": EXPERTS | {"use_qk_norm": True, "logits_via_embedding": False, "norm_topk_prob": True},
}
ROPES = {
    "default": {"rope_max_timescale": 5000},
    "linear": {"rope_linear_scaling_factor": 4.0},
    "llama3.1": {"rope_type": "llama3.1", "rope_factor": 8.0, "original_max_position_embeddings": 32},
    "yarn": {"rope_type": "yarn", "rope_factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16.0},
    "yarn_scaled": {"rope_type": "yarn", "rope_truncate": False, "rope_attention_scaling": True},
}
MODEL_TYPES = {"llama2": "llama"}  # other families: the name of the block
SUFFIX = {
    "pre_self_attention_layer_norm/scale": "input_layernorm.weight",
    "self_attention/query/kernel": "self_attn.q_proj.weight",
    "self_attention/key/kernel": "self_attn.k_proj.weight",
    "self_attention/value/kernel": "self_attn.v_proj.weight",
    "self_attention/out/kernel": "self_attn.o_proj.weight",
    "self_attention/query_norm/scale": "self_attn.q_norm.weight",
    "self_attention/key_norm/scale": "self_attn.k_norm.weight",
    "post_self_attention_layer_norm/scale": "post_attention_layernorm.weight",
    "mlp/wi_0/kernel": "mlp.gate_proj.weight",
    "mlp/wi_1/kernel": "mlp.up_proj.weight",
    "mlp/wo/kernel": "mlp.down_proj.weight",
    "MoeBlock_0/gate/kernel": "block_sparse_moe.gate.weight",
    "moe_block/gate/kernel": "mlp.gate.weight",
}
SUFFIX_OF_EXPERT = {
    "MoeBlock_0/wi_0": "block_sparse_moe.experts.{}.w1.weight",
    "MoeBlock_0/wi_1": "block_sparse_moe.experts.{}.w3.weight",
    "MoeBlock_0/wo": "block_sparse_moe.experts.{}.w2.weight",
    "moe_block/wi_0": "mlp.experts.{}.gate_proj.weight",
    "moe_block/wi_1": "mlp.experts.{}.up_proj.weight",
    "moe_block/wo": "mlp.experts.{}.down_proj.weight",
}


# Phi 3's merged modules, each a concatenation of these modules.
MERGED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def words(**keys: Any) -> list[str]:
    """Returns the keys of a tiny model as command-line words."""
    return [f"{key}={value}" for key, value in (MODEL | keys).items()]


def config_of(**keys: Any) -> Any:
    """Returns a tiny model's configuration, resolved."""
    loaded = load(["base.yml", "dataset_type=synthetic", *words(**keys | pinned(ALL_COMBINATIONS[0]))])
    return resolve(loaded.config, device_count=1, platform="cpu")


_SHAPES: dict[str, dict[str, tuple[int, ...]]] = {}


def shapes_of(config: Any) -> dict[str, tuple[int, ...]]:
    """Returns `weight_shapes`, which traces the model, cached per configuration."""
    key = str(sorted((name, str(value)) for name, value in config.items()))
    if key not in _SHAPES:
        _SHAPES[key] = weight_shapes(config)
    return _SHAPES[key]


def random_params(config: Any, dtype: Any = np.float32, seed: int = 0) -> dict[str, np.ndarray]:
    """Returns parameters by canonical name, for RoPE that pairs the two halves of a head."""
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes_of(config).items()}


def in_pairs(params: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the same model with a head's entries reordered, for RoPE that pairs adjacent entries."""
    rotated = ("query/kernel", "key/kernel", "query_norm/scale", "key_norm/scale")
    return {name: pairs(value) if name.endswith(rotated) else value for name, value in params.items()}


def pairs(x: np.ndarray) -> np.ndarray:
    """Reorders halves into adjacent pairs, entry by entry."""
    out, half = np.empty_like(x), x.shape[-1] // 2
    for i in range(half):
        out[..., 2 * i], out[..., 2 * i + 1] = x[..., i], x[..., half + i]
    return out


def hf_tensors(params: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns Hugging Face's tensors of `params`."""
    tensors = {"model.embed_tokens.weight": params["token_embedder/embedding"]}
    for suffix, name in SUFFIX.items():
        for i, value in enumerate(params.get(f"decoder/layers/{suffix}", ())):
            if suffix == "self_attention/out/kernel":
                value = value.reshape(-1, value.shape[-1]).T
            elif value.ndim > 1:
                value = value.reshape(value.shape[0], -1).T
            tensors[f"model.layers.{i}.{name}"] = value
    for suffix, name in SUFFIX_OF_EXPERT.items():
        for i, layer in enumerate(params.get(f"decoder/layers/{suffix}", ())):
            tensors |= {f"model.layers.{i}.{name.format(e)}": matrix.T for e, matrix in enumerate(layer)}
    tensors["model.norm.weight"] = params["decoder/decoder_norm/scale"]
    if "decoder/logits_dense/kernel" in params:
        tensors["lm_head.weight"] = params["decoder/logits_dense/kernel"].T
    return {name: np.ascontiguousarray(value) for name, value in tensors.items()}


def hf_tensors_of(config: Any, params: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns `hf_tensors`, merged as the family of `config` stores them."""
    tensors = hf_tensors(params)
    for whole, parts in MERGED.items() if config.decoder_block == "phi3" else ():
        for name in [name for name in tensors if f".{parts[0]}." in name]:
            values = [tensors.pop(name.replace(parts[0], part)) for part in parts]
            tensors[name.replace(parts[0], whole)] = np.concatenate(values)
    return tensors


def hf_config(config: Any, **changes: Any) -> dict[str, Any]:
    """Returns a config.json in the form of transformers 5, without sizes that follow from others."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(config.rope_max_timescale)}
    if config.rope_linear_scaling_factor != 1:
        rope |= {"rope_type": "linear", "factor": config.rope_linear_scaling_factor}
    if config.rope_type == "llama3.1":
        rope |= {"rope_type": "llama3", "factor": config.rope_factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if config.rope_type == "yarn":
        rope |= {"rope_type": "yarn", "factor": config.rope_factor, "beta_fast": config.beta_fast}
        rope |= {"truncate": config.rope_truncate}
        rope |= {} if config.rope_attention_scaling else {"attention_factor": 1.0}
    if config.rope_type != "default":
        rope["original_max_position_embeddings"] = config.original_max_position_embeddings
    data = {
        "model_type": MODEL_TYPES.get(config.decoder_block, config.decoder_block),
        "vocab_size": config.vocab_size,
        "hidden_size": config.base_emb_dim,
        "intermediate_size": config.base_mlp_dim,
        "num_hidden_layers": config.base_num_decoder_layers,
        "num_attention_heads": config.base_num_query_heads,
        "num_key_value_heads": config.base_num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.normalization_layer_epsilon,
        "tie_word_embeddings": config.logits_via_embedding,
        "rope_parameters": rope,
        "eos_token_id": 7,
        "max_position_embeddings": 333,
    }
    if config.decoder_block == "mixtral":
        data |= {"num_local_experts": config.num_experts, "intermediate_size": config.base_moe_mlp_dim}
    if config.decoder_block == "qwen3_moe":
        data |= {"num_experts": config.num_experts, "moe_intermediate_size": config.base_moe_mlp_dim}
        data |= {"norm_topk_prob": config.norm_topk_prob, "decoder_sparse_step": 1, "mlp_only_layers": []}
    if config.num_experts > 1:
        data["num_experts_per_tok"] = config.num_experts_per_tok
    if config.decoder_block == "mistral":
        data["sliding_window"] = config.sliding_window_size or None
    return data | changes


def write_hf(folder: Path, config: Any, tensors: dict[str, np.ndarray], *, shards: int = 1, **changes: Any) -> Path:
    """Writes a Hugging Face directory with a tokenizer.json."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(hf_config(config, **changes)))
    (folder / "tokenizer.json").write_text("{}")
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = dict(list(tensors.items())[i::shards])
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def maxtext_params(config: Any, params: dict[str, np.ndarray], *, scanned: bool) -> dict[str, np.ndarray]:
    """Returns `params` with MaxText's names and layouts, for RoPE that pairs the two halves of a head."""
    if config.rope_type != "default":
        params = in_pairs(params)
    stored = {}
    for name, value in params.items():
        if name.endswith("query/kernel") and not config.use_qk_norm:
            value = (value.astype(np.float32) / np.sqrt(config.head_dim)).astype(value.dtype)
        if not name.startswith("decoder/layers/"):
            stored[name] = value
        elif scanned:
            stored[name] = np.moveaxis(value, 0, 1)
        else:
            for i, layer in enumerate(value):
                stored[name.replace("layers", f"layers_{i}")] = layer
    return stored


def write_maxtext(items: Path, stored: dict[str, np.ndarray], **more: Any) -> Path:
    """Writes a checkpoint in MaxText's format with Orbax's old interface: parameters, moments and the step."""
    import jax
    import jax.numpy as jnp
    import orbax.checkpoint as orbax

    params = nested(jax.device_put(stored))
    tree = {"params": {"params": params}, "opt_state": {"mu": {"params": params}}, "step": jnp.int32(3)} | more
    orbax.PyTreeCheckpointer(use_ocdbt=True).save(items.absolute(), tree)
    return items


def maxtext_run(
    folder: Path, stored: dict[str, np.ndarray], *, nnx: bool = False, full: bool = True, scan: bool = True, **more: Any
) -> Path:
    """Writes a run's folder as MaxText saves it, with the same Orbax calls: two checkpoints, of which the newer counts.

    Args:
      stored: see `maxtext_params`.
      nnx: writes it like MaxText's NNX model. A full state then also has random-number state; a parameter-only
        checkpoint has its parameters at the root.
      full: includes the optimizer state. Otherwise, writes it like MaxText's parameter-only tool: step 0,
        without `scan`.
      more: further items of each checkpoint, such as the position in the data.
    """
    import jax
    import jax.numpy as jnp
    import orbax.checkpoint as orbax

    arrays = jax.device_put(stored)
    params = {"params": nested(arrays)}
    state: Any = {"params": params, "opt_state": {}, "step": 0}
    if full:
        adam = {"count": jnp.int32(3), "mu": params, "nu": params}
        state |= {"opt_state": [adam, None, {"count": jnp.int32(3)}], "step": jnp.int32(3)}
        if nnx:
            key = {"rngs": {"params": {"count": jnp.uint32(1), "key": jnp.ones(4, jnp.uint32)}}}
            state["nnx_aux"] = {"model": {"decoder": {"dropout": key}}}
    elif nnx:
        state = nested({f"{name}/value": value for name, value in arrays.items()})
    handlers = {"items": orbax.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=True)}
    handlers |= {name: orbax.JsonCheckpointHandler() for name in more}
    options = orbax.CheckpointManagerOptions(create=True, enable_async_checkpointing=False)
    with orbax.CheckpointManager(
        (folder / "checkpoints").absolute(), item_names=tuple(handlers), item_handlers=handlers, options=options
    ) as manager:
        for step in (9, 10) if full else (0,):
            items = state if step != 9 else {"step": state["step"]}
            args = orbax.args.PyTreeSave(items, ocdbt_target_data_file_size=1 << 31)
            manager.save(
                step,
                args=orbax.args.Composite(items=args, **{name: orbax.args.JsonSave(it) for name, it in more.items()}),
                custom_metadata={"scan_layers": scan} if full else {},
            )
    return folder


def read_hf(folder: Path) -> dict[str, np.ndarray]:
    """Reads all tensors of a directory with the safetensors library."""
    from safetensors.numpy import load_file

    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def abstract_of(config: Any, dtype: Any = np.float32) -> dict[str, Any]:
    """Returns the canonical nested dict that a load should return, on one device."""
    import jax

    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shapes = shapes_of(config).items()
    return nested({name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for name, shape in shapes})


def assert_same(found: Any, wanted: dict[str, np.ndarray]) -> None:
    """Checks that a nested or flat dict has the names, dtypes and bits of `wanted`."""
    found = names_of(found)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype, name
        assert np.asarray(found[name]).tobytes() == value.tobytes(), name


BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

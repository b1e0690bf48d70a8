"""The text model of Llama 4 (Meta 2025; the reference is transformers' modeling_llama4). Every n-th layer has no RoPE
and attends to the whole sequence. The other layers have RoPE and attend in chunks. Every layer or every second layer
has experts."""

import functools
import math
from collections.abc import Mapping
from typing import Any

from flax import nnx

from trainer.config.errors import shortened
from trainer.config.keys import Config
from trainer.layers.stack import MakeBlock, Stack
from trainer.models.experts import SharedExpertBlock, layouts_in_gguf
from trainer.models.family import Family, MaxText
from trainer.models.flops import forward_flops_per_token
from trainer.models.gguf import COUNT, SIZES, USED, Gguf
from trainer.models.huggingface import HuggingFace, Layout, Merged, Outer
from trainer.models.llama2 import block as llama2
from trainer.models.llama2.family import LAYOUTS as OF_LLAMA
from trainer.models.patterns import read_unrotated, repeated, rotated
from trainer.ops.routing import Score, sigmoid_of_chosen
from trainer.ops.temperature import Temperature

NAME = "Llama4MoEBlock_0"


class DenseBlock(llama2.Block):
    """Llama's block. Layers with RoPE attend in chunks and, with `use_qk_norm`, normalize queries and keys after RoPE.
    Layers without RoPE apply `temperature_tuning`."""

    def __init__(self, config: Config, rngs: nnx.Rngs, rotates: bool):
        self.rotates = rotates
        super().__init__(config, rngs)

    def make_attention(self, config: Config, rngs: nnx.Rngs, dtypes: Mapping[str, Any], **given: Any) -> Any:
        chunk, own = config.chunk_attn_window_size, dict[str, Any]()
        if self.rotates:
            norm = config.normalization_layer_epsilon if config.use_qk_norm else None
            own = {"window": chunk, "chunked": chunk > 0, "qk_norm_rotated": norm}
        else:
            grown = Temperature(config.temperature_tuning_scale, config.temperature_tuning_floor_scale, first=1)
            own = {"rope": None, "temperature": grown if config.temperature_tuning else None}
        return super().make_attention(config, rngs, dtypes, qk_norm_epsilon=None, **own, **given)


class Block(DenseBlock, SharedExpertBlock):
    """`DenseBlock` with experts in place of the MLP. The sigmoid of an expert's logit multiplies the expert's input."""

    NAME, WEIGHS_INPUTS = NAME, True

    @staticmethod
    def score(config: Config) -> Score:
        del config
        return sigmoid_of_chosen


def _pattern(config: Config) -> list[MakeBlock]:
    every, step = config.nope_layer_interval, config.interleave_moe_layer_step
    period = math.lcm(step, 1 if every == -1 else every)
    kinds = [Block if (i + 1) % step == 0 else DenseBlock for i in range(period)]
    return [functools.partial(kind, rotates=bool(it)) for kind, it in zip(kinds, rotated(every, period), strict=True)]


def stacks(config: Config) -> list[Stack]:
    """Returns stacks that repeat the pattern of layers, which differ in RoPE and experts."""
    return repeated(_pattern(config), config.base_num_decoder_layers)


_LAYER, _OURS = "model.layers.{}.feed_forward.", "decoder/layers/"


def _gated(own: str, there: str) -> dict[str, Layout]:
    names = {"wi_0": "gate_proj", "wi_1": "up_proj", "wo": "down_proj"}
    return {
        f"{_OURS}{own}/{name}/kernel": Layout(f"{_LAYER}{there}{it}.weight", inputs=1) for name, it in names.items()
    }


# Hugging Face stores each head as the adjacent pairs that RoPE rotates, so its entries are not reordered.
LAYOUTS = {
    **{name: layout._replace(rotated="") for name, layout in OF_LLAMA.items()},
    **_gated("mlp", ""),
    **_gated(f"{NAME}/shared_experts", "shared_expert."),
    f"{_OURS}{NAME}/MoeBlock_0/gate/kernel": Layout(_LAYER + "router.weight", inputs=1),
    f"{_OURS}{NAME}/MoeBlock_0/wi_0": Layout(_LAYER + "experts.gate_proj"),
    f"{_OURS}{NAME}/MoeBlock_0/wi_1": Layout(_LAYER + "experts.up_proj"),
    f"{_OURS}{NAME}/MoeBlock_0/wo": Layout(_LAYER + "experts.down_proj"),
}


def _read(said: Mapping[str, Any], refused: list[str]) -> dict[str, Any]:
    """See `HuggingFace.read`. As in transformers, the lists no_rope_layers and moe_layers override the intervals, but
    an empty no_rope_layers is ignored."""
    layers, step = said["num_hidden_layers"], said["interleave_moe_layer_step"]
    keys = read_unrotated({**said, "no_rope_layers": said.get("no_rope_layers") or None}, refused)
    if (sparse := said.get("moe_layers")) is not None:
        step = sparse[0] + 1 if sparse else layers + 1
        if sparse != list(range(step - 1, layers, step)) or not sparse:
            refused.append(f"moe_layers={shortened(str(sparse))} (known: every n-th layer)")
    kinds = _kinds(keys["nope_layer_interval"], layers, said["attention_chunk_size"])
    if (given := said.get("layer_types")) and list(given) != kinds:
        refused.append(f"layer_types={shortened(str(given))} (known: chunked_attention in the layers with RoPE)")
    tuned = bool(said["attn_temperature_tuning"])  # config.json files of April 2025 contain 4 instead of true
    return {**keys, "interleave_moe_layer_step": step, "temperature_tuning": tuned}


def _kinds(every: int, layers: int, chunk: int | None) -> list[str]:
    return ["chunked_attention" if it and chunk else "full_attention" for it in rotated(every, layers)]


def _write(config: Config) -> dict[str, Any]:
    every, layers = config.nope_layer_interval, config.base_num_decoder_layers
    step = config.interleave_moe_layer_step
    # Without these fields, transformers uses the token ids of the published vocabulary.
    tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    return {
        "no_rope_layers": rotated(every, layers),
        **({} if every == -1 else {"no_rope_layer_interval": every}),
        "moe_layers": list(range(step - 1, layers, step)),
        "layer_types": _kinds(every, layers, config.chunk_attn_window_size),
        "attn_temperature_tuning": config.temperature_tuning,
        **tokens,
    }


_DEFAULTS = {
    **{"intermediate_size": 8192, "intermediate_size_mlp": 16384, "rms_norm_eps": 1e-5, "num_key_value_heads": 8},
    **{"head_dim": 128, "num_local_experts": 16, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1},
    **{"no_rope_layer_interval": 4, "attention_chunk_size": 8192, "attn_temperature_tuning": True, "floor_scale": 8192},
    **{"attn_scale": 0.1, "use_qk_norm": True, "rope_theta": 500_000},
}
# The defaults of transformers' Llama4TextConfig. Published models differ from them in a few fields.
NESTED = {
    **{"vocab_size": 202_048, "hidden_size": 5120, "num_hidden_layers": 48, "num_attention_heads": 40},
    **{"max_position_embeddings": 131_072, "bos_token_id": 1, "eos_token_id": 2},
}
WITH_IMAGES = Outer(
    "llama4",
    texts=("llama4_text",),
    towers=("vision_model", "multi_modal_projector"),
    fields=("vision_config",),
    tokens={"image_token_index": 200_092, "boi_token_index": 200_080, "eoi_token_index": 200_081},
    tied=False,
)


def _fields(said: Mapping[str, Any]) -> dict[str, Any]:
    """See `Gguf.fields`. Returns the fields for which llama.cpp always uses the published values, and
    `use_qk_norm`, which llama.cpp enables unless the model has 128 experts."""
    fixed = {name: _DEFAULTS[name] for name in ("no_rope_layer_interval", "attention_chunk_size", "floor_scale")}
    return fixed | {"attn_scale": 0.1, "use_qk_norm": said.get("num_local_experts") != 128}


_STEP = "interleave_moe_layer_step"
_GGUF = Gguf(
    "llama4",
    when=lambda said: True,
    sizes={
        **{**SIZES, "feed_forward_length": "intermediate_size_mlp", "expert_feed_forward_length": "intermediate_size"},
        **{COUNT: "num_local_experts", USED: "num_experts_per_tok"},
        _STEP: _STEP,
    },
    needs=(_STEP,),
    fields=_fields,
    layouts=layouts_in_gguf(f"{_OURS}{NAME}/MoeBlock_0"),
)


def _maxtext_keys(config: Config) -> dict[str, Any]:
    keys = {"base_mlp_dim": config.base_mlp_dim, "inhomogeneous_layer_cycle_interval": len(_pattern(config))}
    # In MaxText, only the rope_type llama3.1 rotates adjacent pairs.
    return keys | ({"rope_type": "llama3.1", "rope_use_scale": False} if config.rope_type == "default" else {})


def _refuses(config: Config) -> list[str]:
    fixed: dict[str, Any] = {"num_experts_per_tok": 1}
    fixed |= {"rope_linear_scaling_factor": 1} if config.rope_type == "default" else {}
    if config.temperature_tuning:
        fixed |= {"temperature_tuning_scale": 0.1, "temperature_tuning_floor_scale": 8192}
    refused = [f"{key}={config[key]}: MaxText requires {value}" for key, value in fixed.items() if config[key] != value]
    refused += [] if config.chunk_attn_window_size else ["chunk_attn_window_size=0: MaxText requires chunks"]
    if config.base_num_decoder_layers % len(_pattern(config)):
        refused.append(
            f"base_num_decoder_layers={config.base_num_decoder_layers}: MaxText requires "
            "whole repetitions of the layer pattern"
        )
    return refused


FAMILY = Family(
    stacks,
    forward_flops_per_token,
    hugging_face=[
        HuggingFace(
            "llama4_text",
            "Llama4ForCausalLM",
            LAYOUTS,
            defaults=_DEFAULTS,
            merged=(Merged("experts.gate_up_proj", ("experts.gate_proj", "experts.up_proj"), axis=-1),),
            window="read",
            sizes={
                **{"num_experts": "num_local_experts", "num_experts_per_tok": "num_experts_per_tok"},
                **{"base_moe_mlp_dim": "intermediate_size", "base_mlp_dim": "intermediate_size_mlp"},
                **{"interleave_moe_layer_step": "interleave_moe_layer_step", "use_qk_norm": "use_qk_norm"},
                **{"chunk_attn_window_size": "attention_chunk_size", "temperature_tuning_scale": "attn_scale"},
                "temperature_tuning_floor_scale": "floor_scale",
            },
            fields=("no_rope_layers", "no_rope_layer_interval", "moe_layers", "attn_temperature_tuning"),
            ignored=("for_llm_compressor", "router_jitter_noise"),
            read=_read,
            write=_write,
            implies={"shared_experts": 1},
            nested=_DEFAULTS | NESTED,
            outers=(WITH_IMAGES,),
            gguf=_GGUF,
        )
    ],
    maxtext=MaxText(
        pairs=True,
        norms_heads=True,
        interleaves_experts=True,
        keys=(
            *("nope_layer_interval", "chunk_attn_window_size", "temperature_tuning", "shared_experts"),
            "interleave_moe_layer_step",
        ),
        more=_maxtext_keys,
        refuses=_refuses,
    ),
)

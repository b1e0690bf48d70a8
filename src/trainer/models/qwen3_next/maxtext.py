"""MaxText's parameter names and shapes for the blocks of Qwen3-Next and of Qwen 3.5 with experts."""

import math
from typing import Any

from trainer.config.capabilities.recurrent_keys import CHUNK
from trainer.config.family import PATTERN, RECURRENT
from trainer.config.keys import Config
from trainer.models.families import Place
from trainer.models.family import Joined, MaxText, Named
from trainer.models.patterns import REMAINDER
from trainer.models.qwen3_moe.family import maxtext_refuses as refuses_weights

_OURS, _RECURRENT = "self_attention", "linear_attention"
_MERGED = {
    "in_proj_qkvz": ("query", "key", "value", "gating"),
    "in_proj_ba": ("beta", "decay"),
    "conv1d": ("query_conv", "key_conv", "value_conv"),
}
# Maps our names of a layer's modules to MaxText's names, where the two differ.
_MODULES = {
    "pre_self_attention_layer_norm": "input_layernorm",
    "post_self_attention_layer_norm": "post_attention_layernorm",
    _RECURRENT: "attention",
    f"{_RECURRENT}/norm": "attention/norm/rms_norm",
    f"{_RECURRENT}/out": "attention/out_proj",
    **{f"{_RECURRENT}/{part}": f"attention/{name}" for name, parts in _MERGED.items() for part in parts},
    **{
        f"{_OURS}/{name}": f"attention/attention/{name}"
        for name in ("query", "key", "value", "out", "query_norm", "key_norm")
    },
    f"{_OURS}/gating": "attention/attention/query",
}


def _paths(mixer: str, parts: tuple[str, ...]) -> list[str]:
    return [f"{mixer}/{part}/kernel" for part in parts]


_JOINED = (
    Joined(_paths(_OURS, ("query", "gating")), lambda ours: ours),
    *(
        Joined(_paths(_RECURRENT, _MERGED[name]), lambda ours: (ours[0], math.prod(ours[1:])), "gdn_num_key_heads")
        for name in ("in_proj_qkvz", "in_proj_ba")
    ),
    Joined(_paths(_RECURRENT, _MERGED["conv1d"]), lambda ours: (ours[0], 1, math.prod(ours[1:]))),
    *(Joined(_paths(mixer, ("out",)), lambda ours: (math.prod(ours[:-1]), ours[-1])) for mixer in (_OURS, _RECURRENT)),
)


def _path(where: Place) -> str:
    module, _, name = where.path.rpartition("/")
    return f"{_MODULES.get(module, module)}/{name}"


def _each(where: Place) -> list[str]:
    return [f"decoder/layers_{number}/{_path(where)}" for number in where.layers]


def _names_of_kinds(name: str, where: Place) -> Named:
    """See `MaxText.names`. The recurrent layers of one repetition of the pattern are stacked on an additional axis."""
    del name
    place, length = where.layers[0] - where.first, where.layers.step
    recurrent = length if where.stack == REMAINDER else length - 1
    if place == recurrent:
        return Named(f"decoder/{where.stack}/global_layer/{_path(where)}", _each(where))
    return Named(f"decoder/{where.stack}/local_layers/{_path(where)}", _each(where), recurrent, place)


def _names_in_order(name: str, where: Place) -> Named:
    """See `MaxText.names`."""
    del name
    return Named(f"decoder/{where.stack}/layer_{where.layers[0] - where.first}/{_path(where)}", _each(where))


def _more(config: Config) -> dict[str, Any]:
    """See `MaxText.more`. `use_qk_norm` is false, because its norms would multiply by scale, not by 1 + scale."""
    return {"use_qk_norm": False, "base_mlp_dim": config.base_moe_mlp_dim}


def _refuses(config: Config) -> list[str]:
    refused = refuses_weights(config)
    if config.shared_experts != 1:
        refused.append(
            f"shared_experts={config.shared_experts}: MaxText has one shared expert, as wide as the routed ones "
            "(base_moe_mlp_dim)"
        )
    if config.mtp_num_layers:
        refused.append(
            f"mtp_num_layers={config.mtp_num_layers}: MaxText's MTP module is a whole repetition of the layer pattern, "
            "with norms that multiply by the scale alone"
        )
    for key, only in (("rope_type", "default"), ("rope_linear_scaling_factor", 1)):
        if config[key] != only:
            refused.append(f"{key}={config[key]}: only {only}")
    return refused


def _refuses_rest(config: Config) -> list[str]:
    layers, every = config.base_num_decoder_layers, config[PATTERN]
    rest = f"base_num_decoder_layers={layers}: MaxText omits layers after the last whole repetition of {every} layers"
    return [*_refuses(config), *([rest] if layers % every else [])]


_KEYS = (PATTERN, *RECURRENT, CHUNK, "partial_rotary_factor", "shared_experts")
NEXT = MaxText(norms_heads=True, names=_names_of_kinds, joined=_JOINED, keys=_KEYS, more=_more, refuses=_refuses)
# MaxText has the block qwen3_5 only with experts.
WITH_EXPERTS = MaxText(
    norms_heads=True,
    names=_names_in_order,
    joined=_JOINED,
    keys=_KEYS,
    more=lambda config: {**_more(config), "decoder_block": "qwen3_5"},
    refuses=_refuses_rest,
)
DENSE = MaxText(
    refuses=lambda config: ["decoder_block=qwen3_5: all layers of MaxText's block have experts, as in qwen3_5_moe"]
)

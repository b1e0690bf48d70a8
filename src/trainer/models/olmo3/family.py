"""OLMo 3 (Ai2 2025, arXiv:2512.13961): OLMo 2's block. Every fourth layer attends to the whole
sequence, the other layers within a window."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from trainer.config.keys import Config
from trainer.config.limits import LAYERS
from trainer.layers.stack import Stack
from trainer.models.family import Family, MaxText
from trainer.models.flops import forward_flops_per_token
from trainer.models.gguf import ATTENTION, SIZES, WINDOW, Gguf
from trainer.models.huggingface import HuggingFace
from trainer.models.olmo2.family import LAYOUTS, Block
from trainer.models.patterns import alternating, other_period

PERIOD = 4


def stacks(config: Config) -> list[Stack]:
    """Returns stacks that repeat the family's pattern of layers with and without a window."""
    return alternating(Block, config)


def _maxtext_keys(config: Config) -> dict[str, Any]:
    """See `MaxText.more`. With model_name=olmo3-7b, MaxText normalizes queries and keys over all heads."""
    named = {"model_name": "olmo3-7b", "override_model_config": True} if config.use_qk_norm else {}
    return {**named, "inhomogeneous_layer_cycle_interval": PERIOD}


def _refuses(config: Config) -> list[str]:
    layers = config.base_num_decoder_layers
    uneven = f"base_num_decoder_layers={layers}: MaxText requires a multiple of {PERIOD}"
    return [*other_period(config, PERIOD), *([uneven] if layers % PERIOD else [])]


_WINDOWS = "attention.sliding_window_pattern"  # a GGUF key: a list of booleans, true if the layer has a window
_KINDS = ("full_attention", "sliding_attention")


def _kinds(said: Mapping[str, Any]) -> dict[str, Any]:
    layers = said.get("num_hidden_layers", 0)
    given = said.get(_WINDOWS, [i % PERIOD != PERIOD - 1 for i in range(min(layers, LAYERS))])
    return {"layer_types": [_KINDS[bool(window)] for window in given[: LAYERS + 1]]}


FAMILY = Family(
    stacks,
    forward_flops_per_token,
    hugging_face=[
        HuggingFace(
            "olmo3",
            "Olmo3ForCausalLM",
            LAYOUTS,
            defaults={"rms_norm_eps": 1e-5, "rope_theta": 500_000, "sliding_window": 4096},
            qk_norm=True,
            window="alternating",
            period=PERIOD,
            local_rope="rope_theta",
            ignored=("sliding_window_pattern",),
            gguf=Gguf(
                "olmo2",
                when=lambda said: bool(said(WINDOW)),
                sizes=SIZES | {WINDOW: "sliding_window"},
                more={_WINDOWS: np.ndarray, ATTENTION: float},
                fields=_kinds,
                write=lambda data: {_WINDOWS: np.array([kind == _KINDS[1] for kind in data["layer_types"]])},
            ),
        )
    ],
    maxtext=MaxText(
        norms_heads=True,
        interleaves=False,
        keys=("sliding_window_size",),
        more=_maxtext_keys,
        refuses=_refuses,
    ),
)

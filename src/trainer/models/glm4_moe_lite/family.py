"""GLM 4.7 Flash (GLM team 2026): DeepSeek-V3's blocks, in which the norms of the latents (compressed queries,
keys and values) have a separate epsilon."""

import functools
from collections.abc import Mapping
from typing import Any

from flax import nnx

from trainer.config.capabilities.expert_keys import SIGMOID
from trainer.config.json_files import shown
from trainer.config.keys import Config
from trainer.config.limits import LAYERS
from trainer.layers.mla import PROJECTIONS
from trainer.models.deepseek import block
from trainer.models.deepseek import family as deepseek
from trainer.models.family import Family
from trainer.models.flops import forward_flops_per_token
from trainer.models.glm4_moe.family import EXPERTS
from trainer.models.huggingface import HuggingFace


class DenseBlock(block.DenseBlock):
    """DeepSeek's block, with epsilon 1e-6 in the norms of latents, as in transformers."""

    def make_attention(self, config: Config, rngs: nnx.Rngs, dtypes: Mapping[str, Any], **given: Any) -> Any:
        return super().make_attention(config, rngs, dtypes, norm_epsilon=1e-6, **given)


class Block(DenseBlock, block.Block):
    """`DenseBlock` with experts in place of the MLP."""


_KINDS, _FIRST = "mlp_layer_types", "first_k_dense_replace"


def _kinds(dense: int, layers: int) -> list[str]:
    return ["dense"] * dense + ["sparse"] * (layers - dense)


def _read(said: Mapping[str, Any], refused: list[str]) -> dict[str, Any]:
    """See `HuggingFace.read`. Without mlp_layer_types, only the first layer is dense, as in transformers."""
    layers = said["num_hidden_layers"]
    kinds = said.get(_KINDS) or _kinds(1, layers)
    dense = kinds.count("dense")
    if kinds != _kinds(dense, layers):
        refused.append(f"{_KINDS}={shown(kinds)} (known: dense layers followed by sparse layers, {layers} in total)")
    if said.get(_FIRST, dense) != dense:
        refused.append(f"{_FIRST}={said[_FIRST]}: {_KINDS} has {dense} dense layers (default without {_KINDS}: 1)")
    return {"first_num_dense_layers": dense}


def _write(config: Config) -> dict[str, Any]:
    dense = config.first_num_dense_layers
    return {_KINDS: _kinds(dense, config.base_num_decoder_layers), _FIRST: dense}


def _fields(said: Mapping[str, Any]) -> dict[str, Any]:
    dense, layers = (max(0, min(said.get(name, 0), LAYERS)) for name in (_FIRST, "num_hidden_layers"))
    return {**deepseek.fields(said), "topk_method": "noaux_tc", _KINDS: _kinds(dense, layers)}


FAMILY = Family(
    functools.partial(deepseek.stacks, dense=DenseBlock, sparse=Block),
    forward_flops_per_token,
    projections=PROJECTIONS,
    axes=deepseek.AXES,
    hugging_face=[
        HuggingFace(
            "glm4_moe_lite",
            "Glm4MoeLiteForCausalLM",
            deepseek.LAYOUTS,
            defaults={name: value for name, value in EXPERTS.items() if name != _FIRST}
            | {"num_key_value_heads": 20, "routed_scaling_factor": 1.8},
            sizes={ours: theirs for ours, theirs in deepseek.OF_LATENT.items() if theirs != _FIRST},
            only={"rope_interleave": True},
            read=_read,
            write=_write,
            fields=(_KINDS, _FIRST),
            implies=deepseek.BY_SIGMOID,
            latent=True,
            methods=("noaux_tc", "noaux_tc"),
            gguf=deepseek.GGUF._replace(
                when=lambda said: (
                    said(deepseek.SCORE) in (None, deepseek.SIGMOID_THERE) and deepseek.other_epsilon(said)
                ),
                fields=_fields,
                write=lambda data: deepseek.gguf_values({**data, "scoring_func": SIGMOID}),
                refuses=lambda data: deepseek.GGUF.refuses({**data, "scoring_func": SIGMOID}),
                note="its norms of latents have the epsilon of the other norms; GLM 4.7 Flash uses 1e-6",
            ),
        )
    ],
)

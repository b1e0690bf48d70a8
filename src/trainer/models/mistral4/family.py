"""Mistral 4 (Mistral AI 2026): DeepSeek's latent attention, and DeepSeek's experts with scores from a softmax. As in
Ministral 3, queries are multiplied by a factor that grows with the position."""

import functools
from collections.abc import Mapping
from typing import Any

from flax import nnx

from trainer.config.capabilities.expert_keys import SIGMOID
from trainer.config.keys import Config
from trainer.layers.mla import PROJECTIONS
from trainer.models.deepseek import block
from trainer.models.deepseek import family as deepseek
from trainer.models.family import Family
from trainer.models.flops import forward_flops_per_token
from trainer.models.glm4_moe_lite import family as glm4_moe_lite
from trainer.models.huggingface import HuggingFace, Layout, Merged
from trainer.models.ministral3 import family as ministral3
from trainer.ops.routing import Score, softmax_in_groups, times


class DenseBlock(glm4_moe_lite.DenseBlock):
    """DeepSeek's block with `temperature_tuning`. The norms of latents have the same epsilon as in GLM 4.7 Flash."""

    def make_attention(self, config: Config, rngs: nnx.Rngs, dtypes: Mapping[str, Any], **given: Any) -> Any:
        return super().make_attention(config, rngs, dtypes, **ministral3.grown(config), **given)


class Block(DenseBlock, block.Experts):
    """`DenseBlock` with experts in place of the MLP."""

    @staticmethod
    def score(config: Config) -> Score:
        """See `ExpertBlock.score`. Groups of experts are ranked as in DeepSeek-V3."""
        groups, kept = config.n_routing_groups, config.topk_routing_group
        if groups <= 1:
            return block.Experts.score(config)
        score = functools.partial(softmax_in_groups, normalize=config.norm_topk_prob, groups=groups, kept=kept)
        return times(score, config.routed_scaling_factor)


# Each expert tensor contains the matrices of all experts in a layer. Gate and up are merged into one tensor.
_OURS, _THERE = f"decoder/{deepseek.SPARSE}/{block.NAME}/{block.ROUTED}/", "model.layers.{}.mlp.experts."
_EXPERTS = {
    f"{_OURS}{name}": Layout(f"{_THERE}{it}", swapped=True)
    for name, it in {"wi_0": "gate_proj", "wi_1": "up_proj", "wo": "down_proj"}.items()
}
_LAYOUTS = {name: it for name, it in deepseek.LAYOUTS.items() if name != f"{_OURS}gate/bias"}
# The defaults of transformers' Mistral4Config.
_DEFAULTS = {
    **{"first_k_dense_replace": 0, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "n_shared_experts": 1},
    **{"num_key_value_heads": 32, "routed_scaling_factor": 1.0},
}
_SIZES = {
    **{"vocab_size": 131_072, "hidden_size": 4096, "intermediate_size": 12_288, "moe_intermediate_size": 2048},
    **{"num_hidden_layers": 36, "num_attention_heads": 32, "n_routed_experts": 128, "num_experts_per_tok": 4},
    **{"q_lora_rank": 1024, "kv_lora_rank": 256, "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 64},
    **{"max_position_embeddings": 1_048_576, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 11},
}
_IN_GGUF = {name: it._replace(name=f"{it.name}.weight") for name, it in _EXPERTS.items()}


def _fields(said: Mapping[str, Any]) -> dict[str, Any]:
    """See `Gguf.fields`. llama.cpp's converter does not store llama_4_scaling_beta, so the published value is used for
    files without it."""
    own = deepseek.fields(said)
    head, rope = own["qk_nope_head_dim"] + own["head_dim"], ministral3.with_beta(said, usual=0.1)
    rope["partial_rotary_factor"] = own["head_dim"] / max(head, 1)
    length = said.get(_LENGTH, original := rope.get("original_max_position_embeddings"))
    # config.json has only one of these two lengths, so a GGUF file in which they differ is refused.
    other = {} if length == original else {_LENGTH: length}
    return {**own, **other, "head_dim": head, "rope_scaling": rope, "topk_method": "softmax"}


def _gguf_values(data: Mapping[str, Any]) -> dict[str, Any]:
    rope = data["rope_scaling"]
    return {
        **deepseek.gguf_values({**data, "scoring_func": "softmax"}),
        **{ministral3.TEMPERATURE: float(rope["llama_4_scaling_beta"])},
        **{_LENGTH: rope["original_max_position_embeddings"]},
    }


_LENGTH = "attention.temperature_length"  # a key in GGUF
FAMILY = Family(
    functools.partial(deepseek.stacks, dense=DenseBlock, sparse=Block),
    forward_flops_per_token,
    projections=PROJECTIONS,
    axes=deepseek.AXES,
    hugging_face=[
        HuggingFace(
            "mistral4",
            "Mistral4ForCausalLM",
            _LAYOUTS | _EXPERTS,
            defaults=_DEFAULTS,
            merged=(Merged("mlp.experts.gate_up_proj", ("mlp.experts.gate_proj", "mlp.experts.up_proj"), axis=1),),
            sizes=deepseek.OF_LATENT,
            only={"rope_interleave": True},
            ropes=("yarn",),
            rope_sizes=ministral3.ROPE_SIZES,
            rope_ignored=("max_position_embeddings",),
            implies={"temperature_tuning": True},
            read=ministral3.read,
            latent=True,
            whole_heads_of_latents=True,
            methods=("softmax", "softmax"),
            nested=_SIZES,
            gguf=deepseek.GGUF._replace(
                name="mistral4",
                when=lambda said: said(deepseek.SCORE) in (None, deepseek.SOFTMAX_THERE),
                more={**deepseek.GGUF.more, ministral3.TEMPERATURE: float, _LENGTH: int},
                fields=_fields,
                write=_gguf_values,
                refuses=lambda data: deepseek.GGUF.refuses({**data, "scoring_func": SIGMOID}),
                layouts=_IN_GGUF,
            ),
        )
    ],
)

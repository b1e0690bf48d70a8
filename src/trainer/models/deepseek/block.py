"""DeepSeek's blocks: multi-head latent attention, and routed and shared experts."""

import functools
from collections.abc import Mapping
from typing import Any

from flax import nnx

from trainer.config.capabilities.expert_keys import scores_by_sigmoid
from trainer.config.capabilities.splash_tiles import tiles_of
from trainer.config.keys import Config
from trainer.layers.mla import LatentAttention
from trainer.models.experts import SharedExpertBlock
from trainer.models.llama2 import block as llama2
from trainer.ops.routing import Score, by_sigmoid, chosen_of_softmax, softmax_of_chosen, times, within_groups

NAME, ROUTED, SHARED = "DeepSeekMoeBlock_0", "MoeBlock_0", "shared_experts"


class DenseBlock(llama2.Block):
    """Llama's block with latent attention. RoPE rotates adjacent pairs of entries, as the published weights require."""

    def make_attention(self, config: Config, rngs: nnx.Rngs, dtypes: Mapping[str, Any], **given: Any) -> Any:
        settings: dict[str, Any] = {
            "heads": config.base_num_query_heads,
            "q_rank": config.q_lora_rank,
            "kv_rank": config.kv_lora_rank,
            "nope_dim": config.qk_nope_head_dim,
            "rope_dim": config.qk_rope_head_dim,
            "value_dim": config.v_head_dim,
            "rope": llama2.make_rope(config)._replace(interleave=True),
            "mscale": config.mscale,
            "norm_epsilon": config.normalization_layer_epsilon,
            "op": config.attention,
            "soft_cap": config.attn_logits_soft_cap,
            "tiles": tiles_of(config),
            "across": llama2.across(config),
            "dropout_rate": config.attention_dropout_rate if config.enable_dropout else 0.0,
            "rngs": rngs,
        }
        return LatentAttention(config.base_emb_dim, **{**settings, **dtypes, **given})


class Experts(SharedExpertBlock):
    """Llama's block with experts in place of the MLP: `num_experts` routed experts, in groups, and shared experts."""

    NAME = NAME

    @staticmethod
    def score(config: Config) -> Score:
        """See `ExpertBlock.score`. All weights are multiplied by `routed_scaling_factor`."""
        groups, kept = max(config.n_routing_groups, 1), max(config.topk_routing_group, 1)
        score: Score = softmax_of_chosen if config.norm_topk_prob else chosen_of_softmax
        if scores_by_sigmoid(config):
            score = functools.partial(by_sigmoid, normalize=config.norm_topk_prob, groups=groups, kept=kept)
        elif groups > 1:
            score = functools.partial(within_groups, groups=groups, kept=kept)
        return times(score, config.routed_scaling_factor)


class Block(DenseBlock, Experts):
    """A block with latent attention and experts."""

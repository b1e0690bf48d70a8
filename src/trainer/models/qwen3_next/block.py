"""The blocks of Qwen3-Next (Qwen team 2025; the reference is transformers' modeling_qwen3_next). Every
`inhomogeneous_layer_cycle_interval`-th layer has gated attention, and the others have Gated DeltaNet."""

from collections.abc import Mapping
from typing import Any, ClassVar

from flax import nnx

from trainer.config.capabilities.expert_keys import has_experts
from trainer.config.capabilities.recurrent_keys import attention_blocks
from trainer.config.keys import Config
from trainer.layers.delta_net import GatedDeltaNet
from trainer.layers.stack import MakeBlock, Stack
from trainer.models.experts import SharedExpertBlock
from trainer.models.flops import forward_flops_per_token
from trainer.models.gemma.family import OFFSET, Norm
from trainer.models.llama2 import block as llama2
from trainer.models.patterns import repeated
from trainer.ops.routing import Score, chosen_of_softmax, softmax_of_chosen


class AttentionBlock(llama2.Block):
    """Llama's block with three changes: norms multiply by 1 + scale, each head's queries and keys are normalized too,
    and a gate multiplies each head's output."""

    @staticmethod
    def make_norm(width: int, epsilon: float, dtypes: Mapping[str, Any]) -> Any:
        return Norm(width, epsilon=epsilon, **dtypes)

    def make_attention(self, config: Config, rngs: nnx.Rngs, dtypes: Mapping[str, Any], **given: Any) -> Any:
        return super().make_attention(config, rngs, dtypes, qk_norm_offset=OFFSET, gated=True, **given)


class RecurrentBlock(AttentionBlock):
    """`AttentionBlock` with Gated DeltaNet in place of attention."""

    ATTENTION: ClassVar[str] = "linear_attention"
    logit_factors: ClassVar[None] = None  # it has no attention logits

    def make_attention(self, config: Config, rngs: nnx.Rngs, dtypes: Mapping[str, Any], **given: Any) -> Any:
        return GatedDeltaNet(
            config.base_emb_dim,
            key_heads=config.gdn_num_key_heads,
            value_heads=config.gdn_num_value_heads,
            key_dim=config.gdn_key_head_dim,
            value_dim=config.gdn_value_head_dim,
            conv=config.gdn_conv_kernel_dim,
            chunk=config.gdn_chunk_size,
            epsilon=config.normalization_layer_epsilon,
            rngs=rngs,
            **dtypes,
        )


class Experts(SharedExpertBlock):
    """A mixin that replaces the MLP with routed experts and a gated shared expert."""

    NAME, GATED = "mlp", True

    @staticmethod
    def score(config: Config) -> Score:
        return softmax_of_chosen if config.norm_topk_prob else chosen_of_softmax


class SparseAttentionBlock(AttentionBlock, Experts):
    """`AttentionBlock` with experts."""


class SparseRecurrentBlock(RecurrentBlock, Experts):
    """`RecurrentBlock` with experts."""


def _stacks(config: Config, recurrent: MakeBlock, attention: MakeBlock) -> list[Stack]:
    every = config.inhomogeneous_layer_cycle_interval
    return repeated([*[recurrent] * (every - 1), attention], config.base_num_decoder_layers)


def stacks(config: Config) -> list[Stack]:
    """Returns the stacks of a model without experts."""
    return _stacks(config, RecurrentBlock, AttentionBlock)


def sparse_stacks(config: Config) -> list[Stack]:
    """Returns the stacks of a model with experts."""
    return _stacks(config, SparseRecurrentBlock, SparseAttentionBlock)


def forward_flops(config: Config, keys: float | None = None) -> float:
    """Returns `models.flops.forward_flops_per_token` plus the FLOPs of gates and of recurrent layers. A recurrent
    layer counts the FLOPs of its matrices and convolutions, plus eight FLOPs for each element of its recurrent state,
    as in MaxText."""
    blocks, gated = config.base_num_decoder_layers + config.mtp_num_layers, attention_blocks(config)
    width, heads = config.base_emb_dim, config.gdn_num_value_heads
    of_keys = 2 * config.gdn_num_key_heads * config.gdn_key_head_dim
    of_values = heads * config.gdn_value_head_dim
    kernels = width * (of_keys + 3 * of_values + 2 * heads) + config.gdn_conv_kernel_dim * (of_keys + of_values)
    gates = gated * width * config.base_num_query_heads * config.head_dim + (has_experts(config) * blocks * width)
    recurrent = (blocks - gated) * (2.0 * kernels + 8 * config.gdn_key_head_dim * of_values)
    return forward_flops_per_token(config, keys) + 2 * gates + recurrent

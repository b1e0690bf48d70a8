"""Qwen3 with experts (Qwen team 2025, arXiv:2505.09388): Qwen3's block with a mixture of experts."""

from trainer.config.keys import Config
from trainer.layers.stack import Stack
from trainer.models.experts import ExpertBlock, layouts, stack_of
from trainer.models.family import Family, MaxText
from trainer.models.flops import forward_flops_per_token
from trainer.models.gguf import COUNT, SIZES, USED, Gguf
from trainer.models.huggingface import EXPERT, HuggingFace
from trainer.models.llama2.block import Block as DenseBlock
from trainer.models.qwen3.family import NORMS
from trainer.ops.routing import Score, chosen_of_softmax, softmax_of_chosen

NAME = "moe_block"


class Block(ExpertBlock):
    """A block with experts. The weights of a token's chosen experts are their probabilities, a softmax over all
    experts. `norm_topk_prob` divides these weights by their sum, which yields the softmax over the chosen experts."""

    NAME = NAME

    @staticmethod
    def score(config: Config) -> Score:
        return softmax_of_chosen if config.norm_topk_prob else chosen_of_softmax


def stacks(config: Config) -> list[Stack]:
    """Returns one stack."""
    return [stack_of(config, "layers", DenseBlock, Block, config.base_num_decoder_layers)]


def maxtext_refuses(config: Config) -> list[str]:
    """See `MaxText.refuses`."""
    weights = "norm_topk_prob=False: MaxText always weights experts by the softmax over a token's chosen experts"
    return [] if config.norm_topk_prob else [weights]


_EXPERT = f"mlp.experts.{EXPERT}."
FAMILY = Family(
    stacks,
    forward_flops_per_token,
    hugging_face=[
        HuggingFace(
            "qwen3_moe",
            "Qwen3MoeForCausalLM",
            layouts(
                NAME,
                "mlp.gate.weight",
                f"{_EXPERT}gate_proj.weight",
                f"{_EXPERT}up_proj.weight",
                f"{_EXPERT}down_proj.weight",
            )
            | NORMS,
            defaults={
                "num_key_value_heads": 4,
                "num_experts": 128,
                "num_experts_per_tok": 8,
                "moe_intermediate_size": 768,
                "norm_topk_prob": False,
                "decoder_sparse_step": 1,
            },
            qk_norm=True,
            sizes={
                "num_experts": "num_experts",
                "num_experts_per_tok": "num_experts_per_tok",
                "base_moe_mlp_dim": "moe_intermediate_size",
                "norm_topk_prob": "norm_topk_prob",
                "base_mlp_dim": "intermediate_size",
                "interleave_moe_layer_step": "decoder_sparse_step",
            },
            only={"mlp_only_layers": [], "use_sliding_window": False},
            gguf=Gguf(
                "qwen3moe",
                when=lambda said: bool(said(COUNT)),
                sizes={
                    **SIZES,
                    COUNT: "num_experts",
                    USED: "num_experts_per_tok",
                    "expert_feed_forward_length": "moe_intermediate_size",
                },
                fields=lambda said: {"decoder_sparse_step": 1, "norm_topk_prob": True},
            ),
            off=("qkv_bias", "shared_expert_intermediate_size"),  # Qwen3-Coder sets these fields to false and 0
            # use_sliding_window is always false, so the fields of windows are ignored.
            ignored=("sliding_window", "max_window_layers", "use_qk_norm"),
        )
    ],
    maxtext=MaxText(norms_heads=True, refuses=maxtext_refuses),
)

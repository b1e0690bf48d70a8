"""Mixtral (Jiang et al. 2024, arXiv:2401.04088): Mistral's block with a mixture of experts."""

from trainer.config.keys import Config
from trainer.layers.stack import Stack
from trainer.models.experts import ExpertBlock, layouts, stack_of
from trainer.models.family import Family
from trainer.models.flops import forward_flops_per_token
from trainer.models.gguf import COUNT, SIZES, USED, Gguf
from trainer.models.huggingface import EXPERT, HuggingFace
from trainer.models.llama2.block import Block as DenseBlock
from trainer.models.llama2.family import MAXTEXT
from trainer.ops.routing import Score, softmax_of_chosen

NAME = "MoeBlock_0"


class Block(ExpertBlock):
    """A block with experts. The weights of a token's chosen experts are the softmax of their router logits."""

    NAME = NAME

    @staticmethod
    def score(config: Config) -> Score:
        del config
        return softmax_of_chosen


def stacks(config: Config) -> list[Stack]:
    """Returns one stack."""
    return [stack_of(config, "layers", DenseBlock, Block, config.base_num_decoder_layers)]


_EXPERT = f"block_sparse_moe.experts.{EXPERT}."
FAMILY = Family(
    stacks,
    forward_flops_per_token,
    hugging_face=[
        HuggingFace(
            "mixtral",
            "MixtralForCausalLM",
            layouts(
                NAME,
                "block_sparse_moe.gate.weight",
                f"{_EXPERT}w1.weight",
                f"{_EXPERT}w3.weight",
                f"{_EXPERT}w2.weight",
            ),
            defaults={
                "num_key_value_heads": 8,
                "rms_norm_eps": 1e-5,
                "rope_theta": 1_000_000,
                "num_local_experts": 8,
                "num_experts_per_tok": 2,
            },
            window="given",
            sizes={
                "num_experts": "num_local_experts",
                "num_experts_per_tok": "num_experts_per_tok",
                "base_moe_mlp_dim": "intermediate_size",
            },
            only={"router_jitter_noise": 0},
            modules={"mlp": "block_sparse_moe"},
            gguf=Gguf(
                "llama",
                when=lambda said: bool(said(COUNT)),
                pairs=True,
                sizes=SIZES | {COUNT: "num_local_experts", USED: "num_experts_per_tok"},
                fields=lambda said: {"sliding_window": None},
            ),
        )
    ],
    maxtext=MAXTEXT,
)

"""Granite 3 with experts (IBM 2024): Granite 3's block with a mixture of experts, which are weighted as in
Mixtral."""

from trainer.config.keys import Config
from trainer.layers.stack import Stack
from trainer.models.experts import layouts_in_gguf, stack_of
from trainer.models.family import Family
from trainer.models.flops import forward_flops_per_token
from trainer.models.gguf import COUNT, SIZES, USED
from trainer.models.granite.family import DEFAULTS, FACTORS, GGUF, POWERS
from trainer.models.huggingface import HuggingFace, Layout, Merged
from trainer.models.llama2.block import Block as DenseBlock
from trainer.models.llama2.family import LAYOUTS
from trainer.models.mixtral import family as mixtral

NAME = "moe_block"


class Block(mixtral.Block):
    """A block with experts. The weights of a token's chosen experts are the softmax of their router logits."""

    NAME = NAME


def stacks(config: Config) -> list[Stack]:
    """Returns one stack."""
    return [stack_of(config, "layers", DenseBlock, Block, config.base_num_decoder_layers)]


# Each expert tensor contains the matrices of all experts in a layer. Gate and up are merged into one tensor.
_OURS, _THERE = f"decoder/layers/{NAME}", "model.layers.{}.block_sparse_moe."
_EXPERTS = {
    f"{_OURS}/gate/kernel": Layout(_THERE + "router.layer.weight", inputs=1),
    f"{_OURS}/wi_0": Layout(_THERE + "gate_proj.weight", swapped=True),
    f"{_OURS}/wi_1": Layout(_THERE + "up_proj.weight", swapped=True),
    f"{_OURS}/wo": Layout(_THERE + "output_linear.weight", swapped=True),
}
_GATE_UP = Merged("block_sparse_moe.input_linear", ("block_sparse_moe.gate_proj", "block_sparse_moe.up_proj"), axis=1)
SHARED = "expert_shared_feed_forward_length"  # a key in GGUF
FAMILY = Family(
    stacks,
    forward_flops_per_token,
    hugging_face=[
        HuggingFace(
            "granitemoe",
            "GraniteMoeForCausalLM",
            LAYOUTS | _EXPERTS,
            defaults={**DEFAULTS, "num_local_experts": 8, "num_experts_per_tok": 2},
            merged=(_GATE_UP,),
            sizes={
                **FACTORS,
                "num_experts": "num_local_experts",
                "num_experts_per_tok": "num_experts_per_tok",
                "base_moe_mlp_dim": "intermediate_size",
            },
            powers=POWERS,
            gguf=GGUF._replace(
                name="granitemoe",
                when=lambda said: not said(SHARED),
                sizes={**SIZES, COUNT: "num_local_experts", USED: "num_experts_per_tok"},
                layouts=layouts_in_gguf(_OURS),
            ),
        )
    ],
)

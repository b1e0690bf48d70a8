"""Qwen 3.5 and 3.6 with experts (Qwen team 2026; the reference is transformers' modeling_qwen3_5_moe):
Qwen3-Next's blocks with experts. Published models are multimodal, but only their text models are supported."""

from trainer.layers.delta_net import PROJECTIONS
from trainer.models.family import Family
from trainer.models.gemma.family import Norm
from trainer.models.huggingface import HuggingFace
from trainer.models.qwen3_5.family import IGNORED, MERGED_HERE, MODULE, NESTED, OFF, ONLY, ROPE_IGNORED, with_images
from trainer.models.qwen3_next import family as qwen3_next
from trainer.models.qwen3_next.block import forward_flops, sparse_stacks
from trainer.models.qwen3_next.maxtext import WITH_EXPERTS

_DEFAULTS = {**qwen3_next.DEFAULTS, **qwen3_next.DEFAULTS_OF_EXPERTS, "num_experts": 256, "num_experts_per_tok": 8}
FAMILY = Family(
    sparse_stacks,
    forward_flops,
    projections=PROJECTIONS,
    norm=Norm,
    hugging_face=[
        HuggingFace(
            "qwen3_5_moe_text",
            "Qwen3_5MoeForCausalLM",
            qwen3_next.OF_EXPERTS | qwen3_next.MIXERS,
            defaults=_DEFAULTS,
            merged=MERGED_HERE,
            qk_norm=True,
            window="read",
            partial=True,
            rope_ignored=ROPE_IGNORED,
            sizes={**qwen3_next.SIZES, **qwen3_next.SIZES_OF_EXPERTS},
            only=ONLY,
            ignored=(*IGNORED, "intermediate_size", "norm_topk_prob", "decoder_sparse_step"),
            off=OFF,
            aliases=("qwen3_5_moe",),
            fields=qwen3_next.FIELDS_OF_EXPERTS,
            read=qwen3_next.read_sparse,
            write=qwen3_next.write_sparse,
            implies={"norm_topk_prob": True},
            nested=NESTED | {"hidden_size": 2048, "num_hidden_layers": 40, "num_key_value_heads": 2},
            mtp=MODULE,
            outers=(with_images("qwen3_5_moe"),),
        )
    ],
    maxtext=WITH_EXPERTS,
)

"""The dense models of Qwen 3.5 and 3.6 (Qwen team 2026; the reference is transformers' modeling_qwen3_5): Qwen3-Next's
blocks with an MLP. Published models are multimodal, but only their text models are supported."""

from trainer.layers.delta_net import PROJECTIONS
from trainer.models.family import Family
from trainer.models.gemma.family import Norm
from trainer.models.huggingface import HuggingFace, Merged, Outer
from trainer.models.llama2.family import LAYOUTS
from trainer.models.qwen3_next.block import forward_flops, stacks
from trainer.models.qwen3_next.family import DEFAULTS, FIELDS, MERGED, MIXERS, SIZES, read, write
from trainer.models.qwen3_next.family import MODULE as OF_NEXT
from trainer.models.qwen3_next.maxtext import DENSE

MERGED_HERE = (*MERGED, Merged("linear_attn.in_proj_qkv", [f"linear_attn.in_proj_{name}" for name in "qkv"]))
# Fields that transformers does not read, or reads only for images.
IGNORED = ("mamba_ssm_dtype",)
OFF = ("mtp_use_dedicated_embeddings",)
ROPE_IGNORED = ("mrope_section", "mrope_interleaved")
ONLY = {"attn_output_gate": True, "mlp_only_layers": []}
MODULE = OF_NEXT._replace(field="mtp_num_hidden_layers")
# The defaults of transformers' Qwen3_5TextConfig. Published models differ from them in a few fields.
NESTED = {
    **{"vocab_size": 248_320, "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 32},
    **{"num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 32_768},
}


def with_images(model_type: str) -> Outer:
    """Returns the declaration of the multimodal models. Their `model_type` is also allowed in text_config, where some
    programs write it."""
    return Outer(
        model_type,
        texts=(f"{model_type}_text", model_type),
        towers=("visual",),
        fields=("vision_config", "language_model_only"),
        tokens={
            **{"image_token_id": 248_056, "video_token_id": 248_057},
            **{"vision_start_token_id": 248_053, "vision_end_token_id": 248_054},
        },
        tied=False,
    )


FAMILY = Family(
    stacks,
    forward_flops,
    projections=PROJECTIONS,
    norm=Norm,
    hugging_face=[
        HuggingFace(
            "qwen3_5_text",
            "Qwen3_5ForCausalLM",
            LAYOUTS | MIXERS,
            defaults={**DEFAULTS, "num_key_value_heads": 4},
            merged=MERGED_HERE,
            qk_norm=True,
            window="read",
            partial=True,
            rope_ignored=ROPE_IGNORED,
            sizes=SIZES,
            only=ONLY,
            ignored=IGNORED,
            off=OFF,
            aliases=("qwen3_5",),
            fields=FIELDS,
            read=read,
            write=write,
            nested=NESTED,
            mtp=MODULE,
            outers=(with_images("qwen3_5"),),
        )
    ],
    maxtext=DENSE,
)

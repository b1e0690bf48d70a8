"""Mistral (Jiang et al. 2023, arXiv:2310.06825): Llama's block; the first version has a window of 4096 tokens."""

from trainer.models.family import Family
from trainer.models.flops import forward_flops_per_token
from trainer.models.gguf import Gguf
from trainer.models.huggingface import HuggingFace, Outer
from trainer.models.llama2.family import LAYOUTS, MAXTEXT, stacks

# The defaults of transformers' MistralConfig.
NESTED = {
    **{"vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32},
    **{"num_attention_heads": 32, "max_position_embeddings": 131_072, "bos_token_id": 1, "eos_token_id": 2},
}
WITH_IMAGES = Outer(  # for Mistral Small 3.1 and 3.2, Ministral 3 and Mistral 4
    "mistral3",
    texts=("mistral", "ministral3", "mistral4"),
    towers=("vision_tower", "multi_modal_projector"),
    fields=(
        *("vision_config", "vision_feature_layer", "spatial_merge_size", "projector_hidden_act"),
        "multimodal_projector_bias",
    ),
    tokens={"image_token_index": 10},
    tied=True,
)

FAMILY = Family(
    stacks,
    forward_flops_per_token,
    hugging_face=[
        HuggingFace(
            "mistral",
            "MistralForCausalLM",
            LAYOUTS,
            defaults={"sliding_window": 4096, "num_key_value_heads": 8},
            window="given",
            nested=NESTED,
            outers=(WITH_IMAGES,),
            gguf=Gguf("llama", pairs=True),
        )
    ],
    maxtext=MAXTEXT,
)

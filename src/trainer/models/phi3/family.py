"""Phi 3 and Phi 4 (Abdin et al. 2024, arXiv:2404.14219, arXiv:2412.08905; Phi-4-mini: arXiv:2503.01743): Llama's block.
In config.json the wavelengths of long texts have factors of their own (LongRoPE), RoPE may rotate a part of each head,
and tensors merge queries, keys and values, and gate and up."""

from trainer.models.family import Family
from trainer.models.flops import forward_flops_per_token
from trainer.models.huggingface import HuggingFace, Merged
from trainer.models.llama2.family import LAYOUTS, stacks

GATE_UP = Merged("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj"))
FAMILY = Family(
    stacks,
    forward_flops_per_token,
    hugging_face=[
        HuggingFace(
            "phi3",
            "Phi3ForCausalLM",
            LAYOUTS,
            defaults={"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
            merged=(
                Merged("self_attn.qkv_proj", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
                GATE_UP,
            ),
            window="given",
            whole_heads=True,
            ropes=("default", "longrope", "su"),
            partial=True,
            off=("lm_head_bias",),  # Phi-4-mini
            ignored=("full_attn_mod", "interpolate_factor"),  # Phi-4-mini
        )
    ],
)

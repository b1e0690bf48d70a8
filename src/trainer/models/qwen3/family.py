"""The dense models of Qwen3 (Qwen team 2025, arXiv:2505.09388): Llama's block with norms of queries and keys
(`use_qk_norm`)."""

from trainer.models.family import Family, MaxText
from trainer.models.flops import forward_flops_per_token
from trainer.models.gguf import Gguf
from trainer.models.huggingface import HuggingFace, Layout
from trainer.models.llama2.family import LAYOUTS, stacks

_ATTENTION = "model.layers.{}.self_attn."
NORMS = {
    "decoder/layers/self_attention/query_norm/scale": Layout(_ATTENTION + "q_norm.weight", rotated="head_dim"),
    "decoder/layers/self_attention/key_norm/scale": Layout(_ATTENTION + "k_norm.weight", rotated="head_dim"),
}
FAMILY = Family(
    stacks,
    forward_flops_per_token,
    hugging_face=[
        HuggingFace(
            "qwen3",
            "Qwen3ForCausalLM",
            LAYOUTS | NORMS,
            defaults={"head_dim": 128, "num_key_value_heads": 32, "sliding_window": 4096},
            qk_norm=True,
            window="switched",
            gguf=Gguf("qwen3"),
        )
    ],
    maxtext=MaxText(norms_heads=True),
)

"""The Llama family (Touvron et al. 2023, arXiv:2302.13971 and arXiv:2307.09288)."""

import dataclasses

from trainer.config.keys import Config
from trainer.layers.stack import Stack
from trainer.models.family import Family, MaxText
from trainer.models.flops import forward_flops_per_token
from trainer.models.gguf import Gguf
from trainer.models.huggingface import HuggingFace, Layout
from trainer.models.llama2.block import Block

# The parameters in the order of the forward pass, with their layouts in Hugging Face checkpoints.
_LAYER = "model.layers.{}."
LAYOUTS = {
    "token_embedder/embedding": Layout("model.embed_tokens.weight"),
    "decoder/layers/pre_self_attention_layer_norm/scale": Layout(_LAYER + "input_layernorm.weight"),
    "decoder/layers/self_attention/query/kernel": Layout(
        _LAYER + "self_attn.q_proj.weight", inputs=1, rotated="head_dim"
    ),
    "decoder/layers/self_attention/key/kernel": Layout(
        _LAYER + "self_attn.k_proj.weight", inputs=1, rotated="head_dim"
    ),
    "decoder/layers/self_attention/value/kernel": Layout(_LAYER + "self_attn.v_proj.weight", inputs=1),
    "decoder/layers/self_attention/out/kernel": Layout(_LAYER + "self_attn.o_proj.weight", inputs=2),
    "decoder/layers/post_self_attention_layer_norm/scale": Layout(_LAYER + "post_attention_layernorm.weight"),
    "decoder/layers/mlp/wi_0/kernel": Layout(_LAYER + "mlp.gate_proj.weight", inputs=1),
    "decoder/layers/mlp/wi_1/kernel": Layout(_LAYER + "mlp.up_proj.weight", inputs=1),
    "decoder/layers/mlp/wo/kernel": Layout(_LAYER + "mlp.down_proj.weight", inputs=1),
    "decoder/decoder_norm/scale": Layout("model.norm.weight"),
    "decoder/logits_dense/kernel": Layout("lm_head.weight", inputs=1),
}
QUERIES = "/self_attention/query/kernel"
MAXTEXT = MaxText(scaled_queries=QUERIES)


def stacks(config: Config) -> list[Stack]:
    """Returns one stack of equal blocks."""
    return [Stack("layers", (Block,), config.base_num_decoder_layers)]


FAMILY = Family(
    stacks,
    forward_flops_per_token,
    hugging_face=[
        HuggingFace(
            "llama",
            "LlamaForCausalLM",
            LAYOUTS,
            defaults={},
            whole_heads=True,
            off=("rope_interleaved",),  # a field of SmolLM, which was trained with nanotron
            ignored=("is_llama_config", "max_sequence_length", "activation"),  # of SmolLM, Llama 1, Falcon3
            gguf=Gguf("llama", pairs=True),
        )
    ],
    maxtext=dataclasses.replace(MAXTEXT, caps_scores=True),
)

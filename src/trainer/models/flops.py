"""How large a model is and how much it computes: closed forms over the configuration, without JAX.

Model FLOPs as MaxText reports them, after PaLM (Chowdhery et al. 2022, arXiv:2204.02311, appendix B):
- a multiplication and an addition are two operations;
- matrix products with parameters count, the output head among them; the embedding lookup, norms, rotary positions,
  softmax, activations and the optimizer do not;
- attention scores and their products with the values count half of the square, because of the causal mask; that packed
  documents do not see each other is not deducted;
- the backward pass is twice the forward pass, also where parameters are frozen; what rematerialization computes again
  is not added.
"""

from typing import Any


def parameter_count(config: Any) -> int:
    """Parameters of the model: embedding table, blocks, norms and, where it is not the embedding table, the head."""
    width = config.base_emb_dim
    norms = (2 * config.base_num_decoder_layers + 1) * width
    untied_table = 0 if config.logits_via_embedding else config.vocab_size * width
    return matmul_parameters(config) + norms + untied_table


def matmul_parameters(config: Any) -> int:
    """Parameters that every token is multiplied with: the kernels of all blocks and the head, tied or not."""
    width = config.base_emb_dim
    # Queries and the output projection have all heads, keys and values the key-value heads.
    attention = 2 * width * config.head_dim * (config.base_num_query_heads + config.base_num_kv_heads)
    mlp = (len(config.mlp_activations) + 1) * width * config.base_mlp_dim
    return config.base_num_decoder_layers * (attention + mlp) + width * config.vocab_size


def forward_flops_per_token(config: Any) -> float:
    """FLOPs of the forward pass for one token of a row of `config.max_target_length`, by the convention above."""
    heads_width = config.base_num_query_heads * config.head_dim
    # 4 T for the scores of one token and the sum of the values, halved.
    attention = 2.0 * config.base_num_decoder_layers * heads_width * config.max_target_length
    return 2 * matmul_parameters(config) + attention


def flops_per_token(config: Any) -> float:
    """FLOPs of one training step for one token: three times those of the forward pass."""
    return 3 * forward_flops_per_token(config)

"""FLOPs of a model: closed forms over the configuration, without JAX.

Model FLOPs as MaxText reports them, after PaLM (Chowdhery et al. 2022, arXiv:2204.02311, appendix B):
- a multiplication and an addition are two operations;
- matrix products with parameters count, including the output head; the embedding lookup, norms, RoPE, softmax,
  activations and the optimizer do not;
- attention scores and their products with the values count where the mask lets a query see a key, the diagonal of the
  square as half: T / 2 keys for a query of a causal row of T tokens (the half of the square), w - w^2 / (2 T) under a
  sliding window of w <= T tokens; scores between packed documents are counted, although the mask removes them;
- of a mixture of experts the router and the experts of one token count, however the products are computed;
- a module of multi-token prediction counts for every token, also for those at the end of a document that it skips;
- the backward pass is twice the forward pass, also where parameters are frozen; what rematerialization computes again
  is not added.
"""

from typing import Any

from trainer.config.expert_keys import has_experts


def _blocks(config: Any) -> int:
    return config.base_num_decoder_layers + config.mtp_num_layers


def _expert(config: Any) -> int:
    return (len(config.mlp_activations) + 1) * config.base_emb_dim * config.base_moe_mlp_dim


def _feed_forward(config: Any) -> int:
    """Parameters of a block's feed-forward layer that one token is multiplied with."""
    if not has_experts(config):
        return (len(config.mlp_activations) + 1) * config.base_emb_dim * config.base_mlp_dim
    return config.base_emb_dim * config.num_experts + config.num_experts_per_tok * _expert(config)


def matmul_parameters(config: Any) -> int:
    """Parameters in matrix products with a token, counted once per product: the kernels of all blocks, of experts those
    of one token's, and the head, tied or not; with multi-token prediction the projection of each module, and the head
    again for each."""
    width, modules = config.base_emb_dim, config.mtp_num_layers
    # Queries and the output projection have all heads, keys and values the key-value heads.
    attention = 2 * width * config.head_dim * (config.base_num_query_heads + config.base_num_kv_heads)
    outside = (1 + modules) * width * config.vocab_size + modules * 2 * width * width
    return _blocks(config) * (attention + _feed_forward(config)) + outside


def visible_keys(config: Any) -> float:
    """Keys that a query sees on average over a row of `config.max_target_length` tokens, by the convention above."""
    length = config.max_target_length
    window = min(config.sliding_window_size, length) if config.attention_type == "local_sliding" else length
    return window - window**2 / (2 * length)


def forward_flops_per_token(config: Any, keys: float | None = None) -> float:
    """FLOPs of the forward pass for one token of a row of `config.max_target_length`.

    `keys`: for how many keys a query's scores are computed on average. None takes `visible_keys`, the convention of
    model FLOPs; pass more for an op that also computes masked scores (dot_product: the whole row).
    """
    heads_width = config.base_num_query_heads * config.head_dim
    # For each key one score and one term of the sum of values.
    attention = 4.0 * _blocks(config) * heads_width * (visible_keys(config) if keys is None else keys)
    return 2 * matmul_parameters(config) + attention


def flops_per_token(config: Any, keys: float | None = None) -> float:
    """FLOPs of one training step for one token: three times those of `forward_flops_per_token`."""
    return 3 * forward_flops_per_token(config, keys)

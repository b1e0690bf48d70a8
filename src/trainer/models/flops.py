"""FLOPs of a model, computed from its configuration without JAX.

The functions count model FLOPs as MaxText does, after PaLM (Chowdhery et al. 2022, arXiv:2204.02311, appendix B):
- a multiplication and an addition are two operations;
- matrix products with parameters count, including the output head; the embedding lookup, norms, RoPE, softmax,
  activations and the optimizer do not;
- attention scores and their products with the values count if the causal, window or chunk mask lets the query see the
  key; the diagonal counts half. Thus the mean number of keys that a query sees is T / 2 in a row of T tokens.
  With a sliding window of w <= T tokens it is w - w^2 / (2 T), and with chunks of c tokens, where c divides T, it is
  c / 2. Scores between different documents in a packed row count, although attention masks them;
- in a mixture of experts, the router and the experts chosen for a token count, however the products are computed;
- a multi-token prediction module counts for every token, even for tokens that it skips at the end of a document;
- the backward pass counts as twice the forward pass, even where parameters are frozen; recomputation for
  rematerialization does not count.
"""

from trainer.config.capabilities.expert_keys import dense_layers, has_experts, some_experts
from trainer.config.capabilities.latent_keys import is_latent
from trainer.config.capabilities.recurrent_keys import attention_blocks
from trainer.config.capabilities.windows import in_chunks, windows
from trainer.config.family import reads
from trainer.config.keys import Config


def _blocks(config: Config) -> int:
    return config.base_num_decoder_layers + config.mtp_num_layers


def _sparse_blocks(config: Config) -> int:
    """Returns the number of blocks with experts, including blocks of multi-token prediction modules."""
    return _blocks(config) - _dense_blocks(config)


def _dense_blocks(config: Config) -> int:
    if not has_experts(config):
        return _blocks(config)
    return dense_layers(config) if some_experts(config) else 0


def _expert(config: Config) -> int:
    return _gated(config, config.base_moe_mlp_dim)


def _gated(config: Config, hidden: int) -> int:
    return (len(config.mlp_activations) + 1) * config.base_emb_dim * hidden


def _feed_forward(config: Config) -> int:
    """Returns the number of feed-forward parameters, over all blocks, that multiply one token."""
    dense = _dense_blocks(config) * _gated(config, config.base_mlp_dim)
    if not has_experts(config):
        return dense
    shared = config.shared_experts if reads(config, "shared_experts") else 0
    sparse = config.base_emb_dim * config.num_experts + (config.num_experts_per_tok + shared) * _expert(config)
    return dense + _sparse_blocks(config) * sparse


def _attention(config: Config) -> int:
    """Returns the number of attention parameters in a block's matrix products."""
    width, heads = config.base_emb_dim, config.base_num_query_heads
    if not is_latent(config):
        # Queries and the output projection have all heads; keys and values have only the key-value heads.
        return 2 * width * config.head_dim * (heads + config.base_num_kv_heads)
    query_dim, rank = config.qk_nope_head_dim + config.qk_rope_head_dim, config.kv_lora_rank
    queries = heads * query_dim * (config.q_lora_rank or width) + width * config.q_lora_rank
    latents = width * (rank + config.qk_rope_head_dim)
    return (
        queries + latents + heads * (rank * (config.qk_nope_head_dim + config.v_head_dim) + config.v_head_dim * width)
    )


def matmul_parameters(config: Config) -> int:
    """Returns the number of parameters that multiply one token in matrix products, counted once per product.

    These are the kernels of all blocks (only the experts chosen for the token) and the output head, tied or not. The
    recurrent layers that replace attention in some families are excluded. Each multi-token prediction module adds its
    block, its projection and the output head once more.
    """
    width, modules = config.base_emb_dim, config.mtp_num_layers
    outside = (1 + modules) * width * config.vocab_size + modules * 2 * width * width
    return attention_blocks(config) * _attention(config) + _feed_forward(config) + outside


def visible_keys(config: Config) -> float:
    """Returns the mean number of keys that a query sees, counted as this module's docstring defines. The mean is over a
    row of `config.max_target_length` tokens and over the blocks."""
    length, layers = config.max_target_length, config.base_num_decoder_layers
    pattern = windows(config)
    of_layers = [pattern[i % len(pattern)] for i in range(layers)]
    reaches = [min(window or length, length) for window in of_layers + of_layers[-1:] * config.mtp_num_layers]
    if in_chunks(config):
        seen = [reach * (length - length % reach) + (length % reach) ** 2 for reach in reaches]
        return sum(seen) / (2 * length * len(reaches))
    return sum(reach - reach**2 / (2 * length) for reach in reaches) / len(reaches)


def forward_flops_per_token(config: Config, keys: float | None = None) -> float:
    """Returns the FLOPs of the forward pass for one token in a row of `config.max_target_length` tokens.

    `keys`: the mean number of keys for which a query's scores are computed. None: the result of `visible_keys`; the
    return value then counts model FLOPs. To count the FLOPs of an attention kernel that also computes masked scores,
    pass a larger number; for attention=dot_product, the length of the row.
    """
    widths = 2 * config.head_dim
    if is_latent(config):
        widths = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
    # For each query, a key costs one score and one term in the weighted sum of values.
    seen = visible_keys(config) if keys is None else keys
    attention = 2.0 * attention_blocks(config) * config.base_num_query_heads * widths * seen
    return 2 * matmul_parameters(config) + attention


def flops_per_token(config: Config, keys: float | None = None) -> float:
    """Returns the FLOPs of one training step for one token: three times `forward_flops_per_token`."""
    return 3 * forward_flops_per_token(config, keys)

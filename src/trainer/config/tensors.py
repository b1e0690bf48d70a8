"""The tensors of a model, their logical axes and lengths, as far as they are known without JAX."""

from collections.abc import Mapping

from trainer.config.capabilities.expert_keys import only_experts, some_experts
from trainer.config.errors import UserError, nearest
from trainer.config.family import Axes, facts_of
from trainer.config.keys import Config

# The tensors of a model whose blocks are like Llama's. A name with a slash is the end of a parameter's canonical name;
# names without a slash are activations. A mesh axis may shard only one axis of a tensor.
TENSORS: dict[str, Axes] = {
    "token_embedder/embedding": ("vocab", "embed"),
    "self_attention/query/kernel": ("layers", "embed", "q_heads", "kv"),
    "self_attention/key/kernel": ("layers", "embed", "kv_heads", "kv_head_dim"),
    "self_attention/out/kernel": ("layers", "heads", "kv", "embed"),
    "mlp/wi_0/kernel": ("layers", "embed", "mlp"),
    "mlp/wo/kernel": ("layers", "mlp", "embed"),
    "pre_self_attention_layer_norm/scale": ("layers", "norm"),
    "decoder/logits_dense/kernel": ("embed", "vocab"),
    "activations between blocks": ("activation_batch", "activation_norm_length", "activation_embed"),
    "inputs of attention and MLP": ("activation_batch", "activation_length", "activation_embed"),
    "queries": ("activation_batch", "activation_q_length", "activation_heads"),
    "keys": ("activation_batch", "activation_kv_length", "activation_kv_heads"),
    "activations of the MLP": ("activation_batch", "activation_length", "activation_mlp"),
    "logits": ("activation_batch", "activation_length", "activation_vocab"),
}
EVERY_MODEL = ("token_embedder/embedding", "decoder/logits_dense/kernel", "activations between blocks", "logits")
_OF_MLP = ("mlp/wi_0/kernel", "mlp/wo/kernel")
# These replace the MLP's tensors if every layer has experts.
_OF_EXPERTS: dict[str, Axes] = {
    "gate/kernel": ("layers", "embed_moe", "exp"),
    "/wi_0": ("layers", "exp", "embed_moe", "mlp"),
    "/wo": ("layers", "exp", "mlp", "embed_moe"),
}

# The key that sets the length of a logical axis.
DIMENSIONS = {
    "layers": "base_num_decoder_layers",
    "embed": "base_emb_dim",
    "embed_moe": "base_emb_dim",
    "q_heads": "base_num_query_heads",
    "heads": "base_num_query_heads",
    "kv_heads": "base_num_kv_heads",
    "kv": "head_dim",
    "kv_head_dim": "head_dim",
    "mlp": "base_mlp_dim",
    "exp": "num_experts",
    "vocab": "vocab_size",
    "norm": "base_emb_dim",
    "activation_length": "max_target_length",
    "activation_norm_length": "max_target_length",
    "activation_q_length": "max_target_length",
    "activation_kv_length": "max_target_length",
    "activation_embed": "base_emb_dim",
    "activation_heads": "base_num_query_heads",
    "activation_kv_heads": "base_num_kv_heads",
    "activation_mlp": "base_mlp_dim",
    "activation_vocab": "vocab_size",
}
# For the projection [embed, mlp] of a multi-token prediction module: the axis mlp, and the key that sets its length.
PROJECTED = ("mlp", "base_emb_dim")


def of_blocks(config: Config) -> dict[str, Axes]:
    """Implements `Facts.tensors` for families with blocks like Llama's. The result includes the MLP tensors if no layer
    has experts, the expert tensors if every layer has experts, and neither if only some layers have experts."""
    if not some_experts(config):
        return TENSORS
    outside = {name: axes for name, axes in TENSORS.items() if name not in _OF_MLP}
    return outside | _OF_EXPERTS if only_experts(config) else outside


def renamed(tensors: Mapping[str, Axes], names: Mapping[str, str]) -> dict[str, Axes]:
    """Returns `tensors` under new names. `names` maps old names to new names."""
    return {names.get(name, name): axes for name, axes in tensors.items()}


def tensors_of(config: Config) -> Mapping[str, Axes]:
    """Returns a dict from the name of each tensor that the model of `config` certainly has to its logical axes."""
    facts = facts_of(config)
    tensors = (facts and facts.tensors(config)) or {name: TENSORS[name] for name in EVERY_MODEL}
    if unknown := [name for axes in tensors.values() for name in axes if name not in (*DIMENSIONS, "activation_batch")]:
        why = f"the length of the axis {unknown[0]} is not known without JAX{nearest(unknown[0], DIMENSIONS)}"
        raise UserError(f"decoder_block={config.decoder_block}: Facts.tensors: {why}; leave out tensors with this axis")
    return tensors


def dimension(name: str, config: Config) -> str:
    """Returns the key that sets the length of the logical axis `name` in the model of `config`; "" if none does."""
    of_experts = {"mlp": "base_moe_mlp_dim", "activation_mlp": "base_moe_mlp_dim"} if only_experts(config) else {}
    return of_experts.get(name) or DIMENSIONS.get(name, "")

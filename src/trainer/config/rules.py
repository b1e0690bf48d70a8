"""The value of logical_axis_rules: [name, mesh axis or list of axes] pairs, one rule per logical axis name."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trainer.config.derived import MESH_AXES
from trainer.config.errors import nearest, shortened
from trainer.config.expert_keys import WITH_EXPERTS, only_experts
from trainer.config.gpt3_keys import GPT3

Rule = list[Any]  # [name, mesh axis or list of mesh axes]

# The families that have exactly the tensors below; families with experts have others instead of the MLP's. For other
# families only the tensors of EVERY_MODEL are checked here, before JAX is loaded. The rest is checked when the model is
# made (`sharding.named_sharding`).
DENSE = ("llama2", "mistral", "qwen3")
BUILT_IN = (*DENSE, GPT3, *WITH_EXPERTS)
EVERY_MODEL = ("token_embedder/embedding", "decoder/logits_dense/kernel", "activations between blocks", "logits")
# The logical axes of each tensor. A mesh axis may shard only one axis of a tensor.
TENSORS: dict[str, tuple[str, ...]] = {
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
_OF_MLP = ("mlp/wi_0/kernel", "mlp/wo/kernel")
# Replaces the MLP's tensors if every layer has experts.
_OF_EXPERTS: dict[str, tuple[str, ...]] = {
    "gate/kernel": ("layers", "embed_moe", "exp"),
    "/wi_0": ("layers", "exp", "embed_moe", "mlp"),
    "/wo": ("layers", "exp", "mlp", "embed_moe"),
}

# Replaces queries and keys in gpt3, where one matrix, three times as large, makes queries, keys and values.
_FUSED = "self_attention/qkv_proj/kernel"
_OWN = ("self_attention/query/kernel", "self_attention/key/kernel")

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
# In the projection of a module of multi-token prediction, [embed, mlp], the second axis has another length.
PROJECTED = ("mlp", "base_emb_dim")


def tensors_of(config: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Returns the entries of TENSORS that the model of `config` has for certain."""
    if only_experts(config):
        return {name: axes for name, axes in TENSORS.items() if name not in _OF_MLP} | _OF_EXPERTS
    if config["decoder_block"] == GPT3 and config["fused_qkv"]:
        kept = {name: axes for name, axes in TENSORS.items() if name not in _OWN}
        return kept | {_FUSED: TENSORS["self_attention/query/kernel"]}
    names = TENSORS if config["decoder_block"] in (*DENSE, GPT3) else EVERY_MODEL
    return {name: TENSORS[name] for name in names}


def dimension(name: str, config: Mapping[str, Any]) -> str:
    """Returns the key that sets the length of the logical axis `name` in the model of `config`; "" if none does."""
    of_experts = {"mlp": "base_moe_mlp_dim", "activation_mlp": "base_moe_mlp_dim"} if only_experts(config) else {}
    return of_experts.get(name) or DIMENSIONS.get(name, "")


def read_rules(value: Sequence[Any], known: Iterable[str]) -> tuple[list[Rule], list[str]]:
    """Returns the rules in `value`, and one message for each error."""
    names = list(known)
    rules: dict[str, Rule] = {}
    problems = []
    for rule in value:
        problem = _problem(rule, names, rules)
        if problem:
            problems.append(problem)
        else:
            rules[rule[0]] = [rule[0], rule[1] if isinstance(rule[1], str) else list(rule[1] or [])]
    return list(rules.values()), problems


def merge_rules(below: Iterable[Rule], above: Iterable[Rule]) -> list[Rule]:
    """Returns `below` overridden by the rules of `above` with the same name."""
    return list(({rule[0]: rule for rule in below} | {rule[0]: rule for rule in above}).values())


def make_rules(rules: Iterable[Sequence[Any]]) -> dict[str, tuple[str, ...]]:
    """Returns the mesh axes of each logical name."""
    return {name: (axes,) if isinstance(axes, str) else tuple(axes or ()) for name, axes in rules}


def with_lengths(names: Iterable[str], config: Mapping[str, Any]) -> str:
    """Returns for example `[layers 2, embed 192]`: a tensor's logical axes, with lengths where a key of `config` sets
    them."""
    lengths = {name: config.get(dimension(name, config), "") for name in names}
    return f"[{', '.join(f'{name} {length}'.rstrip() for name, length in lengths.items())}]"


def collisions(config: Mapping[str, Any]) -> list[str]:
    """Returns one message for each two axes of one tensor that the rules of `config` shard over the same mesh axis."""
    axes = make_rules(config["logical_axis_rules"])
    messages: dict[tuple[frozenset[str], str], str] = {}
    for tensor, names in tensors_of(config).items():
        taken: dict[str, str] = {}
        for name in names:
            for axis in axes[name]:
                if axis in taken:
                    both = f"{taken[axis]} and {name} of {tensor} {with_lengths(names, config)}"
                    messages.setdefault((frozenset((taken[axis], name)), axis), f"{both} both use mesh axis {axis}")
                taken.setdefault(axis, name)
    return list(messages.values())


def _problem(rule: Any, names: list[str], seen: dict[str, Rule]) -> str | None:
    if not isinstance(rule, list) or len(rule) != 2 or not isinstance(rule[0], str):
        allowed = "[name, mesh axis or list of axes], as in [[embed,fsdp],[norm,[]]]"
        return f"{shortened(repr(rule))} is not a rule; allowed: {allowed}"
    name, axes = rule
    if name not in names:
        return f"there is no logical axis {shortened(name)}; allowed: {', '.join(names)}{nearest(name, names)}"
    if name in seen:
        return f"two rules for {name}; a name has one rule, which may list several mesh axes"
    listed = axes if isinstance(axes, list) else [axes] if axes is not None else []
    for axis in map(str, listed):
        if axis not in MESH_AXES:
            allowed = f"{', '.join(MESH_AXES)}{nearest(axis, MESH_AXES)}"
            return f"{name}: there is no mesh axis {shortened(axis)}; allowed: {allowed}"
    if len(set(listed)) < len(listed):
        return f"{name}: a mesh axis is listed twice"
    return None

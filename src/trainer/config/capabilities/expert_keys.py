"""Keys of mixtures of experts, the features that they select, and their checks."""

from trainer.config.family import facts_of, lacks, readers, reads
from trainer.config.key_rows import Check, Inert, Resume, Row, refused
from trainer.config.keys import Config

KEYS = (
    *("num_experts_per_tok", "base_moe_mlp_dim", "sparse_matmul", "capacity_factor", "norm_topk_prob"),
    "ragged_buffer_factor",
    *("load_balance_loss_weight", "router_z_loss_weight", "interleave_moe_layer_step"),
)
SIGMOID = "sigmoid"


def has_experts(config: Config) -> bool:
    """Whether the model has experts. Also true for custom families with num_experts > 1."""
    return config.num_experts > 1


def only_experts(config: Config) -> bool:
    """Whether every feed-forward layer is known to consist of routed experts."""
    return (
        some_experts(config)
        and lacks(config, "shared_experts")
        and config.interleave_moe_layer_step == 1
        and not _first_dense(config)
    )


def some_experts(config: Config) -> bool:
    """Whether the family is known to have layers with experts."""
    return reads(config, "num_experts")


def dense_layers(config: Config) -> int:
    """The number of layers without experts, for a family that has layers with experts."""
    layers, first = config.base_num_decoder_layers, _first_dense(config)
    return layers - (layers - first) // config.interleave_moe_layer_step


def _first_dense(config: Config) -> int:
    return config.first_num_dense_layers if reads(config, "first_num_dense_layers") else 0


def scores_by_sigmoid(config: Config) -> bool:
    """Whether expert scores are sigmoids; otherwise they are a softmax."""
    return config.routed_score_func == SIGMOID


def has_bias(config: Config) -> bool:
    """Whether a router adds a bias when it chooses experts."""
    return has_experts(config) and config.routed_bias


def drops(config: Config) -> bool:
    """Whether experts may drop tokens."""
    return has_experts(config) and not config.sparse_matmul and config.capacity_factor > 0


def sends(config: Config) -> bool:
    """Whether tokens are sorted by expert and sent to their experts' devices. `config` may be unresolved."""
    expert = config.ici_expert_parallelism, config.dcn_expert_parallelism
    return has_experts(config) and config.sparse_matmul and expert != (1, 1)


def _family(config: Config) -> str | None:
    if some_experts(config):
        return None if has_experts(config) else "this family has experts; num_experts must be at least 2"
    if has_experts(config) and lacks(config, "num_experts"):
        return f"this family has no experts; families with experts: {readers('num_experts')}"
    return None


def _interleaved(config: Config) -> str | None:
    facts = facts_of(config)
    if not facts or facts.has_rest or not some_experts(config) or not has_experts(config):
        return None
    first = _first_dense(config)
    if (config.base_num_decoder_layers - first) % config.interleave_moe_layer_step == 0:
        return None
    after = f" after the first {first}" if first else ""
    return f"the number of layers{after} must be a multiple of {config.interleave_moe_layer_step}"


def _routing_groups(config: Config) -> str | None:
    groups, kept, experts = config.n_routing_groups, config.topk_routing_group, config.num_experts
    if not reads(config, "n_routing_groups") or groups in (-1, 1):
        return None
    if experts % groups:
        return f"num_experts={experts} must be a multiple of the number of groups"
    if not 1 <= kept <= groups:
        return f"a token can choose 1 to {groups} of the {groups} groups"
    if kept * (experts // groups) < config.num_experts_per_tok:
        return f"{kept} groups have {kept * (experts // groups)} experts, but a token chooses more"
    if scores_by_sigmoid(config) or not reads(config, "routed_score_func"):
        return "a group is scored by its two best experts, but has only one" if experts == groups else None
    if config.norm_topk_prob:
        return "with softmax scores, groups do not support norm_topk_prob=true"
    return None


def _score(config: Config) -> str | None:
    if scores_by_sigmoid(config) and some_experts(config) and lacks(config, "routed_score_func"):
        return f"this family scores experts by a softmax; families with sigmoids: {readers('routed_score_func')}"
    return None


def _bias(config: Config) -> str | None:
    if not config.routed_bias:
        return None
    if lacks(config, "routed_bias"):
        return f"routers of this family have no bias; families with one: {readers('routed_bias')}"
    if not scores_by_sigmoid(config) and reads(config, "routed_bias"):
        return f"a bias requires sigmoid scores; set routed_score_func={SIGMOID}"
    return None


# May change on resume: DeepSeek-V3 was trained with 0 in the last part of its training.
ROWS = (Row(("routed_bias_update_rate",), Resume.AROUND),)
CHECKS: tuple[Check, ...] = (
    refused(
        ("first_num_dense_layers", "base_num_decoder_layers"),
        lambda c: _first_dense(c) >= c.base_num_decoder_layers,
        "no layer with experts is left; reduce first_num_dense_layers",
    ),
    (("interleave_moe_layer_step", "base_num_decoder_layers"), _interleaved),
    refused(
        ("decoder_block", "shared_experts"),
        lambda c: reads(c, "shared_experts") and not c.shared_experts,
        "this family has at least one shared expert",
    ),
    (("n_routing_groups", "topk_routing_group", "num_experts", "num_experts_per_tok"), _routing_groups),
    (("decoder_block", "num_experts"), _family),
    (("decoder_block", "routed_score_func"), _score),
    (("decoder_block", "routed_bias", "routed_score_func"), _bias),
    refused(
        ("num_experts_per_tok", "num_experts"),
        lambda c: c.num_experts_per_tok > c.num_experts,
        "a token cannot choose an expert twice, so it cannot choose more experts than there are",
    ),
    refused(
        ("decoder_block", "base_moe_mlp_dim"),
        lambda c: some_experts(c) and c.base_moe_mlp_dim == -1,
        "the hidden width of an expert is missing",
    ),
    refused(
        ("decoder_block", "mlp_activations"),
        lambda c: some_experts(c) and len(c.mlp_activations) == 1,
        "the MLP of an expert is gated: give two activations, such as [silu, linear]",
    ),
)
INERT = (
    Inert(KEYS, lambda c: not has_experts(c), "num_experts=1"),
    Inert(
        ("base_mlp_dim",),
        lambda c: some_experts(c) and not dense_layers(c),
        "every layer has experts, whose width is base_moe_mlp_dim",
    ),
    Inert(("routed_bias_update_rate",), lambda c: not c.routed_bias, "routed_bias=false"),
    Inert(("topk_routing_group",), lambda c: c.n_routing_groups in (-1, 1), "there are no groups"),
    Inert(("capacity_factor",), lambda c: c.sparse_matmul, "sparse_matmul=true drops no token"),
    Inert(
        ("norm_topk_prob",),
        lambda c: some_experts(c) and not reads(c, "norm_topk_prob"),
        "this family has only one way to weight a token's experts",
    ),
    Inert(
        ("ragged_buffer_factor",),
        lambda c: has_experts(c) and not sends(c),
        "only expert parallelism with sparse_matmul=true has buffers",
    ),
)

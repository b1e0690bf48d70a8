"""Keys that have no effect under certain other settings. A user who gives such a key gets a warning."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.config.capabilities.context_keys import CONTEXT_INERT, splits_rows
from trainer.config.capabilities.context_keys import KEYS as OF_CONTEXT
from trainer.config.capabilities.data_keys import DATA_INERT
from trainer.config.capabilities.decoding_keys import DECODING_INERT
from trainer.config.capabilities.expert_keys import KEYS as OF_EXPERTS
from trainer.config.capabilities.expert_keys import (
    dense_layers,
    has_experts,
    only_experts,
    sends,
    some_experts,
)
from trainer.config.capabilities.latent_keys import is_latent
from trainer.config.capabilities.lora_keys import LORA_INERT
from trainer.config.capabilities.optimizers import KEYS as OF_OPTIMIZERS
from trainer.config.capabilities.optimizers import TRAITS, has_first_moment
from trainer.config.capabilities.pipeline_keys import GATHERS, PIPELINE_INERT, nothing_to_gather
from trainer.config.capabilities.quantization_keys import QUANTIZATION_INERT
from trainer.config.capabilities.remat_tensors import OF_EXPERTS as TENSORS_OF_EXPERTS
from trainer.config.capabilities.remat_tensors import OF_MLP as TENSORS_OF_MLP
from trainer.config.capabilities.remat_tensors import OWN_TENSORS, TENSORS
from trainer.config.capabilities.rl_keys import RL_INERT
from trainer.config.capabilities.sparsity_keys import SPARSITY_INERT
from trainer.config.capabilities.splash_tiles import KEYS, OF_DQ
from trainer.config.capabilities.windows import needs_window
from trainer.config.derived import FOLLOWS
from trainer.config.dump import to_flow
from trainer.config.family import LATENT, OF_SOME, facts_of, fixed, lacks, readers, reads
from trainer.config.files import by_hand
from trainer.config.keys import Config
from trainer.config.schema import schema


@dataclass(frozen=True)
class Inert:
    """`keys` have no effect if `when(config)` is true. `reason` names the settings that cause it."""

    keys: Sequence[str]
    when: Callable[[Any], bool]
    reason: str


def _of_optimizer(name: str) -> list[Inert]:
    keys, momentum = TRAITS[name].reads, TRAITS[name].momentum
    decays = [key for key in keys if key.endswith("_weight_decay")]
    rows = [
        Inert(
            [key for key in OF_OPTIMIZERS if key not in keys],
            lambda c: c.opt_type == name,
            f"opt_type={name} does not read it",
        )
    ]
    if decays:
        none = " and ".join(f"{key}=0" for key in decays)
        rows.append(Inert(["adamw_mask"], lambda c: c.opt_type == name and not any(c[key] for key in decays), none))
    if momentum:
        rows.append(Inert(["mu_dtype"], lambda c: c.opt_type == name and not has_first_moment(c), f"{momentum}=0"))
    return rows


INERT = (
    Inert(("override_model_config",), lambda c: True, "the command line always wins over the preset"),
    Inert((*TENSORS, *OWN_TENSORS), lambda c: c.remat_policy != "custom", "remat_policy is not custom"),
    Inert(OF_EXPERTS, lambda c: not has_experts(c), "num_experts=1"),
    Inert(
        ("base_mlp_dim",),
        lambda c: some_experts(c) and not dense_layers(c),
        "every layer has experts, whose width is base_moe_mlp_dim",
    ),
    Inert(("routed_bias_update_rate",), lambda c: not c.routed_bias, "routed_bias=false"),
    Inert(("topk_routing_group",), lambda c: c.n_routing_groups in (-1, 1), "there are no groups"),
    Inert(LATENT, lambda c: not is_latent(c), "attention_type is not mla"),
    Inert(("head_dim",), is_latent, "attention_type=mla has qk_nope_head_dim, qk_rope_head_dim and v_head_dim"),
    Inert(("mscale",), lambda c: not is_latent(c) or c.rope_type != "yarn", "it needs attention_type=mla and yarn"),
    Inert(("rope_interleave",), is_latent, "attention_type=mla always rotates adjacent pairs"),
    Inert(("capacity_factor",), lambda c: c.sparse_matmul, "sparse_matmul=true drops no token"),
    Inert(
        ("norm_topk_prob",),
        lambda c: some_experts(c) and not reads(c, "norm_topk_prob"),
        "this family divides the weights of a token's experts by their sum in any case",
    ),
    Inert(
        TENSORS_OF_MLP,
        only_experts,
        "every layer of this family has experts, whose tensors are moe_mlp*",
    ),
    Inert(TENSORS_OF_EXPERTS, lambda c: not has_experts(c), "num_experts=1"),
    Inert(TENSORS_OF_EXPERTS, sends, "with expert parallelism, the backward pass computes these tensors again"),
    Inert(
        ("ragged_buffer_factor",),
        lambda c: has_experts(c) and not sends(c),
        "only expert parallelism with sparse_matmul=true has buffers",
    ),
    Inert(
        ("mlpwi",),
        lambda c: c.remat_policy == "custom" and len(c.mlp_activations) == 2,
        "mlp_activations has two entries, whose projections are mlpwi_0 and mlpwi_1",
    ),
    Inert(
        ("mlpwi_0", "mlpwi_1"),
        lambda c: c.remat_policy == "custom" and len(c.mlp_activations) == 1,
        "mlp_activations has one entry, whose projection is mlpwi",
    ),
    Inert(
        ("mlpwo",),
        lambda c: c.remat_policy == "custom" and c.mlpwo != "remat",
        "the backward pass does not read it, so it is neither saved nor recomputed",
    ),
    Inert(("sliding_window_size", "local_rope_max_timescale"), lambda c: not needs_window(c), "no layer has a window"),
    Inert(("query_pre_attn_scalar", "local_rope_max_timescale"), is_latent, "attention_type=mla does not read it"),
    Inert(("qk_clip_threshold", "qk_clip_interval"), lambda c: not c.use_qk_clip, "use_qk_clip=false"),
    Inert(
        ("skip_step_interval", "skip_step_scaling_factor"),
        lambda c: not c.skip_step_on_spikes,
        "skip_step_on_spikes=false",
    ),
    Inert(
        ("diloco_sync_period", "diloco_outer_lr", "diloco_outer_momentum", "diloco_outer_grad_dtype"),
        lambda c: not c.enable_diloco,
        "enable_diloco=false",
    ),
    Inert(
        ("num_diloco_fragments", "num_communication_overlapping_steps", "communication_overlapping_alpha"),
        lambda c: not c.enable_streaming_diloco,
        "enable_streaming_diloco=false",
    ),
    Inert(
        ("use_sequential_layers",),
        lambda c: not c.enable_streaming_diloco or c.num_diloco_fragments <= 2,
        "only streaming DiLoCo with more than two fragments divides the layers",
    ),
    Inert(("rope_linear_scaling_factor",), lambda c: c.rope_type != "default", "rope_type is not default"),
    Inert(
        ("rope_factor", "original_max_position_embeddings"),
        lambda c: c.rope_type == "default",
        "rope_type=default",
    ),
    Inert(
        ("rope_low_freq_factor", "rope_high_freq_factor"),
        lambda c: c.rope_type != "llama3.1",
        "rope_type is not llama3.1",
    ),
    Inert(
        ("beta_fast", "beta_slow", "rope_truncate", "rope_attention_scaling"),
        lambda c: c.rope_type != "yarn",
        "rope_type is not yarn",
    ),
    Inert(
        ("wsd_decay_steps_fraction", "wsd_decay_style"),
        lambda c: c.lr_schedule_type != "wsd",
        "lr_schedule_type is not wsd",
    ),
    Inert(
        ("learning_rate_final_fraction",),
        lambda c: c.lr_schedule_type == "constant",
        "lr_schedule_type=constant stays at the peak",
    ),
    *(inert for name in TRAITS for inert in _of_optimizer(name)),
    Inert(
        ("weight_stochastic_rounding",), lambda c: c.weight_dtype == "float32", "weight_dtype=float32 loses no updates"
    ),
    Inert(("dropout_rate", "attention_dropout_rate"), lambda c: not c.enable_dropout, "enable_dropout=false"),
    Inert(("normalize_embedding_logits",), lambda c: not c.logits_via_embedding, "logits_via_embedding=false"),
    Inert(("mtp_loss_scaling_factor",), lambda c: not c.mtp_num_layers, "mtp_num_layers=0"),
    Inert(
        ("eval_steps", "eval_per_device_batch_size", "mtp_eval_target_module"),
        lambda c: c.eval_interval <= 0,
        "eval_interval disables evaluation",
    ),
    Inert(
        (
            "checkpoint_period",
            "save_checkpoint_on_start",
            "save_checkpoint_on_completion",
            "async_checkpointing",
            "max_num_checkpoints_to_keep",
            "checkpoint_keep_period",
            "keep_best_checkpoints",
        ),
        lambda c: not c.enable_checkpointing,
        "enable_checkpointing=false",
    ),
    Inert(
        ("reset_optimizer",),
        lambda c: not c.enable_checkpointing and not c.load_full_state_path,
        "no state is loaded: enable_checkpointing=false and load_full_state_path is empty",
    ),
    Inert(
        ("checkpoint_keep_period", "keep_best_checkpoints"),
        lambda c: c.enable_checkpointing and c.max_num_checkpoints_to_keep is None,
        "max_num_checkpoints_to_keep=none keeps all",
    ),
    Inert(
        ("keep_best_checkpoints",),
        lambda c: c.keep_best_checkpoints > 0 and c.eval_interval <= 0,
        "eval_interval disables evaluation",
    ),
    Inert(
        ("skip_first_n_steps_for_profiler", "profiler_steps", "profile_periodically_period"),
        lambda c: not c.profiler,
        "profiler is empty",
    ),
    Inert(("dump_hlo_local_dir",), lambda c: not c.dump_hlo, "dump_hlo=false"),
    *(Inert(keys, when, reason) for keys, when, reason in DECODING_INERT),
    *(Inert(keys, when, reason) for keys, when, reason in RL_INERT),
    *(Inert(keys, when, reason) for keys, when, reason in DATA_INERT),
    *(Inert(keys, when, reason) for keys, when, reason in (*QUANTIZATION_INERT, *PIPELINE_INERT)),
    *(Inert(keys, when, reason) for keys, when, reason in CONTEXT_INERT),
    *(Inert(keys, when, reason) for keys, when, reason in (*SPARSITY_INERT, *LORA_INERT)),
)


# Cases that depend on the devices, for a resolved configuration.
INERT_HERE = (
    Inert(tuple(KEYS.values()), lambda c: c.attention != "splash", "the attention op is not splash here"),
    Inert(
        tuple(KEYS[name] for name in OF_DQ),
        lambda c: c.attention == "splash" and c.sa_use_fused_bwd_kernel,
        "with sa_use_fused_bwd_kernel=true the dkv kernel computes the gradient of queries",
    ),
    Inert(OF_CONTEXT, lambda c: not splits_rows(c), "no row is split over devices here"),
    Inert(GATHERS, nothing_to_gather, "no weight of a stage is sharded over fsdp here"),
)


def _table(config: Config) -> list[Inert]:
    """Returns `INERT`, after the keys that the family of `config` does not read."""
    facts = facts_of(config)
    ignored = facts.ignores.items() if facts else ()
    reasons = [(keys, f"decoder_block={config.decoder_block} {reason}") for reason, keys in ignored]
    others = {key: value for key, value in fixed(config).items() if config[key] != value}
    always = f"decoder_block={config.decoder_block} always has"
    reasons += [((key,), f"{always} {key}={to_flow(value)}") for key, value in others.items()]
    reasons += [((key,), f"only {readers(key)} reads it") for key in OF_SOME if lacks(config, key)]
    return [*(Inert(keys, lambda c: True, reason) for keys, reason in reasons), *INERT]


def without_effect(config: Config, changed: Mapping[str, str]) -> list[str]:
    """Returns one line for each key that the user gives and that has no effect under the other settings.

    A yml may repeat a default without a warning, so that the config.yml of a run can be used again.
    """
    return _lines(_table(config), config, changed)


def without_effect_here(config: Config, changed: Mapping[str, str], before: Config) -> list[str]:
    """Does the same as `without_effect` for settings that depend on the devices. `config` is resolved, from `before`.
    What has no effect on any devices is left out."""
    told = inert_keys(before)
    return _lines(INERT_HERE, config, {key: where for key, where in changed.items() if key not in told})


def _lines(table: Sequence[Inert], config: Config, changed: Mapping[str, str]) -> list[str]:
    lines: dict[str, str] = {}  # only the first reason for each key
    for inert in table:
        for key in inert.keys:
            given = key in changed and (by_hand(changed[key]) or not _repeats_default(config, key))
            if given and key not in lines and inert.when(config):
                lines[key] = f"{key}={to_flow(config[key])} ({changed[key]}) has no effect: {inert.reason}"
    return list(lines.values())


def no_effect_of(config: Config, key: str) -> str | None:
    """Returns the reason why `key` has no effect under the settings of `config`; None if it has one."""
    return next((inert.reason for inert in _table(config) if key in inert.keys and inert.when(config)), None)


def inert_keys(config: Config) -> set[str]:
    """Returns the keys that have no effect under the settings of `config`, given or not."""
    return {key for inert in _table(config) if inert.when(config) for key in inert.keys}


def _repeats_default(config: Config, key: str) -> bool:
    default = schema().keys[key].default
    return to_flow(config[key]) == to_flow(default) or (key in FOLLOWS and config[key] == FOLLOWS[key](config))

"""Which keys have no effect under which settings. A user who gives such a key is warned."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.config.data_keys import DATA_INERT
from trainer.config.derived import FOLLOWS
from trainer.config.dump import to_flow
from trainer.config.files import COMMAND_LINE
from trainer.config.schema import schema
from trainer.config.tiles import KEYS, OF_DQ


@dataclass(frozen=True)
class Inert:
    """`keys` do nothing where `when(config)`; `reason` says it in the form of settings."""

    keys: Sequence[str]
    when: Callable[[Any], bool]
    reason: str


_ADAM = ("adam_b1", "adam_b2", "adam_eps", "adam_eps_root", "adam_weight_decay", "adamw_mask", "mu_dtype")

# What remat_policy=custom decides one by one: TENSORS of layers/remat.py, which this room cannot import.
_REMAT = (
    "decoder_layer_input",
    "context",
    "query_proj",
    "key_proj",
    "value_proj",
    "out_proj",
    "mlpwi",
    "mlpwi_0",
    "mlpwi_1",
    "mlpwo",
)

INERT = (
    Inert(("override_model_config",), lambda c: True, "the command line always wins over the preset"),
    Inert(_REMAT, lambda c: c.remat_policy != "custom", "remat_policy is not custom"),
    Inert(
        ("mlpwi",),
        lambda c: c.remat_policy == "custom" and len(c.mlp_activations) == 2,
        "mlp_activations has two, whose projections are mlpwi_0 and mlpwi_1",
    ),
    Inert(
        ("mlpwi_0", "mlpwi_1"),
        lambda c: c.remat_policy == "custom" and len(c.mlp_activations) == 1,
        "mlp_activations has one, whose projection is mlpwi",
    ),
    Inert(
        ("mlpwo",),
        lambda c: c.remat_policy == "custom" and c.mlpwo != "remat",
        "the backward pass does not read it, so that it is neither kept nor computed again",
    ),
    Inert(("sliding_window_size",), lambda c: c.attention_type == "global", "attention_type=global"),
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
    Inert(_ADAM, lambda c: c.opt_type == "sgd", "opt_type=sgd has neither moments nor weight decay"),
    Inert(("adamw_mask",), lambda c: c.opt_type == "adamw" and c.adam_weight_decay == 0, "adam_weight_decay=0"),
    Inert(
        ("grad_dtype",),
        lambda c: c.weight_dtype == "bfloat16" and c.gradient_accumulation_steps == 1,
        "with weight_dtype=bfloat16 the gradients of one microbatch have no more bits",
    ),
    Inert(("dropout_rate", "attention_dropout_rate"), lambda c: not c.enable_dropout, "enable_dropout=false"),
    Inert(("normalize_embedding_logits",), lambda c: not c.logits_via_embedding, "logits_via_embedding=false"),
    Inert(("eval_steps", "eval_per_device_batch_size"), lambda c: c.eval_interval <= 0, "eval_interval turns it off"),
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
        ("checkpoint_keep_period", "keep_best_checkpoints"),
        lambda c: c.enable_checkpointing and c.max_num_checkpoints_to_keep is None,
        "max_num_checkpoints_to_keep=none keeps all",
    ),
    Inert(
        ("keep_best_checkpoints",),
        lambda c: c.keep_best_checkpoints > 0 and c.eval_interval <= 0,
        "eval_interval turns evaluation off",
    ),
    Inert(("decode_sampling_temperature",), lambda c: not c.prompt, "prompt is empty"),
    Inert(
        ("prompt", "decode_sampling_temperature"),
        lambda c: c.dataset_type == "synthetic" and bool(c.prompt),
        "dataset_type=synthetic has no tokenizer",
    ),
    *(Inert(keys, when, reason) for keys, when, reason in DATA_INERT),
)


# Of a resolved configuration: what the devices decide.
INERT_HERE = (
    Inert(tuple(KEYS.values()), lambda c: c.attention != "splash", "the attention op is not splash here"),
    Inert(
        tuple(KEYS[name] for name in OF_DQ),
        lambda c: c.attention == "splash" and c.sa_use_fused_bwd_kernel,
        "sa_use_fused_bwd_kernel=true computes the gradient of queries in the dkv kernel",
    ),
)


def without_effect(config: Any, changed: Mapping[str, str]) -> list[str]:
    """One line for each key that the user gives and that has no effect under the other settings.

    A yml may repeat a default without a warning, so that a run's whole configuration can be given again.
    """
    return _lines(INERT, config, changed)


def without_effect_here(config: Any, changed: Mapping[str, str]) -> list[str]:
    """The same for what only a resolved `config` tells."""
    return _lines(INERT_HERE, config, changed)


def _lines(table: Sequence[Inert], config: Any, changed: Mapping[str, str]) -> list[str]:
    lines: dict[str, str] = {}  # of each key the first reason only
    for inert in table:
        for key in inert.keys:
            said = key in changed and (changed[key] == COMMAND_LINE or not _repeats_default(config, key))
            if said and key not in lines and inert.when(config):
                lines[key] = f"{key}={to_flow(config[key])} ({changed[key]}) has no effect: {inert.reason}"
    return list(lines.values())


def inert_keys(config: Any) -> set[str]:
    """The keys that do nothing under the settings of `config`, whoever gives them."""
    return {key for inert in INERT if inert.when(config) for key in inert.keys}


def _repeats_default(config: Any, key: str) -> bool:
    default = schema().keys[key].default
    return config[key] == default or (key in FOLLOWS and config[key] == config[FOLLOWS[key]])

"""Which keys have no effect under which settings. A user who gives such a key is warned."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.config.derived import FOLLOWS
from trainer.config.dump import to_flow
from trainer.config.files import COMMAND_LINE
from trainer.config.schema import schema


@dataclass(frozen=True)
class Inert:
    """`keys` do nothing where `when(config)`; `reason` says it in the form of settings."""

    keys: Sequence[str]
    when: Callable[[Any], bool]
    reason: str


_ADAM = ("adam_b1", "adam_b2", "adam_eps", "adam_eps_root", "adam_weight_decay", "adamw_mask", "mu_dtype")

INERT = (
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
    Inert(("dataset_path",), lambda c: c.dataset_type == "synthetic", "dataset_type=synthetic stores nothing"),
    Inert(
        ("enable_data_shuffling",),
        lambda c: c.dataset_type == "synthetic",
        "dataset_type=synthetic has no files to shuffle",
    ),
    Inert(
        ("data_shuffle_seed",),
        lambda c: c.dataset_type != "synthetic" and not c.enable_data_shuffling,
        "enable_data_shuffling=false",
    ),
)


def without_effect(config: Any, changed: Mapping[str, str]) -> list[str]:
    """One line for each key that the user gives and that has no effect under the other settings.

    A yml may repeat a default without a warning, so that a run's whole configuration can be given again.
    """
    lines = []
    for inert in INERT:
        for key in inert.keys:
            said = key in changed and (changed[key] == COMMAND_LINE or not _repeats_default(config, key))
            if said and inert.when(config):
                lines.append(f"{key}={to_flow(config[key])} ({changed[key]}) has no effect: {inert.reason}")
    return lines


def _repeats_default(config: Any, key: str) -> bool:
    default = schema().keys[key].default
    return config[key] == default or (key in FOLLOWS and config[key] == config[FOLLOWS[key]])

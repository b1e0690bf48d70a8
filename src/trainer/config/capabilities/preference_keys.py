"""Keys of preference optimization, and their checks."""

from collections.abc import Callable

from trainer.config.capabilities.chat_keys import TOOLS, not_texts
from trainer.config.derived import has_reference
from trainer.config.key_rows import Check, Inert, Row
from trainer.config.keys import Config
from trainer.config.schema import INT32_MAX

COLUMNS = ("prompt", "chosen", "rejected")
# The defaults of trainer.dpo where they differ from those of base.yml: a pair stays in one row.
DPO_DEFAULTS = {
    "use_dpo": True,
    "train_data_columns": [*COLUMNS[1:]],
    "eval_data_columns": [*COLUMNS[1:]],
    "grain_packing_type": "best_fit",
    "use_truncation": True,
}


def _max_prompt(config: Config) -> str | None:
    number = config.dpo_max_prompt_length
    return None if number is None or 1 <= number <= INT32_MAX else f"must be from 1 to {INT32_MAX}, or none"


def _packing(config: Config) -> str | None:
    if not config.use_dpo or not config.packing or config.grain_packing_type != "concat_then_split":
        return None
    return (
        "this would split pairs, whose two sequences must be in one row; take best_fit or first_fit, or packing=false"
    )


def _no_part(key: str, reason: str) -> tuple[tuple[str, ...], Callable[[Config], str | None]]:
    return ("use_dpo", key), lambda config: f"{reason}; leave it out" if config.use_dpo and config[key] else None


def _moves(key: str, reason: str) -> tuple[tuple[str, ...], Callable[[Config], str | None]]:
    def problem(config: Config) -> str | None:
        if not has_reference(config) or not config[key]:
            return None
        return f"{reason}, which the reference model reads, too, and it must not move; leave it out"

    return ("use_dpo", "dpo_algo", "use_grpo", "rl_grpo_beta", key), problem


ROWS = (Row(("dpo_max_prompt_length",), step=False),)
CHECKS: tuple[Check, ...] = (
    (("dpo_max_prompt_length",), _max_prompt),
    (("use_dpo", "packing", "grain_packing_type"), _packing),
    _no_part("mtp_num_layers", "rewards are of whole answers, and modules of multi-token prediction have none"),
    _no_part("z_loss_multiplier", "this is a term of the loss of the next token"),
    _no_part("label_smoothing", "this smooths the loss of the next token; dpo_label_smoothing that of pairs"),
    _moves("routed_bias_update_rate", "it moves the biases of routers"),
    _moves("weight_sparsity_n", "it moves masks of weights"),
)
INERT = (
    Inert(
        ("dpo_algo", "dpo_beta", "dpo_orpo_lambda", "dpo_label_smoothing", "dpo_max_prompt_length"),
        lambda c: not c.use_dpo,
        "use_dpo=false",
    ),
    Inert(("dpo_beta",), lambda c: c.dpo_algo == "orpo", "dpo_algo=orpo has no reference"),
    Inert(("dpo_orpo_lambda",), lambda c: c.dpo_algo == "dpo", "dpo_algo=dpo has no odds ratio"),
    Inert(("sft_train_on_completion_only",), has_reference, "rewards are of answers alone"),
)


def pair_columns_problem(config: Config, key: str) -> str | None:
    """Returns why the columns do not hold pairs of answers; None if they can."""
    columns = config[key]
    if config.formatting_func_path:
        return None if columns and all(columns) else "must be the columns that the function reads"
    said = [column for column in columns if column != TOOLS]
    if len(said) not in (2, 3) or not all(said) or len(set(said)) < len(said):
        return f"must be two columns, chosen and rejected, or three: prompt, chosen and rejected; and, if any, {TOOLS}"
    wrong = [name for place, name in zip(COLUMNS[-len(said) :], said, strict=True) if name in COLUMNS and name != place]
    if wrong:
        return f"the place of a column says what it is, and {wrong[0]} is misplaced: the order is {', '.join(COLUMNS)}"
    return None


def not_pairs(config: Config) -> list[str]:
    """Returns one message for each key that prevents trainer.dpo from reading pairs."""
    return not_texts(config, "pairs", "/data/pairs.jsonl")

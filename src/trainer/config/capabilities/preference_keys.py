"""Keys of preference optimization, and their checks."""

from trainer.config.capabilities.chat_keys import TOOLS, not_texts
from trainer.config.derived import has_reference
from trainer.config.key_rows import Check, Inert, Row, left_out, only_if, refused
from trainer.config.keys import Config
from trainer.config.schema import INT32_MAX

COLUMNS = ("prompt", "chosen", "rejected")
# The defaults of trainer.dpo where they differ from base.yml's: a pair stays in one row.
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


_WITHOUT = (
    left_out("mtp_num_layers", "rewards are of whole answers, and modules of multi-token prediction have none"),
    left_out("z_loss_multiplier", "this is a term of the loss of the next token"),
    left_out("label_smoothing", "this smooths the loss of the next token; dpo_label_smoothing that of pairs"),
)
_READ_TOO = "which the reference model reads, too, and it must not move"
_UNMOVED = (
    left_out("routed_bias_update_rate", f"it moves the biases of routers, {_READ_TOO}"),
    left_out("weight_sparsity_n", f"it moves masks of weights, {_READ_TOO}"),
)
ROWS = (Row(("dpo_max_prompt_length",), step=False),)
CHECKS: tuple[Check, ...] = (
    (("dpo_max_prompt_length",), _max_prompt),
    refused(
        ("use_dpo", "packing", "grain_packing_type"),
        lambda c: c.use_dpo and c.packing and c.grain_packing_type == "concat_then_split",
        "this would split pairs, whose two sequences must be in one row; take best_fit or first_fit, or packing=false",
    ),
    *only_if(lambda c: c.use_dpo, _WITHOUT, shown=("use_dpo",)),
    *only_if(has_reference, _UNMOVED, shown=("use_dpo", "dpo_algo", "use_grpo", "rl_grpo_beta")),
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
    """Returns why the columns cannot contain pairs of answers; None if they can."""
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

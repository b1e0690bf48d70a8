"""Keys of preference optimization, and their checks."""

from trainer.config.capabilities.chat_keys import TOOLS, not_texts
from trainer.config.derived import has_reference
from trainer.config.key_rows import Check, Inert, Row, left_out, only_if, refused
from trainer.config.keys import Config
from trainer.config.schema import INT32_MAX

COLUMNS = ("prompt", "chosen", "rejected")
# The defaults of trainer.dpo that differ from base.yml's. best_fit and truncation keep both sequences of a pair in
# one row.
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
    left_out("mtp_num_layers", "rewards apply to whole answers, and modules of multi-token prediction have no reward"),
    left_out("z_loss_multiplier", "it is a term of the next-token loss"),
    left_out("label_smoothing", "it smooths the next-token loss; dpo_label_smoothing smooths the loss of pairs"),
)
_READ_TOO = "which the reference model shares, and the reference model must not change"
_UNMOVED = (
    left_out("routed_bias_update_rate", f"it changes the biases of routers, {_READ_TOO}"),
    left_out("weight_sparsity_n", f"it changes masks of weights, {_READ_TOO}"),
)
ROWS = (Row(("dpo_max_prompt_length",), step=False),)
CHECKS: tuple[Check, ...] = (
    (("dpo_max_prompt_length",), _max_prompt),
    refused(
        ("use_dpo", "packing", "grain_packing_type"),
        lambda c: c.use_dpo and c.packing and c.grain_packing_type == "concat_then_split",
        "this packing splits pairs, which must be in one row; use best_fit or first_fit, or packing=false",
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
    Inert(("dpo_beta",), lambda c: c.dpo_algo == "orpo", "dpo_algo=orpo has no reference model"),
    Inert(("dpo_orpo_lambda",), lambda c: c.dpo_algo == "dpo", "dpo_algo=dpo has no odds ratio"),
    Inert(("sft_train_on_completion_only",), has_reference, "rewards are computed from answers only"),
)


def pair_columns_problem(config: Config, key: str) -> str | None:
    """Returns why the columns listed in `config[key]` cannot contain pairs of answers; None if they can."""
    columns = config[key]
    if config.formatting_func_path:
        return None if columns and all(columns) else "must be the columns that the formatting function reads"
    said = [column for column in columns if column != TOOLS]
    if len(said) not in (2, 3) or not all(said) or len(set(said)) < len(said):
        return f"must be chosen and rejected, or prompt, chosen and rejected; {TOOLS} may be added"
    wrong = [name for place, name in zip(COLUMNS[-len(said) :], said, strict=True) if name in COLUMNS and name != place]
    if wrong:
        return f"columns are identified by their order, and {wrong[0]} is misplaced: the order is {', '.join(COLUMNS)}"
    return None


def not_pairs(config: Config) -> list[str]:
    """Returns one message for each key that prevents trainer.dpo from reading pairs."""
    return not_texts(config, "pairs", "/data/pairs.jsonl")

"""Checks of the keys of supervised fine-tuning and chat templates, and the command for each training method."""

import re
from collections.abc import Sequence

from trainer.config.capabilities.token_keys import token_files
from trainer.config.derived import has_rollouts
from trainer.config.errors import shortened
from trainer.config.key_rows import Check, Inert, Place, Row, refused
from trainer.config.keys import Config

# A function's path: package.module:function.
_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*[:.][A-Za-z_]\w*")
# The keys that select training on something other than documents: key -> (command, name of the training method).
METHODS = {
    "use_sft": ("trainer.sft", "supervised fine-tuning"),
    "use_dpo": ("trainer.dpo", "preference optimization"),
    "use_grpo": ("trainer.grpo", "reinforcement learning"),
}
DISTILL = "trainer.distill"
TOOLS = "tools"  # the column with the tools that a conversation may call
# The defaults of trainer.sft that differ from base.yml. With these defaults, a conversation stays in one row.
SFT_DEFAULTS = {"use_sft": True, "grain_packing_type": "best_fit", "use_truncation": True}


def other_command(config: Config, own: str = "", *, distills: bool = False) -> str | None:
    """Returns the reason why a configuration requires a command other than the running one; None if the running command
    can be used.

    `own`: the key in METHODS that selects the running command; "" for trainer.train. `distills`: whether the running
    command is trainer.distill, which trains on the same records as the command that `own` selects.
    """
    if config.use_distill and not distills:
        return f"use_distill=true: distillation is another command: run python -m {DISTILL} with the same arguments"
    for key, (command, what) in METHODS.items():
        if config[key] and key != own:
            return f"{key}=true: {what} is another command: run python -m {command} with the same arguments"
    if own and not config[own]:
        return f"{own}=false: {METHODS[own][0]} is for {METHODS[own][1]}; trainer.train trains on documents"
    return None


def functions_problem(paths: Sequence[str]) -> str | None:
    """Returns the reason why `paths` do not name distinct functions; None if they do."""
    wrong = [path for path in paths if not _FUNCTION.fullmatch(path)]
    if wrong:
        which = f": {', '.join(map(shortened, wrong))}" if len(paths) > 1 else ""
        return f"not the path of a function, package.module:function{which}"
    names = [path.replace(":", ".") for path in paths]
    twice = sorted({path for path in paths if names.count(path.replace(":", ".")) > 1})
    return f"{twice[0]} is given twice" if twice else None


ROWS = (
    Row(("use_sft", "sft_train_on_completion_only", "chat_template", "formatting_func_kwargs"), step=False),
    Row(("chat_template_path",), step=False, path=Place.LOCAL),
    Row(("formatting_func_path",), step=False, code=True),
)
CHECKS: tuple[Check, ...] = (
    refused(tuple(METHODS), lambda c: sum(c[key] for key in METHODS) > 1, "a run uses only one of these methods"),
    refused(
        ("chat_template", "chat_template_path"),
        lambda c: c.chat_template and c.chat_template_path,
        "give only one of them",
    ),
    refused(
        ("chat_template",),
        lambda c: c.chat_template and "{{" not in c.chat_template and "{%" not in c.chat_template,
        "this is not a template; give a template's file with chat_template_path",
    ),
    (("formatting_func_path",), lambda c: functions_problem([*filter(None, [c.formatting_func_path])])),
)


def columns_problem(config: Config, key: str) -> str | None:
    """Returns the reason why the columns that `key` names cannot contain the records of the training method; None if
    they can."""
    columns = config[key]
    if has_rollouts(config):
        named = columns and all(columns) and len(set(columns)) == len(columns)
        return None if named else "must be the prompts' column and the columns for reward functions, without repetition"
    if config.use_sft and config.formatting_func_path:
        return None if columns and all(columns) else "must be the columns that the function reads"
    said = [column for column in columns if not config.use_sft or column != TOOLS]
    if len(said) in (1, 2) and all(said):
        return None
    if config.use_sft:
        return f"must be one column of messages, or two (prompts and completions), and optionally the column {TOOLS}"
    return "must be one column, or two: prompts and completions"


def not_conversations(config: Config) -> list[str]:
    """Returns one message for each key that prevents trainer.sft from reading conversations."""
    return not_texts(
        config, "conversations", "/data/chats.jsonl train_data_columns=messages eval_data_columns=messages"
    )


def not_texts(config: Config, what: str, example: str) -> list[str]:
    """Returns one message for each key that prevents a command from reading `what`, which a template and a tokenizer
    convert to tokens. `example`: files and columns to suggest in a message."""
    lines = []
    if config.dataset_type in ("stdlib", "synthetic"):
        lines.append(
            f"dataset_type={config.dataset_type} has no {what}; use grain, hf or tfds, such as "
            f"dataset_type=grain grain_file_type=jsonl grain_train_files={example}"
        )
    elif token_files(config) or (config.dataset_type == "grain" and config.grain_file_type == "text"):
        lines.append(f"grain_file_type={config.grain_file_type} has no {what}; use jsonl, parquet or arrayrecord")
    else:
        lines += [
            f"{key}=false: {what} are text, which a template and the tokenizer convert to tokens; set {key}=true"
            for key in ("tokenize_train_data", "tokenize_eval_data")
            if not config[key]
        ]
    model = config.load_parameters_path or (config.use_distill and config.teacher_path)
    if not config.tokenizer_path and config.tokenizer_type != "bytes" and not model:
        lines.append(
            f"tokenizer_path is empty, and a tokenizer is not trained on {what}; give the model to "
            "fine-tune, load_parameters_path=FOLDER, or its tokenizer, tokenizer_path=FOLDER"
        )
    return lines


INERT = (
    Inert(
        ("formatting_func_path", "formatting_func_kwargs"), lambda c: not c.use_sft and not c.use_dpo, "use_sft=false"
    ),
    Inert(("formatting_func_kwargs",), lambda c: not c.formatting_func_path, "formatting_func_path is empty"),
    Inert(
        ("chat_template", "chat_template_path"),
        lambda c: not (c.use_sft or c.use_dpo or c.use_chat_template),
        "use_sft=false and use_chat_template=false",
    ),
    Inert(("add_bos", "add_eos"), lambda c: c.use_sft, "the chat template writes the special tokens"),
)

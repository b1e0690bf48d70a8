"""Converts the arguments of MaxText commands that a model family declares in `Facts.maxtext_words`.

Such an argument has another form in this trainer, or is needless because every model of the family has its value.
"""

from collections.abc import Mapping, Sequence

from trainer.config.environment import PREFIX
from trainer.config.family import facts_of, families
from trainer.config.files import COMMAND_LINE, ENVIRONMENT, PRESETS, read_file
from trainer.config.keys import Config
from trainer.config.maxtext import verdicts
from trainer.maxtext.rows import REFUSED, Row, in_environment
from trainer.maxtext.shell_words import has_variable


def of_family(rows: Sequence[Row], given: Mapping[str, str]) -> list[Row]:
    """Returns `rows` with the verdicts of the command's model family (`Facts.maxtext_words`).

    `given`: a dict from each key of the command to its value as text.
    """
    block = given.get("decoder_block") or _of_preset(given.get("model_name", ""))
    facts = facts_of(Config({"decoder_block": block})) if block in families() else None
    words = facts.maxtext_words if facts else {}
    used = [ours for theirs, ours in words.items() if _is_given(theirs, given)]
    return [_verdict(row, words, used, block) for row in rows]


def _of_preset(name: str) -> str:
    path = PRESETS / f"{(verdicts.alias(name) or {}).get('model_name', name)}.yml"
    entries = read_file(path)[0] if path.is_file() else []
    return next((entry.given for entry in entries if entry.name == "decoder_block"), "")


def _is_given(word: str, given: Mapping[str, str]) -> bool:
    name, _, text = word.partition("=")
    return given.get(name, "").lower() == text


def _verdict(row: Row, words: Mapping[str, str], used: Sequence[str], block: str) -> Row:
    name, _, text = row.given.partition("=")
    prefix = PREFIX if in_environment(row) else ""
    name = name.removeprefix(prefix).lower()
    ours = words.get(f"{name}={text.lower()}")
    if ours:
        key, _, value = ours.partition("=")
        word = f"{prefix}{key.upper() if prefix else key}={value}"
        return Row(row.given, verdicts.RENAMED, f"here, this is {ours}", word)
    if ours is not None:
        return Row(row.given, verdicts.NEEDLESS, f"models of decoder_block={block} always have it", "")
    if replaced := [word for word in used if word.startswith(f"{name}=")]:
        return Row(row.given, verdicts.NEEDLESS, f"{replaced[0]} takes its place", "")
    always = [theirs for theirs, it in words.items() if not it and theirs.startswith(f"{name}=")]
    if not always or has_variable(text):
        return row
    where = f"{ENVIRONMENT}{name}" if prefix else COMMAND_LINE
    why = f"models of decoder_block={block} always have {always[0]}"
    return Row(row.given, REFUSED, why, row.given, f"{row.given} ({where}): {why}")

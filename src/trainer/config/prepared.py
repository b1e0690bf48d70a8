"""Reads the values of the data keys from the folder at prepared_path, which trainer.prepare made."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.config.capabilities.chat_keys import METHODS
from trainer.config.capabilities.data_keys import FILTERS, OWN_KEYS
from trainer.config.dump import to_flow
from trainer.config.errors import UserError, shortened
from trainer.config.limits import JSON_BYTES
from trainer.config.paths import local_path
from trainer.config.reader import Setting
from trainer.config.saved import read_saved
from trainer.config.schema import schema

# Names in the folder: the file of its keys, the file that describes its contents (written last), and the subfolder with
# the tokenizer's files.
CONFIG, MANIFEST, TOKENIZER = "config.yml", "prepared.json", "tokenizer"
# The keys that both determine the rows and are needed in training. With prepared_path, they have the folder's values.
_KEYS = (
    *(key for keys in OWN_KEYS.values() for key in keys),
    *("dataset_type", "train_split", "train_data_columns", "eval_data_columns", "tokenize_train_data"),
    *("tokenize_eval_data", "held_out_share", "tokenizer_type", "add_bos", "add_eos", "packing", "grain_packing_type"),
    *("max_segments_per_seq", "use_truncation", "max_target_length", "sft_train_on_completion_only", "batch_invariant"),
    *("prepare_part_mib", "dpo_max_prompt_length"),
)
_TEMPLATES = ("chat_template", "chat_template_path", "formatting_func_path", "formatting_func_kwargs")
# All keys that determine the rows. Training needs only `_KEYS`: it reads the chat template from the tokenizer's files,
# and the rows are already filtered.
DETERMINING = (*_KEYS, *_TEMPLATES, *FILTERS)


def of_prepared(
    place: str, known: Mapping[str, Setting], given: Mapping[str, Setting]
) -> tuple[dict[str, Setting], list[str]]:
    """Returns the settings that the folder `place` determines, and an error for each given key that contradicts the
    folder.

    Args:
      place: the value of prepared_path.
      known: the settings of all keys.
      given: the settings that the user gave.

    Raises:
      UserError: the folder cannot be read.
    """
    where, saved = f"prepared_path={place}", saved_keys(place)
    mistakes = [
        f"{where} was prepared with {method}={to_flow(saved[method])}, and this command has "
        f"{method}={to_flow(known[method].value)}: {command} trains on rows with {method}=true"
        for method, (command, _) in METHODS.items()
        if saved[method] != known[method].value
    ]
    for name in DETERMINING:
        if name in given and to_flow(given[name].value) != to_flow(saved[name]):
            mistakes.append(
                f"{name}={shortened(to_flow(given[name].value))} ({given[name].where}), but {where} was prepared with "
                f"{shortened(to_flow(saved[name]))}; leave it out, or prepare the data again"
            )
    settings = {name: Setting(saved[name], where) for name in _KEYS}
    if (local_path(place) / TOKENIZER).is_dir() and saved["tokenizer_type"] != "bytes":
        settings["tokenizer_path"] = Setting(str(local_path(place) / TOKENIZER), where)
    return settings, mistakes


def saved_keys(place: str) -> dict[str, Any]:
    """Returns the values of all keys with which the folder `place` was prepared. Raises UserError if the folder is
    incomplete or cannot be read."""
    folder = local_path(place, "prepared_path=")
    if not (folder / MANIFEST).is_file():
        raise UserError(
            f"prepared_path={place}: the folder has no {MANIFEST}, so trainer.prepare did not complete it; run "
            "trainer.prepare again"
        )
    return keys_in(folder)


def keys_in(folder: Path) -> dict[str, Any]:
    """Returns the values of all keys, as saved in the file CONFIG of `folder`. The folder itself may be incomplete.
    Raises UserError if the file cannot be read."""
    try:
        with (folder / CONFIG).open("rb") as file:
            text = file.read(JSON_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{folder / CONFIG} cannot be read: {error}") from error
    # A folder from an earlier version may lack newer keys, so start from the defaults.
    return {name: key.default for name, key in schema().keys.items()} | read_saved(text, str(folder / CONFIG))

"""The folder that trainer.prepare makes. It contains all data that training reads.

prepared.json (written last) lists the folders of rows and the weights of the mixture, and identifies the data.
config.yml contains the configuration, and tokenizer/ contains the tokenizer's files.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.config.dump import to_yaml
from trainer.config.errors import UserError, shortened
from trainer.config.json_files import Field, field_problems, read_object, shown
from trainer.config.keys import Config
from trainer.config.paths import local_path
from trainer.config.prepared import CONFIG, MANIFEST, TOKENIZER
from trainer.data.prepare import Rows, read_rows
from trainer.data.tokenizer import Tokenizer
from trainer.data.tokenizer_files import load_tokenizer
from trainer.runtime.folders import check_folder, replace_file

FORMAT = 1


@dataclass(frozen=True)
class Prepared:
    """The rows of a data set.

    Attributes:
      name: the data set's name.
      labels, weights, train: the name, the weight and the rows of each component of the training data.
      evaluation: the held-out rows; None if there is no evaluation.
      noun: the word for a record in messages; "" means document.
      limit: the upper bound (exclusive) of the token ids in the rows.
      identity: the entries of `Dataset.identity` except `order`.
    """

    name: str
    labels: Sequence[str]
    weights: Sequence[int]
    train: Sequence[Rows]
    evaluation: Rows | None
    noun: str
    limit: int
    identity: dict[str, Any]


def write_place(place: Path, prepared: Prepared, tokenizer: Tokenizer | None, config: Config) -> None:
    """Writes the tokenizer's files, the configuration and the manifest into `place`, the folder that contains the rows.

    Raises:
      OSError: a file cannot be written.
    """
    for name, data in (tokenizer.saved_files() if tokenizer else {}).items():
        file = place / TOKENIZER / name
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, data)
    replace_file(place / CONFIG, to_yaml(config))
    manifest = {
        "format": FORMAT,
        "name": prepared.name,
        "labels": [*prepared.labels],
        "weights": [*prepared.weights],
        "train": [rows.folder.name for rows in prepared.train],
        "evaluation": prepared.evaluation.folder.name if prepared.evaluation else None,
        "noun": prepared.noun,
        "limit": prepared.limit,
        "tokenizer": tokenizer is not None,
        "identity": prepared.identity,
    }
    replace_file(place / MANIFEST, json.dumps(manifest, indent=1) + "\n")


_FIELDS = {
    "format": Field(int, 1, FORMAT),
    "name": Field(str),
    "labels": Field(list, item=str),
    "weights": Field(list, item=int),
    "train": Field(list, item=str),
    "evaluation": Field(str, null=True),
    "noun": Field(str),
    "limit": Field(int, 1),
    "tokenizer": Field(bool),
    "identity": Field(dict),
}


def read_place(place: Path) -> tuple[Prepared, bool]:
    """Returns the rows in the folder `place`, and whether the folder has a tokenizer.

    Raises:
      UserError: a file is missing or damaged.
    """
    check_folder(place)
    found = read_object(place / MANIFEST)
    problems = [f"{name} is missing" for name in _FIELDS if name not in found] or field_problems(found, _FIELDS)
    names = [*found.get("train", ()), *filter(None, [found.get("evaluation")])] if not problems else []
    problems += [
        f"{shortened(name)!r} is not a folder name" for name in names if Path(name).name != name or name in ("", "..")
    ]
    if not problems and not 0 < len(found["train"]) == len(found["weights"]) == len(found["labels"]):
        problems.append("train, weights and labels differ in length")
    if not problems and min(found["weights"]) < 1:
        problems.append("weights must be positive")
    if problems:
        raise UserError(f"{place / MANIFEST} is damaged: {'; '.join(problems)}; prepare the data again")
    limit = found["limit"]
    train = [read_rows(place / name, limit) for name in found["train"]]
    evaluation = read_rows(place / found["evaluation"], limit) if found["evaluation"] else None
    length = found["identity"].get("length")
    if any(rows.source.length != length for rows in [*train, *([evaluation] if evaluation else [])]):
        raise UserError(
            f"{place / MANIFEST} is damaged: its rows do not have {shown(length)} tokens; prepare the data again"
        )
    own = (found["name"], found["labels"], found["weights"], train, evaluation, found["noun"], limit, found["identity"])
    return Prepared(*own), found["tokenizer"]


def open_place(config: Config) -> tuple[Prepared, Tokenizer | None]:
    """Returns the rows at prepared_path, and their tokenizer (None if the folder has no tokenizer).

    Raises:
      UserError: a file is missing or damaged, or a key contradicts the folder.
    """
    place = local_path(config.prepared_path, "prepared_path=")
    prepared, has_tokenizer = read_place(place)
    if prepared.limit > config.vocab_size:
        raise UserError(
            f"vocab_size={config.vocab_size}, but prepared_path={place} has ids up to {prepared.limit - 1}: set "
            f"vocab_size={prepared.limit} or more"
        )
    if prepared.train[0].source.length != config.max_target_length:
        raise UserError(
            f"{place / CONFIG} is damaged: it has max_target_length={config.max_target_length}, but the rows have "
            f"{prepared.train[0].source.length} tokens; prepare the data again"
        )
    if config.eval_interval > 0 and prepared.evaluation is None:
        raise UserError(
            f"eval_interval={config.eval_interval}, but prepared_path={place} has nothing to evaluate on: set "
            "eval_interval=-1, or prepare the data again with evaluation"
        )
    if not has_tokenizer:
        return prepared, None
    tokenizer = tokenizer_of(place, prepared, config)
    if config.tokenizer_type != "bytes" and config.tokenizer_path != str(place / TOKENIZER):
        settings = {"add_bos": config.add_bos, "add_eos": config.add_eos}
        other = load_tokenizer(config.tokenizer_path, config.tokenizer_type, **settings)
        if other.fingerprint != tokenizer.fingerprint:
            raise UserError(
                f"tokenizer_path={config.tokenizer_path} is not the tokenizer of prepared_path={place}; leave it out"
            )
    return prepared, tokenizer


def tokenizer_of(place: Path, prepared: Prepared, keys: Mapping[str, Any]) -> Tokenizer:
    """Returns the tokenizer in the folder `place`. `keys`: the configuration. Raises UserError if the tokenizer is
    damaged."""
    kind, folder = keys["tokenizer_type"], place / TOKENIZER
    settings = {"add_bos": keys["add_bos"], "add_eos": keys["add_eos"]}
    tokenizer = load_tokenizer("" if kind == "bytes" else str(folder), kind, **settings)
    if (now := short(tokenizer.fingerprint)) != (then := prepared.identity.get("tokenizer")):
        raise UserError(f"{folder} is damaged: its hash was {then} and is {now}; prepare the data again")
    return tokenizer


def short(facts: Any) -> str:
    """Returns a short hash of the `repr` of a value."""
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:12]

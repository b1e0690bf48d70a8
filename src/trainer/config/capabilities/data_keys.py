"""Checks of the data keys: contradictory settings, and settings without effect."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from trainer.config.capabilities.chat_keys import METHODS, columns_problem, functions_problem
from trainer.config.capabilities.preference_keys import pair_columns_problem
from trainer.config.capabilities.token_keys import token_files
from trainer.config.derived import has_rollouts
from trainer.config.errors import UserError, shortened
from trainer.config.files import DEFAULT
from trainer.config.json_files import read_object
from trainer.config.key_rows import Check, Inert, Place, Problem, Resume, Row, left_out, only_if, refused
from trainer.config.keys import Config
from trainer.config.paths import local_path
from trainer.config.schema import schema

# The keys that only one dataset_type reads.
OWN_KEYS = {
    "tfds": ("dataset_path", "dataset_name", "eval_dataset_name", "eval_split"),
    "grain": ("grain_train_files", "grain_eval_files", "grain_train_mixture_config_path", "grain_file_type"),
    "hf": ("hf_path", "hf_name", "hf_data_dir", "hf_train_files", "hf_eval_split", "hf_eval_files"),
}
# The keys that each dataset_type requires, each with an example of its value.
_NEEDED = {
    "tfds": {"dataset_path": "/data/tensorflow_datasets", "dataset_name": "c4/en:3.0.1"},
    "grain": {"grain_train_files": "/data/*.arrayrecord"},
    "hf": {"hf_path": "/data/a_dataset"},
}
# The keys that change or drop records.
FILTERS = (
    *("document_normalization", "document_filter", "document_min_length", "document_max_length"),
    "drop_duplicates",
)
_COLUMNS = ("train_data_columns", "eval_data_columns", "tokenize_train_data", "tokenize_eval_data")
_TEXT = (
    *("data_cache_directory", "tokenizer_path", "tokenizer_type", "add_bos", "add_eos", "packing"),
    *("grain_packing_type", "max_segments_per_seq", "use_truncation", "enable_data_shuffling"),
)
# The syntax of a mixture's weight. Exponents are limited because a Fraction of 1e999999999 would exhaust memory.
_WEIGHT = re.compile(r"[0-9./]{1,24}(e[+-]?[0-9]{1,2})?", re.IGNORECASE)


def parse_mixture(files: str, config_path: Any) -> list[tuple[str, Fraction]]:
    """Returns pairs of a glob and its weight, from `files` or, if `config_path` is given, from the JSON file at
    `config_path`.

    Args:
      files: the value of grain_train_files: `glob`, `glob;glob` or `glob,weight;glob,weight`.
      config_path: a local path as a string, or an object with pathlib's `open`. The file contains
        {name: {"path": glob, "weight": number}}.

    Raises:
      UserError: the text or the file is malformed.
    """
    if config_path:
        local = isinstance(config_path, str)
        pairs = _read_mixture(local_path(config_path, "grain_train_mixture_config_path=") if local else config_path)
    else:
        parts = [part.strip() for part in files.split(";") if part.strip()]
        weighted = [part.rpartition(",") for part in parts]
        if (len(parts) == 1 and "," not in parts[0]) or all("," not in part for part in parts):
            pairs = [(part, "1") for part in parts]
        else:
            pairs = [(pattern.strip(), weight.strip()) for pattern, _, weight in weighted]
    result = []
    for pattern, weight in pairs:
        try:
            value = Fraction(weight if _WEIGHT.fullmatch(weight) else 0)
        except (ValueError, ZeroDivisionError):
            value = Fraction(0)
        if not pattern or value <= 0:
            braces = " (a comma separates a weight; braces are not expanded)" if "{" in files else ""
            braces = " (in a URL, write %2C for a comma and %3B for a semicolon)" if "://" in files else braces
            raise UserError(
                f"{shortened(pattern or files)!r} with weight {shortened(weight)!r} is not a valid part of a "
                f"mixture{braces}; write glob,weight;glob,weight with positive weights"
            )
        result.append((pattern, value))
    if not result:
        raise UserError(f"{files!r} names no files")
    return result


def _read_mixture(path: Any) -> list[tuple[str, str]]:
    try:
        return [(str(entry["path"]), str(entry["weight"])) for entry in read_object(path).values()]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f'grain_train_mixture_config_path={path} is not {{"name": {{"path": glob, "weight": number}}, ...}} '
            f"({type(error).__name__}: {error})"
        ) from error


def _pipeline(config: Config) -> str | None:
    if config.data_pipeline == "streaming" and config.dataset_type in ("stdlib", "synthetic"):
        why = "is prepared in seconds" if config.dataset_type == "stdlib" else "is generated row by row"
        return f"{config.dataset_type} {why}, so streaming is not needed; set data_pipeline=prepared"
    return None


def _passes(config: Config) -> str | None:
    if config.num_epoch == 1:
        return None
    why = ""
    if config.data_pipeline == "streaming":
        why = "data_pipeline=streaming does not count the rows of a pass"
    elif config.dataset_type == "synthetic":
        why = "dataset_type=synthetic has no end"
    elif config.reuse_example_batch:
        why = "reuse_example_batch=1 trains on the first batch only"
    elif _compiles(config):
        why = "trainer.train_compile reads no data"
    elif has_rollouts(config) and config.num_batches > 0:
        why = "num_batches ends the run"
    elif config.dataset_type == "grain" and (config.grain_train_mixture_config_path or ";" in config.grain_train_files):
        why = "each part of a mixture has its own passes"
    return why and f"{why}; leave it out, and give steps=N"


def _compiles(config: Config) -> bool:
    """Returns whether the configuration is for trainer.train_compile, which reads no data."""
    return bool(config.compile_topology)


def _demands(kind: str, key: str) -> Problem:
    example = _NEEDED[kind][key]

    def problem(config: Config) -> str | None:
        empty = config.dataset_type == kind and not config[key] and not _compiles(config)
        return f"dataset_type={kind} needs {key}, such as {key}={example}" if empty else None

    return problem


def _grain_files(config: Config) -> str | None:
    if config.dataset_type != "grain":
        return None
    if not config.grain_train_files and not config.grain_train_mixture_config_path:
        if _compiles(config):
            return None
        return f"dataset_type=grain needs files, such as grain_train_files={_NEEDED['grain']['grain_train_files']}"
    if config.prepared_path:
        return None
    if config.grain_train_files and config.grain_train_mixture_config_path:
        return "both name the training files; give only one of them"
    if "://" in config.grain_train_mixture_config_path:
        return None  # a remote file is read and checked when the data are opened
    try:
        parse_mixture(config.grain_train_files, config.grain_train_mixture_config_path)
    except UserError as error:
        return str(error)
    return None


def _grain_eval_files(config: Config) -> str | None:
    if config.dataset_type == "grain" and "," in config.grain_eval_files:
        braces = ", and braces are not expanded" if "{" in config.grain_eval_files else ""
        return f"evaluation reads all its files once, without weights{braces}; write glob;glob"
    return None


def _columns(key: str) -> Problem:
    def problem(config: Config) -> str | None:
        return (pair_columns_problem if config.use_dpo else columns_problem)(config, key)

    return problem


def _tokenizer_path(config: Config) -> str | None:
    kind = config.tokenizer_type
    if config.dataset_type == "synthetic" or _compiles(config):
        return None
    given = config.tokenizer_path or token_files(config)
    if kind in ("huggingface", "sentencepiece", "tiktoken") and not given:
        example = {"sentencepiece": "tokenizer.model", "tiktoken": "tokenizer.tiktoken"}.get(kind, "tokenizer.json")
        return f"tokenizer_type={kind} needs a file, such as tokenizer_path=/data/{example}; or tokenizer_type=auto"
    if kind == "bytes" and config.tokenizer_path:
        return "tokenizer_type=bytes takes no file; leave one of them out"
    return None


def _tokenize(config: Config) -> str | None:
    if config.dataset_type in ("stdlib", "synthetic") or token_files(config) or config.tokenize_train_data:
        return None
    if config.dataset_type == "grain" and config.grain_file_type == "text":
        return "text files do not hold token ids; set tokenize_train_data=true"
    if config.tokenize_eval_data and not config.tokenizer_path and config.tokenizer_type != "bytes":
        return "a tokenizer cannot be trained on token ids; set tokenizer_path, or tokenize_eval_data=false"
    return None


def _stdlib(key: str, least: int, why: str) -> Problem:
    def problem(config: Config) -> str | None:
        too_small = config.dataset_type == "stdlib" and config[key] < least
        return f"must be at least {least}: {why}" if too_small else None

    return problem


def _trained_vocabulary(config: Config) -> str | None:
    if config.tokenizer_path or config.tokenizer_type == "bytes":
        return None
    return _stdlib("vocab_size", 257, "256 bytes and an end-of-document token")(config)


ROWS = (
    Row(
        (
            *("dataset_type", "data_pipeline", "train_split", "train_data_columns", "held_out_share"),
            *("grain_file_type", "grain_worker_count", "grain_shuffle_buffer_size", "tokenizer_type", "add_bos"),
            *("add_eos", "packing", "tokenize_train_data", "grain_packing_type", "max_segments_per_seq"),
            "use_truncation",
            *("reuse_example_batch", "enable_data_shuffling", "data_shuffle_seed"),
        ),
        step=False,
    ),
    Row(("hf_path", "tokenizer_path"), step=False, path=Place.LOCAL),
    Row(
        ("grain_train_files", "grain_train_mixture_config_path", "hf_train_files", "dataset_path"),
        step=False,
        path=Place.DATA,
    ),
    Row(("dataset_name", "hf_name", "hf_data_dir"), step=False, path=Place.ANY),  # may be relative to another path
    Row(("document_filter",), step=False, code=True),
    Row(tuple(key for key in FILTERS if key != "document_filter"), step=False),
    Row(("eval_split", "eval_data_columns", "tokenize_eval_data", "hf_eval_split"), Resume.AROUND, step=False),
    Row(("data_cache_directory", "prepared_path"), Resume.AROUND, step=False, path=Place.LOCAL),
    Row(("remote_copies_gib",), Resume.AROUND, step=False),
    # If a change of these keys changes the rows, the fingerprint of the data changes, too.
    Row(("prepare_part_mib", "prepare_workers"), Resume.AROUND, step=False),
    Row(("grain_eval_files", "hf_eval_files"), Resume.AROUND, step=False, path=Place.DATA),
    Row(("eval_dataset_name",), Resume.AROUND, step=False, path=Place.ANY),
    Row(("num_epoch",), Resume.LENGTH, step=False),
)
CHECKS: tuple[Check, ...] = (
    (("dataset_type", "data_pipeline"), _pipeline),
    refused(
        ("prepared_path", "data_pipeline"),
        lambda c: c.prepared_path and c.data_pipeline == "streaming",
        "prepared_path contains prepared rows; set data_pipeline=prepared",
    ),
    refused(
        ("prepared_path", "use_grpo", "distill_rollouts"),
        lambda c: c.prepared_path and has_rollouts(c),
        "rollouts begin with prompts, which are not prepared; leave prepared_path out, and name the prompts' files",
    ),
    refused(
        ("drop_duplicates", "data_pipeline"),
        lambda c: c.drop_duplicates and c.data_pipeline == "streaming",
        "duplicates are found before training; set data_pipeline=prepared",
    ),
    refused(
        ("drop_duplicates", "use_grpo", "distill_rollouts"),
        lambda c: c.drop_duplicates and has_rollouts(c),
        "prompts are not searched for duplicates; leave drop_duplicates out",
    ),
    refused(
        ("document_min_length", "document_max_length"),
        lambda c: 0 < c.document_max_length < c.document_min_length,
        "no record has such a length",
    ),
    (("document_filter",), lambda c: functions_problem([*filter(None, [c.document_filter])])),
    *only_if(token_files, (left_out(key, "the files contain token ids, which are not filtered") for key in FILTERS)),
    (("num_epoch",), _passes),
    (("dataset_type", "dataset_path"), _demands("tfds", "dataset_path")),
    (("dataset_type", "dataset_name"), _demands("tfds", "dataset_name")),
    (("dataset_type", "hf_path"), _demands("hf", "hf_path")),
    (("dataset_type", "grain_train_files", "grain_train_mixture_config_path"), _grain_files),
    (("grain_eval_files",), _grain_eval_files),
    refused(
        ("hf_data_dir",),
        lambda c: c.dataset_type == "hf" and "://" in c.hf_data_dir,
        "remote folders are not supported; set hf_path=json (or csv, ...) and name the files with hf_train_files",
    ),
    (("train_data_columns", *METHODS), _columns("train_data_columns")),
    (("eval_data_columns", *METHODS), _columns("eval_data_columns")),
    (("tokenizer_type", "tokenizer_path"), _tokenizer_path),
    (("dataset_type", "tokenize_train_data", "tokenize_eval_data"), _tokenize),
    (("dataset_type", "vocab_size"), _trained_vocabulary),
    (
        ("dataset_type", "max_target_length"),
        _stdlib("max_target_length", 16, "shorter rows would number in the millions"),
    ),
)


def data_not_asked_for(
    config: Config, where: Mapping[str, str], changed: Mapping[str, str], maxtext_base: str | None
) -> list[str]:
    """Returns one message for each dataset_type whose keys are given although dataset_type itself is not.

    MaxText's default is tfds, so a MaxText user may leave dataset_type out. This trainer must not silently train on its
    default data instead of the data that the user's keys name.

    Args:
      where: a dict from each key to a description of the source of its value.
      changed: the keys that the user's yml, the command line or the environment gives, each with its source.
      maxtext_base: the path of MaxText's base.yml if the user gives this file. The dataset_type in this file counts as
        a default.
    """
    if where["dataset_type"] != DEFAULT:
        return []

    def given(keys: Sequence[str]) -> list[str]:
        own = [key for key in keys if key in changed and config[key] != schema().keys[key].default]
        return [f"{key}={shortened(str(config[key]))} ({where[key]})" for key in own]

    def also(kind: str) -> str:
        if kind == "grain" and config.grain_train_mixture_config_path:
            return ""
        return "".join(f" {key}={example}" for key, example in _NEEDED[kind].items() if not config[key])

    named = {kind: given(keys) for kind, keys in OWN_KEYS.items()}
    # Both tfds and hf read train_split.
    named[next((kind for kind in ("tfds", "hf", "grain") if named[kind]), "tfds")] += given(["train_split"])
    missing, scope = "dataset_type is not given", ""
    if maxtext_base:
        missing = f"dataset_type is not given (the line in {maxtext_base} counts as a default)"
        scope = " on the command line"
    ours = config.dataset_type
    return [
        f"{', '.join(keys)}: names data, but {missing}, and its default {ours} reads other data; "
        f"add dataset_type={kind}{also(kind)}{scope}, or dataset_type={ours} to train on the default data"
        for kind, keys in named.items()
        if keys
    ]


def _remote_files(config: Config) -> bool:
    if config.dataset_type == "grain":
        files = (config.grain_train_files, config.grain_eval_files)
        return bool(config.grain_train_mixture_config_path) or "://" in ";".join(files)
    return config.dataset_type == "hf" and "://" in f"{config.hf_train_files};{config.hf_eval_files}"


def _other_type(kind: str) -> Callable[[Any], bool]:
    return lambda config: config.dataset_type != kind


def _prepares_nothing(config: Config) -> bool:
    return config.dataset_type == "synthetic" or bool(config.prepared_path or token_files(config))


INERT = (
    Inert(
        ("prepare_part_mib", "prepare_workers"),
        lambda c: _prepares_nothing(c) or (c.data_pipeline == "streaming" and c.eval_interval <= 0),
        "nothing is prepared",
    ),
    Inert(FILTERS, lambda c: c.dataset_type == "synthetic", "dataset_type=synthetic has no documents"),
    Inert(
        ("data_cache_directory",),
        lambda c: c.dataset_type == "synthetic" or c.prepared_path,
        "dataset_type=synthetic and prepared_path use no cache",
    ),
    *(Inert(keys, _other_type(kind), f"dataset_type is not {kind}") for kind, keys in OWN_KEYS.items()),
    Inert(("remote_copies_gib",), lambda c: not _remote_files(c), "no data files are named by URL"),
    Inert(("train_split",), lambda c: c.dataset_type not in ("tfds", "hf"), "dataset_type is neither tfds nor hf"),
    Inert(_COLUMNS, lambda c: c.dataset_type in ("stdlib", "synthetic"), "dataset_type has its own files"),
    Inert(
        ("train_data_columns", "eval_data_columns"),
        lambda c: c.dataset_type == "grain" and c.grain_file_type == "text",
        "grain_file_type=text has no columns",
    ),
    Inert(
        ("held_out_share",),
        lambda c: c.dataset_type in ("stdlib", "synthetic"),
        "dataset_type has its own held-out rows",
    ),
    Inert(
        ("held_out_share",),
        lambda c: bool(
            (c.dataset_type == "grain" and c.grain_eval_files)
            or (c.dataset_type == "tfds" and c.eval_split)
            or (c.dataset_type == "hf" and (c.hf_eval_split or c.hf_eval_files))
        ),
        "evaluation has its own documents",
    ),
    Inert(
        ("sft_train_on_completion_only",),
        lambda c: not c.use_sft and len(c.train_data_columns) == 1 and len(c.eval_data_columns) == 1,
        "there is one column",
    ),
    Inert(
        tuple(key for key in _TEXT if key not in ("data_cache_directory", "enable_data_shuffling", "packing")),
        lambda c: c.dataset_type == "synthetic",
        "dataset_type=synthetic has no documents",
    ),
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
    Inert(("grain_worker_count",), lambda c: c.data_pipeline == "prepared", "data_pipeline=prepared"),
    Inert(
        ("grain_shuffle_buffer_size",),
        lambda c: c.data_pipeline == "prepared" or not c.enable_data_shuffling,
        "data_pipeline=prepared, or enable_data_shuffling=false",
    ),
    Inert(("grain_packing_type", "max_segments_per_seq"), lambda c: not c.packing, "packing=false"),
    Inert(
        ("use_truncation",),
        lambda c: c.packing and c.grain_packing_type == "concat_then_split",
        "grain_packing_type=concat_then_split",
    ),
)


def without_rows(words: Iterable[str]) -> dict[str, int]:
    """Returns a default of max_target_length, as {"max_target_length": length}, for a command that makes no rows.

    The length is at most trainable_position_size, which is the number of learned positions. Returns {} if
    max_target_length is given or trainable_position_size is not given. `words`: the command's key=value arguments.
    """
    given = dict(word.partition("=")[::2] for word in words)
    positions, default = given.get("trainable_position_size", ""), schema().keys["max_target_length"].default
    if "max_target_length" in given or not positions.isdecimal():
        return {}
    return {"max_target_length": min(int(positions), default)}

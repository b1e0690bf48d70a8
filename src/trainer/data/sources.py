"""Finds the documents that the keys of each dataset_type select."""

import contextlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from trainer.config.capabilities.data_keys import parse_mixture
from trainer.config.errors import UserError, nearest, shortened
from trainer.config.json_files import read_object
from trainer.config.keys import Config
from trainer.config.paths import local_path
from trainer.data.cache import Progress, cache_root
from trainer.data.corpus import Corpus, file_fingerprint
from trainer.data.example_proto import parse_example
from trainer.data.filters import Filters, filters_of
from trainer.data.found import announce_copies, find_files, train_mixture
from trainer.data.mixture import whole_weights
from trainer.data.readers import (
    ArrayRecordPart,
    Columns,
    FilePart,
    JsonlPart,
    NoColumn,
    ParquetPart,
    Part,
    TextPart,
    TfrecordPart,
)
from trainer.runtime.folders import check_folder
from trainer.runtime.remote import each


@dataclass(frozen=True)
class Source:
    """The corpora for training, each with a weight, and the corpus for evaluation; None: nothing is held out."""

    name: str
    train: tuple[Corpus, ...]
    weights: tuple[int, ...]
    evaluation: tuple[Corpus, ...]


def open_source(config: Config, say: Progress = lambda line: None) -> Source:
    """Returns the source that the keys select. `say` gets lines about replaced text.

    Raises UserError if a file or column is missing, empty or damaged.
    """
    source = _OPEN[config.dataset_type](config, say)
    if (filters := filters_of(config)) != Filters():
        train, held_out = (
            tuple(replace(corpus, filters=filters) for corpus in some) for some in (source.train, source.evaluation)
        )
        source = replace(source, train=train, evaluation=held_out)
    if source.evaluation or not config.held_out_share:
        return source
    train = tuple(replace(corpus, held_out=config.held_out_share) for corpus in source.train)
    return replace(source, train=train, evaluation=tuple(replace(corpus, evaluates=True) for corpus in train))


def _stdlib(config: Config, say: Progress) -> Source:
    from trainer.data.stdlib import stdlib_corpora, stdlib_folder

    train, evaluation = stdlib_corpora(stdlib_folder())
    return Source(f"standard library of Python {_python()}", (train,), (1,), (evaluation,))


def _python() -> str:
    import platform

    return platform.python_version()


def _grain(config: Config, say: Progress) -> Source:
    mixture, kind = train_mixture(config), config.grain_file_type
    held = parse_mixture(config.grain_eval_files, "") if config.grain_eval_files else []
    train = {pattern: find_files(config, pattern, "grain_train_files") for pattern, _ in mixture}
    evaluation = {pattern: find_files(config, pattern, "grain_eval_files") for pattern, _ in held}
    every = [path for found in (train, evaluation) for paths in found.values() for path in paths]
    indexed = kind == "arrayrecord"
    copied = [path for path in every if indexed or path.suffix == ".gz"]
    announce_copies(config, copied, say, together=indexed and config.data_pipeline == "streaming")

    def corpus(pattern: str, paths: Sequence[Any], columns: Columns) -> Corpus:
        columns = ("text",) if kind == "text" else columns
        return _corpus(pattern, each(lambda path: _FORMATS[kind](path, columns), paths), columns)

    return Source(
        f"{kind} files " + "; ".join(pattern for pattern, _ in mixture),
        tuple(corpus(pattern, train[pattern], tuple(config.train_data_columns)) for pattern, _ in mixture),
        whole_weights([weight for _, weight in mixture]),
        tuple(corpus(pattern, evaluation[pattern], tuple(config.eval_data_columns)) for pattern, _ in held),
    )


def _corpus(name: str, parts: Sequence[Any], columns: Columns, also: str = "") -> Corpus:
    paths = [part.path for part in parts if isinstance(part, FilePart)]
    return Corpus(name, tuple(parts), file_fingerprint(paths, also), columns)


_FORMATS: dict[str, Callable[[Any, Columns], FilePart]] = {
    "arrayrecord": partial(ArrayRecordPart, parse=parse_example),
    "tfrecord": partial(TfrecordPart, parse=parse_example),
    "parquet": ParquetPart,
    "jsonl": JsonlPart,
    "text": TextPart,
}


def _tfds(config: Config, say: Progress) -> Source:
    columns, eval_columns = tuple(config.train_data_columns), tuple(config.eval_data_columns)
    train = _tfds_split(config.dataset_path, config.dataset_name, config.train_split, columns, "train_split")
    evaluation: tuple[Corpus, ...] = ()
    if config.eval_split:
        name = config.eval_dataset_name or config.dataset_name
        evaluation = (_tfds_split(config.dataset_path, name, config.eval_split, eval_columns, "eval_split"),)
    return Source(f"TFDS {config.dataset_name}", (train,), (1,), evaluation)


def _tfds_split(data_dir: str, name: str, split: str, columns: Columns, key: str) -> Corpus:
    import tensorflow_datasets as tfds

    folder = tfds_folder(local_path(data_dir, "dataset_path="), name)
    check_folder(folder)
    check_features(folder)
    try:
        builder = tfds.builder_from_directory(folder)
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise UserError(f"{folder} cannot be read as a TFDS dataset ({' '.join(str(error).split())[:200]})") from error
    info = builder.info
    base = re.split(r"[\[+]", split)[0]
    if base not in info.splits:
        hint = "; eval_split= holds out held_out_share of the training documents" if key == "eval_split" else ""
        raise UserError(
            f"{key}={split}: {folder} has the splits {', '.join(info.splits)}{nearest(base, info.splits)}{hint}"
        )
    if missing := [column for column in columns if column not in info.features]:
        raise NoColumn(f"{folder} has no column {missing[0]}", info.features)
    parse = _TfdsParser(str(folder))
    parts: list[Part] = []
    for shard in info.splits[split].file_instructions:
        path, whole = Path(shard.filename), shard.takes_all and not shard.skip
        if "array_record" in path.name:
            parts.append(ArrayRecordPart(path, columns, parse, shard.skip, shard.skip + shard.take))
        elif "tfrecord" in path.name and whole:
            parts.append(TfrecordPart(path, columns, parse))
        elif "tfrecord" in path.name:
            raise UserError(
                f"{key}={split}: parts of a split need ArrayRecord files, and {path} is TFRecord; take {base}"
            )
        else:
            raise UserError(
                f"{path}: TFDS files are read as array_record or tfrecord; prepare the dataset as array_record"
            )
    return _corpus(f"{name} {split}", parts, columns, split)


def check_features(folder: Path) -> None:
    """Checks that the features of a TFDS dataset are TFDS's classes, because TFDS would import any other module.

    Raises:
      UserError: features.json names a class of another package, or is not JSON.
    """
    path = folder / "features.json"
    if not path.is_file():
        return  # TFDS reports the missing file
    nodes: list[Any] = [read_object(path)]
    while nodes:
        node = nodes.pop()
        if isinstance(node, list):
            nodes += node
        if not isinstance(node, dict):
            continue
        nodes += node.values()
        for name in (node.get(key) for key in ("type", "pythonClassName", "python_class_name")):
            if isinstance(name, str) and "." in name and not name.startswith("tensorflow_datasets."):
                raise UserError(f"{path}: {shortened(name)} is not a TFDS feature; code named by data is not run")


class _TfdsParser:
    """Parses records of a TFDS dataset into features. Each reading process makes a separate parser."""

    def __init__(self, folder: str):
        self._folder, self._features = folder, None

    def __call__(self, data: bytes) -> Any:
        if self._features is None:
            import tensorflow_datasets as tfds

            self._features = tfds.builder_from_directory(self._folder).info.features
        return self._features.deserialize_example_np(data)  # type: ignore[attr-defined]

    def __getstate__(self) -> dict[str, Any]:
        return {"_folder": self._folder, "_features": None}


def tfds_folder(data_dir: Path, dataset_name: str) -> Path:
    """Returns the folder of `name[/config][:version]` in `data_dir`; without a version, the newest one."""
    name, _, version = dataset_name.partition(":")
    folder = data_dir / name
    if not folder.is_dir():
        there = ", ".join(sorted(path.name for path in data_dir.glob("*") if path.is_dir())) or "no folder"
        raise UserError(
            f"dataset_name={dataset_name}: there is no folder {folder}; dataset_path={data_dir} holds {there}"
        )
    versions = sorted(
        (path for path in folder.iterdir() if re.fullmatch(r"\d+\.\d+\.\d+", path.name)),
        key=lambda path: [int(number) for number in path.name.split(".")],
    )
    if not version and versions:
        return versions[-1]
    if not version or not (folder / version).is_dir():
        there = ", ".join(path.name for path in versions or sorted(folder.iterdir()) if not path.name.startswith("."))
        raise UserError(
            f"dataset_name={dataset_name}: {folder} holds {there or 'nothing'}; write name:version or "
            "name/config:version"
        )
    return folder / version


def _hf(config: Config, say: Progress) -> Source:
    from trainer.data.hf import BUILDERS, hf_corpus

    def remote(key: str) -> list[Any]:
        if "://" in config[key] and config.hf_path not in BUILDERS:
            raise UserError(
                f"{key}={config[key]}: URLs are read with hf_path={', '.join(BUILDERS[:-1])} or {BUILDERS[-1]}"
            )
        return find_files(config, config[key], key) if "://" in config[key] else []

    # Before `hf_corpus`, which turns requests to the hub off.
    train_files, eval_files = remote("hf_train_files"), remote("hf_eval_files")
    announce_copies(config, [*train_files, *eval_files], say, together=True)
    cache = cache_root(config.data_cache_directory) / "huggingface"
    load = partial(hf_corpus, config.hf_path, config.hf_name, config.hf_data_dir, cache, say)
    with contextlib.ExitStack() as stack:

        def local(files: list[Any], given: str) -> Any:
            return [stack.enter_context(file.copied()).name for file in files] or given

        train_from = local(train_files, config.hf_train_files)
        train = load(train_from, config.train_split, tuple(config.train_data_columns), "train_split")
        evaluation: tuple[Corpus, ...] = ()
        if config.hf_eval_files or config.hf_eval_split:
            split = config.hf_eval_split or "train"  # `datasets` uses this name for files without splits
            files = local(eval_files, config.hf_eval_files) or train_from
            evaluation = (load(files, split, tuple(config.eval_data_columns), "hf_eval_split"),)
    return Source(f"Hugging Face dataset {config.hf_path}", (train,), (1,), evaluation)


_OPEN: dict[str, Callable[[Any, Progress], Source]] = {"stdlib": _stdlib, "grain": _grain, "tfds": _tfds, "hf": _hf}

"""Opens the corpora that the configuration selects, for each dataset_type."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from trainer.config.capabilities.data_keys import parse_mixture
from trainer.config.errors import UserError
from trainer.config.keys import Config
from trainer.config.paths import without_secrets
from trainer.data.cache import Progress, cache_root
from trainer.data.corpus import Corpus, corpus_of
from trainer.data.example_proto import parse_example
from trainer.data.filters import Filters, filters_of
from trainer.data.found import announce_copies, find_files, train_mixture
from trainer.data.mixture import whole_weights
from trainer.data.readers import Columns, FilePart, JsonlPart, TextPart
from trainer.data.record_files import ArrayRecordPart, TfrecordPart
from trainer.data.tables import ParquetPart
from trainer.runtime.remote import each


@dataclass(frozen=True)
class Source:
    """The corpora for training and their weights, and the corpora for evaluation, of which there may be none."""

    name: str
    train: tuple[Corpus, ...]
    weights: tuple[int, ...]
    evaluation: tuple[Corpus, ...]


def open_source(config: Config, say: Progress = lambda line: None) -> Source:
    """Returns the source that the configuration selects. `say` is called with messages for the user.

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
    copied = [path for path in every if indexed or (kind == "jsonl" and path.suffix == ".gz")]
    announce_copies(config, copied, say, together=indexed and config.data_pipeline == "streaming")

    def corpus(pattern: str, paths: Sequence[Any], columns: Columns) -> Corpus:
        columns = ("text",) if kind == "text" else columns
        return corpus_of(without_secrets(pattern), each(lambda path: _FORMATS[kind](path, columns), paths), columns)

    return Source(
        f"{kind} files " + "; ".join(without_secrets(pattern) for pattern, _ in mixture),
        tuple(corpus(pattern, train[pattern], tuple(config.train_data_columns)) for pattern, _ in mixture),
        whole_weights([weight for _, weight in mixture]),
        tuple(corpus(pattern, evaluation[pattern], tuple(config.eval_data_columns)) for pattern, _ in held),
    )


_FORMATS: dict[str, Callable[[Any, Columns], FilePart]] = {
    "arrayrecord": partial(ArrayRecordPart, parse=parse_example),
    "tfrecord": partial(TfrecordPart, parse=parse_example),
    "parquet": ParquetPart,
    "jsonl": JsonlPart,
    "text": TextPart,
}


def _tfds(config: Config, say: Progress) -> Source:
    from trainer.data.tfds import tfds_corpus

    train = tfds_corpus(config, config.dataset_name, "train_split", tuple(config.train_data_columns), say)
    evaluation: tuple[Corpus, ...] = ()
    if config.eval_split:
        name = config.eval_dataset_name or config.dataset_name
        evaluation = (tfds_corpus(config, name, "eval_split", tuple(config.eval_data_columns), say),)
    return Source(f"TFDS {config.dataset_name}", (train,), (1,), evaluation)


def _hf(config: Config, say: Progress) -> Source:
    from trainer.data.hf import BUILDERS, hf_corpus

    def remote(key: str) -> list[Any]:
        if "://" in config[key] and config.hf_path not in BUILDERS:
            raise UserError(
                f"{key}={config[key]}: URLs are read with hf_path={', '.join(BUILDERS[:-1])} or {BUILDERS[-1]}"
            )
        patterns = config[key].split(";") if "://" in config[key] else []
        return [file for pattern in patterns for file in find_files(config, pattern.strip(), key)]

    # The remote files are listed before `hf_corpus` is called, because `hf_corpus` disables requests to the hub.
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

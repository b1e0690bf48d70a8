"""dataset_type=hf: data sets of the `datasets` library that are stored on this machine."""

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from trainer.config.errors import UserError, nearest
from trainer.config.paths import local_path
from trainer.data.corpus import Corpus, file_fingerprint
from trainer.data.hf_files import mended_table
from trainer.data.readers import Columns, NoColumn
from trainer.data.tables import TablePart, arrow_errors
from trainer.data.unpacked import check_unpacked
from trainer.runtime.attempts import turn_hub_off
from trainer.runtime.folders import check_folder

Say = Callable[[str], None]
# The builders of `datasets` that read plain files. The keys hf_train_files and hf_eval_files name these files.
BUILDERS = ("arrow", "csv", "json", "parquet", "text")


def hf_corpus(
    path: str, name: str, data_dir: str, cache: Path, say: Say, files: Any, split: str, columns: Columns, key: str
) -> Corpus:
    """Returns one split as a corpus.

    Args:
      cache: the folder in which `datasets` caches tables.
      files: the paths or globs of the data files; empty for all files of the data set at `path`.
      key: the configuration key that selects `split`; messages name it.

    Raises UserError if the split is not on this machine, or if the data set lacks the split or a column.
    """
    table = _load(path, name, data_dir, cache, say, files, split, key)
    if missing := [column for column in columns if column not in table.column_names]:
        raise NoColumn(f"{path} {split} has no column {missing[0]}", table.column_names)
    if not len(table):
        raise UserError(f"{path} {split} has no rows")
    arrow = [Path(file["filename"]) for file in table.cache_files]
    fingerprint = file_fingerprint(arrow, f"{split} {len(table)}") if arrow else _contents(table)
    part = TablePart(f"{path} {split}", table.select_columns(list(columns)), columns)
    return Corpus(f"{path} {split}", (part,), fingerprint, columns)


def _load(path: str, name: str, data_dir: str, cache: Path, say: Say, files: Any, split: str, key: str) -> Any:
    # Prevents `datasets` from sending requests to the hub. This call must come before the import, because `datasets`
    # reads the setting only then.
    turn_hub_off()
    try:
        import datasets
    except ImportError as error:
        raise UserError("dataset_type=hf needs datasets: pip install 'trainer[hf]'") from error

    datasets.disable_progress_bars()
    folder = local_path(path, "hf_path=")
    if not folder.is_dir() and path not in BUILDERS:
        raise UserError(
            f"hf_path={path}: there is no such folder on this machine, and datasets are not downloaded; "
            f"download it first, for example with `hf download --repo-type dataset {path} --local-dir FOLDER`, "
            f"and set hf_path=FOLDER; or set hf_path to a reader of plain files ({', '.join(BUILDERS)}) and set "
            "hf_train_files"
        )
    check_folder(folder)
    if path in BUILDERS and not folder.is_dir() and not files:
        raise UserError(f"hf_path={path} reads plain files: name them with hf_train_files or hf_eval_files")
    try:
        if folder.is_dir():
            for file in folder.rglob("*"):
                check_unpacked(file)
        if (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file():
            loaded = datasets.load_from_disk(str(folder))
            if isinstance(loaded, datasets.Dataset):
                return loaded
            if split not in loaded:
                raise UserError(f"{key}={split}: {path} has the splits {', '.join(loaded)}{nearest(split, loaded)}")
            return loaded[split]
        load = {
            "path": str(folder) if folder.is_dir() else path,
            "name": name or None,
            "data_dir": data_dir or None,
            "data_files": files or None,
            "split": split or None,
            "cache_dir": str(cache),
        }
        if files or folder.is_dir():
            _check_files(datasets, None if files else folder, load)
        try:
            return datasets.load_dataset(**load)
        except datasets.exceptions.DatasetGenerationError:
            if (table := mended_table(datasets, load, cache, say)) is None:
                raise
            return table
    except UserError:
        raise
    except (datasets.exceptions.DatasetsError, *arrow_errors()) as error:
        text = ": ".join(" ".join(str(reason).split())[:300] for reason in _reasons(error))
        raise UserError(f"hf_path={path}, {key}={split}: the dataset cannot be loaded: {text}") from error


def _check_files(datasets: Any, folder: Path | None, load: dict[str, Any]) -> None:
    """Raises UserError for a data file that `check_unpacked` rejects, or that is outside of `folder`. If `folder` is
    None, the files may be anywhere."""
    builder = datasets.load_dataset_builder(**{name: value for name, value in load.items() if name != "split"})
    for names in (builder.config.data_files or {}).values():
        for name in names:
            check_unpacked(Path(str(name)))
            if folder is None:
                continue
            if "://" in str(name) or not Path(os.path.abspath(name)).is_relative_to(os.path.abspath(folder)):
                raise UserError(f"hf_path={folder}: it names the data file {name}, which is outside of this folder")


def _reasons(error: BaseException) -> Iterator[BaseException]:
    yield error
    if error.__cause__ is not None:
        yield from _reasons(error.__cause__)


def _contents(table: Any) -> str:
    """Returns the fingerprint of a table that is not stored in a file."""
    digest = hashlib.sha256()
    for values in table:
        digest.update(repr(sorted(values.items())).encode())
    return digest.hexdigest()

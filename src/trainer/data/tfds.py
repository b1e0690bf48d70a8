"""dataset_type=tfds: datasets prepared by TFDS, local or at a URL. Their shards are read without TensorFlow."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.config.errors import UserError, nearest, shortened
from trainer.config.json_files import read_object
from trainer.config.keys import Config
from trainer.config.limits import FILE_BYTES
from trainer.config.paths import local_path
from trainer.data.cache import Progress, cache_root, ensure
from trainer.data.corpus import Corpus, corpus_of, file_fingerprint
from trainer.data.found import announce_copies, copies_of
from trainer.data.readers import Columns, NoColumn, Part
from trainer.data.record_files import ArrayRecordPart, TfrecordPart
from trainer.runtime.folders import check_folder
from trainer.runtime.remote import data_files, folders_in

_VERSION = re.compile(r"\d+\.\d+\.\d+")


def tfds_corpus(config: Config, name: str, key: str, columns: Columns, say: Progress) -> Corpus:
    """Returns one split of the dataset `name` in dataset_path as a corpus.

    `key` is the configuration key that selects the split: train_split or eval_split.

    Raises UserError if the dataset or the split is missing or damaged.
    """
    import tensorflow_datasets as tfds

    split, place = config[key], config.dataset_path
    remote: Mapping[str, Any] | None = None
    if "://" in place:
        folder, remote = _copied(config, _remote_folder(place, name), say)
    else:
        folder = tfds_folder(local_path(place, "dataset_path="), name)
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
    shards = [(_place(Path(one.filename), remote), one) for one in info.splits[split].file_instructions]
    copied = [path for path, _ in shards if "array_record" in path.name]
    announce_copies(config, copied, say, together=config.data_pipeline == "streaming")
    for path, shard in shards:
        whole = shard.takes_all and not shard.skip
        if "array_record" in path.name:
            parts.append(ArrayRecordPart(path, columns, parse, shard.skip, shard.skip + shard.take))
        elif "tfrecord" in path.name and whole:
            parts.append(TfrecordPart(path, columns, parse))
        elif "tfrecord" in path.name:
            raise UserError(
                f"{key}={split}: parts of a split need ArrayRecord files, and {path} is TFRecord; use {base}"
            )
        else:
            raise UserError(
                f"{path}: TFDS files are read as array_record or tfrecord; prepare the dataset as array_record"
            )
    return corpus_of(f"{name} {split}", parts, columns, split)


def _place(path: Path, remote: Mapping[str, Any] | None) -> Any:
    """Returns the local or remote file of a shard. `path` is the shard's path in the local folder with the metadata."""
    if remote is not None and path.name not in remote:
        raise UserError(f"{path.name} is missing next to the metadata of the TFDS dataset; copy or prepare it again")
    return path if remote is None else remote[path.name]


def _remote_folder(place: str, dataset_name: str) -> str:
    """Returns the URL of `name[/config][:version]` in the folder `place`; the default version is the newest."""
    name, _, version = dataset_name.partition(":")
    folder = f"{place.rstrip('/')}/{name}"
    if version:
        return f"{folder}/{version}"
    there = folders_in(folder)
    versions = sorted(filter(_VERSION.fullmatch, there), key=lambda text: [int(part) for part in text.split(".")])
    if not versions:
        raise UserError(
            f"dataset_name={dataset_name}: {folder} holds {', '.join(there) or 'no folder'}; write name:version or "
            "name/config:version"
        )
    return f"{folder}/{versions[-1]}"


def _copied(config: Config, url: str, say: Progress) -> tuple[Path, Mapping[str, Any]]:
    """Copies the metadata at a URL. Returns the local folder of the copies, and a dict from the names of all files at
    the URL to the remote files."""
    files = {file.name: file for file in data_files(f"{url}/*", copies_of(config))}
    small = [file for file in files.values() if "record" not in file.name and file.size <= FILE_BYTES]
    if "dataset_info.json" not in files:
        raise UserError(f"{url} has no dataset_info.json, as TFDS writes it, or the server does not list its files")

    def build(folder: Path) -> dict[str, Any]:
        for file in small:
            (folder / file.name).write_bytes(file.read_bytes())
        return {"url": url}

    folder = cache_root(config.data_cache_directory) / f"tfds-{file_fingerprint(small)[:12]}"
    if not folder.exists():
        ensure(folder, build, say)
    return folder, files


def check_features(folder: Path) -> None:
    """Checks that features.json names only classes of TFDS, because TFDS imports whatever module the file names.

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
    """Parses records of a TFDS dataset into features. The description of the features is loaded separately in each
    process."""

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
    """Returns the folder of `name[/config][:version]` in `data_dir`; the default version is the newest."""
    name, _, version = dataset_name.partition(":")
    folder = data_dir / name
    if not folder.is_dir():
        there = ", ".join(sorted(path.name for path in data_dir.glob("*") if path.is_dir())) or "no folder"
        raise UserError(
            f"dataset_name={dataset_name}: there is no folder {folder}; dataset_path={data_dir} holds {there}"
        )
    versions = sorted(
        (path for path in folder.iterdir() if _VERSION.fullmatch(path.name)),
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

"""A stand-in for gs://: serves the bucket requests of etils, Orbax and the trainer from a local folder.

It replaces everything below etils' table of backends and Orbax's TensorStore specification. Everything above behaves as
with a real bucket: Orbax commits a checkpoint by writing a final file, and paths are not pathlib.Path. Like a bucket,
it has no empty folders and refuses to rename a folder.
"""

import io
import os
import shutil
from pathlib import Path

import pytest
from etils.epath import backend, gpath
from orbax.checkpoint._src.path import gcs_utils


class Object(io.FileIO):
    """A file open for writing. Like an object in a bucket, it appears only when it is complete."""

    def __init__(self, path: str):
        self._path = path
        super().__init__(f"{path}.part", "w")

    def close(self):
        if not self.closed:
            super().close()
            os.replace(f"{self._path}.part", self._path)


class FolderBackend(backend._OsPathBackend):
    """Stores files of gs://NAME/... in root/NAME/..."""

    def __init__(self, root: Path):
        self._root = root

    def _here(self, path):
        return str(self._root / os.fspath(path).removeprefix("gs://"))

    def open(self, path, mode):
        if "w" not in mode:
            return super().open(self._here(path), mode)
        os.makedirs(os.path.dirname(self._here(path)), exist_ok=True)
        binary = io.BufferedWriter(Object(self._here(path)))
        return binary if "b" in mode else io.TextIOWrapper(binary, encoding="utf-8")

    def exists(self, path):
        return os.path.isfile(self._here(path)) or self.isdir(path)

    def isdir(self, path):
        return any(files for _, _, files in os.walk(self._here(path)))

    def listdir(self, path):
        if not self.isdir(path):
            raise FileNotFoundError(path)
        return [name for name in os.listdir(self._here(path)) if self.exists(os.path.join(path, name))]

    def makedirs(self, path, *, exist_ok=False, mode=None):
        """Does nothing, because a bucket has no folders to make."""

    def mkdir(self, path, *, exist_ok=False, mode=None):
        """Does nothing, because a bucket has no folders to make."""

    def rmtree(self, path):
        shutil.rmtree(self._here(path))

    def remove(self, path):
        os.remove(self._here(path))

    def stat(self, path):
        return super().stat(self._here(path))

    def glob(self, path):
        return [f"gs://{Path(found).relative_to(self._root)}" for found in super().glob(self._here(path))]

    def rename(self, path, dst):
        raise NotImplementedError("a bucket renames no folder")

    replace = copy = rename


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    """The folder that holds the content of gs://bucket. The local copies of its runs are elsewhere."""
    root = tmp_path / "buckets"
    (root / "bucket").mkdir(parents=True)

    def where(path):
        # TensorStore's file driver recognizes a folder by the trailing slash; its bucket driver treats both forms as a
        # prefix.
        return f"{root}/{path.removeprefix('gs://')}" + ("" if path.endswith("_sharding") else "/")

    monkeypatch.setitem(gpath._PREFIX_TO_BACKEND, "gs", FolderBackend(root))
    monkeypatch.setattr(gcs_utils, "is_hierarchical_namespace_enabled", lambda path: False)
    monkeypatch.setattr(gcs_utils, "get_kvstore_for_gcs", lambda path: {"driver": "file", "path": where(path)})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return root / "bucket"

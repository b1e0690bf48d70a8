"""A stand-in for gs://: what etils, Orbax and the trainer ask of a bucket, answered by a folder of this machine.

Below etils' table of backends and Orbax's specification for TensorStore everything is replaced; all that lies above is
as it is for a real bucket: Orbax's commit by a last file, and paths that are no pathlib.Path. Like a bucket it has no
folder without files, and it refuses to rename one.
"""

import os
import shutil
from pathlib import Path

import pytest
from etils.epath import backend, gpath
from orbax.checkpoint._src.path import gcs_utils


class FolderBackend(backend._OsPathBackend):
    """Files of gs://NAME/... are those of root/NAME/..."""

    def __init__(self, root: Path):
        self._root = root

    def _here(self, path):
        return str(self._root / os.fspath(path).removeprefix("gs://"))

    def open(self, path, mode):
        if "w" in mode:
            os.makedirs(os.path.dirname(self._here(path)), exist_ok=True)
        return super().open(self._here(path), mode)

    def exists(self, path):
        return os.path.isfile(self._here(path)) or self.isdir(path)

    def isdir(self, path):
        return any(files for _, _, files in os.walk(self._here(path)))

    def listdir(self, path):
        if not self.isdir(path):
            raise FileNotFoundError(path)
        return [name for name in os.listdir(self._here(path)) if self.exists(os.path.join(path, name))]

    def makedirs(self, path, *, exist_ok=False, mode=None):
        """A bucket has no folders to make."""

    def mkdir(self, path, *, exist_ok=False, mode=None):
        """A bucket has no folders to make."""

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
    """The folder that holds what gs://bucket holds; the local copies of its runs lie elsewhere."""
    root = tmp_path / "buckets"
    (root / "bucket").mkdir(parents=True)

    def where(path):
        # TensorStore's driver for files tells a folder by the slash; that for buckets takes both as a prefix.
        return f"{root}/{path.removeprefix('gs://')}" + ("" if path.endswith("_sharding") else "/")

    monkeypatch.setitem(gpath._PREFIX_TO_BACKEND, "gs", FolderBackend(root))
    monkeypatch.setattr(gcs_utils, "is_hierarchical_namespace_enabled", lambda path: False)
    monkeypatch.setattr(gcs_utils, "get_kvstore_for_gcs", lambda path: {"driver": "file", "path": where(path)})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return root / "bucket"

"""The default corpus: the source files of the standard library of the running Python."""

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trainer.config.errors import UserError
from trainer.data.corpus import Corpus
from trainer.data.documents import Location, Record, is_held_out

# Folders that differ between Python installations, so a corpus that included them would differ, too. Most contain tests
# or large applications, which some distributions omit.
EXCLUDED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "idlelib", "tkinter", "lib2to3", "site-packages", "dist-packages", "__pycache__"}
)
HELD_OUT_SHARE = 0.05


@dataclass(frozen=True)
class SourceFile:
    """One file: its path within the corpus, with forward slashes, its text, and its size in bytes as UTF-8."""

    path: str
    text: str
    size: int

    @property
    def held_out(self) -> bool:
        """Whether the file is used for evaluation and never for training. The result depends only on the file's path
        within the corpus, and is true for 5 % of paths.

        The prefix that `is_held_out` adds before hashing acts as a seed. Without the prefix, a single generated text
        file, pydoc_data/topics.py, would make up 64 % of the held-out bytes.
        """
        return is_held_out(self.path.encode(), HELD_OUT_SHARE)


@dataclass(frozen=True)
class SourceFiles:
    """Files in memory as a part of a corpus."""

    name: str
    files: tuple[SourceFile, ...]
    restores: bool = False

    @property
    def weight(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def size(self) -> int:
        return self.weight

    def cuts(self, count: int) -> list[int]:
        return []

    def read(self, cursor: int = 0, stop: int | None = None) -> Iterator[tuple[int, float, Record]]:
        done = sum(file.size for file in self.files[:cursor])
        for i, file in enumerate(self.files[cursor:], cursor + 1):
            done += file.size
            yield i, done / self.weight, Record(Location(file.path), (file.text,))


def stdlib_folder() -> Path:
    """Returns the folder of this Python's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def stdlib_corpora(root: Path) -> tuple[Corpus, Corpus]:
    """Returns the training corpus and the held-out corpus of the files in `root`. Raises UserError if either corpus
    would be empty."""
    files = read_files(root)
    splits = [tuple(file for file in files if file.held_out == held_out) for held_out in (False, True)]
    if not all(splits):
        raise UserError(f"{root} holds too few .py files: {len(splits[0])} to train on and {len(splits[1])} held out")
    train, evaluation = (
        Corpus(f"{len(split)} files of the standard library", (SourceFiles(str(root), split),), fingerprint(split))
        for split in splits
    )
    return train, evaluation


def read_files(root: Path) -> list[SourceFile]:
    """Returns the `.py` files in `root`, sorted by path, except EXCLUDED_FOLDERS, empty files and files not in UTF-8.

    Line ends are kept, so that a document's text encodes to exactly the bytes of its file.
    """
    sources = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in EXCLUDED_FOLDERS]
        for name in files:
            if not name.endswith(".py"):
                continue
            path = Path(folder, name)
            data = path.read_bytes()
            try:
                text = data.decode()
            except UnicodeDecodeError:
                continue
            if text:
                sources.append(SourceFile(path.relative_to(root).as_posix(), text, len(data)))
    return sorted(sources, key=lambda file: file.path)


def fingerprint(files: tuple[SourceFile, ...]) -> str:
    """Returns the sha256, in hexadecimal, of the files' paths and contents."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.path}\0{file.size}\0".encode())
        digest.update(file.text.encode())
    return digest.hexdigest()

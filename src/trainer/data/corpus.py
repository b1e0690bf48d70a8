"""The default corpus: the sources of this Python's own standard library."""

import hashlib
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

# Tests and the big applications. Some distributions ship Python without them, so that with them corpora would differ.
EXCLUDED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "idlelib", "tkinter", "lib2to3", "site-packages", "dist-packages", "__pycache__"}
)
HELD_OUT_SHARE = 0.05


@dataclass(frozen=True)
class Document:
    """One file: its path below the corpus, with forward slashes, its text, and its bytes as UTF-8."""

    path: str
    text: str
    size: int

    @property
    def held_out(self) -> bool:
        """Whether the file is evaluated on and never trained on: 5 % of all paths, wherever the corpus lies.

        The words before the path choose among equally random 5 %: without them one generated file of texts,
        pydoc_data/topics.py, would be 64 % of the held-out bytes.
        """
        word = hashlib.sha256(f"held out: {self.path}".encode()).digest()[:8]
        return int.from_bytes(word, "big") < HELD_OUT_SHARE * 2**64


def stdlib_folder() -> Path:
    """The folder of this Python's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def read_corpus(root: Path) -> list[Document]:
    """The `.py` files below `root`, sorted by path, without EXCLUDED_FOLDERS, empty files and files not in UTF-8.

    Line ends are kept, so that a document's text encodes to exactly the bytes of its file.
    """
    documents = []
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
                documents.append(Document(path.relative_to(root).as_posix(), text, len(data)))
    return sorted(documents, key=lambda document: document.path)


def fingerprint(documents: list[Document]) -> str:
    """sha256, in hexadecimal, of the documents' paths and contents."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update(f"{document.path}\0{document.size}\0".encode())
        digest.update(document.text.encode())
    return digest.hexdigest()

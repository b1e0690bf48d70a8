"""Configurations from command lines: files, notes and errors."""

import pytest

from trainer.config import UserError, load


def write(name: str, text: str) -> str:
    with open(name, "w") as file:
        file.write(text)
    return name


def notes(*argv: str) -> list[str]:
    """Returns the notes, without the note about the combination, which tests may change."""
    return [note for note in load(argv).notes if not note.startswith("combination")]


def mistakes(*argv: str) -> list[str]:
    with pytest.raises(UserError) as caught:
        load(argv)
    return str(caught.value).split("\n  ")[1:]

"""The chat template in the files of a tokenizer, or in a file of its own."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from trainer.config.errors import UserError
from trainer.config.json_files import read_object, shown
from trainer.runtime.folders import read_bounded

# In the order in which Hugging Face's tokenizers prefer them.
TEMPLATE_FILE = "chat_template.jinja"
FILES = (TEMPLATE_FILE, "tokenizer_config.json", "chat_template.json")
_KEY = "chat_template"


class ChatTemplate(NamedTuple):
    """A template in Jinja, and where it comes from, for messages."""

    text: str
    where: str


def template_beside(folder: Path) -> ChatTemplate | None:
    """Returns the template in the files of a tokenizer's folder; None if there is none.

    Raises:
      UserError: a file is damaged, or has no default among several named templates.
    """
    for path in (folder / name for name in FILES):
        if path.is_file() and (found := _read(path)):
            return found
    return None


def read_template(path: Path) -> ChatTemplate:
    """Returns the template of a file: text, or JSON with a field chat_template.

    Raises:
      UserError: there is no such file, or no template in it.
    """
    if not path.is_file():
        raise UserError(f"chat_template_path={path}: there is no such file; give a .jinja file, or JSON with {_KEY}")
    if found := _read(path):
        return found
    raise UserError(f"chat_template_path={path}: there is no template in it")


def _read(path: Path) -> ChatTemplate | None:
    if path.suffix != ".json":
        try:
            text = read_bounded(path).decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise UserError(f"{path} is not UTF-8 ({error})") from error
    else:
        text = _default(read_object(path).get(_KEY), path)
    return ChatTemplate(text, str(path)) if text else None


def _default(given: Any, path: Path) -> str:
    """Returns the text of a template, or of the default one among named ones."""
    if isinstance(given, str | None):
        return given or ""
    named: Mapping[Any, Any] = {}
    if isinstance(given, dict):
        named = given
    elif isinstance(given, list) and all(isinstance(one, dict) for one in given):
        named = {one.get("name"): one.get("template") for one in given}
    if isinstance(text := named.get("default"), str):
        return text
    there = f"the templates {', '.join(map(str, named))}, and none is called default" if named else shown(given)
    raise UserError(f"{path}: {_KEY} holds {there}; name the file of a template with chat_template_path")

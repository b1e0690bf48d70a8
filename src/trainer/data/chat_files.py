"""The chat template in a tokenizer's files or in a separate file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from trainer.config.errors import UserError
from trainer.config.json_files import read_object, shown
from trainer.config.tokenizer_files import TEMPLATE_FILE, TEMPLATES, TOKENIZER_CONFIG, WITH_TOOLS
from trainer.runtime.folders import read_bounded

_KEY, _DEFAULT = "chat_template", "default"
_REMEDY = "set chat_template_path to a template file"


class ChatTemplate(NamedTuple):
    """A Jinja template. `where`: its origin, for messages. `with_tools`: the template for conversations with tools; ""
    if they use the same template."""

    text: str
    where: str
    with_tools: str = ""


def template_beside(folder: Path) -> ChatTemplate | None:
    """Returns the chat template in a tokenizer's folder; None if there is none. Searches files in the same order as
    transformers.

    Raises:
      UserError: a file is damaged, or there are several named templates, but none is called default.
    """
    own, more = folder / TEMPLATE_FILE, folder / TEMPLATES
    files = {_DEFAULT: own} if own.is_file() else {}
    files |= {path.stem: path for path in sorted(more.glob("*.jinja")) if path.is_file()} if more.is_dir() else {}
    texts = {name: _text(path) for name, path in files.items()}
    if texts and (found := _chosen(texts, own if _DEFAULT in texts else more)):
        return found
    for path in (folder / TOKENIZER_CONFIG, folder / "chat_template.json"):
        if path.is_file() and (found := _read(path)):
            return found
    return None


def read_template(path: Path) -> ChatTemplate:
    """Returns the template in a text file, or under the key chat_template in a JSON file. Raises UserError if there is
    none."""
    if not path.is_file():
        raise UserError(f"chat_template_path={path}: there is no such file; give a .jinja file, or JSON with {_KEY}")
    if found := _read(path):
        return found
    raise UserError(f"chat_template_path={path}: the file contains no template")


def _read(path: Path) -> ChatTemplate | None:
    if path.suffix != ".json":
        return _chosen({_DEFAULT: _text(path)}, path)
    given = read_object(path).get(_KEY)
    if isinstance(given, str | None):
        return _chosen({_DEFAULT: given or ""}, path)
    if isinstance(given, list) and all(isinstance(one, dict) for one in given):
        given = {one.get("name"): one.get("template") for one in given}
    if isinstance(given, dict):
        return _chosen(given, path)
    raise UserError(f"{path}: {_KEY} is {shown(given)}, not a template; {_REMEDY}")


def _text(path: Path) -> str:
    try:
        return read_bounded(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 ({error})") from error


def _chosen(named: Mapping[Any, Any], path: Path) -> ChatTemplate | None:
    """Returns the default of several named templates, with the template for tools; None if the default is empty."""
    if not isinstance(text := named.get(_DEFAULT), str):
        names = ", ".join(map(str, named))
        raise UserError(f"{path}: contains the templates {names}, but none named {_DEFAULT}; {_REMEDY}")
    tools = named.get(WITH_TOOLS)
    return ChatTemplate(text, str(path), tools if isinstance(tools, str) and tools != text else "") if text else None

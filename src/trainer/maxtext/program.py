"""The defaults of MaxText's post-training programs, each of which has a separate yml.

The method of a program is the key that selects it, such as use_sft. Our programs in `COMMANDS` add the values of their
yml to maxtext.yml; see `trainer.config.files.POST_TRAIN`.
"""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from trainer.config.capabilities.chat_keys import DISTILL, METHODS
from trainer.config.dump import as_words
from trainer.config.files import MAXTEXT_YML, POST_TRAIN
from trainer.config.maxtext import base_yml, verdicts
from trainer.config.schema import schema
from trainer.maxtext.command_line import as_text

# Maps each method to our program that it selects.
COMMANDS = {"use_distill": DISTILL} | {key: name for key, (name, _) in METHODS.items()}
# The methods of MaxText's programs that refuse base.yml.
_WITHOUT_BASE = ("use_grpo",)


class Yml(NamedTuple):
    """The yml of a command.

    Attributes:
      name: its name in our command; maxtext.yml if it is an unchanged base.yml or program yml of MaxText.
      names: the keys that the file and its parents set.
      given: a dict from each key that the user changed to its value as text.
      below: the name of the yml's parent, if the parent is maxtext.yml or a MaxText file that maxtext.yml replaces;
        otherwise "".
    """

    name: str
    names: Sequence[str] = ()
    given: Mapping[str, str] = {}
    below: str = ""


def method_of(runs: str) -> str:
    """Returns the method of our program `runs`; "" if it has none."""
    return next((key for key, name in COMMANDS.items() if name == runs), "")


def program_yml(yml: str) -> str:
    """Returns the key of `POST_TRAIN` whose file has the path `yml` in MaxText; "" if there is none."""
    name = re.search(r"(?:^|/)(post_train/\w+\.yml)$", yml)
    return next((key for key, path in POST_TRAIN.items() if name and path.as_posix().endswith(name.group(1))), "")


def has_own_defaults(yml: Yml, named: str, method: str) -> bool:
    """Returns whether a command of `method` has the defaults of its program's yml instead of base.yml's.

    `named` is the yml's name in the command, and `yml` describes it (`version.yml_of`).
    """
    of_program = not named or bool(program_yml(named)) or method in _WITHOUT_BASE
    return bool(method) and (bool(yml.below) or (yml.name == MAXTEXT_YML.name and of_program))


def method_given(given: Mapping[str, str]) -> str:
    """Returns the first key of `METHODS` that is true in `given`; "" if none is.

    MaxText's pre_train.train accepts these keys.
    """
    return next((key for key in METHODS if given.get(key, "").lower() in ("true", "1")), "")


def own_words(method: str, given: Mapping[str, str]) -> list[str]:
    """Returns the words that a command must contain to have the values of its program's yml. Keys in `given` are
    omitted."""
    said = verdicts.table()["of_programs"].get(method, {})
    return [entry["word"] for name, entry in said.items() if "word" in entry and name not in given]


def unsaid(method: str, given: Mapping[str, str]) -> dict[str, str]:
    """Returns a dict from KEY=VALUE to a note, for each value in the program's yml that needs a note.

    Keys in `given` are omitted.
    """
    said = verdicts.table()["of_programs"].get(method, {})
    return {
        f"{name}={entry['value']}": entry["why"] for name, entry in said.items() if name not in given and "why" in entry
    }


def base_words(method: str, given: Mapping[str, str]) -> list[str]:
    """Returns words for the values of MaxText's base.yml that differ from maxtext.yml in a command of `method`."""
    own = base_yml.defaults(method)
    base = {name: key.default for name, key in schema().keys.items()} | dict(base_yml.defaults())
    if method == "use_dpo":
        base["max_target_length"] *= 2  # per row, which contains both sequences of a pair
    return as_words(base, [name for name in own if name not in (method, *given) and own[name] != base[name]])


def own_parent(yml: Yml, method: str, runs: str, given: Mapping[str, str]) -> str:
    """Returns a line about the values that a yml gets from its parent, `yml.below`, in a command of `method`."""
    own = f"its parent has the values of {POST_TRAIN[method].parent.name}/{POST_TRAIN[method].name} in {runs}"
    if yml.below != MAXTEXT_YML.name or method in _WITHOUT_BASE:
        return own
    return f"{own}; if that was base.yml in MaxText, {with_base(method, given)}"


def with_base(method: str, given: Mapping[str, str]) -> str:
    """Returns advice to add `base_words`."""
    return f"add {' '.join(as_text([word]) for word in base_words(method, given))}"


def takes(method: str, runs: str) -> str:
    """Returns a line on what MaxText and our program `runs` use as defaults if a command of `method` names no yml."""
    path = POST_TRAIN[method]
    name = f"{path.parent.name}/{path.name}"
    return f"without a yml, MaxText uses {name} for this program; in {runs}, maxtext.yml has the values of that file"

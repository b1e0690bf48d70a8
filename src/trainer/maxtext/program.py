"""What MaxText's programs of post-training have by default: the values of a yml of their own.

`trainer.sft`, `trainer.dpo` and `trainer.grpo` add those values to maxtext.yml, see `files.POST_TRAIN`.
"""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from trainer.config.capabilities.chat_keys import METHODS
from trainer.config.dump import as_words
from trainer.config.files import MAXTEXT_YML, POST_TRAIN
from trainer.config.maxtext import base_yml, verdicts
from trainer.config.schema import schema
from trainer.maxtext.command_line import as_text

# The programs of MaxText that refuse base.yml.
_WITHOUT_BASE = ("use_grpo",)


class Yml(NamedTuple):
    """The yml of a command.

    Attributes:
      name: as our command has it: maxtext.yml for MaxText's own base.yml, or that of one of its programs, without a
        changed value.
      names: the keys that the file and its parents give.
      given: those that a person gave there, with their texts.
      below: the name of maxtext.yml, or of what stands for it, if it is a parent of another file.
    """

    name: str
    names: Sequence[str] = ()
    given: Mapping[str, str] = {}
    below: str = ""


def method_of(runs: str) -> str:
    """Returns the key whose program is `runs`, such as use_sft; "" if there is none."""
    return next((key for key, (name, _) in METHODS.items() if name == runs), "")


def program_yml(yml: str) -> str:
    """Returns the key of `POST_TRAIN` whose file in MaxText has the path `yml`; "" if none has."""
    name = re.search(r"(?:^|/)(post_train/\w+\.yml)$", yml)
    return next((key for key, path in POST_TRAIN.items() if name and path.as_posix().endswith(name.group(1))), "")


def has_own_defaults(yml: Yml, named: str, method: str) -> bool:
    """Returns whether a command of `method` that names the file `named`, which means `yml`, has the defaults of its
    program, not those of base.yml."""
    of_program = not named or bool(program_yml(named)) or method in _WITHOUT_BASE
    return bool(method) and (bool(yml.below) or (yml.name == MAXTEXT_YML.name and of_program))


def method_given(given: Mapping[str, str]) -> str:
    """Returns the key of `METHODS` that is true in `given`: MaxText's pre_train.train trains so, too; "" if none is."""
    return next((key for key in METHODS if given.get(key, "").lower() in ("true", "1")), "")


def own_words(method: str, given: Mapping[str, str]) -> list[str]:
    """Returns words for what the yml of the program gives, unless the keys `given` have it."""
    said = verdicts.table()["of_programs"].get(method, {})
    return [entry["word"] for name, entry in said.items() if "word" in entry and name not in given]


def unsaid(method: str, given: Mapping[str, str]) -> dict[str, str]:
    """Returns `key=value` of what the yml of the program gives and is not the same here, each with the reason."""
    said = verdicts.table()["of_programs"].get(method, {})
    return {
        f"{name}={entry['value']}": entry["why"] for name, entry in said.items() if name not in given and "why" in entry
    }


def base_words(method: str, given: Mapping[str, str]) -> list[str]:
    """Returns words for the values of MaxText's base.yml that maxtext.yml has not in the command of `method`."""
    own = base_yml.defaults(method)
    base = {name: key.default for name, key in schema().keys.items()} | dict(base_yml.defaults())
    if method == "use_dpo":
        base["max_target_length"] *= 2  # of a row, which holds both sequences of a pair
    return as_words(base, [name for name in own if name not in (method, *given) and own[name] != base[name]])


def own_parent(yml: Yml, method: str, runs: str, given: Mapping[str, str]) -> str:
    """Returns a line about a yml with the parent maxtext.yml in a command of `method`."""
    own = f"its parent has the values of {POST_TRAIN[method].parent.name}/{POST_TRAIN[method].name} in {runs}"
    if yml.below != MAXTEXT_YML.name or method in _WITHOUT_BASE:
        return own
    return f"{own}; if that was base.yml in MaxText, {with_base(method, given)}"


def with_base(method: str, given: Mapping[str, str]) -> str:
    """Returns an advice to add `base_words`."""
    return f"add {' '.join(as_text([word]) for word in base_words(method, given))}"


def takes(method: str, runs: str) -> str:
    """Returns a line about a command of `method` without a yml."""
    path = POST_TRAIN[method]
    name = f"{path.parent.name}/{path.name}"
    return f"without a yml MaxText takes {name} for this program; maxtext.yml has its values in {runs}"

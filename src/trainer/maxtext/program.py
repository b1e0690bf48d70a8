"""What MaxText's programs of post-training have by default: the values of a yml of their own.

`trainer.sft`, `trainer.dpo` and `trainer.grpo` add those values to maxtext.yml, see `files.POST_TRAIN`.
"""

import re
from collections.abc import Mapping

from trainer.config.capabilities.chat_keys import METHODS
from trainer.config.dump import as_words
from trainer.config.files import MAXTEXT_YML, POST_TRAIN
from trainer.config.maxtext import base_yml, verdicts
from trainer.config.schema import schema

# The programs of MaxText that refuse base.yml.
_WITHOUT_BASE = ("use_grpo",)


def method_of(runs: str) -> str:
    """Returns the key of our program `runs`, such as use_sft; "" if it has none."""
    return next((key for key, (name, _) in METHODS.items() if name == runs), "")


def program_yml(yml: str) -> str:
    """Returns the key of `POST_TRAIN` whose file in MaxText has the path `yml`; "" if none has."""
    name = re.search(r"(?:^|/)(post_train/\w+\.yml)$", yml)
    return next((key for key, path in POST_TRAIN.items() if name and path.as_posix().endswith(name.group(1))), "")


def has_own_defaults(yml: str, named: str, method: str) -> bool:
    """Returns whether a command of `method` that names the yml `named`, which becomes `yml`, has the defaults of its
    program, not those of base.yml."""
    of_program = not named or bool(program_yml(named)) or method in _WITHOUT_BASE
    return bool(method) and yml == MAXTEXT_YML.name and of_program


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


def takes(method: str, runs: str) -> str:
    """Returns a line about a command of `method` without a yml."""
    path = POST_TRAIN[method]
    name = f"{path.parent.name}/{path.name}"
    return f"without a yml MaxText takes {name} for this program; maxtext.yml has its values in {runs}"

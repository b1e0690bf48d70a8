"""Keys from the environment: the variable M_STEPS=10 is the same as steps=10 on the command line."""

from collections.abc import Mapping

from trainer.config import maxtext
from trainer.config.errors import nearest
from trainer.config.schema import schema

PREFIX = "M_"


def variables(environment: Mapping[str, str]) -> tuple[dict[str, tuple[str, str]], list[str]]:
    """Returns the variables M_KEY as {key: (variable, text)}, and a warning for each that names no key."""
    given = {name: text for name, text in environment.items() if name.startswith(PREFIX) and name != PREFIX}
    if not given:
        return {}, []
    keys = {name.upper(): name for name in (*maxtext.verdicts(), *schema().keys)}
    known, unknown = {}, []
    for variable, text in sorted(given.items()):
        name = variable.removeprefix(PREFIX)
        if name in keys:
            known[keys[name]] = variable, text
        else:
            near = nearest(name.lower(), schema().keys)
            unknown.append(f"{variable} in the environment is ignored: there is no key {name.lower()}{near}")
    return known, unknown

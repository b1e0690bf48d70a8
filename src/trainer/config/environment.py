"""Keys from the environment: the variable M_STEPS=10 is the same as steps=10 on the command line."""

from collections.abc import Container, Mapping

from trainer.config.errors import nearest
from trainer.config.maxtext import verdicts
from trainer.config.schema import schema

PREFIX = "M_"


def variables(environment: Mapping[str, str]) -> tuple[dict[str, tuple[str, str]], list[str]]:
    """Returns the variables M_KEY as {key: (variable, text)}, and a warning for each variable with an unknown KEY."""
    given = {name: text for name, text in environment.items() if name.startswith(PREFIX) and name != PREFIX}
    if not given:
        return {}, []
    keys = {name.upper(): name for name in (*verdicts.verdicts(), *schema().keys)}
    known, unknown = {}, []
    for variable, text in sorted(given.items()):
        name = variable.removeprefix(PREFIX)
        if name in keys:
            known[keys[name]] = variable, text
        elif name.upper() in keys:
            unknown.append(f"{variable} in the environment is ignored: write it in capitals, {variable.upper()}")
        else:
            near = nearest(name.lower(), schema().keys)
            unknown.append(f"{variable} in the environment is ignored: there is no key {name.lower()}{near}")
    return known, unknown


def without_prefix(environment: Mapping[str, str], given: Container[str]) -> list[str]:
    """Returns a warning about variables that are named like a key, in capitals, but without M_.

    Skips keys in `given`. Also skips names of one word, such as PORT, because other programs use them; STEPS is an
    exception, because users often write it.
    """
    keys = [name for name in schema().keys if name not in given and ("_" in name or name == "steps")]
    found = [name.upper() for name in keys if environment.get(name.upper())]
    if not found:
        return []
    shown = ", ".join(found[:8]) + (f" and {len(found) - 8} more" if len(found) > 8 else "")
    return [f"not read from the environment: {shown}; the variable of a key begins with {PREFIX}: {PREFIX}{found[0]}"]

"""Maps the three flags that select NNX or Linen to the name of their combination. Only this file names the flags."""

from collections.abc import Mapping
from typing import Any

from trainer.config.errors import UserError
from trainer.config.keys import Config

FLAGS = ("enable_nnx", "pure_nnx_decoder", "pure_nnx")

# name: (enable_nnx, pure_nnx_decoder, pure_nnx)
COMBINATIONS: dict[str, tuple[bool, ...]] = {
    "nnx": (True, True, True),
    "nnx_linen_decoder": (True, False, True),
    "bridged": (True, True, False),
    "bridged_linen_decoder": (True, False, False),
    "linen": (False, False, False),
}

_NAMES = {flags: name for name, flags in COMBINATIONS.items()}


def combination(config: Mapping[str, Any]) -> str:
    """Returns the name of the combination that `config` selects.

    Raises:
      UserError: no combination has these values of the three flags; the message names the flag to change.
    """
    if problem := unsupported(config):
        raise UserError(problem)
    return _NAMES[_flags(config)]


def flags_of(name: str) -> dict[str, bool]:
    """Returns the three flags of the combination `name`."""
    return dict(zip(FLAGS, COMBINATIONS[name], strict=True))


def linen_stack(config: Config) -> str | None:
    """If the flags of `config` do not select a Linen decoder stack, returns how to get one; otherwise None."""
    linen = {name: flags for name, flags in COMBINATIONS.items() if flags[1:2] == (False,)}
    if combination(config) in linen:
        return None
    if not linen:
        return "a Linen module needs a Linen decoder stack, which has been removed"
    asked = _flags(config)
    changes, name = min(((_changes(asked, flags), name) for name, flags in linen.items()), key=lambda way: len(way[0]))
    return f"a Linen module needs a Linen decoder stack: set {' '.join(changes)} (combination {name})"


def removal(config: Config) -> str | None:
    """If the flags of `config` select Linen, returns a notice that Linen will be removed; otherwise None."""
    if all(_flags(config)):
        return None
    return (
        f"combination {combination(config)}: the Linen paths will be removed; to migrate to "
        f"{next(iter(COMBINATIONS))}, see docs/guides/migrating.md"
    )


def unsupported(config: Mapping[str, Any]) -> str | None:
    """Returns why the flags of `config` are not a combination, and which flags to change; None if they are."""
    asked = _flags(config)
    if asked in _NAMES:
        return None
    changes = {name: _changes(asked, flags) for name, flags in COMBINATIONS.items()}
    fewest = min(len(change) for change in changes.values())
    # A user who turns off enable_nnx most likely wants Linen throughout, even if that requires more changes.
    offers = [name for name in changes if len(changes[name]) == fewest or name == "linen"]
    ways = " or ".join(f"set {' '.join(changes[name])} (combination {name})" for name in offers)
    what = "no such combination of the module system" if "linen" in COMBINATIONS else "the Linen paths were removed"
    return f"{what}; nearest: {ways} (docs/guides/migrating.md)"


def _flags(config: Mapping[str, Any]) -> tuple[bool, ...]:
    return tuple(config[flag] for flag in FLAGS)


def _changes(asked: tuple[bool, ...], flags: tuple[bool, ...]) -> list[str]:
    return [f"{name}={str(new).lower()}" for name, old, new in zip(FLAGS, asked, flags, strict=True) if old is not new]

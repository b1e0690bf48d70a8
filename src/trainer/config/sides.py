"""Reads several configurations, called sides, from one command line.

`key=value` applies to all sides, `left.key=value` to the left side, and `right.key=value` to every right side.
`left=NAME` and `right=NAME` set the three flags of the combination NAME (see `flags`). `right=NAME,NAME` and
`right=all` make several right sides, each of which is compared with the left side.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from trainer.config.dump import as_words, to_flow
from trainer.config.errors import UserError, nearest
from trainer.config.flags import COMBINATIONS, combination, flags_of
from trainer.config.help import question
from trainer.config.load import Begun, Loaded, answer, begin, load
from trainer.config.schema import schema
from trainer.config.trust import code_of_checkpoint

# A function that gets all sides and prepares to read their models. It returns a function that reads the model of one
# side.
ModelReader = Callable[[Sequence[Begun]], Callable[[Begun], Loaded]]
T = TypeVar("T")

LEFT, RIGHT, ALL = "left", "right", "all"


@dataclass(frozen=True)
class Side:
    """One configuration of a command line. `name` identifies the side; `words` are the `key=value` arguments that apply
    only to it. In the sides of `load_sides`, they include the flags of the side's combination."""

    name: str
    words: tuple[str, ...]
    loaded: Loaded


def load_sides(
    argv: Sequence[str], environment: Mapping[str, str] | None = None, models: ModelReader = lambda sides: Begun.end
) -> list[Side]:
    """Returns the left side, then the right sides in order. If no argument names a side, returns one side with the name
    "".

    Arguments for one side override arguments for all sides; apart from this, later arguments override earlier ones.
    `environment`: see `load`. `models`: reads the models at load_parameters_path (see `begin`); the default reads none.

    Raises:
      UserError: the errors of the first side that has any.
      SystemExit: with code 0, after the answer to --help or --explain.
    """
    if demand := question(argv):
        answer(demand, lambda words: {side.name: side.loaded for side in load_sides(words, environment)})
        raise SystemExit(0)
    shared, left, right, names = _split(argv)
    if not left and not right and not names:
        only = begin(argv, environment)
        return [Side("", (), models([only])(only))]
    lefts, rights = names.get(LEFT, [""]), names.get(RIGHT, [""])
    if len(lefts) > 1:
        raise UserError(f"left={','.join(lefts)}: give one combination; right= takes several")
    if rights == [ALL]:
        own = lefts[0] or combination(_of_side(LEFT, begin, [*shared, *left], environment).config)
        rights = [name for name in COMBINATIONS if name != own]
    asked = [(LEFT, lefts[0], left), *((RIGHT, name, right) for name in rights)]
    begun = [_of_side(side, begin, [*shared, *_flag_words(name), *words], environment) for side, name, words in asked]
    read = models(begun)
    loaded = [_of_side(side, read, each) for (side, _, _), each in zip(asked, begun, strict=True)]
    labels = [combination(result.config) for result in loaded]
    if len(set(labels)) < len(labels):
        # The combinations are not unique, so name the sides left and right.
        labels = [side if len(rights) == 1 or side == LEFT else f"{side}={name}" for side, name, _ in asked]
    return [
        Side(label, (*_flag_words(name), *words), result)
        for label, (_, name, words), result in zip(labels, asked, loaded, strict=True)
    ]


def load_against(
    left: Side, given: Mapping[str, Any], argv: Sequence[str], environment: Mapping[str, str] | None = None
) -> list[Side]:
    """Returns the recorded side `left`, then the right sides of the command line. Each right side starts from `given`,
    the keys that were given for the recorded side.

    Raises:
      UserError: the errors of the first right side that has any; an argument is for the left side; the yml is not
        base.yml; or the record has a key that names code to import, and the command line does not set this key.
    """
    shared, lefts, right, names = _split(argv)
    yml, shared = (shared[0], shared[1:]) if shared and "=" not in shared[0] else ("base.yml", shared)
    if lefts or LEFT in names:
        raise UserError(
            f"{left.name} is the left side, which is recorded and fixed; give other keys to the right: right.KEY=VALUE"
        )
    if yml != "base.yml":
        raise UserError(f"{left.name} already has a configuration; give differences as key=value instead of {yml}")
    if code := code_of_checkpoint(given, [word.partition("=")[0] for word in (*shared, *right)], left.name):
        raise UserError("\n  ".join(code))
    rights = names.get(RIGHT, [""])
    rights = list(COMBINATIONS) if rights == [ALL] else rights
    argvs = [[yml, *as_words(given), *shared, *_flag_words(name), *right] for name in rights]
    loaded = [_of_side(RIGHT, load, words, environment=environment) for words in argvs]
    labels = [combination(result.config) for result in loaded]
    sides = [Side(label, tuple(right), result) for label, result in zip(labels, loaded, strict=True)]
    return [left, *sides]


def differences(sides: Sequence[Side]) -> dict[str, list[str]]:
    """Returns a dict from each key whose value differs between sides to its values as text, one for each side."""
    values = {key: [to_flow(side.loaded.config[key]) for side in sides] for key in schema().keys}
    return {key: texts for key, texts in values.items() if len(set(texts)) > 1}


def _split(argv: Sequence[str]) -> tuple[list[str], list[str], list[str], dict[str, list[str]]]:
    """Returns the arguments for all sides, those for the left side, those for the right sides, and a dict from "left"
    and "right" to the combinations given for them."""
    shared: list[str] = []
    own: dict[str, list[str]] = {LEFT: [], RIGHT: []}
    names: dict[str, list[str]] = {}
    for word in argv:
        side, dot, rest = word.partition(".")
        head, equals, text = word.partition("=")
        if dot and side in own and "=" not in side:
            own[side].append(rest)
        elif equals and head in own:
            names[head] = _combinations(word, text)
        else:
            shared.append(word)
    return shared, own[LEFT], own[RIGHT], names


def _combinations(word: str, text: str) -> list[str]:
    names = list(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in COMBINATIONS and names != [ALL]:
            raise UserError(
                f"{word}: there is no combination {name}; allowed: {', '.join(COMBINATIONS)}; right= also takes "
                f"several, separated by commas, or {ALL}{nearest(name, COMBINATIONS)}"
            )
    if names == [ALL] and word.startswith(LEFT):
        raise UserError(f"{word}: give one combination; right={ALL} compares all others with it")
    return names


def _flag_words(name: str) -> list[str]:
    return [f"{flag}={str(value).lower()}" for flag, value in flags_of(name).items()] if name else []


def _of_side(side: str, fn: Callable[..., T], *args: Any, **keys: Any) -> T:
    """Returns `fn(*args, **keys)`. Prefixes error messages with `side`."""
    try:
        return fn(*args, **keys)
    except UserError as error:
        raise type(error)(f"{side}: {error}") from None

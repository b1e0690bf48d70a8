"""`python -m trainer.plan base.yml model_name=NAME compile_topology=v5e-16 [search.KEY=a,b] [key=value ...]`: finds the
mesh, batch and rematerialization that fit the devices and are fastest, by the compiler for these devices."""

import gc
import json
import os
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from trainer.config.dump import to_flow
from trainer.config.errors import (
    UserError,
    closed_at_interrupt,
    command_line,
    exit_on_user_error,
    nearest,
    shortened,
)
from trainer.config.help import prints_usage
from trainer.config.load import Loaded, begin
from trainer.config.paths import local_path
from trainer.config.schema import Key, plain_name, schema
from trainer.config.values import check, read_text
from trainer.runtime.platforms import prepare_to_compile

_SEARCH = "search."
_OBJECTIVES = ("tokens", "batch")


class Words(NamedTuple):
    """A command line: the words of the configuration, and those of the plan."""

    config: list[str]
    search: dict[str, list[Any]]
    objective: str
    global_batch_tokens: int
    compiles: int
    journal: str
    json: bool


@exit_on_user_error
def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command line `argv` (default: the arguments of the process)."""
    given = command_line(argv)
    if prints_usage("plan", given):
        return
    words = read_words(given)
    begun = begin(words.config, os.environ)
    prepare_to_compile(begun.config.compile_topology)
    # The command line has been checked by itself. The following code loads JAX.
    from trainer.aot.report import DOES_NOT_FIT
    from trainer.planning.answer import answer_json, answer_text, larger_text, run
    from trainer.planning.candidate import FITS
    from trainer.planning.larger import smallest_that_fits
    from trainer.weights.model_of_command import with_model

    loaded = with_model(begun)
    space, search = _question(words, loaded)
    out = sys.stderr if words.json else sys.stdout

    def say(line: str) -> None:
        print(line, file=out, flush=True)

    for line in (*loaded.notes, *(f"warning: {warning}" for warning in loaded.warnings)):
        say(line)
    say(f"{space.size:,} points; at most {words.compiles} are compiled; results are kept in {search.journal.path}")

    def close() -> None:
        search.compiler.end()
        if search.candidates:
            say(answer_text(search, space, words.config))

    with closed_at_interrupt(close):  # Ctrl-C prints the best so far; the same command continues
        run(search, say)
    fits = any(candidate.outcome == FITS for candidate in search.candidates)
    larger = None if fits else smallest_that_fits(search, loaded.changed, say)
    if not fits:
        say(larger_text(larger))
    if words.json:
        print(json.dumps(answer_json(search, space, words.config, larger), indent=1))
    if not fits:
        raise SystemExit(DOES_NOT_FIT)


def _question(words: Words, loaded: Loaded) -> tuple[Any, Any]:
    """Returns the space of a question, and its search."""
    from trainer.aot.topologies import devices_of, topology_of
    from trainer.planning.compilation import Compiler
    from trainer.planning.journal import JOURNAL, Journal
    from trainer.planning.search import Search
    from trainer.planning.space import default_space

    if loaded.measures:
        raise UserError("max_target_length is not given, and a plan does not read the data that determine it; give it")
    config, topology, slices = loaded.config, topology_of(loaded.config), loaded.config.compile_topology_num_slices
    for key in words.search.keys() & loaded.changed.keys():
        given = f"{key}={shortened(to_flow(config[key]))} ({loaded.changed[key]})"
        raise UserError(f"search.{key} and {given}: give one of them")
    space = default_space(config, topology.devices, slices, loaded.changed, words.search, words.global_batch_tokens)
    journal = Journal(local_path(words.journal or f"{config.base_output_directory}/{JOURNAL}", "journal="))
    devices = devices_of(topology, slices)
    return space, Search(config, space, devices, journal, Compiler(), objective=words.objective, limit=words.compiles)


def read_words(given: Sequence[str]) -> Words:
    """Returns the words of a command line, sorted by their reader.

    Raises:
      UserError: a word of the plan has no valid value.
    """
    config: list[str] = []
    search: dict[str, list[Any]] = {}
    options = {"objective": _OBJECTIVES[0], "global_batch_tokens": "0", "compiles": "24", "journal": ""}
    for word in given:
        name, equals, text = word.partition("=")
        if name.startswith(_SEARCH):
            key = plain_name(name.removeprefix(_SEARCH))
            search[key] = _values(word, key, text if equals else "")
        elif equals and name in options:
            options[name] = text
        elif word != "--json":
            config.append(word)
    if options["objective"] not in _OBJECTIVES:
        raise UserError(f"objective={shortened(options['objective'])}: allowed: {', '.join(_OBJECTIVES)}")
    numbers = {name: _count(name, options[name]) for name in ("global_batch_tokens", "compiles")}
    if not numbers["compiles"]:
        raise UserError("compiles=0: nothing would be compiled; give at least 1")
    return Words(config, search, options["objective"], **numbers, journal=options["journal"], json="--json" in given)


def _count(name: str, text: str) -> int:
    if not text.isascii() or not text.isdecimal() or int(text) > 2**31:
        raise UserError(f"{name}={shortened(text)}: not a whole number from 0 to {2**31}")
    return int(text)


def _values(word: str, name: str, text: str) -> list[Any]:
    """Returns the values of search.KEY=a,b. A list is written in brackets: search.KEY=[a,b],[c]."""
    key: Key | None = schema().keys.get(name)
    if key is None:
        raise UserError(f"{shortened(word)}: there is no key {shortened(name)}{nearest(name, schema().keys)}")
    parts = text.removesuffix("]").split("],") if key.kind is list else text.split(",")
    if not text or not all(parts):
        raise UserError(f"{shortened(word)}: give the values to choose from, as in search.{name}=A,B")
    values = []
    for part in parts:
        whole = f"{part.removesuffix(']')}]" if key.kind is list else part
        try:
            value = read_text(key, whole)
        except ValueError as error:
            raise UserError(f"search.{name}: {shortened(whole)}: {error}; allowed: {key.allowed}") from None
        if problem := check(key, value):
            raise UserError(f"search.{name}: {shortened(whole)}: {problem}; allowed: {key.allowed}")
        if value not in values:
            values.append(value)
    return values


if __name__ == "__main__":
    gc.disable()
    main()

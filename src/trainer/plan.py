"""`python -m trainer.plan base.yml model_name=NAME compile_topology=v5e-16 [search.KEY=a,b] [key=value ...]`: finds the
fastest mesh, batch and rematerialization that fit the devices, according to the compiler for these devices."""

import gc
import itertools
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
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
from trainer.config.resolve import frozen
from trainer.config.scale import SCALED
from trainer.config.schema import Key, plain_name, schema
from trainer.config.values import check, read_text
from trainer.planning.space import OBJECTIVES
from trainer.runtime.platforms import prepare_to_compile
from trainer.runtime.signals import handled

_SEARCH = "search."
# Keys that search.KEY cannot vary: they select the devices, determine other keys of the model, or do not affect the
# step.
_NOT_SEARCHED = (
    *("compile_topology", "compile_topology_num_slices", "model_name", "load_parameters_path", "load_full_state_path"),
    *("global_parameter_scale", "run_name", "base_output_directory", "hardware"),
    "logical_axis_rules",  # config.load merges given rules with the defaults, but a search would not
)


class Words(NamedTuple):
    """A parsed command line: `config` contains the arguments for the configuration, and the other fields are the plan's
    options."""

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
    # All checks that do not need JAX are done. The following code loads JAX.
    from trainer.aot.report import DOES_NOT_FIT
    from trainer.planning.answer import answer_json, answer_text, larger_text
    from trainer.planning.candidate import FAILED, FITS
    from trainer.planning.larger import smallest_that_fits
    from trainer.planning.progress import run_and_tell
    from trainer.weights.model_of_command import with_model

    loaded = with_model(begun)
    out = sys.stderr if words.json else sys.stdout

    def say(line: str) -> None:
        print(line, file=out, flush=True)

    for line in (*loaded.notes, *(f"warning: {warning}" for warning in loaded.warnings)):
        say(line)
    space, search = _question(words, loaded, say)
    larger: list[Any] = []

    def close() -> None:
        search.compiler.end()
        say(answer_text(search, space, words.config))
        for found in larger:
            say(larger_text(found))
        if words.json:
            print(json.dumps(answer_json(search, space, words.config, *larger), indent=1), flush=True)

    # Ctrl-C prints the best results so far. Running the same command again continues the search.
    with closed_at_interrupt(close), handled((signal.SIGTERM, signal.SIGHUP), _end):
        run_and_tell(search, say)
        outcomes = {candidate.outcome for candidate in search.candidates}
        if FITS not in outcomes and outcomes != {FAILED}:
            larger.append(smallest_that_fits(search, loaded.changed, words.search, say))
    if FITS not in outcomes:
        raise SystemExit(1 if outcomes == {FAILED} else DOES_NOT_FIT)


def _end(number: int, frame: Any) -> None:
    """Raises an exception, so that the cleanup also ends a compilation that runs in another process."""
    raise SystemExit(128 + number)


def _question(words: Words, loaded: Loaded, say: Callable[[str], None]) -> tuple[Any, Any]:
    """Returns the space of configurations that the command line describes, and the search of this space."""
    from trainer.aot.topologies import devices_of, topology_of
    from trainer.planning.compilation import Compiler
    from trainer.planning.journal import Journal, default_path
    from trainer.planning.search import Search
    from trainer.planning.space import default_space

    if loaded.measures:
        raise UserError("max_target_length is not given, and a plan does not read the data that determine it; give it")
    config, topology, slices = loaded.config, topology_of(loaded.config), loaded.config.compile_topology_num_slices
    for key in words.search.keys() & loaded.changed.keys():
        given = f"{key}={shortened(to_flow(config[key]))} ({loaded.changed[key]})"
        raise UserError(f"search.{key} and {given}: give one of them")
    for key in words.search:
        if "global_parameter_scale" in loaded.changed and key in SCALED:
            raise UserError(f"search.{key} and global_parameter_scale: give one of them, with sizes that include it")
        if (source := loaded.sources[key]).startswith("load_parameters_path="):
            raise UserError(f"search.{key}: {source} determines this key; leave search.{key} out")
    space = default_space(config, topology.devices, slices, loaded.changed, words.search, words.global_batch_tokens)
    path = local_path(words.journal, "journal=") if words.journal else default_path(config)
    journal = Journal(path)
    say(f"{space.size:,} points; at most {words.compiles} are compiled; results are kept in {path}")
    devices = devices_of(topology, slices)
    return space, Search(config, space, devices, journal, Compiler(), objective=words.objective, limit=words.compiles)


def read_words(given: Sequence[str]) -> Words:
    """Parses a command line.

    Raises:
      UserError: an option of the plan has an invalid value.
    """
    config: list[str] = []
    search: dict[str, list[Any]] = {}
    options = {"objective": OBJECTIVES[0], "global_batch_tokens": "0", "compiles": "24", "journal": ""}
    for word in given:
        name, equals, text = word.partition("=")
        if name.startswith(_SEARCH):
            key = plain_name(name.removeprefix(_SEARCH))
            search[key] = _values(word, key, text if equals else "")
        elif equals and name in options:
            options[name] = text
        elif word != "--json":
            config.append(word)
    if options["objective"] not in OBJECTIVES:
        raise UserError(f"objective={shortened(options['objective'])}: allowed: {', '.join(OBJECTIVES)}")
    numbers = {name: _count(name, options[name]) for name in ("global_batch_tokens", "compiles")}
    if not numbers["compiles"]:
        raise UserError("compiles=0: nothing would be compiled; give at least 1")
    return Words(config, search, options["objective"], **numbers, journal=options["journal"], json="--json" in given)


def _count(name: str, text: str) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > 10 or int(text) > 2**31:
        raise UserError(f"{name}={shortened(text)}: not a whole number from 0 to {2**31}")
    return int(text)


def _values(word: str, name: str, text: str) -> list[Any]:
    """Returns the values of search.KEY=a,b. If the values are lists, they have brackets: search.KEY=[a,b],[c]."""
    key: Key | None = schema().keys.get(name)
    if key is None:
        raise UserError(f"{shortened(word)}: there is no key {shortened(name)}{nearest(name, schema().keys)}")
    if name in _NOT_SEARCHED or key.kind is dict:
        raise UserError(f"{shortened(word)}: a plan cannot vary this key; give {name}=VALUE")
    parts = _parts(key, text)
    if not parts or not all(parts):
        example = "[A],[B]" if key.kind is list else "A,B"
        raise UserError(f"{shortened(word)}: give the values to choose from, as in search.{name}={example}")
    values = []
    for part in parts:
        try:
            value = frozen(read_text(key, part))
        except ValueError as error:
            raise UserError(f"search.{name}: {shortened(part)}: {error}; allowed: {key.allowed}") from None
        if problem := check(key, value):
            raise UserError(f"search.{name}: {shortened(part)}: {problem}; allowed: {key.allowed}")
        if value not in values:
            values.append(value)
    return values


def _parts(key: Key, text: str) -> list[str]:
    """Splits A,B at its commas; for a list key, splits [a,b],[c] only at commas outside of brackets."""
    if key.kind is not list:
        return text.split(",")
    ends, depth = [-1], 0
    for place, letter in enumerate(f"{text},"):
        depth += {"[": 1, "]": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            ends.append(place)
    return [text[begin + 1 : end] for begin, end in itertools.pairwise(ends)]


if __name__ == "__main__":
    gc.disable()
    main()

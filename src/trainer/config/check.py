"""Stage 1 checks: contradictory settings that can be detected without devices."""

import re
from collections.abc import Mapping

from trainer.config.capabilities.all_keys import CHECKS as OF_CAPABILITIES
from trainer.config.capabilities.all_keys import paths_of
from trainer.config.dump import to_flow
from trainer.config.effects import no_effect_of
from trainer.config.errors import Unbuilt, shortened
from trainer.config.family import facts_of
from trainer.config.key_rows import Check, Place
from trainer.config.keys import Config, Values
from trainer.config.paths import path_problem


def contradictions(config: Config, where: Mapping[str, str], broken: set[str]) -> list[str]:
    """Returns one message for each failed check: keys, values, the source of each value (`where`), and the problem.

    Skips checks of keys in `broken`, whose values could not be read.
    """
    messages = []
    facts = None if "decoder_block" in broken else facts_of(config)
    if facts and facts.fixes:
        where = {**where, **dict.fromkeys(facts.fixes, f"always so with decoder_block={config.decoder_block}")}
        config = Values({**config, **facts.fixes})
    for keys, check in (*CHECKS, *(facts.checks if facts else ())):
        if broken.isdisjoint(keys) and (problem := check(config)):
            shown = ", ".join(f"{key}={shortened(to_flow(config[key]))} ({where[key]})" for key in keys)
            messages.append(type(problem)(f"{shown}: {problem}"))  # an Unbuilt remains an Unbuilt
    return messages


def _path(key: str) -> Check:
    separators = "[;,|:]" if key in paths_of(Place.GLOBS) else "$^"

    def problem(config: Config) -> str | None:
        if "://" in config[key]:
            return None  # `_remote` reports an unsupported one
        return next(filter(None, map(path_problem, re.split(separators, config[key]))), None)

    return (key,), problem


def _remote(key: str) -> Check:
    may_be_bucket = key in paths_of(Place.BUCKET)

    def problem(config: Config) -> str | None:
        scheme, separator, _ = config[key].partition("://")
        if not separator or (scheme == "gs" and may_be_bucket):
            return None
        if may_be_bucket:
            return Unbuilt("only gs:// is supported for remote paths")
        return None if no_effect_of(config, key) else Unbuilt("remote paths are not supported yet; give a local folder")

    return (key,), problem


CHECKS = (
    *OF_CAPABILITIES,
    *map(_remote, paths_of(Place.BUCKET, Place.LOCAL, Place.GLOBS)),
    *map(_path, paths_of(*Place)),
)

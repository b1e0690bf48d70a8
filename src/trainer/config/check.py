"""The checks of stage 1, which detect contradictory settings without knowing the devices."""

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
from trainer.config.paths import path_problem, url_problem


def contradictions(config: Config, where: Mapping[str, str], broken: set[str]) -> list[str]:
    """Returns one message for each failed check, with the keys, their values and sources, and the problem.

    `where` maps each key to the source of its value. `broken`: the keys whose values could not be read; checks of these
    keys are skipped.
    """
    messages = []
    facts = None if "decoder_block" in broken else facts_of(config)
    if facts and facts.fixes:
        where = {**where, **dict.fromkeys(facts.fixes, f"fixed by decoder_block={config.decoder_block}")}
        config = Values({**config, **facts.fixes})
    for keys, check in (*CHECKS, *(facts.checks if facts else ())):
        if broken.isdisjoint(keys) and (problem := check(config)):
            shown = ", ".join(f"{key}={shortened(to_flow(config[key]))} ({where[key]})" for key in keys)
            messages.append(type(problem)(f"{shown}: {problem}"))  # an Unbuilt remains an Unbuilt
    return messages


def _path(key: str) -> Check:
    lists = key in paths_of(Place.DATA)

    def problem(config: Config) -> str | None:
        parts = config[key].split(";") if lists else [config[key]]
        local = [part for part in parts if "://" not in part]  # `_data` or `_remote` checks URLs
        names = [name for part in local for name in (re.split("[,|:]", part) if lists else [part])]
        return next(filter(None, map(path_problem, names)), None)

    return (key,), problem


def _data(key: str) -> Check:
    def problem(config: Config) -> str | None:
        urls = [part.rpartition("|")[2].strip() for part in config[key].split(";") if "://" in part]
        wrong = next(filter(None, map(url_problem, urls)), None)
        return Unbuilt(wrong) if wrong and not no_effect_of(config, key) else None

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
    *map(_remote, paths_of(Place.BUCKET, Place.LOCAL)),
    *map(_data, paths_of(Place.DATA)),
    *map(_path, paths_of(*Place)),
)

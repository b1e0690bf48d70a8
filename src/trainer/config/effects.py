"""Keys that have no effect under certain other settings. A user who gives such a key gets a warning."""

from collections.abc import Mapping, Sequence

from trainer.config.capabilities.all_keys import INERT, INERT_HERE
from trainer.config.derived import FOLLOWS
from trainer.config.dump import to_flow
from trainer.config.family import OF_SOME, facts_of, fixed, lacks, readers
from trainer.config.files import by_hand
from trainer.config.key_rows import Inert
from trainer.config.keys import Config
from trainer.config.schema import schema


def _table(config: Config) -> list[Inert]:
    """Returns the entries of `INERT`, preceded by entries for keys that the family of `config` fixes or does not
    read."""
    facts = facts_of(config)
    ignored = facts.ignores.items() if facts else ()
    reasons = [(keys, f"decoder_block={config.decoder_block} {reason}") for reason, keys in ignored]
    others = {key: value for key, value in fixed(config).items() if config[key] != value}
    always = f"decoder_block={config.decoder_block} always has"
    reasons += [((key,), f"{always} {key}={to_flow(value)}") for key, value in others.items()]
    reasons += [((key,), f"only {readers(key)} reads it") for key in OF_SOME if lacks(config, key)]
    return [*(Inert(keys, lambda c: True, reason) for keys, reason in reasons), *INERT]


def without_effect(config: Config, changed: Mapping[str, str]) -> list[str]:
    """Returns one line for each key that the user gives although it has no effect under the other settings.

    A yml may repeat a default without a warning, so that the config.yml of a run can be used again.
    """
    return _lines(_table(config), config, changed)


def without_effect_here(config: Config, changed: Mapping[str, str], before: Config) -> list[str]:
    """Returns lines like those of `without_effect` about keys whose effect depends on the devices.

    Omits keys that have no effect whatever the devices are, because `without_effect` reports them.

    Args:
      config: the resolved configuration.
      changed: the keys that the user gives, each with its source.
      before: the configuration before it was resolved.
    """
    told = inert_keys(before)
    return _lines(INERT_HERE, config, {key: where for key, where in changed.items() if key not in told})


def _lines(table: Sequence[Inert], config: Config, changed: Mapping[str, str]) -> list[str]:
    lines: dict[str, str] = {}  # only the first reason for each key
    for inert in table:
        for key in inert.keys:
            given = key in changed and (by_hand(changed[key]) or not _repeats_default(config, key))
            if given and key not in lines and inert.when(config):
                lines[key] = f"{key}={to_flow(config[key])} ({changed[key]}) has no effect: {inert.reason}"
    return list(lines.values())


def no_effect_of(config: Config, key: str) -> str | None:
    """Returns why `key` has no effect under the settings of `config`; None if it has an effect."""
    return next((inert.reason for inert in _table(config) if key in inert.keys and inert.when(config)), None)


def inert_keys(config: Config) -> set[str]:
    """Returns the keys that have no effect under the settings of `config`, whether the user gives them or not."""
    return {key for inert in _table(config) if inert.when(config) for key in inert.keys}


def _repeats_default(config: Config, key: str) -> bool:
    default = schema().keys[key].default
    return to_flow(config[key]) == to_flow(default) or (key in FOLLOWS and config[key] == FOLLOWS[key](config))

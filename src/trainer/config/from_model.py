"""Defaults of runs that start from a model. base.yml's defaults, for training from scratch, would ruin the model."""

from collections.abc import Callable, Mapping
from typing import Any

from trainer.config.capabilities.chat_keys import DISTILL, METHODS
from trainer.config.dump import to_flow
from trainer.config.keys import Config
from trainer.config.schema import schema

TRAIN = "trainer.train"
_SOURCE = "default of {} for a run that starts from a model"

# The value of a key, or a function of the configuration that returns it.
Entry = Any | Callable[[Config], Any]


def _adapters(otherwise: float, with_adapters: float) -> Callable[[Config], float]:
    """Returns an entry of FROM_A_MODEL: its value is `with_adapters` for runs with adapters, and `otherwise` for other
    runs."""
    return lambda config: with_adapters if config.enable_lora else otherwise


_WARM_UP = {"warmup_steps_fraction": 0.1}
# The values for each command. They replace base.yml's defaults; any other source of a key takes precedence.
FROM_A_MODEL: Mapping[str, Mapping[str, Entry]] = {
    TRAIN: {"learning_rate": _adapters(2e-5, 2e-4), **_WARM_UP},
    DISTILL: {"learning_rate": _adapters(2e-5, 2e-4), **_WARM_UP},
    "trainer.sft": {"learning_rate": _adapters(2e-5, 2e-4), **_WARM_UP},
    "trainer.dpo": {"learning_rate": _adapters(5e-7, 5e-6), **_WARM_UP},
    "trainer.grpo": {"learning_rate": _adapters(1e-6, 1e-5), **_WARM_UP},
}


def command_of(config: Config) -> str:
    """Returns the command whose run the configuration describes."""
    if config.use_distill:
        return DISTILL
    return next((command for key, (command, _) in METHODS.items() if config[key]), TRAIN)


def starts_from_model(config: Config) -> bool:
    """Returns whether a run begins with trained parameters. In `trainer.train` and `trainer.distill`, the key
    load_full_state_path does not count, because it continues a run, which usually began from scratch."""
    continues = command_of(config) not in (TRAIN, DISTILL) and config.load_full_state_path
    return bool(config.load_parameters_path or continues)


def defaults_from_model(config: Config) -> dict[str, tuple[Any, str]]:
    """Returns the values of FROM_A_MODEL that apply to `config`, each with its source; {} if none applies."""
    if not starts_from_model(config):
        return {}
    command = command_of(config)
    return {
        name: (entry(config) if callable(entry) else entry, _SOURCE.format(command))
        for name, entry in FROM_A_MODEL[command].items()
    }


def taken_from_model(values: Config, sources: Mapping[str, str]) -> str:
    """Returns a line about the values that come from FROM_A_MODEL; "" if all of them equal base.yml's defaults."""
    source = _SOURCE.format(command_of(values))
    taken = [name for name, where in sources.items() if where == source]
    if all(values[name] == schema().keys[name].default for name in taken):
        return ""
    shown = " ".join(f"{name}={to_flow(values[name])}" for name in taken)
    return f"{shown} ({source}; base.yml's defaults are for training from scratch)"

"""How often a run goes over its training data."""

from fractions import Fraction

from trainer.config.derived import global_batch_rows
from trainer.config.keys import Config
from trainer.data.dataset import Dataset


def steps_of(config: Config, dataset: Dataset) -> int:
    """Returns the number of updates of `num_epoch` passes over the data, rounded up; with reinforcement learning, those
    of whole rounds. `config` is resolved."""
    assert dataset.epoch is not None, "the configuration was checked"
    every = config.rl_num_iterations if config.use_grpo else 1
    return -int(-config.num_epoch * dataset.epoch.rows // (_rows(config) * every)) * every


def passes_text(config: Config, dataset: Dataset) -> str:
    """Returns the passes of the steps of `config`, resolved: " (1.6 passes over 180 conversations)"; "" if unknown."""
    if dataset.epoch is None:
        return ""
    passes = float(config.steps * _rows(config) / dataset.epoch.rows)
    number = f"{passes:,.0f}" if passes >= 10 else f"{passes:.2g}"
    return f" ({number} {'pass' if number == '1' else 'passes'} over {dataset.epoch.content})"


def _rows(config: Config) -> Fraction:
    """Returns the rows of an update; with reinforcement learning, its share of the prompts of a round."""
    return (
        Fraction(config.batch_size, config.rl_num_iterations)
        if config.use_grpo
        else Fraction(global_batch_rows(config))
    )

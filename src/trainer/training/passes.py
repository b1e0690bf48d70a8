"""The number of passes of a run over its training data."""

from collections.abc import Iterator
from fractions import Fraction

from trainer.config.derived import global_batch_rows, has_rollouts
from trainer.config.keys import Config
from trainer.data.dataset import Dataset


def steps_of(config: Config, dataset: Dataset) -> int:
    """Returns the number of updates for `num_epoch` passes over the data, rounded up (with rollouts, to complete
    rounds). `config` is resolved."""
    assert dataset.epoch is not None, "the configuration was checked"
    every = config.rl_num_iterations if has_rollouts(config) else 1
    return -int(-config.num_epoch * dataset.epoch.rows // (_rows(config) * every)) * every


def passes_text(config: Config, dataset: Dataset) -> str:
    """Returns the passes as text, such as " (1.6 passes over 180 conversations)"; "" if unknown. `config`: resolved."""
    if dataset.epoch is None:
        return ""
    return f" ({_passes(config.steps * _rows(config) / dataset.epoch.rows)} over {dataset.epoch.content})"


def mixture_lines(config: Config, dataset: Dataset) -> Iterator[str]:
    """Yields a line for each component of a mixture, with the number of tokens in the component and the number of its
    tokens that the run trains on, including repetitions. `config`: resolved."""
    for component in dataset.mixture:
        passes = float(config.steps * _rows(config)) * component.share / component.rows
        tokens = f"{passes * component.tokens:,.0f} trained tokens, {_passes(passes)} over {component.tokens:,}"
        yield f"mixture      {component.share:.1%} of the rows from {component.label}: {tokens}"


def _passes(number: Fraction | float) -> str:
    text = f"{float(number):,.0f}" if number >= 10 else f"{float(number):.2g}"
    return f"{text} {'pass' if text == '1' else 'passes'}"


def _rows(config: Config) -> Fraction:
    """Returns the number of rows per update; with rollouts, the number of prompts in a round divided by the number of
    updates in a round."""
    return (
        Fraction(config.batch_size, config.rl_num_iterations)
        if has_rollouts(config)
        else Fraction(global_batch_rows(config))
    )

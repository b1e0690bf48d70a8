"""Warns if the first updates of a run that starts from a trained model destroy that model."""

from collections.abc import Callable

from trainer.config.keys import Config
from trainer.config.words import counted

# Warns if a loss exceeds both FACTOR times the first loss and the first loss plus MARGIN nats. As long as a model does
# not change, its losses on different batches differ by less.
FACTOR, MARGIN = 2.0, 1.0
UPDATES = 20  # the number of updates to watch


class FirstLosses:
    """Watches the losses of the first updates. The first loss is computed before any update."""

    def __init__(self, config: Config, begin: int, say: Callable[[str], None]):
        """`begin`: the number of updates already in the initial state."""
        self._config, self._begin, self._say = config, begin, say
        self._first: float | None = None
        self._ends = begin + UPDATES if config.load_parameters_path or config.load_full_state_path else begin

    def add(self, step: int, loss: float) -> None:
        """Checks a step's loss, which is in nats and computed before the step's update. Warns at most once."""
        if step > self._ends or self._ends == self._begin:
            return
        if self._first is None:
            self._first = loss
        elif loss > self._first + MARGIN and loss > FACTOR * self._first:
            self._ends = self._begin
            times = f", {loss / self._first:.1f} times the first" if self._first > 0 else ""
            self._say(
                f"warning: the loss rose from {self._first:.2f} to {loss:.2f}{times}, after "
                f"{counted(step - self._begin, 'update')}: learning_rate={self._config.learning_rate:g} is probably "
                "too high for the model that the run starts from; begin a new run with a lower one"
            )

"""What a run shows and leaves behind: the console, the run directory, the metrics file. Importing it loads no JAX."""

from trainer.observe.console import Console
from trainer.observe.metrics import MetricsWriter
from trainer.observe.rundir import RunDir, open_run
from trainer.observe.text import perplexity

__all__ = ["Console", "MetricsWriter", "RunDir", "open_run", "perplexity"]

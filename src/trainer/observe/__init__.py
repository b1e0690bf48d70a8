"""The output of a run: the console, the run directory, the metrics files. Importing it does not load JAX."""

from trainer.observe.banner import Needs, product_rows, work_of
from trainer.observe.console import Console
from trainer.observe.events import EventsWriter
from trainer.observe.metrics import MetricsWriter, TokensSeen
from trainer.observe.metrics_file import MetricsFile, maxtext_row
from trainer.observe.profiler import Profiler
from trainer.observe.report_file import ReportFile
from trainer.observe.rollouts import RolloutFiles
from trainer.observe.rundir import RunDir
from trainer.observe.runs import check_earlier, expected_run, open_run
from trainer.observe.text import perplexity

__all__ = [
    "Console",
    "EventsWriter",
    "MetricsFile",
    "MetricsWriter",
    "Needs",
    "Profiler",
    "ReportFile",
    "RolloutFiles",
    "RunDir",
    "TokensSeen",
    "check_earlier",
    "expected_run",
    "maxtext_row",
    "open_run",
    "perplexity",
    "product_rows",
    "work_of",
]

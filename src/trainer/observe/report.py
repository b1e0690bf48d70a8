"""report: one self-contained HTML page on one run, or on several side by side."""

import contextlib
import html
import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from trainer.config import UserError, read_saved, schema
from trainer.observe.chart import BINS, COLOURS, Line, histogram, line_chart
from trainer.observe.metrics import METRICS_FILE, read_rows
from trainer.observe.rundir import CONFIG_FILE, REPORT_FILE
from trainer.observe.text import short_time, si

# (title, field of a row, unit)
_CHARTS = (
    ("Loss", "loss", "nats per token, all terms"),
    ("Evaluation loss", "eval_loss", "nats per token"),
    ("Evaluation", "eval_bits_per_byte", "bits per byte"),
    ("Learning rate", "learning_rate", ""),
    ("Gradient norm", "grad_norm", "before clipping"),
    ("Throughput", "tokens_per_second", "tokens per second"),
    ("Waiting for data", "data_wait", "share of the step time"),
    ("Skipped updates", "skipped", "1: skipped"),
    ("Memory", "memory", "peak, bytes of the fullest device"),
)
# Sections of the measures that only some runs have, and the ends of the names of their fields.
_SECTIONS = {
    "Multi-token prediction": ("mtp_loss", "mtp_z_loss", "mtp_acceptance_rate"),
    "DiLoCo": ("outer_grad_norm", "island_losses", "island_distance", "island_cosine"),
    "QK-Clip": ("max_logit", "clipped_heads"),
    "Routers": (
        "moe_lb_loss",
        "router_z_loss",
        "router_entropy",
        "expert_load",
        "tokens_per_expert",
        "dropped_tokens",
    ),
}
# Fields without a chart: those of the summary and the histogram, and what others say in another unit.
_NOT_DRAWN = ("step", "tokens", "tokens_seen", "step_time", "eval_tokens", "eval_time", "eval_perplexity")
# In the order of their charts. A tensor of a stack has one number for each layer.
_PERIODIC = ("grad_norm/", "param_norm/", "update_ratio/")  # `parameter_metrics_period`

_FOLDED = 12  # a section of more charts is folded
_LARGEST = 1e300  # differences of smaller numbers are finite

_STYLE = """
:root { color-scheme: light dark; --text: #1d1d1f; --back: #fff; --faint: #6b6b70; --grid: #e3e3e6;
  --c0: #1f5fbf; --c1: #c2410c; --c2: #15803d; --c3: #9333ea; --c4: #0e7490; --c5: #a16207; }
@media (prefers-color-scheme: dark) { :root { --text: #e8e8ea; --back: #17181a; --faint: #9b9ba1; --grid: #33353a;
  --c0: #7ab0ff; --c1: #ff9b6a; --c2: #6fd694; --c3: #c99bff; --c4: #67d4ea; --c5: #e6c15c; } }
body { margin: 0 auto; max-width: 1240px; padding: 1rem; font: 15px/1.45 system-ui, sans-serif;
  color: var(--text); background: var(--back); }
h1 { font-size: 1.4rem; overflow-wrap: anywhere; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.charts { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fill, minmax(min(100%, 380px), 1fr)); }
summary { cursor: pointer; } figure { margin: 0; break-inside: avoid; }
figcaption { font-weight: 600; } .unit { font-weight: 400; color: var(--faint); }
svg { width: 100%; height: auto; } svg text { font-size: 11px; fill: var(--faint); }
polyline { fill: none; stroke-width: 1.5; } .area { fill-opacity: .15; } .grid { stroke: var(--grid); }
.wide { overflow-x: auto; } table { border-collapse: collapse; }
th, td { text-align: left; padding: .15rem .9rem .15rem 0; border-bottom: 1px solid var(--grid); vertical-align: top; }
td + td { overflow-wrap: anywhere; } td { font-variant-numeric: tabular-nums; }
"""
_COLOURS = "".join(
    f"polyline.c{n} {{ stroke: var(--c{n}); }} polyline.c{n}.area, circle.c{n} {{ fill: var(--c{n}); }} "
    f".name.c{n} {{ color: var(--c{n}); font-weight: 600; }}\n"
    for n in range(COLOURS)
)


class Recorded(NamedTuple):
    """What a run's folder says about the run.

    Attributes:
      name: of the folder.
      rows: of metrics.jsonl.
      config: the resolved configuration; empty if config.yml is missing.
    """

    name: str
    rows: list[dict[str, Any]]
    config: dict[str, Any]


def read_run(folder: Path) -> Recorded:
    """The records of a run.

    Raises:
      UserError: the folder holds no metrics.jsonl, or one of its files is damaged.
    """
    metrics, config = folder / METRICS_FILE, folder / CONFIG_FILE
    if not metrics.is_file():
        raise UserError(
            f"{folder} is not the folder of a run: it has no {METRICS_FILE}; give base_output_directory/run_name"
        )
    text = config.read_bytes().decode("utf-8", "replace") if config.is_file() else ""
    saved = read_saved(text, str(config)) if text else {}
    return Recorded(folder.resolve().name, read_rows(metrics), saved)


class ReportFile:
    """report.html in the folder of a run that is going on. What prevents writing it is reported and ends no run."""

    def __init__(self, folder: Path, say: Callable[[str], None]):
        self._folder, self._say = folder, say
        self._next = 0.0

    def refresh(self) -> None:
        """Writes the page if that takes at most a hundredth of the time since it was last written."""
        if time.monotonic() >= self._next:
            self.write()

    def write(self) -> None:
        """Writes the page."""
        began = time.monotonic()
        path = self._folder / REPORT_FILE
        temporary = path.with_name(f"{REPORT_FILE}.tmp")
        try:
            temporary.write_text(report_html([read_run(self._folder)]), encoding="utf-8")
            temporary.replace(path)
        except (OSError, UserError) as error:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)  # a part of a page, on a disk that may be full
            self._say(f"warning: {path} is not written: {error}")
        ended = time.monotonic()
        self._next = ended + 100 * (ended - began)


def report_html(runs: Sequence[Recorded]) -> str:
    """The page on `runs`, without links to other files."""
    title = " and ".join(run.name for run in runs)
    charts = [line_chart(name, _lines(runs, field), unit) for name, field, unit in _CHARTS]
    charts.append(histogram("Step time", _lines(runs, "step_time"), "seconds"))
    others = _others(runs)
    grouped = {title: [name for name in others if name.endswith(ends)] for title, ends in _SECTIONS.items()}
    grouped["Further measures"] = [name for name in others if not any(name in found for found in grouped.values())]
    grouped["Parameters"] = _per_parameter(runs)
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        _table(["", *(_name(number, run) for number, run in enumerate(runs))], _summary(runs)),
        '<h2>Training</h2><div class="charts">' + "".join(charts) + "</div>",
        *(
            _section(name, [line_chart(field, _lines(runs, field)) for field in found])
            for name, found in grouped.items()
        ),
        _thinned(runs),
        "<h2>Configuration</h2>",
        "<p>The keys whose values differ from base.yml" + (" or between the runs" if len(runs) > 1 else "") + ".</p>",
        _table(["key", *(_name(number, run) for number, run in enumerate(runs)), "base.yml"], _settings(runs)),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}{_COLOURS}</style></head>\n<body>"
        + "\n".join(part for part in parts if part)
        + "</body></html>\n"
    )


def _lines(runs: Sequence[Recorded], field: str) -> list[Line]:
    """The values of a field of metrics.jsonl: a line for each run."""
    found = [[row for row in run.rows if field in row] for run in runs]
    return [
        Line(run.name, [row["step"] for row in rows], [_number(row[field]) for row in rows])
        for run, rows in zip(runs, found, strict=True)
    ]


def _number(value: Any) -> float:
    """A number of a row; of a list, such as one number for each layer, the largest. NaN for anything else: a file that
    somebody edited prevents no chart."""
    if isinstance(value, list):
        return max((number for number in map(_number, value) if math.isfinite(number)), default=math.nan)
    return float(value) if isinstance(value, int | float) and abs(value) < _LARGEST else math.nan


def _values(rows: Sequence[dict[str, Any]], field: str) -> list[float]:
    """The finite numbers of a field."""
    found = (_number(row.get(field)) for row in rows)
    return [number for number in found if math.isfinite(number)]


def _section(title: str, charts: Sequence[str]) -> str:
    if not any(charts):
        return ""
    said = "Where a step has a list of numbers, such as one for each layer, the largest of them."
    page = f'<p>{said}</p><div class="charts">{"".join(charts)}</div>'
    if len(charts) <= _FOLDED:
        return f"<h2>{title}</h2>{page}"
    return f"<h2>{title}</h2><details><summary>{len(charts)} charts</summary>{page}</details>"


def _thinned(runs: Sequence[Recorded]) -> str:
    """Which lines do not show every point."""
    most = max(len(run.rows) for run in runs)
    if most <= 2 * BINS:
        return ""
    return f"<p>A line of more than {2 * BINS} points shows the lowest and the highest of each of {BINS} intervals.</p>"


def _names(runs: Sequence[Recorded]) -> list[str]:
    return list({name: None for run in runs for row in run.rows for name in row})


def _per_parameter(runs: Sequence[Recorded]) -> list[str]:
    return [name for name in _names(runs) if name.startswith(_PERIODIC)]


def _others(runs: Sequence[Recorded]) -> list[str]:
    """The fields that have no chart of their own: terms of the loss, memory, measures of islands, heads and routers."""
    drawn = {field for _, field, _ in _CHARTS} | set(_NOT_DRAWN)
    names = [name for name in _names(runs) if name not in drawn and not name.startswith(_PERIODIC)]
    loss = [line.ys for line in _lines(runs, "loss")]
    # The only term of the loss is the loss.
    return [name for name in names if [line.ys for line in _lines(runs, name)] != loss]


def _summary(runs: Sequence[Recorded]) -> list[list[str]]:
    columns = [_facts(run) for run in runs]
    names = dict.fromkeys(name for facts in columns for name in facts)
    return [[name, *(html.escape(facts.get(name, "")) for facts in columns)] for name in names]


def _facts(run: Recorded) -> dict[str, str]:
    steps = [row for row in run.rows if "loss" in row]
    evaluations = [row for row in run.rows if "eval_loss" in row]
    total = run.config.get("steps")
    total = total if isinstance(total, int) else None
    facts = {"updates": f"{steps[-1]['step'] + 1 if steps else 0:,}" + (f" of {total:,}" if total else "")}
    if not steps:
        return facts
    facts["tokens"] = f"{sum(_values(steps, 'tokens')):,.0f}"
    times, rates = _values(steps, "step_time"), _values(steps, "tokens_per_second")
    if times and rates:
        speed, each = statistics.median(rates), statistics.median(times)
        facts["speed"] = f"{si(speed, 'tok/s')}, {short_time(each)} per step (medians)"
    facts["last loss"] = f"{_number(steps[-1]['loss']):.4f}"
    if skipped := sum(_values(steps, "skipped")):
        facts["skipped updates"] = f"{skipped:,.0f}"
    losses = [(_number(row["eval_loss"]), row["step"]) for row in evaluations]
    if losses:
        facts["last evaluation"] = "{:.4f} after step {}".format(*losses[-1])
    if finite := [it for it in losses if math.isfinite(it[0])]:
        facts["best evaluation"] = "{:.4f} after step {}".format(*min(finite))
    return facts


def _settings(runs: Sequence[Recorded]) -> list[list[str]]:
    rows = []
    for name, key in schema().keys.items():
        values = [run.config.get(name, key.default) for run in runs]
        if any(value != key.default for value in values):
            rows.append([name, *(html.escape(str(value)) for value in values), html.escape(str(key.default))])
    return rows


def _name(number: int, run: Recorded) -> str:
    return f'<span class="name c{number % COLOURS}">{html.escape(run.name)}</span>'


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{"".join(f"<th>{cell}</th>" for cell in head)}</tr>{body}</table></div>'

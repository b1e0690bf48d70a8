"""Builds a self-contained HTML page about one run, or about several runs side by side."""

import html
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.config.dump import to_flow
from trainer.config.schema import schema
from trainer.config.words import visible
from trainer.observe.chart import COLOURS, Line, histogram, line_chart
from trainer.observe.metrics import TASKS_TIME
from trainer.observe.record import Record
from trainer.observe.report_style import STYLE
from trainer.observe.rundir import ROLLOUTS
from trainer.observe.series import INTERVALS, Series, number
from trainer.observe.text import clock

# (title, field of metrics.jsonl, unit, factor that converts the field to that unit)
_CHARTS = (
    ("Reward", "reward", "mean of a round", 1),
    ("Loss", "loss", "nats per token or pair, all terms", 1),
    ("Evaluation loss", "eval_loss", "nats per token or pair", 1),
    ("Evaluation", "eval_bits_per_byte", "bits per byte", 1),
    ("Learning rate", "learning_rate", "", 1),
    ("Gradient norm", "grad_norm", "before clipping", 1),
    ("Throughput", "tokens_per_second", "trained tokens per second", 1),
    ("Waiting for data", "data_wait", "share of the step time", 1),
    ("Skipped updates", "skipped", "1: skipped", 1),
    ("Memory", "memory", "peak of the fullest device, GB", 1e-9),
)
# Sections for metrics that only some runs have: a dict from a section's title to the suffixes of its fields' names.
_SECTIONS = {
    "Multi-token prediction": ("mtp_loss", "mtp_z_loss", "mtp_acceptance_rate"),
    "Distillation": ("distill_loss", "label_loss", "divergence", "teacher_lm_loss"),
    "Preferences": (
        *("dpo_loss", "sft_loss", "odds_ratio_loss", "chosen_nll"),
        *("chosen_reward", "rejected_reward", "reward_margin", "reward_accuracy"),
    ),
    "Rollouts": (
        *("eval_reward", "reward_std", "completion_tokens", "kl", "kl_loss", "policy_loss", "clip_fraction"),
        *("rollout_log_prob_max_diff", "rollout_time", "truncated", "equal_groups", "rewards_timed_out"),
    ),
    "DiLoCo": ("outer_grad_norm", "island_losses", "island_distance", "island_cosine"),
    "QK-Clip": ("max_logit", "clipped_heads"),
    "Routers": ("moe_lb_loss", "router_z_loss", "router_entropy", "expert_load", "tokens_per_expert", "dropped_tokens"),
}
# Fields without a line chart: the summary or the histogram shows them, or they repeat another field in another unit.
_NOT_DRAWN = ("step", "tokens", "tokens_seen", "step_time", "eval_tokens", "eval_time", "eval_perplexity", TASKS_TIME)
_OF_SCORES = ("_stderr", "/samples")  # suffixes of fields that accompany the scores TASK/METRIC; not charted
# Prefixes of the fields that exist for each parameter. A stacked parameter's field is a list, with one number per
# layer.
_PERIODIC = ("grad_norm/", "param_norm/", "update_ratio/")  # written if `parameter_metrics_period` is set

_FOLDED = 12  # a section with more charts is folded
_SAMPLES = 3  # the maximum number of samples
# The maximum numbers of prompts per round, of best answers per prompt (the same number of worst answers is shown), and
# of characters per text.
_PROMPTS, _ANSWERS, _CHARACTERS = 4, 2, 600
_COMPUTED = "computed from the other keys and the devices"


def report_html(runs: Sequence[Record]) -> str:
    """Returns the HTML page about `runs`, which needs no other files."""
    title = " and ".join(run.name for run in runs)
    alone, heads = len(runs) == 1, [_name(number, run) for number, run in enumerate(runs)]
    charts = [line_chart(name, _lines(runs, field), unit, scale) for name, field, unit, scale in _CHARTS]
    charts.append(histogram("Step time", [run.step_times for run in runs], "seconds"))
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        _table([] if alone else ["", *heads], _summary(runs)),
        '<h2>Training</h2><div class="charts">' + "".join(charts) + "</div>",
        *(
            _section(name, [line_chart(field, _lines(runs, field)) for field in names])
            for name, names in _grouped(runs).items()
        ),
        _notes(runs),
        *(part(run, alone) for part in (_time, _samples, _rollouts, _starts, _sharding) for run in runs),
        _settings(runs, ["value"] if alone else heads),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style></head>\n<body>"
        + "\n".join(part for part in parts if part)
        + "</body></html>\n"
    )


def _lines(runs: Sequence[Record], field: str) -> list[Line]:
    """Returns one chart line per run for a field of metrics.jsonl; [] if the field is `skipped` and no run skipped an
    update."""
    if field == "skipped" and not any(run.sums["skipped"] for run in runs):
        return []
    return [Line(run.name, run.series.get(field, Series()), run.resumed_at()) for run in runs]


def _grouped(runs: Sequence[Record]) -> dict[str, list[str]]:
    """Returns a dict from a section's title to the fields that the section charts. Fields in `_CHARTS` are left out."""
    drawn = {field for _, field, *_ in _CHARTS} | set(_NOT_DRAWN)
    names = [name for name in dict.fromkeys(name for run in runs for name in run.series) if name not in drawn]
    periodic = [name for name in names if name.startswith(_PERIODIC)]
    # If the loss has only one term, a chart of the term would repeat the chart of the loss.
    others = [name for name in names if name not in periodic and not all(run.is_loss(name) for run in runs)]
    groups = {title: [name for name in others if name.endswith(ends)] for title, ends in _SECTIONS.items()}
    scores = [name for name in others if "/" in name]
    others = [name for name in others if name not in scores]
    groups = {"Tasks": [name for name in scores if not name.endswith(_OF_SCORES)]} | groups
    groups["Further measures"] = [name for name in others if not any(name in group for group in groups.values())]
    return groups | {"Parameters": periodic}


def _section(title: str, charts: Sequence[str]) -> str:
    if not any(charts):
        return ""
    said = "If a step has several values, such as one per layer, the chart shows the largest."
    page = f'<p>{said}</p><div class="charts">{"".join(charts)}</div>'
    if len(charts) <= _FOLDED:
        return f"<h2>{title}</h2>{page}"
    return f"<h2>{title}</h2><details><summary>{len(charts)} charts</summary>{page}</details>"


def _notes(runs: Sequence[Record]) -> str:
    """Returns notes that a reader needs to understand the charts."""
    notes = []
    if any(series.thinned for run in runs for series in run.series.values()):
        notes.append(
            f"Long runs are divided into at most {INTERVALS} intervals, and a line shows only the lowest and the "
            "highest value of each interval."
        )
    if any(run.resumed_at() for run in runs):
        notes.append("A dashed line marks the step at which a run was resumed.")
    return f"<p>{' '.join(notes)}</p>" if notes else ""


def _summary(runs: Sequence[Record]) -> list[list[str]]:
    columns = [run.facts() for run in runs]
    names = dict.fromkeys(name for facts in columns for name in facts)
    return [[name, *(html.escape(facts.get(name, "")) for facts in columns)] for name in names]


def _time(run: Record, alone: bool) -> str:
    """Returns a bar and a table that show how all processes of the run together spent their time."""
    spent = run.goodput.seconds()
    whole = sum(spent.values())
    if not whole:
        return ""
    shades = [f"opacity: {1 - 0.9 * number / len(spent):.2f}" for number in range(len(spent))]
    bar = "".join(
        f'<span style="flex: {seconds / whole:.4f}; {shade}" title="{html.escape(part)}"></span>'
        for (part, seconds), shade in zip(spent.items(), shades, strict=True)
    )
    rows = [
        [f'<span class="swatch" style="{shade}"></span> {html.escape(part)}', clock(seconds), f"{seconds / whole:.1%}"]
        for (part, seconds), shade in zip(spent.items(), shades, strict=True)
    ]
    table = _table(["", f"of {run.goodput.total()}", "share"], rows)
    return f'<h2>{_titled("Time", run, alone)}</h2><div class="bar">{bar}</div>{table}'


def _samples(run: Record, alone: bool) -> str:
    """Returns the latest texts generated by the model, the newest first."""
    shown = []
    for row in run.samples[: -_SAMPLES - 1 : -1]:
        prompt, text = visible(str(row.get("prompt", ""))), visible(str(row.get("text", "")))
        begins = f"<b>{html.escape(prompt)}</b>" if text.startswith(prompt) else ""
        rest = html.escape(text.removeprefix(prompt) if begins else text)
        shown.append(f"<p>After {row['step']:,} updates:</p><pre>{begins}{rest}</pre>")
    return f"<h2>{_titled('Sample', run, alone)}</h2>{''.join(shown)}" if shown else ""


def _rollouts(run: Record, alone: bool) -> str:
    """Returns a few prompts of the newest round with some of their answers.

    If answers have rewards, shows the best and the worst answers of each prompt. Prompts whose answers have different
    rewards come first.
    """
    if not run.rollouts:
        return ""
    groups = [list(rows) for _, rows in itertools.groupby(run.rollouts, key=lambda row: row.get("prompt"))]
    groups.sort(key=lambda rows: len({number(row.get("reward")) for row in rows}) == 1)
    names = ["reward", "advantage", "times", "answer"] if "reward" in run.rollouts[0] else ["answer"]
    shown = []
    for rows in groups[:_PROMPTS]:
        counts = Counter(map(_answer, rows))
        best_first = sorted(counts, key=lambda answer: -answer[0])
        few = best_first[:_ANSWERS] + best_first[_ANSWERS:][-_ANSWERS:]
        cells = [[f"{answer[0]:.4g}", f"{answer[1]:.2f}", str(counts[answer]), answer[2]] for answer in few]
        table = _table(names, [cell[-len(names) :] for cell in cells], "wide texts")
        shown.append(f"<pre>{_excerpt(rows[0].get('prompt'))}</pre>{table}")
    said = f"From the round before step {run.rollouts[0]['step']:,}; all answers are in the folder {ROLLOUTS}."
    return f"<h2>{_titled('Answers', run, alone)}</h2><p>{said}</p>{''.join(shown)}"


def _answer(row: Mapping[str, Any]) -> tuple[float, float, str]:
    """Returns the reward and the advantage of a completion, and its text as HTML."""
    reward, advantage = number(row.get("reward")), number(row.get("advantage"))
    cut = ' <span class="unit">(no end)</span>' if row.get("truncated") else ""
    return reward, advantage, _excerpt(row.get("completion")) + cut


def _excerpt(value: Any) -> str:
    """Returns the text `value` as escaped HTML. Leaves out the middle of a long text."""
    text, half = str(value), _CHARACTERS // 2
    return html.escape(visible(text if len(text) <= _CHARACTERS else f"{text[:half]} ... {text[-half:]}"))


def _starts(run: Record, alone: bool) -> str:
    """Returns a table with a row for each start of the run, or an empty string if the run was never resumed."""
    if not run.resumed_at():
        return ""
    fields = ("step", "time", "devices", "mesh", "combination")
    rows = [[html.escape(str(start.get(field, ""))) for field in fields] for start in run.starts]
    return f"<h2>{_titled('Starts', run, alone)}</h2>" + _table(["from step", *fields[1:]], rows, "wide fixed")


def _sharding(run: Record, alone: bool) -> str:
    """Returns a collapsed table of the shardings of the train state and the gradients, as recorded at the latest
    start."""
    shardings: Any = run.starts[-1].get("sharding") if run.starts else None
    shardings = shardings if isinstance(shardings, dict) else {}
    rows = [_texts(row) for row in _list(shardings.get("rows"))]
    if not rows:
        return ""
    totals = "<br>".join(_texts(shardings.get("totals")))
    mesh = html.escape(str(run.starts[-1].get("mesh", "")))
    table = _table(_texts(shardings.get("columns")), rows, "wide fixed")
    return (
        f"<h2>{_titled('Sharding', run, alone)}</h2><p>Mesh: {mesh}.</p><p>{totals}</p>"
        f"<details><summary>{len(rows)} tensors</summary>{table}</details>"
    )


def _settings(runs: Sequence[Record], heads: Sequence[str]) -> str:
    """Returns a table of the keys with non-default values. For a single run, it also shows where each value was set."""
    rows, alone = [], len(runs) == 1
    sources = runs[0].starts[-1].get("sources") if alone and runs[0].starts else None
    for name, key in schema().keys.items():
        values = [run.config.get(name, key.default) for run in runs]
        if any(value != key.default for value in values):
            row = [name, *(to_flow(value) for value in values), to_flow(key.default)]
            if isinstance(sources, dict):
                row.append(str(sources.get(name, _COMPUTED)))
            rows.append([html.escape(cell) for cell in row])
    which = "" if alone else " or between the runs"
    return f"<h2>Configuration</h2><p>The keys whose values differ from base.yml{which}.</p>" + _table(
        ["key", *heads, "base.yml", *(["source"] if isinstance(sources, dict) else [])], rows
    )


def _list(value: Any) -> list[Any]:
    """Returns `value` if it is a list, and [] otherwise, because starts.json may have been edited manually."""
    return value if isinstance(value, list) else []


def _texts(value: Any) -> list[str]:
    return [html.escape(str(item)) for item in _list(value)]


def _titled(title: str, run: Record, alone: bool) -> str:
    return title if alone else f'{title} <span class="unit">{html.escape(run.name)}</span>'


def _name(number: int, run: Record) -> str:
    return f'<span class="name c{number % COLOURS}">{html.escape(run.name)}</span>'


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "wide") -> str:
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    first = f"<tr>{''.join(f'<th>{cell}</th>' for cell in head)}</tr>" if head else ""
    return f'<div class="{kind}"><table>{first}{body}</table></div>'

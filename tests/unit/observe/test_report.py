"""The report of a run: a self-contained page, with charts of the right numbers."""

import html.parser
import json
import math
import re
import shutil
import subprocess
import sys

import pytest

from trainer import report
from trainer.observe import report_file
from trainer.observe.chart import Line, histogram, line_chart
from trainer.observe.metrics import read_rows
from trainer.observe.record import Record
from trainer.observe.report_file import ReportFile
from trainer.observe.series import INTERVALS, Series

VOID = {"meta", "line", "circle", "polyline", "br"}
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Page(html.parser.HTMLParser):
    """Fails on an unclosed element, and collects the text of the page and the resources that it would load."""

    def __init__(self, text):
        super().__init__()
        self.open, self.text, self.loads, self.count = [], [], [], {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.count[tag] = self.count.get(tag, 0) + 1
        self.loads += [value for name, value in attrs if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        assert tag in VOID
        self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text.append(data)


def make_run(folder, rate, steps=30):
    folder.mkdir()
    (folder / "config.yml").write_text(f"steps: 30\nlearning_rate: {rate}\nrun_name: '{folder.name}'\n")
    rows = []
    for step in range(steps):
        row = {"step": step, "loss": 5 / (step + 1), "lm_loss": 1.0, "grad_norm": 1.0, "skipped": 0, "tokens": 64}
        row |= {"learning_rate": rate, "tokens_per_second": 640.0, "step_time": 0.1, "data_wait": 0.0}
        rows.append(row | ({"param_norm/head": 2.0, "param_norm/mlp": [1.0, 3.0]} if step % 10 == 0 else {}))
    rows.append({"step": steps - 1, "eval_loss": 4.25, "eval_tokens": 64})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def page_of(*words):
    report.main([str(word) for word in words])


def test_the_page_of_a_run_is_whole_and_loads_nothing(tmp_path, capsys):
    run = make_run(tmp_path / "a<b>&c", 0.5, steps=20)
    page_of(run)
    text = (run / "report.html").read_text()
    page = Page(text)
    assert page.loads == []
    assert not re.search(r"https?:|url\(|@import|<script", text)
    words = "|".join(page.text)
    for wanted in (
        "a<b>&c",
        "20 of 30",
        "1,280",
        "640 tok/s trained, 100 ms",
        "4.2500 after step 19",
        "param_norm/mlp",
    ):
        assert wanted in words, wanted
    assert "prefers-color-scheme: dark" in text
    assert page.count["svg"] == 10  # loss, evaluation, rate, norm, throughput, waiting, term, two parameters, times
    assert f"wrote {run / 'report.html'}" in capsys.readouterr().out


def test_runs_side_by_side(tmp_path):
    one, two = make_run(tmp_path / "one", 0.5), make_run(tmp_path / "two", 0.25, steps=10)
    page_of(one, two, f"out={tmp_path / 'both.html'}")
    text = (tmp_path / "both.html").read_text()
    row = next(part for part in text.split("<tr>") if part.startswith("<td>learning_rate</td>"))
    assert row.startswith("<td>learning_rate</td><td>0.5</td><td>0.25</td>")
    assert "<td>steps</td><td>30</td><td>30</td>" in text
    loss = Page(text) and next(part for part in text.split("<figure>") if "Loss" in part)
    assert [len(found.split()) for found in re.findall(r'points="([^"]*)"', loss)] == [30, 10]


def test_how_each_run_spent_its_time(tmp_path):
    one, two = make_run(tmp_path / "one", 0.5), make_run(tmp_path / "two", 0.25)
    events = [{"job_start_time": 1}, {"step_start_time": 1801, "step_count": 0}, {"job_end_time": 7201}]
    (one / "goodput.jsonl").write_text("\n".join(map(json.dumps, events)))
    page_of(one, two, f"out={tmp_path / 'both.html'}")
    text = (tmp_path / "both.html").read_text()
    assert "of 2:00:00 in 1 process|share|" in "|".join(Page(text).text)
    assert re.findall(r"</span> (.*?)</td><td>(.*?)</td><td>(.*?)<", text) == [
        ("steps", "1:30:00", "75.0%"),
        ("start", "0:30:00", "25.0%"),
    ]
    assert re.findall(r"flex: ([0-9.]+)", text) == ["0.7500", "0.2500"]


def points(svg):
    return [
        [tuple(map(float, pair.split(","))) for pair in part.split()] for part in re.findall(r'points="(.*?)"', svg)
    ]


def line(values, **more):
    return Line("", Series.of(enumerate(values)), **more)


def test_a_line_breaks_where_a_number_is_not_finite():
    (part,) = points(line_chart("x", [line([1.0, 2.0, math.nan, 2.0, math.inf])]))
    assert len(part) == 2, "the other part is one point"
    svg = line_chart("x", [line([1.0, math.nan, 2.0, 3.0])])
    assert len(re.findall(r'<circle class="c0" cx="[\d.]+" cy="[\d.]+"', svg)) == 3, "few points are dots too"
    assert "<circle" not in line_chart("x", [line(range(31))])
    assert line_chart("x", [line([math.nan])]) == ""


def test_a_long_line_breaks_after_the_values_before_the_gap():
    values = [math.nan if step == 5 else 0.0 for step in range(2 * INTERVALS)]  # two values per interval
    before, after = Series.of(enumerate(values)).parts()
    assert (before[-1][0], after[0][0]) == (4, 6)


@pytest.mark.parametrize("count", [2 * INTERVALS, 2 * INTERVALS + 1, 5000, 100_000])
def test_a_long_line_keeps_every_spike_and_says_that_it_is_thinned(count):
    spikes = {count // 3: 1.0, count - 1: -1.0}
    svg = line_chart("x", [line(spikes.get(step, 0.0) for step in range(count))])
    (part,) = points(svg)
    heights = sorted(y for _, y in part)
    assert heights[0] < heights[1]
    assert heights[-1] > heights[-2], "upwards is less in SVG"
    assert part == sorted(part)
    if count <= 2 * INTERVALS:
        assert len(part) == count
        assert "points<" not in svg
    else:
        assert len(part) <= 2 * INTERVALS
        assert f"{len(part)} of {count:,} points<" in svg


def test_a_resumed_run_is_marked():
    svg = line_chart("x", [line([1.0, 2.0, 3.0], marks=[1, 1, 7])])
    assert re.findall(r'class="mark c0" x1="(.*?)"', svg) == ["305"]  # the middle between 62 and 548; mark 7 is outside


def test_the_scale_of_a_chart():
    ((low, high),) = points(line_chart("x", [Line("", Series.of([(0, 0.0), (10, 4.0)]))]))
    assert low == (62, 210)
    assert high == (548, 12)
    for scale, ticks in ((1, ["0", "1", "2", "3", "4"]), (0.5, ["0", "0.5", "1", "1.5", "2"])):
        svg = line_chart("x", [Line("", Series.of([(0, 0.0), (10, 4.0)]))], scale=scale)
        assert re.findall(r'end">([\d.]+)</text>', svg) == ticks
    assert line_chart("x", [line([2.0, 2.0])]).count("<polyline") == 1


def test_a_histogram_counts_all_but_the_longest_steps():
    (bars,) = points(histogram("x", [[1.0, 2.0] * 99 + [1.0, 900.0]], "seconds", bins=2))
    heights = [round((210 - y) / (210 - 12) * 100) for _, y in bars]
    assert heights == [0, 100, 100, 99, 99, 0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "give the folder of a run"),
        (["."], "is not the folder of a run"),
        (["run", "out=no/x"], "cannot be written"),
    ],
)
def test_mistakes(tmp_path, monkeypatch, capsys, words, message):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "run", 0.5)
    with pytest.raises(SystemExit) as left:
        report.main(words)
    assert left.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ["metrics.jsonl", "samples.jsonl", "starts.json"])
def test_a_file_that_is_nested_too_deep(tmp_path, capsys, name):
    make_run(tmp_path / "run", 0.5)
    (tmp_path / "run" / name).write_text('{"step": 0, "loss": ' + "[" * 100_000 + "]" * 100_000 + "}\n")
    if name == "starts.json":  # read as if it were absent, like any damaged starts.json
        return report.main([str(tmp_path / "run")])
    with pytest.raises(SystemExit, match="2"):
        report.main([str(tmp_path / "run")])
    assert f"{name} is damaged: line 1" in capsys.readouterr().err


def test_while_a_run_goes_on_the_page_takes_a_hundredth_of_its_time(tmp_path, monkeypatch):
    run, now, said = make_run(tmp_path / "run", 0.5), [0.0], []

    def clock():
        now[0] += 1.0  # each call takes 1 s, and therefore the page does
        return now[0]

    monkeypatch.setattr(report_file.time, "monotonic", clock)
    page, path = ReportFile(run, read_rows(run / "metrics.jsonl"), said.append), run / "report.html"
    page.refresh()
    path.unlink()
    now[0] += 95
    page.refresh()
    assert not path.exists()
    now[0] += 10
    page.refresh()
    assert path.exists()
    assert said == []


def test_the_page_of_a_run_that_goes_on_is_that_of_its_files(tmp_path):
    """The report is the same whether rows are added one by one or read together. No row is read twice."""
    run, said = make_run(tmp_path / "run", 0.5, steps=1000), []
    rows = read_rows(run / "metrics.jsonl")
    page = ReportFile(run, rows[:7], said.append)
    for row in rows[7:]:
        page.add(row)
    (run / "metrics.jsonl").rename(tmp_path / "away")
    page.write()
    text = (run / "report.html").read_text()
    (tmp_path / "away").rename(run / "metrics.jsonl")
    page_of(run)
    assert (run / "report.html").read_text() == text
    assert said == []


def test_what_is_damaged_prevents_the_page_and_not_the_run(tmp_path):
    run, said = make_run(tmp_path / "run", 0.5), []
    (run / "config.yml").write_text("steps: [")
    page = ReportFile(run, (), said.append)
    page.add({"step": 0, "loss": "text"})
    page.write()
    assert len(said) == 1
    assert "config.yml" in said[0]


@pytest.mark.parametrize(
    ("losses", "last", "best"),
    [
        ([5.0, 3.0, 4.0], "4.0000 after step 2", "3.0000 after step 1"),
        ([3.0, 5.0, 4.0, 4.5], "4.5000 after step 3", "3.0000 after step 0"),
        ([5.0, 4.0, 3.0], "3.0000 after step 2", "3.0000 after step 2"),
        ([4.0, 3.0, 3.0], "3.0000 after step 2", "3.0000 after step 1"),
        ([math.nan, 5.0, math.nan, 4.0, math.inf, 6.0], "6.0000 after step 5", "4.0000 after step 3"),
        ([2.0, math.nan], "nan after step 1", "2.0000 after step 0"),
        ([math.nan], "nan after step 0", None),
    ],
)
def test_the_last_and_the_best_of_several_evaluations(losses, last, best):
    run = Record("run", {}, [])
    run.add({"step": 0, "loss": 1.0})
    for step, loss in enumerate(losses):
        run.add({"step": step, "eval_loss": loss})
    assert run.facts()["last evaluation"] == last
    assert run.facts().get("best evaluation") == best


def test_the_facts_of_a_run_with_rewards_lead_with_them():
    run = Record("run", {}, [])
    run.add({"step": 0, "loss": -0.0, "reward": 0.25})
    run.add({"step": 0, "eval_loss": 0.0, "eval_reward": 0.5})
    assert list(run.facts())[:2] == ["updates", "reward"]
    assert run.facts()["reward"] == "0.250; 0.500 in the last evaluation"
    assert not [name for name in run.facts() if name in ("last loss", "last evaluation", "best evaluation")]


def test_the_newest_samples_come_first_and_no_more_than_three(tmp_path):
    run = make_run(tmp_path / "run", 0.5)
    samples = [{"step": step, "prompt": "", "text": f"text {step}"} for step in range(5)]
    (run / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in samples))
    page_of(run)
    text = (run / "report.html").read_text()
    assert re.findall(r"After (\d+) updates:</p><pre><b></b>text (\d)<", text) == [("4", "4"), ("3", "3"), ("2", "2")]


def test_starts_sources_shardings_and_samples(tmp_path):
    run = make_run(tmp_path / "run", 0.5)
    sharding = {"columns": ["name", "spec"], "rows": [["params/<w>", "[fsdp, -]"]], "totals": ["7 parameters"]}
    newest = {"step": 20, "devices": "8 x cpu", "mesh": "fsdp 8", "sources": {"steps": "a.yml:3"}, "sharding": sharding}
    starts = [{"step": 0, "combination": "other"}, {"step": 10, "combination": "nnx"}, newest]
    (run / "starts.json").write_text(json.dumps(starts))
    (run / "samples.jsonl").write_text('{"step": 30, "prompt": "def ", "text": "def <f>(\\u0007):"}\n')
    page_of(run)
    text = (run / "report.html").read_text()
    words = "|".join(Page(text).text)
    assert "resumed|2 times, before step 10, 20" in words
    assert "A dashed line marks the step at which a run was resumed." in words
    assert text.count('class="mark c0"') == 2 * 8 + 1, "step 10 is not in the chart of the one evaluation"
    rows = re.findall(r"<tr><td>(learning_rate|steps)</td>.*?<td>([^<]*)</td></tr>", text)
    assert rows == [("steps", "a.yml:3"), ("learning_rate", "computed from the other keys and the devices")]
    assert "<tr><td>params/&lt;w&gt;</td><td>[fsdp, -]</td></tr>" in text
    assert "After 30 updates:|" in words
    assert "<pre><b>def </b>&lt;f&gt;(\\x07):</pre>" in text
    assert re.search(r"<td>10</td>.*<td>nnx</td>", text)


@pytest.mark.parametrize(
    "start",
    [
        {},
        {"sharding": 1, "sources": 2},
        {"sharding": {"rows": [1, [2]], "totals": [3]}},
        {"sharding": {"rows": [[]], "totals": 3, "columns": 4}},
    ],
)
def test_a_start_that_somebody_edited_prevents_no_page(tmp_path, start):
    run = make_run(tmp_path / "run", 0.5)
    (run / "starts.json").write_text(json.dumps([{"step": 0}, {"step": 1} | start]))
    (run / "samples.jsonl").write_text('{"step": 1, "text": 7}\n')
    page_of(run)
    Page((run / "report.html").read_text())


def test_a_page_that_cannot_be_written_ends_no_run(tmp_path):
    run, said = make_run(tmp_path / "run", 0.5), []
    (run / "report.html").mkdir()
    page = ReportFile(run, (), said.append)
    page.write()
    page.write()
    assert len(said) == 1, "the same reason is said once"
    assert said[0].startswith(f"warning: {run / 'report.html'} is not written: ")
    assert not (run / "report.html.tmp").exists()


ODD = ["text", None, {}, [], ["text"], True, float("nan"), float("inf"), 1e308, -1e308, 10**400, 5e-324, [1.0, "text"]]


@pytest.mark.parametrize(
    "field", ["loss", "eval_loss", "grad_norm", "step_time", "tokens", "skipped", "param_norm/head"]
)
def test_values_that_no_run_writes_prevent_no_page(tmp_path, field):
    """The file was edited, or its values are extreme: the report is written nevertheless."""
    for number, values in enumerate(
        [ODD, *([odd] for odd in ODD), [5e-324, 1e-323], [1.0, 1.0 + 2e-16], [1e299, -1e299]]
    ):
        run = tmp_path / str(number)
        run.mkdir()
        rows = [{"step": step, "loss": 1.0} | {field: value} for step, value in enumerate(values)]
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        page_of(run)
        Page((run / "report.html").read_text())


def write_rollouts(run, number, rows):
    (run / "rollouts").mkdir(exist_ok=True)
    text = "".join(json.dumps({"step": number} | row) + "\n" for row in rows)
    (run / "rollouts" / f"{number:06d}.jsonl").write_text(text)


def answers(prompt, rewards, text="answer {}"):
    rows = zip(rewards, (text.format(reward) for reward in rewards), strict=True)
    return [{"prompt": prompt, "completion": one, "reward": reward, "advantage": -0.5} for reward, one in rows]


def shown_answers(run):
    text = Page((run / "report.html").read_text()) and (run / "report.html").read_text()
    section = text.split("<h2>Answers", 1)[1].split("<h2>")[0]
    return section, [
        (prompt, re.findall(r"<tr><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td><td>(.*?)</td></tr>", table, re.DOTALL))
        for prompt, table in re.findall(r"<pre>(.*?)</pre>(.*?)</table>", section, re.DOTALL)
    ]


def test_the_best_and_the_worst_answers_of_the_newest_round(tmp_path):
    run = make_run(tmp_path / "run", 0.5)
    page_of(run)
    assert "<h2>Answers" not in (run / "report.html").read_text()
    write_rollouts(run, 9, answers("old", [1, 0]))
    write_rollouts(
        run,
        10,
        [
            *answers("equal", [1.0, 1.0, 1.0]),
            *answers("<a>\u202e", [0, 0.25, 1, 1, 0.5, 0.125], "<b>\x1b\n{}"),
            *answers("long " * 500, [-2.0, 3.0], "{0}" * 1000),
            *({"prompt": f"filler {i}", "completion": "", "reward": i % 2, "truncated": True} for i in range(12)),
        ],
    )
    page_of(run)
    section, found = shown_answers(run)
    assert "before step 10;" in section
    assert [prompt for prompt, _ in found][:1] == ["&lt;a&gt;\\u202e"], "a prompt whose answers differ comes first"
    assert [(row[0], row[2], row[3]) for row in found[0][1]] == [
        ("1", "2", "&lt;b&gt;\\x1b\n1"),
        ("0.5", "1", "&lt;b&gt;\\x1b\n0.5"),
        ("0.125", "1", "&lt;b&gt;\\x1b\n0.125"),
        ("0", "1", "&lt;b&gt;\\x1b\n0"),
    ]
    assert found[0][1][0][1] == "-0.50"
    assert found[1][0].startswith("long long")
    assert len(found[1][0]) < 700
    assert found[1][1][0][3].endswith("3.03.0")
    assert [(prompt, row[2]) for prompt, rows in found[2:3] for row in rows] == [("equal", "3")]
    assert len(found) == 4
    assert found[3][1] == [("0", "nan", "1", ' <span class="unit">(no end)</span>')]


def test_a_page_while_a_run_goes_on_has_the_newest_round(tmp_path):
    run, said = make_run(tmp_path / "run", 0.5), []
    page = ReportFile(run, (), said.append)
    write_rollouts(run, 3, answers("sum", [1, 0]))
    page.write()
    assert "before step 3;" in shown_answers(run)[0]
    (run / "rollouts" / "000004.jsonl").write_text("{\n")
    page.write()
    assert len(said) == 1
    assert "000004.jsonl is damaged" in said[0]


@pytest.mark.parametrize("odd", ODD)
def test_rollouts_that_somebody_edited_prevent_no_page(tmp_path, odd):
    run = make_run(tmp_path / "run", 0.5)
    rows = [{}, *({name: odd} for name in ("prompt", "completion", "reward", "advantage", "truncated")), {"reward": 1}]
    write_rollouts(run, 0, rows)
    page_of(run)
    shown_answers(run)


@pytest.mark.parametrize("step", ["1", None, -1, float("nan"), 10**400])
def test_a_row_without_a_step_is_named(tmp_path, capsys, step):
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": step, "loss": 1.0}) + "\n")
    with pytest.raises(SystemExit, match="2"):
        page_of(tmp_path)
    assert "line 1 is not a row with a step" in capsys.readouterr().err


def test_whatever_a_run_measures_has_a_chart(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    rows = [
        {"step": i, "loss": 3.0 - i, "lm_loss": 3.0 - i, "own": 1.0 + i, "island_losses": [1.0, 2.0 + i]}
        for i in range(900)
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    page_of(run)
    words = "|".join(Page((run / "report.html").read_text()).text)
    assert "Further measures" in words
    assert "own" in words
    assert "island_losses" in words
    assert "lm_loss" not in words, "the only term of the loss is the loss"
    assert "Long runs are divided into at most 400 intervals" in words


def test_measures_stand_in_sections_and_a_long_section_is_folded(tmp_path):
    first = {"memory": 10**9, "max_logit": 90.0, "island_cosine": 0.5, "mtp_loss": 2.0, "moe_lb_loss": 1.5, "own": 3.0}
    norms = {f"grad_norm/{number}": [1.0, 2.0] for number in range(13)}
    row = {"step": 0, "loss": 1.0, "decoder/moe/tokens_per_expert": [[4, 5], [6, 7]]} | first | norms
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    page_of(tmp_path)
    text = (tmp_path / "report.html").read_text()
    page = Page(text)
    found = dict(part.split("</h2>", 1) for part in text.split("<h2>")[1:])
    where = {field: title for title, part in found.items() for field in [*row][2:] if f">{field}<" in part}
    assert where == {
        "mtp_loss": "Multi-token prediction",
        "island_cosine": "DiLoCo",
        "max_logit": "QK-Clip",
        "moe_lb_loss": "Routers",
        "decoder/moe/tokens_per_expert": "Routers",
        "own": "Further measures",
        **dict.fromkeys(norms, "Parameters"),
    }
    assert ">Memory <" in found["Training"]
    assert "<details><summary>13 charts</summary>" in found["Parameters"]
    assert page.count["details"] == 1


def test_it_needs_no_jax():
    code = "import sys, trainer.report; raise SystemExit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed, so no browser opens the page")
def test_a_browser_draws_it(tmp_path):
    run = make_run(tmp_path / "run", 0.5)
    page_of(run)
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--screenshot={tmp_path / 'page.png'}"]
    done = subprocess.run([*command, (run / "report.html").as_uri()], capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "page.png").stat().st_size > 10_000

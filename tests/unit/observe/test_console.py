"""The exact output of the console."""

import io
import math
import re
import subprocess
import sys

import pytest
from console_cases import EVALUATION, ROW, begun, written

from trainer.config.load import load
from trainer.observe.banner import Needs
from trainer.observe.console import Console
from trainer.observe.lines import Pace

# Programs that parse MaxText's log expect this format.
MAXTEXT = re.compile(
    r"completed step: \d+, seconds: \d+\.\d{3}, TFLOP/s/device: \d+\.\d{3}, Tokens/s/device: \d+\.\d{3}, "
    r"total_weights: \d+, loss: \d+\.\d{3}, lm_loss: \d+\.\d{3}, perplexity: (\d+\.\d{3}|inf)"
)


@pytest.fixture(autouse=True)
def plain_terminal(monkeypatch):
    """A terminal without colours and without a progress bar."""
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "120")


def test_a_step_for_maxtexts_monitors():
    line = written(lambda console: console.step(ROW, 700))
    # 1024 positions in 0.1 s, 1000 of which bear loss.
    assert line == (
        "completed step: 12, seconds: 0.100, TFLOP/s/device: 0.102, Tokens/s/device: 10240.000, total_weights: 1000, "
        "loss: 4.821, lm_loss: 4.800, perplexity: 121.512, grad_norm: 1.235, learning_rate: 5.100e-03, "
        "data_wait: 1.2%, progress: 13/700, eta: ?\n"
    )
    assert MAXTEXT.match(line)


@pytest.mark.parametrize("changes", [{"lm_loss": 1e4}, {"tokens": 1000.0}, {"step_time": 123.0}])
def test_the_form_holds_for_other_values(changes):
    assert MAXTEXT.match(written(lambda console: console.step(ROW | changes, 700)))


def test_a_loss_that_is_not_a_number():
    assert "loss: nan, lm_loss: nan, perplexity: nan, " in written(
        lambda console: console.step(ROW | {"loss": math.nan, "lm_loss": math.nan}, 700)
    )


def test_rates_are_per_device_and_over_all_microbatches():
    line = written(lambda console: console.step(ROW, 700), "gradient_accumulation_steps=2", devices=4)
    # 4 devices x 8 rows x 2 microbatches x 128 tokens: 2048 per device in 0.1 s.
    assert "TFLOP/s/device: 0.205, Tokens/s/device: 20480.000, " in line


def test_a_step_that_took_no_time():
    line = written(lambda console: console.step(ROW | {"step_time": 0.0}, 700))
    assert "seconds: 0.000, TFLOP/s/device: inf, Tokens/s/device: inf, " in line


def test_a_step_on_a_terminal():
    line = written(lambda console: console.step(ROW, 700), is_terminal=True)
    assert line == " 12/700  loss 4.821  lr 5.1e-03  grad  1.23  10.0 ktok/s   102 GFLOP/s  100 ms  eta ?\n"


def test_a_step_on_four_devices_says_per_device():
    assert "  102 GFLOP/s/device  " in written(lambda console: console.step(ROW, 700), is_terminal=True, devices=4)


@pytest.mark.parametrize(
    ("columns", "line"),
    [
        (85, " 12/700  loss 4.821  lr 5.1e-03  grad  1.23  10.0 ktok/s   102 GFLOP/s  100 ms  eta ?"),
        (80, " 12/700  loss 4.821  lr 5.1e-03  grad  1.23  10.0 ktok/s  100 ms  eta ?"),
        (70, " 12/700  loss 4.821  grad  1.23  10.0 ktok/s  100 ms  eta ?"),
        (40, " 12/700  loss 4.821  10.0 ktok/s  eta ?"),
        (20, " 12/700  loss 4.821"),
    ],
)
def test_a_step_keeps_within_the_terminal(monkeypatch, columns, line):
    monkeypatch.setenv("COLUMNS", str(columns))
    assert written(lambda console: console.step(ROW, 700), is_terminal=True) == line + "\n"


def test_all_but_the_flops_fits_in_80_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    steps = [ROW | {"step": step, "grad_norm": 0.0123} for step in range(4)]
    line = written(lambda console: [console.step(row, 700) for row in steps], is_terminal=True).splitlines()[-1]
    assert line == "  3/700  loss 4.821  lr 5.1e-03  grad 0.0123  10.0 ktok/s  100 ms  eta 0:01:10"


def test_the_eta_leaves_out_the_first_two_steps():
    times = [50.0, 20.0, 2.0, 4.0]
    rows = [ROW | {"step": step, "step_time": time} for step, time in enumerate(times)]
    lines = written(lambda console: [console.step(row, 104) for row in rows]).splitlines()
    # After step 2, 101 steps of 2 s remain; after step 3, 100 steps with an average of 3 s.
    assert [line.rpartition("eta: ")[2] for line in lines] == ["?", "?", "0:03:22", "0:05:00"]


def test_the_eta_follows_a_change_of_pace():
    pace = Pace()
    for step_time in [9.0] * 2 + [1.0] * 200:
        pace.add(ROW | {"step_time": step_time})
    assert pace.eta(1000) == "0:16:40"
    pace.add(ROW | {"step_time": 3.0})
    assert pace.eta(1000) == "0:18:20"  # 1000 steps of 1 s + 5 % of 2 s


def test_the_last_step_has_no_time_left():
    assert written(lambda console: console.step(ROW | {"step": 699}, 700)).endswith("eta: 0:00:00\n")


def test_evaluation():
    assert written(lambda console: console.evaluation(EVALUATION)) == (
        "Completed eval after train step 350, loss=3.210, perplexity=24.779, total_weights=12345, "
        "bits_per_byte=1.9512, seconds=1.250\n"
    )
    assert written(lambda console: console.evaluation(EVALUATION), is_terminal=True) == (
        "evaluation at step 350  loss 3.210  perplexity 24.78  1.9512 bits per byte  12,345 tokens  1.25 s\n"
    )


@pytest.mark.parametrize("is_terminal", [False, True])
def test_evaluation_without_a_tokenizer(is_terminal):
    row = {name: value for name, value in EVALUATION.items() if name != "eval_bits_per_byte"}
    text = written(lambda console: (console.evaluation(row), console.summary(1.0)), is_terminal=is_terminal)
    assert "3.21" in text
    assert "byte" not in text


BANNER = """\
devices      1 x cpu, 1 process
mesh         one device
combination  nnx
model        llama2: 2 layers, width 192, 6 heads of 32 (3 key-value), MLP 512, vocabulary 4096, tied head; \
1,671,104 parameters
attention    dot_product
dtype        float32, weights float32
batch        8 rows x 128 tokens = 1,024 positions per step
steps        700
data         stdlib: 2,423,000 tokens
run          runs/run-0001
warning: eval_steps has no effect
"""
SIZES = [
    "base_emb_dim=192",
    "base_num_query_heads=6",
    "base_num_kv_heads=3",
    "head_dim=32",
    "base_mlp_dim=512",
    "base_num_decoder_layers=2",
    "vocab_size=4096",
    "logits_via_embedding=true",
    "dtype=float32",
]


def test_banner():
    stream = io.StringIO()
    begun(stream, *SIZES, warnings=["eval_steps has no effect"])
    assert stream.getvalue() == BANNER


def test_banner_of_slices():
    stream = io.StringIO()
    begun(stream, *SIZES, "dcn_data_parallelism=2", "ici_tensor_parallelism=2", "base_num_kv_heads=6", devices=8)
    assert "mesh         data 2 x fsdp 2 x tensor 2 (slices: data 2)\n" in stream.getvalue()


def test_banner_of_a_larger_machine():
    stream = io.StringIO()
    words = [*SIZES, "ici_tensor_parallelism=1", "gradient_accumulation_steps=2", "logits_via_embedding=false"]
    begun(stream, *words, "dtype=bfloat16", devices=16, device_kind="TPU v5 lite", platform="tpu", process_count=4)
    text = stream.getvalue()
    assert "devices      16 x TPU v5 lite (tpu), 4 processes\nmesh         fsdp 16\n" in text
    assert "batch        256 rows x 128 tokens = 32,768 positions per step, in 2 microbatches\n" in text
    assert "separate head" in text
    assert "dtype        bfloat16, weights float32\n" in text


def test_banner_of_islands():
    stream = io.StringIO()
    begun(stream, *SIZES, "enable_diloco=true", "ici_diloco_parallelism=2", devices=8)
    assert "mesh         diloco 2 x fsdp 4\n" in stream.getvalue()
    assert "islands      2, which synchronize every 36 steps and at the end; evaluation" in stream.getvalue()


def test_banner_wraps_on_a_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    stream = io.StringIO()
    begun(
        stream, *SIZES, is_terminal=True, warnings=["eval_steps has no effect with eval_interval=-1, so set only one"]
    )
    lines = stream.getvalue().splitlines()
    assert max(map(len, lines)) <= 60
    assert " ".join(" ".join(lines).split()) == " ".join(
        BANNER.replace("no effect", "no effect with eval_interval=-1, so set only one").split()
    )
    assert lines[4].startswith(" " * 13 + "key-value)")


def test_summary():
    def run(console):
        for step, rate in enumerate([1.0, 2.0, 9000.0, 10000.0, 12000.0]):
            console.step(ROW | {"step": step, "loss": 5.0 - step, "tokens_per_second": rate}, 5)
        console.evaluation(EVALUATION)
        console.summary(98.4)

    assert written(run).splitlines()[-5:] == [
        "done         5 steps, 5,000 trained tokens in 0:01:38",
        "speed        10.0 ktok/s trained, 100 ms per step (medians)",
        "last loss    1.0000",
        "evaluation   loss 3.2100, 1.9512 bits per byte",
        "run          runs/run-0001",
    ]


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        (
            {"reward": 0.25},
            ["done", "reward       0.250; 0.500 in the last evaluation", "speed", "run"],
        ),
        (
            {"reward_margin": 0.25, "reward_accuracy": 0.75},
            ["done", "margin       0.25", "accuracy     75%", "speed", "last loss", "evaluation", "run"],
        ),
    ],
)
def test_the_summary_of_a_run_with_rewards_leads_with_them(rewards, expected):
    def run(console):
        console.step(ROW | {"step": 0, "loss": -0.0} | rewards, 1)
        console.evaluation(
            EVALUATION | {f"eval_{name}": 2 * value for name, value in rewards.items() if name == "reward"}
        )
        console.summary(1.0)

    lines = written(run).splitlines()[-len(expected) :]
    assert all(line.startswith(begin) for line, begin in zip(lines, expected, strict=True)), lines


def test_updates_that_were_left_out_are_warned_of_once_and_counted():
    def run(console):
        for step, skipped in enumerate([0, 1, 0, 1]):
            values = {"loss": math.nan, "grad_norm": math.inf} if skipped else {}
            console.step(ROW | {"step": step, "skipped": skipped} | values, 4)
        console.summary(1.0)

    lines = written(run).splitlines()
    warnings = [line for line in lines if line.startswith("warning")]
    assert warnings == [
        "warning: step 1 has loss nan and gradient norm inf: its update is skipped (loss and gradient norm not finite)"
    ]
    assert "skipped      2 updates: loss and gradient norm not finite" in lines


def test_lost_updates_are_warned_of_once_and_not_at_low_rates():
    """The peak rate is the one in the banner."""
    peak = load([]).config.learning_rate

    def run(console):
        for step, (share, rate) in enumerate([(0.9, 0.4), (0.49, 1), (0.514, 0.6), (0.9, 1)]):
            console.step(ROW | {"step": step, "lost_updates": share, "learning_rate": rate * peak}, 4)

    (line,) = [line for line in written(run).splitlines() if line.startswith("warning")]
    assert line == (
        "warning: step 2: 51% of the parameters did not change, because their update is below half the spacing of "
        "bfloat16 (lost_updates in metrics.jsonl): weight_stochastic_rounding=true lets such updates add up; "
        "weight_dtype=float32 keeps parameters in float32, and dtype=bfloat16 still computes in bfloat16"
    )


def test_spikes_are_warned_of_once_and_counted_by_themselves():
    def run(console):
        spikes = [(0, 0), (1, 0), (0, 0), (1, 0), (0, 1), (1, 1), (0, 0)]
        for step, (of_loss, of_norm) in enumerate(spikes):
            row = {"loss": math.nan if step == 2 else 9.0, "grad_norm": 2.0, "skipped": int(step > 0)}
            console.step(ROW | row | {"step": step, "loss_spike": of_loss, "grad_norm_spike": of_norm}, 7)
        console.step(ROW | row | {"step": 7, "island_losses": [9.0, math.nan]}, 8)
        console.summary(1.0)

    lines = written(run).splitlines()
    assert [line for line in lines if line.startswith("warning")] == [
        "warning: step 1 has loss 9 and gradient norm 2: its update is skipped (spike in loss)",
        "warning: step 2 has loss nan and gradient norm 2: its update is skipped (loss not finite)",
        "warning: step 4 has loss 9 and gradient norm 2: its update is skipped (spike in gradient norm)",
        "warning: step 5 has loss 9 and gradient norm 2: its update is skipped (spike in loss and gradient norm)",
        "warning: step 6 has loss 9 and gradient norm 2: its update is skipped (refused by an update rule)",
        "warning: step 7 has loss 9 and gradient norm 2: its update is skipped (no token with a loss on an island)",
    ]
    assert [line.split(None, 1)[1] for line in lines if line.startswith("skipped")] == [
        "2 updates: spike in loss",
        "1 update: loss not finite",
        "1 update: spike in gradient norm",
        "1 update: spike in loss and gradient norm",
        "1 update: refused by an update rule",
        "1 update: no token with a loss on an island",
    ]


def test_the_summary_of_a_process_that_went_on_says_which_steps_are_its_own():
    def run(console):
        for step in (10, 11, 12):
            console.step(ROW | {"step": step}, 13)
        console.summary(1.0)

    assert "done         3 steps (10 to 12, resumed), 3,000 trained tokens in 0:00:01" in written(run)


def test_the_summary_ends_with_where_things_are():
    files = {"checkpoint": "runs/a/checkpoints/7", "charts": "runs/a/report.html"}
    assert written(lambda console: console.summary(1.0, files)).splitlines()[-3:] == [
        "run          runs/run-0001",
        "checkpoint   runs/a/checkpoints/7",
        "charts       runs/a/report.html",
    ]


def test_summary_of_a_run_that_ended_at_once():
    assert written(lambda console: console.summary(1.0)) == (
        "done         0 steps, 0 trained tokens in 0:00:01\nrun          runs/run-0001\n"
    )


def test_sample():
    text = written(lambda console: console.sample("def ", "def f(x):\n\treturn\x1b[2J x\n\n"))
    assert text == ("---- sample, continues 'def ' ----\ndef f(x):\n\treturn\\x1b[2J x\n---- end of sample ----\n")


def test_a_stream_that_cannot_say_a_character():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    Console(stream).say("naïve")
    assert stream.buffer.getvalue() == b"na\\xefve\n"


def test_say_is_flushed():
    stream = io.TextIOWrapper(io.BufferedWriter(raw := io.BytesIO()), encoding="utf-8")
    Console(stream).say("compiling")
    assert raw.getvalue() == b"compiling\n"


def test_standard_output_is_the_default(capsys):
    Console().say("hello")
    assert capsys.readouterr().out == "hello\n"


def test_what_the_step_needs():
    """1024 positions of 1e7 FLOPs on two devices with a peak of 1 TFLOP/s take at least 5.12 ms."""
    gb = 10**9

    def act(console):
        console.needs(Needs(peak=3 * gb, arguments=gb, temporaries=2 * gb, available=16.0 * gb), 1000)

    lines = written(act, "per_device_batch_size=4", devices=2, peak=1e12).splitlines()
    assert lines == [
        "memory       3.00 GB of 16.0 GB per device: state and batch 1.00 GB, temporaries 2.00 GB",
        "FLOPs        10.0 MFLOP per token, 10.2 GFLOP per step (model FLOPs)",
        "time         at least 0:00:05 for 1,000 steps: 5 ms per step at the peak of 1.00 TFLOP/s per device",
    ]
    assert written(lambda console: console.needs(None, 5)).splitlines() == [lines[1]]


def test_utilization_and_memory_where_they_are_known():
    row = ROW | {"memory": 12_300_000_000}
    line = written(lambda console: console.step(row, 700), peak=1e12)
    assert ", MFU: 10.2%, memory: 12.3 GB, data_wait: 1.2%, progress: 13/700, eta: ?" in line  # 0.1024 TFLOP/s
    assert "  MFU 10.2%  " in written(lambda console: console.step(row, 700), peak=1e12, is_terminal=True)


def test_importing_it_loads_no_jax():
    program = "import sys, trainer.observe; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)

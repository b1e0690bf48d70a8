"""`python -m trainer.evaluate`, and eval_tasks in runs that are interrupted, resumed, or have a failing task."""

import contextlib
import io
import json
import os
import signal

import jax
import pytest
from run_cases import RUN, rows_of, train
from support import ALL_COMBINATIONS

from trainer import evaluate
from trainer.evaluation.model import EvaluatedModel
from trainer.observe.events import EVENTS_FILE
from trainer.observe.metrics import METRICS_FILE, TASKS_TIME

pytestmark = pytest.mark.usefixtures("equal_programs")
FIRST, LAST = ALL_COMBINATIONS[0], ALL_COMBINATIONS[-1]
KEYS = {
    "dataset_type": "grain",
    "grain_file_type": "text",
    "tokenizer_type": "bytes",
    "vocab_size": 257,
    "max_target_length": 32,
    "logits_via_embedding": False,
    "per_device_batch_size": 2,
    "steps": 6,
    "learning_rate_schedule_steps": 6,
    "eval_interval": 2,
    "eval_steps": 1,
    "checkpoint_period": 2,
    "dropout_rate": 0.0,
    "ema_decay": 0.5,
    "eval_tasks_interval": 2,
    "reward_num_workers": 1,
    "prompt": "",
}
TASKS = "eval_tasks=[text.yml,choices.jsonl,judged.yml]"
JUDGE = """\
import os

def judge(prompts, completions, **_):
    if os.path.exists("broken"):
        raise ValueError("the judge is out")
    return len(completions[0])
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "corpus.txt").write_text("def f(x):\n    return x + 1\n" * 60)
    (tmp_path / "held_out.txt").write_text("def g(x):\n    return x + 2\n" * 3)
    choices = [
        {"question": "def f", "choices": ["(x):", "zz"], "answer": 0},
        {"question": "q", "choices": ["a", "b"], "answer": 1},
    ]
    for name, rows in (("choices", choices), ("asked", [{"question": "def f(x):\n"}, {"question": "return"}])):
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (tmp_path / "text.yml").write_text(
        "kind: text\nstride: 16\ndataset_type: grain\ngrain_file_type: text\ngrain_train_files: held_out.txt\n"
    )
    (tmp_path / "judged.yml").write_text(
        "kind: questions\nfile: asked.jsonl\nmax_tokens: 4\nscore: function\nfunction: judge_in_run:judge\n"
    )
    (tmp_path / "judge_in_run.py").write_text(JUDGE)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def trained(folder, *words, **keys):
    data = ["grain_train_files=corpus.txt", "grain_eval_files=held_out.txt"]
    return train(folder, *data, *words, **KEYS | keys)


def evaluated(monkeypatch, folder, *words):
    """Returns the command's exit code, standard output and standard error on one device."""
    output, errors, code = io.StringIO(), io.StringIO(), 0
    found = jax.devices()[:1]
    monkeypatch.chdir(folder)
    monkeypatch.setattr(jax, "devices", lambda: found)
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        try:
            evaluate.main(list(map(str, words)))
        except SystemExit as exit_:
            code = exit_.code
    return code, output.getvalue(), errors.getvalue()


def of_tasks(folder):
    path = folder / RUN
    return [row for row in (rows_of(path) if (path / METRICS_FILE).exists() else []) if "eval_tasks_failed" in row]


def test_a_run_is_evaluated_as_often_and_as_well_if_it_is_interrupted(folder, tmp_path_factory, monkeypatch):
    whole = tmp_path_factory.mktemp("whole")
    for path in folder.iterdir():
        (whole / path.name).write_bytes(path.read_bytes())
    best = [
        "keep_best_checkpoints=1",
        "keep_best_metric=max:choices/accuracy_per_byte",
        "max_num_checkpoints_to_keep=1",
    ]
    words = [TASKS, "enable_tensorboard=true", *best]
    code, printed = trained(whole, *words)
    assert code == 0, printed
    rows = of_tasks(whole)
    assert [row["step"] for row in rows] == [1, 3, 5]
    assert rows[0]["text/loss"] != rows[2]["text/loss"]
    assert {"text/bits_per_byte_stderr", "choices/accuracy", "judged/score", "judged/samples"} < rows[0].keys()
    assert all(row["eval_tasks_failed"] == 0 for row in rows)
    assert "<h2>Tasks" in (whole / RUN / "report.html").read_text()
    assert b"eval/choices/accuracy" in (whole / RUN / EVENTS_FILE).read_bytes()
    standing = {row["step"] + 1: -row["choices/accuracy_per_byte"] for row in rows}
    first_best = min(standing, key=lambda updates: (standing[updates], updates))
    kept = {int(path.name) for path in (whole / RUN / "checkpoints").iterdir() if path.name.isdecimal()}
    assert kept == {first_best, 6}

    signalled = []
    goes_on = EvaluatedModel.check_goes_on

    def interrupted(self):
        assert not signalled, "the evaluation went on after the signal"
        if of_tasks(folder):  # the second evaluation
            signalled.append(os.kill(os.getpid(), signal.SIGTERM))
        goes_on(self)

    with monkeypatch.context() as patch:
        patch.setattr(EvaluatedModel, "check_goes_on", interrupted)
        code, printed = trained(folder, *words)
    assert (code, len(signalled)) == (128 + signal.SIGTERM, 1)
    assert "SIGTERM: saved" in printed
    assert (folder / RUN / "checkpoints/4").is_dir()
    assert [row["step"] for row in of_tasks(folder)] == [1]
    code, printed = trained(folder, *words)
    assert code == 0, printed
    assert of_tasks(folder) == rows

    # The command reports the same values for the checkpoint; it, too, evaluates the averaged parameters.
    words = [
        "tasks=text.yml,choices.jsonl,judged.yml",
        "output=found",
        "per_device_batch_size=2",
        "reward_num_workers=1",
    ]
    code, table, said = evaluated(monkeypatch, folder, RUN, *words)
    assert code == 0, said
    assert "text" in table.splitlines()[1]
    for score in json.loads((folder / "found/results.json").read_text()):
        assert score["value"] == pytest.approx(rows[-1][f"{score['task']}/{score['metric']}"], rel=0.01)
    samples = [json.loads(line) for line in (folder / RUN / "evaluations/000006/judged.jsonl").read_text().splitlines()]
    assert [sample["score"] for sample in samples] == [len(sample["answer"]) for sample in samples]

    code, _, said = evaluated(monkeypatch, folder, RUN, *words)
    assert (code, "output=found: exists and is not an empty folder" in said) == (2, True), said

    long = {"question": "q", "choices": ["a", "b" * 33], "answer": 0}
    (folder / "long.jsonl").write_text(json.dumps(long))
    code, _, said = evaluated(monkeypatch, folder, RUN, "tasks=choices.jsonl,long.jsonl", "output=part")
    assert (code, "an answer has 34 tokens" in said) == (2, True), said
    kept = json.loads((folder / "part/results.json").read_text())
    assert {score["task"] for score in kept} == {"choices"}, "a task that fails loses those before it"


def test_a_task_that_fails_does_not_end_the_run(folder):
    words = ["eval_tasks=[judged.yml,text.yml]", "steps=4", "eval_interval=-1"]
    (folder / "broken").touch()
    code, printed = trained(folder, *words)
    assert code == 0, printed
    assert "evaluation after 2 updates: the task judged failed: " in printed
    assert "the judge is out" in printed
    rows = of_tasks(folder)
    assert [(row["step"], row["eval_tasks_failed"]) for row in rows] == [(1, 1), (3, 1)]
    assert all("text/loss" in row and "judged/score" not in row for row in rows)
    code, printed = trained(folder, *words, "abort_on_eval_tasks_error=true", "run_name=aborted")
    assert code == 2
    assert "the judge is out" in printed
    assert (folder / "runs/aborted/checkpoints/2").is_dir()


@pytest.mark.rest(covered_by="test_a_run_is_evaluated_as_often_and_as_well_if_it_is_interrupted")
@pytest.mark.parametrize(
    ("combination", "devices", "keys"),
    [
        (FIRST, 2, {"enable_diloco": True, "ici_diloco_parallelism": 2, "diloco_sync_period": 2, "ema_decay": 0.0}),
        (LAST, 2, {"ici_pipeline_parallelism": 2, "num_pipeline_microbatches": 2}),
        (LAST, 1, {"lora.enable_lora": True, "lora.lora_rank": 2, "lora.lora_alpha": 4.0}),
    ],
    ids=["DiLoCo", "a pipeline", "adapters"],
)
def test_the_loop_and_the_command_agree(combination, devices, keys, folder, monkeypatch):
    code, printed = trained(folder, TASKS, **keys, combination=combination, devices=devices, learning_rate=0.1)
    assert code == 0, printed
    rows = of_tasks(folder)
    assert [(row["step"], row["eval_tasks_failed"]) for row in rows] == [(1, 0), (3, 0), (5, 0)]
    assert len({row["text/loss"] for row in rows}) == 3
    code, _, said = evaluated(monkeypatch, folder, RUN, "tasks=text.yml,choices.jsonl", "output=found")
    assert code == 0, said
    for score in json.loads((folder / "found/results.json").read_text()):
        assert score["value"] == pytest.approx(rows[-1][f"{score['task']}/{score['metric']}"], rel=1e-3)


def test_what_is_missing_is_an_error_before_the_run_begins(folder):
    (folder / "text.yml").write_text("kind: text\ndataset_type: grain\ngrain_train_files: gone.jsonl\n")
    code, printed = trained(folder, TASKS)
    assert code == 2
    assert "gone.jsonl matches no file" in printed
    assert not (folder / RUN / "metrics.jsonl").exists()
    assert TASKS_TIME not in printed

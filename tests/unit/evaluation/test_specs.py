"""What tasks= accepts, and the messages for what it refuses."""

import json
import subprocess
import sys

import pytest

from trainer.config.errors import UserError
from trainer.evaluation.specs import LM_EVAL, QUESTIONS, TEXT, filled, read_specs

ASKED = {"question": "1 + 1 =", "answer": 2}
CHOICES = {"question": "Sky?", "choices": ["blue", "green"], "answer": "blue"}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def written(folder, name, *rows):
    (folder / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def test_the_forms_of_a_task(folder):
    written(folder, "sums.jsonl", ASKED, ASKED | {"answer": ["2", "two"]})
    written(folder, "colours.jsonl", CHOICES)
    (folder / "long.yml").write_text("kind: text\ncontext: 64\nstride: 8\ngrain_file_type: text\n")
    (folder / "judged.yml").write_text("kind: questions\nfile: sums.jsonl\nscore: function\nfunction: judge:judge\n")
    (folder / "mine.yml").write_text("task: mine\nprocess_docs: !function utils.process\n")
    specs = read_specs(
        ["text", "sums.jsonl", "colours.jsonl", "long.yml", "judged.yml", "mine.yml", "arc_easy"],
        "tasks",
    )
    assert [(spec.name, spec.kind) for spec in specs] == [
        ("text", TEXT),
        ("sums", QUESTIONS),
        ("colours", QUESTIONS),
        ("long", TEXT),
        ("judged", QUESTIONS),
        ("mine", LM_EVAL),
        ("arc_easy", LM_EVAL),
    ]
    assert [line for line, _ in specs[1].questions] == [1, 2]


BAD = {
    "kind: poem": "kind: allowed: text, questions",
    "- a": "is not a mapping of fields",
    "group: both\ntask: [arc_easy, mine]": "is a group of lm-eval: give the files of its tasks",
    "kind: [text]": "kind: allowed: text, questions",
    "kind: text\n3: 4": "3: a field's name must be a text",
    "kind: text\nstride: 0": "stride=0, not an integer in [1,",
    "kind: text\nsteps: 5": "steps: there is no such field",
    "kind: text\ncount: bytes": "count=bytes: allowed: transformers, llama.cpp",
    "kind: text\ncount: llama.cpp\nstride: 4": "the windows of count=llama.cpp do not overlap",
    "kind: text\ncontext: 4\nstride: 8": "would be left out",
    "kind: text\ndataset_type: c5": "dataset_type: allowed:",
    "kind: questions": "file: is missing",
    "kind: questions\nfile: no.jsonl": "no.jsonl: cannot be read: No such file",
    "kind: questions\nfile: ok.jsonl\nscore: pattern": "pattern: score=pattern and this field require each other",
    "kind: questions\nfile: ok.jsonl\nscore: pattern\npattern: '('": "is not a regular expression",
    "kind: questions\nfile: ok.jsonl\nscore: pattern\npattern: 'a{99999999999999}'": "is not a regular expression",
    "kind: questions\nfile: ok.jsonl\nfunction: a:b": "function: score=function and this field require each other",
    "kind: questions\nfile: ok.jsonl\nprompt: '{text}'": "ok.jsonl, line 1: there is no field text",
    "kind: questions\nfile: ok.jsonl\nprompt: '{'": "write a literal brace twice",
    "kind: questions\nfile: ok.jsonl\nprompt: '{}'": "braces may contain only the name of a field",
    "kind: questions\nfile: ok.jsonl\nprompt: '{question:d}'": "braces may contain only the name of a field",
    "kind: questions\nfile: ok.jsonl\nprompt: '{question!x}'": "braces may contain only the name of a field",
    "kind: questions\nfile: ok.jsonl\nprompt: '{question.real}'": "there is no field question.real",
    "kind: questions\nfile: mixed.jsonl": "some questions have choices and others do not",
}


@pytest.mark.parametrize("text", BAD)
def test_a_mistake_in_a_file_is_named(folder, text):
    written(folder, "ok.jsonl", ASKED)
    written(folder, "mixed.jsonl", ASKED, CHOICES)
    (folder / "task.yml").write_text(text)
    with pytest.raises(UserError) as error:
        read_specs(["task.yml"], "eval_tasks")
    assert "eval_tasks=task.yml: " in str(error.value)
    assert BAD[text] in str(error.value)


def test_a_prompt_has_the_fields_of_its_question():
    assert filled("{{a}} {0.b}: {question}", {"0.b": 7, "question": "{x}"}) == "{a} 7: {x}"


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ([], "not a JSON object"),
        ({"question": "a"}, "answer: needed"),
        (ASKED | {"question": "\ud800"}, "a text has half of a surrogate pair"),
        (CHOICES | {"answer": "red"}, "answer: needed: one of the choices"),
        (CHOICES | {"answer": 2}, "answer: needed: one of the choices"),
        (CHOICES | {"choices": ["blue"]}, "choices: needed: a list of at least two texts"),
    ],
)
def test_a_mistake_in_a_question_names_its_line(folder, row, problem):
    written(folder, "q.jsonl", CHOICES, row)
    with pytest.raises(UserError, match=f"q.jsonl, line 2: {problem}"):
        read_specs(["q.jsonl"], "tasks")


def test_all_mistakes_are_reported_at_once(folder):
    written(folder, "q.jsonl", ASKED)
    (folder / "q.yml").write_text("kind: questions\nfile: q.jsonl\n")
    with pytest.raises(UserError) as error:
        read_specs(["q.jsonl", "q.yml", "no.jsonl", "what is this"], "tasks")
    for part in ("two tasks are called q", "tasks=no.jsonl: ", "tasks=what is this: is neither a file"):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--help"], 0, "usage: python -m trainer.evaluate FROM"),
        (["runs/a"], 2, "tasks= is missing"),
        (["runs/a", "tasks=no.jsonl"], 2, "tasks=no.jsonl"),
        (["tasks=text"], 2, "there is no model"),
        (["base.yml", "eval_tasks=[no.jsonl]", "--train"], 2, "eval_tasks=no.jsonl"),
    ],
)
def test_the_command_line_is_checked_without_jax(words, code, said):
    """Runs in a process in which JAX cannot be imported."""
    program = "train" if "--train" in words else "evaluate"
    words = [word for word in words if word != "--train"]
    run = f"import sys; sys.modules['jax'] = None; from trainer.{program} import main; main({words!r})"
    done = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert said in done.stdout + done.stderr

"""Tasks on an engine with random parameters: each score against a second computation."""

import functools
import json
import math
import time

import jax
import numpy as np
import pytest
from support import random_variables, tiny_config

from trainer import sft
from trainer.config.errors import UserError
from trainer.evaluation.model import Answer, EvaluatedModel, Interrupted, TooLong
from trainer.evaluation.questions import QuestionsTask
from trainer.evaluation.specs import read_specs
from trainer.evaluation.tasks import open_tasks
from trainer.evaluation.text import TextTask, windows, windows_of_llama_cpp
from trainer.inference.max_engine import MaxEngine

KEYS = {"max_target_length": 64, "vocab_size": 257, "base_num_decoder_layers": 1, "per_device_batch_size": 3}
KEYS |= {"tokenizer_type": "bytes", "dtype": "float32"}
TEXT = "def f(x):\n    return x + 1\nThe end of this text is here.\n"


@functools.cache
def made():
    engine = MaxEngine(tiny_config("nnx", **KEYS), jax.devices()[:1])
    return engine, engine.hold(*random_variables(engine.served.model))


def model(interrupted=lambda: False):
    engine, params = made()
    return EvaluatedModel(engine, params, engine.get_tokenizer(), [256], interrupted=interrupted)


def task(folder, monkeypatch, name, **keys):
    monkeypatch.chdir(folder)
    config = tiny_config("nnx", **KEYS | keys)
    (opened,) = open_tasks(read_specs([name], "tasks"), config, model().tokenizer, print)
    return opened


def scores(result):
    return {score.metric: score.value for score in result.scores}


def test_rows_of_any_length_are_scored_like_prompts():
    """Compares with the engine's prefill, which serving tests."""
    engine, params = made()
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 257, length).tolist() for length in (2, 31, 7, 9, 32, 5, 8)]
    for row, (said, likeliest) in zip(rows, model().log_probs(rows), strict=True):
        tokens = engine.padded(row[:-1])
        targets = np.zeros_like(tokens)
        targets[: len(row) - 1] = row[1:]
        _, result = engine.prefill(params, tokens, len(row) - 1, targets=targets)
        # The matrix products of a batch have other shapes, so they round differently.
        np.testing.assert_allclose(said, np.asarray(result.prompt.log_probs)[: len(row) - 1], atol=2e-5)
        assert likeliest.tolist() == (np.asarray(result.prompt.tokens)[: len(row) - 1, 0] == row[1:]).tolist()
    again = model().log_probs(rows)
    assert all((one == other).all() for (one, _), (other, _) in zip(again, model().log_probs(rows), strict=True))
    for wrong in ([[1]], [[1] * 66], [[1, 2]] * 4):
        with pytest.raises(ValueError, match="allowed: 1 to 3 rows"):
            engine.score(params, wrong)
    with pytest.raises(UserError, match="has the token 300"):
        engine.score(params, [[1, 300]])


def guide(count, context, stride):
    """The loop in transformers' perplexity guide (docs/source/en/perplexity.md): (begin, end, number of labels)."""
    found, previous = [], 0
    for begin in range(0, count, stride):
        end = min(begin + context, count)
        found.append((begin, end, end - previous))
        previous = end
        if end == count:
            break
    return found


@pytest.mark.parametrize(
    ("count", "context", "stride"), [(50, 16, 4), (50, 16, 16), (7, 16, 5), (33, 16, 15), (2, 2, 1)]
)
def test_windows_are_those_of_transformers(count, context, stride):
    made_windows = list(windows(count, context, stride))
    # Labels are shifted: the first token of a window has no logits.
    expected = [(b, e, max(e - n, b + 1)) for b, e, n in guide(count, context, stride) if e > max(e - n, b + 1)]
    assert [tuple(window) for window in made_windows] == expected
    counted = [target for window in made_windows for target in range(window.first, window.end)]
    missing = set(range(1, count)) - set(counted)
    assert len(counted) == len(set(counted))
    assert missing == (set(range(context, count, context)) if stride == context else set())


def test_windows_are_those_of_llama_cpp():
    """tools/perplexity/perplexity.cpp: n_chunk = size / n_ctx, first = n_ctx / 2; each chunk counts n_ctx - 1 - first
    tokens."""
    for count, context in ((40, 16), (16, 16), (15, 16), (50, 9)):
        first = context // 2
        expected = [[i * context + first + 1 + j for j in range(context - 1 - first)] for i in range(count // context)]
        made_windows = windows_of_llama_cpp(count, context)
        assert [list(range(window.first, window.end)) for window in made_windows] == expected


def test_the_loss_of_a_text_is_that_of_its_windows(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text(TEXT)
    data = "dataset_type: grain\ngrain_file_type: text\ngrain_train_files: a.txt\n"
    (tmp_path / "sliding.yml").write_text(f"kind: text\ncontext: 16\nstride: 4\n{data}")
    tokens = model().encode(TEXT)
    nats, count = 0.0, 0
    for begin, end, labels in guide(len(tokens), 16, 4):
        ((said, _),) = model().log_probs([tokens[begin:end]])
        kept = said[-labels:]
        nats, count = nats - float(kept.sum(dtype=np.float64)), count + len(kept)
    (result,) = task(tmp_path, monkeypatch, "sliding.yml").run(model())
    found = scores(result)
    assert sum(sample["tokens"] for sample in result.samples) == count == len(tokens) - 1
    assert found["loss"] == pytest.approx(nats / count, abs=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(nats / count), rel=1e-5)
    assert found["bits_per_byte"] == pytest.approx(nats / math.log(2) / len(TEXT.encode()), rel=1e-5)
    assert all(score.error > 0 for score in result.scores)


def test_documents_are_apart_unless_they_are_joined(tmp_path, monkeypatch):
    rows = "".join(f"{json.dumps({'text': text})}\n" for text in ("one text", "another", "a third one"))
    (tmp_path / "a.jsonl").write_text(rows)
    data = "dataset_type: grain\ngrain_file_type: jsonl\ngrain_train_files: a.jsonl\n"
    (tmp_path / "apart.yml").write_text(f"kind: text\n{data}")
    (tmp_path / "joined.yml").write_text(f"kind: text\njoined: true\n{data}")
    (apart,) = task(tmp_path, monkeypatch, "apart.yml").run(model())
    assert [sample["tokens"] for sample in apart.samples] == [8, 7, 11]  # each first token is not counted
    assert len(task(tmp_path, monkeypatch, "apart.yml", eval_tasks_limit=2).run(model())[0].samples) == 2
    (joined,) = task(tmp_path, monkeypatch, "joined.yml").run(model())
    assert sum(sample["tokens"] for sample in joined.samples) == 8 + 7 + 11 + 2
    (tmp_path / "half.yml").write_text(f"kind: text\ncontext: 8\ncount: llama.cpp\njoined: true\n{data}")
    (half,) = task(tmp_path, monkeypatch, "half.yml").run(model())
    assert [sample["tokens"] for sample in half.samples] == [3, 3, 3]
    (tmp_path / "long.yml").write_text(f"kind: text\ncontext: 99\n{data}")
    with pytest.raises(UserError, match="context=99: the model has 64 positions"):
        task(tmp_path, monkeypatch, "long.yml")
    (tmp_path / "gone.yml").write_text(f"kind: text\n{data.replace('a.jsonl', 'b.jsonl')}")
    with pytest.raises(UserError, match="grain_train_files"):
        task(tmp_path, monkeypatch, "gone.yml")


def test_a_file_names_its_data_alone(tmp_path, monkeypatch):
    """A task file with its own data ignores the run's held-out data and mixture."""
    for name in ("a", "held_out"):
        (tmp_path / f"{name}.txt").write_text(f"{name}\n")
    (tmp_path / "mixture.json").write_text(json.dumps({"one": {"path": "held_out.txt", "weight": 1}}))
    (tmp_path / "own.yml").write_text("kind: text\ngrain_train_files: a.txt\n")
    (tmp_path / "both.yml").write_text("kind: text\ngrain_train_files: a.txt\ngrain_eval_files: held_out.txt\n")
    (tmp_path / "same.yml").write_text("kind: text\nadd_eos: false\n")
    run = {"dataset_type": "grain", "grain_file_type": "text", "grain_eval_files": "held_out.txt"}

    def evaluated(name, **keys):
        (result,) = task(tmp_path, monkeypatch, name, **run | keys).run(model())
        return sum(sample["tokens"] for sample in result.samples)

    mixed = {"grain_train_mixture_config_path": "mixture.json"}
    held_out = evaluated("text", **mixed)
    assert held_out == evaluated("same.yml", **mixed) == evaluated("both.yml", **mixed)
    assert evaluated("own.yml", **mixed) == evaluated("own.yml", grain_train_files="held_out.txt") < held_out


def test_text_that_is_not_held_out_is_evaluated_only_as_far_as_asked(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("one\n")
    run = {"dataset_type": "grain", "grain_file_type": "text", "grain_train_files": "a.txt", "held_out_share": 0.0}
    with pytest.raises(UserError, match="nothing is held out for text; eval_tasks_limit=N"):
        task(tmp_path, monkeypatch, "text", **run)
    (result,) = task(tmp_path, monkeypatch, "text", eval_tasks_limit=1, **run).run(model())
    assert result.samples[0]["tokens"] > 0


def test_the_data_of_conversations_are_no_text(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        sft.main(["base.yml", "eval_tasks=[text]", "dataset_type=hf", "hf_path=json", "tokenizer_path=."])
    assert end.value.code == 2
    assert "eval_tasks=text: the data of trainer.sft are not plain text" in capsys.readouterr().err


def test_synthetic_rows_need_no_tokenizer():
    config = tiny_config("nnx", **KEYS | {"eval_tasks_limit": 4})
    opened = TextTask(read_specs(["text"], "tasks")[0], config, None, 4, print)
    (result,) = opened.run(model())
    assert list(scores(result)) == ["loss", "perplexity"]
    assert result.scores[0].samples == 4


def answers_of(prompts, limit=5):
    return [
        answer.text for answer in model().answers([model().encode(text) for text in prompts], [limit] * 4, [[]] * 4)
    ]


PROMPTS = ["def f", "Hello", "12 + 3 =", "x"]


def questions(folder, expected, name="q.jsonl", **more):
    rows = [{"question": asked, "answer": answer, **more} for asked, answer in zip(PROMPTS, expected, strict=True)]
    (folder / name).write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def test_answers_are_compared_with_those_of_the_file(tmp_path, monkeypatch):
    said = answers_of(PROMPTS)
    questions(tmp_path, [f" {said[0]} ", ["other", said[1].strip().swapcase()], "wrong", said[3]])
    (tmp_path / "any.yml").write_text("kind: questions\nfile: q.jsonl\nmax_tokens: 5\nignore_case: true\n")
    (tmp_path / "exact.yml").write_text("kind: questions\nfile: q.jsonl\nmax_tokens: 5\n")
    (result,) = task(tmp_path, monkeypatch, "any.yml").run(model())
    assert scores(result) == {"exact_match": 0.75}
    assert [sample["answer"] for sample in result.samples] == said
    assert [sample["exact_match"] for sample in result.samples] == [1, 1, 0, 1]
    assert scores(task(tmp_path, monkeypatch, "exact.yml").run(model())[0])["exact_match"] <= 0.75
    found = said[2][1]
    assert "'" not in found
    pattern = "kind: questions\nfile: q.jsonl\nmax_tokens: 5\nscore: pattern\npattern: '(?s)^.(.)'\n"
    (tmp_path / "p.yml").write_text(pattern)
    questions(tmp_path, ["none of it", "none of it", found, "none of it"])
    (result,) = task(tmp_path, monkeypatch, "p.yml").run(model())
    assert result.samples[2]["found"] == found
    assert result.samples[2]["match"] == float(bool(found.strip()))
    (tmp_path / "u.yml").write_text(f"kind: questions\nfile: q.jsonl\nmax_tokens: 5\nuntil: [{json.dumps(found)}]\n")
    (result,) = task(tmp_path, monkeypatch, "u.yml").run(model())
    assert result.samples[2]["answer"] == said[2].split(found)[0]
    assert result.samples[2]["end"] == "stop"


def test_a_pattern_that_does_not_end_is_stopped(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("trainer.evaluation.model._LOOK_SECONDS", 0.02)
    questions(tmp_path, "abcd")
    (tmp_path / "p.yml").write_text("kind: questions\nfile: q.jsonl\nscore: pattern\npattern: '(a+)+$'\n")
    answers = [Answer(text, [], "stop") for text in ("a" * 40 + "b", "aaa")]
    opened = task(tmp_path, monkeypatch, "p.yml", reward_worker_timeout_seconds=0.1)
    assert opened._by_pattern("(a+)+$", answers, model()) == [None, "aaa"]
    assert "p: the pattern took too long in 1 of 2 answers, which do not match" in capsys.readouterr().out
    asked, opened = model(), task(tmp_path, monkeypatch, "p.yml")
    asked.begin_task(0.1)
    with pytest.raises(TooLong):
        opened._by_pattern("(a+)+$", answers, asked)
    with pytest.raises(Interrupted):
        opened._by_pattern("(a+)+$", answers, model(lambda: True))


def test_what_has_no_log_likelihood_is_refused(monkeypatch):
    engine, params = made()
    asked = EvaluatedModel(engine, params, engine.get_tokenizer(), [256], images={7: "image_token_index"})
    for refused in (lambda: asked.log_probs([[1, 2], [1, 7]]), lambda: asked.answers([[7]], [1], [[]])):
        with pytest.raises(UserError, match=r"the token 7, which stands for an image \(image_token_index\)"):
            refused()
    for pair in (([], [1]), ([1], [])):
        with pytest.raises(UserError, match="has no tokens"):
            asked.log_likelihoods([([1], [2]), pair])
    monkeypatch.setattr(asked, "log_probs", lambda rows: [(np.array([0, np.nan]), np.array([True, True]))] * len(rows))
    assert asked.log_likelihoods([([1, 2], [3])] * 0) == []
    with pytest.raises(UserError, match="log-likelihoods are NaN"):
        asked.log_likelihoods([([1, 2], [3])])


FAILING = """\
def fails(**_):
    raise ValueError('no judge')

def hangs(**_):
    import time
    time.sleep(60)
"""


def test_a_function_judges_answers(tmp_path, monkeypatch, capsys):
    questions(tmp_path, [3, 4, 5, 6], level="easy")
    judge = "def judge(prompts, completions, answer, level, **_):\n    assert level == ['easy']\n    return answer[0]\n"
    (tmp_path / "judge_of_tasks.py").write_text(judge + FAILING)
    monkeypatch.syspath_prepend(tmp_path)
    text = "kind: questions\nfile: q.jsonl\nmax_tokens: 2\nscore: function\nfunction: judge_of_tasks:"
    (tmp_path / "f.yml").write_text(f"{text}judge\n")
    (result,) = task(tmp_path, monkeypatch, "f.yml", reward_num_workers=1).run(model())
    assert scores(result) == {"score": 4.5}
    assert result.scores[0].error == pytest.approx(np.std([3, 4, 5, 6], ddof=1) / 2)
    (tmp_path / "g.yml").write_text(f"{text}fails\n")
    with pytest.raises(UserError, match=r"q.jsonl, line 1: the function .*no judge"):
        task(tmp_path, monkeypatch, "g.yml", reward_num_workers=1).run(model())
    (tmp_path / "i.yml").write_text(f"{text}hangs\n")
    keys = {"reward_num_workers": 2, "reward_worker_timeout_seconds": 1.0}
    (late,) = task(tmp_path, monkeypatch, "i.yml", **keys).run(model())
    assert scores(late) == {"score": 0.0}
    assert "i: the function took too long for 4 of 4 answers, which score 0" in capsys.readouterr().out
    keys["reward_worker_timeout_seconds"] = 60.0  # so that the task or the run ends first
    asked = model()
    asked.begin_task(3.0)
    with pytest.raises(TooLong, match=r"stopped after 3 s \(eval_tasks_timeout_seconds\)"):
        task(tmp_path, monkeypatch, "i.yml", **keys).run(asked)
    began = time.monotonic()
    with pytest.raises(Interrupted):
        task(tmp_path, monkeypatch, "i.yml", **keys).run(model(lambda: time.monotonic() > began + 3))
    assert time.monotonic() < began + 30
    (tmp_path / "h.yml").write_text(f"{text}nothing\n")
    with pytest.raises(UserError, match=r"function=judge_of_tasks:nothing: .* has no function nothing"):
        task(tmp_path, monkeypatch, "h.yml", reward_num_workers=1)


def test_the_likeliest_choice_is_taken(tmp_path, monkeypatch):
    choices = ["a", "bb ", "ccccc"]
    rows = [{"question": asked, "choices": choices, "answer": 0} for asked in PROMPTS]
    (tmp_path / "c.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (result,) = task(tmp_path, monkeypatch, "c.jsonl").run(model())
    for asked, sample in zip(PROMPTS, result.samples, strict=True):
        before = model().encode(asked)
        sums = []
        for choice in choices:
            row = [*before, *model().tokenizer.encode(f" {choice}")]
            ((said, _),) = model().log_probs([row])
            sums.append(float(said[len(before) - 1 :].sum(dtype=np.float64)))
        np.testing.assert_allclose(sample["log_likelihoods"], sums, atol=1e-4)
        by_byte = [total / len(choice) for total, choice in zip(sums, choices, strict=True)]
        assert sample["accuracy"] == (sums.index(max(sums)) == 0)
        assert sample["accuracy_per_byte"] == (by_byte.index(max(by_byte)) == 0)
    assert scores(result)["accuracy"] == np.mean([sample["accuracy"] for sample in result.samples])


class Messages:
    """A chat template that puts messages in brackets."""

    def tokens(self, text):
        return model().tokenizer.encode(f"<{text}>")


def test_a_choice_is_the_whole_message_of_the_assistant(tmp_path, monkeypatch):
    rows = [{"question": "Sky?", "choices": ["blue", "red"], "answer": 0}]
    (tmp_path / "c.jsonl").write_text(json.dumps(rows[0]))
    asked = model()
    asked.chat = Messages()
    (result,) = task(tmp_path, monkeypatch, "c.jsonl").run(asked)
    encode = model().tokenizer.encode
    expected = model().log_likelihoods([(encode("<Sky?>"), encode(choice)) for choice in rows[0]["choices"]])
    assert result.samples[0]["log_likelihoods"] == [found for found, _ in expected]


def test_an_evaluation_ends_when_the_run_does(tmp_path, monkeypatch):
    questions(tmp_path, "abcd")
    opened = task(tmp_path, monkeypatch, "q.jsonl")
    asked = []

    def interrupted():
        asked.append(None)
        return len(asked) > 2

    with pytest.raises(Interrupted):
        opened.run(model(interrupted))
    assert len(asked) == 3


def test_a_long_task_says_how_far_it_is(monkeypatch):
    monkeypatch.setattr("trainer.evaluation.model._EVERY", 0.0)
    lines = []
    engine, params = made()
    asked = EvaluatedModel(engine, params, engine.get_tokenizer(), [256], say=lines.append)
    asked.log_probs([[1, 2]] * 4)
    assert lines == ["3 of 4 texts", "4 of 4 texts"]
    asked.answers([[1, 2, 3]] * 2, [2, 2], [[], []])
    assert lines[-1] == "2 of 2 answers"


def test_a_question_that_is_too_long_is_named(tmp_path, monkeypatch):
    questions(tmp_path, "abcd")
    with (tmp_path / "q.jsonl").open("a") as file:
        file.write(json.dumps({"question": "x" * 80, "answer": "y"}) + "\n")
    with pytest.raises(UserError, match=r"q.jsonl, line 5: the prompt has 81 tokens: allowed: 1 to 63"):
        task(tmp_path, monkeypatch, "q.jsonl").run(model())
    questions(tmp_path, "abcd", prompts="taken")
    spec = read_specs(["q.jsonl"], "tasks")[0]
    spec = spec._replace(settings=spec.settings | {"function": "a:b"})
    with pytest.raises(UserError, match="prompts is the name of another argument"):
        QuestionsTask(spec, tiny_config("nnx", **KEYS), -1, print)


GYM = """\
import dataclasses
import os

class Sums:
    def __init__(self, config):
        self.config = config

    def __getitem__(self, index):
        a, seed = self.config.seed + index, os.environ["PYTHONHASHSEED"]
        return {"question": f"{a} + {a} = {seed}", "answer": str(2 * a), "metadata": {"sum": 2 * a}}

    def score_answer(self, answer, entry):
        return 1.0 if answer == "right" else 0.25 * (entry["metadata"]["sum"] == 2 * self.config.seed)

@dataclasses.dataclass
class Config:
    seed: int
    size: int
    low: int = 0

    def validate(self):
        assert self.low < 5, "low must be below 5"

def create_dataset(name, **settings):
    config = Config(**settings)
    config.validate()
    return factory.DATASETS[name][0](config)

from reasoning_gym import evaluated, factory
"""


def test_a_data_set_of_reasoning_gym_judges_answers(tmp_path, monkeypatch):
    """Uses a stand-in package with the same interface; docs/guides/evaluation.md reports tests with the real one."""
    package = tmp_path / "reasoning_gym"
    package.mkdir()
    (package / "__init__.py").write_text(GYM)
    (package / "factory.py").write_text(
        "from reasoning_gym import Config, Sums, evaluated\n"
        "DATASETS = {'sums': (Sums, Config), 'evaluated': (evaluated.Evaluated, Config)}\n"
    )
    (package / "evaluated.py").write_text(
        "from reasoning_gym import Sums\nclass Evaluated(Sums):\n    def f(self, x):\n        return eval(x)\n"
    )
    (package / "utils.py").write_text("def extract_answer(completion):\n    return None\n")
    monkeypatch.syspath_prepend(tmp_path)
    text = "kind: reasoning-gym\nseed: 7\nmax_tokens: 2\nsize: 3\ndataset: "
    (tmp_path / "sums.yml").write_text(f"{text}sums\nprompt: 'What is {{question}}'\n")
    (result,) = task(tmp_path, monkeypatch, "sums.yml", reward_num_workers=1).run(model())
    assert [sample["prompt"] for sample in result.samples] == [f"What is {a} + {a} = 0" for a in (7, 8, 9)]
    assert [sample["expected"] for sample in result.samples] == ["14", "16", "18"]
    assert scores(result) == {"score": 0.25 / 3}
    assert result.scores[0].error == pytest.approx(np.std([0.25, 0, 0], ddof=1) / 3**0.5)
    assert len(task(tmp_path, monkeypatch, "sums.yml", eval_tasks_limit=2)._rows) == 2
    for body, said in {
        "smus": r"dataset: smus: reasoning-gym does not know it.*allowed: evaluated, sums",
        "sums\nconfig: {lwo: 3}": r"config: lwo: reasoning-gym does not know it.*allowed: low",
        "sums\nconfig: {low: 9}": r"config: AssertionError: low must be below 5",
        "evaluated": r"evaluates answers as code.*eval_tasks_allow_code=true accepts that",
    }.items():
        (tmp_path / "wrong.yml").write_text(text + body)
        with pytest.raises(UserError, match=said):
            task(tmp_path, monkeypatch, "wrong.yml")
    assert task(tmp_path, monkeypatch, "wrong.yml", eval_tasks_allow_code=True).name == "wrong"

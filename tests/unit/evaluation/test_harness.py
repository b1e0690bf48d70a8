"""lm-eval tasks: each request's result against a second computation.

scripts/compare_lm_eval.py compares with lm-eval's own model, which needs torch.
"""

import json
import math
import signal
import time

import datasets
import jax
import numpy as np
import pytest
from support import random_variables, tiny_config

from trainer.chat.encoder import Prompts
from trainer.config.errors import UserError
from trainer.evaluation.harness import HarnessTask
from trainer.evaluation.model import EvaluatedModel, Interrupted, TooLong
from trainer.evaluation.specs import read_specs
from trainer.inference.max_engine import MaxEngine

KEYS = {"max_target_length": 64, "vocab_size": 257, "base_num_decoder_layers": 1, "per_device_batch_size": 3}
KEYS |= {"tokenizer_type": "bytes", "dtype": "float32"}
HEAD = """\
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/{data}.json}}}}
test_split: test
"""
CHOICES = """\
output_type: multiple_choice
doc_to_text: "Q: {{q}}\\nA:"
doc_to_choice: "{{choices}}"
doc_to_target: "{{gold}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
"""
ROLLING = """\
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: byte_perplexity}, {metric: bits_per_byte}]
"""
WRITTEN = """\
output_type: generate_until
doc_to_text: "Q: {{q}}\\nA:"
doc_to_target: "{{choices[gold]}}"
generation_kwargs: {until: ["e"], max_gen_toks: 6}
metric_list: [{metric: exact_match}]
"""
ASKED = [
    {"q": "red?", "choices": ["yes", "no it is not"], "gold": 0},
    {"q": "what is a longer question", "choices": ["that", "this one"], "gold": 1},
    {"q": "x", "choices": ["a", "b", "c"], "gold": 2},
    {"q": "Why", "choices": ["so", "because"], "gold": 1},
]
TEXTS = [
    {"text": "short"},
    {"text": "A text of more than sixty-four bytes, so that it has two windows, of which each counts."},
]


@pytest.fixture(scope="module")
def made():
    engine = MaxEngine(tiny_config("nnx", **KEYS), jax.devices()[:1])
    return engine, engine.hold(*random_variables(engine.served.model))


@pytest.fixture
def opened(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    for name, rows in (("asked", ASKED), ("texts", TEXTS)):
        (tmp_path / f"{name}.json").write_text("\n".join(map(json.dumps, rows)))

    def opens(name, body, data="asked", limit=-1):
        path = tmp_path / f"{name}.yml"
        path.write_text(HEAD.format(name=name, folder=tmp_path, data=data) + body)
        return HarnessTask(read_specs([str(path)], "tasks")[0], limit)

    return opens


def model_of(made, **keys):
    engine, params = made
    return EvaluatedModel(engine, params, engine.get_tokenizer(), [256], **keys)


def log_likelihood(model, before, after):
    ((said, likeliest),) = model.log_probs([[*before, *after]])
    return float(said[-len(after) :].sum(dtype=np.float64)), bool(likeliest[-len(after) :].all())


def test_choices(made, opened):
    model = model_of(made)
    (result,) = opened("choices", CHOICES).run(model)
    for doc, sample in zip(ASKED, result.samples, strict=True):
        before = model.encode(f"Q: {doc['q']}\nA:")
        for choice, (found,) in zip(doc["choices"], sample["resps"], strict=True):
            value, likeliest = log_likelihood(model, before, model.tokenizer.encode(f" {choice}"))
            assert found[0] == pytest.approx(value, abs=1e-4)
            assert found[1] == likeliest
    right = [sample["acc"] for sample in result.samples]
    score = result.scores[0]
    assert (score.metric, score.value, score.samples) == ("acc", np.mean(right), 4)
    assert score.error == pytest.approx(np.std(right, ddof=1) / 2)
    assert opened("choices", CHOICES, limit=2).run(model)[0].scores[0].samples == 2


def test_a_rolling_text_counts_every_token_once(made, opened):
    model = model_of(made)
    (result,) = opened("rolling", ROLLING, "texts").run(model)
    (short,) = result.samples[0]["resps"][0]
    begin = model.tokenizer.eos if model.tokenizer.bos is None else model.tokenizer.bos
    tokens = model.encode("short")
    assert short == pytest.approx(log_likelihood(model, [begin], tokens)[0], abs=1e-4)
    tokens = model.encode(TEXTS[1]["text"])
    assert 64 < len(tokens) < 128
    # The last window is filled with as many preceding tokens as fit.
    first = log_likelihood(model, [begin], tokens[:64])[0]
    rest = log_likelihood(model, tokens[-65 : 64 - len(tokens)], tokens[64:])[0]
    (long,) = result.samples[1]["resps"][0]
    assert long == pytest.approx(first + rest, abs=1e-4)
    bits = next(score for score in result.scores if score.metric == "bits_per_byte")
    assert bits.value == pytest.approx(-(short + long) / math.log(2) / sum(len(row["text"]) for row in TEXTS))
    assert bits.error > 0


def test_answers_end_before_a_text(made, opened):
    model = model_of(made)
    task = opened("written", WRITTEN)
    (result,) = task.run(model)
    prompts = [model.encode(f"Q: {doc['q']}\nA:") for doc in ASKED]
    answers = model.answers(prompts, [6] * 4, [[]] * 4)
    assert [sample["resps"][0][0] for sample in result.samples] == [answer.text.split("e")[0] for answer in answers]
    again = task.run(model)
    assert [score.value for score in again[0].scores] == [score.value for score in result.scores]


def test_an_empty_context_is_the_token_that_begins_a_text(made, opened):
    model = model_of(made)
    begin = model.tokenizer.eos if model.tokenizer.bos is None else model.tokenizer.bos
    nothing = 'doc_to_text: ""'
    (result,) = opened("nothing", CHOICES.replace('doc_to_text: "Q: {{q}}\\nA:"', nothing)).run(model)
    expected = log_likelihood(model, [begin], model.tokenizer.encode(" yes"))[0]
    assert result.samples[0]["resps"][0][0][0] == pytest.approx(expected, abs=1e-4)
    (result,) = opened("unasked", WRITTEN.replace('doc_to_text: "Q: {{q}}\\nA:"', nothing)).run(model)
    (answer,) = model.answers([[begin]], [6], [["e"]])
    assert [sample["resps"][0][0] for sample in result.samples] == [answer.text] * 4


def test_a_chat_template_makes_the_question_a_message(made, opened):
    tokenizer = made[0].get_tokenizer()
    chat = Prompts(tiny_config("nnx", **KEYS), tokenizer)
    model = model_of(made, chat=chat)
    (result,) = opened("chat", CHOICES).run(model)
    said = chat.template.render([{"role": "user", "content": "Q: x\nA:"}], prompt=True)
    stripped = said.text.rstrip()
    (before,) = tokenizer.encode_rendered([said._replace(text=stripped)])
    value, _ = log_likelihood(model, before.ids.tolist(), tokenizer.encode(f"{said.text[len(stripped) :]}a"))
    assert result.samples[2]["resps"][0][0][0] == pytest.approx(value, abs=1e-4)


def test_what_cannot_be_evaluated_is_named(made, opened, tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"none: its data set json \{.*none\.json.* is not on this machine: "):
        opened("none", CHOICES, "none")
    with pytest.raises(UserError, match="answers of up to 64 tokens leave no room"):
        opened("long", WRITTEN.replace("max_gen_toks: 6", "max_gen_toks: 64")).run(model_of(made))
    with pytest.raises(UserError, match="generation_kwargs: num_beams is not supported"):
        opened("beams", WRITTEN.replace("max_gen_toks", "num_beams: 2, max_gen_toks")).run(model_of(made))
    for given, said in {
        "until: [1]": "until a text",
        "max_gen_toks: 0": "at least 1",
        "max_gen_toks: x": "int",
    }.items():
        task = opened("wrong", WRITTEN.replace('until: ["e"], max_gen_toks: 6', given))
        with pytest.raises(UserError, match=f"generation_kwargs: .*{said}"):
            task.run(model_of(made))
    functions = "def fails(doc, results):\n    raise KeyError('no score')\n"
    functions += "def exits(doc, results):\n    raise SystemExit(0)\n"
    (tmp_path / "utils_of_task.py").write_text(functions)
    exiting = opened("exiting", f"{WRITTEN}process_results: !function utils_of_task.exits\n")
    with pytest.raises(UserError, match=r"exiting: the task failed: SystemExit: 0"):
        exiting.run(model_of(made))
    failing = opened("failing", f"{WRITTEN}process_results: !function utils_of_task.fails\n")
    with pytest.raises(UserError, match=r"failing: the task failed: KeyError: 'no score'"):
        failing.run(model_of(made))
    with pytest.raises(Interrupted):
        opened("ended", WRITTEN).run(model_of(made, interrupted=lambda: True))


def test_an_unknown_name_is_refused_without_an_index_of_all(monkeypatch):
    monkeypatch.setattr("trainer.evaluation.harness.TaskManager", None)
    with pytest.raises(UserError, match=r"hellaswga: lm-eval has no such task.*hellaswag"):
        HarnessTask(read_specs(["hellaswga"], "tasks")[0], -1)


@pytest.mark.parametrize("why", ["time", "run"])
def test_a_function_of_a_task_that_does_not_return_ends_with_the_time_or_the_run(made, opened, tmp_path, why):
    endless = "import time\n\n\ndef endless(doc, results):\n    while True:\n        time.sleep(0.01)\n"
    (tmp_path / "endless_of_task.py").write_text(endless)
    asked = model_of(made, interrupted=lambda: why == "run" and began + 3 < time.monotonic())
    task = opened("endless", f"{WRITTEN}process_results: !function endless_of_task.endless\n")
    began = time.monotonic()
    asked.begin_task(3.0 if why == "time" else 0.0)
    with pytest.raises(TooLong if why == "time" else Interrupted):
        task.run(asked)
    assert not any(signal.getitimer(signal.ITIMER_REAL))


BROKEN = {
    "AttributeError: Module ": "!function functions_of_task.nope",
    "RuntimeError: no text": "!function functions_of_task.fails",
    "SyntaxError: ": "!function no_program.fails",
    "TemplateSyntaxError: ": '"{{q"',
    "UndefinedError: 'gone' is undefined": '"{{gone.q}}"',
}


@pytest.mark.parametrize("problem", BROKEN)
def test_what_a_file_names_may_fail_in_any_way(opened, tmp_path, problem):
    (tmp_path / "functions_of_task.py").write_text("def fails(doc):\n    raise RuntimeError('no text')\n")
    (tmp_path / "no_program.py").write_text("def fails(doc) return\n")
    with pytest.raises(UserError, match=f"broken.yml: lm-eval cannot open it: {problem}"):
        opened("broken", CHOICES.replace('"Q: {{q}}\\nA:"', BROKEN[problem]))

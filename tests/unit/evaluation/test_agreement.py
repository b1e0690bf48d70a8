"""The processes of trainer.evaluate compare their programs and tasks before the first batch."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from trainer import evaluate
from trainer.evaluation.specs import Spec


class Compared(Exception):
    pass


def test_versions_source_and_questions_must_be_the_same(monkeypatch):
    def compare(values):
        raise Compared(values())

    engine = SimpleNamespace(get_tokenizer=lambda: None, stop_tokens=lambda tokenizer: [1])
    about = SimpleNamespace(about=SimpleNamespace(images={}))
    monkeypatch.setattr("trainer.inference.max_engine.MaxEngine", lambda config: engine)
    monkeypatch.setattr("trainer.weights.open.open_source", lambda *path, verify: about)
    monkeypatch.setattr("trainer.evaluation.tasks.open_tasks", lambda *what: [])
    monkeypatch.setattr("trainer.runtime.agreement.check_same", compare)
    config = SimpleNamespace(use_chat_template=False, load_parameters_path="", decoder_block="", dataset_type="grain")
    loaded = SimpleNamespace(notes=[], config=config)

    def compared(folder, question):
        specs = [Spec("sums", "questions", Path(folder) / "sums.jsonl", questions=[(1, {"question": question})])]
        with pytest.raises(Compared) as raised:
            evaluate._evaluate(loaded, specs, False, None, 0.0)
        (values,) = raised.value.args
        return values

    here = compared("/here", "1+1")
    assert here == compared("/there", "1+1")
    assert here["the tasks"] != compared("/here", "1+2")["the tasks"]
    assert {"the versions", "the source of trainer"} < here.keys()

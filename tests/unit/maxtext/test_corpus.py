"""scripts/maxtext_corpus.py finds the documented commands in a MaxText checkout and reports how each one converts."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[3] / "scripts" / "maxtext_corpus.py"
PAGE = """Run `python3 -m maxtext.trainers.pre_train.train run_name=x` now.

```sh
export MODEL='llama2-7b'
python3 -m maxtext.trainers.pre_train.train src/maxtext/configs/base.yml \\
    model_name=$MODEL dataset_type=synthetic run_name=<your run>
python3 -m pytest; xpk workload create --command "python3 -m MaxText.train base.yml \\
    dataset_type=synthetic enable_wandb=true"
```
"""
SCRIPT_OF_THEIRS = """#!/bin/bash
# python3 -m maxtext.inference.vllm_decode base.yml
MODEL_NAME=gemma4-31b
python3 -m maxtext.checkpoint_conversion.to_huggingface model_name=$MODEL_NAME \\
  load_parameters_path=/c base_output_directory=gs://b/o
"""
CELLS = {"cells": [{"source": ["!python3 -m maxtext.trainers.pre_train.train ", "dataset_type=synthetic stepps=1"]}]}


@pytest.fixture
def corpus(monkeypatch):
    spec = importlib.util.spec_from_file_location("maxtext_corpus", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_commands_of_pages_scripts_and_notebooks(corpus, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "checkout"
    (root / "docs").mkdir(parents=True)
    (root / "docs" / "page.md").write_text(PAGE)
    (root / "run.sh").write_text(SCRIPT_OF_THEIRS)
    (root / "a.ipynb").write_text(json.dumps(CELLS))
    (root / "b.ipynb").write_text("{")
    found = [(str(path), corpus.outcome(command)) for path, command in corpus.commands(root)]
    assert [(path, it.verdict) for path, it in found] == [
        ("a.ipynb", "refused"),
        ("docs/page.md", "lacks a path"),
        ("docs/page.md", "converted"),
        ("docs/page.md", "refused"),
        ("run.sh", "no program here"),
        ("run.sh", "refused"),
    ]
    assert found[2][1].text.split()[3:] == [
        *["maxtext.yml", "model_name=llama2-7b", "dataset_type=synthetic"],
        "run_name=$PLACEHOLDER",
    ]
    assert found[3][1].reasons == ("enable_wandb: not yet",)
    assert found[5][1].reasons == ("a local folder as OUT", "model_name: not supported yet: the family gemma4")
    monkeypatch.setattr(sys, "argv", ["maxtext_corpus.py", str(root)])
    assert corpus.main() == 0
    said = capsys.readouterr().out.splitlines()
    assert said[:2] == ["6 commands in 3 files", "| refused | 3 |"]
    assert "| enable_wandb: not yet | 1 | 1 |" in said

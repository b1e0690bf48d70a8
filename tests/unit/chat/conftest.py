"""A module of a user's functions."""

import sys
from pathlib import Path

import pytest


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "my_functions.py").write_text(
        "def pairs(example, template_config=None, suffix=''):\n"
        "    prompt = (template_config or {}).get('PROMPT', '{q}').format(q=example['q'])\n"
        "    messages = [{'role': 'user', 'content': prompt}]\n"
        "    return {'messages': [*messages, {'role': 'assistant', 'content': example['a'] + suffix}], 'q': 1}\n"
        "def plain(example):\n    return {'prompt': example['q'], 'completion': example['a']}\n"
        "def wrong(example):\n    return {'text': 'x'}\n"
        "def with_tools(example):\n    return {'messages': [], 'tools': [{'name': 'f'}]}\n"
        "def failing(example):\n    return example['gone']\n"
        "number = 3\n"
    )
    (tmp_path / "broken.py").write_text("def f(:\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("my_functions", None)

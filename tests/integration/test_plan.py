"""`python -m trainer.plan` as a user runs it, with the compiler for TPUs."""

import importlib.util
import json

import pytest
from test_train_compile import TPU, needs_libtpu
from support import arguments

from trainer.plan import main


@needs_libtpu
@pytest.mark.rest(covered_by="unit/planning")
def test_a_plan_of_a_tiny_model(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    own = {key: value for key, value in TPU.items() if key not in ("remat_policy", "per_device_batch_size")}
    words = [
        *arguments("nnx", **own),
        "num_vocab_tiling=1",
        "search.remat_policy=none,full",
        "search.per_device_batch_size=1",
    ]

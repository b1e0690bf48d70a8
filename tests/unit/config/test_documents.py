"""How many documents the rows of a configuration hold at most."""

import pytest

from trainer.config import load
from trainer.config.capabilities.documents import most_documents

MMAP = "dataset_type=grain grain_train_files=x grain_file_type=mmap"


@pytest.mark.parametrize(
    ("words", "most"),
    [
        ("", None),
        ("packing=false", 1),
        ("dataset_type=synthetic packing=false", 1),
        (MMAP, None),
        (f"{MMAP} reset_attention_mask=false", 0),
    ],
)
def test_the_most_documents(words, most):
    assert most_documents(load(["base.yml", *words.split()]).config) == most

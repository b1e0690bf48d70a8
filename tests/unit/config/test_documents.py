"""The maximum number of documents in a row, for a configuration."""

import pytest

from trainer.config.capabilities.documents import OF_ROWS, most_documents
from trainer.config.keys import Config
from trainer.config.load import load

MMAP = "dataset_type=grain grain_train_files=x grain_file_type=mmap"

PAIRS = (
    "use_dpo=true dataset_type=grain grain_file_type=jsonl grain_train_files=x train_data_columns=[chosen,rejected] "
    "eval_data_columns=[chosen,rejected]"
)


@pytest.mark.parametrize(
    ("words", "most"),
    [
        ("", None),
        ("packing=false", 1),
        ("max_segments_per_seq=7", 7),
        ("grain_packing_type=best_fit max_segments_per_seq=7", 7),
        ("use_grpo=true reward_functions=[m:f] packing=false", None),
        ("use_distill=true distill_rollouts=true distill_alpha=1 decode_sampling_temperature=1 packing=false", None),
        (f"{PAIRS} grain_packing_type=best_fit", None),
        (f"{PAIRS} grain_packing_type=best_fit max_segments_per_seq=7", 14),
        (f"{PAIRS} packing=false", 2),
        ("dataset_type=synthetic", 4),
        ("dataset_type=synthetic packing=false", 1),
        (MMAP, None),
        (f"{MMAP} max_target_length=100 packing_max_segments_per_sample=100", None),  # no threshold, like MaxText
        (f"{MMAP} max_target_length=100 packing_max_segments_per_sample=10", 10),  # nine have 11 tokens, one has 1
        (f"{MMAP} reset_attention_mask=false", 0),
    ],
)
def test_the_most_documents(words, most):
    config = load(["base.yml", *words.split()]).config
    assert most_documents(config) == most
    assert most_documents(Config({name: config[name] for name in OF_ROWS})) == most

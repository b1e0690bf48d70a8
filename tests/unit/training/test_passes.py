"""Passes over the training data: how many a run makes, and a run with a given number of passes."""

from types import SimpleNamespace

import pytest
from run_cases import command
from sample_data import config_of, opened, write_records
from support import TINY, pinned

from trainer.config.errors import UserError
from trainer.config.resolve import resolve
from trainer.rl.prompts import open_prompts
from trainer.train import _with_passes
from trainer.training.passes import passes_text, steps_of

TEXTS = [{"text": "x" * 32, "prompt": "x"}] * 20  # with the preceding token, each text fills a row of 32 tokens
GRPO = {"use_grpo": True, "reward_functions": "[m:f]", "decode_sampling_temperature": 1, "rl_num_iterations": 2}
GRPO |= {"train_data_columns": "prompt", "batch_size": 8, "steps": 6}


def data(tmp_path, **keys):
    write_records(tmp_path / "a.jsonl", "jsonl", TEXTS)
    base = {"dataset_type": "grain", "grain_file_type": "jsonl", "grain_train_files": tmp_path / "a.jsonl"}
    base |= {"tokenizer_type": "bytes", "add_eos": False, "held_out_share": 0, "per_device_batch_size": 4}
    return base | {"data_cache_directory": tmp_path / "cache"} | keys


@pytest.mark.parametrize(
    ("keys", "text", "steps"),
    [
        ({"steps": 8}, " (1.6 passes over 20 documents)", 15),
        ({"steps": 5}, " (1 pass over 20 documents)", 15),
        ({"steps": 5, "gradient_accumulation_steps": 12}, " (12 passes over 20 documents)", 2),
        (GRPO, " (1.2 passes over 20 prompts)", 16),  # 8 rounds of 8 prompts, each with 2 updates
    ],
)
def test_steps_and_passes(tmp_path, keys, text, steps):
    keys = data(tmp_path, **keys) | {"num_epoch": 3}
    config = resolve(config_of(tmp_path / "cache", **keys), device_count=1, platform="cpu")
    found = open_prompts(config, print) if config.use_grpo else opened(tmp_path / "cache", **keys)
    assert passes_text(config, found) == text
    assert steps_of(config, found) == steps


def test_data_without_a_known_end_have_no_passes(tmp_path):
    file = tmp_path / "a.jsonl"
    streamed = data(tmp_path, data_pipeline="streaming", grain_worker_count=0)
    mixed = data(tmp_path, grain_train_files=f"{file},1;{file},2")
    once = data(tmp_path, reuse_example_batch=1)
    for keys in (streamed, mixed, once):
        assert opened(tmp_path / "cache", **keys).epoch is None
    no_end = {"dataset_type": "synthetic"}
    rounds = data(tmp_path, **GRPO) | {"num_batches": 2, "steps": -1}
    for keys in (streamed, mixed, once, no_end, rounds):
        with pytest.raises(UserError, match=r"num_epoch=2 \(command line\): .*; leave it out, and give steps=N"):
            config_of(tmp_path / "cache", **keys, num_epoch=2)


def test_a_run_of_two_passes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    keys = TINY | pinned("nnx") | data(tmp_path) | {"max_target_length": 32, "vocab_size": 300, "eval_interval": -1}
    keys |= {"num_epoch": 2, "enable_checkpointing": False, "prompt": ""}
    keys.pop("steps", None)
    code, said = command(keys, "--dry-run")
    assert code == 0, said
    assert "steps=10: 2 passes over 20 documents (num_epoch)\n" in said
    assert "steps        10 (2 passes over 20 documents)\n" in said


@pytest.mark.parametrize(
    ("steps", "line"),
    [
        (4, "steps=4 ends the run before num_epoch: 2 passes over 20 documents are 10 steps"),
        (10, "steps=10: 2 passes over 20 documents (num_epoch)"),
    ],
)
def test_fewer_steps_end_it_before_and_as_many_do_not(tmp_path, monkeypatch, steps, line):
    keys = data(tmp_path) | {"num_epoch": 2, "steps": steps}
    config = resolve(config_of(tmp_path / "cache", **keys), device_count=1, platform="cpu")
    monkeypatch.setattr("trainer.training.build.build", lambda config, devices: config)
    run, lines, completed = SimpleNamespace(config=config), [], {}
    given = SimpleNamespace(changed={"steps": "command line"}, complete=completed.update, config=config)
    found = _with_passes(given, run, opened(tmp_path / "cache", **keys), SimpleNamespace(say=lines.append))
    assert lines == [line]
    assert (found, completed) == ((run, {}) if steps == 4 else (config, {"steps": 10}))

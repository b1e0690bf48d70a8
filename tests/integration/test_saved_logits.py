"""`python -m trainer.distill` saves a teacher's logits, trains from them, and resumes."""

import json
import shutil

import pytest
from checkpoint_cases import config_of, hf_tensors, random_params, write_hf
from run_cases import RUN, command, killed_at, rows_of
from support import TINY, pinned

from trainer import distill
from trainer.data.teacher_logits import MANIFEST

pytestmark = pytest.mark.usefixtures("equal_programs")
KEYS = TINY | pinned("nnx") | {"vocab_size": 300, "distill_vocab_size": 300, "base_num_decoder_layers": 1, "prompt": ""}
KEYS |= {
    "dataset_type": "grain",
    "grain_file_type": "jsonl",
    "grain_train_files": "corpus.jsonl",
    "tokenizer_type": "bytes",
}
KEYS |= {"data_cache_directory": "cache", "per_device_batch_size": 8, "enable_tensorboard": False, "steps": 4}
KEYS |= {"held_out_share": 0.2, "eval_interval": 4, "learning_rate_schedule_steps": 4}
SAVE = KEYS | {"teacher_path": "teacher", "save_teacher_logits": "logits", "teacher_logits_k": 8}
SAVES = {"enable_checkpointing": True, "checkpoint_period": 2, "max_num_checkpoints_to_keep": "none"}


def distilled(*words, code=0, **keys):
    """Runs the command, which must end with `code`, and returns its output."""
    found, said = command(keys, *words, program=distill.main)
    assert found == code, said
    return said


def test_saved_logits_train_and_a_resumed_run_has_the_same_losses(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    texts = [{"text": f"document {i} has {i * 7 % 11} words"} for i in range(60)]
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    teacher = config_of(vocab_size=300)
    write_hf(tmp_path / "teacher", teacher, hf_tensors(random_params(teacher)))
    said = distilled(**SAVE)
    assert "8 of 300 logits, 52 bytes per token" in said
    assert "1 of 1 shards were saved before" in distilled(**SAVE)
    shutil.rmtree(tmp_path / "teacher")

    said = distilled(**KEYS | SAVES | {"teacher_logits_path": "logits", "run_name": RUN.name})
    rows = rows_of(tmp_path / RUN)
    assert all(row["divergence"] > 0 for row in rows if "loss" in row)
    assert [row["eval_loss"] > 0 and "eval_divergence" not in row for row in rows if "eval_loss" in row] == [True]

    (tmp_path / "logits").rename(tmp_path / "moved")
    (tmp_path / RUN).rename(tmp_path / "finished")
    killed_at(2, tmp_path / "finished", tmp_path)
    again = KEYS | SAVES | {"teacher_logits_path": "moved", "run_name": RUN.name}
    manifest = tmp_path / "moved" / MANIFEST
    content = manifest.read_text()
    manifest.write_text(json.dumps(json.loads(content) | {"teacher": "another"}))
    assert "the content of teacher_logits_path was" in distilled(**again, code=2)
    manifest.write_text(content)
    assert "2 of 4 updates are done" in distilled(**again)
    assert rows_of(tmp_path / RUN) == rows

"""Training on a user's own files, with both data pipelines."""

import json
from pathlib import Path

import pytest
from megatron_files import documents_of, write_indexed
from run_cases import command
from sample_data import write_corpus, write_records, write_tfds
from support import TINY, pinned

pytestmark = pytest.mark.usefixtures("equal_programs")
SMALL = TINY | pinned("nnx")
SMALL |= {"vocab_size": 300, "max_target_length": 32, "steps": 4, "eval_interval": 4, "per_device_batch_size": 2}
SMALL |= {"prompt": "", "opt_type": "sgd"}


def run(folder: Path, **keys) -> tuple[int, str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return command(SMALL | {"data_cache_directory": folder / "cache"} | keys, "run_name=run")


def rows_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "runs" / "run" / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("way", ["prepared", "streaming"])
def test_a_mixture_of_files_trains(tmp_path: Path, way: str):
    files = f"{write_corpus(tmp_path / 'a', 'jsonl')}/*,0.7;{write_corpus(tmp_path / 'b', 'jsonl', 50)}/*,0.3"
    keys = {"dataset_type": "grain", "grain_file_type": "jsonl", "grain_train_files": files, "held_out_share": 0.2}
    code, output = run(tmp_path, **keys, data_pipeline=way)
    assert code == 0, output
    assert "training a BPE" in output
    steps = [row for row in rows_of(tmp_path) if "loss" in row]
    assert len(steps) == 4
    assert all(0 <= row["data_wait"] <= 1 for row in steps)
    (evaluation,) = (row for row in rows_of(tmp_path) if "eval_loss" in row)
    assert 0 < evaluation["eval_bits_per_byte"] < 10


def test_a_tfds_directory_trains(tmp_path: Path):
    write_tfds(tmp_path / "tfds")
    keys = {"dataset_type": "tfds", "dataset_path": tmp_path / "tfds", "dataset_name": "tiny/made:1.2.3"}
    code, output = run(tmp_path, **keys, tokenizer_type="bytes")
    assert code == 0, output
    assert "TFDS tiny/made:1.2.3: 20 documents" in output
    assert "held out 5 documents" in output


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"grain_train_files": "none/*"}, "none/* matches no file"),
        ({"grain_train_files": "a.jsonl"}, "a.jsonl, line 2, is not JSON"),
        ({"grain_train_files": "a.jsonl", "tokenizer_type": "bytes", "vocab_size": 100}, "set vocab_size=257"),
        ({"grain_train_files": "b.jsonl", "train_data_columns": "txt"}, "there is no column txt"),
        ({"grain_train_files": "a.jsonl", "tokenizer_path": "none.json"}, "none.json: there is no such file"),
    ],
)
@pytest.mark.parametrize("way", ["prepared", "streaming"])
def test_mistakes_end_with_a_message_and_code_2(tmp_path: Path, keys: dict, message: str, way: str):
    write_records(tmp_path / "b.jsonl", "jsonl", [{"text": "good"}])
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\nbad\n')
    kind = {"dataset_type": "grain", "grain_file_type": "jsonl", "data_pipeline": way}
    code, output = run(tmp_path, **kind, eval_interval=-1, **keys)
    assert code == 2, output
    (error,) = (line for line in output.splitlines() if line.startswith("error: "))
    assert message in output[output.index(error) :]
    assert "Traceback" not in output


def mmap_keys(folder: Path) -> dict:
    """Writes two Megatron-LM data sets, and returns the keys for a mixture of them."""
    for i, name in enumerate("ab"):
        write_indexed(folder / name, [[document] for document in documents_of(60, seed=i)], "u2")
    keys = {"dataset_type": "grain", "grain_file_type": "mmap", "grain_train_files": f"{folder}/a,0.7;{folder}/b,0.3"}
    return keys | {"mmap_eod_id": 0, "eod_mask_loss": True, "held_out_share": 0.2, "dropout_rate": 0.1}


@pytest.mark.rest(covered_by="unit/data/test_megatron.py")
def test_a_run_on_files_of_megatron_goes_on_with_the_same_batches(tmp_path: Path):
    folders = [tmp_path / "straight", tmp_path / "stopped"]
    keys = mmap_keys(tmp_path) | {"steps": 6, "learning_rate_schedule_steps": 6, "eval_interval": 3}
    keys |= {"enable_checkpointing": True, "checkpoint_period": 3}
    for folder, ends in zip(folders, ((6,), (3, 6)), strict=True):
        folder.mkdir()
        for end in ends:
            code, output = run(folder, **keys | {"steps": end})
            assert code == 0, output
    assert "3 of 6 updates are done" in output
    straight, stopped = (
        [(row["step"], row.get("loss"), row.get("eval_loss"), row.get("tokens")) for row in rows_of(folder)]
        for folder in folders
    )
    assert len(straight) == len(stopped) == 8
    assert straight == stopped


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "a.bin").write_bytes(b"\1\0"), "a.bin has 2 bytes, but"),
        (lambda folder: (folder / "b.idx").write_bytes(b"no index"), "b.idx is not an index of Megatron-LM"),
        (lambda folder: write_indexed(folder / "b", [[[299, 300, 0]]] * 9), "holds token 300 and vocab_size=300"),
    ],
)
def test_damaged_files_of_megatron_end_with_a_message_and_code_2(tmp_path: Path, damage, message: str):
    keys = mmap_keys(tmp_path)
    damage(tmp_path)
    code, output = run(tmp_path, **keys | {"eval_interval": -1})
    assert code == 2, output
    (error,) = (line for line in output.splitlines() if line.startswith("error: "))
    assert message in output[output.index(error) :]
    assert "Traceback" not in output

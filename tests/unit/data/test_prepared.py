"""Folders written by trainer.prepare: what training reads from them, and what is refused."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sample_data import LENGTH, document, opened, say_nothing, write_corpus
from stream_cases import batches

from trainer import inspect, prepare
from trainer.config.errors import UserError
from trainer.config.load import load
from trainer.config.prepared import MANIFEST
from trainer.data.dataset import open_dataset
from trainer.data.prepared import read_place
from trainer.runtime.lock import lock

KEYS = {"dataset_type": "grain", "grain_file_type": "jsonl", "max_target_length": LENGTH, "vocab_size": 300}
KEYS |= {"prepare_part_mib": 0.002, "prepare_workers": 1, "held_out_share": 0.2}


PARTS = ("dataset_type=grain", "grain_train_files=a.jsonl", "grain_file_type=jsonl", "prepare_part_mib=0.0001")
PARTS += ("prepare_workers=1", "tokenizer_type=bytes", "eval_interval=-1", "held_out_share=0")


def words_of(keys: dict[str, Any]) -> list[str]:
    return [f"{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in keys.items()]


def prepared(place: Path, **keys: Any) -> Path:
    prepare.main([*words_of(KEYS | keys), f"out={place}"])
    return place


@pytest.fixture
def files(tmp_path: Path) -> str:
    return f"{write_corpus(tmp_path / 'a', 'jsonl', 40)}/*,0.7;{write_corpus(tmp_path / 'b', 'jsonl', 50)}/*,0.3"


@pytest.mark.parametrize("tokenizer", [{}, {"tokenizer_type": "bytes"}, {"add_bos": False}], ids=str)
def test_training_reads_the_same_batches_from_the_folder(tmp_path: Path, files: str, tokenizer: dict):
    keys = {"grain_train_files": files, "held_out_share": 0.2, "eval_interval": 2} | tokenizer
    place = prepared(tmp_path / "place", **keys)
    there = load([f"prepared_path={place}", "vocab_size=300", "eval_interval=2"]).config
    for folder in ("a", "b"):
        (tmp_path / folder).rename(tmp_path / f"{folder} is away")
    dataset = open_dataset(there, lambda line: pytest.fail(line))
    for folder in ("a", "b"):
        (tmp_path / f"{folder} is away").rename(tmp_path / folder)
    source = opened(tmp_path / "cache", **KEYS | keys)
    assert dataset.identity == source.identity
    assert dataset.tokenizer.fingerprint == source.tokenizer.fingerprint
    assert dataset.mixture == source.mixture
    for (left, position), (right, expected) in zip(batches(dataset, 5), batches(source, 5), strict=True):
        assert position == expected
        assert all((left[name] == right[name]).all() for name in right)
    both = [one.evaluation.rows(np.arange(one.evaluation.size)) for one in (dataset, source)]
    assert all((both[0][name] == both[1][name]).all() for name in both[1])


def test_keys_come_from_the_folder_and_may_be_repeated(tmp_path: Path, files: str):
    place = prepared(tmp_path / "place", grain_train_files=files, packing=False, use_truncation=True)
    loaded = load([*words_of(KEYS | {"grain_train_files": files}), f"prepared_path={place}"])
    assert not loaded.config.packing
    assert loaded.config.use_truncation
    assert loaded.sources["packing"] == f"prepared_path={place}"
    assert not [line for line in loaded.warnings if "packing" in line or "truncation" in line]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["max_target_length=64"], "max_target_length=64 (command line), but prepared_path={} was prepared with 32"),
        (["packing=false"], "packing=false (command line), but"),
        (["dataset_type=stdlib"], 'was prepared with "grain"'),
        (["data_pipeline=streaming"], "set data_pipeline=prepared"),
        (["use_sft=true"], "use_sft=true: trainer.sft trains on rows with use_sft=true"),
    ],
)
def test_keys_that_contradict_the_folder(tmp_path: Path, files: str, words: list[str], message: str):
    place = prepared(tmp_path / "place", grain_train_files=files)
    with pytest.raises(UserError) as caught:
        load([f"prepared_path={place}", "vocab_size=300", *words])
    assert message.format(place) in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"vocab_size": 280}, "has ids up to 299: set vocab_size=300"),
        ({"eval_interval": 5}, "has nothing to evaluate on: set eval_interval=-1"),
        ({"tokenizer_path": "tokenizer"}, "is not the tokenizer of"),
    ],
)
def test_settings_that_the_rows_do_not_allow(tmp_path: Path, files: str, keys: dict, message: str):
    place = prepared(tmp_path / "place", grain_train_files=files, eval_interval=-1)
    if "tokenizer_path" in keys:
        other = prepared(tmp_path / "other", grain_train_files=f"{tmp_path}/b/0.*", vocab_size=270, eval_interval=-1)
        keys = {"tokenizer_path": other / "tokenizer"}
    words = words_of({"vocab_size": 300, "eval_interval": -1} | keys)
    with pytest.raises(UserError, match=message):
        open_dataset(load([f"prepared_path={place}", *words]).config, say_nothing)


def edited(change: Any) -> Any:
    def edit(place: Path) -> None:
        manifest = json.loads((place / MANIFEST).read_text())
        change(manifest)
        (place / MANIFEST).write_text(json.dumps(manifest))

    return edit


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda place: (place / MANIFEST).unlink(), "has no prepared.json"),
        (lambda place: (place / MANIFEST).write_text("{"), "cannot be read"),
        (lambda place: (place / "config.yml").write_text("packing: 3"), "values that are not allowed"),
        (edited(lambda manifest: manifest.pop("train")), "train is missing"),
        (edited(lambda manifest: manifest.update(train=["../a"])), "'../a' is not a folder name"),
        (edited(lambda manifest: manifest.update(weights=[1, 2, 3])), "differ in length"),
        (edited(lambda manifest: manifest.update(limit="many")), 'limit="many", not an integer'),
        (edited(lambda manifest: manifest.update(limit=100)), "ids must be from 0 to 99"),
        (lambda place: next(place.glob("train-*/part-00000/rows.npy")).unlink(), "cannot be read (it is gone)"),
        (lambda place: next(place.glob("tokenizer/*.json")).write_text("{}"), ""),
    ],
)
def test_a_damaged_folder_is_named(tmp_path: Path, files: str, damage: Any, message: str):
    place = prepared(tmp_path / "place", grain_train_files=files.split(",", maxsplit=1)[0], eval_interval=-1)
    damage(place)

    def first_batch() -> None:
        words = [f"prepared_path={place}", "vocab_size=300", "eval_interval=-1"]
        batches(open_dataset(load(words).config, say_nothing), 1)

    with pytest.raises(UserError) as caught:
        first_batch()
    assert message in str(caught.value)
    assert str(place) in str(caught.value)


def test_the_same_command_again_changes_nothing_and_another_is_refused(tmp_path: Path, files: str, capsys):
    place = prepared(tmp_path / "place", grain_train_files=files)
    times = {path: path.stat().st_mtime_ns for path in place.rglob("rows.npy")}
    prepared(place, grain_train_files=files)
    assert times == {path: path.stat().st_mtime_ns for path in place.rglob("rows.npy")}
    capsys.readouterr()
    for keys, message in (
        ({"max_target_length": 64}, "prepared with max_target_length=32, and this command has 64"),
        ({"add_bos": False}, "prepared with add_bos=true"),
    ):
        with pytest.raises(SystemExit) as caught:
            prepared(place, grain_train_files=files, **keys)
        assert caught.value.code == 2
        assert message in capsys.readouterr().err
    documents = read_place(place)[0].train[0].meta["documents"]
    with (tmp_path / "a" / "0.jsonl").open("a") as file:
        file.write(json.dumps({"text": "more text"}) + "\n")
    with pytest.raises(SystemExit):
        prepared(place, grain_train_files=files)
    assert "the files have changed" in capsys.readouterr().err
    assert read_place(place)[0].train[0].meta["documents"] == documents


def test_links_in_the_folder_are_not_written_through(tmp_path: Path, files: str, capsys):
    place = prepared(tmp_path / "place", grain_train_files=files)
    (place / "tokenizer").rename(tmp_path / "elsewhere")
    (place / "tokenizer").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SystemExit):
        prepared(place, grain_train_files=files)
    assert "tokenizer" in capsys.readouterr().err


def test_one_command_at_a_time_prepares_a_folder(tmp_path: Path, files: str, capsys):
    place = prepared(tmp_path / "place", grain_train_files=files)
    with lock(place):
        with pytest.raises(SystemExit):
            prepared(place, grain_train_files=files)
        assert "another process prepares data in this folder" in capsys.readouterr().err


def test_held_out_rows_stay_without_evaluation(tmp_path: Path, files: str):
    place = prepared(tmp_path / "place", grain_train_files=files)
    before = read_place(place)[0].evaluation.folder
    prepared(place, grain_train_files=files, eval_interval=-1)
    assert read_place(place)[0].evaluation.folder == before


def test_a_mixture_file_may_be_gone(tmp_path: Path, files: str):
    mixture = {"a": {"path": f"{tmp_path}/a/*", "weight": 2}, "b": {"path": f"{tmp_path}/b/*", "weight": 1}}
    (tmp_path / "mixture.json").write_text(json.dumps(mixture))
    place = prepared(tmp_path / "place", grain_train_mixture_config_path=tmp_path / "mixture.json")
    (tmp_path / "mixture.json").unlink()
    dataset = open_dataset(load([f"prepared_path={place}", "vocab_size=300"]).config, say_nothing)
    assert [round(component.share, 2) for component in dataset.mixture] == [0.67, 0.33]


def test_a_place_of_a_document_that_is_no_file(tmp_path: Path, files: str, capsys):
    place = prepared(tmp_path / "place", grain_train_files=files, prepare_part_mib=0)
    for meta in place.glob("train-*/meta.json"):
        content = json.loads(meta.read_text())
        meta.write_text(json.dumps(content | {"names": [["/dev/zero", "at byte"]] * 3}))
    assert "/dev/zero, at byte" in shown(capsys, place, "row=0")
    for meta in place.glob("train-*/meta.json"):
        meta.write_text(json.dumps(json.loads(meta.read_text()) | {"names": [3]}))
    assert "the location of its document is damaged" in shown(capsys, place, "row=0")


@pytest.mark.parametrize(
    "change",
    [{"stored": []}, {"stored": [["../x", 3]]}, {"tokens": "x"}, {"documents": [1]}, {"parts": "x"}, {"files": [1]},
     {"files": {"/etc/passwd": "x"}}, {"rows": 0}],
    ids=str,
)  # fmt: skip
def test_a_damaged_list_of_parts_is_named(tmp_path: Path, files: str, change: dict):
    place = prepared(tmp_path / "place", grain_train_files=files, eval_interval=-1)
    meta = max(place.glob("train-*/meta.json"), key=lambda path: len(path.read_text()))
    meta.write_text(json.dumps(json.loads(meta.read_text()) | change))
    if change == {"stored": []}:  # earlier versions stored no parts
        (meta.parent / "rows.npy").unlink(missing_ok=True)
    with pytest.raises(UserError, match=str(meta.parent)):
        read_place(place)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["out="], "out=FOLDER is missing"),
        (["out=gs://bucket/x"], "only a local folder can be written"),
        (["out=x", "data_pipeline=streaming", "dataset_type=grain"], "tokenizes during training"),
        (["out=x", "dataset_type=synthetic"], "there is nothing to prepare"),
        (["out=x", "use_grpo=true"], "reads its prompts directly"),
        (["out=x", "dataset_type=grain", "grain_file_type=mmap"], "without preparation"),
        (["out=x", "prepared_path=y"], "has no prepared.json"),
        (
            ["out=x", "dataset_type=grain", "grain_train_files=a.jsonl", "grain_file_type=jsonl", "beam=", *PARTS],
            "[beam]",
        ),
        (["out=full"], "exists and is not an empty folder"),
    ],
)
def test_what_is_not_prepared(tmp_path: Path, monkeypatch, capsys, words: list[str], message: str):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full" / "x").mkdir(parents=True)
    (tmp_path / "y").mkdir()
    (tmp_path / "a.jsonl").write_text('{"text": "a long text"}\n' * 9)
    monkeypatch.setitem(sys.modules, "apache_beam", None)
    with pytest.raises(SystemExit) as caught:
        prepare.main(words)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "x" / MANIFEST).exists()


def shown(capsys, *words: Any) -> str:
    capsys.readouterr()
    inspect.main([*map(str, words)])
    return capsys.readouterr().out


def test_a_row_is_shown_with_its_documents(tmp_path: Path, capsys):
    files = f"{write_corpus(tmp_path / 'a', 'jsonl', 9)}/*,0.7;{write_corpus(tmp_path / 'b', 'jsonl', 12)}/*,0.3"
    place = prepared(tmp_path / "place", grain_train_files=files, tokenizer_type="bytes", prepare_part_mib=0.0003)
    about = shown(capsys, place)
    assert "70.0% of the rows" in about
    assert "in 1 part" not in about.split("evaluation")[0].split("training")[1]
    dataset = open_dataset(load([f"prepared_path={place}", "vocab_size=300"]).config, say_nothing)
    total = sum(component.rows for component in dataset.mixture)
    texts = {
        f"{tmp_path}/{folder}/{j}.jsonl, line {i // 3 + 1}": document(i).encode()
        for folder, count in (("a", 9), ("b", 12))
        for j in range(3)
        for i in range(j, count, 3)
    }
    spelled = dict.fromkeys(texts, b"")
    for kind, count in (("row", total), ("eval_row", dataset.evaluation.size)):
        for row in range(count):
            for segment in shown(capsys, place, f"{kind}={row}").split("\nsegment ")[1:]:
                where = segment.partition(": ")[2].partition(", its tokens")[0]
                first = int(segment.partition("its tokens ")[2].split()[0])
                ids = [int(word) for word in segment.rpartition("\nids ")[2].split()]
                assert first == len(spelled[where])
                spelled[where] += bytes(i for i in ids[1:] if i < 256)
    assert spelled == texts


def test_masked_text_is_shown_without_marks(tmp_path: Path, capsys):
    lines = [{"prompt": f"ask {i} ", "completion": f"say {i}"} for i in range(30)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    keys = {"train_data_columns": "[prompt,completion]", "eval_data_columns": "[prompt,completion]"}
    place = prepared(tmp_path / "place", grain_train_files=tmp_path / "a.jsonl", tokenizer_type="bytes", **keys)
    text = shown(capsys, place, "row=0")
    assert "<|endoftext|>ask 0 «say 0<|endoftext|>»" in text


def test_keys_may_change_after_a_command_that_prepared_nothing(tmp_path: Path, files: str, capsys):
    with pytest.raises(SystemExit):
        prepared(tmp_path / "place", grain_train_files="none/*")
    assert "matches no file" in capsys.readouterr().err
    prepared(tmp_path / "place", grain_train_files=files, max_target_length=64)
    assert read_place(tmp_path / "place")[0].train[0].source.length == 64


@pytest.mark.parametrize("word", ["row=x", "row=999", "eval_row=-1"])
def test_rows_that_do_not_exist(tmp_path: Path, files: str, capsys, word: str):
    place = prepared(tmp_path / "place", grain_train_files=files)
    with pytest.raises(SystemExit) as caught:
        inspect.main([str(place), word])
    assert caught.value.code == 2

"""Sources by their keys: what they read, and their messages about files that are missing, empty or damaged."""

import gzip
import itertools
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from sample_data import config_of, document, example, opened, write_corpus, write_records, write_tfds, write_tfrecords

from trainer.config.errors import UserError
from trainer.data.corpus import Corpus, file_fingerprint
from trainer.data.documents import Counts, Encoder, Record, is_held_out
from trainer.data.example_proto import parse_example
from trainer.data.readers import JsonlPart
from trainer.data.record_files import ArrayRecordPart, TfrecordPart
from trainer.data.sources import open_source
from trainer.data.tables import ParquetPart
from trainer.data.tfds import tfds_folder


def source_of(tmp_path: Path, **keys):
    return open_source(config_of(tmp_path / "cache", **keys))


def texts(corpus: Corpus) -> list[str]:
    values = [record.values[0] for record in corpus.records()]
    return [value.decode() if isinstance(value, bytes) else value for value in values]


def grain_keys(kind: str, files: Path | str) -> dict:
    return {"dataset_type": "grain", "grain_file_type": kind, "grain_train_files": files}


@pytest.mark.parametrize("kind", ["arrayrecord", "jsonl", "parquet", "text", "tfrecord"])
def test_every_format_gives_every_document(corpora, tmp_path: Path, kind: str):
    (corpus,) = source_of(tmp_path, **grain_keys(kind, f"{corpora(kind)}/*"), held_out_share=0).train
    order = range(30) if kind == "text" else [i for j in range(3) for i in range(j, 30, 3)]
    assert texts(corpus) == [document(i) for i in order]


@pytest.mark.parametrize("kind", ["arrayrecord", "jsonl", "parquet", "tfrecord"])
def test_reading_goes_on_from_any_cursor(corpora, tmp_path: Path, kind: str):
    (corpus,) = source_of(tmp_path, **grain_keys(kind, f"{corpora(kind)}/0.*")).train
    (part,) = corpus.parts
    whole = list(part.read())
    assert len(whole) == 10
    assert whole[-1][1] == 1.0
    for i, (cursor, _, _) in enumerate(whole):
        assert list(part.read(cursor)) == whole[i + 1 :]


def test_the_held_out_share_goes_by_contents(corpora, tmp_path: Path):
    source = source_of(tmp_path, **grain_keys("jsonl", f"{corpora('jsonl')}/*"), held_out_share=0.3)
    (train,), (held_out,) = source.train, source.evaluation
    assert sorted(texts(train) + texts(held_out)) == sorted(map(document, range(30)))
    assert 3 <= len(texts(held_out)) <= 15
    again = source_of(tmp_path, **grain_keys("parquet", f"{corpora('parquet')}/*"), held_out_share=0.3)
    assert sorted(texts(again.evaluation[0])) == sorted(texts(held_out))
    assert 280 < sum(is_held_out(str(i).encode(), 0.3) for i in range(1000)) < 320


def test_what_is_held_out_does_not_depend_on_the_kind_of_value():
    keys = [
        Record("", (value,)).key() for value in ("ab", b"ab", [1, 20], np.array([1, 20]), np.array([1, 20], np.int32))
    ]
    assert keys[0] == keys[1]
    assert keys[2] == keys[3] == keys[4]
    assert keys[2] != Record("", ([12, 0],)).key()
    assert Record("", (None, "a")).key() == Record("", ("", "a")).key() != Record("", ("a", "")).key()


def test_evaluation_files_leave_training_whole(corpora, tmp_path: Path):
    files = {"grain_eval_files": f"{corpora('jsonl')}/0.jsonl;{corpora('jsonl')}/1.jsonl"}
    source = source_of(tmp_path, **grain_keys("jsonl", f"{corpora('jsonl')}/*"), **files)
    assert len(texts(source.train[0])) == 30
    assert [len(texts(corpus)) for corpus in source.evaluation] == [10, 10]


def test_a_mixture_in_json(corpora, tmp_path: Path):
    path = tmp_path / "mixture.json"
    entries = {
        "a": {"path": f"{corpora('jsonl')}/0.*", "weight": 0.2},
        "b": {"path": f"{corpora('jsonl')}/1.*", "weight": 2},
    }
    path.write_text(json.dumps(entries))
    keys = {"dataset_type": "grain", "grain_file_type": "jsonl", "grain_train_mixture_config_path": path}
    assert source_of(tmp_path, **keys).weights == (1, 10)
    path.write_text('{"a": {"path": "x"}}')
    with pytest.raises(UserError, match=r"KeyError: 'weight'"):
        source_of(tmp_path, **keys)


def test_tfds_in_both_formats_and_in_parts(tmp_path: Path):
    write_tfds(tmp_path / "data")
    keys = {"dataset_type": "tfds", "dataset_path": tmp_path / "data", "dataset_name": "tiny/made"}
    source = source_of(tmp_path, **keys)
    assert texts(source.train[0]) == [document(i) for i in range(20)]
    assert texts(source.evaluation[0]) == [document(i) for i in range(20, 25)]
    part = source_of(tmp_path, **keys, train_split="train[25%:50%]").train[0]
    assert texts(part) == [document(i) for i in range(5, 10)]
    labels = source_of(tmp_path, **keys, train_data_columns="label", eval_data_columns="label").train[0]
    assert [int(record.values[0]) for record in labels.records()] == list(range(20))
    to_tfrecord(tmp_path / "data" / "tiny" / "made" / "1.2.3")
    source = source_of(tmp_path, **keys)
    assert texts(source.train[0]) == [document(i) for i in range(20)]
    with pytest.raises(UserError, match=r"parts of a split need ArrayRecord"):
        source_of(tmp_path, **keys, train_split="train[:50%]")


def to_tfrecord(folder: Path) -> None:
    """Rewrites a TFDS dataset as TFRecord files. TFDS itself needs TensorFlow for this."""
    from array_record.python.array_record_module import ArrayRecordReader

    for file in list(folder.glob("*.array_record-*")):
        records = ArrayRecordReader(str(file)).read_all()
        write_tfrecords(folder / file.name.replace("array_record", "tfrecord"), records)
        file.unlink()
    info = folder / "dataset_info.json"
    info.write_text(info.read_text().replace("array_record", "tfrecord"))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"dataset_name": "other"}, "there is no folder .*other; dataset_path=.* holds .*tiny"),
        ({"dataset_name": "tiny/made:9.9.9"}, "holds 1.2.3; write name:version"),
        ({"dataset_name": "tiny"}, "holds made; write name:version or name/config:version"),
        ({"train_split": "trian"}, "train_split=trian: .* has the splits .*train.*nearest: train"),
        ({"eval_split": "test"}, "eval_split=test: .* eval_split= holds out held_out_share"),
        ({"train_data_columns": "txt"}, "has no column txt; set train_data_columns or .* to some of: .*text"),
    ],
)
def test_what_tfds_lacks_is_named_with_what_there_is(tmp_path: Path, keys: dict, message: str):
    write_tfds(tmp_path / "data")
    shared = {"dataset_type": "tfds", "dataset_path": tmp_path / "data", "dataset_name": "tiny/made:1.2.3"}
    with pytest.raises(UserError, match=message):
        source_of(tmp_path, **shared | keys)


@pytest.mark.parametrize(
    "features",
    [
        {"type": "named_by_data.Feature", "content": {}},
        {"pythonClassName": "named_by_data.Feature"},
        {
            "pythonClassName": "tensorflow_datasets.core.features.features_dict.FeaturesDict",
            "featuresDict": {"features": {"text": {"python_class_name": "named_by_data.Feature"}}},
        },
    ],
)
def test_features_of_tfds_name_no_code_of_others(tmp_path: Path, monkeypatch, features: dict):
    (tmp_path / "named_by_data.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    write_tfds(tmp_path / "data")
    (found,) = (tmp_path / "data").rglob("features.json")
    found.write_text(json.dumps(features))
    keys = {"dataset_type": "tfds", "dataset_path": tmp_path / "data", "dataset_name": "tiny/made:1.2.3"}
    with pytest.raises(UserError, match=r"named_by_data\.Feature is not a TFDS feature; code named by data is not run"):
        source_of(tmp_path, **keys)
    assert "named_by_data" not in sys.modules


def test_the_newest_version_of_tfds_is_taken(tmp_path: Path):
    for version in ("1.2.0", "1.10.0", "notes"):
        (tmp_path / "name" / version).mkdir(parents=True)
    assert tfds_folder(tmp_path, "name").name == "1.10.0"
    assert tfds_folder(tmp_path, "name:1.2.0").name == "1.2.0"


@pytest.mark.parametrize(
    "features", [{"text": {"shape": [2, 2], "dtype": "int32", "_type": "Array2D"}}, {"text": None}, [1]]
)
def test_features_that_the_columns_are_not(tmp_path: Path, features):
    import datasets

    datasets.Dataset.from_list([{"text": "a"}]).save_to_disk(tmp_path / "saved")
    info = tmp_path / "saved" / "dataset_info.json"
    info.write_text(json.dumps(json.loads(info.read_text()) | {"features": features}))
    with pytest.raises(UserError, match=r"saved, train_split=train: the dataset cannot be loaded: "):
        source_of(tmp_path, dataset_type="hf", hf_path=tmp_path / "saved")


@pytest.mark.parametrize("way", ["parquet", "parquet of hf", "arrow", "dictionary", "gzip"])
def test_a_small_file_of_a_large_text(tmp_path: Path, monkeypatch, way: str):
    import pyarrow
    import pyarrow.parquet

    monkeypatch.setattr("trainer.data.unpacked.UNPACKED_BYTES", 1 << 22)
    monkeypatch.setattr("trainer.data.unpacked.TOGETHER_BYTES", 1 << 24)
    monkeypatch.setattr("trainer.data.readers.UNPACKED_BYTES", 1 << 22)
    table = pyarrow.table({"text": ["a" * (8 << 20)] if way != "dictionary" else ["b" * (1 << 16)] * 400})
    keys = {"dataset_type": "grain", "grain_file_type": "parquet", "grain_train_files": tmp_path / "a.parquet"}
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", compression="zstd")
    if way == "dictionary":
        part = source_of(tmp_path, **keys, held_out_share=0).train[0].parts[0]
        assert part._chunk == 255  # 16 MiB together
        return
    if way == "arrow":
        options = pyarrow.ipc.IpcWriteOptions(compression="zstd")
        with pyarrow.ipc.new_stream(str(tmp_path / "a.arrow"), table.schema, options=options) as writer:
            writer.write_table(table)
        keys = {"dataset_type": "hf", "hf_path": "arrow", "hf_train_files": tmp_path / "a.arrow"}
    elif way == "parquet of hf":
        keys = {"dataset_type": "hf", "hf_path": "parquet", "hf_train_files": tmp_path / "a.parquet"}
    elif way == "gzip":
        (tmp_path / "a.jsonl").write_bytes(gzip.compress(b'{"text": "' + b"a" * (8 << 20), 1))
        keys = keys | {"grain_file_type": "jsonl", "grain_train_files": tmp_path / "a.jsonl"}
    with pytest.raises(UserError, match=r"a\.(arrow|parquet|jsonl).*(200 times as many|has more than .* bytes)"):
        texts(source_of(tmp_path, **keys, held_out_share=0).train[0])


def test_hf_reads_folders_files_and_splits(tmp_path: Path):
    import datasets

    datasets.disable_progress_bars()
    rows = [{"text": document(i), "n": i} for i in range(12)]
    splits = {"train": datasets.Dataset.from_list(rows[:10]), "test": datasets.Dataset.from_list(rows[10:])}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")
    keys = {"dataset_type": "hf", "hf_path": tmp_path / "saved"}
    source = source_of(tmp_path, **keys, hf_eval_split="test")
    assert texts(source.train[0]) == [document(i) for i in range(10)]
    assert texts(source.evaluation[0]) == [document(i) for i in range(10, 12)]
    with pytest.raises(UserError, match=r"train_split=tran: .* has the splits train, test; nearest: train"):
        source_of(tmp_path, **keys, train_split="tran")
    with pytest.raises(UserError, match=r"has no column txt; .* to some of: text, n"):
        source_of(tmp_path, **keys, train_data_columns="txt")
    write_records(tmp_path / "a.jsonl", "jsonl", rows)
    plain = {"dataset_type": "hf", "hf_path": "json", "hf_train_files": tmp_path / "a.jsonl"}
    assert texts(source_of(tmp_path, **plain, held_out_share=0).train[0]) == [document(i) for i in range(12)]
    (tmp_path / "folder").mkdir()
    write_records(tmp_path / "folder" / "train.parquet", "parquet", rows)
    folder = {"dataset_type": "hf", "hf_path": tmp_path / "folder"}
    assert len(texts(source_of(tmp_path, **folder, held_out_share=0).train[0])) == 12
    (tmp_path / "outside.jsonl").write_text(json.dumps({"text": "a line of one's own"}) + "\n")
    (tmp_path / "folder/README.md").write_text(
        "---\nconfigs:\n- config_name: default\n  data_files: ../outside.jsonl\n---\n"
    )
    with pytest.raises(UserError, match=r"outside\.jsonl, which is outside of this folder"):
        source_of(tmp_path, **folder)
    with pytest.raises(UserError, match=r"hf_path=allenai/c4: there is no such folder .* not downloaded"):
        source_of(tmp_path, dataset_type="hf", hf_path="allenai/c4")


def test_hf_without_its_package_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(UserError, match=r"pip install 'trainer\[hf\]'"):
        source_of(tmp_path, dataset_type="hf", hf_path=tmp_path)


def read_all(tmp_path: Path, kind: str, path: Path, **keys):
    corpus = source_of(tmp_path, **grain_keys(kind, path), **keys).train[0]
    encoder = Encoder(None, corpus.columns, False, False, 1 << 30)
    return [(encoder.texts(record), record) for record in corpus.records()]


@pytest.mark.parametrize("kind", ["arrayrecord", "jsonl", "parquet", "text", "tfrecord"])
def test_missing_and_empty_files_are_named(tmp_path: Path, kind: str):
    with pytest.raises(
        UserError, match=rf"grain_train_files: .*none.{kind} matches no file .* has no file of that name"
    ):
        read_all(tmp_path, kind, tmp_path / f"none.{kind}")
    with pytest.raises(UserError, match=r"there is no folder .*nowhere"):
        read_all(tmp_path, kind, tmp_path / "nowhere" / "*")
    (tmp_path / "empty").touch()
    with pytest.raises(UserError, match=r"empty is empty; remove it"):
        read_all(tmp_path, kind, tmp_path / "empty")


@pytest.mark.parametrize("kind", ["arrayrecord", "parquet", "tfrecord"])
@pytest.mark.parametrize("damage", ["cut", "garbage"])
def test_damaged_files_are_named(tmp_path: Path, kind: str, damage: str):
    path = write_corpus(tmp_path / "files", kind, files=1) / f"0.{kind}"
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 2 // 3] if damage == "cut" else bytes(range(256)) * 4)
    with pytest.raises(UserError, match=rf"0.{kind}.*(damaged|truncated)"):
        read_all(tmp_path, kind, path)


@pytest.mark.parametrize("place", [8, 12 + 10, -1])  # in the checksum of the length, the record, and its checksum
@pytest.mark.parametrize("way", ["prepared", "streaming"])
def test_a_tfrecord_that_does_not_match_its_checksum_is_named(tmp_path: Path, way: str, place: int):
    path = write_corpus(tmp_path / "files", "tfrecord", files=1) / "0.tfrecord"
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    keys = grain_keys("tfrecord", path) | {"tokenizer_type": "bytes", "data_pipeline": way, "held_out_share": 0}
    with pytest.raises(UserError, match=r"0.tfrecord: the record at byte \d+ does not match its checksum"):
        list(itertools.islice(opened(tmp_path / "cache", **keys).train_stream(rows=20), 20))


def test_a_parquet_page_that_does_not_match_its_checksum_is_named(tmp_path: Path):
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "a.parquet"
    table = pyarrow.Table.from_pylist([{"text": document(i)} for i in range(30)])
    pyarrow.parquet.write_table(table, path, compression="none", use_dictionary=False, write_page_checksum=True)
    path.write_bytes(path.read_bytes().replace(b"document 7", b"document 8"))
    with pytest.raises(UserError, match=r"a.parquet is damaged"):
        read_all(tmp_path, "parquet", path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "cut', "a.jsonl, line 3, is not JSON"),
        ("[1, 2]", "a.jsonl, line 3, is not a JSON object"),
        ('{"txt": 1, "id": 2}', "a.jsonl, line 3, there is no column text; .* to some of: txt, id"),
        ('{"text": 7}', "column text holds int, not text"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str):
    (tmp_path / "a.jsonl").write_text(f'{{"text": "good"}}\n\n{line}\n')
    with pytest.raises(UserError, match=message):
        read_all(tmp_path, "jsonl", tmp_path / "a.jsonl")


@pytest.mark.parametrize(
    ("data", "hint"),
    [
        ("hello".encode("utf-16-le"), "UTF-16"),
        ("hello".encode("utf-32-be"), "UTF-16"),
        (b"\0" * 50, "it has NUL bytes"),
        (b'{"te' + b"\0" * 50, "it has NUL bytes"),
    ],
)
def test_what_a_line_looks_like(tmp_path: Path, data: bytes, hint: str):
    (tmp_path / "a.jsonl").write_bytes(data)
    with pytest.raises(UserError, match=rf"a.jsonl, line 1, is not JSON .*{hint}"):
        read_all(tmp_path, "jsonl", tmp_path / "a.jsonl")


def test_compressed_lines_are_read_from_any_cursor(corpora, tmp_path: Path):
    data = b"".join(path.read_bytes() for path in sorted(corpora("jsonl").iterdir()))
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(data))
    (tmp_path / "a.jsonl").write_bytes(data)
    part, plain = JsonlPart(path, ("text",)), JsonlPart(tmp_path / "a.jsonl", ("text",))
    whole, expected = list(part.read()), list(plain.read())
    assert [(cursor, record.values) for cursor, _, record in whole] == [(it[0], it[2].values) for it in expected]
    assert whole[-1][1] == 1.0
    for i, (cursor, *_) in enumerate(whole):
        assert list(part.read(cursor)) == whole[i + 1 :]
    assert str(whole[3][2].where) == f"{path}, line 4"
    for damaged in (path.read_bytes()[:-9], path.read_bytes()[:40] + b"garbage" + path.read_bytes()[47:]):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=r"a.jsonl.gz is damaged"):
            list(part.read())
    (tmp_path / "a.txt").write_bytes(gzip.compress(data))
    with pytest.raises(UserError, match=r"a.txt: column text is not UTF-8 .*it looks like gzip"):
        read_all(tmp_path, "text", tmp_path / "a.txt")


def test_bytes_that_are_no_utf8_are_named(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes(b"good \xff bad")
    with pytest.raises(UserError, match=r"a.txt: column text is not UTF-8 at byte 5"):
        read_all(tmp_path, "text", tmp_path / "a.txt")
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "\xff"}\n')
    with pytest.raises(UserError, match=r"a.jsonl, line 1, is not JSON"):
        read_all(tmp_path, "jsonl", tmp_path / "a.jsonl")


@pytest.mark.parametrize("kind", ["arrayrecord", "parquet", "tfrecord"])
def test_a_missing_column_lists_those_there_are(corpora, tmp_path: Path, kind: str):
    with pytest.raises(UserError, match=r"there is no column body; .* to some of: (text, number|number, text)"):
        read_all(tmp_path, kind, f"{corpora(kind)}/*", train_data_columns="body")


def test_another_format_than_said_is_named(corpora, tmp_path: Path):
    for kind, files in (("arrayrecord", "parquet"), ("parquet", "jsonl"), ("tfrecord", "jsonl")):
        with pytest.raises(
            UserError, match=rf"0.{files}.*(format|not an ArrayRecord file|truncated or not a TFRecord)"
        ):
            read_all(tmp_path, kind, corpora(files) / f"0.{files}")


def test_token_ids_are_read_and_checked(corpora, tmp_path: Path):
    for kind in ("arrayrecord", "jsonl", "parquet", "tfrecord"):
        corpus = source_of(tmp_path, **grain_keys(kind, f"{corpora(kind)}/0.*"), train_data_columns="number").train[0]
        records = list(corpus.records())
        (first, *_) = Encoder(None, ("number",), False, False, 100).encode(records, Counts())
        assert first is not None
        assert first.tokens.tolist() == [0, 1]
        with pytest.raises(UserError, match=rf"0.{kind}.* holds token 28 and vocab_size=28: ids must be from 0 to 27"):
            Encoder(None, ("number",), False, False, 28).encode(records, Counts())
    with pytest.raises(UserError, match=r"not a list of token ids"):
        Encoder(None, ("text",), False, False, 28).encode([records[0]._replace(values=("words",))], Counts())


def test_ids_train_without_a_tokenizer(corpora, tmp_path: Path):
    keys = grain_keys("jsonl", f"{corpora('jsonl')}/*") | {"train_data_columns": "number", "tokenize_train_data": False}
    dataset = opened(tmp_path, **keys, tokenize_eval_data=False, vocab_size=64)
    assert dataset.tokenizer is None
    batch, _ = next(dataset.train_stream(rows=1))
    real = batch["targets_segmentation"] != 0
    assert (batch["targets"][real] == batch["inputs"][real] + 1).all()


def test_example_messages():
    values = parse_example(example(text="ä", ids=[0, 5, 300, -1]))
    assert values["text"] == "ä".encode()
    assert values["ids"].tolist() == [0, 5, 300, -1]
    for data in (b"\xff\xff", b"plain text", b"", example(text="a")[:-1]):
        with pytest.raises(ValueError, match=r"not a tf.train.Example"):
            parse_example(data)


def test_large_files_are_told_apart_by_their_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "a"
    prints = set()
    for data in (b"a" * 200, b"b" + b"a" * 199, b"a" * 199 + b"b", b"a" * 201):
        path.write_bytes(data)
        prints.add(file_fingerprint([path]))
        monkeypatch.setattr("trainer.data.corpus.WHOLE_CONTENT", 100)
        monkeypatch.setattr("trainer.data.corpus._ENDS", 10)
        prints.add(file_fingerprint([path]))
        monkeypatch.undo()
    assert len(prints) == 8


def test_parts_can_be_sent_to_other_processes(corpora):
    import pickle

    path = corpora("arrayrecord") / "0.arrayrecord"
    part = ArrayRecordPart(path, ("text",), parse_example)
    assert part[3] == pickle.loads(pickle.dumps(part))[3]
    for kind, made in (("jsonl", JsonlPart), ("parquet", ParquetPart)):
        part = made(corpora(kind) / f"0.{kind}", ("text",))
        assert list(pickle.loads(pickle.dumps(part)).read()) == list(part.read())
    part = TfrecordPart(corpora("tfrecord") / "0.tfrecord", ("text",), parse_example)
    assert list(pickle.loads(pickle.dumps(part)).read()) == list(part.read())

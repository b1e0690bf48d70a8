"""Invalid text: lone surrogates in every format and for every tokenizer, and bytes that are not UTF-8."""

import base64
import json
from pathlib import Path

import numpy as np
import pytest
from ml_collections import ConfigDict
from sample_data import config_of, document, example, write_records, write_tfds, write_tfrecords

from trainer.config.errors import UserError
from trainer.data.dataset import Dataset, open_dataset
from trainer.data.documents import Record
from trainer.data.text import canonical, decoded, mended
from trainer.data.tokenizer import train_bpe
from trainer.data.tokenizer_files import load_tokenizer
from trainer.inference.sample import sample_prompt

# A high surrogate without its pair, a low surrogate twice, and a pair, which is a character.
BROKEN = "a\ud800 c \udc00\udc00 \ud83d\ude00" + "x" * 30
WHOLE = "a\ufffd c \ufffd\ufffd \U0001f600" + "x" * 30
NOTE = "lone surrogates are replaced by U+FFFD:"
WAYS = ("prepared", "streaming")


def lines_of(cache: Path, **keys) -> tuple[Dataset, list[str]]:
    """Returns the dataset, and a list to which its messages are appended."""
    lines: list[str] = []
    shared = {"held_out_share": 0, "enable_data_shuffling": False, "tokenizer_type": "bytes"}
    dataset = open_dataset(config_of(cache, **shared | keys), lines.append)
    return dataset, lines


def tokens_of(dataset: Dataset) -> list[list[int]]:
    stream = dataset.train_stream(rows=2)
    batches = [next(stream)[0] for _ in range(2)]
    stream.close()
    return [batch["inputs"].tolist() for batch in batches]


def test_what_is_replaced():
    assert mended(BROKEN) == (WHOLE, 3)
    assert mended(WHOLE) == (WHOLE, 0)
    assert mended("\ud800") == mended("\udfff") == ("\ufffd", 1)
    assert mended("\ude00\ud83d") == ("\ufffd\ufffd", 2)
    assert decoded(BROKEN.encode("utf-8", "surrogatepass")) == (WHOLE, 3)
    assert decoded(WHOLE.encode()) == (WHOLE, 0)
    with pytest.raises(UnicodeDecodeError):
        decoded(b"\xed\xa0\x80 \xff")


def test_what_is_held_out_does_not_depend_on_how_a_surrogate_is_written():
    values = BROKEN, BROKEN.encode("utf-8", "surrogatepass"), WHOLE, WHOLE.encode()
    assert {canonical(value) for value in values} == {WHOLE.encode()}
    assert len({Record("", (value,)).key() for value in values}) == 1
    assert canonical(b"\xed\xa0\x80\xff") == b"\xed\xa0\x80\xff"  # refused when its text is requested


def write_bytes(path: Path, kind: str, texts: list[bytes]) -> Path:
    """Writes a file in the format `kind`, with a column `text` that need not be UTF-8."""
    if kind in ("jsonl", "hf-json"):
        values = [text.decode("utf-8", "surrogatepass") for text in texts]
        path.write_text("".join(json.dumps({"text": value}) + "\n" for value in values))
    elif kind == "jsonl-raw":
        path.write_bytes(b"".join(b'{"text": "%s"}\n' % text for text in texts))
    elif kind in ("text", "hf-text"):
        path.write_bytes(texts[-1])
    elif kind == "hf-csv":
        path.write_bytes(b"text\n" + b"\n".join(texts) + b"\n")
    elif kind in ("tfrecord", "arrayrecord"):
        marked = [example(text="#" * len(text)).replace(b"#" * len(text), text) for text in texts]
        write_examples(path, kind, marked)
    else:
        import pyarrow
        import pyarrow.parquet

        array = pyarrow.array(texts, pyarrow.binary())
        array = array if kind == "parquet-binary" else array.view(pyarrow.string())
        pyarrow.parquet.write_table(pyarrow.table({"text": array}), path)
    return path


def write_examples(path: Path, kind: str, records: list[bytes]) -> None:
    if kind == "tfrecord":
        write_tfrecords(path, records)
        return
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter(str(path), "group_size:1")
    for data in records:
        writer.write(data)
    writer.close()


def keys_of(kind: str, path: Path) -> dict:
    name = kind.removeprefix("hf-").partition("-")[0]
    if kind.startswith("hf-"):
        return {"dataset_type": "hf", "hf_path": name, "hf_train_files": path, "hf_eval_split": ""}
    return {"dataset_type": "grain", "grain_file_type": name, "grain_train_files": path}


FIRST = {  # how messages locate the second record
    "jsonl": "a.data, line 2",
    "jsonl-raw": "a.data, line 2",
    "text": "a.data",
    "parquet-string": "a.data, row 2",
    "parquet-binary": "a.data, row 2",
    "arrayrecord": "a.data, record 1",
    "tfrecord": "a.data, record at byte",
    "hf-parquet": "parquet train, row 1",
    "hf-json": "a.data, line 2",
    "hf-csv": "a.data, line 3",
    "hf-text": "a.data, line 1",
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", FIRST)
def test_lone_surrogates_of_every_format_are_replaced_and_counted(tmp_path: Path, kind: str, way: str):
    first = b"a record before it, of some length"
    found = []
    for folder, text in (("broken", BROKEN), ("whole", WHOLE)):
        (tmp_path / folder).mkdir()
        texts = [first, text.encode("utf-8", "surrogatepass")]
        path = write_bytes(tmp_path / folder / "a.data", kind, texts)
        dataset, lines = lines_of(tmp_path / "cache", **keys_of(kind, path), data_pipeline=way)
        found.append((tokens_of(dataset), [line for line in lines if NOTE in line and "in this" not in line]))
    (tokens, notes), (expected, nothing) = found
    assert tokens == expected
    assert nothing == []
    (note,) = notes
    assert f"{NOTE} 3 in 1 " in note
    assert FIRST[kind] in note


def test_lone_surrogates_of_tfds_are_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_tfds(tmp_path / "data", 3)
    broken = b"before " + b"\xed\xa0\x80"
    parse = "trainer.data.tfds._TfdsParser.__call__"
    monkeypatch.setattr(parse, lambda self, data: {"text": broken})
    keys = {"dataset_type": "tfds", "dataset_path": tmp_path / "data", "dataset_name": "tiny/made"}
    _, lines = lines_of(tmp_path / "cache", **keys, eval_interval=1)
    for count in (3, 5):
        assert sum(f"{NOTE} {count} in {count} of {count} documents, the first in" in line for line in lines) == 1


def tokenizer_keys(kind: str, folder: Path) -> dict:
    """Returns the keys of a tokenizer of that kind, whose files are in `folder`."""
    texts = [document(i) for i in range(50)]
    if kind in ("bytes", "auto"):
        return {"tokenizer_type": kind}
    if kind == "huggingface":
        train_bpe(texts, 300).save(folder)
        return {"tokenizer_type": kind, "tokenizer_path": folder}
    if kind == "tiktoken":
        ranks = b"\n".join(base64.b64encode(bytes([i])) + b" %d" % i for i in range(256))
        (folder / "tokenizer.model").write_bytes(ranks + b"\n")
        return {"tokenizer_type": kind, "tokenizer_path": folder / "tokenizer.model", "vocab_size": 512}
    import sentencepiece

    settings = {"vocab_size": 330, "model_type": "bpe", "byte_fallback": True, "minloglevel": 2}
    prefix = str(folder / "tokenizer")
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(texts), model_prefix=prefix, **settings)
    return {"tokenizer_type": kind, "tokenizer_path": folder / "tokenizer.model", "vocab_size": 330}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["auto", "bytes", "huggingface", "sentencepiece", "tiktoken"])
def test_every_tokenizer_takes_what_stands_for_lone_surrogates(tmp_path: Path, kind: str, way: str):
    keys = tokenizer_keys(kind, tmp_path) | {"data_pipeline": way, "eval_interval": 1, "train_data_columns": "text"}
    found = []
    for text in (BROKEN, WHOLE):
        write_records(tmp_path / "a.jsonl", "jsonl", [{"text": text}] * 2)
        files = {"grain_eval_files": tmp_path / "a.jsonl"}
        dataset, lines = lines_of(tmp_path / "cache", **keys_of("jsonl", tmp_path / "a.jsonl"), **files, **keys)
        held_out = dataset.evaluation.rows(np.arange(1))["inputs"].tolist()
        found.append((tokens_of(dataset), held_out, sum(NOTE in line for line in lines)))
    assert found[0][:2] == found[1][:2]
    assert (found[0][2] >= 2, found[1][2]) == (True, 0)  # one for evaluation, one for training


def test_byte_order_marks_are_no_text_and_nul_is(tmp_path: Path):
    marked, plain = tmp_path / "marked", tmp_path / "plain"
    for path, mark in ((marked, b"\xef\xbb\xbf"), (plain, b"")):
        path.write_bytes(mark + b"before\0behind \xef\xbb\xbf inside" + b"." * 90)
    found = [tokens_of(lines_of(tmp_path / "cache", **keys_of("text", path))[0]) for path in (marked, plain)]
    assert found[0] == found[1]
    assert found[0][0][0][:9] == [256, *b"before\0b"]
    for path, mark in ((marked, b"\xef\xbb\xbf"), (plain, b"")):
        path.write_bytes(mark + b'{"text": "a\\u0000b"}\n' + mark + b'{"text": "%s"}\n' % (b"c" * 90))
    found = [tokens_of(lines_of(tmp_path / "cache", **keys_of("jsonl", path))[0]) for path in (marked, plain)]
    assert found[0] == found[1]


BAD = b"h\xe4llo"  # Latin-1


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("kind", "data", "message"),
    [
        ("text", BAD, r"a.data: column text is not UTF-8 at byte 1; convert the file"),
        ("text", "hello".encode("utf-16"), r"not UTF-8 at byte 0 \(it looks like UTF-16"),
        ("jsonl-raw", BAD, r"a.data, line 2, is not JSON"),
        ("parquet-string", BAD, r"a.data, row 2: column text is not UTF-8 at byte 1"),
        ("parquet-binary", BAD, r"a.data, row 2: column text is not UTF-8 at byte 1"),
        ("tfrecord", BAD, r"a.data, record at byte \d+: column text is not UTF-8 at byte 1"),
        ("arrayrecord", BAD, r"a.data, record 1: column text is not UTF-8 at byte 1"),
        ("hf-parquet", BAD, r"parquet train, row 1: column text is not UTF-8 at byte 1"),
        ("hf-csv", BAD, r"a.data, line 3, is not UTF-8 at byte 1; convert the file"),
        ("hf-text", BAD, r"a.data, line 1, is not UTF-8 at byte 1; convert the file"),
    ],
)
def test_other_encodings_are_named_with_file_and_row(tmp_path: Path, kind: str, data: bytes, message: str, way: str):
    path = write_bytes(tmp_path / "a.data", kind, [b"good", data])
    with pytest.raises(UserError, match=message):
        tokens_of(lines_of(tmp_path / "cache", **keys_of(kind, path), data_pipeline=way)[0])


@pytest.mark.parametrize(
    ("line", "message", "keys"),
    [
        ('{"text": 7}', "line 2: column text holds int, not text", {}),
        ('{"text": ["a"]}', "line 2: column text holds list, not text", {}),
        ('{"text": ' + "[" * 100_000, "line 2, is not JSON", {}),
        ('{"text": [[1], [2, 3]]}', "line 2: column text holds list, not a list of token ids", {"ids": True}),
        ('{"text": [null, 3]}', "line 2: column text holds list, not a list of token ids", {"ids": True}),
        ('{"text": [5, -1]}', "line 2: column text holds token -1 and", {"ids": True}),
        ('{"text": [18446744073709551615]}', "line 2: column text holds token 18446744073709551615 and", {"ids": 1}),
    ],
    ids=lambda value: value[:24] if isinstance(value, str) else "",
)
def test_values_that_are_no_text_are_named_with_file_and_row(tmp_path: Path, line: str, message: str, keys: dict):
    good = [1, 2] if keys else "good"
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": good}) + f"\n{line}\n")
    settings = {"tokenize_train_data": not keys, "tokenize_eval_data": not keys}
    with pytest.raises(UserError, match=rf"a.jsonl, {message}"):
        lines_of(tmp_path / "cache", **keys_of("jsonl", tmp_path / "a.jsonl"), **settings)


def test_white_space_of_any_length_is_tokenized(tmp_path: Path):
    keys = tokenizer_keys("tiktoken", tmp_path)
    tokenizer = load_tokenizer(str(keys["tokenizer_path"]), "tiktoken", add_bos=True, add_eos=True)
    text = "a" + " " * 60_000 + "b\n" + "\t" * 25_000 + "c" + " " * 25_001
    for texts in ([text], [text, "d"]):
        assert [tokenizer.decode(ids) for ids in tokenizer.encode_many(texts)] == texts
    long = " " * 1_500_000  # would overflow a stack
    assert tokenizer.decode(tokenizer.encode(long)) == long


def test_a_prompt_is_text_too():
    sizes = {"base_num_decoder_layers": 1, "max_target_length": 16, "max_prefill_predict_length": -1}
    sizes |= {"ici_pipeline_parallelism": 1, "dcn_pipeline_parallelism": 1}
    config = ConfigDict({"prompt": "a\ud800", "decoder_block": "llama2", **sizes})
    lines: list[str] = []
    tokenizer = load_tokenizer("", "bytes", add_bos=True, add_eos=True)
    assert sample_prompt(config, tokenizer, lines.append).tokens == [256, *"a\ufffd".encode()]
    assert lines == ["prompt: lone surrogates are replaced by U+FFFD: 1"]

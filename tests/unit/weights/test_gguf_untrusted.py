"""Untrusted GGUF files: a header is checked against the file before any data is read."""

import contextlib
import os
import random
import struct

import pytest
from gguf_cases import exported, mutant, with_tokenizer

from trainer.config.errors import UserError
from trainer.data.tokenizer_files import load_tokenizer
from trainer.leaves.gguf_file import read_gguf
from trainer.weights.gguf.read import GgufSource
from trainer.weights.gguf.tensors import stored_tensors


def text(value):
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def file_of(*values, tensors=(), counts=None, data=b"", version=3):
    """Returns a file with the metadata (key, type, bytes) and the tensors (name, sizes, type, offset)."""
    found = b"GGUF" + struct.pack("<IQQ", version, *(counts or (len(tensors), len(values))))
    for key, kind, content in values:
        found += text(key) + struct.pack("<I", kind) + content
    for name, sizes, kind, offset in tensors:
        found += text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)
    return found + b"\0" * (-len(found) % 32) + data


def array(kind, count, data=b""):
    return struct.pack("<IQ", kind, count) + data


def number(key, value):
    return key, 6, struct.pack("<f", value)


HUGE = 2**33
ONE = [("a", (32,), 0, 0)]
CASES = [
    (b"", "ends within its header"),
    (b"GGML" + bytes(60), "not a GGUF file"),
    (file_of(version=1), "GGUF version 1"),
    (file_of(version=0x03000000), "a big-endian file"),
    (file_of(counts=(HUGE, 0)), "8,589,934,592 tensors"),
    (file_of(counts=(0, HUGE)), "8,589,934,592 keys"),
    (file_of(("a", 9, array(8, HUGE))), "8,589,934,592 texts"),
    (file_of(("a", 9, array(8, 2**20))), "1,048,576 texts"),
    (file_of(("a", 9, array(0, HUGE))), "8,589,934,592 numbers"),
    (file_of(("a", 9, array(9, 2, array(9, 2)))), "unknown type 9"),
    (file_of(("a", 8, struct.pack("<Q", HUGE))), "8,589,934,592 bytes of a text"),
    (file_of(("a", 77, b"")), "unknown type 77"),
    (file_of(("a", 0, b"\1"), ("a", 0, b"\1")), "the key a occurs twice"),
    (file_of(("general.alignment", 4, struct.pack("<I", 3))), "not a power of two"),
    (file_of(("general.alignment", 8, text("x"))), "not a power of two"),
    (file_of(tensors=[("a", (1,) * 9, 0, 0)]), "9 axes"),
    (file_of(tensors=[("a", (HUGE, HUGE), 0, 0)]), "does not fit into"),
    (file_of(tensors=[("a", (0, 4), 0, 0)]), "does not fit into"),
    (file_of(tensors=[("a", (4,), 0, HUGE)]), "outside the file or not aligned"),
    (file_of(tensors=[("a", (4,), 0, 7)], data=bytes(64)), "outside the file or not aligned"),
    (file_of(tensors=[*ONE, *ONE], data=bytes(128)), "the tensor a occurs twice"),
    (file_of(tensors=ONE, data=bytes(64)), "a: its bytes are not in the file"),
    (file_of(tensors=[*ONE, ("b", (32,), 0, 64)], data=bytes(256)), "b: its bytes are not in the file, or overlap"),
    (file_of(tensors=[("a", (32,), 24, 0)], data=bytes(256)), "a: values of type I8 are not read"),
    (file_of(tensors=[("a", (32,), 999, 0)], data=bytes(256)), "a: values of type number 999 are not read"),
    (file_of(tensors=[("a", (33, 2), 8, 0)], data=bytes(256)), "a: values of type Q8_0 are not read"),
    (file_of(tensors=[("a", (32,), 8, 0)], data=bytes(256)), "a list of values of type Q8_0"),
]


@pytest.mark.parametrize(("data", "named"), CASES, ids=range(len(CASES)))
def test_a_header_that_contradicts_its_file_is_refused(data, named, tmp_path):
    (tmp_path / "model.gguf").write_bytes(data)
    with pytest.raises(UserError) as error:
        stored_tensors(read_gguf(tmp_path / "model.gguf"))
    assert named in str(error.value)


def test_text_that_is_not_utf_8_is_refused(tmp_path):
    (tmp_path / "model.gguf").write_bytes(file_of(("a", 8, struct.pack("<Q", 2) + b"\xff\xfe")))
    with pytest.raises(UserError, match="cannot be read as GGUF"):
        read_gguf(tmp_path / "model.gguf")


def test_what_is_not_known_is_refused(tmp_path):
    """An unknown value may change what the model computes, so it must not be guessed."""
    cases = {
        "one of 3 parts": [("split.count", 2, struct.pack("<H", 3))],
        "general.architecture=mamba is not read": [("general.architecture", 8, text("mamba"))],
        "logit_scale=0.5: not known": [("general.architecture", 8, text("llama")), number("llama.logit_scale", 0.5)],
        "llama.block_count is not an integer": [
            ("general.architecture", 8, text("llama")),
            number("llama.block_count", 2.0),
        ],
        "RoPE type longrope is not supported": [
            ("general.architecture", 8, text("llama")),
            ("llama.rope.scaling.type", 8, text("longrope")),
            number("llama.rope.scaling.factor", 4.0),
        ],
    }
    needed = number("llama.attention.layer_norm_rms_epsilon", 1e-5)
    for named, values in cases.items():
        (tmp_path / "model.gguf").write_bytes(file_of(*values, needed))
        with pytest.raises(UserError) as error:
            GgufSource(tmp_path / "model.gguf")
        assert named in str(error.value)


def test_numbers_of_all_types_are_read(tmp_path):
    kinds = dict(zip("BbHhIifQqd", (0, 1, 2, 3, 4, 5, 6, 10, 11, 12), strict=True))
    values = [(form, kind, struct.pack(f"<{form}", 7)) for form, kind in kinds.items()]
    values += [(f"{form}s", 9, array(kind, 2, struct.pack(f"<{form}{form}", 1, 2))) for form, kind in kinds.items()]
    (tmp_path / "model.gguf").write_bytes(file_of(*values, ("t", 7, b"\1"), ("s", 8, text("x"))))
    found = read_gguf(tmp_path / "model.gguf").values
    assert all(found[form] == 7 and found[f"{form}s"].tolist() == [1, 2] for form in kinds)
    assert (found["t"], found["s"]) == (True, "x")


def test_a_link_is_followed_and_a_pipe_is_not_read(tmp_path):
    """The user names the file. Ollama's files have no extension, so a link adds one."""
    (tmp_path / "other").mkdir()
    (tmp_path / "sha256-0").write_bytes(file_of(("a", 8, text("x"))))
    (tmp_path / "other" / "model.gguf").symlink_to(tmp_path / "sha256-0")
    assert read_gguf(tmp_path / "other" / "model.gguf").values == {"a": "x"}
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(UserError, match="there is no such file"):
        read_gguf(tmp_path / "pipe.gguf")


def test_mutants_are_read_or_refused(tmp_path):
    """scripts/hostile_files.py reads 500 mutants, with limits for time and memory."""
    whole = exported(with_tokenizer("smollm", tmp_path / "model"), tmp_path / "whole.gguf").read_bytes()
    file = tmp_path / "model.gguf"
    for i in range(40):
        file.write_bytes(mutant(random.Random(i), whole))
        for read in (GgufSource, lambda path: load_tokenizer(str(path), "auto", add_bos=True, add_eos=True)):
            with contextlib.suppress(UserError):
                read(file)

"""Reads hostile files: within 10 s and 2 GB of memory, each must be read or refused with one message.

    python scripts/hostile_files.py [seed=0] [count=100] [kinds=templates,tokenizers,tables,configs,gguf]

Each file is read in a child process, forked from a process that has loaded the package. The child's address space may
grow by 2 GB. A table shows for each kind how many files were read, refused or failed, the longest time, and the largest
growth of memory.
"""

import contextlib
import functools
import gzip
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.compute
import pyarrow.ipc
import pyarrow.parquet
import tokenizers  # noqa: F401, too

from trainer.chat.template import Template
from trainer.config.errors import UserError
from trainer.data.chat_files import ChatTemplate
from trainer.data.readers import JsonlPart
from trainer.data.tables import ParquetPart
from trainer.data.tokenizer_files import load_tokenizer
from trainer.data.unpacked import check_unpacked
from trainer.leaves.gguf_file import read_gguf
from trainer.weights.gguf.read import GgufSource
from trainer.weights.gguf.tensors import stored_tensors
from trainer.weights.huggingface.config_json import model_keys
from trainer.weights.huggingface.quantization_config import recipe
from trainer.weights.huggingface.towers import text_model

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from gguf_cases import exported, mutant, with_tokenizer

SECONDS, BYTES = 10, 2 << 30
MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]
TEXT = "hello world, aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaab \u00e9\u4e16\ufdfa" * 20
CONFIG = {
    **{"model_type": "llama", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "max_position_embeddings": 64},
}
# A template in which the value n.x grows in a loop. Its parameters: the value at the start, the number of iterations,
# the expression of the next value, and the text at the end.
GROWN = "{%% set n = namespace(x=%s) %%}{%% for i in range(%d) %%}{%% set n.x = %s %%}{%% endfor %%}%s"
STARTS = ["9", "'a'", "'a'.encode()", "['a']", "('a',)", "{'a': 1}", "1.5", "messages", "namespace(a=1)", "'😀,'"]
STEPS = [
    "n.x * n.x",
    "n.x + n.x",
    "n.x ~ n.x",
    "[n.x, n.x]",
    "(n.x, n.x)",
    "{'a': n.x, 'b': n.x}",
    "dict(a=n.x, b=n.x)",
    "n.x * 9999",
    "n.x|replace('a', 'aa')",
    "n.x.replace('a', 'aa')",
    "n.x|join(n.x)",
    "n.x.join(n.x)",
    "n.x|escape",
    "n.x|list + n.x|list",
    "n.x ** 999",
    "'%s%s' % (n.x, n.x)",
    "'{0}{0}'.format(n.x)",
    "n.x|batch(99)|list",
    "n.x[:]",
    "n.x.split(',')",
    "n.x|tojson + n.x|tojson",
    "n.x|urlencode",
    "n.x.center(999999)",
    "namespace(a=n.x, b=n.x)",
]
ENDS = [
    "{{ n.x }}",
    "{{ n.x|tojson }}",
    "{{ n.x == n.x }}",
    "{{ n.x|string|length }}",
    "{{ n.x|sort }}",
    "{{ n.x in n.x }}",
]
# Calls to which a large number is passed.
CALLS = [
    "'a'|center(%d)",
    "'a'.ljust(%d)",
    "'a'.zfill(%d)",
    "(1).to_bytes(%d, 'big')",
    "[1]|batch(%d, 'x')|list",
    "1.5|round(%d)",
    "[1]|tojson(indent=%d)",
    "'%%%dd'|format(1)",
    "'{:>%d}'.format(1)",
    "'a'|indent(%d, true)",
    "'\\t'.expandtabs(%d)",
    "range(%d)|list",
    "'a' * %d",
    "['a'] * %d",
    "2 ** %d",
    "'a'.encode().rjust(%d)",
]
TAGS = [
    "{% if a %}",
    "{% endif %}",
    "{% for a in messages %}",
    "{% endfor %}",
    "{% continue %}",
    "{% break %}",
    "{% else %}",
    "{% macro f(a, a) %}",
    "{% macro f(a) %}",
    "{% endmacro %}",
    "{% generation %}",
    "{% endgeneration %}",
    "{{ f(1) }}",
    "{% set a = 1 %}",
    "{{ a }}",
    "{{ '\\ud800' }}",
    "{% call f() %}",
    "{% endcall %}",
    "{{ loop.index }}",
    "{% block a %}",
    "{% endblock %}",
    "{{ self.a() }}",
    "{% filter upper %}",
    "{% endfilter %}",
    "{{ 1|round(-999999999) }}",
    "{{",
]


def template(draw: random.Random, folder: Path) -> Callable[[], Any]:
    kind = draw.randrange(4)
    if kind == 0:
        text = GROWN % (draw.choice(STARTS), draw.choice([40, 400, 99999]), draw.choice(STEPS), draw.choice(ENDS))
    elif kind == 1:
        text = "".join(draw.choice(TAGS) for _ in range(draw.choice([3, 10, 300])))
    elif kind == 2:
        size = draw.choice([999999, 10**9, -(10**9), 10**15])
        text = "{{ (" + draw.choice(CALLS) % size + ")|string|length }}"
    else:
        depth = draw.choice([3, 30, 300, 3000])
        begin, end = draw.choice([("{% if 1 %}", "{% endif %}"), ("{% for i in range(99999) %}", "{% endfor %}")])
        text = begin * depth + "x" + end * depth
        text = text if draw.random() < 0.7 else "{{" + "(" * depth + "1" + ")" * depth + "}}"
    return lambda: Template(ChatTemplate(text, "a template"), {}).render(MESSAGES)


def tokenizer(draw: random.Random, folder: Path) -> Callable[[], Any]:
    def string(most: int) -> str:
        return "".join(draw.choice("ae \u00e9\ufdfa") for _ in range(draw.randint(0, most)))

    def step() -> dict[str, Any]:
        regex = draw.choice(["(a+)+$", "", "(a|a|b)*c", "(", ".*.*.*x", "a{0,999}"])
        patterns = [{"String": string(2)}, {"Regex": regex}]
        charsmap = draw.choice(["", "AQ==", "/////w==", "BAAAAP////8=", "CAAAAP//////////YWJj"])
        return draw.choice(
            [
                {"type": "Replace", "pattern": draw.choice(patterns), "content": string(draw.choice([3, 30, 3000]))},
                {"type": "Prepend", "prepend": string(draw.choice([3, 3000]))},
                {"type": "Precompiled", "precompiled_charsmap": charsmap},
                *({"type": name} for name in ("NFKD", "NFKC", "Lowercase", "Nmt", "StripAccents")),
            ]
        )

    steps = [step() for _ in range(draw.choice([1, 1, 3, 12]))] * draw.choice([1, 1, 10, 2000])
    vocabulary = {chr(i): i for i in range(draw.choice([0, 1000, 50000, 50000]))}
    vocabulary |= {"</s>": draw.choice([256] * 9 + [2**31, 2**32 - 1])}
    model = {"type": "BPE", "dropout": draw.choice([None, 0.5, 0.5, 7.0]), "vocab": vocabulary, "merges": []}
    processor = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "x", "type_id": 0}}], "pair": []}
    splits = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "special"), False) | {"normalized": True}
    spec = {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": string(9) or "x", **flags} for i in range(draw.choice([0, 0, 3, 999]))],
        "normalizer": {"type": "Sequence", "normalizers": steps} if draw.random() < 0.8 else None,
        "pre_tokenizer": draw.choice(
            [None, None, None, splits, {"type": "FixedLength", "length": draw.choice([0, 2])}]
        ),
        "post_processor": draw.choice([None] * 5 + [processor | {"special_tokens": {}}]),
        "decoder": None,
        "model": draw.choice([model, model, model, {"type": "Unigram", "unk_id": 7, "vocab": [["a", -1.0]]}]),
    }
    data = json.dumps(spec).encode()
    data = data if draw.random() < 0.9 else data[: draw.randrange(len(data))]
    (folder / "tokenizer.json").write_bytes(data)

    def read() -> None:
        made = load_tokenizer(str(folder), "auto", add_bos=False, add_eos=False)
        made.decode(made.encode(TEXT)[:50])

    return read


def table(draw: random.Random, folder: Path) -> Callable[[], Any]:
    text, rows = "a" * draw.choice([10, 1 << 20, 100 << 20, 400 << 20]), draw.choice([1, 300])
    rows = rows if len(text) < 1 << 21 else 1
    columns = pyarrow.table({"text": pyarrow.array([text] * rows, pyarrow.large_string())})
    packing, kind = draw.choice(["zstd", "gzip", "snappy", "none"]), draw.choice(["parquet", "arrow", "jsonl"])
    path = folder / f"a.{kind}"
    if kind == "parquet":
        dictionary, limit = draw.random() < 0.5, draw.choice([1 << 20, 1 << 30])
        settings = {"use_dictionary": dictionary, "dictionary_pagesize_limit": limit}
        pyarrow.parquet.write_table(columns, path, compression=packing, **settings)
    elif kind == "arrow":
        options = pyarrow.ipc.IpcWriteOptions(compression=draw.choice(["zstd", "lz4"]))
        with pyarrow.ipc.new_stream(str(path), columns.schema, options=options) as writer:
            writer.write_table(columns)
    else:
        path.write_bytes(gzip.compress(b'{"text": "' + text.encode() + b'"}\n', 1))
    if draw.random() < 0.3:
        data = bytearray(path.read_bytes())
        for _ in range(draw.choice([1, 9, 99])):
            data[draw.randrange(len(data))] = draw.randrange(256)
        path.write_bytes(data)

    def read() -> None:
        if kind == "arrow":
            check_unpacked(path)
            with pyarrow.memory_map(str(path)) as file:
                try:
                    for batch in pyarrow.ipc.open_stream(file):
                        len(batch)
                except (pyarrow.ArrowException, OSError) as error:  # as the loader (trainer.data.hf) does
                    raise UserError(f"{path}: {error}") from error
            return
        for _ in (ParquetPart if kind == "parquet" else JsonlPart)(path, ("text",)).read():
            pass

    return read


def config(draw: random.Random, folder: Path) -> Callable[[], Any]:
    count = draw.choice([65, 4096, 4097, 65536, 2**31 - 1, 10**40])
    few = min(count, 100_000)
    patterns = [".?" * 90 + "Q", "(a*)*" * 30 + "Q", "(.*)" * 40 + "Q", "a{0,99}" * 25 + "Q", ".*" * 9, "(" * 100]
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16, "symmetric": True}
    targets = [f"re:{i}{draw.choice(patterns)}" for i in range(draw.choice([1, 9, 100, 5000]))]
    groups = {str(i): {"weights": weights, "targets": targets} for i in range(draw.choice([1, 9, 1000]))}
    quantized = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}
    quantized |= {"ignore": targets}
    kinds = ["sliding_attention"] * (few - 1) + ["full_attention"]
    changes = draw.choice(
        [
            {draw.choice(["num_hidden_layers", "vocab_size", "num_nextn_predict_layers", "head_dim"]): count},
            {"quantization_config": quantized},
            {"model_type": "gemma3_text", "num_hidden_layers": few, "layer_types": kinds, "sliding_window": 8},
            {"model_type": "qwen3_moe", "num_experts": count, "decoder_sparse_step": draw.choice([1, count])},
            {"eos_token_id": list(range(few)), "bad_words_ids": [[1]] * few},
            {"rope_scaling": {"rope_type": "yarn", "factor": draw.choice([1e308, 1e-300, 2.0])}},
        ]
    )
    data = json.loads(json.dumps(CONFIG | changes))
    if draw.random() < 0.3:
        inner = draw.choice(
            [data, data | {"model_type": "gemma3_text"}, data | {"model_type": "mistral"}, [CONFIG], count]
        )
        outer = {"quantization_config": quantized, "image_token_index": count}
        data = {"model_type": draw.choice(["gemma3", "mistral3"]), "text_config": inner} | draw.choice([{}, outer])

    def read() -> None:
        nonlocal data
        tensors: Any = dict.fromkeys(["language_model.model.norm.weight"])
        if text := text_model(data, tensors, Path("config.json")):
            data = text.config
        found = recipe(data, refused := [])
        if found and not refused:
            found.schemes_of([f"model.layers.{i}.mlp.experts.{j}.gate_proj" for i in range(60) for j in range(64)])
        model_keys(data, "config.json")

    return read


def gguf(draw: random.Random, folder: Path) -> Callable[[], Any]:
    path = folder / "model.gguf"
    path.write_bytes(mutant(draw, whole_gguf()))

    tokens = draw.random() < 0.5

    def read() -> None:
        if tokens:
            load_tokenizer(str(path), "auto", add_bos=False, add_eos=False)
            return
        GgufSource(path)
        for tensor in stored_tensors(read_gguf(path)).values():
            tensor.read(tuple(slice(0, size) for size in tensor.shape))

    return read


@functools.cache
def whole_gguf() -> bytes:
    """Returns a small GGUF file with a tokenizer."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(None):
        return exported(with_tokenizer("smollm", Path(folder) / "model"), Path(folder) / "model.gguf").read_bytes()


KINDS = {"templates": template, "tokenizers": tokenizer, "tables": table, "configs": config, "gguf": gguf}


def tried(read: Callable[[], Any]) -> tuple[str, float, int]:
    """Calls `read` in a forked process. Returns three values: "read", "refused" or a description of the failure; the
    seconds; and the growth of memory in MiB."""
    begin, (get, put) = time.monotonic(), os.pipe()
    child = os.fork()
    if not child:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the package tokenizers prints its own panics
        pages = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (pages + BYTES, pages + BYTES))
        signal.alarm(SECONDS)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            read()
            said = "read"
        except UserError as error:
            said = "refused" if str(error).strip() and len(str(error)) < 4000 else f"a message of {len(str(error))}"
        except BaseException as error:  # any other error is a failure, which the table counts
            said = f"{type(error).__name__}: {str(error)[:100]}"
        os.write(put, json.dumps([said, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10]).encode())
        os._exit(0)
    os.close(put)
    with os.fdopen(get, "rb") as answer:
        data = answer.read()
    _, status = os.waitpid(child, 0)
    said, grown = json.loads(data) if data else (f"ended by signal {status}", 0)
    return said, time.monotonic() - begin, grown


def main(words: list[str]) -> int:
    given = dict(word.split("=", 1) for word in words)
    seed, count = int(given.get("seed", 0)), int(given.get("count", 100))
    failures = 0
    print("| kind | read | refused | failed | slowest, s | largest, MiB |\n|---|---|---|---|---|---|")
    for kind in given.get("kinds", ",".join(KINDS)).split(","):
        results = []
        for i in range(count):
            with tempfile.TemporaryDirectory() as folder:
                read = KINDS[kind](random.Random(f"{seed} {kind} {i}"), Path(folder))
                results.append(tried(read))
            if results[-1][0] not in ("read", "refused"):
                print(f"{kind} {i}: {results[-1]}", file=sys.stderr)
        said = [result[0] for result in results]
        failed = count - said.count("read") - said.count("refused")
        failures += failed
        slowest, largest = max(result[1] for result in results), max(result[2] for result in results)
        counts = f"{said.count('read')} | {said.count('refused')} | {failed}"
        print(f"| {kind} | {counts} | {slowest:.1f} | {largest} |", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

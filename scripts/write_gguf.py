"""Writes tests/goldens/gguf: llama.cpp's results for small GGUF files that this trainer writes.

python scripts/write_gguf.py python=PYTHON [cases=NAME,...] [tokenizers=true]

PYTHON is the interpreter of an environment with cyllama (0.2.18), a wheel of llama.cpp. With `cases`, the script
replaces only the results of these cases.

expected.npz            for each model of gguf_cases.MODELS, its logits, and a checksum of its file's content; for
                        each tokenizer of gguf_cases.KINDS, a checksum of the tokens of each of 200 texts
bytes.json, pieces.json the tokenizers; written only with tokenizers=true
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from trainer.data.gguf_tokenizer import SPACE

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from gguf_cases import (
    EXPECTED,
    FOLDER,
    KINDS,
    MODELS,
    SENTENCES,
    content,
    digest,
    exported,
    inputs,
    model_folder,
    texts,
    with_tokenizer,
)

# Reads a JSON object with "file" and either "tokens" or "texts", and prints logits or tokens. The attention's
# keys and values are float32, and flash attention is off.
LLAMA_CPP = """
import json, sys
import cyllama.llama.llama_cpp as llama
llama.disable_logging()
asked = json.load(sys.stdin)
class Model(llama.LlamaModel):  # cyllama 0.2.18 reads this attribute but does not define it
    n_vocab = 0
model = Model(asked["file"], llama.LlamaModelParams())
vocab = model.get_vocab()
Model.n_vocab = vocab.n_vocab
if "texts" in asked:
    print(json.dumps([vocab.tokenize(text, add_special=False, parse_special=False) for text in asked["texts"]]))
else:
    params = llama.LlamaContextParams()
    params.n_ctx = params.n_batch = params.n_ubatch = 256
    params.type_k = params.type_v = params.flash_attn_type = 0
    context = llama.LlamaContext(model, params)
    count = len(asked["tokens"])
    batch = llama.LlamaBatch(n_tokens=count, embd=0, n_seq_max=1)
    batch.set_batch(asked["tokens"], 0, True)
    context.decode(batch)
    print(json.dumps([context.get_logits_ith(i) for i in range(count)]))
"""


def trained(pieces):
    """Returns the content of a tokenizer.json: BPE trained on the test texts.

    If `pieces`, the tokenizer is in SentencePiece's style; otherwise it works on bytes.
    """
    special = ["<unk>", "<s>", "</s>", "<|im_end|>"]
    made = Tokenizer(models.BPE(byte_fallback=pieces, unk_token="<unk>" if pieces else None, fuse_unk=pieces))
    if pieces:
        special += [f"<0x{byte:02X}>" for byte in range(256)]
        made.normalizer = normalizers.Replace(" ", SPACE)
        made.pre_tokenizer = pre_tokenizers.Split(SPACE, "merged_with_next")
        alphabet = sorted({*"".join(SENTENCES[:7]).replace(" ", SPACE)})
    else:
        made.pre_tokenizer, alphabet = pre_tokenizers.ByteLevel(False), pre_tokenizers.ByteLevel.alphabet()
        made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=special, initial_alphabet=alphabet, limit_alphabet=500, show_progress=False
    )
    made.train_from_iterator([*SENTENCES, *(text for text in texts() if "<" not in text)], trainer)
    spec = json.loads(made.to_str())
    spec["added_tokens"] = [token for token in spec["added_tokens"] if not token["content"].startswith("<0x")]
    if pieces:
        # Derive the merges as transformers derives them from a SentencePiece model: for each token, the best first, all
        # its splits into two tokens.
        vocab, ranks = spec["model"]["vocab"], {}
        for left, right in spec["model"]["merges"]:
            ranks.setdefault(left + right, len(ranks))
        cuts = [(rank, (token[:i], token[i:])) for token, rank in ranks.items() for i in range(1, len(token))]
        known = [(rank, cut) for rank, cut in cuts if all(part in vocab for part in cut)]
        spec["model"]["merges"] = [cut for _, cut in sorted(known, key=lambda it: (it[0], -len(it[1][0])))]
    return spec


def of_llama_cpp(python: str, file: Path, **asked: object) -> list:
    """Returns the logits or tokens that llama.cpp computes from `file`."""
    command, data = [python, "-c", LLAMA_CPP], json.dumps({"file": str(file), **asked})
    return json.loads(subprocess.run(command, input=data, capture_output=True, text=True, check=True).stdout)


def main(words: list[str]) -> None:
    given = dict(word.split("=", 1) for word in words)
    FOLDER.mkdir(exist_ok=True)
    if given.get("tokenizers") == "true":
        for name in ("bytes", "pieces"):
            (FOLDER / f"{name}.json").write_text(json.dumps(trained(name == "pieces")) + "\n")
    cases = given["cases"].split(",") if "cases" in given else [*MODELS, *KINDS]
    found = dict(np.load(EXPECTED)) if "cases" in given else {}
    with tempfile.TemporaryDirectory() as folder:
        for case in [name for name in MODELS if name in cases]:
            file = exported(model_folder(case, Path(folder) / case), Path(folder) / f"{case}.gguf")
            found[f"content/{case}"] = content(file)
            found[f"logits/{case}"] = np.array(of_llama_cpp(given["python"], file, tokens=inputs(case)), np.float32)
        for i, kind in enumerate(name for name in KINDS if name in cases):
            file = exported(with_tokenizer(kind, Path(folder) / f"t{i}"), Path(folder) / f"t{i}.gguf")
            found[f"tokens/{kind}"] = digest(of_llama_cpp(given["python"], file, texts=texts()))
    np.savez_compressed(EXPECTED, **found)


if __name__ == "__main__":
    main(sys.argv[1:])

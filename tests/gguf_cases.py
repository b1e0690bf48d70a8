"""Models and tokenizers in GGUF files. tests/goldens/gguf has llama.cpp's results (scripts/write_gguf.py)."""

import json
import random
import shutil
import unicodedata
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file
from tokenizers.decoders import ByteLevel

from trainer import export
from trainer.config.tokenizer_files import TOKENIZER_CONFIG
from trainer.data.gguf_tokenizer import PIECES, SPACE
from trainer.data.tokenizer import JSON_FILE
from trainer.leaves.gguf_file import read_gguf
from trainer.models.gguf_words import WORDS
from trainer.weights.gguf.tensors import stored_tensors

GOLDENS = Path(__file__).parent / "goldens"
FOLDER = GOLDENS / "gguf"
EXPECTED = FOLDER / "expected.npz"
# Changes to a golden's config.json, so that llama.cpp can represent the model.
_ROPE = {"full_attention": {"factor": 8.0, "rope_theta": 1000.0, "rope_type": "linear"}}
_LLAMA4 = {"attention_chunk_size": 8192, "attn_scale": 0.1, "floor_scale": 8192}
MODELS: dict[str, dict[str, Any]] = {
    **{"llama": {}, "llama-linear": {}, "llama-llama3": {}, "llama-tied": {}, "llama-yarn": {}, "mixtral": {}},
    **{"mistral": {"sliding_window": None}, "qwen2": {}, "qwen3": {}, "qwen3-moe": {"norm_topk_prob": True}},
    **{"olmo2": {}, "smollm3": {}, "gemma": {}, "gemma2": {"query_pre_attn_scalar": 8}},
    "gemma3": {
        "query_pre_attn_scalar": 8,
        "rope_parameters": _ROPE | {"sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"}},
    },
    **{
        "olmo3": {},
        "phi3": {"sliding_window": None},
        "phi4-mini": {},
        "glm": {},
        "glm4": {},
        "deepseek-v3": {},
        "granite": {},
    },
    **{"granite-moe": {}, "granite-moe-shared": {}, "glm4-moe": {}, "glm4-moe-air": {"num_nextn_predict_layers": 1}},
    "glm4-moe-lite": {"rms_norm_eps": 1e-5},
    "mistral4": {},
    "llama4": _LLAMA4,
    "llama4-interleaved": _LLAMA4
    | {"no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0], "layer_types": None, "use_qk_norm": True},
    "gpt-oss": {"swiglu_limit": 7.0},
    "ministral3": {"sliding_window": None},
    # llama.cpp chooses factors by the context length, here 256.
    "phi3-short": {"max_position_embeddings": 512, "original_max_position_embeddings": 256},
    "deepseek-v2": {"n_group": 1, "topk_group": 1, "topk_method": "greedy"},
    "deepseek-v2-lite": {"num_hidden_layers": 27},
}
_LAST_OF_GLM = "model.layers.1."
# Keys that llama.cpp's function sets differently from the file.
OTHERWISE = {"gpt-oss": {"rope_truncate": True}, "glm4-moe-lite": {"decoder_block": "deepseek"}}
# One name for each way to split text into words, a sentencepiece tokenizer, and one that adds no space before a text.
KINDS = [name for i, (name, words) in enumerate(WORDS.items()) if words not in [*WORDS.values()][:i]]
OF_PIECES = (PIECES, f"{PIECES} without a space")
KINDS += OF_PIECES
# The first article of the Universal Declaration of Human Rights, and a sentence with names, in ten scripts.
SENTENCES = (
    "All human beings are born free and equal in dignity and rights; Zo\u00eb won't mind, she'LL say it's NA\u00cfVE.",
    "\u0412\u0441\u0435 \u043b\u044e\u0434\u0438 \u0440\u043e\u0436\u0434\u0430\u044e\u0442\u0441\u044f "
    "\u0441\u0432\u043e\u0431\u043e\u0434\u043d\u044b\u043c\u0438 \u0438 \u0440\u0430\u0432\u043d\u044b\u043c\u0438.",
    "\u038c\u03bb\u03bf\u03b9 \u03bf\u03b9 \u03ac\u03bd\u03b8\u03c1\u03c9\u03c0\u03bf\u03b9 "
    "\u03b3\u03b5\u03bd\u03bd\u03b9\u03bf\u03cd\u03bd\u03c4\u03b1\u03b9 "
    "\u03b5\u03bb\u03b5\u03cd\u03b8\u03b5\u03c1\u03bf\u03b9.",
    "\u05db\u05dc \u05d1\u05e0\u05d9 \u05d4\u05d0\u05d3\u05dd \u05e0\u05d5\u05dc\u05d3\u05d5 \u05d1\u05e0\u05d9 "
    "\u05d7\u05d5\u05e8\u05d9\u05df \u05d5\u05e9\u05d5\u05d5\u05d9\u05dd.",
    "\u064a\u0648\u0644\u062f \u062c\u0645\u064a\u0639 \u0627\u0644\u0646\u0627\u0633 "
    "\u0623\u062d\u0631\u0627\u0631\u064b\u0627 \u0645\u062a\u0633\u0627\u0648\u064a\u0646 \u0660\u0661\u0662\u0663.",
    "\u0938\u092d\u0940 \u092e\u0928\u0941\u0937\u094d\u092f\u094b\u0902 \u0915\u094b "
    "\u0917\u094c\u0930\u0935 \u0914\u0930 \u0905\u0927\u093f\u0915\u093e\u0930\u094b\u0902 \u096a\u096b\u0964",
    "\u0e21\u0e19\u0e38\u0e29\u0e22\u0e4c\u0e17\u0e31\u0e49\u0e07\u0e2b\u0e25\u0e32\u0e22\u0e40\u0e01\u0e34"
    "\u0e14\u0e21\u0e32\u0e21\u0e35\u0e2d\u0e34\u0e2a\u0e23\u0e30.",
    "\u4eba\u4eba\u751f\u800c\u81ea\u7531,\u5728\u5c0a\u4e25\u548c\u6743\u5229\u4e0a\u4e00\u5f8b\u5e73\u7b49\u3002",
    "\u3059\u3079\u3066\u306e\u4eba\u9593\u306f\u3001\u751f\u307e\u308c\u306a\u304c\u3089\u306b\u3057\u3066"
    "\u81ea\u7531\u3067\u3042\u308b\u3002\u30c6\u30b9\u30c8\uff01",
    "\ubaa8\ub4e0 \uc778\uac04\uc740 \ud0dc\uc5b4\ub0a0 \ub54c\ubd80\ud130 \uc790\uc720\ub85c\uc6b0\uba70.",
)
_BETWEEN = (
    *(" ", "  ", "   ", "\n", "\n\n", " \n", "\t", "\r\n", " 12345", "6.78e-9", "'s", "'LL ", " <|x|>", "</s>", "_"),
    *("==", "/*\n", "\u00a0", "\u3000", "\U0001f642", "\U0001f1eb\U0001f1ee", "\u2014", "\u00bd\u00b2", "e\u0301 "),
)


def texts():
    """Returns 200 texts: excerpts of the sentences joined by other characters."""
    draw = random.Random(0)
    found = []
    for i in range(200):
        parts = []
        for _ in range(draw.randint(1, 5)):
            sentence = SENTENCES[i % 10] if draw.random() < 0.7 else draw.choice(SENTENCES)
            start = draw.randrange(len(sentence))
            parts += [draw.choice(_BETWEEN), sentence[start : start + draw.randint(1, 40)], draw.choice(_BETWEEN)]
        found.append("".join(parts))
    return found


def model_folder(case, folder, **changes):
    """Writes a model's Hugging Face folder."""
    shutil.copytree(GOLDENS / case, folder)
    data = json.loads((folder / "config.json").read_text()) | MODELS.get(case, {}) | changes
    if (original := MODELS.get(case, {}).get("original_max_position_embeddings")) is not None:
        data["rope_parameters"]["original_max_position_embeddings"] = original
    if case == "glm4-moe-air":  # adds a module of multi-token prediction, whose block comes last
        tensors, draw = load_file(folder / "model.safetensors"), np.random.RandomState(1)
        again = {name.replace(".1.", ".2.", 1): it for name, it in tensors.items() if name.startswith(_LAST_OF_GLM)}
        shapes = {"enorm": [16], "hnorm": [16], "eh_proj": [16, 32], "shared_head.norm": [16]}
        for name, shape in shapes.items():
            again[f"model.layers.2.{name}.weight"] = draw.rand(*shape).astype(np.float32)
        save_file(tensors | again, folder / "model.safetensors")
    if case == "deepseek-v2-lite":  # llama.cpp knows 26 and 27 layers; the second layer is repeated
        tensors = load_file(folder / "model.safetensors")
        again = {name: tensor for name, tensor in tensors.items() if name.startswith("model.layers.1.")}
        for i in range(2, data["num_hidden_layers"]):
            tensors |= {name.replace(".1.", f".{i}.", 1): tensor for name, tensor in again.items()}
        save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(data))
    return folder


def inputs(case):
    with np.load(GOLDENS / case / "expected.npz") as found:
        return found["rows/inputs"][0].tolist()


def tokenizer_spec(kind):
    """Returns a tokenizer.json of this kind."""
    spec = json.loads((FOLDER / f"{'pieces' if kind in OF_PIECES else 'bytes'}.json").read_text())
    if kind in OF_PIECES:
        prefix = [] if kind != PIECES else [{"type": "Prepend", "prepend": SPACE}]
        replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
        return spec | {"normalizer": {"type": "Sequence", "normalizers": [*prefix, replace]}, "pre_tokenizer": None}
    words = WORDS[kind]
    spec["model"]["ignore_merges"] = words.whole
    if kind == "deepseek-llm":  # its words have at most one digit
        pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in spec["model"]["merges"])
        joined = [(pair, ByteLevel().decode([pair[0] + pair[1]])) for pair in pairs]
        spec["model"]["merges"] = [
            pair for pair, text in joined if "\ufffd" not in text and not any(map(str.isnumeric, text[:-1] + text[1:]))
        ]
    return spec | {"pre_tokenizer": words.pre_tokenizer, "normalizer": words.normalizer}


def tokenizer_folder(kind, folder):
    """Writes a tokenizer of this kind into `folder`, and returns its number of tokens."""
    spec = tokenizer_spec(kind)
    (folder / JSON_FILE).write_text(json.dumps(spec))
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / TOKENIZER_CONFIG).write_text(json.dumps(names | {"add_bos_token": kind in OF_PIECES}))
    return len(spec["model"]["vocab"])


def with_tokenizer(kind, folder):
    """Writes a model folder with a tokenizer of this kind."""
    model_folder("llama", folder)
    rows = tokenizer_folder(kind, folder)
    tensors = load_file(folder / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = np.random.RandomState(0).standard_normal((rows, 32)).astype(np.float32)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text()) | {"vocab_size": rows}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def differs(kind, text):
    """Returns whether llama.cpp may split `text` differently from the model's own tokenizer: llama.cpp has no
    normalizer, and its patterns for tekken, gpt-4o and llama4 match no combining marks and no upper-case letters except
    A to Z."""
    if kind == "qwen2":
        return unicodedata.normalize("NFC", text) != text
    others = (char for char in text if not char.isascii() and kind in ("tekken", "gpt-4o", "llama4"))
    return any(char.isupper() or unicodedata.category(char)[0] == "M" for char in others)


def exported(folder, out, *words):
    export.main([str(folder), str(out), "format=gguf", *words])
    return out


def content(file):
    """Returns a checksum of the model in a GGUF file: its fields, and its tensors as stored."""
    header = read_gguf(file)
    own = sorted((key, str(value)) for key, value in header.values.items() if not key.startswith("tokenizer."))
    found = zlib.crc32(repr(own).encode())
    for name, tensor in sorted(stored_tensors(header).items()):
        data = np.fromfile(file, np.uint8, tensor.nbytes, offset=tensor.start).tobytes()
        found = zlib.crc32(data, zlib.crc32(repr((name, tensor.type, tensor.shape)).encode(), found))
    return np.uint32(found)


def mutant(draw, whole):
    """Returns the bytes of a GGUF file after a mutation: changed bytes, counts, lengths or texts, or truncation."""
    data, header = bytearray(whole), min(len(whole), 60_000)
    for _ in range(draw.choice([1, 1, 2, 9])):
        where = draw.choice([draw.randrange(24), draw.randrange(2000), draw.randrange(header)])
        if draw.random() < 0.5:
            data[where] = draw.choice([0, 1, 255, draw.randrange(256)])
        elif draw.random() < 0.7:
            size = draw.choice([4, 8])
            number = draw.choice([0, 1, 2**20, 2**31, 2**33, 2**63, len(whole)]) % 2 ** (8 * size)
            data[where : where + size] = number.to_bytes(size, "little")
        else:
            at = data.find(draw.choice([b"llama.", b"tokenizer.", b"blk.", b".weight", b"smollm"]), where)
            data[max(at, 0) : max(at, 0) + 4] = bytes(draw.randrange(97, 123) for _ in range(4))
    return bytes(data[: draw.randrange(len(data))] if draw.random() < 0.1 else data)


def digest(rows):
    """Returns a checksum of the tokens of each text."""
    return np.array([zlib.crc32(np.asarray(row, np.int32).tobytes()) for row in rows], np.uint32)

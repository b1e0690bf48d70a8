"""Compares llama.cpp with this trainer on a GGUF file of a Llama model in Q4_1, Q4_0 or Q8_0, and prints tables.

    python scripts/compare_llama_cpp.py MODEL.gguf PYTHON [--rows 40]

PYTHON is the Python of an environment with cyllama (0.2.18), a wheel of llama.cpp. The rows have 512 tokens of Python's
help topics.

Losses: llama.cpp runs on the file and on the same weights written as float32. The two results differ only because
llama.cpp rounds activations where weights are quantized.

Logits of one row: llama.cpp is compared with a NumPy implementation that rounds as llama.cpp does, for the head alone
(a model whose blocks add nothing) and for the whole model. For scale, the last column is the effect on NumPy's logits
if the embeddings change in their last bits.

The script takes 15 minutes of CPU time for 135 million parameters.
"""

import argparse
import json
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from pydoc_data.topics import topics

import gguf
import jax
import numpy as np

from trainer.backends.registry import make_model
from trainer.data.tokenizer_files import load_tokenizer
from trainer.export import main as export
from trainer.leaves.gguf_file import read_gguf
from trainer.leaves.source import nested, parted
from trainer.weights.gguf.tensors import stored_tensors
from trainer.weights.model_keys import model_config
from trainer.weights.open import open_source, weights_of

LENGTH = 512
SOME = 128  # tokens whose logits are compared
BLOCK = 32  # values that share a scale, in Q8_0 and in rounded activations
# A program that runs llama.cpp and writes the losses of all tokens and the logits of the first `some` tokens. Queries,
# keys and values are float32.
LLAMA_CPP = """
import json, sys
import numpy as np
import cyllama.llama.llama_cpp as llama
llama.disable_logging()
class Model(llama.LlamaModel):  # cyllama 0.2.18 looks for this attribute, and has none
    n_vocab = 0
model = Model(sys.argv[1], llama.LlamaModelParams())
Model.n_vocab = model.get_vocab().n_vocab
params = llama.LlamaContextParams()
params.n_ctx = params.n_batch = params.n_ubatch = 512
params.type_k = params.type_v = params.flash_attn_type = 0
params.n_threads = params.n_threads_batch = 1
context = llama.LlamaContext(model, params)
rows, some = json.load(sys.stdin)
losses, first = [], []
for row in rows:
    context.kv_cache_clear()
    batch = llama.LlamaBatch(n_tokens=len(row), embd=0, n_seq_max=1)
    batch.set_batch(row, 0, True)
    context.decode(batch)
    for i, target in enumerate(row[1:]):
        logits = np.array(context.get_logits_ith(i), np.float32)
        first += [logits] if len(first) < some else []
        losses.append(np.logaddexp.reduce(logits.astype(np.float64)) - logits[target])
np.savez(sys.argv[2], losses=losses, logits=first)
"""


def of_llama_cpp(python: str, file: Path, rows: list[list[int]], out: Path) -> dict[str, np.ndarray]:
    """Runs llama.cpp. Returns a dict with "losses", of all tokens, and "logits", of the first SOME tokens."""
    data = json.dumps([rows, SOME])
    subprocess.run([python, "-c", LLAMA_CPP, str(file), str(out)], input=data, text=True, check=True)
    with np.load(out) as found:
        return dict(found)


def of_this_trainer(file: Path, rows: list[list[int]]) -> np.ndarray:
    """Returns the losses of all tokens. The model is applied as in training."""
    source = open_source(str(file))
    config = model_config(source.keys, [f"max_target_length={LENGTH}"], "")
    model = make_model(config)
    leaves = source.leaves(config, weights_of(model)[0])
    arrays = {name: leaf.read(leaf.dtype, lambda size: None) for name, leaf in leaves.items()}
    params, rest = parted(nested(arrays), model.abstract[1])

    @jax.jit
    def losses(params: object, row: jax.Array) -> jax.Array:
        positions, ones = np.arange(row.shape[1], dtype=np.int32)[None], np.ones(row.shape, np.int32)
        hidden, _, _ = model.apply(params, rest, row, positions, ones, np.zeros(1, np.int32))
        logits = model.apply(params, rest, hidden, method="head")[0][0, :-1]
        return -jax.numpy.take_along_axis(jax.nn.log_softmax(logits), row[0, 1:, None], 1)[:, 0]

    return np.concatenate([np.asarray(losses(params, np.array([row], np.int32))) for row in rows])


def losses_of(logits: np.ndarray, row: list[int]) -> np.ndarray:
    most = logits.max(-1)
    return (np.log(np.exp(logits - most[:, None]).sum(-1)) + most - logits[np.arange(len(row)), np.roll(row, -1)])[:-1]


class Rounding:
    """The Llama model of a GGUF file in NumPy, with or without llama.cpp's rounding of activations.

    Each block of 32 activations is rounded to integers times a float16 scale (Q8_0). Weights in Q4_1 are integers times
    a scale, plus a minimum. In a product, the minimum is multiplied by the sum of the block's rounded activations;
    llama.cpp rounds this sum to float16 (Q8_1).
    """

    def __init__(self, file: Path):
        header = read_gguf(file)
        self.number = {key.removeprefix("llama."): value for key, value in header.values.items()}
        self.tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
        self.kinds = {name: tensor.type for name, tensor in stored_tensors(header).items()}
        self._known: dict[str, np.ndarray] = {}

    def weight(self, name: str) -> np.ndarray:
        if name not in self._known:
            tensor = self.tensors[name]
            self._known[name] = gguf.dequantize(tensor.data, tensor.tensor_type)
        return self._known[name]

    def product(self, x: np.ndarray, name: str, rounded: bool) -> np.ndarray:
        weight = self.weight(name)
        if not rounded:
            return x @ weight.T
        blocks = x.reshape(len(x), -1, BLOCK)
        largest = np.abs(blocks).max(-1, keepdims=True)
        codes = np.rint(blocks * (127 / np.maximum(largest, np.float32(1e-30))))
        scale = largest / np.float32(127)
        x = (codes * scale.astype(np.float16).astype(np.float32)).reshape(x.shape)
        if self.kinds[name] != "Q4_1":
            return x @ weight.T
        stored = self.tensors[name].data.reshape(len(weight), -1, 20)
        least = stored[..., 2:4].copy().view(np.float16).astype(np.float32)  # [outputs, blocks, 1]
        without = (weight.reshape(*least.shape[:2], BLOCK) - least).reshape(weight.shape)
        sums = (scale[..., 0] * codes.sum(-1)).astype(np.float16).astype(np.float32)
        return x @ without.T + sums @ least[..., 0].T

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        mean = np.square(x).sum(-1, keepdims=True, dtype=np.float64) / x.shape[-1]
        epsilon = np.float32(self.number["attention.layer_norm_rms_epsilon"])
        return x * (1 / np.sqrt(mean.astype(np.float32) + epsilon)) * self.weight(f"{name}.weight")

    def logits(self, tokens: list[int], rounded: bool, blocks: bool = True, times: float = 1) -> np.ndarray:
        x = self.weight("token_embd.weight")[tokens] * np.float32(times)
        for i in range(self.number["block_count"] if blocks else 0):
            x = self._block(x, f"blk.{i}", lambda x, name: self.product(x, f"{name}.weight", rounded))
        head = "output" if "output.weight" in self.tensors else "token_embd"
        return self.product(self.norm(x, "output_norm"), f"{head}.weight", rounded)

    def _block(self, x: np.ndarray, name: str, product: Callable[[np.ndarray, str], np.ndarray]) -> np.ndarray:
        heads, groups = (self.number[f"attention.head_count{end}"] for end in ("", "_kv"))
        count, size = len(x), x.shape[1] // heads
        angles = np.arange(count)[:, None, None] / self.number["rope.freq_base"] ** (np.arange(0, size, 2) / size)
        turn = np.exp(1j * angles).astype(np.complex64)
        h = self.norm(x, f"{name}.attn_norm")
        q, k, v = (product(h, f"{name}.attn_{each}").reshape(count, -1, size) for each in "qkv")
        q, k = ((each.view(np.complex64) * turn).view(np.float32) for each in (q, k))
        k, v = (np.repeat(each, heads // groups, 1) for each in (k, v))
        q, k, v = (each.swapaxes(0, 1) for each in (q, k, v))
        scores = q @ k.swapaxes(1, 2) / np.float32(size**0.5)
        shares = np.exp(np.where(np.tri(count, dtype=bool), scores, -np.inf) - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        x = x + product((shares @ v).swapaxes(0, 1).reshape(count, -1), f"{name}.attn_output")
        h = self.norm(x, f"{name}.ffn_norm")
        gate, up = (product(h, f"{name}.ffn_{each}") for each in ("gate", "up"))
        return x + product(gate / (1 + np.exp(-gate)) * up, f"{name}.ffn_down")


def head_alone(file: Path, out: Path) -> Path:
    """Writes a copy of the model whose blocks add nothing, because their output matrices are zero. Returns `out`."""
    out.write_bytes(file.read_bytes())
    for tensor in gguf.GGUFReader(out, "r+").tensors:
        if tensor.name.endswith(("attn_output.weight", "ffn_down.weight")):
            tensor.data[:] = 0
    return out


def print_losses(found: Mapping[str, np.ndarray]) -> None:
    print("| | perplexity | nats above this trainer | standard error |\n|---|---|---|---|")
    ours = found["this trainer"]
    for name, losses in found.items():
        more = losses - ours
        cells = f"{np.exp(losses.mean()):.4f}", f"{more.mean():+.5f}", f"{more.std() / len(more) ** 0.5:.5f}"
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def print_logits(name: str, model: Rounding, row: list[int], found: np.ndarray, blocks: bool) -> None:
    """Prints root mean squares of logit differences, after the mean difference of each token has been subtracted."""
    float32 = model.logits(row, False, blocks)
    rounded, moved = (model.logits(row, True, blocks, times) for times in (1, 1 + 2.0**-21))

    def difference(one: np.ndarray, other: np.ndarray) -> str:
        each = one[:SOME] - other[:SOME]
        return f"{np.sqrt(np.square(each - each.mean(-1, keepdims=True)).mean()):.2g}"

    pairs = (found, float32), (rounded, float32), (found, rounded), (moved, rounded)
    print(f"| {name} | {' | '.join(difference(*pair) for pair in pairs)} |", flush=True)


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("python")
    parser.add_argument("--rows", type=int, default=40)
    given = parser.parse_args()
    tokenizer = load_tokenizer(str(given.model), "auto", add_bos=False, add_eos=False)
    tokens = list(map(int, tokenizer.encode("\n".join(topics.values()))))
    rows = [tokens[i * LENGTH : (i + 1) * LENGTH] for i in range(given.rows)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        part = rows[0][: SOME + 1]
        print(
            "| logits | llama.cpp, float32 | NumPy, float32 | llama.cpp, NumPy | NumPy, moved |\n|---|---|---|---|---|"
        )
        for label, file in (("head", head_alone(given.model, folder / "head.gguf")), ("model", given.model)):
            found = of_llama_cpp(given.python, file, [part], folder / "logits.npz")["logits"]
            print_logits(label, Rounding(given.model), part, found, label == "model")
        export([str(given.model), str(folder / "float32.gguf"), "format=gguf", "dtype=float32"])
        files = {"llama.cpp, weights as float32": folder / "float32.gguf", "llama.cpp, the file": given.model}
        with ThreadPoolExecutor() as pool:
            pending = {
                label: pool.submit(of_llama_cpp, given.python, file, rows, folder / f"{file.stem}.npz")
                for label, file in files.items()
            }
            losses = {"this trainer": of_this_trainer(given.model, rows)}
            model = Rounding(given.model)
            rounded = [losses_of(model.logits(row, True), row) for row in rows]
            losses |= {label: each.result()["losses"] for label, each in pending.items()}
            print_losses(losses | {"NumPy, rounded": np.concatenate(rounded)})


if __name__ == "__main__":
    main()

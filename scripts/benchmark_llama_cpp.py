"""Compares generation and serving of a GGUF file with llama.cpp and transformers, and prints Markdown tables.

    python scripts/benchmark_llama_cpp.py MODEL.gguf FOLDER PYTHON [--tables generate,serve] [--threads 2] [--repeats 3]

PYTHON is the Python of an environment with cyllama (0.2.18, a wheel of llama.cpp), torch and transformers. FOLDER
caches the model in each format and dtype that is measured.

generate  a greedy decode step of 1 and of 4 sequences after prompts of 32 tokens. Each program is a process with a
          loaded model. The programs run in turns, and each time is the minimum of the repeats.
serve     answers of trainer.serve's /v1/chat/completions to 1 and 4 concurrent clients. The server of cyllama 0.2.18
          answers only its first request, so it is not measured.

CPU time includes all threads. On a machine with other load, it is a better measure than elapsed time.
"""

import argparse
import json
import os
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmark_serve import cpu_of, is_ready

PROMPT, NEW = 32, 17
FORMS = {"float32": "float32", "bfloat16": "bfloat16", "int8": "q8_0"}  # format -> llama.cpp's name of the format
HALF = ["dtype=bfloat16", "weight_dtype=bfloat16"]
PORT, CLIENTS, ANSWER = 8073, (1, 4), 32
# Each line of the child's stdin is a number of tokens to generate. The child answers with elapsed and CPU seconds.
LOOP = """
import os, sys, time
said, sys.stdout = sys.stdout, sys.stderr
rows = int(sys.argv[3])
prompt = list(range(1000, 1000 + {prompt}))
{code}
print("[]", file=said, flush=True)
for line in sys.stdin:
    elapsed, cpu = time.perf_counter(), time.process_time()
    run(int(line))
    print([time.perf_counter() - elapsed, time.process_time() - cpu], file=said, flush=True)
"""
LLAMA_CPP = """
import numpy as np
import cyllama.llama.llama_cpp as llama
llama.disable_logging()
class Model(llama.LlamaModel):  # cyllama 0.2.18 looks for this attribute, and has none
    n_vocab = 0
model = Model(sys.argv[2], llama.LlamaModelParams())
Model.n_vocab = model.get_vocab().n_vocab
params = llama.LlamaContextParams()
params.n_ctx, params.n_seq_max = 128 * rows, rows
params.n_batch = params.n_ubatch = len(prompt) * rows
params.n_threads = params.n_threads_batch = int(sys.argv[1])
context = llama.LlamaContext(model, params)
def run(new):
    context.kv_cache_clear()
    tokens, at = [prompt] * rows, 0
    for i in range(new):
        count = len(tokens[0])
        batch = llama.LlamaBatch(n_tokens=count * rows, embd=0, n_seq_max=1)
        for row, one in enumerate(tokens):
            for j, token in enumerate(one):
                batch.add(token, at + j, [row], j == count - 1)
        context.decode(batch)
        at += count
        tokens = [[int(np.argmax(context.get_logits_ith(row * count + count - 1)))] for row in range(rows)]
"""
TRANSFORMERS = """
import torch, transformers
torch.set_num_threads(int(sys.argv[1]))
dtype = torch.bfloat16 if sys.argv[4] == "bfloat16" else torch.float32
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[2], dtype=dtype).eval()
if sys.argv[4] == "int8":
    model = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)
ids = torch.tensor([prompt] * rows)
@torch.no_grad()
def run(new):
    more = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    model.generate(ids, max_new_tokens=new, min_new_tokens=new, **more)
"""
TRAINER = """
os.environ.setdefault("JAX_PLATFORMS", "cpu")
import jax, numpy as np
from trainer.inference.max_engine import MaxEngine
from trainer.inference.sampling import Sampling
engine = MaxEngine.of(sys.argv[2], [f"per_device_batch_size={rows}", "max_target_length=128", *sys.argv[4:]])
params = engine.load_params(say=lambda line: None)
def run(new):
    state = engine.init_decode_state()
    for row in range(rows):
        prefix, _ = engine.prefill(params, engine.padded(prompt), len(prompt), sampling=Sampling(0.0), seed=0)
        state = jax.block_until_ready(engine.insert(prefix, state, row))
    for _ in range(new - 1):
        state, result = engine.generate(params, state)
        np.asarray(result.tokens)
"""


def made(model: Path, folder: Path) -> None:
    """Converts the model to each measured format and dtype that `folder` lacks."""
    wanted = {f"{it}.gguf": ("export", "format=gguf", f"dtype={it}") for it in FORMS.values()}
    wanted |= {"hf": ("export", "format=hf"), "int8": ("quantize", "quantization=int8")}
    for name, (command, *words) in wanted.items():
        if not (folder / name).exists():
            argv = [sys.executable, "-m", f"trainer.{command}", str(model), str(folder / name), *words]
            subprocess.run(argv, check=True, stdout=sys.stderr)


class Program:
    """A process with a loaded model, restricted to `threads` of the machine's cores."""

    def __init__(self, python: str, code: str, threads: int, *words: object):
        argv = [python, "-c", LOOP.format(prompt=PROMPT, code=code), str(threads), *map(str, words)]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        cores = f"0-{threads - 1}"
        self.process = subprocess.Popen(["taskset", "-c", cores, *argv], text=True, **pipes)

    def answer(self) -> list[float]:
        """Returns the next answer: elapsed and CPU seconds. The first answer is [], once the model is loaded."""
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"a program ended unexpectedly: {self.process.args}")
        return json.loads(line)

    def ask(self, new: int) -> list[float]:
        assert self.process.stdin
        self.process.stdin.write(f"{new}\n")
        self.process.stdin.flush()
        return self.answer()


def print_generate(folder: Path, python: str, threads: int, repeats: int, rows: int) -> None:
    programs = {}
    for form, other in FORMS.items():
        ours = folder / ("int8" if form == "int8" else "float32.gguf")
        words = HALF if form == "bfloat16" else []
        programs["this trainer", form] = Program(sys.executable, TRAINER, threads, ours, rows, *words)
        programs["llama.cpp", form] = Program(python, LLAMA_CPP, threads, folder / f"{other}.gguf", rows)
        programs["transformers", form] = Program(python, TRANSFORMERS, threads, folder / "hf", rows, form)
    for program in programs.values():
        program.answer()
    least = {name: [[9e9, 9e9], [9e9, 9e9]] for name in programs}
    for repeat in range(repeats + 1):  # the first repeat compiles
        for name, program in programs.items():
            for i, new in enumerate((1, NEW)):
                cost = program.ask(new)
                if repeat:
                    least[name][i] = list(map(min, least[name][i], cost))
    for program in programs.values():
        program.process.kill()
        program.process.wait()
    print(f"\n{rows} sequences; load {os.getloadavg()[0]:.0f}; {threads} threads\n")
    print("| | tokens/s | ms of CPU a token | against this trainer | prompt, ms of CPU |\n|---|---|---|---|---|")
    steps = {name: [(end - begin) / (NEW - 1) for begin, end in zip(*it, strict=True)] for name, it in least.items()}
    for (name, form), (elapsed, cpu) in steps.items():
        ratio = cpu / steps["this trainer", form][1]
        prompt = least[name, form][0][1] * 1e3 / rows
        print(
            f"| {name}, {form} | {rows / elapsed:.1f} | {cpu / rows * 1e3:.0f} | {ratio:.2f} | {prompt:.0f} |",
            flush=True,
        )


def print_serve(folder: Path, threads: int) -> None:
    print("\n| form | clients | tokens/s | ms of CPU a token |\n|---|---|---|---|")
    keys = [f"port={PORT}", "served_model_name=model", f"per_device_batch_size={max(CLIENTS)}", "max_target_length=128"]
    for form in FORMS:
        ours = folder / ("int8" if form == "int8" else "float32.gguf")
        words = HALF if form == "bfloat16" else []
        print_server(form, [sys.executable, "-m", "trainer.serve", str(ours), *keys, *words], threads)


def print_server(name: str, words: list[str], threads: int) -> None:
    """Starts a server and prints a row for each number of clients."""
    argv = ["taskset", "-c", f"0-{threads - 1}", *words]
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not is_ready(PORT):
            assert process.poll() is None, f"{words} has ended"
            time.sleep(0.2)
        for count in CLIENTS:
            with ThreadPoolExecutor(count) as pool:
                list(pool.map(answered, range(count)))  # compiles
                began, cpu = time.perf_counter(), cpu_of(process.pid)
                tokens = sum(pool.map(answered, range(count)))
            elapsed, used = time.perf_counter() - began, cpu_of(process.pid) - cpu
            print(f"| {name} | {count} | {tokens / elapsed:.1f} | {used / tokens * 1e3:.0f} |", flush=True)
    finally:
        process.kill()
        process.wait()


def answered(i: int) -> int:
    """Sends request number `i` and returns the number of tokens in the answer."""
    question = f"Tell me a long story about {i + 2} travellers."
    body = {"model": "model", "messages": [{"role": "user", "content": question}], "max_tokens": ANSWER}
    data = json.dumps(body | {"temperature": 0}).encode()
    url = f"http://127.0.0.1:{PORT}/v1/chat/completions"
    asked = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=1800) as found:
        return json.load(found)["usage"]["completion_tokens"]


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("python")
    parser.add_argument("--tables", default="generate,serve")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    made(given.model, given.folder)
    if "generate" in given.tables:
        for rows in CLIENTS:
            print_generate(given.folder, given.python, given.threads, given.repeats, rows)
    if "serve" in given.tables:
        print_serve(given.folder, given.threads)


if __name__ == "__main__":
    main()

"""Measures tokens/s and CPU time of trainer.serve, of the scheduler alone, and of other servers with the same weights.

    python scripts/benchmark_serve.py MODEL [--clients 1,8,32] [--tokens 64] [--other COMMAND] [key=value ...]

MODEL is a Hugging Face folder. Each client sends one request after another to /v1/completions, greedy and streamed.
COMMAND starts another server of this API on port 8072, such as `transformers serve MODEL --port 8072 --device cpu`.
"""

import argparse
import concurrent.futures
import http.client
import json
import os
import random
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

REQUESTS, SLOTS = 3, 32  # requests per client, slots of the engine
OURS, OTHER = 8071, 8072


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("keys", nargs="*")
    parser.add_argument("--clients", default="1,8,32")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--other", action="append", default=[])
    given = parser.parse_intermixed_args()
    counts = list(map(int, given.clients.split(",")))
    print("| server | clients | tokens/s | CPU ms per token |\n|---|---|---|---|", flush=True)
    keys = [f"per_device_batch_size={SLOTS}", "max_target_length=128", *given.keys]
    words = [sys.executable, "-m", "trainer.serve", given.model, f"port={OURS}", "served_model_name=model", *keys]
    measured("trainer.serve", words, OURS, "model", counts, given.tokens)
    for count in counts:
        words = [sys.executable, __file__, "--scheduler", given.model, str(count), str(given.tokens), *keys]
        print(subprocess.run(words, check=True, capture_output=True, text=True).stdout.splitlines()[-1], flush=True)
    for command in given.other:
        measured(command, shlex.split(command), OTHER, given.model, counts, given.tokens)


def measured(name: str, words: list[str], port: int, model: str, counts: list[int], tokens: int) -> None:
    """Starts a server and prints a row for each number of clients, with the best of two repeats."""
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not is_ready(port):
            assert process.poll() is None, f"{words} has ended"
            time.sleep(0.2)
        answer(port, model, tokens)
        for count in counts:
            rows = []
            for _ in range(2):
                began, cpu = time.perf_counter(), cpu_of(process.pid)
                with concurrent.futures.ThreadPoolExecutor(count) as pool:
                    made = sum(pool.map(lambda _: answer(port, model, tokens), range(count * REQUESTS)))
                rows.append((made / (time.perf_counter() - began), (cpu_of(process.pid) - cpu) / made * 1e3))
            print(row(name, count, rows), flush=True)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()


def row(name: str, clients: int, rows: list[tuple[float, float]]) -> str:
    """Returns a line of the table from repeats of (tokens per second, milliseconds of CPU time per token)."""
    return f"| {name} | {clients} | {max(rows)[0]:.0f} | {min(cpu for _, cpu in rows):.2f} |"


def is_ready(port: int) -> bool:
    """Returns whether a server accepts requests."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as found:
            return found.status == 200
    except OSError:
        return False


def cpu_of(process: int) -> float:
    """Returns the CPU time of a process in seconds."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def answer(port: int, model: str, tokens: int) -> int:
    """Sends a request, and returns the number of tokens in the answer. If the server does not report the number, each
    event counts as one token."""
    prompt = "".join(random.choices("abcdefgh ", k=40))
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
    body |= {"stream_options": {"include_usage": True}}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=900)
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    found = connection.getresponse()
    text = found.read().decode()
    connection.close()
    assert found.status == 200, text
    lines = (line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: {"))
    events = [json.loads(line) for line in lines]
    said = [event["usage"]["completion_tokens"] for event in events if event.get("usage")]
    return said[-1] if said else sum(bool(event["choices"]) for event in events)


def scheduler_alone(model: str, clients: int, tokens: int, keys: list[str]) -> None:
    """Measures the scheduler without a server, and prints its row."""
    from trainer.inference.max_engine import MaxEngine
    from trainer.inference.sampling import Sampling
    from trainer.inference.scheduler import Scheduler
    from trainer.weights.load import of_checkpoint

    loaded, _ = of_checkpoint(model, [*keys, "use_chunked_prefill=true"], None)
    engine = MaxEngine(loaded.config)
    scheduler = Scheduler(engine, engine.load_params(say=lambda line: None))

    def run(count: int) -> int:
        for _ in range(count):
            prompt = [random.randrange(10, 90) for _ in range(40)]
            scheduler.submit(prompt, limit=tokens, sampling=Sampling(0.0))
        return sum(1 for _ in scheduler.run())

    run(1)
    rows = []
    for _ in range(2):
        began, cpu, made = time.perf_counter(), time.process_time(), 0
        for _ in range(REQUESTS):
            made += run(clients)
        rows.append((made / (time.perf_counter() - began), (time.process_time() - cpu) / made * 1e3))
    print(row("the scheduler alone", clients, rows))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--scheduler"]:
        scheduler_alone(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5:])
    else:
        main()

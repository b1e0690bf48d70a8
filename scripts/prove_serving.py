"""Tests the promises of docs/guides/serving.md: starts servers and queries them with the client of the package openai.

    python scripts/prove_serving.py FROM [--only greedy,ties,cut,malformed,end] [--requests 1000] [key=value ...]

FROM is the model to serve, as for trainer.serve. These are the tests:

greedy     concurrent requests in random mixes, with batch_invariant=true: every token and every bit of every
           log-probability equals trainer.generate's
ties       the same requests without batch_invariant: an answer may differ from trainer.generate's only after a near
           tie between two tokens' log-probabilities; the script prints each difference
cut        a tenth of the requests are cut off at random moments: no slot is lost; the script prints the server's
           memory, which should stay flat
malformed  300 malformed requests each get a 4xx status or a closed connection, without a traceback, and disturb no
           other request
end        SIGTERM under load: every accepted request gets its complete answer, and the exit code is 0
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import openai

TIE = 1e-3  # near tie if log-probabilities differ by less; reordering float32 sums changes them by less than 1e-4
LENGTH, SLOTS, CLIENTS = 256, 16, 32
WORDS = [*"()=:+é🙂", "def", "class", "return", "import", "self", "if", "for", "in", "x", "y", "print", "str", "list"]
SEED, NAME = 0, "proved"


def main() -> None:
    """Runs the tests and prints one or more lines for each test."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="FROM")
    parser.add_argument("keys", nargs="*")
    parser.add_argument("--only", default="greedy,ties,cut,malformed,end")
    parser.add_argument("--requests", type=int, default=1000)
    given = parser.parse_intermixed_args()
    keys = [f"max_target_length={LENGTH}", *given.keys]
    for name in given.only.split(","):
        began = time.monotonic()
        asyncio.run(PROOFS[name](given.model, keys, given.requests))
        print(f"  ({time.monotonic() - began:.0f} s)", flush=True)


class Served:
    """A server in a subprocess.

    Attributes:
      client: an `openai` client that is connected to the server.
    """

    def __init__(self, model: str, keys: list[str], folder: Path):
        self._errors = (folder / "stderr").open("w+")
        words = [
            sys.executable,
            "-m",
            "trainer.serve",
            model,
            f"per_device_batch_size={SLOTS}",
            "port=0",
            f"served_model_name={NAME}",
            *keys,
        ]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=self._errors, text=True)
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("http"):
                self.url = line.strip()
                break
        else:
            raise SystemExit(self.said())
        self.port = int(self.url.rpartition(":")[2])
        self.client = openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=600)

    def said(self) -> str:
        """Returns the server's output on standard error."""
        self._errors.flush()
        self._errors.seek(0)
        return self._errors.read()

    def memory(self) -> int:
        """Returns the server's resident memory in bytes."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    async def metric(self, name: str) -> float:
        """Returns the value of the metric `name` in /metrics."""
        answer = await self.client.with_options(timeout=30)._client.get(f"{self.url}/metrics")
        return next(float(line.split()[1]) for line in answer.text.splitlines() if line.startswith(f"{name} "))

    def end(self) -> None:
        """Stops the server. Raises AssertionError if its exit code is not 0, or if it printed a traceback."""
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(120)
        said = self.said()
        assert code == 0, f"exit code {code}: {said}"
        assert "Traceback" not in said, said


@contextlib.asynccontextmanager
async def served(model: str, keys: list[str]) -> AsyncIterator[Served]:
    """Starts a server. On exit, stops it with `Served.end`, which checks how it ended."""
    with tempfile.TemporaryDirectory() as folder:
        server = Served(model, keys, Path(folder))
        try:
            yield server
            await server.client.close()
            server.end()
        finally:
            if sys.exception() is not None:
                print(server.said(), file=sys.stderr)
            server.process.kill()


def prompts(count: int, seed: int = SEED) -> list[str]:
    """Returns texts of 1 to 60 words; a third of them share a prefix of 30 words."""
    rng = random.Random(seed)
    common = " ".join(rng.choices(WORDS, k=30)) + " "
    return [
        (common if i % 3 == 0 else "") + " ".join(rng.choices(WORDS, k=rng.randint(1, 30 if i % 3 == 0 else 60)))
        for i in range(count)
    ]


def generated(model: str, keys: list[str], texts: list[str]) -> list[dict]:
    """Returns the JSON rows that trainer.generate prints for the prompts."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write("\n".join(texts))
        file.flush()
        words = [sys.executable, "-m", "trainer.generate", model, f"prompts={file.name}", "format=jsonl", *keys]
        words += ["decode_sampling_strategy=greedy", "per_device_batch_size=32"]
        done = subprocess.run(words, stdout=subprocess.PIPE, check=True, text=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


async def all_of(calls: list) -> list:
    """Runs the calls, at most CLIENTS at once, and returns their results in order."""
    room = asyncio.Semaphore(CLIENTS)

    async def one(call):
        async with room:
            return await call

    return await asyncio.gather(*map(one, calls))


async def greedily(server: Served, prompt: str, limit: int, stream: bool) -> tuple[list[int], list[float]]:
    """Returns the tokens and the log-probabilities of a greedy answer."""
    how = {"model": NAME, "prompt": prompt, "max_tokens": limit, "temperature": 0, "logprobs": 0}
    how |= {"extra_body": {"return_token_ids": True}}
    if not stream:
        (choice,) = (await server.client.completions.create(**how)).choices
        return choice.token_ids, choice.logprobs.token_logprobs
    tokens, log_probs = [], []
    async for chunk in await server.client.completions.create(**how, stream=True):
        tokens += chunk.choices[0].token_ids
        log_probs += chunk.choices[0].logprobs.token_logprobs
    return tokens, log_probs


async def compared(model: str, keys: list[str], count: int) -> tuple[list, list]:
    """Returns two lists: the server's and trainer.generate's answers to `count` requests in random order."""
    texts = prompts(min(count, 200))
    rows = generated(model, keys, texts)
    rng = random.Random(SEED)
    mixed = [rng.randrange(len(texts)) for _ in range(count - len(texts))] + [*range(len(texts))]
    rng.shuffle(mixed)
    limits = [rng.randint(1, max(len(rows[i]["tokens"]), 1)) for i in mixed]
    async with served(model, keys) as server:
        calls = [greedily(server, texts[i], limit, rng.random() < 0.5) for i, limit in zip(mixed, limits, strict=True)]
        answers = await all_of(calls)
    expected = [(rows[i]["tokens"][:n], rows[i]["log_probs"][:n]) for i, n in zip(mixed, limits, strict=True)]
    # The server's answer includes the token that ends a text, which trainer.generate omits.
    return [
        (tokens[: len(e[0])], scores[: len(e[0])]) for (tokens, scores), e in zip(answers, expected, strict=True)
    ], (expected)


async def greedy(model: str, keys: list[str], count: int) -> None:
    """See the module's docstring."""
    for size in sorted({200, count}):
        answers, expected = await compared(model, [*keys, "batch_invariant=true"], size)
        equal = sum(answer == (list(e[0]), list(e[1])) for answer, e in zip(answers, expected, strict=True))
        tokens = sum(len(e[0]) for e in expected)
        print(f"greedy: {equal} of {size} answers equal trainer.generate's in every bit ({tokens} tokens)")
        assert equal == size


async def ties(model: str, keys: list[str], count: int) -> None:
    """See the module's docstring."""
    answers, expected = await compared(model, keys, min(count, 200))
    equal = 0
    for number, ((tokens, scores), (wanted, others)) in enumerate(zip(answers, expected, strict=True)):
        first = next((i for i, (a, b) in enumerate(zip(tokens, wanted, strict=True)) if a != b), None)
        if first is None:
            equal += 1
            continue
        apart = abs(scores[first] - others[first])
        print(f"  answer {number} differs first at token {first}: log-probabilities {apart:.1e} apart")
        assert apart < TIE
    print(f"ties: {equal} of {len(answers)} answers equal trainer.generate's, the others after a near tie")


async def cut(model: str, keys: list[str], count: int) -> None:
    """See the module's docstring."""
    rng, texts, sizes = random.Random(SEED), prompts(count), []
    async with served(model, keys) as server:

        async def one(i: int) -> str:
            how = {"model": NAME, "prompt": texts[i], "max_tokens": rng.randint(1, 80), "stream": i % 2 == 0}
            how |= {"n": rng.choice([1, 1, 1, 3]), "seed": i}
            if i % 100 == 99:
                sizes.append(server.memory())
            if i % 10 == 3:  # cut off by cancelling the call or abandoning the stream
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(rng.uniform(0, 0.3)):
                        answer = await server.client.completions.create(**how | {"max_tokens": 100})
                        if i % 2 == 0:
                            async for _ in answer:
                                pass
                return "cut"
            answer = await server.client.completions.create(**how)
            ends = [choice.finish_reason for choice in answer.choices] if i % 2 else []
            if i % 2 == 0:
                async for chunk in answer:
                    ends += filter(None, (choice.finish_reason for choice in chunk.choices))
            assert len(ends) == how["n"]
            assert {*ends} <= {"stop", "length"}
            return "answered"

        results = await all_of([one(i) for i in range(count)])
        until = time.monotonic() + 30
        while await server.metric("trainer_slots_in_use") and time.monotonic() < until:
            await asyncio.sleep(0.1)
        used, waiting = await server.metric("trainer_slots_in_use"), await server.metric("trainer_waiting_prompts")
    print(
        f"cut: {results.count('answered')} answered, {results.count('cut')} cut off; slots in use after that: {used:g}"
    )
    marks = [sizes[0], sizes[len(sizes) // 2], sizes[-1]]
    print(f"  memory of the server after 10, 50 and 100 %: {', '.join(f'{size / 1e6:.1f} MB' for size in marks)}")
    assert used == waiting == 0


def malformed_bytes(i: int, rng: random.Random) -> bytes:
    """Returns the bytes of malformed request `i`, with an error in its HTTP, headers, JSON or values."""
    huge = "9" * 5000
    bodies = [
        *(b"", b"{", b"[]", b"null", b'"a"', b'{"prompt": "a"', b'{"prompt": "\xff\xfe"}', b"\x00\x01", b"{'a': 1}"),
        *(b"[" * 50_000, b'{"a":' * 20_000, b'{"prompt":' + b"[" * 3000 + b"]" * 3000 + b"}"),
        *(f'{{"prompt": "a", "{name}": {huge}}}'.encode() for name in ("n", "seed", "max_tokens", "temperature")),
        *(f'{{"prompt": "a", "{name}": 1e999}}'.encode() for name in ("top_p", "temperature", "logprobs")),
        *(f'{{"prompt": "a", "{name}": NaN}}'.encode() for name in ("presence_penalty", "repetition_penalty")),
        *(
            b'{"prompt": 1}',
            b'{"prompt": {}}',
            b'{"prompt": [[1.5]]}',
            b'{"prompt": [-1]}',
            b'{"prompt": [99999999999]}',
        ),
        *(b'{"prompt": "\\ud800"}', b'{"prompt": "a", "stop": "\\udc00"}', b'{"prompt": "a", "no such": 1}'),
        *(b'{"prompt": "a", "logit_bias": {"x": 1}}', b'{"prompt": "a", "logit_bias": {"0": "1"}}', b'{"prompt": []}'),
        *(b'{"prompt": "a", "n": true}', b'{"prompt": "a", "stop": [""]}', b'{"prompt": "a", "stream": 1}'),
        *(b'{"prompt": "a", "model": "' + b"m" * 10_000 + b'"}', b'{"prompt": "' + b"a" * 100_000 + b'"}'),
        b'{"prompt": "' + b"a" * 5_000_000 + b'"}',
    ]
    heads = [
        *(
            b"\r\n\r\n",
            b"GET\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01",
            b"GET / HTTP/x\r\n\r\n",
            b"GET / HTTP/1.1\r\n\r\n",
        ),
        *(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: x\r\n\r\n", b"A" * 100_000),
        *(
            b"GET /../../etc/passwd HTTP/1.1\r\nhost: localhost\r\n\r\n",
            b"DELETE /v1/models HTTP/1.1\r\nhost: a\r\n\r\n",
        ),
        b"GET / HTTP/1.1\r\nhost: localhost\r\n" + b"x: y\r\n" * 200_000 + b"\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"transfer-encoding: chunked\r\n\r\nZZ\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: text/plain\r\ncontent-length: 2\r\n\r\n{}",
        b"POST /v1/completions HTTP/1.1\r\nhost: evil.example\r\ncontent-type: application/json\r\n"
        b"content-length: 2\r\n\r\n{}",
        *(
            b"PATCH /v1/completions HTTP/1.1\r\nhost: localhost\r\n\r\n",
            b"GET /v1/%ff%00 HTTP/1.1\r\nhost: localhost\r\n\r\n",
        ),
    ]
    if i % 4 == 0:
        return heads[i // 4 % len(heads)]
    body = bodies[i % len(bodies)]
    if i % 7 == 0:  # change random bytes
        body = bytes(rng.randrange(256) if rng.random() < 0.3 else byte for byte in body[:2000]) + b"}"
    path = rng.choice(["completions", "chat/completions"])
    head = f"POST /v1/{path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body


async def malformed(model: str, keys: list[str], count: int) -> None:
    """See the module's docstring."""
    rng, outcomes = random.Random(SEED), dict[str, int]()
    async with served(model, [*keys, "receive_seconds=2"]) as server:
        expected = await greedily(server, "def ", 50, True)

        async def bad(i: int) -> str:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            data, slow = malformed_bytes(i, rng), i % 10 == 9
            began = time.monotonic()
            try:
                if i % 50 == 21:  # half-open: nothing is ever sent
                    data = b""
                with contextlib.suppress(ConnectionError):
                    for j in range(0, len(data), 3 if slow else max(len(data), 1)):
                        writer.write(data[j : j + 3] if slow else data)
                        await writer.drain()
                        if slow:
                            await asyncio.sleep(0.1)
                        if time.monotonic() - began > 4:
                            break
                try:
                    answer = await asyncio.wait_for(reader.read(10_000), 10)
                except ConnectionError:
                    answer = b""
                return f"{answer[9:12].decode()}" if answer else "closed"
            finally:
                writer.close()

        async def good() -> int:
            done = 0
            while not over.is_set():
                assert await greedily(server, "def ", 50, done % 2 == 0) == expected
                done += 1
            return done

        over = asyncio.Event()
        others = [asyncio.ensure_future(good()) for _ in range(4)]
        for result in await all_of([bad(i) for i in range(300)]):
            outcomes[result] = outcomes.get(result, 0) + 1
        over.set()
        undisturbed = sum(await asyncio.gather(*others))
    print(f"malformed: {outcomes}; meanwhile {undisturbed} equal answers to another client, and no traceback")
    assert all(name == "closed" or name.startswith("4") for name in outcomes), outcomes


async def end(model: str, keys: list[str], count: int) -> None:
    """See the module's docstring."""
    whole = refused = 0
    for round_ in range(5):
        async with served(model, keys) as server:
            texts, answered = prompts(60, round_), []

            async def one(i: int, server=server, texts=texts, answered=answered) -> str:
                how = {
                    "model": NAME,
                    "prompt": texts[i],
                    "max_tokens": 80,
                    "stream": True,
                }
                try:
                    answer = await server.client.completions.create(**how)
                except (openai.APIConnectionError, openai.InternalServerError):
                    return "refused"  # the server did not accept it
                answered.append(i)
                last = ""
                async for chunk in answer:
                    last = chunk.choices[0].finish_reason or last
                return "whole" if last else "lost"

            calls = asyncio.ensure_future(all_of([one(i) for i in range(len(texts))]))
            while len(answered) < 20 + 5 * round_:
                await asyncio.sleep(0.005)
            server.process.send_signal(signal.SIGTERM)
            results = await calls
            assert "lost" not in results, results
            whole, refused = whole + results.count("whole"), refused + results.count("refused")
            code = server.process.wait(60)
            assert code == 0, code
            server.process.send_signal = lambda number: None  # the server has already stopped
    print(f"end: 5 times SIGTERM under load: {whole} accepted requests got whole answers, {refused} were not accepted")


PROOFS = {"greedy": greedy, "ties": ties, "cut": cut, "malformed": malformed, "end": end}

if __name__ == "__main__":
    main()

"""Measures how long an honest client waits while a server receives requests that are designed to take long.

    python scripts/hostile_requests.py FROM [key=value ...]

Starts `trainer.serve FROM`. Honest requests ask for one token, with a small body or a body of 12 kB; their usual time
is the median of 40. Then, for each kind and size of hostile request, two clients repeat the request for three seconds
while the honest client continues. The sizes are 2.7 MB, and just below HUGE and LARGE bytes. The server reads bodies
above LARGE bytes in a separate process, and those above HUGE bytes in another one (trainer.serving.reading).
"""

import asyncio
import json
import statistics
import sys
import time

import httpx
from prove_serving import served

from trainer.serving.reading import HUGE, LARGE

BYTES = 2_700_000
SECONDS, CLIENTS = 3.0, 2
PADDINGS = (0, 12_000)  # bytes
JSON = {"content-type": "application/json"}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def hostile(size: int) -> dict[str, tuple[str, bytes]]:
    """Returns a dict from each kind of hostile request to its path and its body of about `size` bytes."""

    def said(content: object) -> bytes:
        return json.dumps({"messages": [{"role": "user", "content": "a", "more": content}]}).encode()

    keys = json.dumps({f"unknown_{i}": 1 for i in range(size // 20)})
    names = json.dumps({"messages": [{"role": "user", "content": "<|endoftext|>" * (size // 14)}]})
    tokens = json.dumps({"prompt": [7] * (size // 3)})
    return {
        "unknown keys": (TEXT, keys.encode()),
        "names of special tokens": (CHAT, names.encode()),
        "lists in a message": (CHAT, said([[[]]] * (size // 8))),
        "one text": (TEXT, json.dumps({"prompt": "x " * (size // 2)}).encode()),
        "tokens": (TEXT, tokens.encode()),
        "many stop strings": (TEXT, json.dumps({"prompt": "a", "stop": ["b"] * (size // 5)}).encode()),
    }


async def honest(client: httpx.AsyncClient, padding: int) -> float:
    """Returns the seconds of an honest request, with `padding` bytes of whitespace."""
    body = json.dumps({"prompt": "def", "max_tokens": 1}) + " " * padding
    began = time.perf_counter()
    answer = await client.post(TEXT, content=body, headers=JSON)
    assert answer.status_code == 200, answer.text
    return time.perf_counter() - began


async def beside(url: str, path: str, body: bytes) -> tuple[list[list[float]], list[int]]:
    """Sends honest requests while two clients send hostile ones. Returns a list of the honest requests' seconds for
    each entry of PADDINGS, and the status codes of the answers to the hostile requests."""
    codes = list[int]()

    async def send(client: httpx.AsyncClient) -> None:
        while True:
            answer = await client.post(path, content=body, headers=JSON)
            codes.append(answer.status_code)

    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        senders = [asyncio.create_task(send(client)) for _ in range(CLIENTS)]
        times: list[list[float]] = [[] for _ in PADDINGS]
        until = time.perf_counter() + SECONDS
        while time.perf_counter() < until:
            for padding, found in zip(PADDINGS, times, strict=True):
                await asyncio.sleep(0.01)
                found.append(await honest(client, padding))
        for sender in senders:
            sender.cancel()
    return times, codes


async def main(model: str, keys: list[str]) -> None:
    """Prints a line for each kind of request."""
    async with served(model, keys) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            for size in (LARGE, HUGE):
                # Starts the process that reads bodies of this size.
                await client.post(TEXT, content=b" " * (size + 1), headers=JSON)
            usual = [statistics.median([await honest(client, it) for _ in range(40)]) for it in PADDINGS]
        print("honest requests alone (medians of 40): " + ", ".join(f"{1000 * it:.0f} ms" for it in usual))
        for size in (BYTES, HUGE - 8000, LARGE - 1000):
            for kind, (path, body) in hostile(size).items():
                times, codes = await beside(server.url, path, body)
                said = ", ".join(
                    f"median {1000 * statistics.median(it):4.0f} worst {1000 * max(it):4.0f}" for it in times
                )
                ends = ", ".join(f"{code} x {codes.count(code)}" for code in sorted(set(codes)))
                print(f"{len(body) / 1000:8.0f} kB {kind:24} [ms] {said}; {ends}", flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2:]))

"""Measures how long an honest client waits beside requests that are made to take long.

    python scripts/hostile_requests.py FROM [key=value ...]

Starts `trainer.serve FROM`. An honest request asks for one token; its usual time is the median of 40. Then two clients
send a hostile request of each kind again and again for three seconds, large ones and ones that are just small enough to
be read in a thread, while the honest client goes on.
"""

import asyncio
import json
import statistics
import sys
import time

import httpx
from prove_serving import served

from trainer.serving.reading import LARGE

BYTES = 2_700_000
SECONDS, CLIENTS = 3.0, 2
JSON = {"content-type": "application/json"}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def hostile(size: int) -> dict[str, tuple[str, bytes]]:
    """Returns the path and the body of each kind of request, of `size` bytes."""

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


async def honest(client: httpx.AsyncClient) -> float:
    """Returns the seconds of an honest request."""
    began = time.perf_counter()
    answer = await client.post(TEXT, json={"prompt": "def", "max_tokens": 1})
    assert answer.status_code == 200, answer.text
    return time.perf_counter() - began


async def beside(url: str, path: str, body: bytes) -> tuple[list[float], list[int]]:
    """Returns the times of honest requests while hostile ones run, and the codes of their answers."""
    codes = list[int]()

    async def send(client: httpx.AsyncClient) -> None:
        while True:
            answer = await client.post(path, content=body, headers=JSON)
            codes.append(answer.status_code)

    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        senders = [asyncio.create_task(send(client)) for _ in range(CLIENTS)]
        times, until = list[float](), time.perf_counter() + SECONDS
        while time.perf_counter() < until:
            await asyncio.sleep(0.01)
            times.append(await honest(client))
        for sender in senders:
            sender.cancel()
    return times, codes


async def main(model: str, keys: list[str]) -> None:
    """Prints a line for each kind of request."""
    async with served(model, keys) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            usual = statistics.median([await honest(client) for _ in range(40)])
            await client.post(TEXT, content=b" " * (LARGE + 1), headers=JSON)  # starts the process that reads it
        print(f"honest request alone: {1000 * usual:.0f} ms (median of 40)")
        for size in (BYTES, LARGE - 1000):
            for kind, (path, body) in hostile(size).items():
                times, codes = await beside(server.url, path, body)
                median, worst = statistics.median(times), max(times)
                ends = ", ".join(f"{code} x {codes.count(code)}" for code in sorted(set(codes)))
                print(
                    f"{len(body) / 1000:8.0f} kB {kind:24} median {1000 * median:4.0f} ms ({median / usual:.1f}), "
                    f"worst {1000 * worst:4.0f} ms ({worst / usual:.1f}); {ends}",
                    flush=True,
                )


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2:]))

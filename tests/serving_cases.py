"""Runs a server with a tiny byte-level model in a thread of this process, and calls it."""

import contextlib
import copy
import functools
import http.client
import json
import threading
import time
from unittest import mock

import jax
from support import draw_simply, tiny_config

from trainer.chat.encoder import Prompts
from trainer.config.keys import Config
from trainer.inference.max_engine import MaxEngine
from trainer.inference.sampling import sampling_of
from trainer.inference.scheduler import Scheduler
from trainer.serving.front import Model
from trainer.serving.server import Server, bound

LENGTH, SLOTS, WAITING, BODY = 128, 3, 6, 20_000


@functools.cache
def tiny_engine():
    """Returns an engine and its parameters. The engine is stateless, so the servers of a process may share it."""
    keys = {"max_target_length": LENGTH, "vocab_size": 257, "tokenizer_type": "bytes", "base_num_decoder_layers": 1}
    keys |= {"per_device_batch_size": SLOTS, "use_chunked_prefill": True, "prefill_chunk_size": 32}
    keys |= {"max_waiting_prompts": WAITING, "max_body_bytes": BODY, "receive_seconds": 1.0}
    engine = MaxEngine(tiny_config("nnx", **keys), jax.devices()[:1], controls=True)
    return engine, engine.load_params(say=lambda line: None)


@contextlib.contextmanager
def served(engine, params, tokens=(), fails="", **keys):
    """Runs a server with further keys. Yields its port. `fails`: the failure expected of the server."""
    engine = copy.copy(engine)
    engine.config = Config({**engine.config, **keys})
    tokenizer = engine.get_tokenizer()
    scheduler, chat = Scheduler(engine, params), Prompts(engine.config, tokenizer)
    end, default = [tokenizer.eos], sampling_of(engine.config)
    model = Model(scheduler, tokenizer, chat, {"tiny": 0}, [tokenizer.bos], end, chat.stop_tokens(), default, None)
    at, ready, errors = bound("127.0.0.1", 0), threading.Event(), []
    server = Server(model, at, tokens)

    def run():
        try:
            server.run(ready.set)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)  # a daemon, so that a failed test does not hang
    with mock.patch("trainer.inference.programs.draw", draw_simply):
        thread.start()
        assert ready.wait(120)
    port = Port(at.getsockname()[1])
    port.scheduler, port.server, port.thread = scheduler, server, thread
    yield port
    if not fails:
        server.stop()
    thread.join(60)
    assert not thread.is_alive()
    assert [fails in str(error) for error in errors] == [True] * bool(fails)
    if fails:
        return
    assert scheduler.idle
    assert scheduler.free_slots == SLOTS


class Port(int):
    """A port, and the server that listens on it."""


def call(port, path="/v1/completions", body=None, method="POST", **headers):
    """Returns the status, headers and body of a response."""
    connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=60)
    data = json.dumps(body).encode() if isinstance(body, dict | list) else body
    headers = {"content-type": "application/json"} | {name.replace("_", "-"): it for name, it in headers.items()}
    connection.request(method, path, data, headers)
    answer = connection.getresponse()
    text = answer.read()
    connection.close()
    return answer.status, answer.headers, text


def complete(port, path="/v1/completions", **body):
    if path == "/v1/completions":
        body = {"prompt": "ab"} | body
    status, _, text = call(port, path, body)
    assert status == 200, text
    return json.loads(text)


def slow(port):
    """Makes the steps of a server slow, so that a test can act while a request runs."""
    turn = port.scheduler.turn
    port.scheduler.turn = lambda: (time.sleep(0.003), turn())[1]


def wait_for(condition):
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)

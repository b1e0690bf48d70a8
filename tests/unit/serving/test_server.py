"""A server over a tiny byte model: its answers equal the scheduler's, its limits hold, and slots are freed."""

import contextlib
import http.client
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from serving_cases import BODY, LENGTH, SLOTS, WAITING, call, complete, served, slow, tiny_engine, wait_for

from trainer.inference.controls import Asked
from trainer.inference.sampling import Sampling
from trainer.inference.scheduler import Scheduler
from trainer.serving.reading import HUGE, LARGE

ENDLESS = {"logit_bias": {"256": -100}}  # no token ends the text
GREEDY = {"temperature": 0, "return_token_ids": True}


@pytest.fixture(scope="module")
def made():
    """Yields an engine, its parameters and the address of a server."""
    engine, params = tiny_engine()
    with served(engine, params) as port:
        yield engine, params, port


def events(text):
    """Returns the objects of a stream, which must end as the API specifies."""
    *found, last, rest = text.decode().split("\n\n")
    assert (last, rest) == ("data: [DONE]", "")
    return [json.loads(line.removeprefix("data: ")) for line in found]


def refusal(port, status, path="/v1/completions", body=None, **how):
    code, headers, text = call(port, path, body, **how)
    assert code == status, text
    error = json.loads(text)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error["message"], headers


def alone(made, prompt, limit, sampling=None, **how):
    """Returns the tokens that a scheduler generates for a request without a server."""
    scheduler = Scheduler(*made[:2])
    scheduler.submit(prompt, limit=limit, sampling=sampling or Sampling(0.0), **how)
    return [event.token for event in scheduler.run()]


def test_tokens_are_those_of_the_scheduler(made):
    prompts = ["a", "bc" * 40, "🙂" * 3, [5, 9, 200]]
    answer = complete(made[2], prompt=prompts, max_tokens=9, **GREEDY)
    rows = [prompt if isinstance(prompt, list) else [256, *prompt.encode()] for prompt in prompts]
    expected = [alone(made, row, 9) for row in rows]
    assert [choice["token_ids"] for choice in answer["choices"]] == expected
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == rows
    size = sum(map(len, rows))
    assert answer["usage"] == {"prompt_tokens": size, "completion_tokens": 36, "total_tokens": size + 36}
    for choice, tokens in zip(answer["choices"], expected, strict=True):
        assert choice["finish_reason"] == "length"
        assert choice["text"] == bytes(tokens).decode(errors="replace")  # incomplete characters are replaced


def test_samples_have_their_own_tokens_and_seeds_repeat_them(made):
    drawn = {"n": 3, "seed": 7, "temperature": 1.5, "top_k": 50, "max_tokens": 8, "return_token_ids": True}
    first, second = (complete(made[2], **drawn)["choices"] for _ in range(2))
    assert first == second
    rows = [choice["token_ids"] for choice in first]
    assert len({*map(tuple, rows)}) == 3
    how = {"sampling": Sampling(1.5, 50), "seed": 7}
    assert rows == [alone(made, [256, *b"ab"], 8, sample=i, **how) for i in range(3)]
    twice = complete(made[2], **drawn, prompt=["ab", "ab"])["choices"]
    assert [choice["token_ids"] for choice in twice] == rows * 2  # the seed applies to each prompt
    others = [complete(made[2], **drawn | {"seed": None})["choices"][0]["token_ids"] for _ in range(2)]
    assert others[0] != others[1]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_stream_has_the_parts_of_the_whole(made, path):
    chat = "chat" in path
    said = {"messages": [{"role": "user", "content": "hé"}]} if chat else {"prompt": ["ab", "é"]}
    said |= {"max_tokens": 20, "n": 2, "seed": 3, "logprobs": True if chat else 2, "return_token_ids": True}
    whole = complete(made[2], path, **said)
    status, headers, text = call(made[2], path, said | {"stream": True, "stream_options": {"include_usage": True}})
    assert status == 200
    assert headers["content-type"].startswith("text/event-stream")
    *parts, last = events(text)
    assert last["usage"] == whole["usage"]
    assert last["choices"] == []
    for choice in whole["choices"]:
        own = [part["choices"][0] for part in parts if part["choices"][0]["index"] == choice["index"]]
        tokens = [token for part in own for token in part["token_ids"]]
        assert tokens == choice["token_ids"]
        assert own[-1]["finish_reason"] == choice["finish_reason"] == "length"
        if chat:
            assert own[0]["delta"]["role"] == "assistant"
            assert "".join(part["delta"].get("content", "") for part in own) == choice["message"]["content"]
            scores = [entry for part in own for entry in part["logprobs"]["content"]]
            assert scores == choice["logprobs"]["content"]
            assert bytes(b for entry in scores for b in entry["bytes"]) == bytes(token % 256 for token in tokens)
        else:
            assert "".join(part["text"] for part in own) == choice["text"]
            assert [x for part in own for x in part["logprobs"]["text_offset"]] == choice["logprobs"]["text_offset"]
    assert len({part["id"] for part in parts}) == 1


def test_log_probabilities_of_prompt_and_answer(made):
    """Prompts in chunks have the log-probabilities that their tokens had when they were drawn."""
    first = complete(made[2], prompt=[97] * 50, max_tokens=20, logprobs=3, **GREEDY)["choices"][0]
    drawn = first["logprobs"]["token_logprobs"]
    row = [97] * 50 + first["token_ids"]
    echoed = {"prompt": row, "echo": True, "logprobs": 3}
    for limit in (0, 1):
        choice = complete(made[2], **echoed, max_tokens=limit, temperature=0)["choices"][0]
        found = choice["logprobs"]
        assert len(found["tokens"]) == len(row) + limit
        assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
        assert found["token_logprobs"][50 : len(row)] == pytest.approx(drawn, abs=1e-5)  # product shapes differ
        likeliest = [max(top.values()) for top in found["top_logprobs"][50:70]]
        assert likeliest == found["token_logprobs"][50:70]  # these tokens were greedy
        assert choice["text"].startswith("a" * 50)
        assert found["text_offset"][:51] == [*range(51)]
    assert complete(made[2], **echoed, max_tokens=0)["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("echo", [False, True])
def test_places_of_tokens_are_those_in_the_text(made, echo):
    """The BOS token of a prompt has no characters."""
    asked = {"prompt": ["aé", "b"], "echo": echo, "logprobs": 0, "max_tokens": 3, "logit_bias": {"120": 100}}
    before = [[0, 0, 1, 2], [0, 0]] if echo else [[], []]
    choices = complete(made[2], **asked)["choices"]
    assert [choice["text"] for choice in choices] == (["aéxxx", "bxxx"] if echo else ["xxx", "xxx"])
    for choice, starts, first in zip(choices, before, (2, 1) if echo else (0, 0), strict=True):
        assert choice["logprobs"]["text_offset"] == [*starts, first, first + 1, first + 2]


def test_penalties_and_biases(made):
    port, row = made[2], [256, *b"ab"]
    tokens = complete(port, max_tokens=6, logit_bias={"120": 100}, **GREEDY)["choices"][0]["token_ids"]
    assert tokens == [120] * 6
    penalized = {"logit_bias": {"120": 30}, "presence_penalty": 2, "frequency_penalty": 2, "repetition_penalty": 1.5}
    tokens = complete(port, max_tokens=40, **penalized, **GREEDY)["choices"][0]["token_ids"]
    assert tokens == alone(made, row, 40, asked=Asked(2.0, 2.0, 1.5, {120: 30.0}))
    assert 5 < tokens.count(120) < 20
    # A reused slot does not keep the previous request's options.
    assert complete(port, max_tokens=6, **GREEDY)["choices"][0]["token_ids"] == alone(made, row, 6)


def test_a_stop_string_ends_a_text_and_frees_its_slot(made):
    port, letters = made[2], {"logit_bias": {str(i): 60 for i in range(97, 101)}, "seed": 5, "temperature": 2}
    text = complete(port, **letters, max_tokens=60)["choices"][0]["text"]
    stop = text[20:23]
    first = text.index(stop)
    answer = complete(port, **letters, max_tokens=60, stop=["zz", stop])
    assert answer["choices"][0]["text"] == text[:first]
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == first + 3
    parts = events(call(port, body={"prompt": "ab", **letters, "max_tokens": 60, "stop": stop, "stream": True})[2])
    assert "".join(part["choices"][0]["text"] for part in parts) == text[:first]
    end = complete(port, max_tokens=60, logit_bias={"256": 100}, logprobs=0)  # an end-of-text token
    assert (end["choices"][0]["text"], end["choices"][0]["finish_reason"]) == ("", "stop")
    assert end["choices"][0]["logprobs"]["tokens"] == ["<|endoftext|>"]
    wait_for(lambda: port.scheduler.free_slots == SLOTS)


def test_what_is_refused(made):
    port = made[2]
    said, _ = refusal(port, 404, body={"prompt": "a", "model": "gpt"})
    assert said == "model=gpt: no such model; available: tiny"
    refusal(port, 404, body={"prompt": "a" * 200, "model": "gpt"})  # refused before the prompt is encoded
    assert "LICENSE" in refusal(port, 404, "/LICENSE", method="GET")[0]
    refusal(port, 405, method="GET")
    assert "application/json" in refusal(port, 415, body=b"prompt=a", content_type="text/plain")[0]
    assert str(BODY) in refusal(port, 413, body={"prompt": "a" * BODY})[0]
    refusal(port, 400, body=b"{")
    refusal(port, 400, body={"prompt": ""} | {"n": 0})
    assert "257" in refusal(port, 400, body={"prompt": [257]})[0]
    assert "257" in refusal(port, 400, body={"prompt": "a", "logit_bias": {"257": 1}})[0]
    assert "at most 6 prompts may wait" in refusal(port, 400, body={"prompt": "a", "n": 7})[0]
    said, _ = refusal(port, 400, body={"prompt": "a" * 200})
    assert said.startswith("the prompt has 201 tokens and max_tokens is 0; a prompt may have at most 127 tokens")
    assert "at most 128" in refusal(port, 400, body={"prompt": "a" * 100, "max_tokens": 28})[0]
    assert "accepts only the hosts localhost" in refusal(port, 403, "/v1/models", method="GET", host="example.org")[0]
    system = {"messages": [{"role": "user", "content": "a" * 200}]}
    assert "tokens" in refusal(port, 400, "/v1/chat/completions", system)[0]
    assert complete(port, max_tokens=1)


def test_a_full_queue(made):
    """The 429 answer contains a retry time; accepted requests get their answers."""
    engine, params, _ = made
    body = {"prompt": ["a"] * WAITING, "max_tokens": 20, **ENDLESS}
    answers, threads = [], []
    with served(engine, params) as port:
        slow(port)
        for _ in range(4):
            threads.append(threading.Thread(target=lambda: answers.append(call(port, body=body))))
            threads[-1].start()
        for thread in threads:
            thread.join()
    assert {status for status, *_ in answers} == {200, 429}
    for status, headers, text in answers:
        if status == 429:
            assert int(headers["retry-after"]) >= 1
            assert "the queue is full: at most 6 prompts may wait" in json.loads(text)["error"]["message"]
        else:
            assert len(json.loads(text)["choices"]) == WAITING


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_slots(made, stream, monkeypatch):
    port, turns = made[2], []
    wait_for(lambda: port.scheduler.idle)
    turn = port.scheduler.turn
    monkeypatch.setattr(port.scheduler, "turn", lambda: (turns.append(1), time.sleep(0.003), turn())[2])
    connection = http.client.HTTPConnection("127.0.0.1", int(port))
    body = json.dumps({"prompt": ["a", "b"], "n": 3, "max_tokens": 120, "stream": stream, **ENDLESS})
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    wait_for(lambda: port.scheduler.free_slots < SLOTS)
    connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()
    wait_for(lambda: port.scheduler.idle)
    assert port.scheduler.free_slots == SLOTS
    assert len(turns) < 150  # all answers together need two rounds of 120 steps


def test_slow_senders_are_closed(made):
    """A request's header and body must arrive in time; other requests are not affected."""
    port = made[2]
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 99\r\n"
    )
    begun = time.monotonic()
    open_ = [socket.create_connection(("127.0.0.1", int(port))) for _ in range(4)]
    for connection, sent in zip(open_, (b"", b"POST /v1/comp", head, head + b"\r\n{"), strict=True):
        connection.sendall(sent)
    assert complete(port, max_tokens=3)
    ends = []
    for connection in open_:
        connection.settimeout(60)
        with contextlib.suppress(ConnectionResetError), connection:
            ends.append(b"".join(iter(lambda connection=connection: connection.recv(10_000), b"")))
    assert time.monotonic() - begun < 60
    (said,) = filter(None, ends)  # only the client that sent a complete header gets an answer
    assert said.startswith(b"HTTP/1.1 408 ")
    assert b"receive_seconds=1" in said


def test_a_request_that_takes_too_long(made):
    engine, params, _ = made
    with served(engine, params, request_seconds=0.05) as port:
        slow(port)
        said, headers = refusal(port, 408, body={"prompt": ["a"] * 6, "max_tokens": 120, **ENDLESS})
        assert "request_seconds=0.05" in said
        assert headers["x-should-retry"] == "false"
        wait_for(lambda: port.scheduler.idle)
        text = call(port, body={"prompt": ["a"] * 6, "max_tokens": 120, "stream": True, **ENDLESS})[2].decode()
        assert "request_seconds=0.05" in text
        assert "[DONE]" not in text
        wait_for(lambda: port.scheduler.idle)


def stopped_while_answering(port, prompts):
    """Returns the answer to a request during which the server is asked to stop."""
    slow(port)
    answers = []
    body = {"prompt": ["a"] * prompts, "max_tokens": 120, **ENDLESS}
    thread = threading.Thread(target=lambda: answers.append(call(port, body=body)))
    thread.start()
    wait_for(lambda: port.scheduler.free_slots == 0)
    port.server.stop()
    thread.join()
    return answers[0]


def test_the_end_finishes_what_was_accepted(made):
    engine, params, _ = made
    with served(engine, params) as port:
        answer = stopped_while_answering(port, prompts=5)
        assert answer[0] == 200
        choices = json.loads(answer[2])["choices"]
        assert [choice["finish_reason"] for choice in choices] == ["length"] * 5
        port.thread.join(30)
        with pytest.raises(OSError, match="refused"):
            call(port)


def test_the_end_does_not_wait_longer_than_it_may(made):
    engine, params, _ = made
    with served(engine, params, drain_seconds=0) as port:
        answer = stopped_while_answering(port, prompts=6)
        assert answer[0] == 503
        assert b"the server is shutting down" in answer[2]


def test_tokens_and_prefixes_by_token(made):
    engine, params, _ = made
    keys = {"enable_prefix_caching": True, "prefix_caching_by_token": True}
    with served(engine, params, ["first-token", "second-token"], **keys) as port:
        refusal(port, 401, body={"prompt": "a"})
        refusal(port, 401, "/v1/models", method="GET", authorization="Bearer other-token")
        refusal(port, 401, "/metrics", method="GET")
        assert call(port, "/health", method="GET")[0] == call(port, "/", method="GET")[0] == 200
        reused = []
        for token in ("first-token", "second-token", "first-token"):
            status, *_ = call(port, body={"prompt": "x" * 60, "max_tokens": 1}, authorization=f"Bearer {token}")
            assert status == 200
            reused.append(port.scheduler.reused)
        assert reused == [0, 0, 60]
        # The tokens of a cached prompt need log-probabilities, too, so the prompt is computed again.
        scored = {"prompt": "x" * 60, "echo": True, "logprobs": 0, "max_tokens": 0}
        status, _, text = call(port, body=scored, authorization="Bearer first-token")
        (choice,) = json.loads(text)["choices"]
        assert choice["logprobs"] == complete(made[2], **scored)["choices"][0]["logprobs"]
        assert None not in choice["logprobs"]["token_logprobs"][1:]
        text = call(port, "/metrics", method="GET", authorization="Bearer first-token")[2].decode()
        assert "trainer_prefix_hit_tokens_total 60.0" in text


def test_health_models_and_metrics(made):
    port = made[2]
    assert json.loads(call(port, "/health", method="GET")[2]) == {"status": "ready"}
    (model,) = json.loads(call(port, "/v1/models", method="GET")[2])["data"]
    assert model == json.loads(call(port, "/v1/models/tiny", method="GET")[2])
    assert (model["id"], model["max_model_len"], model["chat_template"]) == ("tiny", LENGTH, False)
    before = metrics(port)
    complete(port, prompt=["a", "bcd"], max_tokens=5, **ENDLESS)
    after = metrics(port)
    changed = {name: after[name] - before.get(name, 0) for name in after if after[name] != before.get(name, 0)}
    assert changed["trainer_generated_tokens_total"] == 10
    assert changed["trainer_prefilled_tokens_total"] == 6
    assert changed["trainer_time_to_first_token_seconds_count"] == 2
    assert changed["trainer_time_between_tokens_seconds_count"] == 8
    assert changed['trainer_requests_total{code="200",path="/v1/completions"}'] == 1
    assert (after["trainer_slots"], after["trainer_slots_in_use"], after["trainer_waiting_prompts"]) == (SLOTS, 0, 0)


def metrics(port):
    lines = call(port, "/metrics", method="GET")[2].decode().splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if line[0] != "#"}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_failure_of_the_engine_ends_the_server(made):
    """Requests receive an error, and the exception is not lost."""
    engine, params, _ = made
    with served(engine, params, fails="the engine has failed") as port:
        port.scheduler.turn = lambda: 1 / 0
        assert "failed" in refusal(port, 500, body={"prompt": "a"})[0]


def test_a_connection_is_used_again(made):
    connection = http.client.HTTPConnection("127.0.0.1", int(made[2]), timeout=60)
    for body in (b'{"prompt": "a", "max_tokens": 2}', b"{", b'{"prompt": "a", "max_tokens": 2}'):
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        connection.getresponse().read()
        assert connection.sock is not None
    connection.close()


def test_a_large_body_is_read_aside_and_ended_if_it_takes_too_long(made):
    """Its chat template takes seconds, while other requests are served."""
    loops = "{% for i in range(99999) %}{% if ('a' * 3000) | title %}{% endif %}{% endfor %}"
    template = f"{{{{ messages[0].content }}}}{{% if messages[0].content == 'Hi' %}}{loops}{{% endif %}}"
    padding, keys = " " * LARGE, {"max_body_bytes": 2 * HUGE, "chat_template": template}
    with served(*made[:2], **keys) as port:
        assert json.loads(call(port, "/v1/models/tiny", method="GET")[2])["chat_template"]  # the page opens in a chat
        body = json.dumps({"prompt": "ab", "temperature": 0}) + padding
        _, _, large = call(port, body=body.encode())
        assert json.loads(large)["choices"] == complete(port, temperature=0)["choices"]
        port.server._front._large._process.kill()
        assert "has ended" in refusal(port, 503, body=body.encode())[0]
        assert json.loads(call(port, body=body.encode())[2])["choices"] == json.loads(large)["choices"]
        huge = json.dumps({"messages": [{"role": "user", "content": "Hi"}]}) + " " * HUGE
        with ThreadPoolExecutor(1) as pool:
            slow = pool.submit(call, port, "/v1/chat/completions", huge.encode())
            assert json.loads(call(port, body=body.encode())[2])["choices"] == json.loads(large)["choices"]
            assert not slow.done()
            while not slow.done():
                complete(port, max_tokens=1)
                time.sleep(0.05)
        status, _, said = slow.result()
        assert (status, "within receive_seconds=1" in said.decode()) == (400, True)


def test_a_client_that_sends_too_much_reads_why(made):
    """Even if the client is still sending when the server refuses the request."""
    with served(*made[:2]) as port:
        status, _, said = call(port, body=b"[" * (4 << 20))
        assert (status, str(BODY) in said.decode()) == (413, True)
        status, _, _ = call(port, body=iter([b"[" * (1 << 20)] * 4))  # chunked transfer encoding
        assert status == 413
        with socket.create_connection(("127.0.0.1", int(port))) as client:
            head = f"host: localhost\r\ncontent-type: application/json\r\ncontent-length: {1 << 20}\r\n"
            client.sendall(f"POST /v1/completions HTTP/1.1\r\n{head}expect: 100-continue\r\n\r\n".encode())
            assert client.recv(100).startswith(b"HTTP/1.1 413")

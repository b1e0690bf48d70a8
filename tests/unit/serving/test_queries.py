"""What a request may contain, and that everything else is refused with its name."""

import json

import pytest

from trainer.inference.sampling import Sampling
from trainer.serving.access import Access, read_tokens
from trainer.serving.errors import ApiError
from trainer.serving.queries import query, read_json

DEFAULT = Sampling(0.5, 7, 0.9)
CHAT = {"messages": [{"role": "user", "content": "a"}]}


def refused(call):
    with pytest.raises(ApiError) as raised:
        call()
    assert 400 <= raised.value.status < 500
    error = raised.value.body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def asked(chat=False, **given):
    return query((CHAT if chat else {"prompt": "a"}) | given, chat=chat, default=DEFAULT)


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"{", b"[]", b'"a"', b"null", b'{"prompt": "\xff"}', b"\x00", b'{"a": 1,}', b"nope"),
        *(b"[" * 100_000, b'{"a":' * 5000 + b"1" + b"}" * 5000, b'{"seed": ' + b"9" * 5000 + b"}"),
        *(b'{"prompt": "\\ud800"}', b'{"prompt": ["\\uDFFF"]}', b'{"\\ud800": 1}'),
    ],
)
def test_a_body_that_is_no_object_of_json(body):
    refused(lambda: read_json(body))


def test_a_body():
    assert read_json('{"prompt": "\\ud83d\\ude00 é", "seed": null}'.encode()) == {"prompt": "😀 é", "seed": None}


@pytest.mark.parametrize(
    ("name", "values"),
    {
        "prompt": [None, 1, [], [[]], [1.5], [True], ["a", 1], [[1], "b", []], {}],
        "model": [1, ["a"]],
        "stream": [1, "true"],
        "stream_options": [[], {"include_usage": 1}, {"include_usages": True}, {"include_obfuscation": True}],
        "n": [0, 129, 1.0, True, "1", 10**30],
        "max_tokens": [0, -1, 2**31, 1.5, float("nan")],
        "temperature": [-0.1, 2.1, "1", float("nan"), float("inf"), 10**400],
        "top_p": [-0.1, 1.1],
        "top_k": [-2, 1.5],
        "seed": [2**63, 1.5],
        "stop": [1, [1], [""], ["a", ""], ["a"] * 17, "a" * 257],
        "presence_penalty": [2.5],
        "frequency_penalty": [-2.5],
        "repetition_penalty": [0, -1],
        "logit_bias": [[], {"a": 1}, {"1": 101}, {"1": "a"}, {"-1": 1}, {"1": True}, {"9" * 20: 1}],
        "echo": [1],
        "logprobs": [21, -1, True],
        "suffix": ["a"],
        "best_of": [2, True],
        "tools": [[]],
        "max_token": [1],
        "user": [1],
        "min_p": [0.1, False],
        "stop_token_ids": [[1]],
    }.items(),
)
def test_a_value_that_is_not_allowed_is_named(name, values):
    for value in values:
        error = refused(lambda value=value: asked(**{name: value}))
        assert error["param"] == name
        assert name in error["message"]
        json.dumps(error)


@pytest.mark.parametrize(
    ("name", "values"),
    {
        "messages": [[], "a", [1], [{}], [{"role": 1}], [{"role": "user", "content": 1}], [{"content": "a"}]],
        "logprobs": [1],
        "top_logprobs": [1, 21],
        "echo": [True],
        "prompt": ["a"],
        "max_completion_tokens": [0],
        "max_tokens": [3],
        "store": [True, 0],
        "response_format": [{"type": "json_object"}, "text"],
        "tools": [[{}]],
        "tool_choice": ["required", {}],
        "modalities": [["text", "audio"]],
        "metadata": ["a"],
    }.items(),
)
def test_of_a_chat(name, values):
    for value in [*values, *([[{"role": "user", "content": [{"type": "image_url"}]}]] if name == "messages" else [])]:
        given = {"max_completion_tokens": 2, name: value}
        assert refused(lambda given=given: asked(True, **given))["param"] == name


def test_values_that_clients_send_by_default_change_nothing():
    either = {"user": "me", "stop": "", "min_p": 0, "stop_token_ids": [], "stream": False, "logit_bias": {}}
    either |= {"stream_options": {"include_usage": False, "include_obfuscation": False}, "return_token_ids": False}
    assert asked(**either, best_of=1, suffix="", echo=False) == asked()
    chat = either | {"metadata": {"a": "b"}, "store": False, "service_tier": "auto", "top_logprobs": 0, "tools": []}
    chat |= {"tool_choice": "none", "parallel_tool_calls": True, "response_format": {"type": "text"}}
    chat |= {"echo": False, "chat_template_kwargs": {}}
    assert asked(True, **chat, modalities=["text"], prompt_cache_key="a", safety_identifier="b") == asked(True)
    assert asked(True, max_tokens=3, max_completion_tokens=3) == asked(True, max_tokens=3)
    assert asked(True, stream_options={"include_usage": True}).stream is False
    assert asked(spaces_between_special_tokens=True) == asked()
    nulls = {"stream_options": {"include_usage": None}, "response_format": {"type": "text", "json_schema": None}}
    assert asked(True, **nulls, user=None) == asked(True)
    assert 0 < asked(top_p=0).sampling.nucleus_p < 1e-6  # only the most likely token, as in OpenAI's API


def test_a_value_that_is_not_neutral_is_refused_with_those_that_are():
    message = refused(lambda: asked(True, tools=[{"type": "function"}], tool_choice="required"))["message"]
    assert 'tools=[{"type": "function"}] is not supported; allowed: [], which changes nothing' in message
    assert 'tool_choice="required" is not supported; allowed: "none" or "auto"' in message


def test_all_mistakes_are_named_at_once():
    message = refused(lambda: asked(max_token=3, n=0, stream="yes"))["message"]
    assert "max_token is not a parameter that this server supports; nearest: max_tokens" in message
    assert "n=0, not an integer in [1, 128]" in message
    assert 'stream="yes"' in message


def test_what_is_left_out():
    found = asked()
    assert found.sampling == DEFAULT
    assert (found.n, found.most, found.max_tokens, found.seed, found.stop) == (1, 16, None, None, ())
    assert found.asked == (0.0, 0.0, 1.0, {}, False, False)
    chat = asked(True)
    assert (chat.most, chat.max_tokens, chat.prompts) == (None, None, [CHAT["messages"]])


def test_what_is_given():
    found = asked(
        **{"temperature": 0, "top_p": 0.3, "top_k": -1, "seed": -1, "stop": "x", "logit_bias": {"3": -100}},
        **{"presence_penalty": 1, "frequency_penalty": 0.5, "repetition_penalty": 1.2, "echo": True, "logprobs": 0},
        max_tokens=0,
    )
    assert found.sampling == Sampling(0, 0, 0.3)
    assert (found.seed, found.stop, found.likeliest, found.max_tokens) == (2**32 - 1, ("x",), 0, 0)
    assert found.asked == (1, 0.5, 1.2, {3: -100.0}, True, True)
    assert asked(prompt=[[1, 2], "b"]).prompts == [[1, 2], "b"]
    assert asked(prompt=[1, 2]).prompts == [[1, 2]]
    assert asked(True, logprobs=True, max_completion_tokens=3).likeliest == 0


def test_tokens(tmp_path, monkeypatch):
    monkeypatch.delenv("TRAINER_SERVE_TOKEN", raising=False)
    assert read_tokens("", "127.0.0.1") == read_tokens("", "localhost") == read_tokens("", "::1") == []
    for host in ("0.0.0.0", "10.1.2.3", "example.org"):
        with pytest.raises(ValueError, match="others can reach it, so requests must have a token: set token_file"):
            read_tokens("", host)
    monkeypatch.setenv("TRAINER_SERVE_TOKEN", "from-the-environment")
    assert read_tokens("", "0.0.0.0") == ["from-the-environment"]
    file = tmp_path / "tokens"
    for text, said in (("\n", "contains no tokens"), ("short\n", "8 or more"), ("a token with\tspace", "visible")):
        file.write_text(text)
        with pytest.raises(ValueError, match=said):
            read_tokens(str(file), "127.0.0.1")
    file.write_text("first-token\n\nsecond-token\n")
    access = Access(read_tokens(str(file), "0.0.0.0"))
    assert access.owner("Bearer first-token", "anything") == "0"
    assert access.owner("bearer second-token", None) == "1"
    for wrong in (None, "", "Bearer", "Bearer first-toke", "Basic first-token", "Bearer first-token2", "Bearer é"):
        with pytest.raises(ApiError) as raised:
            access.owner(wrong, None)
        assert (raised.value.status, raised.value.headers) == (401, {"www-authenticate": "Bearer"})


def test_a_page_of_another_site_does_not_reach_a_server_without_tokens():
    access = Access([])
    assert {access.owner(None, host) for host in ("127.0.0.1:8000", "localhost", "[::1]:80", "127.0.0.2:1")} == {""}
    for host in ("example.org", "example.org:8000", "10.0.0.1", "", None, "localhost.example.org"):
        assert "accepts only the hosts localhost" in refused(lambda host=host: access.owner(None, host))["message"]

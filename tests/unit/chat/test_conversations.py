"""Conversations in records: accepted forms, users' functions, and what is refused."""

import json
import linecache
import pickle
import sys

import numpy as np
import pytest
from chat_cases import PLACE, SAID

from trainer.chat.conversations import Formatter, conversation
from trainer.config.errors import UserError
from trainer.data.documents import Record


def read(*values, columns=("messages",), formatter=None):
    (messages, tools), replaced = conversation(Record(PLACE, values), columns, formatter)
    return messages, tools, replaced


@pytest.mark.parametrize(
    ("values", "columns"),
    [
        ([SAID], ["messages"]),
        ([json.dumps(SAID)], ["messages"]),
        ([json.dumps(SAID).encode()], ["messages"]),
        ([np.array([json.dumps(SAID).encode()], object)], ["messages"]),
        ([{"role": ["user", "assistant"], "content": ["Hi", "Yo"]}], ["messages"]),
        ([{"role": np.array([b"user", b"assistant"]), "content": np.array([b"Hi", b"Yo"])}], ["messages"]),
        ([[{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yo"}]], ["conversations"]),
        ([[{**message, "tool_calls": None, "name": None} for message in SAID]], ["messages"]),
        ([[{**message, "content": [{"type": "text", "text": message["content"]}]} for message in SAID]], ["messages"]),
        (["Hi", "Yo"], ["prompt", "completion"]),
        ([b"Hi", np.array([b"Yo"], object)], ["question", "answer"]),
        ([SAID[:1], SAID[1:]], ["prompt", "completion"]),
        ([SAID[:1], "Yo"], ["prompt", "completion"]),
        (["Hi", "Yo", None], ["prompt", "completion", "tools"]),
    ],
)
def test_forms_of_a_conversation(values, columns):
    assert read(*values, columns=columns) == (SAID, None, 0)


@pytest.mark.parametrize("values", [(None,), ([],), ("",), (b" ",)])
def test_a_conversation_without_messages(values):
    assert read(*values) == ([], None, 0)
    assert read("Hi", *values, columns=("prompt", "completion"))[0] == [] or values == (b" ",)


def test_tools_and_fields_reach_the_template():
    message = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1.5}}}]}
    messages, tools, _ = read([message], '[{"name": "f"}]', columns=("messages", "tools"))
    assert messages == [message]
    assert tools == [{"name": "f"}]


def test_a_content_of_null_stays():
    message = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    assert read([message | {"name": None}])[0] == [message]


def test_other_fields_of_sharegpt_and_tools_of_a_function_reach_the_template(functions):
    assert read([{"from": "gpt", "value": "Yo", "weight": 1}])[0] == [{**SAID[1], "weight": 1}]
    formatter = Formatter("my_functions:with_tools")
    assert read("Hi", columns=("q",), formatter=formatter)[1] == [{"name": "f"}]


def test_characters_that_are_not_text_are_replaced_and_counted():
    messages, _, replaced = read([{"role": "user", "content": "a\ud83d\ufdd0b"}])
    assert messages[0]["content"] == "a\ufffd\ufffdb"
    assert replaced == 2


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("Hi", r"column messages holds the text 'Hi', not messages.*\[prompt,completion\].*formatting_func_path="),
        (3, "column messages holds int, not a list of messages"),
        (["Hi", "Yo"], r"messages\[0\] is 'Hi', not a message with role and content"),
        ([{"rôle": "user", "content": "x"}], r"messages\[0\] has no role.*it has rôle, content"),
        ([{"role": 3, "content": "x"}], "has no role"),
        ([{"role": "user", "content": 3}], "content of type int"),
        ([{"from": "observation", "value": "x"}], "has from=observation: from must be one of human, user, gpt"),
        ([{"from": ["human"], "value": "x"}], "has from=.*: from must be one of human, user, gpt"),
        ([{"from": "human", "text": "x"}], "and value must exist"),
        ([{"role": "user", "content": [{"type": "image"}]}], "content of type image; only text"),
        (b"\xff[]", "not UTF-8"),
        ({"role": ["user"], "content": []}, "holds dict"),
    ],
)
def test_what_is_no_conversation_names_the_record(value, said):
    with pytest.raises(UserError, match=f"^{PLACE}: .*{said}"):
        read(value)


@pytest.mark.parametrize("path", ["my_functions:pairs", "my_functions.pairs", "my_functions:plain"])
def test_a_function_of_ones_own(functions, path):
    formatter = pickle.loads(pickle.dumps(Formatter(path)))
    assert read("Hi", "Yo", columns=("q", "a"), formatter=formatter)[0] == SAID


def test_the_arguments_of_a_function(functions):
    (functions / "t.json").write_text('{"PROMPT": "Q: {q}"}')
    with pytest.raises(UserError, match=r"my_functions:plain failed: TypeError: .* argument 'x'$"):
        read("Hi", "Yo", columns=("q", "a"), formatter=Formatter("my_functions:plain", {"x": 1}))
    formatter = Formatter("my_functions:pairs", {"template_path": str(functions / "t.json"), "suffix": "!"})
    messages = read("Hi", "Yo", columns=("q", "a"), formatter=formatter)[0]
    assert [message["content"] for message in messages] == ["Q: Hi", "Yo!"]
    before = formatter.identity
    source = (functions / "my_functions.py").read_text()
    (functions / "my_functions.py").write_text(source.replace("+ suffix", "+ suffix + ''"))
    del sys.modules["my_functions"]
    linecache.clearcache()
    assert Formatter(formatter.path, formatter.kwargs).identity != before
    (functions / "my_functions.py").write_text(source)
    (functions / "t.json").write_text('{"PROMPT": "{q}"}')
    assert Formatter(formatter.path, formatter.kwargs).identity != before


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("not_there:f", "cannot be imported"),
        ("broken:f", "cannot be imported"),
        ("my_functions:failing", rf"^{PLACE}: my_functions:failing failed: KeyError: 'gone' \(.*s.py, line 12\)"),
        ("my_functions:gone", "has no function gone"),
        ("my_functions:number", "has no function number"),
        ("my_functions:wrong", "returned text; it must return a dict with messages"),
    ],
)
def test_a_function_that_does_not_fit(functions, path, said):
    formatter = Formatter(path)
    with pytest.raises(UserError, match=said):
        read("Hi", "Yo", columns=("q", "a"), formatter=formatter)

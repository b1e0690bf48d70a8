"""Conversations stored by Arrow are rendered like the same rows in JSON lines."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from sample_data import config_of, write_records

from trainer.chat.conversations import conversation, preference
from trainer.chat.template import Template
from trainer.config.errors import UserError
from trainer.data.chat_files import ChatTemplate
from trainer.data.documents import Record
from trainer.data.sources import open_source
from trainer.data.tables import ParquetPart

USER, ASKED = {"role": "user", "content": "Where?"}, {"type": "string", "enum": ["Paris"]}


def called(name: str, **arguments: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": name, "arguments": arguments}}]}


def tool(name: str, **properties: Any) -> dict[str, Any]:
    return {"function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


WITHOUT = {"role": "assistant", "tool_calls": [{"function": {"name": "h", "arguments": {"a": 2}}}]}
ROWS = [
    {"messages": [USER, called("f", city="Paris")], "tools": [tool("f", city=ASKED), tool("g")]},
    {
        "messages": [USER, called("g", a=1), {"role": "tool", "content": "1", "name": "g"}],
        "tools": [tool("g", a=ASKED)],
    },
    {"messages": [USER, called("g"), {"role": "assistant", "content": "Hm"}], "tools": None},
    {"messages": [USER, WITHOUT], "tools": []},
]
# Reads messages in all the ways that models' templates do.
TEMPLATE = """\
{% for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}{% for m in messages %}{{ m.role }}: {% if m.content is none %}none{% else %}{{ m.content }}{% endif %}
{% if 'content' in m %}+{% endif %}{% if m.tool_calls is defined %}{{ m.tool_calls | tojson }}{% endif %}
{% for key in m %}{{ key }},{% endfor %}{{ m | tojson }}
{% endfor %}"""


def records(path: Path, kind: str, columns: Sequence[str], rows: Sequence[dict[str, Any]]) -> list[Record]:
    """Returns the records of `rows` after a round trip through a file or folder in the format `kind`."""
    keys: dict[str, Any] = {"dataset_type": "grain", "grain_file_type": kind, "grain_train_files": path / "rows"}
    if kind in ("saved", "arrow"):
        import datasets

        table = datasets.Dataset.from_list(list(rows))
        table.save_to_disk(path / "rows")
        keys = {"dataset_type": "hf", "hf_path": path / "rows"}
        if kind == "arrow":
            keys = {"dataset_type": "hf", "hf_path": "arrow", "hf_train_files": path / "rows/*.arrow"}
    else:
        write_records(path / "rows", kind, list(rows))
    keys |= {"use_dpo": True, "packing": False} if "chosen" in columns else {"use_sft": True}
    keys |= dict.fromkeys(("train_data_columns", "eval_data_columns"), f"[{','.join(columns)}]")
    keys["held_out_share"] = 0
    return list(open_source(config_of(path / "cache", **keys)).train[0].records())


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "saved", "arrow"])
def test_conversations_are_rendered_as_their_rows_in_json(tmp_path: Path, kind: str):
    template = Template(ChatTemplate(TEMPLATE, "test"), {})
    columns = ("messages", "tools")
    found = [conversation(record, columns, None)[0] for record in records(tmp_path, kind, columns, ROWS)]
    meant = [conversation(Record("test", (row["messages"], row["tools"])), columns, None)[0] for row in ROWS]
    texts = [template.render(*one).text for one in found]
    assert texts == [template.render(*one).text for one in meant]
    assert '"arguments": {"city": "Paris"}' in texts[0]
    assert '"arguments": {}' in texts[2]
    assert '{"function": {"name": "g", "parameters": {"type": "object", "properties": {}}}}' in texts[0]
    assert all("assistant: none" in text for text in (texts[0], texts[3]))


@pytest.mark.parametrize("kind", ["parquet", "saved"])
def test_pairs_have_no_keys_of_other_rows(tmp_path: Path, kind: str):
    calls = called("f", city="Paris"), called("g", a=1)
    rows = [{"prompt": [USER], "chosen": [one], "rejected": [other]} for one, other in (calls, calls[::-1])]
    found = records(tmp_path, kind, ("prompt", "chosen", "rejected"), rows)
    pair, _ = preference(found[0], ("prompt", "chosen", "rejected"), None)
    assert pair.chosen[1]["tool_calls"] == [{"function": {"name": "f", "arguments": {"city": "Paris"}}}]
    assert pair.rejected[1]["tool_calls"] == [{"function": {"name": "g", "arguments": {"a": 1}}}]


def test_nulls_that_a_user_wrote_stay(tmp_path: Path):
    schema = tool("f", city={"default": None, "enum": ["a", None]})
    rows = [{"messages": [USER, called("f", city=None)], "tools": [schema]}]
    (record,) = records(tmp_path, "jsonl", ("messages", "tools"), rows)
    (messages, tools), _ = conversation(record, ("messages", "tools"), None)
    assert (messages[1]["tool_calls"], tools) == (rows[0]["messages"][1]["tool_calls"], [schema])
    # Arrow may store JSON text, as a whole column or in single fields.
    called_as_text = USER | {"tool_calls": [{"function": {"arguments": '{"city": null}'}}]}
    texts = [{"messages": json.dumps(rows[0]["messages"]), "tools": json.dumps([schema])}]
    (tmp_path / "text").mkdir()
    (record,) = records(tmp_path / "text", "parquet", ("messages", "tools"), texts)
    assert conversation(record, ("messages", "tools"), None)[0] == (messages, tools)
    (tmp_path / "field").mkdir()
    (record,) = records(tmp_path / "field", "parquet", ("messages",), [{"messages": [called_as_text, USER]}])
    assert record.values[0] == [called_as_text, USER]


def test_maps_and_lists_of_arrow(tmp_path: Path):
    item = pyarrow.struct([("a", pyarrow.int64()), ("b", pyarrow.int64())])
    fields = [("role", pyarrow.string()), ("arguments", pyarrow.map_(pyarrow.string(), item))]
    rows = [[{"role": "x", "arguments": [("k", {"a": 1}), ("n", None)]}, None], [{"role": "y"}, {"arguments": []}]]
    table = pyarrow.table({"messages": pyarrow.array(rows, pyarrow.large_list(pyarrow.struct(fields)))})
    pyarrow.parquet.write_table(table, tmp_path / "rows")
    found = [record.values[0] for *_, record in ParquetPart(tmp_path / "rows", ("messages",)).read()]
    assert found == [[{"role": "x", "arguments": {"k": {"a": 1}, "n": None}}, None], [{"role": "y"}, {"arguments": {}}]]


def test_text_of_the_type_json(tmp_path: Path):
    texts = [['{"a": null}', None], ["null", "[1]"]]
    kind = pyarrow.struct([("p", pyarrow.json_()), ("n", pyarrow.int64())])
    of_field = pyarrow.StructArray.from_arrays(
        [pyarrow.array(["{}", None]).cast(pyarrow.json_()), pyarrow.array([None, 1])], fields=list(kind)
    )
    items = pyarrow.array([text for row in texts for text in row]).cast(pyarrow.json_())
    table = pyarrow.table({"a": pyarrow.ListArray.from_arrays([0, 2, 4], items), "b": of_field})
    pyarrow.parquet.write_table(table, tmp_path / "rows")
    found = [record.values for *_, record in ParquetPart(tmp_path / "rows", ("a", "b")).read()]
    assert found == [([{"a": None}, None], {"p": {}}), ([None, [1]], {"n": 1})]
    pyarrow.parquet.write_table(pyarrow.table({"a": pyarrow.array(["{"]).cast(pyarrow.json_())}), tmp_path / "rows")
    with pytest.raises(UserError, match=r"rows is damaged, or not .*text of the JSON type"):
        list(ParquetPart(tmp_path / "rows", ("a",)).read())

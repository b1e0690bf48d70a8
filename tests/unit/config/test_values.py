"""Values are read by the type of the default, on the command line the same as in a yml."""

import pytest
import yaml

from trainer.config.schema import Key
from trainer.config.values import read_node, read_text

INT, FLOAT, BOOL, STR = (Key("x", None, kind) for kind in (int, float, bool, str))
WORDS, NUMBERS, ANY = (Key("x", [], list, item=item) for item in (str, int, object))
DICT = Key("x", {}, dict)
MAYBE_WORDS = Key("x", None, list, item=str, optional=True)
MAYBE = Key("x", None, float, optional=True)


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        (INT, "3", 3),
        (INT, "-1", -1),
        (INT, "1_000", 1000),
        (INT, "1e3", 1000),
        (INT, "8.0", 8),
        (INT, "9007199254740993", 9007199254740993),
        (FLOAT, "1e-3", 1e-3),
        (FLOAT, "3", 3.0),
        (FLOAT, "1_0.5", 10.5),
        (FLOAT, "inf", float("inf")),
        *((BOOL, word, True) for word in ("true", "True", "TRUE", "yes", "on", "1", "t", "y")),
        *((BOOL, word, False) for word in ("false", "False", "no", "off", "0", "f", "n")),
        (STR, "123", "123"),
        (STR, "007", "007"),
        (STR, "10:30", "10:30"),
        (STR, "none", "none"),
        (STR, "true", "true"),
        (STR, "", ""),
        (STR, "def ", "def "),
        (STR, "a=b, [c", "a=b, [c"),
        (STR, '"quoted"', "quoted"),
        (STR, "'it''s'", "it's"),
        (STR, '"tab\\t"', "tab\t"),
        (STR, "'a' or 'b'", "'a' or 'b'"),
        (WORDS, "[norm,bias]", ["norm", "bias"]),
        (WORDS, "[norm, 'a,b', 12]", ["norm", "a,b", "12"]),
        (WORDS, "norm", ["norm"]),
        (WORDS, ".*norm.*", [".*norm.*"]),
        (WORDS, "'x{1,2}'", ["x{1,2}"]),
        (WORDS, "", []),
        (WORDS, "[]", []),
        (NUMBERS, "[1, 1e3]", [1, 1000]),
        (ANY, "[[a, []], [b, c], [d, null], 1]", [["a", []], ["b", "c"], ["d", None], 1]),
        (DICT, "{a: 1, b: [c]}", {"a": 1, "b": ["c"]}),
        *((MAYBE, word, None) for word in ("", "none", "None", "null", "~")),
        (MAYBE, "0.2", 0.2),
        *((MAYBE_WORDS, word, None) for word in ("none", "None", "null", "~")),
        (MAYBE_WORDS, "[]", []),
        (MAYBE_WORDS, "", []),
        (MAYBE_WORDS, "[none]", ["none"]),
        (MAYBE_WORDS, "'none'", ["none"]),
    ],
)
def test_text_of_a_command_line(key, text, value):
    read = read_text(key, text)
    assert (read, type(read)) == (value, type(value))


@pytest.mark.parametrize(
    ("key", "text", "message"),
    [
        (INT, "abc", "not an integer"),
        (INT, "1.5", "not an integer"),
        (INT, "inf", "not an integer"),
        (INT, "nan", "not an integer"),
        (INT, "", "empty, not an integer"),
        (INT, "true", "not an integer"),
        (INT, "[1]", "not an integer"),
        (FLOAT, "nan", "not a number"),
        (FLOAT, "1,5", "not a number"),
        (BOOL, "maybe", "not true or false"),
        (BOOL, "", "not true or false"),
        (BOOL, "2", "not true or false"),
        (WORDS, "norm,bias", "several items without brackets"),
        (WORDS, "[norm", "not valid YAML flow style"),
        (WORDS, "[*norm]", "not valid YAML flow style"),
        (WORDS, "[[a]]", "a list or dict inside the list"),
        (WORDS, "{a: 1}", "not a list"),
        (NUMBERS, "1", "not a list"),
        (NUMBERS, "[a]", "not an integer"),
        (DICT, "[a]", "not a dict"),
        (ANY, "[!!python/name:os.system x]", "not plain YAML"),
        (WORDS, "[!!binary aGVs]", r"not plain YAML \(binary, line 1\)"),
        (WORDS, "[" * 99, "^nested deeper than 24$"),
    ],
)
def test_text_that_is_no_value_says_why(key, text, message):
    with pytest.raises(ValueError, match=message):
        read_text(key, text)


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        (INT, "1e3", 1000),
        (FLOAT, "1e-3", 1e-3),
        (BOOL, "yes", True),
        (STR, "0123", "0123"),
        (STR, "yes", "yes"),
        (STR, "null", ""),
        (STR, "'null'", "null"),
        (WORDS, "norm", ["norm"]),
        (WORDS, "null", []),
        (WORDS, "- a\n- 1e3", ["a", "1e3"]),
        (MAYBE, "null", None),
        (STR, "2001-01-01", "2001-01-01"),
        (STR, "=", "="),
        (WORDS, "[2001-01-01, <<]", ["2001-01-01", "<<"]),
        (FLOAT, "!!float 1e-3", 1e-3),
        (STR, "!!str 3", "3"),
    ],
)
def test_nodes_of_a_yml(key, text, value):
    read = read_node(key, yaml.compose(text))
    assert (read, type(read)) == (value, type(value))


@pytest.mark.parametrize(
    ("key", "text", "tag"),
    [
        (WORDS, "!!timestamp x", "timestamp"),
        (WORDS, "!!python/tuple [a]", "python/tuple"),
        (STR, "!!binary aGVs", "binary"),
        (INT, "!steps 3", "!steps"),
        (MAYBE, "!!timestamp '2001-01-01'", "timestamp"),
    ],
)
def test_a_tag_that_would_be_lost_is_refused(key, text, tag):
    with pytest.raises(ValueError, match=rf"not plain YAML \({tag}, line 1\)"):
        read_node(key, yaml.compose(text))


@pytest.mark.parametrize(("text", "message"), [("[1]", "a list instead"), ("{a: 1}", "a dict instead")])
def test_a_container_is_no_scalar(text, message):
    with pytest.raises(ValueError, match=message):
        read_node(STR, yaml.compose(text))

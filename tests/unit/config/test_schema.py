"""base.yml is the schema: the forms of its comments, and the errors for malformed ones."""

import re
from pathlib import Path

import pytest

from trainer.config.capabilities.layer_keys import ACTIVATIONS
from trainer.config.capabilities.pipeline_keys import OF_PIPELINE
from trainer.config.dump import to_flow
from trainer.config.flags import FLAGS
from trainer.config.keys import Config
from trainer.config.maxtext.base_yml import defaults
from trainer.config.schema import BASE_YML, parse, schema
from trainer.config.tensors import DIMENSIONS, TENSORS, tensors_of

FROM_MAXTEXT = Path(__file__).parents[3] / "docs" / "from-maxtext.md"


def test_every_key_of_base_yml_is_parsed_with_a_section_and_a_doc():
    keys = schema().keys
    assert next(iter(keys)) == "run_name"
    assert len(keys) > 60
    assert all(key.section and key.doc for key in keys.values())


@pytest.mark.parametrize(
    ("name", "kind", "default", "allowed"),
    [
        ("run_name", str, "", "text"),
        ("scan_layers", bool, True, "true or false"),
        ("record_internal_nn_metrics", int, 0, "0, 1"),
        ("learning_rate_schedule_steps", int, -1, "an integer in [1, 2147483647] or -1"),
        ("dropout_rate", float, 0.0, "a number in [0, 1)"),
        ("normalization_layer_epsilon", float, 1e-5, "a number in [1e-37, 3.4e+38]"),
        # With a smaller threshold, the factors of a large logit would underflow to 0 / 0.
        ("qk_clip_threshold", float, 100.0, "a number in [1e-06, 3.4e+38]"),
        ("mu_dtype", str, "", '"", float32, bfloat16'),
        ("adamw_mask", list, None, "a list of str or none"),
        ("trainable_parameters_mask", list, [], "a list of str"),
    ],
)
def test_keys_have_the_type_of_their_default_and_what_the_comment_allows(name, kind, default, allowed):
    key = schema().keys[name]
    assert (key.kind, key.default, key.allowed) == (kind, default, allowed)


def test_keys_without_a_comment_of_their_own_share_the_one_above():
    keys = parse("# ---- A ---\n# Intro.\n\n# Both.\nx: 1\ny: 2\n\n# Alone.\nz: 3\n")
    assert [key.doc for key in keys.keys.values()] == ["Both.", "Both.", "Alone."]
    assert keys.intros == {"A": "Intro."}


def test_an_empty_key_is_optional():
    key = parse("x:  # float or none\n").keys["x"]
    assert (key.kind, key.optional, key.allowed) == (float, True, "a number or none")
    assert key.accepts(None)


@pytest.mark.parametrize(
    ("interval", "inside", "outside"),
    [
        ("[0.5, 1)", [0.5, 0.9], [0.4, 1.0]),
        ("(0, 0.5]", [0.1, 0.5], [0.0, 0.6]),
        ("[0.5, inf) or -1", [0.5, 1e9, -1.0], [0.0, -2.0, float("inf")]),
    ],
)
def test_ranges(interval, inside, outside):
    key = parse(f"x: 0.5  # in {interval}; free text").keys["x"]
    assert all(key.accepts(value) for value in inside)
    assert not any(key.accepts(value) for value in outside)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x: 1  # on of 1, 2", "none of the forms"),
        ("x: 1  # in 0, 1", "none of the forms"),
        ("x: 1  # in [3, 2]", "is empty"),
        ("x: word  # in [0, 1]", "a range needs a number"),
        ("x: 3  # one of 1, 2", "is not allowed"),
        ("x: 3  # in [0, 1]", "is not allowed"),
        ("x: []", "a list needs a comment"),
        ("x: []  # list of cats", "none of the forms"),
        ("x:", "the type of the default"),
        ("x: true  # one of true", "a choice needs text or a number"),
        ("X y: 1", "cannot read the line"),
    ],
)
def test_a_malformed_line_is_the_developers_mistake(text, message):
    with pytest.raises(ValueError, match=message):
        parse(text)


def test_names_that_code_and_base_yml_share_agree():
    keys, text = schema().keys, BASE_YML.read_text()
    assert f"one or two of {', '.join(ACTIVATIONS)}" in text
    assert set(FLAGS) <= set(keys)
    rules = {name for name, _ in keys["logical_axis_rules"].default}
    assert rules == {"activation_batch", *DIMENSIONS, *OF_PIPELINE}
    of_experts = tensors_of(Config({"decoder_block": "mixtral", "interleave_moe_layer_step": 1}))
    assert {name for names in (*TENSORS.values(), *of_experts.values()) for name in names} == rules - {*OF_PIPELINE}
    assert set(DIMENSIONS.values()) <= set(keys)


def test_the_page_for_maxtext_users_has_the_defaults_of_both_files():
    _, _, rest = FROM_MAXTEXT.read_text().partition("## Defaults")
    table, _, _ = rest.partition("## Presets")
    rows = re.findall(r"^\| `(\w+)` \| `(.+)` \| `(.+)` \|$", table, re.MULTILINE)
    assert [(name, theirs) for name, theirs, _ in rows] == [(k, to_flow(value)) for k, value in defaults().items()]
    assert [(name, ours) for name, _, ours in rows] == [
        (name, to_flow(schema().keys[name].default)) for name, *_ in rows
    ]

"""Reading and writing config.json, and the arithmetic of layouts."""

import dataclasses
import itertools
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from checkpoint_cases import FAMILIES, ROPES, config_of, hf_config, pairs

from trainer.config.errors import UserError
from trainer.config.family import import_facts
from trainer.leaves.source import within
from trainer.models.huggingface import Layout, reordered, transposed
from trainer.models.llama2 import family as llama2
from trainer.weights.huggingface.config_json import config_json, length_notes, model_keys
from trainer.weights.model_keys import described, model_config

GOLDENS = Path(__file__).parents[2] / "goldens"
OF_A_GUIDE = {"exaone4": "docs.guides.exaone4.facts:FACTS"}
CASES = [(block, rope) for block in FAMILIES for rope in ROPES if block != "phi3" or rope == "default"]


@pytest.mark.parametrize(("block", "rope"), CASES)
def test_config_json_says_the_model(block, rope):
    config = config_of(decoder_block=block, **FAMILIES[block], **ROPES[rope])
    assert model_keys(hf_config(config), "") == described(config)
    # The written file is read back with the same result.
    assert model_keys(config_json(config, "float32", {}), "") == described(config)


@pytest.mark.parametrize("case", sorted(path.parent.name for path in GOLDENS.glob("*/config.json")))
def test_every_value_of_config_json_has_the_type_that_transformers_declares(case):
    """transformers 5 refuses other types. The planted values are integers where floats are expected."""
    neutral = {"eos_token_id": [1, 2], "bos_token_id": 1, "initializer_range": 1, "max_position_embeddings": 64}
    data = config_json(golden(case), "float32", neutral)
    declared = json.loads((GOLDENS / "declarations.json").read_text())[data["model_type"]]
    assert len(declared.keys() & data.keys()) > 10
    for name, value in data.items():
        kinds = declared.get(name, "any").split(" | ")
        assert "any" in kinds or kind_of(value) in kinds, f"{name}={value!r}, declared as {declared[name]}"


def golden(case):
    """Returns the configuration of a golden file."""
    data = json.loads((GOLDENS / case / "config.json").read_text())
    block = OF_A_GUIDE.get(case, "")
    import_facts(block)
    words = [f"decoder_block={block}"] if block else []
    return model_config(model_keys(data, "", block), words, "")


def kind_of(value):
    if isinstance(value, list):
        return f"list[{type(value[0]).__name__ if value else 'int'}]"
    return "None" if value is None else type(value).__name__


def test_the_number_of_experts_under_each_of_its_names():
    config = config_of(decoder_block="mixtral", **FAMILIES["mixtral"])
    data = hf_config(config)
    count = data.pop("num_local_experts")
    for name in ("num_local_experts", "num_experts", "n_routed_experts"):
        assert model_keys(data | {name: count}, "")["num_experts"] == count


def test_a_head_dim_of_latent_attention_is_that_of_rope():
    config = golden("deepseek-v3")
    data = config_json(config, "float32", {})
    assert model_keys(data | {"head_dim": config.qk_rope_head_dim}, "") == described(config)
    with pytest.raises(UserError, match="head_dim=99, which is not qk_rope_head_dim"):
        model_keys(data | {"head_dim": 99}, "")


def test_a_family_by_import_path_is_known_by_its_model_type(monkeypatch):
    tables = llama2.FAMILY.hugging_face[0]._replace(model_type="mine")
    own = SimpleNamespace(family=dataclasses.replace(llama2.FAMILY, hugging_face=[tables]))
    monkeypatch.setitem(sys.modules, "mine", own)
    config = config_of(decoder_block="mine:family", **FAMILIES["llama2"])
    data = config_json(config, "float32", {})
    assert data["model_type"] == "mine"
    assert model_keys(data, "", "mine:family") == described(config)
    with pytest.raises(
        UserError,
        match=r"model_type=mine is not known; known: .*llama, .*; for a family of your own, give decoder_block=",
    ):
        model_keys(data, "")


def test_a_family_names_the_fields_of_epsilon_and_of_factors(monkeypatch):
    tables = llama2.FAMILY.hugging_face[0]._replace(
        model_type="mine",
        epsilon="layer_norm_eps",
        sizes={"embedding_multiplier": "embedding_multiplier"},
        powers={"logits_multiplier": ("logits_scaling", -1), "query_pre_attn_scalar": ("attention_multiplier", -2)},
    )
    own = SimpleNamespace(family=dataclasses.replace(llama2.FAMILY, hugging_face=[tables]))
    monkeypatch.setitem(sys.modules, "mine", own)
    keys = {"embedding_multiplier": 12.0, "logits_multiplier": 0.625, "query_pre_attn_scalar": 0.3**-2}
    config = config_of(decoder_block="mine:family", **FAMILIES["llama2"], **keys)
    data = config_json(config, "float32", {})
    assert "rms_norm_eps" not in data
    assert data["layer_norm_eps"] == config.normalization_layer_epsilon
    found = [data[name] for name in ("embedding_multiplier", "logits_scaling", "attention_multiplier")]
    assert found == [12, 1.6, 0.3]
    again = model_config(model_keys(data, "", "mine:family"), ["decoder_block=mine:family"], "")
    assert config_json(again, "float32", {}) == data
    for field in ("layer_norm_eps", "logits_scaling"):
        with pytest.raises(UserError, match=f'{field}="x", not a number'):
            model_keys(data | {field: "x"}, "", "mine:family")
    with pytest.raises(UserError, match=r"residual_multiplier=2\.0"):
        config_json(config_of(decoder_block="mine:family", residual_multiplier=2.0), "float32", {})


def test_the_old_form_of_rope_says_the_same():
    config = config_of(decoder_block="llama2", **FAMILIES["llama2"], **ROPES["llama3.1"])
    data = hf_config(config)
    rope = data.pop("rope_parameters")
    data["rope_theta"] = rope.pop("rope_theta")
    rope["type"] = rope.pop("rope_type")
    assert model_keys(data | {"rope_scaling": rope}, "") == described(config)


def test_what_config_json_leaves_out_follows_from_the_rest():
    config = config_of(decoder_block="llama2", **FAMILIES["llama2"], head_dim=4, base_num_kv_heads=4)
    data = hf_config(config)
    for name in ("head_dim", "num_key_value_heads", "rope_parameters", "tie_word_embeddings", "rms_norm_eps"):
        del data[name]
    assert model_keys(data, "") == described(config) | {"normalization_layer_epsilon": 1e-6}
    assert (
        model_keys(data | {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "")[
            "original_max_position_embeddings"
        ]
        == data["max_position_embeddings"]
    )
    # Mistral's class has a window by default, unless the field is null.
    assert model_keys(data | {"model_type": "mistral"}, "")["sliding_window_size"] == 4096
    assert model_keys(data | {"model_type": "mistral", "sliding_window": None}, "")["attention_type"] == "global"


@pytest.mark.parametrize(
    ("changes", "window"),
    [
        ({}, 0),
        ({"use_sliding_window": True, "sliding_window": 5}, 0),  # max_window_layers defaults to 28
        ({"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}, 5),
        ({"use_sliding_window": True, "sliding_window": 5, "layer_types": ["sliding_attention"] * 2}, 5),
    ],
)
def test_windows_of_qwen3(changes, window):
    config = config_of(decoder_block="qwen3", **FAMILIES["qwen3"])
    assert model_keys(hf_config(config, **changes), "").get("sliding_window_size", 0) == window


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "hidden_act=gelu"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type=dynamic"),
        ({"rope_scaling": {"rope_type": "linear"}}, "requires factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "short_factor": [1]}}, "short_factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.5}}, "attention_factor=1.5"),
        ({"rope_parameters": {"rope_theta": 0.5}}, "rope_theta=0.5"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}, "full_attention and sliding"),
        (
            {"model_type": "gpt2"},
            "known: deepseek_v3, kimi_k2, deepseek_v2, gemma, gemma2, gemma3_text, glm4, glm, glm4_moe, glm4_moe_lite",
        ),
        # Fields of another family, and fields that no family knows.
        ({"attn_logit_softcapping": 30.0}, "attn_logit_softcapping=30.0"),
        ({"residual_multiplier": 0.5}, "residual_multiplier=0.5"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [0]}, "mlp_only_layers="),
        ({"model_type": "mixtral", "router_jitter_noise": 0.1}, "router_jitter_noise=0.1"),
        ({"hidden_size": None}, "hidden_size"),
        ({"rms_norm_eps": "x"}, 'rms_norm_eps="x", not a number in'),
        ({"rope_scaling": "linear"}, 'rope_scaling="linear", not an object'),
        ({"head_dim": "16"}, 'head_dim="16", not an integer in'),
        ({"tie_word_embeddings": "false"}, 'tie_word_embeddings="false", not true or false'),
        ({"num_attention_heads": True}, "num_attention_heads=true, not an integer in"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, 'rope_scaling: factor="2", not a number in'),
        ({"model_type": ["llama"]}, "model_type="),
        # transformers then also attends to later positions.
        ({"is_causal": False}, "is_causal=false"),
        ({"is_causal": None}, "is_causal=null"),
        ({"model_type": "mixtral", "num_local_experts": 4, "num_experts": 8}, "num_local_experts=4 and num_experts=8"),
        (
            {"model_type": "mistral", "sliding_window": 5, "layer_types": ["full_attention"] * 2},
            "layer_types of full_attention with sliding_window=5",
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16}}
            | {"original_max_position_embeddings": 32},
            "two values of original_max_position_embeddings, 16 in RoPE and 32",
        ),
        ({"bos_token_id": [1]}, "bos_token_id="),
    ],
)
def test_what_no_key_says_is_refused(changes, named):
    config = config_of(decoder_block="qwen3", **FAMILIES["qwen3"])
    with pytest.raises(UserError, match=named):
        model_keys(hf_config(config, **changes), "config.json")


@pytest.mark.parametrize(
    ("block", "keys", "named"),
    [
        ("llama2", {"attn_logits_soft_cap": 30.0}, "attn_logits_soft_cap=30"),
        ("llama2", {"final_logits_soft_cap": 30.0}, "final_logits_soft_cap=30"),
        ("llama2", {"attention_type": "local_sliding", "sliding_window_size": 4}, "attention_type=local_sliding"),
        ("llama2", {"use_qk_norm": True}, "use_qk_norm=True"),
        ("llama2", {"mlp_activations": "[silu]"}, "mlp_activations"),
        ("llama2", {"logits_via_embedding": True}, "normalize_embedding_logits=True"),
        ("llama2", {"rope_min_timescale": 2}, "rope_min_timescale=2"),
        ("llama2", {"base_emb_dim": 18}, "base_emb_dim=18"),
        ("qwen3", {"use_qk_norm": False}, "use_qk_norm=False"),
    ],
)
def test_what_config_json_can_not_say_is_refused(block, keys, named):
    config = config_of(decoder_block=block, **FAMILIES[block] | keys)
    with pytest.raises(UserError, match=named):
        config_json(config, "float32", {})


def test_neutral_keys_are_carried_over():
    config = config_of(decoder_block="llama2", **FAMILIES["llama2"])
    data = config_json(config, "bfloat16", {"eos_token_id": 7, "max_position_embeddings": 333})
    assert (data["eos_token_id"], data["max_position_embeddings"], data["torch_dtype"]) == (7, 333, "bfloat16")
    assert config_json(config, "float32", {})["max_position_embeddings"] == config.max_target_length


@pytest.mark.parametrize(
    ("rope", "said", "length", "note"),
    [
        ("default", None, 128, "max_position_embeddings=128 is written.*max_target_length"),
        ("default", 333, 333, None),
        ("llama3.1", None, 8 * 32, None),
        ("yarn", None, 4 * 64, None),
        ("yarn", 256, 256, None),
        ("yarn", 128, 128, "max_position_embeddings=128 is not .* = 256: transformers 4 uses 2 as the factor"),
    ],
)
def test_the_context_length_that_is_written(rope, said, length, note):
    config = config_of(decoder_block="llama2", **FAMILIES["llama2"], **ROPES[rope])
    neutral = {} if said is None else {"max_position_embeddings": said}
    assert config_json(config, "float32", neutral)["max_position_embeddings"] == length
    notes = length_notes(config, neutral)
    assert len(notes) == (note is not None)
    assert note is None or re.search(note, notes[0])


@pytest.mark.parametrize("dtype", ["float32", "float16", "uint16"])
@pytest.mark.parametrize("shape", [(1, 1), (16, 5), (35, 17)])
def test_transposed(shape, dtype):
    matrix = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    result = transposed(matrix)
    assert result.flags["C_CONTIGUOUS"]
    np.testing.assert_array_equal(result, matrix.T)


def test_pairs_and_halves():
    x = np.arange(24).reshape(3, 8)
    np.testing.assert_array_equal(reordered(x, 8, pairs=True), pairs(x))
    np.testing.assert_array_equal(reordered(pairs(x), 8, pairs=False), x)
    # Several heads on the last axis.
    merged = pairs(x.reshape(3, 2, 4)).reshape(3, 8)
    np.testing.assert_array_equal(reordered(x, 4, pairs=True), merged)
    np.testing.assert_array_equal(reordered(merged, 4, pairs=False), x)
    assert reordered(x, 0, pairs=True) is x


# Layout and shape of a parameter, and shape of its tensor.
LAYOUTS = [
    ({}, (8,), (8,)),
    ({}, (3, 4), (3, 4)),
    ({"inputs": 1}, (6, 3, 4), (12, 6)),
    ({"inputs": 1}, (6, 12), (12, 6)),  # all heads on one axis
    ({"inputs": 2}, (3, 4, 8), (8, 12)),
    ({"flat": True}, (12,), (12,)),  # a norm over all heads
    ({"flat": True}, (3, 4), (12,)),  # the same, or a bias
]


@pytest.mark.parametrize("head", [0, 4])
@pytest.mark.parametrize(("how", "shape", "theirs"), LAYOUTS)
def test_a_layout_and_its_inverse(how, shape, theirs, head):
    layout = Layout("x", rotated="head_dim", **how)
    assert layout.head({"head_dim": 4}, shape) == 4
    ours = np.random.default_rng(0).normal(size=shape)
    tensor = layout.to_theirs(ours, head)
    assert tensor.shape == layout.shape(shape) == theirs
    np.testing.assert_array_equal(layout.to_ours(tensor, shape, head), ours)
    # An independent computation: convert heads back to halves first.
    halves = ours.copy().reshape(-1, 4)
    if head:
        halves = halves[:, [0, 2, 1, 3]]
    halves = halves.reshape(shape)
    inputs = how.get("inputs", 0)
    by_hand = halves.reshape(np.prod(shape[:inputs], dtype=int), -1).T if inputs else halves.reshape(theirs)
    np.testing.assert_array_equal(tensor, by_hand)
    # Any box can be read.
    for ends in itertools.product(*[[(0, n), (0, n // 2), (n // 2, n), (n - 1, n)] for n in shape]):
        box = tuple(slice(*pair) for pair in ends)
        wide = layout.widened(shape, box, head)
        found = layout.to_ours(tensor[layout.box(shape, wide)], tuple(cut.stop - cut.start for cut in wide), head)
        np.testing.assert_array_equal(found[within(box, wide)], ours[box])


def test_an_axis_that_does_not_consist_of_heads():
    with pytest.raises(UserError, match=r"x: .* heads of head_dim=4 entries, .* last axis, 6, is not a multiple"):
        Layout("x", rotated="head_dim").head({"head_dim": 4}, (3, 6))
    assert Layout("x").head({"head_dim": 4}, (3, 6)) == 0

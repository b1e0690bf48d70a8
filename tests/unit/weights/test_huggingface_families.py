"""config.json and tensors of families with alternating windows, biases, and layers without RoPE."""

import json
import re
import shutil
from pathlib import Path

import pytest
from ml_collections import ConfigDict
from safetensors.numpy import load_file

from trainer import export
from trainer.config.errors import UserError
from trainer.weights.huggingface.config_json import config_json, model_keys
from trainer.weights.model_keys import described, model_config
from trainer.weights.open import open_source

GOLDENS = Path(__file__).parents[2] / "goldens"
CASES = ("qwen2", "gemma", "gemma2", "gemma3", "olmo2", "olmo3", "smollm3", "phi3", "phi3-short", "phi4-mini", "glm")
CASES += ("glm4", "glm4-moe", "glm4-moe-air", "glm4-moe-lite", "granite", "granite4", "granite-moe")
CASES += ("granite-moe-shared", "ministral3", "mistral4", "mistral4-small", "llama4", "llama4-interleaved")
CASES += ("llama4-rest", "gpt-oss")
# Families with unusual keys, layouts or buffers. The other cases differ from them in names only.
IN_OUR_FORMAT = ("phi3-short", "glm4-moe", "granite-moe-shared", "mistral4", "llama4-interleaved", "gemma2", "gpt-oss")
ROPE = {"rope_type": "longrope", "rope_theta": 1e3, "short_factor": [1] * 4, "long_factor": [2.0] * 4}
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 8, "rope_theta": 1e3}
GROWN = YARN | {"llama_4_scaling_beta": 0.2, "mscale": 1.0, "mscale_all_dim": 1.0}
# As in the first files of Phi 3, in transformers 4's format.
LONG = {"rope_parameters": None, "rope_theta": 1e3}
LONG |= {"rope_scaling": {"type": "su", "short_factor": [1] * 4, "long_factor": [2.0] * 4}}
LISTS = {"no_rope_layers": [], "moe_layers": "absent", "layer_types": "absent"}  # as published
FULL, SLIDING = "full_attention", "sliding_attention"


def data_of(case):
    return json.loads((GOLDENS / case / "config.json").read_text())


def keys_of(case, **changes):
    data = {name: value for name, value in (data_of(case) | changes).items() if value != "absent"}
    return model_keys(data, "config.json")


@pytest.mark.parametrize("case", CASES)
def test_an_export_has_the_same_tensors_keys_and_tokenizer(case, tmp_path, capsys):
    """Read and written; IN_OUR_FORMAT converted to our format and back, with heads stored as halves."""
    theirs, back = tmp_path / "theirs", tmp_path / "back"
    ours = tmp_path / "ours" if case in IN_OUR_FORMAT else theirs
    shutil.copytree(GOLDENS / case, theirs)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (theirs / name).write_text("{}")
    if ours != theirs:
        export.main([str(theirs), str(ours), "format=params"])
    export.main([str(ours), str(back), "format=hf"])
    before, after = (load_file(folder / "model.safetensors") for folder in (theirs, back))
    assert before.keys() == after.keys()
    assert all(before[name].tobytes() == after[name].tobytes() for name in before)
    keys = open_source(str(theirs)).keys
    assert open_source(str(back)).keys == keys == described(model_config(keys, [], ""))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert json.loads((back / name).read_text()) == {}


@pytest.mark.parametrize(("case", "word"), [("glm4", "rope_interleave=false"), ("glm4-moe", "rope_interleave=true")])
def test_an_export_refuses_what_the_family_always_has_otherwise(case, word, tmp_path, capsys):
    with pytest.raises(SystemExit):
        export.main([str(GOLDENS / case), str(tmp_path / "out"), "format=params", word])
    assert f"{word}: decoder_block={case.replace('-', '_')} always has rope_interleave=" in capsys.readouterr().err


# transformers 4 writes one top-level RoPE, and the pattern of layers as a number.
OLD = {"rope_parameters": "absent", "layer_types": "absent"}


@pytest.mark.parametrize(
    ("case", "old"),
    [
        ("gemma2", {"rope_theta": 10000.0}),
        (
            "gemma3",
            {
                "rope_theta": 1000.0,
                "rope_local_base_freq": 100.0,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
                "sliding_window_pattern": 6,
            },
        ),
        ("smollm3", {"rope_theta": 2e6, "no_rope_layers": "absent"}),
        ("qwen2", {"rope_theta": 10000.0}),
    ],
)
def test_the_old_form_says_the_same(case, old):
    assert keys_of(case, **OLD | old) == keys_of(case)


@pytest.mark.parametrize(
    ("case", "changes", "expected"),
    [
        ("gemma3", {"layer_types": [SLIDING] * 7}, {"sliding_window_pattern": 8}),
        ("gemma3", {"layer_types": [SLIDING, FULL] * 3 + [SLIDING]}, {"sliding_window_pattern": 2}),
        ("gemma3", {"layer_types": [SLIDING] * 3, "num_hidden_layers": 3}, {"sliding_window_pattern": 6}),
        ("gemma3", {"layer_types": [FULL] * 7, "sliding_window": None}, {"sliding_window_pattern": 1}),
        ("gemma3", {"layer_types": "absent", "sliding_window_pattern": 3}, {"sliding_window_pattern": 3}),
        ("gemma", {"hidden_act": "gelu", "hidden_activation": None}, {"mlp_activations": ("gelu", "linear")}),
        ("gemma2", {"query_pre_attn_scalar": 8}, {"query_pre_attn_scalar": None}),
        ("gemma2", {"attn_logit_softcapping": None}, {"attn_logits_soft_cap": 0.0}),
        ("smollm3", {"no_rope_layers": [1, 1, 1, 1, 1]}, {"nope_layer_interval": -1}),
        ("smollm3", {"no_rope_layers": [1, 0, 1, 0, 1]}, {"nope_layer_interval": 2}),
        ("llama4", LISTS, {"nope_layer_interval": 4, "interleave_moe_layer_step": None, "base_mlp_dim": None}),
        ("llama4", {"attention_chunk_size": None, "layer_types": None}, {"chunk_attn_window_size": 0}),
        ("llama4", {"attn_temperature_tuning": 4}, {"temperature_tuning": True}),
        ("llama4", {"use_qk_norm": False}, {"use_qk_norm": False}),
        (
            "llama4-interleaved",
            {"moe_layers": "absent", "no_rope_layers": [1] * 4, "layer_types": "absent"},
            {"interleave_moe_layer_step": 2, "nope_layer_interval": -1, "chunk_attn_window_size": 5},
        ),
        ("qwen2", {"use_mrope": False}, {"attention_bias": True}),
        ("olmo2", {"use_sliding_window": False}, {"attention_type": "global"}),
        ("glm4", {"attention_bias": False}, {"attention_bias": False}),
        ("glm4", {"rope_parameters": None, "rope_theta": 1e4}, {"partial_rotary_factor": 0.5}),
        ("glm", {}, {"use_post_attn_norm": False, "partial_rotary_factor": 0.5, "attention_bias": False}),
        ("glm4-moe", {}, {"n_routing_groups": 3, "use_qk_norm": True, "attention_bias": True, "routed_bias": True}),
        ("glm4-moe-air", {"num_mtp_layers": 1}, {"n_routing_groups": -1, "use_qk_norm": False, "mtp_num_layers": 1}),
        ("glm4-moe", {"num_nextn_predict_layers": "absent"}, {"mtp_num_layers": 1}),  # as in transformers
        ("glm4-moe", {"num_nextn_predict_layers": 0}, {"mtp_num_layers": 0}),
        ("glm4-moe", {"rope_parameters": None, "rope_theta": 1e6}, {"partial_rotary_factor": 0.5}),
        ("glm4-moe-lite", {"mlp_layer_types": "absent"}, {"first_num_dense_layers": 1}),
        ("glm4-moe-lite", {"mlp_layer_types": ["dense"] * 2 + ["sparse"]}, {"first_num_dense_layers": 2}),
        ("phi3", {"rope_parameters": None, "partial_rotary_factor": 0.5}, {"partial_rotary_factor": 0.5}),
        ("phi3", {"max_position_embeddings": 4}, {"attention_type": "local_sliding", "sliding_window_size": 5}),
        ("phi3-short", LONG, {"rope_factor": 4.0, "rope_attention_scaling": True}),
        ("phi3-short", LONG | {"sliding_window": 256}, {"attention_type": "global", "sliding_window_size": None}),
        ("phi3-short", LONG | {"sliding_window": 255}, {"attention_type": "local_sliding", "sliding_window_size": 255}),
        ("phi3-short", {"rope_parameters": ROPE | {"attention_factor": 1.0}}, {"rope_attention_scaling": False}),
        ("phi3-short", {"rope_parameters": ROPE | {"factor": 2.0}}, {"rope_factor": 2.0}),
        ("granite", {"attention_multiplier": "absent"}, {"query_pre_attn_scalar": 1.0}),
        ("granite-moe", {"embedding_multiplier": "absent"}, {"embedding_multiplier": 1.0}),
        ("granite", {"logits_scaling": 8, "residual_multiplier": None}, {"logits_multiplier": 0.125}),
        ("granite4", {"layer_types": ["attention"] * 2, "init_method": "mup"}, {"base_mlp_dim": 12}),
        ("ministral3", {"rope_parameters": GROWN}, {"temperature_tuning_floor_scale": 8, "rope_factor": 2.0}),
        ("ministral3", {"rope_parameters": GROWN | {"mscale_all_dim": 0}}, {"rope_attention_scaling": True}),
        ("mistral4", {}, {"n_routing_groups": 3, "norm_topk_prob": True, "first_num_dense_layers": 1}),
        ("mistral4-small", {}, {"n_routing_groups": -1, "q_lora_rank": 0, "base_mlp_dim": None}),
        (
            "mistral4",
            {"rope_parameters": GROWN | {"max_position_embeddings": 99, "partial_rotary_factor": 1 / 3}},
            {"temperature_tuning_floor_scale": 8, "mscale": 1.0, "rope_attention_scaling": False},
        ),
        ("granite-moe-shared", {}, {"shared_experts": 2, "base_moe_mlp_dim": 6}),
        ("gemma", {"hidden_act": "absent"}, {"mlp_activations": ("gelu", "linear")}),
        ("gemma3", {"final_logit_softcapping": "absent"}, {"final_logits_soft_cap": 0.0}),
        ("smollm3", {"rope_parameters": None, "rope_theta": None}, {"rope_max_timescale": 2_000_000}),
        # transformers reads this field only for Gemma 3.
        ("gemma2", {"layer_types": "absent", "sliding_window_pattern": 3}, {"sliding_window_pattern": 2}),
        ("olmo3", {"layer_types": "absent", "sliding_window_pattern": 2}, {"sliding_window_pattern": 4}),
        ("qwen3-5", {"output_gate_type": "swish", "attn_output_gate": True}, {"inhomogeneous_layer_cycle_interval": 2}),
        (
            "qwen3-5-moe",
            {"layer_types": "absent", "mlp_only_layers": [], "mtp_use_dedicated_embeddings": False},
            {"inhomogeneous_layer_cycle_interval": 4, "shared_experts": 2},
        ),
    ],
)
def test_what_a_field_says(case, changes, expected):
    keys = keys_of(case, **changes)
    assert {name: keys.get(name) for name in expected} == expected


@pytest.mark.parametrize(
    ("case", "changes", "named"),
    [
        ("gemma3", {"layer_types": [SLIDING, FULL, FULL, SLIDING, SLIDING, SLIDING, SLIDING]}, "every n-th is full"),
        ("gemma3", {"layer_types": [SLIDING] * 6}, "layer_types of 6 layers with num_hidden_layers=7"),
        ("gemma3", {"sliding_window": None}, "sliding_window=None with layers of kind sliding_attention"),
        ("gemma3", {"layer_types": "absent", "sliding_window_pattern": "LG"}, 'sliding_window_pattern="LG" without'),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention=true"),
        ("gemma3", {"rope_parameters": {FULL: {"rope_theta": 1e6}, SLIDING: 3}}, "sliding_attention=3, not an object"),
        (
            "gemma3",
            {"rope_parameters": {FULL: {}, SLIDING: {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}},
            "rope_parameters.sliding_attention=",
        ),
        (
            "gemma2",
            {"rope_parameters": {FULL: {"rope_theta": 1e6}, SLIDING: {"rope_theta": 1e4}}},
            "rope_parameters that differ between kinds of layers",
        ),
        ("gemma2", {"hidden_activation": "gelu"}, "hidden_activation=gelu"),
        ("smollm3", {"no_rope_layers": [1, 0, 0, 1, 1]}, "no_rope_layers="),
        ("smollm3", {"use_sliding_window": True}, "use_sliding_window=true"),
        ("llama4", {"layer_types": [FULL] * 5}, "layer_types=.*chunked_attention in the layers with RoPE"),
        ("llama4", {"moe_layers": [0, 2]}, "moe_layers="),
        ("llama4", {"moe_layers": []}, "moe_layers="),
        ("llama4", {"no_rope_layers": [1, 0, 0, 1, 1]}, "no_rope_layers="),
        ("llama4", {"attention_bias": True}, "attention_bias=true"),
        ("llama4", {"num_nextn_experts": 3}, "num_nextn_experts=3: not known"),
        ("qwen2", {"use_mrope": True}, "use_mrope=true"),
        ("olmo2", {"use_sliding_window": True}, "use_sliding_window=true"),
        ("gemma2", {"use_sliding_window": True}, "use_sliding_window=true"),
        ("qwen2", {"clip_qkv": 8.0}, "clip_qkv=8.0"),
        ("qwen2", {"partial_rotary_factor": 0.5}, "partial_rotary_factor other than 1"),
        ("qwen2", {"rope_parameters": ROPE}, "rope_type=longrope"),
        ("phi3", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "rope_type=yarn"),
        ("phi3", {"attention_bias": True}, "attention_bias=true"),
        ("glm4-moe", {"topk_method": "greedy"}, r"topk_method=greedy \(known: noaux_tc\)"),
        ("glm4-moe", {"q_lora_rank": 4}, "q_lora_rank=4: not known"),
        ("glm4-moe-lite", {"attention_bias": True}, "attention_bias=true"),
        ("glm4-moe-lite", {"mlp_layer_types": ["sparse", "dense", "sparse"]}, "dense layers followed by sparse layers"),
        ("glm4-moe-lite", {"first_k_dense_replace": 2}, "first_k_dense_replace=2: mlp_layer_types has 1 dense layers"),
        ("phi3", {"lm_head_bias": True}, "lm_head_bias=true"),
        ("qwen3-5", {"output_gate_type": "sigmoid"}, r"output_gate_type=sigmoid \(known: silu, also called swish\)"),
        ("qwen3-5", {"attn_output_gate": False}, "attn_output_gate=false"),
        ("qwen3-5", {"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings=true"),
        ("qwen3-5-moe", {"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\]"),
        ("qwen3-next", {"decoder_sparse_step": 2}, "decoder_sparse_step=2"),
        ("phi3", {"embd_layer": "x"}, 'embd_layer="x": not known'),
        (
            "phi3-short",
            {"rope_parameters": ROPE | {"attention_factor": 2.0}},
            "attention_factor=2 of longrope",
        ),
        ("phi3-short", {"rope_parameters": ROPE | {"long_factor": None}}, "longrope requires long_factor"),
        ("phi3-short", {"rope_parameters": ROPE | {"short_mscale": 1.2}}, "short_mscale in RoPE type longrope"),
        (
            "phi3-short",
            {"max_position_embeddings": 32},
            "longrope with factor=0.5, original length 64 .known: at least",
        ),
        ("phi3-short", {"max_position_embeddings": None}, "longrope requires factor or max_position_embeddings"),
        ("glm4", {"mlp_bias": True}, "mlp_bias=true"),
        ("gpt-oss", {"swiglu_alpha": 1.5}, "swiglu_alpha=1.5"),
        ("gpt-oss", {"swiglu_limit": 0}, "swiglu_limit=0, not a number"),
        ("gpt-oss", {"rope_parameters": None}, "rope_type=default .known: yarn"),
        ("gpt-oss", {"gate_beta": 2.0}, "gate_beta=2.0"),
        ("granite", {"logits_scaling": 0}, "logits_scaling=0, not a number in"),
        ("granite", {"shared_intermediate_size": 8}, "shared_intermediate_size=8: not known"),
        ("granite", {"position_embedding_type": "nope"}, 'position_embedding_type="nope": not known'),
        ("granite-moe", {"num_local_experts": 0}, "num_experts=0"),
        ("granite4", {"layer_types": ["mamba", "attention"]}, "kinds full_attention and mamba"),
        ("granite4", {"layer_types": "absent"}, "layer_types=null: every layer is a Mamba layer"),
        ("granite4", {"position_embedding_type": "nope"}, 'position_embedding_type="nope"'),
        ("granite4", {"num_local_experts": 4}, "num_local_experts=4"),
        ("granite4", {"num_local_experts": "absent"}, "num_local_experts=8"),
        ("ministral3", {"rope_parameters": {"rope_type": "default"}}, "rope_type=default .known: yarn"),
        ("ministral3", {"rope_parameters": YARN}, "RoPE without llama_4_scaling_beta"),
        ("ministral3", {"rope_parameters": GROWN | {"mscale_all_dim": 0.5}}, "attention_factor=1.0"),
        ("ministral3", {"rope_parameters": GROWN | {"llama_4_scaling_beta": "x"}}, "llama_4_scaling_beta=.x., not a"),
        ("mistral4", {"rope_parameters": GROWN | {"partial_rotary_factor": 0.5}}, "factor other than 0.333333"),
        ("mistral4", {"head_dim": 4}, r"head_dim=4, which is not qk_nope_head_dim \+ qk_rope_head_dim=12"),
        ("mistral4", {"rope_parameters": None}, "rope_type=default .known: yarn"),
        ("mistral4", {"rope_interleave": False}, "rope_interleave=false"),
        ("mistral4", {"scoring_func": "sigmoid"}, 'scoring_func="sigmoid": not known'),
        ("granite-moe-shared", {"shared_intermediate_size": 9}, "=9 .known: multiples of intermediate_size=6"),
        ("granite-moe-shared", {"shared_intermediate_size": "absent"}, "=0 .known: multiples of"),
        ("deepseek-v3", {"rope_parameters": YARN | {"partial_rotary_factor": 0.5}}, "factor other than 1"),
        ("mistral", {"rope_parameters": GROWN}, "llama_4_scaling_beta in RoPE type yarn"),
        ("olmo2", {"attention_bias": True}, "attention_bias=true"),
        ("gemma2", {"hidden_activation": None}, "hidden_activation=null"),
        (
            "gemma3",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
            "rope_parameters without full_att",
        ),
        (
            "olmo3",
            {
                "rope_parameters": {
                    FULL: {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "truncate": False},
                    SLIDING: {"rope_theta": 1e4},
                }
            },
            "truncate=false in RoPE type yarn",
        ),
        ("smollm3", {"num_hidden_layers": 4096, "layer_types": "absent"}, "no_rope_layers="),
        ("gemma3", {"num_hidden_layers": 4096}, "layer_types of 7 layers"),
        ("qwen2", {"x" * 20_000: 1}, r"^.{0,500}$"),
    ],
)
def test_what_no_key_says_is_refused(case, changes, named):
    with pytest.raises(UserError) as error:
        keys_of(case, **changes)
    assert re.search(named, str(error.value).replace("\n", " ")), error.value


@pytest.mark.parametrize(
    ("case", "key", "value", "named"),
    [
        ("olmo3", "local_rope_max_timescale", -1, "local_rope_max_timescale=-1: in config.json, RoPE in layers"),
        ("olmo3", "local_rope_max_timescale", 300, "local_rope_max_timescale=300"),
        ("olmo3", "rope_truncate", False, "rope_truncate=False"),
        ("gpt-oss", "rope_type", "default", "rope_type=default"),
        ("gemma2", "local_rope_max_timescale", 300, "local_rope_max_timescale=300"),
        ("gemma3", "local_rope_max_timescale", -1, "local_rope_max_timescale=-1"),
        ("gemma3", "query_pre_attn_scalar", 9.5, "query_pre_attn_scalar=9.5"),
        ("olmo2", "query_pre_attn_scalar", 9.0, "query_pre_attn_scalar=9.0"),
    ],
)
def test_what_config_json_cannot_say_is_refused(case, key, value, named):
    config = ConfigDict({**model_config(keys_of(case), [], ""), key: value})
    with pytest.raises(UserError, match=named):
        config_json(config, "float32", {})


def test_tokens_of_the_published_vocabulary_are_not_implied():
    written = config_json(model_config(keys_of("smollm3"), [], ""), "float32", {"eos_token_id": 5})
    assert [written[f"{name}_token_id"] for name in ("bos", "eos", "pad")] == [None, 5, None]


@pytest.mark.parametrize("case", ["olmo2", "qwen2", "gemma"])
def test_a_key_of_scores_that_config_json_leaves_out_is_compared(case, tmp_path, capsys):
    """It changes what the same parameters compute. A value equal to the default, the head size, is accepted."""
    with pytest.raises(SystemExit):
        export.main([str(GOLDENS / case), str(tmp_path / "out"), "format=params", "query_pre_attn_scalar=9"])
    assert "to load it, give: query_pre_attn_scalar=0.0" in capsys.readouterr().err
    keys = keys_of(case)
    assert described(model_config(keys, [f"query_pre_attn_scalar={keys['head_dim']}"], "")) == keys


def test_another_model_with_images_is_refused_by_the_name_of_what_it_has():
    data = {"model_type": "gemma4", "text_config": data_of("gemma3"), "vision_config": {"hidden_size": 4}}
    with pytest.raises(
        UserError, match=r"more than a text model: it has text_config, vision_config.*gemma3, llama4, mistral3"
    ):
        model_keys(data, "config.json")


def test_wrong_tensors_are_one_error(tmp_path):
    from safetensors.numpy import save_file

    folder = shutil.copytree(GOLDENS / "gemma3", tmp_path / "folder")
    tensors = load_file(folder / "model.safetensors")
    tensors["vision_tower.patch.weight"] = tensors.pop("model.layers.6.self_attn.q_norm.weight")
    tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"][:, :3].copy()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError) as error:
        export.main.__wrapped__([str(folder), str(tmp_path / "out"), "format=params"])
    said = str(error.value)
    assert "3 tensors do not fit" in said
    for name in ("vision_tower.patch.weight", "model.layers.6.self_attn.q_norm.weight", "layers.0.mlp.up_proj.weight"):
        assert name in said

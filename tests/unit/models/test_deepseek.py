"""The family deepseek: import and export of its weights, groups of experts, keys, programs."""

from pathlib import Path

import jax
import numpy as np
import pytest
from checkpoint_cases import abstract_of, assert_same, config_of, random_params, read_hf, shapes_of
from support import ALL_COMBINATIONS, arguments, lowered_update, pinned

from trainer import export
from trainer.config.errors import UserError
from trainer.config.load import load
from trainer.leaves import orbax
from trainer.leaves.source import Leaf, names_of
from trainer.models.families import place, stacks
from trainer.ops.routing import Routing, chosen_of_softmax, times, within_groups
from trainer.training.build import build
from trainer.training.start import start
from trainer.weights.contents import contents_of
from trainer.weights.huggingface.config_json import config_json, model_keys
from trainer.weights.huggingface.write import write_huggingface
from trainer.weights.load import load_parameters
from trainer.weights.maxtext.model_arguments import maxtext_keys
from trainer.weights.maxtext.stored import layer_name
from trainer.weights.maxtext.write import write_maxtext
from trainer.weights.model_keys import described, model_config
from trainer.weights.open import open_source

GOLDENS = Path(__file__).parents[2] / "goldens"
CASES = ("deepseek-v2-lite", "deepseek-v2", "deepseek-v3")
TINY = {
    "decoder_block": "deepseek",
    "attention_type": "mla",
    "base_num_kv_heads": 4,
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "base_moe_mlp_dim": 8,
    "shared_experts": 1,
    "first_num_dense_layers": 1,
    "base_num_decoder_layers": 3,
    "rope_type": "yarn",
    "logits_via_embedding": False,
    "normalization_layer_epsilon": 1e-6,
}
V3 = {
    "routed_score_func": "sigmoid",
    "routed_bias": True,
    "routed_bias_update_rate": 0.01,
    "norm_topk_prob": True,
    "n_routing_groups": 2,
    "topk_routing_group": 1,
}


BIAS = "decoder/moe_layers/DeepSeekMoeBlock_0/MoeBlock_0/gate/bias"


def config(**keys):
    return config_of(**TINY | keys)


def leaves_of(params):
    return {name: Leaf(array.shape, array.dtype, [lambda array=array: array]) for name, array in params.items()}


@pytest.mark.parametrize("case", CASES)
def test_hugging_faces_own_files_come_in_and_go_out_bit_for_bit(case, tmp_path):
    source = open_source(str(GOLDENS / case))
    found = model_config(source.keys, [f"{key}={value}" for key, value in pinned(ALL_COMBINATIONS[0]).items()], case)
    assert model_keys(config_json(found, "float32", {}), "") == described(found) == source.keys
    leaves = source.leaves(found, shapes_of(found))
    write_huggingface(tmp_path, found, leaves, None)
    theirs, ours = read_hf(GOLDENS / case), read_hf(tmp_path)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        np.testing.assert_array_equal(ours[name], tensor, err_msg=name)


@pytest.mark.parametrize(
    "keys",
    [
        {"first_num_dense_layers": 0},
        {"rope_type": "default"},
        {"mscale": 0.0, "rope_attention_scaling": True},
        {"mscale": 0.5, "rope_attention_scaling": True},
        {"n_routing_groups": 2, "topk_routing_group": 1, "q_lora_rank": 5},
        {**V3},
        {**V3, "n_routing_groups": -1, "norm_topk_prob": False, "q_lora_rank": 5},
    ],
)
def test_config_json_says_the_model(keys):
    assert model_keys(config_json(config(**keys), "float32", {}), "") == described(config(**keys))


@pytest.mark.rest(covered_by="scanned layers", cases=("False",))
@pytest.mark.parametrize("scan", [True, False])
def test_maxtexts_checkpoints_come_in_and_go_out(scan, tmp_path):
    here = config(q_lora_rank=5)
    params = random_params(here)
    write_maxtext(tmp_path, here, leaves_of(params), None, scan)
    assert_same(load_parameters(str(tmp_path / "0" / "items"), here, abstract_of(here), print), params)
    stored = open_source(str(tmp_path / "0" / "items")).stored
    # The names in MaxText's checkpoint_conversion.
    experts = "DeepSeekMoeBlock_0/MoeBlock_0/wi_0"
    assert (f"decoder/moe_layers/{experts}" if scan else f"decoder/moe_layers_0/{experts}") in stored
    assert ("decoder/dense_layers/mlp/wo/kernel" if scan else "decoder/dense_layers_0/mlp/wo/kernel") in stored
    name = layer_name(place(stacks(here), f"decoder/moe_layers/{experts}"), 0)
    assert name == f"decoder/moe_layers_0/{experts}", "each stack counts its own layers"


def test_maxtexts_keys():
    keys = maxtext_keys(config(q_lora_rank=5, mscale=0.7, routed_scaling_factor=2.0))
    assert {name: keys[name] for name in ("attention_type", "q_lora_rank", "mscale", "routed_score_func")} == {
        "attention_type": "mla",
        "q_lora_rank": 5,
        "mscale": 0.7,
        "routed_score_func": "softmax",
    }
    assert (keys["first_num_dense_layers"], keys["shared_experts"], keys["routed_scaling_factor"]) == (1, 1, 2.0)
    assert keys["rope_factor"] == config().rope_factor
    plain = maxtext_keys(config(rope_type="default"))
    wanted = {"rope_type": "yarn", "rope_factor": 1, "rope_interleave": True}
    assert {name: plain[name] for name in wanted} == wanted, (
        "rope_type=default would rotate halves and scale the scores"
    )
    with pytest.raises(UserError, match=r"rope_linear_scaling_factor=2\.0: it rotates halves"):
        maxtext_keys(config(rope_type="default", rope_linear_scaling_factor=2.0))
    with pytest.raises(UserError, match="n_routing_groups=2: its groups are those of DeepSeek-V3"):
        maxtext_keys(config(n_routing_groups=2, topk_routing_group=1))
    with pytest.raises(UserError, match="norm_topk_prob=False: it always divides sigmoid scores by their sum"):
        maxtext_keys(config(**V3 | {"norm_topk_prob": False}))


def test_groups_choose_by_their_best_expert():
    experts, groups, kept, chosen = 12, 4, 2, 3
    logits = np.random.default_rng(0).normal(size=(5, 7, experts)).astype(np.float32)
    logits[0, 0] = 0.0  # in ties, the first group and the first expert win

    @jax.jit
    def routings(logits):
        of_groups = [within_groups(logits, chosen, groups=groups, kept=count) for count in (kept, groups)]
        return *of_groups, *(score(logits, chosen) for score in (chosen_of_softmax, times(chosen_of_softmax, 4.0)))

    found, one, plain, scaled = jax.device_get(routings(logits))
    size = experts // groups
    for at in np.ndindex(*logits.shape[:2]):
        score = logits[at]
        best = sorted(range(groups), key=lambda g: (-score[g * size : (g + 1) * size].max(), g))[:kept]
        among = [e for e in range(experts) if e // size in best]
        expected = sorted(among, key=lambda e: (-score[e], e))[:chosen]
        assert list(found.expert[at]) == expected
        np.testing.assert_allclose(found.weight[at], np.exp(score[expected]) / np.exp(score).sum(), rtol=1e-5)
    assert isinstance(one, Routing)
    np.testing.assert_array_equal(one.expert, plain.expert)
    np.testing.assert_allclose(scaled.weight, 4 * plain.weight, rtol=1e-6)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"attention_type": "global"}, "give attention_type=mla"),
        (
            {"decoder_block": "mixtral", "shared_experts": 0, "first_num_dense_layers": 0},
            "families with it: deepseek, glm4",
        ),
        ({"base_num_kv_heads": 2}, "every head has its own keys and values"),
        ({"qk_rope_head_dim": 3}, "must be even"),
        ({"use_qk_norm": True}, "leave use_qk_norm at false"),
        ({"first_num_dense_layers": 3}, "no layer with experts is left"),
        ({"shared_experts": 0}, "at least one shared expert"),
        ({"num_experts": 1, "num_experts_per_tok": 1}, "at least 2"),
        ({"base_moe_mlp_dim": -1}, "hidden width of an expert is missing"),
        ({"n_routing_groups": 3, "topk_routing_group": 1}, "must be a multiple of the number of groups"),
        ({"n_routing_groups": 2, "topk_routing_group": 3}, "a token can choose 1 to 2 of the 2 groups"),
        ({"n_routing_groups": 4, "topk_routing_group": 1}, "a token chooses more"),
        (
            {"n_routing_groups": 2, "topk_routing_group": 1, "norm_topk_prob": True},
            "groups do not support norm_topk",
        ),
        ({"routed_bias": True}, "a bias requires sigmoid scores; set routed_score_func=sigmoid"),
        ({"routed_score_func": "sigmoid", "n_routing_groups": 4, "topk_routing_group": 2}, "but has only one"),
    ],
)
def test_keys_that_do_not_fit_are_refused(keys, message):
    with pytest.raises(UserError, match=message):
        load(arguments(ALL_COMBINATIONS[0], **TINY | keys))


def test_keys_without_effect_are_reported():
    warned = "\n".join(load(arguments(ALL_COMBINATIONS[0], **TINY, head_dim=8, topk_routing_group=2)).warnings)
    assert "head_dim=8" in warned
    assert "topk_routing_group=2" in warned
    assert "q_lora_rank=4" in "\n".join(load(arguments(ALL_COMBINATIONS[0], q_lora_rank=4)).warnings)


@pytest.mark.rest(covered_by="integration/test_five_combinations.py, with experts")
def test_combinations_make_the_same_program():
    """Two stacks with different blocks, QK-Clip, and a router's losses and bias. The first and the last combination
    suffice: the others consist of the same parts."""
    keys = TINY | V3 | {"use_qk_clip": True, "load_balance_loss_weight": 0.1, "opt_type": "sgd"}
    texts = set()
    for combination in {ALL_COMBINATIONS[0], ALL_COMBINATIONS[-1]}:
        run = build(load(arguments(combination, **keys, per_device_batch_size=2)).config, jax.devices()[:1])
        texts.add(lowered_update(run).as_text())
    assert len(texts) == 1


def test_what_config_json_cannot_represent_is_refused_by_name():
    sigmoid = {"routed_score_func": "sigmoid"}
    with pytest.raises(UserError, match=r"DeepseekV3ForCausalLM of Hugging Face cannot .*\n  routed_bias=False"):
        config_json(config(**sigmoid), "float32", {})
    with pytest.raises(UserError, match=r"DeepseekV2ForCausalLM of Hugging Face cannot .*\n  norm_topk_prob=True"):
        config_json(config(norm_topk_prob=True), "float32", {})  # transformers' module ignores the key
    with pytest.raises(UserError, match="norm_topk_prob=true"):
        model_keys(config_json(config(), "float32", {}) | {"norm_topk_prob": True}, "")
    theirs = config_json(config(**V3), "float32", {})
    with pytest.raises(UserError, match=r"topk_method=greedy \(known: noaux_tc\)"):
        model_keys(theirs | {"topk_method": "greedy"}, "")
    assert theirs["topk_method"] == "noaux_tc"
    assert theirs["scoring_func"] == "sigmoid"
    # Kimi K2's name for the same model.
    assert model_keys(theirs | {"model_type": "kimi_k2"}, "") == model_keys(theirs, "") == described(config(**V3))


def test_biases_are_never_cast(tmp_path, capsys):
    """Hugging Face -> params -> hf, in bfloat16: biases stay float32 and separate from the parameters."""
    case = str(GOLDENS / "deepseek-v3")
    biases = {name: value for name, value in read_hf(GOLDENS / "deepseek-v3").items() if name.endswith("_bias")}
    assert [value.dtype for value in biases.values()] == [np.float32]
    export.main([case, str(tmp_path / "params"), "format=params", "dtype=bfloat16"])
    headers = orbax.headers(tmp_path / "params" / "checkpoint")
    assert [name for name in headers if name.startswith("rest/")] == [f"rest/{BIAS}"]
    export.main([str(tmp_path / "params"), str(tmp_path / "hf"), "format=hf", "dtype=bfloat16"])
    found = read_hf(tmp_path / "hf")
    for name, value in biases.items():
        np.testing.assert_array_equal(found.pop(name), value)
    assert {str(value.dtype) for value in found.values()} == {"bfloat16"}
    assert sum(value.size for value in found.values()) == 23052
    assert "23.1 k parameters" in capsys.readouterr().out
    assert {tensor.part for tensor in contents_of(case).tensors if tensor.name == BIAS} == {"rest"}


@pytest.mark.rest(covered_by="unrolled layers", cases=("true",))
@pytest.mark.parametrize("scan", ["true", "false"])
def test_maxtexts_command_line_says_deepseek_v3(scan, tmp_path, capsys):
    case = str(GOLDENS / "deepseek-v3")
    export.main([case, str(tmp_path / "out"), "format=maxtext", f"scan_layers={scan}"])
    line = capsys.readouterr().out.splitlines()[-1]
    for word in ("model_name=deepseek3-671b", "override_model_config=true", "routed_bias=true", "n_routing_groups=3"):
        assert f" {word}" in line
    folder = open_source(case)
    found = model_config(folder.keys, [], case)
    items = str(tmp_path / "out" / "0" / "items")
    # MaxText stores the biases among its parameters.
    assert any(path.endswith("gate/bias") and path.startswith("params/params/") for path in orbax.headers(Path(items)))
    loaded = load_parameters(items, found, abstract_of(found), print)
    leaves = folder.leaves(found, shapes_of(found))
    assert_same(loaded, {name: leaf.read(leaf.dtype, lambda size: None) for name, leaf in leaves.items()})


@pytest.mark.parametrize("block", ["deepseek", "glm4_moe", "glm4_moe_lite"])
def test_modules_of_multi_token_prediction_have_biases(block, tmp_path):
    """As in the published weights, module 1 of a model with 3 layers is stored as layer 3, with experts and a bias."""
    of_glm = {"attention_type": "global", "use_qk_norm": True, "attention_bias": True, "partial_rotary_factor": 0.5}
    here = config(**V3 | (of_glm if block == "glm4_moe" else {}), decoder_block=block, mtp_num_layers=1)
    params = random_params(here)
    write_huggingface(tmp_path, here, leaves_of(params), None)
    found = read_hf(tmp_path)
    name = "mtp_block/mtp_layer_1/mtp_1_transformer_layer/DeepSeekMoeBlock_0/MoeBlock_0/gate/bias"
    np.testing.assert_array_equal(found["model.layers.3.mlp.gate.e_score_correction_bias"], params[name])
    assert "model.layers.3.eh_proj.weight" in found
    assert open_source(str(tmp_path)).keys == described(here)
    assert_same(load_parameters(str(tmp_path), here, abstract_of(here), print), params)


def test_new_modules_begin_with_initial_biases(tmp_path):
    keys = TINY | V3 | {"mtp_num_layers": 1}
    without = config(**V3)
    params = random_params(without)
    write_huggingface(tmp_path, without, leaves_of(params), None)
    words = [*arguments("nnx", **keys), f"load_parameters_path={tmp_path}"]
    run = build(load(words).config, jax.devices()[:1])
    tree = run.codec.unpack(start(run, None, None, print, schedule_given=False, given=["mtp_num_layers"]).state)
    found = {name: np.asarray(leaf) for name, leaf in names_of(tree.rest).items()}
    assert_same({BIAS: found.pop(BIAS)}, {BIAS: params[BIAS]})
    ((new, value),) = found.items()
    assert new.startswith("mtp_block/")
    assert not value.any()

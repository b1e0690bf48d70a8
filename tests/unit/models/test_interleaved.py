"""interleave_moe_layer_step: dense layers between layers with experts, in every family with experts.

tests/unit/models/test_goldens.py compares such a model with Hugging Face's.
"""

from pathlib import Path

import jax
import numpy as np
import pytest
from checkpoint_cases import EXPERTS, config_of, read_hf, shapes_of
from support import ALL_COMBINATIONS, arguments, lowered_update

from trainer.config.errors import UserError
from trainer.config.load import load
from trainer.models.experts import ExpertBlock
from trainer.models.families import stacks
from trainer.training.build import build
from trainer.weights.huggingface.config_json import config_json
from trainer.weights.huggingface.write import write_huggingface
from trainer.weights.maxtext.model_arguments import maxtext_keys
from trainer.weights.model_keys import model_config
from trainer.weights.open import open_source

GOLDEN = Path(__file__).parents[2] / "goldens" / "qwen3-moe-interleaved"
KEYS = EXPERTS | {"interleave_moe_layer_step": 2, "base_num_decoder_layers": 4, "logits_via_embedding": False}
FAMILIES = {
    "mixtral": KEYS,
    "qwen3_moe": KEYS | {"use_qk_norm": True},
    "deepseek": KEYS
    | {
        "attention_type": "mla",
        "base_num_kv_heads": 4,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 4,
        "v_head_dim": 4,
        "shared_experts": 1,
        "first_num_dense_layers": 1,
        "base_num_decoder_layers": 5,
        "routed_score_func": "sigmoid",
        "routed_bias": True,
        "routed_bias_update_rate": 0.01,
        "mtp_num_layers": 1,
    },
}


@pytest.mark.parametrize("block", FAMILIES)
def test_layers_with_experts_are_every_second_one(block):
    last = stacks(config_of(decoder_block=block, **FAMILIES[block]))[-1]
    assert (last.count, len(last.blocks)) == (2, 2)
    assert [issubclass(made, ExpertBlock) for made in last.blocks] == [False, True]


@pytest.mark.rest(covered_by="integration/test_five_combinations.py, with experts")
def test_combinations_make_the_same_program():
    keys = {"decoder_block": "deepseek", **FAMILIES["deepseek"], "load_balance_loss_weight": 0.1, "opt_type": "muon"}
    texts = set()
    for combination in {ALL_COMBINATIONS[0], ALL_COMBINATIONS[-1]}:
        run = build(load(arguments(combination, **keys)).config, jax.devices()[:1])
        texts.add(lowered_update(run).as_text())
    assert len(texts) == 1


def test_hugging_faces_own_file_comes_in_and_goes_out_bit_for_bit(tmp_path):
    source = open_source(str(GOLDEN))
    config = model_config(source.keys, [], str(GOLDEN))
    assert (config.interleave_moe_layer_step, config.base_mlp_dim, config.base_moe_mlp_dim) == (2, 24, 16)
    write_huggingface(tmp_path, config, source.leaves(config, shapes_of(config)), None)
    theirs, ours = read_hf(GOLDEN), read_hf(tmp_path)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        np.testing.assert_array_equal(ours[name], tensor, err_msg=name)
    assert config_json(config, "float32", {})["decoder_sparse_step"] == 2


@pytest.mark.parametrize("block", ["mixtral", "deepseek"])
def test_formats_without_it_refuse_it(block):
    config = config_of(decoder_block=block, **FAMILIES[block] | {"normalization_layer_epsilon": 1e-6})
    with pytest.raises(UserError, match="interleave_moe_layer_step=2"):
        config_json(config, "float32", {})
    with pytest.raises(UserError, match="interleave_moe_layer_step=2: it does not read this key"):
        maxtext_keys(config)


@pytest.mark.parametrize(
    ("block", "layers", "message"),
    [
        ("mixtral", 3, "the number of layers must be a multiple of 2"),
        ("deepseek", 4, "the number of layers after the first 1 must be a multiple of 2"),
    ],
)
def test_a_remainder_is_refused(block, layers, message):
    keys = FAMILIES[block] | {"decoder_block": block, "base_num_decoder_layers": layers}
    with pytest.raises(UserError, match=message):
        load(arguments(ALL_COMBINATIONS[0], **keys))

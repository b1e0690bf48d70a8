"""What each mesh axis shards by the default rules. A missing rule changes no result, only memory and speed."""

import jax
import pytest
from support import ALL_COMBINATIONS, arguments

from trainer.config.derived import MESH_AXES, UNUSED_AXES
from trainer.config.load import load
from trainer.config.rules import make_rules
from trainer.config.schema import schema
from trainer.config.tensors import TENSORS
from trainer.training.build import build

RULES = make_rules(schema().keys["logical_axis_rules"].default)
HEADS = {"q_heads", "heads", "kv_heads", "activation_heads", "activation_kv_heads"}
WIDE = {"mlp", "vocab", "activation_mlp", "activation_vocab"}
LENGTHS = {"activation_length", "activation_norm_length", "activation_q_length", "activation_kv_length"}
SPLITS = {
    "data": {"activation_batch"},
    "stage": {"activation_batch", "activation_stage", "stages"},
    "fsdp": {"activation_batch", "embed", "embed_moe"},
    "context": LENGTHS | {"embed", "embed_moe"},
    "context_usp_ulysses": LENGTHS | {"embed", "embed_moe"},
    "fsdp_transpose": {"activation_batch", "kv", "kv_head_dim", "mlp", "vocab"},
    "expert": {"activation_batch", "embed", "exp"},
    "tensor": HEADS | WIDE | {"activation_embed"},
    "tensor_sequence": HEADS | WIDE | {"activation_norm_length"},
}
# The tensors of the size of a layer's weights or activations that an axis may replicate. Norms are small and not
# checked.
REPLICATED = {
    "data": {tensor for tensor in TENSORS if "/" in tensor},  # the parameters
    "stage": {"token_embedder/embedding", "decoder/logits_dense/kernel"},  # not in the pipeline
    "tensor_sequence": {"inputs of attention and MLP"},
}
NORM = "pre_self_attention_layer_norm/scale"


def test_every_mesh_axis_splits_what_it_is_there_for():
    used = [axis for axis in MESH_AXES if axis not in (*UNUSED_AXES, "diloco")]  # no rule names the axis diloco
    assert {axis: {name for name in RULES if axis in RULES[name]} for axis in used} == SPLITS
    assert all(set(axes) <= set(used) for axes in RULES.values())


@pytest.mark.parametrize("axis", SPLITS)
def test_no_large_tensor_is_left_replicated(axis):
    leading = {"layers": "stages"} if axis == "stage" else {}  # a pipeline also has the axis stages
    whole = {tensor for tensor, names in TENSORS.items() if not SPLITS[axis] & {leading.get(n, n) for n in names}}
    assert whole - {NORM} == REPLICATED.get(axis, set()) - {NORM}


def test_the_outer_axis_of_a_dimension_is_the_same_for_weights_and_activations():
    """Otherwise a product would transfer all of the weights or activations between devices."""
    tensor = tuple(axis for axis in MESH_AXES if axis.startswith("tensor"))
    assert {RULES[name] for name in HEADS} == {tensor}
    assert {RULES[name][:2] for name in WIDE} == {tensor}
    assert RULES["activation_batch"] == ("stage", "data", "fsdp", "fsdp_transpose", "expert")


SIZES = {"base_num_query_heads": 8, "base_num_kv_heads": 8, "logits_via_embedding": False}


@pytest.mark.rest(covered_by="tensor", cases=("tensor_sequence",))
@pytest.mark.parametrize("axis", ["tensor", "tensor_sequence"])
def test_the_inputs_that_blocks_save_are_split(axis):
    """They are sharded by an axis that does not shard the batch. With eight layers, they dominate the temporaries."""
    sizes = {"base_emb_dim": 128, "base_num_decoder_layers": 8, "max_target_length": 128, "remat_policy": "full"}
    mesh = {"ici_fsdp_parallelism": 2, f"ici_{axis}_parallelism": 4}
    mesh |= {"opt_type": "sgd", "gradient_clipping_threshold": 0}
    temporaries = {}
    for rules in ("[]", "[[activation_embed,[]],[activation_norm_length,[]]]"):
        given = arguments(ALL_COMBINATIONS[0], **SIZES | sizes | mesh, logical_axis_rules=rules)
        run = build(load(given).config, jax.devices())
        compiled = run.step.lower(*run.abstract_args()).compile()
        temporaries[rules] = compiled.memory_analysis().temp_size_in_bytes
    inputs = 8 * (run.rows // 2) * 128 * 128 * 4
    default, whole = temporaries.values()
    assert default + 0.7 * inputs < whole  # sharding saves 3/4 of them


@pytest.mark.parametrize("axis", ["fsdp", "fsdp_transpose", "context", "expert", "tensor", "tensor_sequence"])
def test_a_device_of_eight_holds_an_eighth_of_the_state(axis):
    """Parameters, Adam's moments and gradients; norms and three counts are replicated."""
    mesh = {"ici_fsdp_parallelism": 1, f"ici_{axis}_parallelism": 8}
    config = load(arguments(ALL_COMBINATIONS[0], **SIZES | mesh)).config
    table = build(config, jax.devices()).table()
    rows = {row["name"]: row for row in table["tensors"]}
    whole = {name for name, row in rows.items() if row["replicated"]}
    assert {name for name in whole if "norm/scale" not in name} == {
        "step",
        *(name for name in rows if name.endswith("count")),
    }
    assert all(8 * row["bytes_per_device"] == row["bytes"] for name, row in rows.items() if name not in whole)

"""The bias of routers: what changes it, and what does not."""

import functools

import jax
import numpy as np
import pytest
from support import (
    ALL_COMBINATIONS,
    arguments,
    assert_equal_bits,
    copied,
    first_tree,
    packed_batch,
    state_from,
)

from trainer.config.errors import UserError
from trainer.config.load import load
from trainer.ops.paths import by_name
from trainer.optim.router_bias import direction, router_bias
from trainer.state.diloco import without_islands
from trainer.training.batches import placed
from trainer.training.build import build
from trainer.training.rules import make_rules

RATE = 0.125
KEYS = {
    "decoder_block": "deepseek",
    "attention_type": "mla",
    "base_num_kv_heads": 4,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "base_moe_mlp_dim": 8,
    "shared_experts": 1,
    "base_num_decoder_layers": 2,
    "routed_score_func": "sigmoid",
    "routed_bias": True,
    "routed_bias_update_rate": RATE,
    "norm_topk_prob": True,
    "record_internal_nn_metrics": 1,
    "opt_type": "adamw",
    "adam_weight_decay": 0.1,
    "logits_via_embedding": False,
    "sharding_tolerance": 0.05,
}
LAYER = "decoder/moe_layers/DeepSeekMoeBlock_0/MoeBlock_0"
BIAS = f"{LAYER}/gate/bias"
ROWS = 8


def made(combination=ALL_COMBINATIONS[0], devices=1, **overrides):
    keys = KEYS | overrides
    keys["per_device_batch_size"] = ROWS / devices / keys.get("gradient_accumulation_steps", 1)
    return build(load(arguments(combination, **keys)).config, jax.devices()[:devices])


@functools.cache
def plain():
    """Returns a run on one device, its compiled step, and its first state."""
    run = made()
    return run, run.compile(), first_tree(run)


def batch_of(run, padding=False):
    batch = packed_batch(run.config, ROWS)
    return batch | ({"targets_segmentation": np.zeros_like(batch["targets_segmentation"])} if padding else {})


def after(run, step, tree, batch):
    state, metrics = step(state_from(run, tree), placed(run, batch), ())
    return copied(run.codec.unpack(state)), run.computation.read(metrics, 0)


def test_the_sign_is_that_of_the_mean_minus_the_load():
    count = np.array([[3, 3, 3, 3], [4, 3, 3, 3], [0, 12, 0, 0], [0, 0, 0, 0]], np.int32)
    assert direction(count).tolist() == [[0] * 4, [-1, 1, 1, 1], [1, -1, 1, 1], [0] * 4]
    large = np.array([2**29 + 1, 2**29, 2**29], np.int32)  # equal in float32
    assert direction(large).tolist() == [-1, 1, 1]


def test_a_step_moves_it_by_its_rate_and_nothing_else_knows_it():
    run, step, tree = plain()
    assert list(by_name(tree.rest)) == [BIAS]
    assert by_name(tree.rest)[BIAS].dtype == np.float32
    assert not [name for name in (*by_name(tree.params), *by_name(tree.opt_state)) if name.endswith("gate/bias")]
    new, metrics = after(run, step, tree, batch_of(run))
    count = metrics[f"{LAYER}/tokens_per_expert"]
    np.testing.assert_array_equal(by_name(new.rest)[BIAS], RATE * np.sign(count.mean(-1, keepdims=True) - count))
    assert by_name(new.rest)[BIAS].any()
    # The next step chooses experts with the new bias.
    other = new._replace(rest=jax.tree.map(lambda leaf: leaf + np.array([9, 9, 0, 0], np.float32), new.rest))
    _, metrics = after(run, step, other, batch_of(run))
    assert not metrics[f"{LAYER}/tokens_per_expert"][0, 2:].any()


def test_a_skipped_step_leaves_it():
    run, step, tree = plain()
    new, metrics = after(run, step, tree, batch_of(run, padding=True))
    assert metrics["skipped"] == 1
    assert_equal_bits(new.rest, tree.rest)


@pytest.mark.rest(covered_by="a step that moves it; unit/training/test_diloco.py")
def test_it_is_equal_on_a_mesh_in_microbatches_and_in_another_combination():
    run, step, tree = plain()
    alone, expected = after(run, step, tree, batch_of(run))
    axes = {"ici_fsdp_parallelism": 2, "ici_expert_parallelism": 2, "gradient_accumulation_steps": 2}
    other = made(ALL_COMBINATIONS[-1], 4, **axes)
    found, metrics = after(other, other.compile(), tree, batch_of(other))
    assert_equal_bits(found.rest, alone.rest)
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(metrics[name], expected[name], rtol=1e-5)


def test_without_a_rate_nothing_moves_it():
    tree = plain()[2]
    run = made(routed_bias_update_rate=0.0)
    assert not make_rules(run.config, run.model)
    assert list(by_name(tree.rest)) == list(by_name(run.model.abstract[1]))
    with pytest.raises(UserError, match="no router of this model has a bias"):
        router_bias(run.config, {})


@pytest.mark.rest(covered_by="a step that moves it; unit/training/test_diloco.py")
def test_islands_have_their_own_until_they_synchronize():
    islands = {"enable_diloco": True, "ici_diloco_parallelism": 2, "diloco_sync_period": 2}
    run = made(devices=4, **islands, ici_expert_parallelism=2)
    step, state = run.compile(), run.init()
    of_islands, outer = [], []
    for _ in range(2):
        state, _ = step(state, placed(run, batch_of(run)), ())
        tree = copied(run.codec.unpack(state))
        of_islands.append(by_name(tree.inner_state.rest)[BIAS])
        outer.append(by_name(without_islands(tree)[1])[BIAS])
    assert (of_islands[0][0] != of_islands[0][1]).any(), "each island counts its own tokens"
    np.testing.assert_allclose(outer[0], of_islands[0].mean(0), atol=1e-6)
    np.testing.assert_array_equal(of_islands[1][0], of_islands[1][1])
    np.testing.assert_array_equal(outer[1], of_islands[1][0])

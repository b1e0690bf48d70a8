"""Mixtures of experts in a training step: every combination, meshes, accumulation, islands, metrics, Muon."""

import functools
import math

import jax
import numpy as np
import pytest
from support import ALL_COMBINATIONS, arguments, copied, first_tree, model_of, packed_batch, state_from, tiny_config

from trainer.aot import dump
from trainer.aot.collectives import collectives
from trainer.aot.hlo import parse
from trainer.config.errors import UserError
from trainer.config.load import load
from trainer.models.flops import forward_flops_per_token
from trainer.observe.lines import Work, step_line
from trainer.optim.muon import dimension_numbers
from trainer.training.batches import placed
from trainer.training.build import build
from trainer.training.diloco import _combined
from trainer.training.router_metrics import router_metrics

EXPERTS = {
    "decoder_block": "mixtral",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "base_moe_mlp_dim": 32,
    "base_num_decoder_layers": 1,
    "opt_type": "sgd",
    "gradient_clipping_threshold": 0,
    "learning_rate": 0.1,
    "sharding_tolerance": 0.05,
}
CAPACITY = {"sparse_matmul": False, "capacity_factor": 1.0}
LOSSES = {"load_balance_loss_weight": 0.1, "router_z_loss_weight": 0.01}
ROWS = 8
LAYER = "decoder/layers/MoeBlock_0"


def made(combination=ALL_COMBINATIONS[0], devices=1, **overrides):
    keys = EXPERTS | overrides
    keys["per_device_batch_size"] = ROWS / devices / keys.get("gradient_accumulation_steps", 1)
    return build(load(arguments(combination, **keys)).config, jax.devices()[:devices])


@functools.cache
def plain(**keys):
    """Returns a state on one device, and the results of a step from it."""
    run = made(**keys)
    tree = first_tree(run)
    return tree, step_of(run, tree)


def step_of(run, tree):
    state, metrics = run.compile()(state_from(run, tree), placed(run, packed_batch(run.config, ROWS)), ())
    return run.computation.read(metrics, 0), copied(run.codec.unpack(state)).params


MICROBATCHES = {"shard_optimizer_over_data": True, "gradient_accumulation_steps": 2}
OTHERS_COVER_IT = pytest.mark.rest(covered_by="two other meshes")


@pytest.mark.parametrize(
    ("ways", "mesh", "others"),
    [
        (CAPACITY, {"data": 2, "fsdp": 2, "tensor": 2}, MICROBATCHES),
        pytest.param(CAPACITY, {"data": 1, "fsdp": 2, "expert": 4}, {}, marks=OTHERS_COVER_IT),
        ({}, {"fsdp": 2, "tensor": 2, "expert": 2}, {}),
        pytest.param(
            {},
            {"data": 2, "fsdp": 1, "expert": 2},
            {"remat_policy": "full", "ragged_buffer_factor": 1.0, **MICROBATCHES},
            marks=OTHERS_COVER_IT,
        ),
    ],
)
def test_the_same_step_on_a_mesh_in_microbatches(ways, mesh, others):
    """Rows have different numbers of tokens, so that a mean of means would differ from the loss."""
    keys = ways | LOSSES | {"record_internal_nn_metrics": 1}
    tree, (alone, params) = plain(**keys)
    axes = {f"ici_{axis}_parallelism": size for axis, size in mesh.items()}
    run = made(ALL_COMBINATIONS[-1], math.prod(mesh.values()), **keys, **axes, **others)
    found, new = step_of(run, tree)
    for name in ("loss", "moe_lb_loss", "router_z_loss", "router_entropy", "expert_load", "grad_norm"):
        np.testing.assert_allclose(found[name], alone[name], rtol=1e-5, err_msg=name)
    tokens = alone[f"{LAYER}/tokens_per_expert"]
    np.testing.assert_array_equal(found[f"{LAYER}/tokens_per_expert"], tokens)
    assert tokens.sum() == 2 * np.count_nonzero(packed_batch(run.config, ROWS)["inputs_segmentation"])
    if ways:
        assert found["dropped_tokens"] == alone["dropped_tokens"] > 0
    np.testing.assert_allclose(alone["loss"], alone["lm_loss"] + alone["moe_lb_loss"] + alone["router_z_loss"])
    for one, other in zip(jax.tree.leaves(new), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_bytes_of_the_exchange(tmp_path):
    """The formula of docs/decisions/0022: each layer has 5 exchanges, 3 of which also send the weights of choices."""
    keys = {
        "ici_fsdp_parallelism": 2,
        "ici_expert_parallelism": 4,
        "base_num_decoder_layers": 2,
        "remat_policy": "full",
    }
    run = made(devices=8, **keys)
    with dump.uncached():
        run.step.lower(*run.abstract_args()).compile(compiler_options=dump.options(tmp_path))
    found, unknown = collectives(parse(dump.read(tmp_path).partitioned), run.mesh)
    sent = [it for it in found if it.kind == "all-to-all" and it.axes == ("expert",) and it.dtype == "f32"]
    places = 1.5 * (ROWS // 8) * run.config.max_target_length * EXPERTS["num_experts_per_tok"]
    assert {it.size: it.count for it in sent} == {places * run.config.base_emb_dim * 4: 5 * 2, places * 4: 3 * 2}
    assert sum(it.bytes for it in sent) == 2 * places * (5 * run.config.base_emb_dim + 3) * 4 * 3 / 4
    # The number of rounds is the maximum over all devices with different tokens.
    assert any("pmax" in source for it in found if it.axes == ("fsdp", "expert") for source in it.sources)
    assert set(unknown) == {"expert_exchange/while"}


def test_the_losses_of_a_router_without_preference():
    """Each token chooses the first experts, with equal probabilities: balance is k, log z is log(experts)."""
    run = made(**LOSSES)
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), run.model.abstract[0])
    batch = packed_batch(run.config, ROWS)
    batch["inputs_segmentation"][-1] = 0  # a row of padding
    sums = jax.jit(lambda: run.objective.sums(params, run.model.abstract[1], batch, None).minimized)()
    weights = run.objective.weights(batch).terms
    np.testing.assert_allclose(sums["moe_lb_loss"] / weights["moe_lb_loss"], 0.1 * 2, rtol=1e-6)
    np.testing.assert_allclose(sums["router_z_loss"] / weights["router_z_loss"], 0.01 * np.log(4) ** 2, rtol=1e-6)


def test_a_step_of_islands_with_modules_and_tiles_is_traced():
    """JAX's derivative of a grouped product cannot be mapped over islands (see `ops.grouped`)."""
    islands = {"enable_diloco": True, "ici_diloco_parallelism": 2, "diloco_sync_period": 2}
    run = made(devices=2, **islands, **LOSSES, mtp_num_layers=1, num_vocab_tiling=2, use_qk_clip=True)
    assert "ragged_dot" in str(jax.make_jaxpr(run.step)(*run.abstract_args()))


def test_metrics_of_routers_by_hand():
    counts = {
        f"{LAYER}/tokens_per_expert": np.array([[6, 2, 0, 0], [2, 2, 2, 2]]),
        f"{LAYER}/tokens": np.array([4, 4]),
        f"{LAYER}/entropy": np.array([2.0, 4.0], np.float32),
        f"{LAYER}/dropped": np.array([3, 0]),
    }
    found = router_metrics(counts, drops=True, by_layer=True)
    assert (found["router_entropy"], found["expert_load"], found["dropped_tokens"]) == (0.75, 3, 3)
    assert found[f"{LAYER}/router_entropy"].tolist() == [0.5, 1]
    assert found[f"{LAYER}/tokens_per_expert"].shape == (2, 4)
    assert router_metrics(counts, drops=False, by_layer=False).keys() == {"router_entropy", "expert_load"}
    # DiLoCo's islands have different tokens.
    assert _combined(f"{LAYER}/tokens_per_expert", np.ones((3, 2, 4), int), slice(None)).tolist() == [[3] * 4] * 2
    assert _combined("dropped_tokens", np.array([1, 2]), slice(None)) == 3


def test_dropped_tokens_are_on_the_line_of_a_step():
    row = {
        "step": 1,
        "loss": 1.0,
        "grad_norm": 1.0,
        "learning_rate": 1.0,
        "tokens": 8,
        "step_time": 1.0,
        "data_wait": 0,
    }
    for count in (7, 0):
        line = step_line(row | {"dropped_tokens": count}, 2, Work(1, 8, 1.0), "0:00:00")
        assert f"dropped_tokens: {count}, " in line
    assert "dropped_tokens" not in step_line(row, 2, Work(1, 8, 1.0), "0:00:00")


def test_muon_orthogonalizes_each_expert_and_not_the_router():
    axes = model_of(tiny_config(ALL_COMBINATIONS[0], **EXPERTS)).param_axes
    layer = dimension_numbers(axes)["decoder"]["layers"]["MoeBlock_0"]
    assert layer["gate"]["kernel"] is None
    # The axes are [layers, experts, inputs, outputs].
    assert all(layer[name] == ((2,), (3,)) for name in ("wi_0", "wi_1", "wo"))


def test_parameters_and_flops_by_hand():
    dense, config = (tiny_config(ALL_COMBINATIONS[0], **keys) for keys in ({"base_num_decoder_layers": 1}, EXPERTS))
    # An expert is as large as the MLP. Three more experts and a 16 x 4 router are stored; one more expert and the
    # router compute.
    parameters, fewer = (sum(leaf.size for leaf in jax.tree.leaves(model_of(it).abstract[0])) for it in (config, dense))
    assert parameters - fewer == 3 * (3 * 16 * 32) + 16 * 4
    assert forward_flops_per_token(config) - forward_flops_per_token(dense) == 2 * (3 * 16 * 32 + 16 * 4)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"num_experts": 1, "num_experts_per_tok": 1},
            "num_experts=1 .*: this family has experts; num_experts must be at least 2",
        ),
        ({"decoder_block": "llama2"}, "families with experts: deepseek, glm4_moe, "),
        ({"num_experts_per_tok": 5}, "a token cannot choose an expert twice"),
        ({"base_moe_mlp_dim": -1}, "the hidden width of an expert is missing"),
        ({"mlp_activations": "[gelu]"}, "an expert is gated"),
        ({"routed_bias": True}, "routers of this family have no bias; families with one: deepseek"),
        ({"ragged_buffer_factor": 0.5}, r"ragged_buffer_factor=0.5 .*allowed: a number in \[1, .* or -1"),
        ({"routed_score_func": "sigmoid"}, "this family scores experts by a softmax; families with sigmoids: deepseek"),
    ],
)
def test_what_is_refused(keys, message):
    with pytest.raises(UserError, match=message):
        load(arguments(ALL_COMBINATIONS[0], **EXPERTS | keys))


def test_an_axis_that_does_not_divide_the_experts_is_refused():
    axes = {"ici_expert_parallelism": 3, "ici_fsdp_parallelism": 1, "base_emb_dim": 18}
    with pytest.raises(UserError, match="num_experts=4: expert 3 by the rule of exp does not divide it"):
        made(devices=3, **axes)


def test_what_has_no_effect_is_told():
    for given, others in (
        ({"capacity_factor": 1.0, "norm_topk_prob": True, "base_mlp_dim": 48, "ragged_buffer_factor": 2.0}, {}),
        ({"moe_mlpwo": "device", "base_mlp_dim": 48}, {"remat_policy": "custom", "ici_expert_parallelism": 4}),
    ):
        warned = load(arguments(ALL_COMBINATIONS[0], **EXPERTS | given | others)).warnings
        assert {line.split("=")[0] for line in warned} - set(others) == set(given)
    assert any("num_experts=1" in line for line in load(arguments(ALL_COMBINATIONS[0], capacity_factor=1.0)).warnings)

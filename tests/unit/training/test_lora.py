"""Training with adapters: only they change, on meshes, over microbatches, and with islands."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import (
    ALL_COMBINATIONS,
    EVERY_MATRIX,
    arguments,
    assert_equal_bits,
    copied,
    first_tree,
    packed_batch,
    state_from,
    tiny_config,
)

from trainer.config.capabilities.lora_keys import ADAPTER
from trainer.config.errors import UserError
from trainer.config.load import load
from trainer.ops.paths import by_name
from trainer.ops.random import seed_key
from trainer.training.batches import placed
from trainer.training.build import build
from trainer.training.diloco import build_diloco_train_step

FIRST = ALL_COMBINATIONS[0]
LORA = {"enable_lora": True, "lora_rank": 3, "lora_alpha": 6.0, "learning_rate": 0.05, "warmup_steps_fraction": 0}
ALL_KINDS = EVERY_MATRIX | {"q_lora_rank": 8}
EXPERTS = {"decoder_block": "mixtral", "num_experts": 4, "num_experts_per_tok": 2, "base_moe_mlp_dim": 16}
EXPERTS |= {"base_num_decoder_layers": 1}
SGD = {"opt_type": "sgd", "gradient_clipping_threshold": 0}
ROWS = 8


def made(devices=1, combination=FIRST, **keys):
    keys = LORA | {"per_device_batch_size": ROWS / devices, "sharding_tolerance": 1.0} | keys
    return build(load(arguments(combination, **keys)).config, jax.devices()[:devices])


def batch_of(run):
    batch = packed_batch(run.config, ROWS)
    batch["targets_segmentation"][1::2, 4:] = 0  # microbatches have unequal numbers of tokens
    return placed(run, batch)


def steps_of(run, tree=None, count=3):
    """Returns the canonical trees before and after `count` steps, and the losses."""
    begin, losses = first_tree(run) if tree is None else tree, []
    state, step, batch = state_from(run, begin), run.compile(), batch_of(run)
    for _ in range(count):
        state, metrics = step(state, batch, ())
        losses.append(np.mean(metrics["loss"] if "loss" in metrics else metrics["islands"]["loss"]))
    return begin, copied(run.codec.unpack(state)), np.array(losses)


@functools.cache
def on_one_device():
    return steps_of(made(**EXPERTS | SGD))


def test_only_adapters_change_and_have_moments():
    begin, end, losses = on_one_device()
    assert losses[-1] < losses[0]
    before, after = by_name(begin.params), by_name(end.params)
    for name, value in before.items():
        assert np.array_equal(after[name], value) != bool(ADAPTER.search(name)), name
    run = made(**ALL_KINDS)
    tree = run.codec.unpack(run.abstract_state)
    adapters = {name for name in by_name(tree.params) if ADAPTER.search(name)}
    kinds = ("mlp/wi_0", "shared_experts/wo", "self_attention/wkv_b", "self_attention/out", "MoeBlock_0/product/wi_1")
    assert all(any(kind in name for name in adapters) for kind in kinds)
    assert not any("gate" in name or "logits" in name for name in adapters)
    assert with_moments(tree) == adapters


def with_moments(tree):
    """Returns the names of the parameters that have moments."""
    return {name.rpartition("/mu/")[2] for name in by_name(tree.opt_state) if "/mu/" in name}


@pytest.mark.parametrize("combination", ALL_COMBINATIONS)
def test_the_base_begins_as_without_adapters(combination):
    """Compares shapes in every combination's unpacked state, and values in one program."""
    keys = {"base_num_decoder_layers": 1}
    run = made(combination=combination, **keys)
    tree = run.codec.unpack(run.abstract_state)
    assert with_moments(tree) == {name for name in by_name(tree.params) if ADAPTER.search(name)}
    if combination == FIRST:
        adapted, plain = (
            by_name(copied(jax.jit(it.model.init)(seed_key(0))[0])) for it in (run, made(enable_lora=False, **keys))
        )
        assert_equal_bits({name: value for name, value in adapted.items() if not ADAPTER.search(name)}, plain)


@pytest.mark.rest(covered_by="a mesh", cases=("microbatches", "experts"))
@pytest.mark.parametrize(
    "how",
    [
        {"devices": 1, "gradient_accumulation_steps": 2, "per_device_batch_size": 4},
        {
            "devices": 8,
            "ici_data_parallelism": 2,
            "ici_fsdp_parallelism": 2,
            "ici_tensor_parallelism": 2,
            "shard_optimizer_over_data": True,
        },
        {"devices": 8, "ici_expert_parallelism": 4, "ici_fsdp_parallelism": 2},
    ],
    ids=["microbatches", "data, fsdp, tensor, Zero-1", "experts"],
)
def test_the_same_losses(how):
    begin, _, expected = on_one_device()
    _, found, losses = steps_of(made(**EXPERTS | SGD | how), begin)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)  # summed in another order
    for name, value in by_name(found.params).items():
        if not ADAPTER.search(name):
            np.testing.assert_array_equal(value, by_name(begin.params)[name])


def test_islands_share_a_base():
    """The planted update changes only adapters, on each island by the number of its first row."""
    keys = {"enable_diloco": True, "ici_diloco_parallelism": 2, "diloco_sync_period": 2, "base_num_decoder_layers": 1}
    run = made(2, **keys, **SGD, per_device_batch_size=4)

    def update(tree, batch, frozen):
        moved = {
            name: leaf + batch["row"][0] * bool(ADAPTER.search(name)) for name, leaf in by_name(tree.params).items()
        }
        return tree._replace(params=jax.tree.unflatten(jax.tree.structure(tree.params), moved.values())), {}

    begin = tree = first_tree(run)
    step = jax.jit(build_diloco_train_step(run.config, update, run.param_shardings.storage))
    for _ in range(2):
        tree, _ = step(tree, packed_batch(run.config, ROWS), ())
    end, before = copied(tree), by_name(begin.params)
    for name, value in by_name(end.params).items():
        assert np.array_equal(value, before[name]) != bool(ADAPTER.search(name)), name
        for island in by_name(end.inner_state.params)[name]:
            np.testing.assert_array_equal(island, value)


def test_other_parameters_can_be_trained_too():
    run = made(base_num_decoder_layers=1, trainable_parameters_mask="[norm]")
    tree = run.codec.unpack(run.abstract_state)
    assert with_moments(tree) == {name for name in by_name(tree.params) if "norm" in name or ADAPTER.search(name)}


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"lora_rank": 0}, "both must be positive"),
        ({"lora_alpha": 0}, "both must be positive"),
        ({"lora_module_path": "q_proj"}, "matches no matrix; the matrices are: decoder/layers/mlp/wi_0/kernel, "),
        ({"lora_module_path": ".*"}, "tokens are looked up in the table of a tied head"),
        ({"lora_weight_qtype": "int8", "lora_module_path": "embedding"}, "tied head"),
    ],
)
def test_what_cannot_be_adapted(keys, said):
    with pytest.raises(UserError, match=said):
        made(**keys)


def test_a_state_and_its_base():
    """A state is loaded with a base that has moved, but not with other adapters."""
    paths = {"load_full_state_path": "runs/one", "load_parameters_path": "moved"}
    assert load(arguments(FIRST, **LORA | paths)).config.load_parameters_path == "moved"
    with pytest.raises(UserError, match="both load adapters"):
        load(arguments(FIRST, **LORA | paths | {"lora_restore_path": "runs/two"}))


def test_a_pattern_finds_parts_of_names():
    """MaxText's patterns name modules, without the last component of a parameter's name."""
    from trainer.models.matrices import adapted_names

    pattern = "decoder/layers/.*(self_attention/(query|out)|mlp/(wi_0|wo))"
    config = tiny_config(FIRST, **LORA | {"lora_module_path": pattern})
    short = [name.removeprefix("decoder/layers/").removesuffix("/kernel") for name in adapted_names(config)]
    assert sorted(short) == ["mlp/wi_0", "mlp/wo", "self_attention/out", "self_attention/query"]


def test_a_stored_base_takes_fewer_bytes():
    def bytes_of(**keys):
        run = made(base_emb_dim=64, base_mlp_dim=128, base_num_decoder_layers=1, **SGD, **keys)
        arguments = jax.tree.leaves(run.abstract_args())
        kernels = [
            leaf for name, leaf in by_name(run.codec.unpack(run.abstract_state).params).items() if "kernel" in name
        ]
        return [sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) for leaves in (arguments, kernels)]

    (whole, kernels), (small, codes) = bytes_of(), bytes_of(lora_weight_qtype="nf4", lora_tile_size=32)
    assert codes == pytest.approx(kernels * (1 / 8 + 1 / 32), rel=0.01)  # codes and scales
    assert whole - small == pytest.approx(kernels - codes, rel=0.01)
    assert jnp.dtype("uint8").itemsize == 1

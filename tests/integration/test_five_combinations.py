"""The promise of the three flags: same seed, same batches, same bits, in every combination."""

import functools

import jax
import numpy as np
import pytest
from support import ALL_COMBINATIONS, arguments, assert_equal_bits, copied, packed_batch, tiny_config

from trainer.backends import make_model
from trainer.config import load
from trainer.objectives import NextToken
from trainer.ops.random import seed_key
from trainer.runtime.place import place
from trainer.training import build

STEPS = 20
DROPOUT = {"dropout_rate": 0.1, "attention_dropout_rate": 0.1}
SETTINGS = {
    "scan with remat": {"scan_layers": True, "remat_policy": "full", **DROPOUT},
    "unrolled, 6 layers": {
        "scan_layers": False,
        "base_num_decoder_layers": 6,
        "remat_policy": "minimal",
        "gradient_clipping_threshold": 0.05,
        **DROPOUT,
    },
    "accumulation over 2 microbatches, Muon": {
        "gradient_accumulation_steps": 2,
        "record_internal_nn_metrics": 1,
        "opt_type": "muon",
        **DROPOUT,
    },
    "8 devices, fsdp 4 x tensor 2, Adafactor": {
        "ici_fsdp_parallelism": 4,
        "ici_tensor_parallelism": 2,
        "per_device_batch_size": 1,
        "num_vocab_tiling": 2,
        "opt_type": "adafactor",
        "adafactor_min_dim_size_to_factor": 8,
        **DROPOUT,
    },
    "separate head, blockwise attention, bfloat16": {
        "logits_via_embedding": False,
        "attention": "flash",
        "dtype": "bfloat16",
        "remat_policy": "minimal",
        "num_vocab_tiling": 4,
        "label_smoothing": 0.1,
    },
}


@functools.cache
def trained(combination, setting):
    """The canonical train state before and after 20 steps, and every step's metrics."""
    overrides = SETTINGS[setting]
    devices = jax.devices()[: 8 if "ici_fsdp_parallelism" in overrides else 1]
    config = load(arguments(combination, steps=STEPS, learning_rate=1e-2, **overrides)).config
    run = build(config, devices)
    state = run.init()
    start = copied(run.codec.unpack(state))
    step = run.step.lower(*run.abstract_args()).compile()
    metrics = []
    for i in range(STEPS):
        state, row = step(state, place(packed_batch(run.config, run.rows, seed=i), run.batch_shardings))
        metrics.append(row)
    return start, copied(run.codec.unpack(state)), jax.device_get(metrics)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("combination", ALL_COMBINATIONS)
def test_same_bits_after_20_steps(combination, setting):
    reference = trained(ALL_COMBINATIONS[0], setting)
    assert_equal_bits(trained(combination, setting), reference)
    start, end, metrics = reference
    assert end.step == STEPS
    assert metrics[-1]["loss"] != metrics[0]["loss"]
    with pytest.raises(AssertionError):
        assert_equal_bits(start.params, end.params)


@functools.cache
def gradients(combination):
    """Gradients of one batch with dropout and packing, under canonical names."""
    config = tiny_config(combination, remat_policy="full", **DROPOUT)
    model = make_model(config)
    params, rest = model.init(seed_key(0))
    objective = NextToken(model.apply)

    def loss(params):
        return objective.sums(params, rest, packed_batch(config, 4), seed_key(1)).minimized["lm_loss"]

    return copied(jax.jit(jax.grad(loss))(params))


@pytest.mark.parametrize("combination", ALL_COMBINATIONS)
def test_same_bits_of_gradients(combination):
    reference = gradients(ALL_COMBINATIONS[0])
    assert all(np.any(leaf) for leaf in jax.tree.leaves(reference))
    assert_equal_bits(gradients(combination), reference)

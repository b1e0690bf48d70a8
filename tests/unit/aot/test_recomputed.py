"""What the backward pass computes again is counted in the traced step, and a policy that saves more is suggested where
it would fit. unit/layers/test_remat.py compares the counts with compiled memory."""

import functools

import jax
import pytest
from support import arguments

from trainer.aot.recomputed import recomputed
from trainer.aot.suggest import affordable
from trainer.config.load import load
from trainer.training.build import build

SIZES = {
    "base_emb_dim": 64,
    "base_mlp_dim": 192,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 2,
    "head_dim": 16,
    "max_target_length": 32,
    "per_device_batch_size": 4,
    "attention": "dot_product",
    "remat_policy": "full",
}
WIDTHS = {
    "query_proj": 64,
    "key_proj": 32,
    "value_proj": 32,
    "context": 64,
    "out_proj": 64,
    "mlpwi_0": 192,
    "mlpwi_1": 192,
}
LAYER = {name: 4 * 4 * 32 * width for name, width in WIDTHS.items()}  # float32, 4 rows of 32 tokens
LAYERS = {name: 2 * size for name, size in LAYER.items()}


@functools.cache
def traced(devices=1, **keys):
    run = build(load(arguments("nnx", **SIZES | keys)).config, jax.devices()[:devices])
    return run.config, run.step.trace(*run.abstract_args()).jaxpr


def counted(devices=1, **keys):
    found = recomputed(traced(devices, **keys)[1], "cpu")
    return {name: size for name, size in found.items() if name in LAYER}


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"scan_layers": False},
        {"gradient_accumulation_steps": 2},
        {"devices": 4, "ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2},
        {"devices": 2, "ici_fsdp_parallelism": 1, "ici_context_parallelism": 2, "attention": "blockwise"},
        {"devices": 4, "ici_fsdp_parallelism": 4, "num_vocab_tiling": 2},
    ],
    ids=" ".join,
)
def test_every_tensor_of_every_layer_counts_once_on_its_device(keys):
    # The ring also names its softmax statistics, 4 entries in addition to 64.
    assert counted(**keys) == pytest.approx(LAYERS, rel=0.07 if "attention" in keys else 0)


def test_a_tpu_fills_rows_of_128_entries():
    found = recomputed(traced()[1], "tpu")
    heads = {"query_proj": 4, "key_proj": 2, "value_proj": 2, "context": 4}
    padded = {name: 128 * heads[name] if name in heads else 128 * -(-width // 128) for name, width in WIDTHS.items()}
    assert {name: found[name] for name in LAYER} == {name: 2 * 4 * 4 * 32 * width for name, width in padded.items()}


def test_what_a_policy_saves_is_not_computed_again():
    saved = {"query_proj", "key_proj", "value_proj"}
    assert counted(remat_policy="save_qkv_proj") == {name: LAYERS[name] for name in LAYERS if name not in saved}
    assert counted(remat_policy="none") == {}


def test_a_module_of_multi_token_prediction_is_a_layer_more():
    assert counted(mtp_num_layers=1) == {name: 3 * size for name, size in LAYER.items()}


def test_a_pipeline_computes_each_of_its_iterations_again():
    keys = {"ici_pipeline_parallelism": 2, "ici_fsdp_parallelism": 1, "num_pipeline_microbatches": 2}
    iterations = 3  # each with half of the rows; each stage needs only two of them
    assert counted(2, **keys) == {name: iterations * size for name, size in LAYER.items()}


FULL, ATTENTION = sum(LAYERS.values()), sum(LAYERS[name] for name in LAYERS if "mlp" not in name)


@pytest.mark.parametrize(
    ("available", "policy"),
    [
        (None, None),
        (100_000 + ATTENTION, None),
        (1.4 * (100_000 + FULL), "minimal_with_context"),
        (1.4 * (100_000 + ATTENTION), "save_dot_with_context_except_mlp"),
    ],
)
def test_the_policy_that_recomputes_least_and_fits_is_suggested(available, policy):
    found = affordable(*traced(), "gpu", 100_000, available)
    assert (found and found.settings) == (policy and f"remat_policy={policy}")


def test_a_suggestion_says_what_it_takes_and_what_is_still_recomputed():
    found = affordable(*traced(), "gpu", 1_000_000, 1e9)
    assert found.price == (
        f"would take about {(1e6 + FULL) / 1e6:.2f} MB of 1.00 GB per device, and norms and activation functions are "
        "recomputed"
    )


@pytest.mark.parametrize("policy", ["none", "minimal_with_context", "minimal_offloaded", "custom"])
def test_nothing_is_suggested_where_nothing_is_known_or_left(policy):
    assert affordable(*traced(remat_policy=policy), "gpu", 1, 1e12) is None


def test_a_policy_that_saves_less_of_something_is_not_suggested():
    found = affordable(*traced(remat_policy="minimal"), "gpu", 1, 1e12)
    assert found.settings == "remat_policy=minimal_with_context"

"""The attention op in a run's banner, and the reason if it is not the platform's kernel."""

from pathlib import Path

import pytest
from support import pinned

from trainer.config.load import load
from trainer.config.resolve import resolve
from trainer.observe.banner import banner_rows

SIZES = {
    "dataset_type": "synthetic",
    "attention": "autoselected",
    "max_target_length": 1024,
    "head_dim": 64,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 2,
    "dtype": "bfloat16",
    "ici_fsdp_parallelism": 4,
    "ici_tensor_parallelism": 2,
}
DROPOUT = {"enable_dropout": True, "attention_dropout_rate": 0.1}
UNALIKE = {"logical_axis_rules": "[[activation_kv_heads,[]]]"}


def attention(platform, **overrides):
    return rows(platform, **overrides)["attention"]


def rows(platform, capability=None, **overrides):
    words = [f"{key}={value}" for key, value in (pinned("nnx") | SIZES | overrides).items()]
    config = resolve(load(words).config, device_count=8, platform=platform)
    facts = {"device_kind": platform, "process_count": 1, "parameters": 1, "dataset": "", "run_dir": Path("run")}
    return dict(banner_rows(config, platform=platform, capability=capability, **facts))


def test_the_start_says_how_to_spare_the_bias():
    found = rows("gpu", (9, 0), dataset_type="stdlib")["attention"]
    assert found.endswith("no scores are skipped; max_segments_per_seq=N bounds the documents of a row)")
    assert rows("gpu", (9, 0), dataset_type="stdlib", max_segments_per_seq=8)["attention"] == "cudnn_flash_jax"


def test_the_tiles_of_the_loss():
    assert rows("cpu", num_vocab_tiling=4)["loss"] == "in 4 tiles of tokens"
    assert "loss" not in rows("cpu", num_vocab_tiling=1)


@pytest.mark.parametrize(
    ("platform", "overrides", "text"),
    [
        ("cpu", {}, "blockwise"),
        ("cpu", DROPOUT, "blockwise"),
        ("gpu", {"packing": False}, "cudnn_flash_jax"),
        (
            "gpu",
            {},
            "cudnn_flash_jax (documents share rows: a bias of 2.10 MB for a row, and no scores are skipped)",
        ),
        ("tpu", {}, "splash"),
        ("tpu", {"max_target_length": 128}, "dot_product"),
        ("tpu", {"attention": "blockwise"}, "blockwise"),
        ("tpu", DROPOUT, "blockwise (splash does not support attention_dropout_rate=0.1)"),
        ("tpu", {"attention": "blockwise"} | DROPOUT, "blockwise (splash does not support attention_dropout_rate=0.1)"),
        (
            "gpu",
            {"attn_logits_soft_cap": 30, "head_dim": 136},
            "blockwise (cudnn_flash_jax does not support attn_logits_soft_cap=30, head_dim=136 (at most 128))",
        ),
        (
            "tpu",
            UNALIKE,
            "blockwise (splash does not support different rules of activation_heads (tensor) and "
            "activation_kv_heads (none))",
        ),
    ],
)
def test_the_start_names_the_attention_op_and_what_bars_the_kernel(platform, overrides, text):
    assert attention(platform, **overrides) == text


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({}, "dot_product"),
        ({"attention_type": "local_sliding", "sliding_window_size": 5}, "dot_product, sliding window of 5 tokens"),
        (
            {"decoder_block": "gemma2", "sliding_window_size": 5},
            "dot_product, sliding window of 5 tokens; 1 layer in 2 attends to the whole document",
        ),
        (
            {"decoder_block": "gemma3", "sliding_window_size": 5},
            "dot_product, sliding window of 5 tokens",
        ),  # the model has only two layers, both local
    ],
)
def test_the_window(keys, said):
    assert attention("cpu", attention="dot_product", **keys) == said

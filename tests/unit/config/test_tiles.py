"""Tiles of splash attention: the automatic choice, refusals before compilation, and where tiles have an effect."""

import time

import pytest

from trainer.config.capabilities.all_keys import step_keys
from trainer.config.capabilities.splash_tiles import KEYS, LANES, Tiles
from trainer.config.effects import without_effect_here
from trainer.config.errors import UserError
from trainer.config.load import load
from trainer.config.numbers import around, divisors
from trainer.config.resolve import resolve
from trainer.config.resume import LAYOUT
from trainer.config.schema import schema

SIZES = """
dataset_type=synthetic vocab_size=4096 max_target_length=2048 per_device_batch_size=1 eval_interval=-1
base_emb_dim=192 base_num_query_heads=8 base_num_kv_heads=2 base_mlp_dim=512 base_num_decoder_layers=2 head_dim=64
attention=splash attention_dropout_rate=0 steps=100
"""
BLOCKS = [name for name in Tiles._fields if name.startswith("block_")]


def resolved(words, platform="tpu"):
    return resolve(load((SIZES + words).split()).config, device_count=1, platform=platform)


def mistakes(words):
    with pytest.raises(UserError) as caught:
        resolved(words)
    return str(caught.value).split("\n  ")[1:]


def test_each_field_has_its_key_and_its_default():
    assert {name: schema().keys[key].default for name, key in KEYS.items()} == Tiles()._asdict()


def test_they_are_a_part_of_the_compiled_step_and_may_change_on_resume():
    assert set(KEYS.values()) <= set(step_keys())
    assert set(KEYS.values()) <= set(LAYOUT)
    assert not {"reuse_example_batch", "metrics_file", "log_period"} & set(step_keys())


@pytest.mark.parametrize(("length", "side"), [(128, 128), (384, 128), (768, 256), (1536, 512), (8192, 512)])
def test_by_default_tiles_are_square_with_the_largest_side_that_divides_the_row(length, side):
    fitted = Tiles().fitted(length)
    assert {getattr(fitted, name) for name in BLOCKS} == {side}


def test_a_size_beyond_the_row_is_the_row_and_parts_follow_their_tile():
    fitted = Tiles(block_q=4096, block_kv=1024, block_kv_dkv=256, block_kv_dkv_compute=128).fitted(1024)
    assert (fitted.block_q, fitted.block_kv, fitted.block_kv_compute) == (1024, 1024, 512)
    assert (fitted.block_kv_dkv, fitted.block_kv_dkv_compute, fitted.block_q_dkv) == (256, 128, 512)


def test_devices_that_share_rows_have_queries_of_a_share():
    words = "ici_context_parallelism=4 sa_block_q=1024 sa_block_kv=384"
    with pytest.raises(
        UserError, match=r"sa_block_kv=384: .* divides max_target_length=2048 / 4 devices = 512; nearest: 256 or 512$"
    ) as raised:
        resolve(load((SIZES + words).split()).config, device_count=4, platform="tpu")
    assert "sa_block_q=" not in str(raised.value)  # it exceeds a device's share and is reduced to it


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        ("sa_block_q=300", ["sa_block_q=300: splash attention needs a multiple of 128 that divides "
                            "max_target_length=2048; nearest: 256 or 512"]),
        ("sa_block_kv=64", ["sa_block_kv=64: splash attention needs a multiple of 128 that divides "
                            "max_target_length=2048; nearest: 128"]),
        ("sa_block_q_dq=768 sa_block_kv_dq=640", [
            "sa_block_q_dq=768: splash attention needs a multiple of 128 that divides max_target_length=2048; "
            "nearest: 512 or 1024",
            "sa_block_kv_dq=640: splash attention needs a multiple of 128 that divides max_target_length=2048; "
            "nearest: 512 or 1024",
        ]),
        ("sa_block_kv=1024 sa_block_kv_compute=384", ["sa_block_kv_compute=384: splash attention needs a multiple of "
                                                      "128 that divides sa_block_kv=1024; nearest: 256 or 512"]),
        ("sa_block_kv_dkv_compute=1024", ["sa_block_kv_dkv_compute=1024: splash attention needs a multiple of 128 that "
                                          "divides sa_block_kv_dkv=512; nearest: 512"]),
        ("max_target_length=1280 sa_block_q_dkv=512", [
            "sa_block_q_dkv=512: splash attention needs a multiple of 128 that divides max_target_length=1280; "
            "nearest: 256 or 640"]),
    ],
)  # fmt: skip
def test_what_the_kernel_does_not_accept_is_refused_with_the_nearest_sizes(words, lines):
    assert mistakes(words) == lines


@pytest.mark.parametrize(
    "words",
    [
        # MaxText's defaults, and values from its configuration files.
        " ".join(f"{KEYS[name]}=512" for name in BLOCKS),
        "sa_block_q=2048 sa_block_kv=2048 sa_block_kv_compute=1024",
        "max_target_length=256 sa_block_q=512 sa_block_kv=512 sa_block_kv_compute=512",
        "sa_use_fused_bwd_kernel=true sa_block_q_dq=300",
        "sa_q_layout=SEQ_MINOR",
    ],
)
def test_what_it_accepts_passes(words):
    assert resolved(words).attention == "splash"


def test_they_act_where_splash_is_the_op_and_a_warning_says_so_elsewhere():
    words = "attention=autoselected sa_block_q=300 sa_q_layout=SEQ_MINOR"
    loaded = load((SIZES + words).split())
    with pytest.raises(UserError, match="sa_block_q=300"):
        resolve(loaded.config, device_count=1, platform="tpu")
    for length, platform in ((2048, "cpu"), (2048, "gpu"), (512, "tpu"), (1100, "tpu")):
        config = load([*(SIZES + words).split(), f"max_target_length={length}"]).config
        lines = without_effect_here(resolve(config, device_count=1, platform=platform), loaded.changed, loaded.config)
        assert lines == [
            f"{key} (command line) has no effect: the attention op is not splash here"
            for key in ("sa_block_q=300", 'sa_q_layout="SEQ_MINOR"')
        ]


def test_the_fused_kernel_has_no_tiles_of_dq():
    loaded = load((SIZES + "sa_use_fused_bwd_kernel=true sa_block_q_dq=256 sa_block_q_dkv=256").split())
    config = resolve(loaded.config, device_count=1, platform="tpu")
    (line,) = without_effect_here(config, loaded.changed, loaded.config)
    assert line.startswith("sa_block_q_dq=256 (command line) has no effect: with sa_use_fused_bwd_kernel=true")


def test_the_nearest_sizes_of_a_long_row_are_found_at_once():
    def nearest(size, whole):
        return around(size, (LANES * part for part in divisors(whole // LANES)))

    started = time.process_time()
    assert nearest(100, 2147483520) == "128"
    assert nearest(2147483519, 2147483520) == "715827840 or 2147483520"
    assert [nearest(size, 128 * 36) for size in (129, 128 * 5, 10**6)] == ["128 or 256", "512 or 768", "4608"]
    assert time.process_time() - started < 1  # trying them one by one would take seconds

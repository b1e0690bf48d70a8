"""num_vocab_tiling: refused values, and the choice and message of -1."""

import pytest

from trainer.config.capabilities.vocab_tiles import chosen, tile_bytes
from trainer.config.errors import UserError
from trainer.config.load import load
from trainer.config.resolve import resolve

SIZES = """
dataset_type=synthetic vocab_size=4096 base_emb_dim=256 max_target_length=96 per_device_batch_size=4 eval_interval=-1
base_num_query_heads=4 base_num_kv_heads=2 base_mlp_dim=512 base_num_decoder_layers=2 head_dim=32 dtype=bfloat16
"""
MESH = " ici_data_parallelism=2 ici_fsdp_parallelism=2 ici_tensor_parallelism=2"


def resolved(words, devices=1):
    asked = load((SIZES + words).split()).config
    config = resolve(asked, device_count=devices, platform="cpu")
    return config, chosen(asked, config)


def mistakes(words, devices=1):
    with pytest.raises(UserError) as caught:
        resolved(words, devices)
    return str(caught.value).split("\n  ")[1:]


@pytest.mark.parametrize(
    ("words", "devices", "said"),
    [
        (
            "num_vocab_tiling=5",
            1,
            ["num_vocab_tiling=5: 384 tokens per device in a microbatch are not a multiple of it; nearest: 4 or 6"],
        ),
        # Two rows on each of four shards of the batch, in each microbatch.
        (
            f"num_vocab_tiling=9 per_device_batch_size=1 gradient_accumulation_steps=3 {MESH}",
            8,
            ["num_vocab_tiling=9: 192 tokens per device in a microbatch are not a multiple of it; nearest: 8 or 12"],
        ),
        (
            "num_vocab_tiling=1000",
            1,
            ["num_vocab_tiling=1000: 384 tokens per device in a microbatch are not a multiple of it; nearest: 384"],
        ),
        # 4 rows in training and 3 in evaluation: the suggested numbers divide both batches.
        (
            "num_vocab_tiling=128 eval_interval=10 eval_per_device_batch_size=3",
            1,
            [
                "num_vocab_tiling=128: 288 tokens per device in an evaluation batch are not a multiple of it; "
                "nearest: 96"
            ],
        ),
    ],
)
def test_tiles_must_divide_the_tokens_of_a_device(words, devices, said):
    assert mistakes(words, devices) == said


def test_without_evaluation_its_batch_does_not_matter():
    assert resolved("num_vocab_tiling=128 eval_per_device_batch_size=3")[0].num_vocab_tiling == 128


@pytest.mark.parametrize("value", ["0", "-2", "1.5"])
def test_other_values_are_refused(value):
    assert "num_vocab_tiling" in mistakes(f"num_vocab_tiling={value}")[0]


@pytest.mark.parametrize(
    ("words", "devices", "tiles"),
    [
        ("per_device_batch_size=8", 1, 4),  # logits are as large as 1.5 float32 heads; three tiles save just one
        ("per_device_batch_size=6", 1, 1),  # 1.125 heads: only more than nine tiles would save one head
        ("per_device_batch_size=32", 1, 12),
        ("per_device_batch_size=32 max_target_length=97", 1, 16),  # a divisor of 32 x 97
        ("per_device_batch_size=1 max_target_length=997", 1, 1),  # a prime number of tokens
        ("per_device_batch_size=32 dtype=float32", 1, 24),
        ("per_device_batch_size=32 eval_interval=10 eval_per_device_batch_size=5", 1, 12),
        (f"per_device_batch_size=8 {MESH}", 8, 6),  # tensor shards logits and head alike
    ],
)
def test_the_chosen_number(words, devices, tiles):
    config, _ = resolved(f"num_vocab_tiling=-1 {words}", devices)
    assert config.num_vocab_tiling == tiles
    assert resolve(config, device_count=devices, platform="cpu") == config
    logits, waiting = tile_bytes(config)
    if tiles > 1:
        assert logits / tiles <= waiting / 2
        assert logits - logits / tiles > waiting


def test_without_a_divisor_in_the_range_fewer_tiles_are_chosen():
    """There are 4 x 1,021 tokens, and 1,021 is prime: 1,021 tiles are too many, and four tiles save three quarters."""
    config, said = resolved("num_vocab_tiling=-1 vocab_size=131072 base_emb_dim=128 max_target_length=1021")
    assert config.num_vocab_tiling == 4
    assert said[0].startswith("num_vocab_tiling=-1: 4 tiles of 1,021 tokens per device")


def test_the_bytes_of_one_device():
    config, _ = resolved(f"num_vocab_tiling=-1 per_device_batch_size=8 {MESH}", 8)
    # 16 rows of 96 tokens on each of four shards, half of the vocabulary; bfloat16 logits, a float32 head.
    assert tile_bytes(config) == (16 * 96 * 2048 * 2, 2048 * 256 * 4)


def test_the_start_says_what_was_chosen():
    _, said = resolved("num_vocab_tiling=-1 per_device_batch_size=32")
    assert said == [
        "num_vocab_tiling=-1: 12 tiles of 256 tokens per device: logits take 2.10 MB instead of 25.17 MB, "
        "and the head's gradient 4.19 MB; this is only for head and loss: the peak memory of a step may not shrink; "
        "compare with trainer.train_compile"
    ]
    _, said = resolved("num_vocab_tiling=-1 per_device_batch_size=1")
    assert said == [
        "num_vocab_tiling=-1: 1, no tiles: logits take 0.79 MB per device, and no number of tiles "
        "saves more than the 4.19 MB that the head's gradient would add"
    ]
    # Nine tiles save exactly one head, and 12 would save more.
    _, said = resolved("num_vocab_tiling=-1 per_device_batch_size=6")
    assert said == [
        "num_vocab_tiling=-1: 1, no tiles: logits take 4.72 MB per device, and no number of tiles up to 9 that divides "
        "the tokens saves more than the 4.19 MB that the head's gradient would add"
    ]
    assert resolved("num_vocab_tiling=4")[1] == resolved("")[1] == []

"""Extreme numbers: one message, before anything is traced or allocated."""

import time

import pytest

from trainer.config.command import read_words
from trainer.config.errors import UserError
from trainer.config.load import load
from trainer.config.reader import Reader
from trainer.config.resolve import resolve
from trainer.config.schema import schema
from trainer.config.sizes import MAX_ENTRIES, least_bytes

HUGE = [
    f"{2**31}",
    f"{2**32}",
    f"{2**63}",
    "1e39",
    "1e308",
    "inf",
    "-inf",
    "nan",
    "1e400",
    "9" * 100_000,
    "-9" + "0" * 50,
]
NUMBERS = [key.name for key in schema().keys.values() if key.kind in (int, float)]
# Numbers of any size, because only Python uses them.
UNBOUNDED = {"max_num_checkpoints_to_keep"}
# Numbers that may exceed 32 bits: seeds, as in NumPy, and wavelengths, which are floats in the program.
WIDE = {
    "init_weights_seed",
    "data_shuffle_seed",
    "rope_max_timescale",
    "rope_min_timescale",
    "local_rope_max_timescale",
}
WIDE |= {"decode_sampling_seed", "prefix_caching_hbm_byte"}


def refused(*words: str) -> str:
    with pytest.raises(UserError) as caught:
        load(words)
    assert len(str(caught.value)) < 1000
    return str(caught.value)


@pytest.mark.parametrize("name", NUMBERS)
def test_every_number_ends_where_the_program_would(name):
    kind = schema().keys[name].kind
    texts = [] if name in UNBOUNDED else ["-2"]
    for text in HUGE:
        allowed = name in UNBOUNDED or (name in WIDE and float(text) < 1e15) or (kind is float and float(text) < 3.4e38)
        texts += [] if allowed else [text]
    for text in texts:
        read_words(reader := Reader(schema()), [word := f"{name}={text}"], "a word")
        if not reader.mistakes:  # only a check of the whole configuration refuses it
            reader.mistakes.append(refused(word))
        assert f"{name}=" in reader.mistakes[0]
        assert len(reader.mistakes[0]) < 1000


def stage_2(*words: str) -> str:
    loaded = load(["dataset_type=synthetic", *words])
    with pytest.raises(UserError) as caught:
        resolve(loaded.config, device_count=4, platform="cpu")
    assert len(str(caught.value)) < 1000
    return str(caught.value)


def test_the_nearest_number_of_heads_is_found_at_once():
    started = time.process_time()
    message = refused("base_num_query_heads=2147483646", "base_num_kv_heads=1073741824")
    assert "nearest: base_num_kv_heads=1073741823" in message
    assert "nearest: base_num_kv_heads=1" in refused("base_num_query_heads=2147483647", "base_num_kv_heads=4")
    assert time.process_time() - started < 2  # counting to 2**31 would take minutes


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["max_target_length=2147483644"],
            "8 x 4 devices x 2147483644 tokens = 6.872e+10 tokens in an update; the maximum is",
        ),
        (["per_device_batch_size=2147483647"], "tokens in an update"),
        (["gradient_accumulation_steps=2147483647"], "8 x 4 devices x 2147483647 microbatches x 128 tokens"),
        (["eval_per_device_batch_size=2147483647"], "tokens in an evaluation batch"),
        (
            ["base_mlp_dim=2147483644", "base_emb_dim=2147483644"],
            "wi_0/kernel [layers 2, embed 2147483644, mlp 2147483644",
        ),
        (
            ["vocab_size=2147483644", "base_emb_dim=2147483644"],
            "token_embedder/embedding [vocab 2147483644, embed 214748",
        ),
        (["per_device_batch_size=0.25", "attention=dot_product", "max_target_length=536870912"], "scores of attention"),
    ],
)
def test_products_of_sizes_that_are_each_in_their_range(words, message):
    assert message in stage_2(*words)


def test_an_evaluation_that_is_off_has_no_batch():
    words = ["dataset_type=synthetic", "eval_interval=-1"]
    config = load([*words, "eval_per_device_batch_size=1e6", "max_target_length=4096"]).config
    resolve(config, device_count=4, platform="cpu")


def test_the_scale_of_a_model_takes_no_size_out_of_its_range():
    message = refused("base_num_decoder_layers=65536", "global_parameter_scale=8")
    assert "base_num_decoder_layers=131072 (command line, x 2 by global_parameter_scale=8): out of range" in message


@pytest.mark.parametrize("name", ["llama3.1-405b", "llama3.3-70b", "qwen3-32b"])
def test_models_that_exist_are_far_from_the_bounds(name):
    words = ["dataset_type=synthetic", f"model_name={name}", "max_target_length=131072", "per_device_batch_size=1"]
    config = resolve(load(words).config, device_count=256, platform="tpu")
    assert least_bytes(config) < 256 * 95e9  # it fits on as many chips of 95 GB
    assert MAX_ENTRIES > 256 * 126 * 16384 * 53248


def test_the_least_that_training_takes():
    def least(*words):
        return least_bytes(resolve(load(["dataset_type=synthetic", *words]).config, device_count=2, platform="cpu"))

    hidden = 16 * 128 * (192 * 4 + 5 * 4)  # including the batch
    parameters = (least() - hidden) // 12
    assert (
        1_500_000 < parameters < 1_967_040
    )  # least_bytes leaves out values and the second input projection of base.yml's model
    assert least("opt_type=sgd") == 4 * parameters + hidden
    assert least("optimizer_memory_host_offload=true") == 4 * parameters + hidden
    assert least("weight_dtype=bfloat16") == 8 * parameters + hidden
    assert least("trainable_parameters_mask=[norm]") == 4 * parameters + hidden
    assert least("gradient_accumulation_steps=3") == 12 * parameters + hidden + 2 * 16 * 128 * 5 * 4
    outside = 2 * 3072 * 192
    assert least("decoder_block=a:B") == 12 * outside + hidden

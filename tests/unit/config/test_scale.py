"""global_parameter_scale: sizes are scaled once, before anything reads them."""

import re

import pytest
from support import ALL_COMBINATIONS, arguments

from trainer.config.dump import to_yaml
from trainer.config.errors import UserError
from trainer.config.load import load
from trainer.config.resolve import resolve
from trainer.config.resume import check_resume
from trainer.config.scale import factors
from trainer.models.flops import matmul_parameters

SIZES = ("base_emb_dim", "base_num_query_heads", "base_num_kv_heads", "base_mlp_dim", "base_num_decoder_layers")
BASE = dict(zip(SIZES, (192, 6, 2, 512, 2), strict=True))
WORDS = (
    " ".join(f"{name}={size}" for name, size in BASE.items()) + " head_dim=32 vocab_size=3072 dataset_type=synthetic"
)


def loaded(words, file="base.yml"):
    return load(f"{file} {words}".split())


# Values of MaxText's get_individual_scales (its commit e591f30), computed by hand.
@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        (1, (1, 1, 1, 1, 1)),
        (2, (1, 2, 2, 2, 1)),
        (4, (2, 2, 2, 2, 1)),
        (8, (2, 2, 2, 2, 2)),
        (16, (2, 4, 4, 4, 2)),
        (128, (4, 8, 8, 8, 4)),
        (1024, (8, 16, 16, 16, 8)),
    ],
)
def test_sizes_grow_by_maxtexts_factors(scale, expected):
    assert tuple(factors(scale)[name] for name in SIZES) == expected
    config = loaded(f"{WORDS} global_parameter_scale={scale}").config
    assert {name: config[name] for name in SIZES} == {
        name: BASE[name] * factor for name, factor in zip(SIZES, expected, strict=True)
    }
    assert (config.head_dim, config.vocab_size, config.global_parameter_scale) == (32, 3072, 1)


def test_the_model_has_about_that_many_times_the_parameters():
    def parameters(scale):
        return matmul_parameters(loaded(f"{WORDS} vocab_size=2 global_parameter_scale={scale}").config)

    # head_dim stays the same, so attention's matrices grow with heads x width.
    assert parameters(8) / parameters(1) == pytest.approx(8, rel=0.01)
    assert parameters(1024) / parameters(1) == pytest.approx(1024, rel=0.01)


def test_the_start_says_what_grew_and_the_configuration_that_is_written_loads_as_it_is(tmp_path):
    first = loaded(f"{WORDS} global_parameter_scale=16")
    (note,) = [note for note in first.notes if "scale" in note]
    assert note == (
        "global_parameter_scale=16: base_emb_dim 192 -> 384, base_num_query_heads 6 -> 24, base_num_kv_heads 2 -> 8, "
        "base_mlp_dim 512 -> 2048, base_num_decoder_layers 2 -> 4"
    )
    config = resolve(first.config, device_count=1, platform="cpu")
    (tmp_path / "config.yml").write_text(to_yaml(config))
    again = loaded("", tmp_path / "config.yml")
    assert not [note for note in again.notes if "scale" in note]
    assert resolve(again.config, device_count=1, platform="cpu") == config
    assert check_resume(again.config.to_dict(), config, False, "there") == []


def test_a_preset_and_what_was_changed_of_it_are_scaled():
    load_ = loaded("model_name=llama2-7b base_emb_dim=2048 global_parameter_scale=2")
    assert {
        "model_name=llama2-7b: base_emb_dim 4096 -> 2048 (command line)",
        "global_parameter_scale=2: base_num_query_heads 32 -> 64, base_num_kv_heads 32 -> 64, "
        "base_mlp_dim 11008 -> 22016",
    } <= set(load_.notes)
    assert (load_.config.base_emb_dim, load_.config.base_num_query_heads) == (2048, 64)


def test_a_yml_may_give_it(tmp_path):
    path = tmp_path / "my.yml"
    path.write_text("base_config: base.yml\nglobal_parameter_scale: 8\n")
    assert loaded(f"{WORDS}", path).config.base_num_decoder_layers == 4


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("6", "a power of two; nearest: 4 or 8"),
        ("1000", "nearest: 512 or 1024"),
        ("0", "out of range; allowed: an integer in [1, 1048576]"),
        ("2e30", "out of range"),
    ],
)
def test_another_scale_is_refused(given, message):
    with pytest.raises(UserError, match=rf"global_parameter_scale={given} \(command line\): .*{re.escape(message)}"):
        loaded(f"{WORDS} global_parameter_scale={given}")


def test_checks_see_the_scaled_sizes():
    with pytest.raises(UserError, match=r"base_num_query_heads=10 \(command line, x 2 by global_parameter_scale=2\)"):
        loaded(f"{WORDS} base_num_query_heads=5 base_num_kv_heads=3 global_parameter_scale=2")
    mesh = "ici_fsdp_parallelism=1 ici_tensor_parallelism=4"
    for scale, fits in ((1, False), (2, True)):
        config = loaded(f"{WORDS} {mesh} base_num_query_heads=4 global_parameter_scale={scale}").config
        if fits:
            assert resolve(config, device_count=4, platform="cpu").base_num_kv_heads == 4
        else:
            with pytest.raises(UserError, match="base_num_kv_heads=2: tensor 4"):
                resolve(config, device_count=4, platform="cpu")


def test_the_model_that_is_built_is_the_scaled_one():
    import jax

    from trainer.training.build import build

    words = arguments(ALL_COMBINATIONS[0], global_parameter_scale=8)
    run = build(load(words).config, jax.devices()[:1])
    kernel = run.codec.unpack(run.abstract_state).params["decoder"]["layers"]["self_attention"]["query"]["kernel"]
    assert kernel.shape == (2 * 2, 2 * 16, 2 * 4, 8)

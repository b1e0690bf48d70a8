"""Contradictions between settings, and settings without effect."""

import pytest

from trainer.config import UserError, load, schema


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("max_num_checkpoints_to_keep=0", "max_num_checkpoints_to_keep=0 .*: at least 1, or none to keep all"),
        ("reset_optimizer=true", "reset_optimizer=true .*: acts on the state of load_full_state_path"),
        ("load_parameters_path=a load_full_state_path=b", "load_parameters_path=.*: give one of them"),
        ("run_name=a/b", "the name of one folder"),
        ("run_name=..", "the name of one folder"),
        ("run_name=a\x1b[2Jb", "without / or control characters"),
        ("base_output_directory=gs://bucket/x", "remote paths are not built yet"),
        ("dataset_path=s3://bucket/x", "remote paths are not built yet"),
        ("base_output_directory=", "empty; write"),
        (
            "base_num_query_heads=8 base_num_kv_heads=3",
            r"=8 \(command line\), base_num_kv_heads=3 \(command line\): .*kv_heads=2",
        ),
        ("head_dim=33", "must be even.*nearest: 32 or 34"),
        ("rope_min_timescale=10000", "below the longest"),
        ("mlp_activations=[]", "one, or two"),
        ("mlp_activations=[silu,gelu,linear]", "one, or two"),
        ("mlp_activations=[silo,linear]", "no activation silo; allowed: .*nearest: silu"),
        ("lr_schedule_type=wsd warmup_steps_fraction=0.6 wsd_decay_steps_fraction=0.5", "add up to 1.1"),
        ("steps=-1", "each is said to follow the other"),
        ("adamw_mask=[ok,'(']", "is no regular expression"),
        ("trainable_parameters_mask=[+]", "is no regular expression"),
        (
            "ici_data_parallelism=-1",
            r"=-1 \(command line\), ici_fsdp_parallelism=-1 \(default\), .*only one of them may be -1",
        ),
        ("dataset_type=stdlib vocab_size=256", "vocab_size=256 .*: at least 257"),
        ("dataset_type=stdlib max_target_length=15", "max_target_length=15 .*: at least 16"),
    ],
)
def test_contradictions(words, message):
    with pytest.raises(UserError, match=message) as caught:
        load(words.split())
    assert "1 mistake in" in str(caught.value)


@pytest.mark.parametrize(
    "words",
    [
        "warmup_steps_fraction=0.6 wsd_decay_steps_fraction=0.5",
        "lr_schedule_type=wsd warmup_steps_fraction=0.7 wsd_decay_steps_fraction=0.3",
        "steps=-1 learning_rate_schedule_steps=100",
        "base_num_query_heads=8 base_num_kv_heads=2",
        "dataset_type=synthetic eval_interval=5 eval_steps=-1",
        "dataset_type=synthetic vocab_size=2 max_target_length=2",
        "dataset_type=stdlib vocab_size=257 max_target_length=16",
        "mlp_activations=gelu",
        "mlp_activations=[relu,relu]",
        "run_name=naïve-1.b",
    ],
)
def test_neighbours_of_contradictions_pass(words):
    load(words.split())


@pytest.mark.parametrize(
    ("words", "key", "reason"),
    [
        ("lr_schedule_type=cosine wsd_decay_style=cosine", "wsd_decay_style", "lr_schedule_type"),
        ("lr_schedule_type=linear wsd_decay_steps_fraction=0.1", "wsd_decay_steps_fraction", "lr_schedule_type"),
        ("lr_schedule_type=constant learning_rate_final_fraction=0.5", "learning_rate_final_fraction", "constant"),
        ("opt_type=sgd adam_b1=0.8", "adam_b1", "sgd"),
        ("opt_type=sgd mu_dtype=bfloat16", "mu_dtype", "sgd"),
        ("opt_type=sgd adamw_mask=[a]", "adamw_mask", "sgd"),
        ("adam_weight_decay=0 adamw_mask=[a]", "adamw_mask", "adam_weight_decay=0"),
        ("enable_dropout=false dropout_rate=0.1", "dropout_rate", "enable_dropout"),
        ("model_name=llama2-7b attention_dropout_rate=0.1", "attention_dropout_rate", "enable_dropout"),
        ("logits_via_embedding=false normalize_embedding_logits=false", "normalize_embedding_logits", "logits_via"),
        ("eval_interval=0 eval_steps=3", "eval_steps", "eval_interval"),
        ("eval_interval=-1 eval_per_device_batch_size=2", "eval_per_device_batch_size", "eval_interval"),
        ("prompt= decode_sampling_temperature=1", "decode_sampling_temperature", "prompt"),
        ("dataset_type=synthetic prompt=hello", "prompt", "tokenizer"),
        ("dataset_type=synthetic dataset_path=x", "dataset_path", "synthetic"),
        ("dataset_type=synthetic enable_data_shuffling=false", "enable_data_shuffling", "synthetic"),
        ("enable_data_shuffling=false data_shuffle_seed=1", "data_shuffle_seed", "enable_data_shuffling"),
    ],
)
def test_a_key_without_effect_is_a_warning(words, key, reason):
    (line,) = load(words.split()).warnings
    assert line.startswith(f"{key}=")
    assert "(command line) has no effect" in line
    assert reason in line.partition("no effect: ")[2]


@pytest.mark.parametrize(
    "words",
    [
        "lr_schedule_type=wsd wsd_decay_style=cosine",
        "lr_schedule_type=constant warmup_steps_fraction=0.2",
        "opt_type=sgd",
        "enable_dropout=true dropout_rate=0.1",
        "eval_interval=10 eval_steps=3",
        "model_name=llama2-7b",
        "dataset_type=synthetic prompt=",
        "dataset_type=stdlib enable_data_shuffling=true data_shuffle_seed=1",
    ],
)
def test_keys_with_effect_are_not_warned_about(words):
    assert load(words.split()).warnings == []


def test_a_yml_may_repeat_a_default_without_effect(tmp_path):
    path = tmp_path / "my.yml"
    style = schema().keys["wsd_decay_style"].default
    path.write_text(
        f"base_config: base.yml\nlr_schedule_type: cosine\nwsd_decay_style: {style}\nwsd_decay_steps_fraction: 0.37\n"
    )
    (line,) = load([str(path)]).warnings
    assert line.startswith(f"wsd_decay_steps_fraction=0.37 ({path}:4)")

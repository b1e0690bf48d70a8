"""The differences allowed between a checkpoint and the command that resumes from it."""

import functools

import pytest
import yaml
from support import ALL_COMBINATIONS, pinned

from trainer.config.capabilities.all_keys import ROWS, keys_of
from trainer.config.dump import PROCESSES, SUPERVISION, to_yaml
from trainer.config.errors import UserError
from trainer.config.flags import FLAGS
from trainer.config.key_rows import Resume
from trainer.config.load import load
from trainer.config.resolve import frozen, resolve
from trainer.config.resume import (
    BATCH,
    LAYOUT,
    MAY_CHANGE,
    UPDATE,
    another_program,
    check_optimizer,
    check_resume,
    resets,
)
from trainer.config.schema import schema

LENGTH, AROUND = keys_of(Resume.LENGTH), keys_of(Resume.AROUND)

# dataset_type is set because keys for other data are errors without it, and mtp_num_layers because evaluation may name
# a module.
BASE = (
    "dataset_type=stdlib mtp_num_layers=2 steps=20 per_device_batch_size=8 eval_interval=5 "
    "logical_axis_rules=[[norm,[]]] " + " ".join(f"{flag}={value}" for flag, value in pinned("nnx").items())
)


OTHER_FLAGS = " ".join(f"{flag}={value}" for flag, value in pinned(ALL_COMBINATIONS[-1]).items())


def config(words="", devices=1):
    loaded = load(f"{BASE} {words}".split())
    return resolve(loaded.config, device_count=devices, platform="cpu")


@functools.cache
def saved(words="", devices=1):
    """Returns the configuration as a checkpoint stores it."""
    return yaml.safe_load(to_yaml(config(words, devices)))


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("", ""),
        (f"{OTHER_FLAGS} debug_sharding=true", ""),  # the same program
        ("scan_layers=false", "scan_layers: true -> false"),
        ("per_device_batch_size=4 gradient_accumulation_steps=2", "per_device_batch_size: 8.0 -> 4.0, gradient_acc"),
    ],
)
def test_another_program_for_the_same_mathematics_is_told(words, line):
    found = another_program(saved(), config(words))
    assert found.startswith("losses may differ in the last bits") if line else not found
    assert line in found


def check(words, before="", devices=1, devices_before=1):
    given = load(f"{BASE} {words}".split()).config.learning_rate_schedule_steps != -1
    return check_resume(saved(before, devices_before), config(words, devices), given, "runs/x/checkpoints/5")


def refused(*args, **kwargs):
    with pytest.raises(UserError) as error:
        check(*args, **kwargs)
    first, *lines, last = str(error.value).splitlines()
    assert first == "runs/x/checkpoints/5 was saved with another configuration (old -> new):"
    assert last.startswith("use the old values, or choose another run_name for a new run")
    assert last.endswith("a fresh optimizer: reset_optimizer=true") == any(
        line.strip().partition(":")[0] in UPDATE for line in lines
    )
    return [line.strip() for line in lines]


def test_each_key_is_in_one_row_and_there_are_no_others():
    names = [name for row in ROWS for name in row.names]
    assert len(names) == len(set(names))
    assert set(schema().keys) >= set(names)


def test_the_list_is_this_one():
    """Written out, so that no key leaves or enters the list by accident."""
    assert set(BATCH) == {"per_device_batch_size", "gradient_accumulation_steps"}
    assert set(LENGTH) == {"steps", "num_epoch", "num_batches", "learning_rate_schedule_steps"}
    assert {*FLAGS, "scan_layers", "logical_axis_rules"} <= set(LAYOUT)
    sections = {"Run and output", "Checkpoints", "Generation", "Serving", "Ahead-of-time compilation"}
    around = {name for name, key in schema().keys.items() if key.section in sections}
    around -= {"load_parameters_path", "load_full_state_path"}  # the sources that the run began with
    evaluation = {"eval_interval", "eval_steps", "eval_per_device_batch_size"}
    evaluation |= {"eval_dataset_name", "eval_split", "eval_data_columns", "tokenize_eval_data", "grain_eval_files"}
    evaluation |= {"hf_eval_split", "hf_eval_files", "mtp_eval_target_module"}
    evaluation |= {"eval_tasks", "eval_tasks_interval", "eval_tasks_limit", "abort_on_eval_tasks_error"}
    evaluation |= {"eval_tasks_timeout_seconds", "eval_tasks_allow_code"}
    assert set(AROUND) == around | evaluation | {
        "data_cache_directory",
        "remote_copies_gib",
        "prepared_path",
        "prepare_part_mib",
        "prepare_workers",
        "skip_step_scaling_factor",
        "routed_bias_update_rate",
        "weight_sparsity_update_step",
        "reward_num_workers",
        "reward_worker_timeout_seconds",
        "rollout_micro_batch_size",
        "save_teacher_logits",
        "teacher_logits_k",
    }


def test_the_same_configuration_has_nothing_to_say():
    assert check("") == []


# A value that differs from BASE, for keys for which `other` cannot derive one.
OTHERS = {
    "compile_topology": "compile_topology=v5e-8",
    "eval_data_columns": "eval_data_columns=[other]",
    "eval_tasks": "eval_tasks=[text]",
    "keep_best_metric": "keep_best_metric=max:eval_reward",
    "num_vocab_tiling": "num_vocab_tiling=2",
    "sharding_tolerance": "sharding_tolerance=0.5",
    "routed_bias_update_rate": "routed_bias_update_rate=0.5",
    "logical_axis_rules": "logical_axis_rules=[[norm,[fsdp]]]",
    "keep_best_checkpoints": "keep_best_checkpoints=2 checkpoint_period=5",
    "steps": "steps=40 learning_rate_schedule_steps=20",
    "per_device_batch_size": "per_device_batch_size=4 gradient_accumulation_steps=2",
    "gradient_accumulation_steps": "per_device_batch_size=2 gradient_accumulation_steps=4",
}
# Keys that have their own tests below; the flags are tested in tests/unit/linen/test_flags.py.
BY_ITSELF = {"run_name", "model_name", "learning_rate_schedule_steps", *FLAGS} | {
    k for k in LAYOUT if k.startswith(("ici_", "dcn_"))
}
BY_ITSELF |= {*PROCESSES, *SUPERVISION, "prepared_path"}  # prepared_path: see tests/integration/test_prepare.py


def other(name):
    key = schema().keys[name]
    if name in OTHERS:
        return OTHERS[name]
    if key.kind is bool:
        return f"{name}={not key.default}"
    if key.choices:
        return f"{name}={next(choice for choice in key.choices if choice != key.default)}"
    return f"{name}=other" if key.kind is str else f"{name}={key.default + 2}"


@pytest.mark.parametrize("name", sorted(MAY_CHANGE - BY_ITSELF))
def test_what_may_change(name):
    assert frozen(saved()[name]) != config(other(name))[name]
    assert check(other(name)) == []


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        ("opt_type=sgd", ['opt_type: "adamw" -> "sgd" (the checkpoint has the optimizer state of adamw)']),
        ("init_weights_seed=1", ["init_weights_seed: 0 -> 1"]),
        ("base_emb_dim=96", ["base_emb_dim: 192 -> 96"]),
        ("mlp_activations=[gelu]", ['mlp_activations: ["silu", "linear"] -> ["gelu"]']),
        ("load_full_state_path=elsewhere", ['load_full_state_path: "" -> "elsewhere"']),
        (
            "learning_rate=1e-2 data_shuffle_seed=3 per_device_batch_size=4 eval_interval=7 adam_b2=0.9",
            [  # in the order of base.yml, without keys that may change
                "data_shuffle_seed: 0 -> 3",
                "learning_rate: 0.006 -> 0.01",
                "adam_b2: 0.95 -> 0.9",
                "the global batch must not change, 8 -> 4 rows: per_device_batch_size: 8.0 -> 4.0",
            ],
        ),
    ],
)
def test_all_other_differences_are_one_error(words, lines):
    assert refused(words) == lines


def test_every_other_key_is_compared():
    then, now = saved(), config()
    for name in set(schema().keys) - MAY_CHANGE - {"enable_dropout"}:  # has an effect only with a rate
        with pytest.raises(UserError, match=rf'{name}: "something else" -> '):
            check_resume(then | {name: "something else"}, now, False, "there")


def test_a_fresh_optimizer_may_be_another():
    reset = "reset_optimizer=true"
    assert check(f"{reset} opt_type=lion learning_rate=1e-4 lion_b1=0.5 trainable_parameters_mask=[mlp]") == []
    changed = check(f"{reset} learning_rate_schedule_steps=30", before="learning_rate_schedule_steps=20")
    assert changed == ["learning_rate_schedule_steps: 20 -> 30"]
    with pytest.raises(UserError, match=r"\n  init_weights_seed: 0 -> 1\nuse the old values, .* for a new run$"):
        check(f"{reset} opt_type=lion init_weights_seed=1")
    for name in UPDATE:
        with pytest.raises(UserError, match=f"(?s){name}: .*or continue with its parameters and a fresh optimizer"):
            check_resume(saved() | {name: "something else"}, config(), False, "there")


def test_an_optimizer_is_reset_once():
    reset = "reset_optimizer=true"
    assert resets(saved(), config(reset))
    assert not resets(saved(reset), config(reset))
    assert not resets(saved(reset), config(f"{reset} steps=40 ici_fsdp_parallelism=1"))
    assert resets(saved(reset), config(f"{reset} opt_type=sgd"))
    assert not resets(saved(reset), config())


def test_state_of_another_optimizer_is_refused_with_both_names():
    """Even if the other optimizer keeps the same arrays."""
    check_optimizer(saved("opt_type=nadamw"), config("opt_type=nadamw adam_b1=0.5"), "there")
    with pytest.raises(UserError) as error:
        check_optimizer(saved("opt_type=nadamw"), config(), "runs/x/checkpoints/5")
    assert str(error.value) == (
        "runs/x/checkpoints/5 holds the optimizer state of nadamw, and this command has opt_type=adamw: give "
        "opt_type=nadamw, or continue with its parameters and a fresh optimizer: reset_optimizer=true"
    )


def test_the_mesh_may_change():
    mesh = "per_device_batch_size=1 ici_data_parallelism=2 ici_fsdp_parallelism=2 ici_tensor_parallelism=2"
    assert check(mesh, devices=8) == []
    assert check("", before=mesh, devices_before=8) == []


def test_the_kernel_of_attention_follows_how_rows_are_split():
    ring = "ici_context_parallelism=2 context_parallel_strategy=ring"
    for words, others in (("", ring), (ring, ""), (ring, "ici_context_parallelism=2")):
        before, now = saved(words, 2), config(others, 2)
        assert before["attention"] != now.attention
        assert check_resume(before, now, False, "it") == []
        assert "attention: " in another_program(before, now)
    with pytest.raises(UserError, match="attention: "):
        check_resume(saved("attention=blockwise"), config(), False, "it")


def test_the_run_may_have_another_name_and_place():
    assert "run_name" not in saved()
    assert check("run_name=other") == []


def test_how_processes_find_each_other_is_no_part_of_a_configuration():
    keys = {*PROCESSES, *SUPERVISION}
    assert {name for name, key in schema().keys.items() if key.section == "Several processes"} == keys
    assert not keys & set(saved())
    assert check("coordinator_address=there:1 num_processes=4 process_id=3 skip_jax_distributed_system=true") == []


def test_the_global_batch_stays_on_other_devices():
    assert check("per_device_batch_size=1", devices=8) == []
    assert refused("", devices=8) == ["the global batch must not change, 8 -> 64 rows: another number of devices"]
    (line,) = refused("gradient_accumulation_steps=2 per_device_batch_size=1", devices=8)
    assert line.endswith("8 -> 16 rows: per_device_batch_size: 8.0 -> 1.0, gradient_accumulation_steps: 1 -> 2")


def test_the_schedule_follows_steps_only_where_it_is_not_given():
    assert check("steps=40") == ["the learning rate schedule follows steps: learning_rate_schedule_steps: 20 -> 40"]
    fixed = "learning_rate_schedule_steps=30"
    assert check(f"steps=40 {fixed}", before=fixed) == []
    assert refused("steps=40 learning_rate_schedule_steps=40") == ["learning_rate_schedule_steps: 20 -> 40"]
    assert refused("steps=40", before=fixed) == ["learning_rate_schedule_steps: 30 -> 40"]


def test_a_key_that_the_checkpoint_does_not_know_had_its_default():
    before = dict(saved())
    del before["use_qk_norm"]
    assert check_resume(before, config(), False, "there") == []
    with pytest.raises(UserError, match="use_qk_norm: false -> true"):
        check_resume(before, config("use_qk_norm=true"), False, "there")


def test_a_preset_may_be_replaced_by_its_sizes():
    before = saved() | {"model_name": "of-old"}
    assert check_resume(before, config(), False, "there") == []


def test_whether_dropout_is_enabled_counts_only_with_a_rate():
    check("enable_dropout=true", "enable_dropout=false")
    assert refused("dropout_rate=0.1", "enable_dropout=false dropout_rate=0.1")

"""MaxText's distillation commands: which keys belong to the student or the teacher, and which keys are read at all."""

import os

import pytest
from config_cases import their_base, write

from trainer.config.capabilities.chat_keys import DISTILL
from trainer.config.errors import UserError
from trainer.config.load import load
from trainer.config.maxtext import verdicts
from trainer.maxtext.command_line import as_text, parse
from trainer.maxtext.convert import program
from trainer.maxtext.rows import REFUSED
from trainer.maxtext.tools import converted

MODULE = "maxtext.trainers.post_train.distillation.train_distill"
DATA = "tokenizer_path=/t hf_path=json hf_train_files=/d.json"
TEACHER = "teacher_overrides.load_parameters_path=/teacher"
FILE = """base_config: {base}
student_overrides:
  model_name: qwen3-0.6b
  attention: flash
teacher_overrides:
  model_name: "qwen3-4b"
  load_parameters_path: /theirs
dataset_type: hf
steps: 30
learning_rate_schedule_steps: 5000
z_loss_multiplier: 1.0e-5
grain_ram_budget_mb: 1024
"""


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def distilled(words, yml="", run="python3 -m"):
    command = parse([f"{run} {MODULE} {yml} run_name=x {DATA} {words}"])
    return converted(command, program(command.module).runs)


def kinds(made):
    return {row.given: row.kind for row in made.rows}


def test_the_printed_command_loads_to_the_same_configuration():
    made = distilled(f"{TEACHER} teacher_overrides.model_name=llama3.3-70b distill_alpha=0.25 distill_temperature=2")
    assert made.runs
    printed = parse([as_text(made.words)])
    assert printed.module == DISTILL
    loaded = load([printed.yml, *printed.words], defaults={"use_distill": True})
    assert loaded.config == made.loaded.config
    assert (loaded.config.distill_alpha, loaded.config.distill_temperature) == (0.25, 2.0)
    assert loaded.config.teacher_path == "/teacher"
    # In MaxText, the model of this name does not scale RoPE either.
    assert loaded.config.teacher_overrides.to_dict() == {"model_name": "llama3.3-70b", "rope_type": "default"}


def test_the_program_may_be_a_path():
    path = f"python3 src/{MODULE.replace('.', '/')}.py"
    command = parse([f"{path} run_name=x {DATA} {TEACHER}"])
    assert converted(command, program(command.module).runs).words == distilled(TEACHER).words


@pytest.mark.parametrize(
    "words",
    [
        "student_overrides.model_name=qwen3-0.6b student_overrides.adamw_mask=[a]",
        "'student_overrides={model_name: qwen3-0.6b, adamw_mask: [a]}'",
        """'student_overrides={"model_name": "qwen3-0.6b", "adamw_mask": ["a"]}'""",
        "'student_overrides={model_name: a}' student_overrides.model_name=qwen3-0.6b "
        "'student_overrides={adamw_mask: [a]}'",
    ],
)
def test_overrides_of_the_student_are_keys_of_the_command(words):
    made = distilled(f"{TEACHER} {words} model_name=llama2-7b")
    assert made.runs
    assert (made.loaded.config.model_name, made.loaded.config.adamw_mask) == ("qwen3-0.6b", ["a"])
    assert kinds(made)["model_name=llama2-7b"] == verdicts.NEEDLESS
    assert "student_overrides.model_name=qwen3-0.6b" in kinds(made)


def test_overrides_of_the_teacher_get_the_verdicts_of_their_keys():
    words = (
        f"{TEACHER} 'teacher_overrides={{scan_layers: false, rope_theta: 5000}}' teacher_overrides.hf_access_token=x"
    )
    made = distilled(words)
    assert made.runs
    assert made.loaded.config.teacher_overrides.to_dict() == {
        "model_name": "llama3.1-8b",
        "scan_layers": False,
        "rope_max_timescale": 5000,
    }
    found = kinds(made)
    assert found["teacher_overrides.rope_theta=5000"] == verdicts.RENAMED
    assert found["teacher_overrides.hf_access_token=x"] == verdicts.NEEDLESS
    assert found["teacher_overrides.load_parameters_path=/teacher"] == verdicts.RENAMED
    made = distilled(f"{TEACHER} teacher_overrides.scan_layer=false")
    assert not made.runs
    assert "teacher_overrides.scan_layer=false" in [row.given for row in made.rows if row.problem]


def test_a_key_that_both_share_must_be_the_same():
    made = distilled(f"{TEACHER} teacher_overrides.max_target_length=2048")
    assert made.runs
    assert "max_target_length" not in made.loaded.config.teacher_overrides
    made = distilled(f"{TEACHER} teacher_overrides.max_target_length=1024")
    assert not made.runs
    (row,) = [row for row in made.rows if row.problem]
    assert (row.kind, row.given) == (REFUSED, "teacher_overrides.max_target_length=1024")
    assert "the student has 2048" in row.text


def test_a_shells_value_is_kept():
    made = distilled("teacher_overrides.load_parameters_path=$CKPT teacher_overrides.model_name=$MODEL")
    assert made.runs
    assert {"teacher_path=$CKPT", "teacher_overrides={model_name: $MODEL}"} <= set(made.words)


def test_a_word_of_the_command_line_is_not_the_teachers():
    """MaxText's teacher has the default dtype bfloat16, whatever the command line sets."""
    made = distilled(f"{TEACHER} dtype=float32 base_num_decoder_layers=2")
    assert made.loaded.config.base_num_decoder_layers == 2
    assert made.loaded.config.teacher_overrides.to_dict() == {"model_name": "llama3.1-8b", "dtype": "bfloat16"}
    assert "dtype" not in distilled(f"{TEACHER} dtype=bfloat16").loaded.config.teacher_overrides


@pytest.mark.parametrize("base", ["base.yml", "post_train/distillation.yml"])
@pytest.mark.parametrize("checkout", [True, False])
def test_the_keys_of_a_yml_are_written_into_the_command(base, checkout):
    folder = "maxtext/configs/post_train"
    os.makedirs(folder)
    if checkout:
        write("maxtext/configs/base.yml", their_base())
        text = (
            'base_config: "base.yml"\nstudent_overrides:\n  model_name: "llama3.1-8b"\nhf_path: OptimalScale/ClimbMix\n'
        )
        write(f"{folder}/distillation.yml", text)
    write(f"{folder}/own.yml", FILE.format(base=base) + "normalization_layer_epsilon: 1.0e-6\n")
    made = distilled("steps=40 teacher_overrides.scan_layers=false", f"{folder}/own.yml")
    assert made.runs
    assert made.words[3] == "maxtext.yml"
    config = made.loaded.config
    assert (config.steps, config.model_name, config.attention) == (40, "qwen3-0.6b", "flash")
    assert (config.learning_rate_schedule_steps, config.z_loss_multiplier) == (-1, 0.0)
    assert config.teacher_path == "/theirs"
    assert config.teacher_overrides.to_dict() == {
        "normalization_layer_epsilon": 1e-6,  # the yml applies to the teacher, too
        "model_name": "qwen3-4b",
        "scan_layers": False,
    }
    own = base != "base.yml"
    assert config.learning_rate == (2e-4 if own else 3e-5)
    assert config.per_device_batch_size == (2 if own else 12)
    found = kinds(made)
    assert "steps=30" not in found
    assert found["learning_rate_schedule_steps=5000"] == verdicts.NEEDLESS
    assert found["z_loss_multiplier=1.0e-5"] == verdicts.NEEDLESS
    assert found["grain_ram_budget_mb=1024"] == verdicts.NEEDLESS


def test_conversations_are_distilled_by_the_same_command():
    write("own.yml", "base_config: post_train/distillation.yml\nuse_sft: true\nsft_train_on_completion_only: true\n")
    made = distilled(f"{TEACHER} train_data_columns=[messages] eval_data_columns=[messages]", "own.yml")
    assert made.runs
    assert made.words[2] == DISTILL
    config = made.loaded.config
    assert (config.use_sft, config.use_distill, config.learning_rate) == (True, True, 2e-4)
    assert config.sft_train_on_completion_only


def test_defaults_of_what_is_missing_here_are_left_out():
    words = "distill_beta=0.0 distill_feature_loss_type=l2 learn_to_init_mode=false lti_layer_indices=[1]"
    made = distilled(f"{TEACHER} {words} student_overrides.learn_to_init_mode=False distill_weights_copy_map={{}}")
    assert made.runs
    assert made.words == distilled(TEACHER).words


@pytest.mark.parametrize(
    ("word", "kind", "said"),
    [
        ("distill_beta=0.5", verdicts.NOT_YET, "compare only logits"),
        ("learn_to_init_mode=true", verdicts.NOT_YET, "loads all parameters"),
        ("student_overrides.learn_to_init_mode=true", verdicts.NOT_YET, "loads all parameters"),
        ("offline_data_dir=/logits", verdicts.NOT_YET, "save_teacher_logits"),
        ("'distill_weights_copy_map={a: b}'", verdicts.NOT_YET, "loads all parameters"),
    ],
)
def test_what_is_missing_here_stops_the_command(word, kind, said):
    made = distilled(f"{TEACHER} {word}")
    assert not made.runs
    (row,) = [row for row in made.rows if row.given == word.strip("'")]
    assert row.kind == kind
    assert said in row.text


def test_parameters_to_update_are_those_of_the_mask():
    made = distilled(f"{TEACHER} 'student_overrides={{student_params_to_update: [self_attention/, scale]}}'")
    assert made.runs
    assert made.loaded.config.trainable_parameters_mask == ["self_attention/", "scale"]


def test_a_teacher_is_needed():
    made = distilled("steps=3")
    assert not made.runs
    assert any("does not contain teacher_path" in line for line in made.problems)


def test_a_yml_with_overrides_names_the_converter_in_other_programs():
    write("own.yml", FILE.format(base="maxtext.yml"))
    with pytest.raises(UserError, match=r"as python -m trainer.from_maxtext does"):
        load(["own.yml"], defaults={"use_distill": True})

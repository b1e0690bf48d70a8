"""`python -m trainer.dpo` as a user runs it."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from run_cases import arrays_of, command
from support import TINY, pinned

from trainer import dpo, sft
from trainer.observe.metrics import METRICS_FILE, TIMING_FIELDS, read_rows
from trainer.train import main as train_main

pytestmark = pytest.mark.usefixtures("equal_programs")
MODEL = TINY | {"vocab_size": 300, "max_target_length": 128, "enable_checkpointing": True, "enable_tensorboard": False}
MODEL |= {"dataset_type": "grain", "grain_file_type": "jsonl", "grain_train_files": "pairs.jsonl"}
PAIRS = (
    MODEL | pinned("nnx") | {"tokenizer_type": "bytes", "train_data_columns": "[prompt,chosen,rejected]", "steps": 6}
)
PAIRS |= {"eval_data_columns": "[prompt,chosen,rejected]", "held_out_share": 0.2, "eval_interval": 3}
PAIRS |= {"checkpoint_period": 3, "max_num_checkpoints_to_keep": "none", "opt_type": "sgd", "learning_rate": 0.1}
PAIRS |= {"prompt": ""}
LORA = {"enable_lora": True, "lora_rank": 4, "lora_alpha": 8.0}
OF_TEXT = {"train_data_columns": "text", "eval_data_columns": "text"}
COLORS = ("red", "blue", "green")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dpo")
    rows = [
        {"prompt": f"color {i}?", "chosen": COLORS[i % 3], "rejected": COLORS[(i + 1) % 3] * (2 + i % 3)}
        for i in range(60)
    ]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(autouse=True)
def here(folder, monkeypatch):
    monkeypatch.chdir(folder)


def train(run, devices=1, **keys):
    code, said = command(PAIRS | {"run_name": run} | keys, program=dpo.main, devices=devices)
    assert code == 0, said
    return said


def rows_of(run):
    rows = read_rows(Path("runs", run, METRICS_FILE))
    return [{name: value for name, value in row.items() if name not in TIMING_FIELDS} for row in rows]


def assert_same(one, other, updates=6):
    assert rows_of(one) == rows_of(other)
    left, right = (arrays_of(Path("runs", run, "checkpoints", str(updates))) for run in (one, other))
    assert left.keys() == right.keys()
    assert [name for name in left if left[name].tobytes() != right[name].tobytes()] == []


@pytest.fixture(scope="module")
def first(folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return train("nnx")


def test_it_learns_to_prefer_and_says_so(first):
    steps = [row for row in rows_of("nnx") if "loss" in row]
    assert steps[0]["dpo_loss"] == pytest.approx(0.6931472, abs=1e-6)
    assert (steps[0]["reward_margin"], steps[0]["reward_accuracy"]) == (0, 0)
    before, after = (row for row in rows_of("nnx") if "eval_loss" in row)
    assert after["eval_loss"] < before["eval_loss"] < 0.6931472
    assert 0 < before["eval_reward_margin"] < after["eval_reward_margin"]
    assert {"eval_reward_accuracy", "eval_chosen_reward", "eval_rejected_reward", "eval_chosen_nll"} <= after.keys()
    assert "reward_accuracy: 0.000" in first
    assert "reward_margin=" in first


def test_it_resumes_with_the_same_reference_and_the_same_bits(first):
    train("parts", steps=3, learning_rate_schedule_steps=6)
    train("parts", learning_rate_schedule_steps=6)
    assert_same("nnx", "parts")


def test_the_reference_may_have_moved_but_not_changed(first):
    keys = {"tokenizer_type": "auto", "eval_interval": -1, "learning_rate_schedule_steps": 6}
    train("moved", load_parameters_path="runs/nnx", steps=3, **keys)
    shutil.copytree("runs/nnx", "runs/elsewhere")
    assert "3 of 4 updates are done" in train("moved", load_parameters_path="runs/elsewhere", steps=4, **keys)
    tokenizer = "runs/nnx/checkpoints/6/run/tokenizer"
    assert "4 of 5 updates are done" in train("moved", steps=5, tokenizer_path=tokenizer, **keys)
    words = PAIRS | keys | {"run_name": "moved", "load_parameters_path": "runs/nnx/checkpoints/3"}
    code, printed = command(words, program=dpo.main)
    assert code == 2
    assert "its reference was a model with other values" in printed


@pytest.mark.rest(covered_by="integration/test_evaluate.py")
def test_tasks_are_of_the_model_that_is_trained(first):
    choices = {"question": "color 1?", "choices": [COLORS[1], COLORS[2] * 3], "answer": 0}
    Path("choices.jsonl").write_text(json.dumps(choices))
    for run, keys in (("tasks", {}), ("tasks-lora", LORA)):
        train(run, eval_tasks="[choices.jsonl]", eval_tasks_interval=3, **keys)
        rows = [row for row in rows_of(run) if "eval_tasks_failed" in row]
        assert [(row["step"], row["eval_tasks_failed"]) for row in rows] == [(2, 0), (5, 0)]
        before, after = (Path("runs", run, "evaluations", f"{n:06}", "choices.jsonl").read_text() for n in (3, 6))
        assert before != after


@pytest.mark.rest(covered_by="unit/objectives/test_preference.py; unit/training/test_frozen.py")
def test_adapters_have_the_base_as_reference():
    said = train("lora", **LORA, load_parameters_path="runs/nnx", tokenizer_type="auto", steps=3)
    assert rows_of("lora")[0]["dpo_loss"] == pytest.approx(0.6931472, abs=1e-6)
    assert rows_of("lora")[0]["reward_accuracy"] == 0
    assert "runs/nnx/checkpoints/6/run/tokenizer: the tokenizer of the model" in said


def test_orpo_learns_the_chosen_answers_and_packs_and_streams():
    train("orpo", dpo_algo="orpo", data_pipeline="streaming")
    evaluations = [row for row in rows_of("orpo") if "eval_loss" in row]
    assert evaluations[-1]["eval_chosen_nll"] < evaluations[0]["eval_chosen_nll"]
    assert evaluations[-1]["eval_loss"] > evaluations[-1]["eval_chosen_nll"]  # the loss adds the odds ratio term


@pytest.mark.rest(covered_by="unit/objectives/test_preference.py; unit/training/test_frozen.py")
def test_devices_microbatches_and_tiles_learn_the_same(first):
    train(
        "eight",
        devices=8,
        ici_fsdp_parallelism=2,
        ici_data_parallelism=2,
        ici_tensor_parallelism=2,
        per_device_batch_size=0.5,
        gradient_accumulation_steps=1,
        num_vocab_tiling=2,
    )
    for one, other in zip(rows_of("nnx"), rows_of("eight"), strict=True):
        for name, value in one.items():
            assert other[name] == pytest.approx(value, rel=1e-3, abs=1e-3), name  # Adam amplifies rounding


def test_what_it_shows_and_that_this_loads_no_jax():
    words = [f"{key}={value}" for key, value in PAIRS.items()]
    code = "import sys; from trainer.dpo import main; main(sys.argv[1:]); print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, *words, "--show", "1"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    asked = "<|endoftext|>User:\ncolor 0?\nAssistant:\n"
    assert done.stdout == (
        "---- pairs.jsonl, line 1: 67 of the 128 tokens of a row\n"
        f"chosen: 32 tokens, 4 learnt\n{asked}«red<|endoftext|>»\n\n\n"
        f"rejected: 37 tokens, 9 learnt\n{asked}«blueblue<|endoftext|>»\n\n\nFalse\n"
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"dataset_type": "synthetic"}, "dataset_type=synthetic has no pairs; use grain, hf or tfds"),
        ({"grain_packing_type": "concat_then_split"}, "this packing splits pairs"),
        ({"use_sft": True}, "a run uses only one of these methods"),
        ({"use_dpo": False, **OF_TEXT}, "use_dpo=false: trainer.dpo is for preference optimization"),
        ({"train_data_columns": "[rejected,chosen]"}, "rejected is misplaced: the order is prompt, chosen, rejected"),
        ({"train_data_columns": "messages"}, "must be chosen and rejected, or prompt, chosen and rejected"),
        ({"mtp_num_layers": 1}, "modules of multi-token prediction have no reward; leave it out"),
        ({"label_smoothing": 0.1}, "dpo_label_smoothing smooths the loss of pairs"),
        ({"z_loss_multiplier": 0.1}, "a term of the next-token loss"),
        ({"dpo_label_smoothing": 0.5}, "a number in [0, 0.5)"),
        ({"dpo_max_prompt_length": 0}, "must be from 1 to"),
        ({"weight_sparsity_n": 2, "weight_sparsity_m": 4}, "it changes masks of weights, which the reference"),
        ({"tokenize_train_data": False}, "tokenize_train_data=false: pairs are text"),
        (
            {"max_target_length": 16, "use_truncation": False},
            "pairs are longer than max_target_length=16 (longest ",
        ),
    ],
)
def test_what_is_refused(words, said):
    code, printed = command(PAIRS | {"enable_checkpointing": False} | words, program=dpo.main)
    assert code == 2
    assert said in printed


def test_the_other_commands_name_this_one():
    for program in (train_main, sft.main):
        code, printed = command(PAIRS | {"use_dpo": True, "packing": False, "use_sft": False}, program=program)
        assert code == 2
        assert "use_dpo=true: preference optimization is another command: run python -m trainer.dpo with" in printed

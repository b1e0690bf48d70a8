"""`python -m trainer.distill distill_rollouts=true` as a user runs it."""

import json
import shutil

import pytest
from run_cases import RUN, assert_equal, command, killed_at
from support import TINY, pinned

from trainer import distill, train
from trainer.observe.metrics import METRICS_FILE, read_rows

pytestmark = pytest.mark.usefixtures("equal_programs")
TEACHER = TINY | {"run_name": "teacher", "enable_checkpointing": True, "vocab_size": 257, "prompt": ""}
TEACHER |= {"dataset_type": "grain", "grain_file_type": "jsonl", "grain_train_files": "prompts.jsonl"}
TEACHER |= {"tokenizer_type": "bytes", "train_data_columns": "[prompt,answer]", "enable_tensorboard": False}
TEACHER |= {"steps": 8, "opt_type": "sgd", "learning_rate": 1.0}
ROUNDS = {key: value for key, value in TEACHER.items() if key != "train_data_columns"} | {
    "run_name": "run-0001",
    "teacher_path": "runs/teacher",
    "distill_rollouts": True,
    "distill_vocab_size": 257,
    "held_out_share": 0.3,
    "batch_size": 8,
    "gradient_accumulation_steps": 2,
    "max_prefill_predict_length": 6,
    "steps": 12,
    "learning_rate_schedule_steps": 12,
    "checkpoint_period": 6,
    "max_num_checkpoints_to_keep": "none",
    "eval_interval": 6,
    "eval_per_device_batch_size": 4,
    "init_weights_seed": 1,
    "learning_rate": 10.0,
    "distill_loss": "sampled_reverse_kl",
}


def learned(*words, devices=1, **keys):
    """Returns the step metrics and evaluation metrics of a run, and its output."""
    code, said = command(ROUNDS | pinned("nnx") | keys, *words, devices=devices, program=distill.main)
    assert code == 0, said
    rows = read_rows(RUN / METRICS_FILE)
    return [row for row in rows if "loss" in row], [row for row in rows if "eval_loss" in row], said


def refused(*words, **keys):
    code, said = command(ROUNDS | pinned("nnx") | keys, *words, program=distill.main)
    assert code == 2, said
    return said


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prompts")
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(6) for b in range(6)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        code, said = command(TEACHER | pinned("nnx"), program=train.main)
        assert code == 0, said
    return folder


@pytest.fixture(autouse=True)
def here(files, tmp_path, monkeypatch):
    shutil.copytree(files, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("run-0001"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def finished(files):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(files)
        found = learned()
    return files / RUN, *found


def test_the_divergence_falls(finished):
    run, steps, evaluations, said = finished
    first, last = ([row["divergence"] for row in part] for part in (steps[:3], steps[-3:]))
    assert sum(last) < 0.8 * sum(first)
    assert [row["step"] for row in evaluations] == [5, 11]
    assert 0 < evaluations[1]["eval_loss"] < evaluations[0]["eval_loss"]
    assert all(row["eval_loss"] == row["eval_divergence"] and "eval_perplexity" not in row for row in evaluations)
    assert "data         jsonl files prompts.jsonl: " in said
    assert "train_data_columns=[prompt,answer] (not given)" in said
    report = (run / "report.html").read_text()
    assert "<h2>Answers" in report
    assert "advantage" not in report
    rounds = [read_rows(path) for path in sorted((run / "rollouts").iterdir())]
    assert [len(round_) for round_ in rounds] == [8] * 12
    for step, round_ in zip(steps, rounds, strict=True):
        assert step["truncated"] == sum(row["truncated"] for row in round_) / 8
        assert step["lm_loss"] == pytest.approx(
            -sum(sum(row["log_probs"]) for row in round_) / sum(len(row["tokens"]) for row in round_), rel=1e-5
        ), "the sampled tokens bear loss, and no others"


def test_a_run_that_resumes_repeats_its_rounds(finished, tmp_path):
    whole, *_ = finished
    killed_at(6, whole, tmp_path)
    *_, said = learned()
    assert "6 of 12 updates are done" in said
    assert_equal(RUN, whole, 12)


def test_a_mixture_has_labels_only_in_rounds_of_the_data():
    keys = {"distill_rollouts_share": 0.5, "distill_alpha": 0.75, "distill_loss": "forward_kl", "eval_interval": -1}
    keys |= dict.fromkeys(("train_data_columns", "eval_data_columns"), "[prompt,answer]")
    steps, *_ = learned(steps=4, checkpoint_period=4, **keys)
    assert [row["own_texts"] for row in steps] == [0, 1, 0, 1]
    for row in steps:
        assert row["label_loss"] == pytest.approx(0 if row["own_texts"] else 0.25 * row["lm_loss"])
        assert row["distill_loss"] == pytest.approx(0.75 * row["divergence"])
    assert [path.name for path in sorted((RUN / "rollouts").iterdir())] == ["000001.jsonl", "000003.jsonl"]


@pytest.mark.rest(covered_by="unit/objectives/test_on_policy.py; rounds in integration/test_grpo.py")
def test_adapters_learn_on_a_mesh_from_several_updates_of_a_round():
    student = TEACHER | pinned("nnx") | {"run_name": "student", "init_weights_seed": 1, "steps": 1}
    code, said = command(student, program=train.main)
    assert code == 0, said
    keys = {"distill_loss": "jensen_shannon", "rl_num_iterations": 2, "num_batches": 4, "distill_temperature": 1.5}
    keys |= {"enable_lora": True, "lora_rank": 4, "lora_alpha": 8.0, "load_parameters_path": "runs/student"}
    keys |= {"ici_fsdp_parallelism": 2, "eval_interval": -1, "per_device_batch_size": 2}
    steps, *_ = learned(devices=2, **keys)
    assert len(steps) == 8
    assert len(list((RUN / "rollouts").iterdir())) == 4
    assert steps[-1]["divergence"] < 0.9 * steps[0]["divergence"]


def test_what_is_refused_before_jax(monkeypatch):
    monkeypatch.setattr(train, "distributed", lambda config: pytest.fail("too late"))
    for words, said in (
        ("distill_rollouts=false", "this loss is estimated from tokens that the student samples"),
        ("distill_alpha=0.5", "the student's own texts have no labels; set distill_alpha=1"),
        ("distill_temperature=2", "use the same, constant distill_temperature"),
        ("use_sft=true", "leave out use_sft, and set use_chat_template=true for a chat"),
        ("decode_sampling_strategy=greedy", "completions must be sampled"),
        ("enable_diloco=true", "each island has its own parameters"),
        ("mtp_num_layers=1", "would not be trained"),
        ("drop_duplicates=true", "prompts are not searched for duplicates"),
        ("dataset_type=synthetic", "has no prompts"),
        ("distill_rollouts_share=0.5", "the student does not sample the tokens of the data"),
        ("use_grpo=true", "trains on documents, or on conversations with use_sft=true"),
        ("teacher_path=", "give the teacher's folder"),
    ):
        assert said in refused(words)


def test_a_round_that_does_not_fit_is_refused():
    assert "batch_size=9: the 9 sequences of a round have up to 16 tokens each" in refused(batch_size=9)

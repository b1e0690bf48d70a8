"""`python -m trainer.grpo` as a user runs it."""

import functools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from checkpoint_cases import abstract_of
from compiler import xla_flags
from run_cases import RUN, assert_equal, command, killed_at, rows_of
from support import ALL_COMBINATIONS, TINY, model_of, pinned, tiny_config

from trainer import grpo, sft, train
from trainer.checkpoint.manager import newest
from trainer.objectives.forward import hidden_states, target_log_probs
from trainer.observe.metrics import METRICS_FILE, read_rows
from trainer.rl.groups import advantages
from trainer.weights.load import load_parameters

pytestmark = pytest.mark.usefixtures("equal_programs")
LAUNCHER = Path(__file__).parents[2] / "scripts" / "launch_local.py"
JUDGES = """
import os


def digits(prompts, completions, answer, **others):
    return [sum(c in "0123456789" for c in completion) + 0.1 * (completion == answer[0]) for completion in completions]


def letters(completions):
    return sum(map(ord, completions[0]))


def short(completions):
    if os.path.exists("broken") and os.path.exists("runs/run-0001/rollouts/000001.jsonl"):
        raise KeyError("broken")
    return [-0.01 * len(completion) for completion in completions]
"""
ROUNDS = TINY | {
    "dataset_type": "grain",
    "grain_file_type": "jsonl",
    "grain_train_files": "prompts.jsonl",
    "train_data_columns": "[prompt,answer]",
    "eval_data_columns": "[prompt,answer]",
    "held_out_share": 0.3,
    "reward_functions": "[judges:digits,judges:short]",
    "tokenizer_type": "bytes",
    "vocab_size": 257,
    "run_name": "run-0001",
    "enable_checkpointing": True,
    "enable_tensorboard": False,
    "checkpoint_period": 2,
    "max_num_checkpoints_to_keep": "none",
    "save_checkpoint_on_start": True,
    "prompt": "",
    "batch_size": 3,
    "rl_num_generations": 4,
    "gradient_accumulation_steps": 3,
    "max_prefill_predict_length": 6,
    "opt_type": "sgd",
    "learning_rate": 1.0,
    "rollout_micro_batch_size": 6,
    "reward_num_workers": 1,
    "steps": 6,
    "learning_rate_schedule_steps": 6,
    "eval_interval": 3,
    "eval_per_device_batch_size": 4,
    "rl_grpo_beta": 0.05,
}
INVARIANT = {"batch_invariant": True, "max_target_length": 128, "max_prefill_predict_length": 120}


def learned(*words, combination="nnx", devices=1, **keys):
    """Returns the folder of a run, and its output."""
    code, said = command(ROUNDS | pinned(combination) | keys, *words, devices=devices, program=grpo.main)
    assert code == 0, said
    return RUN, said


def refused(*words, program=grpo.main, **keys):
    code, said = command(ROUNDS | pinned("nnx") | keys, *words, program=program)
    assert code == 2, said
    return said


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prompts")
    rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(6) for b in range(6)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "judges.py").write_text(JUDGES)
    return folder


@pytest.fixture(autouse=True)
def here(files, tmp_path, monkeypatch):
    for path in files.iterdir():
        if path.is_file():
            shutil.copy(path, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))  # like `python -m`


@pytest.mark.rest(covered_by="integration/test_evaluate.py")
@pytest.mark.parametrize("combination", [ALL_COMBINATIONS[0], ALL_COMBINATIONS[-1]])
def test_a_run_is_evaluated_by_tasks(combination):
    Path("asked.jsonl").write_text('{"question": "1+1=", "answer": "2"}')
    run, _ = learned("eval_tasks=[asked.jsonl]", "eval_tasks_interval=3", combination=combination)
    rows = [row for row in rows_of(run) if "eval_tasks_failed" in row]
    assert [(row["step"], row["eval_tasks_failed"]) for row in rows] == [(2, 0), (5, 0)]
    assert all("asked/exact_match" in row for row in rows)


@pytest.fixture(scope="module")
def finished(files):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(files)
        patch.syspath_prepend(str(files))
        run, said = learned()
    return files / run, said


def rollouts(run: Path) -> list[list[dict]]:
    return [read_rows(path) for path in sorted((run / "rollouts").iterdir())]


def trainers_log_probs(checkpoint: Path, rows: list[dict]) -> list[np.ndarray]:
    """Returns the log-probabilities of completion tokens under the parameters of a checkpoint."""
    config = tiny_config("nnx", vocab_size=ROUNDS["vocab_size"])
    params = load_parameters(str(checkpoint), config, abstract_of(config), print)
    texts = [[*row["prompt_tokens"], *row["tokens"]] for row in rows]
    tokens = np.array([text + [0] * (config.max_target_length - len(text)) for text in texts])
    found = np.asarray(_log_probs(config)(params, tokens))
    starts = [len(row["prompt_tokens"]) - 1 for row in rows]
    return [row[i : len(text) - 1] for row, i, text in zip(found, starts, texts, strict=True)]


@functools.cache
def _log_probs(config):
    model = model_of(config)

    @jax.jit
    def log_probs(params, tokens):
        inputs = tokens[:, :-1]
        count, length = inputs.shape
        batch = {"inputs": inputs, "inputs_position": np.broadcast_to(np.arange(length), inputs.shape)}
        batch |= {"inputs_segmentation": np.ones(inputs.shape, np.int32), "row": np.arange(count)}
        hidden, _ = hidden_states(model.apply, params, {}, batch, None, ())
        return target_log_probs(model.apply, params, {}, hidden, tokens[:, 1:]).target

    return log_probs


def test_what_a_run_writes(finished):
    run, said = finished
    rows = read_rows(run / METRICS_FILE)
    steps, evaluations = [r for r in rows if "loss" in r], [r for r in rows if "eval_loss" in r]
    made = rollouts(run)
    assert len(made) == len(steps) == 6
    for step, round_ in zip(steps, made, strict=True):
        rewards = np.array([row["reward"] for row in round_]).reshape(3, 4)
        assert step["reward"] == pytest.approx(rewards.mean(), rel=1e-5)
        assert step["completion_tokens"] == pytest.approx(np.mean([len(row["tokens"]) for row in round_]))
        assert step["rollout_log_prob_max_diff"] < 1e-4
        np.testing.assert_allclose([row["advantage"] for row in round_], advantages(rewards).ravel(), rtol=1e-6)
        for row in round_:
            assert sum(row["rewards"].values()) == pytest.approx(row["reward"])
            assert row["rewards"]["judges:short"] == pytest.approx(-0.01 * len(row["completion"]))
            assert row["truncated"] == (row["tokens"][-1] != 256)
            assert len(row["tokens"]) <= 16 - 6
        assert len({row["prompt"] for row in round_[::4]}) == 3
        assert all(len({row["prompt"] for row in round_[i : i + 4]}) == 1 for i in (0, 4, 8))
    assert len({row["completion"] for row in made[0]}) > 6, "the completions of a group differ"
    assert [row["step"] for row in evaluations] == [2, 5]
    assert evaluations[0]["eval_loss"] == -evaluations[0]["eval_reward"]
    assert "reward: " in said
    assert "data         jsonl files prompts.jsonl: " in said


def test_rollouts_are_made_by_the_parameters_of_their_round(finished):
    run, _ = finished
    round_ = rollouts(run)[4]
    for checkpoint, differs in (("4", False), ("2", True)):
        found = trainers_log_probs(run / "checkpoints" / checkpoint, round_[:3])
        largest = max(np.abs(a - row["log_probs"]).max() for a, row in zip(found, round_, strict=False))
        assert (largest > 1e-3) == differs, largest


def test_a_run_that_resumes_repeats_the_interrupted_round(finished, tmp_path):
    whole, _ = finished
    killed_at(4, whole, tmp_path)
    (RUN / "rollouts" / "000004.jsonl").write_text("")
    run, said = learned()
    assert "4 of 6 updates are done" in said
    assert_equal(run, whole, 6)
    assert rollouts(run) == rollouts(whole)


def test_several_updates_of_a_round_belong_together(tmp_path):
    two = {"rl_num_iterations": 2, "rl_grpo_beta": 0, "eval_interval": -1, "rl_loss_algo": "gspo-token"}
    learned(**two)
    steps = read_rows(RUN / METRICS_FILE)
    assert len(rollouts(RUN)) == 3
    for first, second in zip(steps[::2], steps[1::2], strict=True):
        assert first["reward"] == second["reward"]
        assert first["rollout_log_prob_max_diff"] < 1e-4 < second["rollout_log_prob_max_diff"]
        assert first["clip_fraction"] == 0
    (tmp_path / "whole").mkdir()
    shutil.move("runs", "whole/runs")
    killed_at(4, tmp_path / "whole" / RUN, tmp_path)
    learned(**two)
    assert_equal(RUN, tmp_path / "whole" / RUN, 6)
    said = refused(run_name="other", checkpoint_period=3, steps=7, **two)
    assert "checkpoint_period=3" in said
    assert "steps=7" in said
    assert "nearest: 6 or 8" in said


@pytest.mark.rest(covered_by="unit/inference/test_batch_invariant.py")
@pytest.mark.parametrize("keys", [{}, {"dtype": "bfloat16"}, {"decode_sampling_temperature": 0.7}])
def test_with_batch_invariant_nothing_drifts(keys):
    rows = {}
    for invariant in (INVARIANT, INVARIANT | {"batch_invariant": False}):
        shutil.rmtree("runs", ignore_errors=True)
        learned(steps=2, eval_interval=-1, **invariant, **keys)
        rows[invariant["batch_invariant"]] = read_rows(RUN / METRICS_FILE)
    assert all(row["rollout_log_prob_max_diff"] == 0 for row in rows[True])
    assert rows[True][0]["kl"] == rows[True][0]["clip_fraction"] == 0
    assert all(row["rollout_log_prob_max_diff"] > 0 for row in rows[False])


@pytest.mark.rest(covered_by="unit/training/test_frozen.py; adapters in generation in unit/inference/")
def test_adapters_are_trained_on_a_mesh_and_the_reference_is_the_base():
    learned(run_name="base", steps=2, eval_interval=-1)
    adapters = {"enable_lora": True, "lora_rank": 2, "lora_alpha": 4.0, "load_parameters_path": "runs/base"}
    adapters |= {"ici_fsdp_parallelism": 2, "ici_data_parallelism": 2, "per_device_batch_size": 1, "learning_rate": 0.1}
    learned(devices=4, steps=4, **adapters)
    first, *_, last = (row for row in read_rows(RUN / METRICS_FILE) if "loss" in row)
    assert abs(first["kl"]) < 1e-9
    assert last["kl"] > 1e-6
    learned(devices=4, steps=6, **adapters)
    assert newest(RUN).name == "6"


@pytest.mark.rest(covered_by="rounds in one process; integration/test_processes.py")
def test_two_processes_make_the_same_rounds(tmp_path):
    mesh = {"ici_data_parallelism": 2, "per_device_batch_size": 2, "eval_per_device_batch_size": 2, "steps": 4}
    learned(devices=2, **mesh)
    shutil.move("runs", "one")
    words = [f"{key}={value}" for key, value in (ROUNDS | pinned("nnx") | mesh).items()]
    launch = [sys.executable, LAUNCHER, "-n", "2", "--devices", "1", "--all", "--module", "trainer.grpo"]
    environment = os.environ | {"XLA_FLAGS": xla_flags(1)}
    done = subprocess.run([*launch, "--", "base.yml", *words], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [[r["tokens"] for r in round_] for round_ in rollouts(RUN)] == [
        [r["tokens"] for r in round_] for round_ in rollouts(Path("one/run-0001"))
    ]
    for row, other in zip(rows_of(RUN), rows_of(Path("one/run-0001")), strict=True):
        assert row == pytest.approx(other, rel=1e-4, abs=1e-6)


def test_what_is_refused_before_jax(monkeypatch):
    monkeypatch.setattr(train, "distributed", lambda config: pytest.fail("too late"))
    for words, said in (
        ("decode_sampling_strategy=greedy", "completions must be sampled"),
        ("reward_functions=[]", "no function scores the completions"),
        ("reward_functions=[judges]", "not the path of a function"),
        ("enable_diloco=true", "each island has its own parameters"),
        ("mtp_num_layers=1", "would not be trained"),
        ("z_loss_multiplier=0.1", "a term of the next-token loss"),
        ("use_sft=true", "a run uses only one of these methods"),
        ("use_grpo=false", "trainer.grpo is for reinforcement learning"),
        ("train_data_columns=[prompts,answer]", "is the name of another argument"),
        ("max_prefill_predict_length=16", "prompts of 16 tokens leave no room for a completion in a row of 16"),
        ("dataset_type=synthetic", "has no prompts"),
    ):
        assert said in refused(words)
    assert "run python -m trainer.grpo with the same" in refused("use_grpo=true", program=train.main)
    assert "run python -m trainer.grpo with the same" in refused("use_grpo=true", "use_sft=false", program=sft.main)


def test_what_is_refused_when_it_is_known():
    said = refused("gradient_accumulation_steps=2")
    assert "the 12 sequences of a round have up to 16 tokens each and may need 12 rows; an update has 8" in said
    assert "Set gradient_accumulation_steps=3" in said
    for words in ((), ("--dry-run",)):
        assert "judges.py has no function digit" in refused("reward_functions=[judges:digit]", *words)
    assert "no prompt is left" in refused("max_prefill_predict_length=1")
    assert not Path("runs/run-0001/metrics.jsonl").exists()


def test_a_run_resumes_with_the_same_distribution_and_more_rounds(finished, tmp_path):
    whole, _ = finished
    killed_at(4, whole, tmp_path)
    for key, value in {"decode_sampling_temperature": 0.5, "decode_sampling_seed": 1}.items():
        assert f"{key}: " in refused(**{key: value})
    _, said = learned(num_batches=7, reward_num_workers=2, reward_worker_timeout_seconds=20)
    assert "4 of 7 updates are done" in said


def test_averages_answer_in_evaluations_and_not_in_rounds():
    rows = []
    for decay in (0, 0.9):
        learned(run_name=f"decay-{decay}", ema_decay=decay, steps=3, reward_functions="[judges:letters]")
        rows.append(rows_of(Path(f"runs/decay-{decay}")))
    assert rows[0][:3] == rows[1][:3]
    assert rows[0][3]["eval_reward"] != rows[1][3]["eval_reward"]


def test_a_function_that_fails_in_an_evaluation_loses_nothing():
    Path("broken").touch()
    few = {"steps": 4, "checkpoint_period": 100, "save_checkpoint_on_start": False, "eval_interval": 2}
    assert "evaluation, the prompt in " in refused(**few)
    assert newest(RUN).name == "2"


def test_a_function_that_fails_names_its_sample_and_loses_nothing():
    Path("broken").touch()
    said = refused(steps=4, checkpoint_period=100, save_checkpoint_on_start=False, eval_interval=-1)
    assert "round 3, the prompt in " in said
    assert "judges:short failed: KeyError" in said
    assert newest(RUN).name == "2"
    Path("broken").unlink()
    learned(steps=4, checkpoint_period=100, save_checkpoint_on_start=False, eval_interval=-1)
    assert len(rollouts(RUN)) == 4


def test_a_command_that_is_refused_leaves_the_folder_as_it_was(finished, tmp_path):
    assert "judges:absent" in refused(reward_functions="[judges:absent]", run_name="other")
    assert not list(Path("runs/other").glob("*.json*"))
    killed_at(4, finished[0], tmp_path)
    before = {path: path.read_bytes() for path in RUN.rglob("*") if path.is_file()}
    Path("judges.py").write_text("raise ImportError('broken')")
    assert "broken" in refused()
    assert {path: path.read_bytes() for path in RUN.rglob("*") if path.is_file()} == before

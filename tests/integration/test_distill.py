"""`python -m trainer.distill` as a user runs it."""

import json
import shutil
from pathlib import Path

import pytest
from run_cases import arrays_of, command
from support import TINY, pinned

from trainer import distill, sft, train
from trainer.observe.metrics import METRICS_FILE, TIMING_FIELDS, read_rows

pytestmark = pytest.mark.usefixtures("equal_programs")
GOLDENS = Path(__file__).parents[1] / "goldens"
MODEL = TINY | {"vocab_size": 300, "max_target_length": 64, "enable_checkpointing": True, "enable_tensorboard": False}
MODEL |= {"dataset_type": "grain", "grain_file_type": "jsonl", "grain_train_files": "texts.jsonl", "prompt": ""}
MODEL |= {"tokenizer_type": "bytes", "held_out_share": 0.2, "max_num_checkpoints_to_keep": "none"}
MODEL |= {"opt_type": "sgd", "learning_rate": 1.0}
LARGER = {"base_emb_dim": 32, "base_num_decoder_layers": 3}
RUN = MODEL | {"teacher_path": "runs/teacher", "steps": 6, "eval_interval": 3, "checkpoint_period": 3}
RUN |= {"distill_alpha": 0.8, "per_device_batch_size": 2}
LORA = {"enable_lora": True, "lora_rank": 4, "lora_alpha": 8.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("distill")
    texts = [f"{i} and {i} are {2 * i}; {i} times {i} is {i * i}." for i in range(60)]
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    chats = [{"prompt": f"{i} and {i}?", "completion": f"{2 * i}."} for i in range(60)]
    (folder / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    return folder


@pytest.fixture(autouse=True)
def here(folder, monkeypatch):
    monkeypatch.chdir(folder)


def taught(run, devices=1, **keys):
    words = RUN | pinned("nnx") | {"run_name": run} | keys
    code, said = command(words, program=distill.main, devices=devices)
    assert code == 0, said
    return said


def refused(program=distill.main, **keys):
    code, said = command(RUN | pinned("nnx") | keys, program=program)
    assert code == 2, said
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
        keys = MODEL | pinned("nnx") | LARGER | {"run_name": "teacher", "steps": 12, "checkpoint_period": 6}
        code, said = command(keys, program=train.main)
        assert code == 0, said
        return taught("nnx")


def test_the_student_approaches_its_teacher_and_says_so(first):
    steps = [row for row in rows_of("nnx") if "loss" in row]
    assert steps[-1]["divergence"] < steps[0]["divergence"]
    assert steps[0]["distill_loss"] == pytest.approx(0.8 * steps[0]["divergence"], rel=1e-6)
    assert steps[0]["loss"] == pytest.approx(steps[0]["distill_loss"] + 0.2 * steps[0]["lm_loss"], rel=1e-6)
    before, after = (row for row in rows_of("nnx") if "eval_loss" in row)
    assert after["eval_divergence"] < before["eval_divergence"]
    assert after["eval_teacher_lm_loss"] == before["eval_teacher_lm_loss"] < before["eval_loss"]
    assert "teacher      llama2: 3 layers, width 32" in first
    assert "divergence: " in first
    assert "Distillation" in Path("runs/nnx/report.html").read_text()
    own, of_teacher = (arrays_of(Path("runs", run)) for run in ("nnx/checkpoints/6", "teacher/checkpoints/12"))
    assert own.keys() == of_teacher.keys()  # the teacher's parameters are not saved


def test_it_resumes_with_the_same_bits_and_refuses_another_teacher(first):
    taught("parts", steps=3, learning_rate_schedule_steps=6)
    shutil.copytree("runs/teacher", "runs/moved", dirs_exist_ok=True)
    taught("parts", teacher_path="runs/moved", learning_rate_schedule_steps=6)
    assert_same("nnx", "parts")
    said = refused(run_name="parts", teacher_path="runs/teacher/checkpoints/6", steps=7)
    assert "its teacher was a model with other values" in said


def test_conversations(first):
    data = {"use_sft": True, "grain_train_files": "chats.jsonl", "train_data_columns": "[prompt,completion]"}
    data |= {"eval_data_columns": "[prompt,completion]", "load_parameters_path": "runs/nnx", "steps": 2}
    said = taught("chats", **data, tokenizer_type="auto", eval_interval=-1)
    assert rows_of("chats")[0]["tokens"] < 2 * 64
    assert "teacher      llama2" in said
    said = refused(program=sft.main, use_distill=True, **data)
    assert "python -m trainer.distill" in said


OTHERS = {
    "adapters": LORA | {"load_parameters_path": "runs/nnx", "tokenizer_type": "auto"},
    "quantized adapters": LORA | {"lora_weight_qtype": "nf4", "load_parameters_path": "runs/nnx", "lora_tile_size": 8},
    "modules": {
        "mtp_num_layers": 1,
        "load_balance_loss_weight": 0.01,
        "decoder_block": "mixtral",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "base_moe_mlp_dim": 16,
    },
    "host memory": {"teacher_memory_host_offload": True},
}


@pytest.mark.rest(
    covered_by="unit/objectives/test_distillation.py", cases=("modules", "adapters", "quantized adapters")
)
@pytest.mark.parametrize("case", OTHERS)
def test_students_of_other_kinds(first, case):
    taught(case, steps=2, eval_interval=-1, **OTHERS[case])
    assert rows_of(case)[0]["divergence"] > 0
    if case == "host memory":
        assert rows_of(case)[0]["divergence"] == rows_of("nnx")[0]["divergence"]


ISLANDS = {"enable_diloco": True, "ici_diloco_parallelism": 2, "diloco_sync_period": 2, "devices": 2}


@pytest.mark.rest(covered_by="deepseek-v3", cases=("qwen3-moe", "gemma3"))
@pytest.mark.parametrize(("name", "keys"), [("deepseek-v3", ISLANDS), ("qwen3-moe", {}), ("gemma3", {})])
def test_teachers_of_other_families(name, keys):
    keys = keys | {"dataset_type": "synthetic", "grain_train_files": "", "vocab_size": 64, "eval_interval": -1}
    said = taught(f"of {name}", teacher_path=str(GOLDENS / name), tokenizer_type="auto", steps=2, **keys)
    assert f"teacher      {name.replace('-moe', '_moe').split('-')[0]}" in said
    assert rows_of(f"of {name}")[0]["divergence"] > 0


def test_what_is_refused(first):
    assert "teacher_path is empty" in refused(teacher_path="")
    assert "runs/nobody: there is no such folder" in refused(teacher_path="runs/nobody")
    assert "python -m trainer.distill" in refused(program=train.main, use_distill=True)
    words = LARGER | {"tokenizer_type": "auto", "vocab_size": 300, "tokenizer_path": ""}
    code, said = command(MODEL | pinned("nnx") | words | {"run_name": "bpe", "steps": 1}, program=train.main)
    assert code == 0, said
    assert "differ in" in refused(teacher_path="runs/bpe")

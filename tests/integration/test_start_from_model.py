"""With load_parameters_path alone, training, resuming, compiling and tables take the model from the folder."""

import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from compiler import xla_flags
from process_cases import LAUNCHER
from run_cases import command, rows_of, train
from support import pinned

from trainer import export, shardings, train_compile
from trainer.data.tokenizer import train_bpe

pytestmark = pytest.mark.usefixtures("equal_programs")
DATA = pinned("nnx") | {
    "dataset_type": "grain",
    "grain_file_type": "text",
    "grain_train_files": "corpus.txt",
    "data_cache_directory": "cache",
    "max_target_length": 16,
    "per_device_batch_size": 2,
    "eval_interval": -1,
    "enable_tensorboard": False,
    "opt_type": "sgd",
    "prompt": "",
}
RUN = {"steps": 2, "checkpoint_period": 1, "max_num_checkpoints_to_keep": "none", "run_name": "b"}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Returns a folder with data, a run and its exports hf, params, model.gguf. Some vocabulary rows have no token."""
    folder = tmp_path_factory.mktemp("start")
    (folder / "corpus.txt").write_text("def f(x):\n    return x + 1\n" * 500)
    train_bpe(["def f(x): return x"], 260).save(folder)
    keys = DATA | RUN | {"run_name": "first", "vocab_size": 272, "normalize_embedding_logits": False}
    code, said = train(
        folder, "tokenizer_path=tokenizer.json", **keys | {"enable_checkpointing": True, "dropout_rate": 0}
    )
    assert code == 0, said
    with contextlib.redirect_stdout(io.StringIO()):
        for form in ("hf", "params", "gguf"):
            name = "model.gguf" if form == "gguf" else form
            export.main([str(folder / "runs/first"), str(folder / name), f"format={form}"])
    return folder


@pytest.fixture
def here(made, tmp_path, monkeypatch):
    for name in ("corpus.txt", "hf", "params", "model.gguf"):
        (shutil.copytree if (made / name).is_dir() else shutil.copy)(made / name, tmp_path / name)
    shutil.copytree(made / "runs", tmp_path / "earlier")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def begun(path, *words, **keys):
    return command(DATA | RUN | {"load_parameters_path": path} | keys, *words)


def unfinish(run):
    (run / "finished").unlink()
    shutil.rmtree(run / "checkpoints/2")


@pytest.mark.parametrize("path", ["hf", "params", "model.gguf", "earlier/first", "earlier/first/checkpoints/2"])
def test_a_dry_run_shows_where_its_keys_come_from(here, path):
    code, said = begun(path, "--dry-run")
    assert code == 0, said
    assert f"load_parameters_path={path} gives the model's keys: decoder_block=llama2, " in said
    assert f"vocab_size=272 (load_parameters_path={path})" in said
    inside = "earlier/first/checkpoints/2/run/tokenizer" if "first" in path else path
    assert f"tokenizer_path={inside}: the tokenizer of the model" in said
    assert not (here / "runs").exists()


@pytest.mark.parametrize(("name", "path"), [("b", "model.gguf"), ("", "hf")])
def test_a_run_does_not_need_the_folder_any_more(here, name, path):
    """The run is resumed by its name, or found by its configuration."""
    run = here / "runs" / (name or "run-0001")
    code, said = begun(path, run_name=name)
    assert code == 0, said
    config, rows = (run / "config.yml").read_text(), rows_of(run)
    unfinish(run)
    (here / path).rename(here / "gone")
    code, said = begun(path, run_name=name)
    assert code == 0, said
    assert f"runs/{run.name}/checkpoints/1: the model's keys come from this run's own checkpoint" in said
    assert (
        f"tokenizer_path={path} is gone: the tokenizer in runs/{run.name}/checkpoints/1/run/tokenizer is used" in said
    )
    assert "1 of 2 updates is done" in said
    assert (run / "config.yml").read_text() == config
    assert rows_of(run) == rows
    code, said = begun(path, run_name="new")
    assert (code, f"{path}: there is no such folder" in said, said.count("error: ")) == (2, True, 1), said


def test_a_named_run_keeps_its_model_if_the_folder_has_another_one(here):
    keys = {"learning_rate_schedule_steps": 2}
    assert begun("hf", steps=1, **keys)[0] == 0
    (here / "hf/config.json").write_text("{}")
    code, said = begun("hf", **keys)
    assert code == 0, said
    assert "load_parameters_path=hf is not read" in said
    code, said = begun("hf", base_emb_dim=24, **keys)
    assert (code, "base_emb_dim: 16 -> 24" in said) == (2, True), said


def test_a_compilation_and_a_table_are_of_that_model(here, capsys):
    words = ["base.yml", *(f"{key}={value}" for key, value in (DATA | {"load_parameters_path": "hf"}).items())]
    shardings.main([*words, "compile_topology=cpu-1", "--json"])
    found = {row["name"]: row["shape"] for row in json.loads(capsys.readouterr().out)["tensors"]}
    assert [272, 16] in found.values()
    with pytest.raises(SystemExit):
        shardings.main([*words, "compile_topology=cpu-1", "left=linen", "right=nnx", "right.base_emb_dim=24"])
    assert re.search("error: right: .*hf contains a different model", capsys.readouterr().err)
    train_compile.main([*words, "compile_topology=cpu-1"])
    assert "load_parameters_path=hf gives the model's keys" in capsys.readouterr().out


@pytest.mark.rest(covered_by="one process; integration/test_processes.py")
def test_two_processes_read_one_model(here):
    keys = DATA | RUN | {"load_parameters_path": "hf", "steps": 1, "ici_data_parallelism": 2}
    launch = [sys.executable, LAUNCHER, "-n", "2", "--devices", "1", "--all", "--"]
    environment = os.environ | {"XLA_FLAGS": xla_flags(1)}

    def run(**changes):
        words = [f"{key}={value}" for key, value in (keys | changes).items()]
        return subprocess.run(
            [*launch, "base.yml", *words, "--dry-run"], env=environment, capture_output=True, text=True, timeout=200
        )

    done = run()
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("load_parameters_path=hf gives the model's keys") == 1
    done = run(load_parameters_path="absent")
    assert done.returncode == 2
    assert "absent: there is no such folder" in done.stdout + done.stderr

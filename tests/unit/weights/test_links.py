"""A stranger's folder: no command follows its links to read, copy or publish their targets, or waits for a pipe."""

import json
import os
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest
from checkpoint_cases import FAMILIES, config_of, hf_tensors, random_params, write_hf
from config_cases import write
from manager_cases import SIDECAR, saved

from trainer import export, generate, inspect, report
from trainer.backends.base import TrainTree
from trainer.compare.checkpoints import compare_checkpoints
from trainer.compare.difference import Tolerance
from trainer.config.dump import to_yaml
from trainer.config.errors import UserError
from trainer.config.load import load
from trainer.data.tokenizer_files import load_tokenizer
from trainer.leaves.source import Leaf, nested
from trainer.weights.open import open_source
from trainer.weights.params.write import write_params

SECRET = "a line that no published folder may have"
KINDS = ["run", "params", "hugging face"]


@pytest.fixture
def secret(tmp_path) -> Path:
    (tmp_path / "secret").write_text(SECRET)
    return tmp_path / "secret"


@pytest.fixture(params=KINDS)
def theirs(request, tmp_path) -> Path:
    """Returns an exportable folder of each kind."""
    folder = tmp_path / "theirs"
    config = config_of(decoder_block="llama2", **FAMILIES["llama2"])
    params = random_params(config)
    if request.param == "hugging face":
        return write_hf(folder, config, hf_tensors(params))
    if request.param == "params":
        folder.mkdir()
        leaves = {name: Leaf(it.shape, it.dtype, [lambda it=it: it]) for name, it in params.items()}
        write_params(folder, config, leaves, None)
        (folder / "tokenizer.json").write_text("{}")
        return folder
    tree = TrainTree(jnp.int32(3), nested(params), {}, {})
    saved(folder, tree=tree, sidecar=SIDECAR._replace(config=to_yaml(config)))
    return folder


def files_of(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]


def error_of(capsys, command, *words) -> str:
    with pytest.raises(SystemExit) as end:
        command.main([str(word) for word in words])
    assert end.value.code == 2
    return capsys.readouterr().err


def test_whatever_file_is_a_link_out_of_the_folder(theirs, tmp_path, secret, capsys):
    """Each file in turn becomes a link to the secret: every command that reads the folder names and refuses it."""
    for file in files_of(theirs):
        file.rename(tmp_path / "kept")
        file.symlink_to(secret)
        for command, words in ((export, [theirs, tmp_path / "out", "format=params"]), (inspect, [theirs])):
            message = error_of(capsys, command, *words)
            assert f"{file} leads out of {theirs}, to {secret}" in message, command
            assert SECRET not in message
        file.unlink()
        (tmp_path / "kept").rename(file)
    assert not (tmp_path / "out").exists()


def test_whatever_file_is_a_pipe_or_a_device(theirs, tmp_path, capsys):
    for file in files_of(theirs):
        file.rename(tmp_path / "kept")
        os.mkfifo(file)
        for command, words in ((export, [theirs, tmp_path / "out", "format=params"]), (inspect, [theirs])):
            message = error_of(capsys, command, *words)
            assert "a pipe, a socket or a device" in message or "is a checkpoint" in message, file
        file.unlink()
        file.symlink_to("/dev/zero")
        assert "leads out of" in error_of(capsys, inspect, theirs)
        file.unlink()
        (tmp_path / "kept").rename(file)


@pytest.mark.parametrize("name", ["tokenizer.model", "generation_config.json", "chat_template.jinja", "vocab.json"])
@pytest.mark.parametrize("theirs", KINDS[1:], indirect=True)
def test_a_tokenizer_file_that_leads_to_a_secret_is_not_published(theirs, name, tmp_path, secret, capsys):
    (theirs / name).symlink_to(secret)
    message = error_of(capsys, export, theirs, tmp_path / "out", "format=hf")
    assert f"{theirs / name} leads out of" in message
    assert not list(tmp_path.glob("out*"))


def test_a_tokenizer_of_a_folder(tmp_path, secret):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs/tokenizer.json").symlink_to(secret)
    (tmp_path / "theirs/vocab").write_text("")
    with pytest.raises(UserError, match="leads out of"):
        load_tokenizer(str(tmp_path / "theirs"), "auto", add_bos=False, add_eos=False)
    (tmp_path / "theirs/tokenizer_config.json").symlink_to(secret)
    with pytest.raises(UserError, match=r"tokenizer_config\.json leads out of"):
        load_tokenizer(str(tmp_path / "theirs/vocab"), "auto", add_bos=False, add_eos=False)


@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_the_file_beside_a_tree_of_maxtext(tmp_path, secret, kind, capsys):
    (tmp_path / "0/items").mkdir(parents=True)
    (tmp_path / "0/items/_METADATA").write_text("{}")
    beside = tmp_path / "0/_CHECKPOINT_METADATA"
    if kind == "pipe":
        os.mkfifo(beside)
    else:
        beside.symlink_to(secret)
    message = error_of(capsys, inspect, tmp_path / "0/items")
    assert str(beside) in message
    assert "leads out of" in message or "a pipe, a socket or a device" in message


@pytest.mark.parametrize("theirs", KINDS[:2], indirect=True)
def test_two_checkpoints_are_not_compared_through_a_link(theirs, tmp_path, secret):
    file = files_of(theirs)[0]
    file.unlink()
    file.symlink_to(secret)
    with pytest.raises(UserError, match="leads out of"):
        compare_checkpoints(str(theirs), str(theirs), Tolerance(), print)


@pytest.mark.parametrize("theirs", KINDS[:1], indirect=True)
def test_the_newest_checkpoint_is_not_one_elsewhere(theirs, tmp_path):
    (theirs / "checkpoints/3").rename(tmp_path / "elsewhere")
    (theirs / "checkpoints/3").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="leads out of"):
        open_source(str(theirs))
    open_source(str(tmp_path / "elsewhere"))


# ---- The report ---------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path) -> Path:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").write_text('{"step": 0, "loss": 1.0}\n')
    (tmp_path / "run/samples.jsonl").write_text(json.dumps({"step": 0, "prompt": "", "text": "\nimport os\n"}) + "\n")
    return tmp_path / "run"


@pytest.mark.parametrize("name", ["report.html", "report.html.{pid}.tmp"])
@pytest.mark.parametrize("exists", [True, False])
def test_a_report_overwrites_no_file_that_a_link_leads_to(run, tmp_path, name, exists):
    startup = tmp_path / "site-packages.pth"
    if exists:
        startup.write_text("mine")
    (run / name.format(pid=os.getpid())).symlink_to(startup)
    report.main([str(run)])
    assert startup.read_text() == "mine" if exists else not startup.exists()
    assert (run / "report.html").read_text().startswith("<!DOCTYPE html>")
    assert not (run / "report.html").is_symlink()
    assert not list(run.glob("*.tmp"))


def test_a_report_reads_nothing_outside_of_the_run(run, tmp_path, secret, capsys):
    for name in ("metrics.jsonl", "samples.jsonl", "config.yml", "starts.json"):
        kept = (run / name).read_bytes() if (run / name).exists() else None
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(secret)
        assert f"{run / name} leads out of" in error_of(capsys, report, run)
        (run / name).unlink()
        if kept is not None:
            (run / name).write_bytes(kept)
    assert not (run / "report.html").exists()


def test_the_page_on_several_runs_goes_through_no_link(run, tmp_path, monkeypatch):
    """The current folder may come from the stranger."""
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "report.html").symlink_to("mine")
    monkeypatch.chdir(tmp_path)
    report.main(["run", "run"])
    assert (tmp_path / "mine").read_text() == "mine"


def test_a_report_to_a_place_that_the_user_names(run, tmp_path, capsys):
    (tmp_path / "page").write_text("")
    (tmp_path / "link").symlink_to("page")
    report.main([str(run), f"out={tmp_path}/link"])  # outside of the folder: the user's link
    assert (tmp_path / "page").read_text().startswith("<!DOCTYPE html>")
    reader, writer = os.pipe()
    report.main([str(run), f"out=/dev/fd/{writer}"])
    assert os.read(reader, 15) == b"<!DOCTYPE html>"
    for end in (reader, writer):
        os.close(end)
    (tmp_path / "page").write_text("mine")
    (run / "linked").symlink_to(tmp_path)
    assert "leads out of" in error_of(capsys, report, run, f"out={run}/linked/page")
    assert (tmp_path / "page").read_text() == "mine"
    (run / "page").symlink_to(tmp_path / "page")
    report.main([str(run), f"out={run}/page"])
    assert (tmp_path / "page").read_text() == "mine"


# ---- Code ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "reach",
    [
        "the yml is a link",
        "its parent is elsewhere",
        "its parent is a link",
        "a grandparent",
        "through a linked folder",
        "through a linked folder and back",
        "the folder by another name",
    ],
)
def test_no_way_around_the_guard_against_foreign_code(tmp_path, monkeypatch, reach):
    monkeypatch.chdir(tmp_path)
    code = "base_config: base.yml\ndecoder_block: a:B\n"
    for folder in ("theirs/sub", "elsewhere/sub"):
        Path(folder).mkdir(parents=True)
    write("elsewhere/code.yml", code)
    yml = "theirs/config.yml"
    if reach == "the yml is a link":
        Path(yml).symlink_to(tmp_path / "elsewhere/code.yml")
    elif reach == "its parent is elsewhere":
        write(yml, "base_config: ../elsewhere/code.yml\n")
    elif reach == "its parent is a link":
        write(yml, "base_config: parent.yml\n")
        Path("theirs/parent.yml").symlink_to(tmp_path / "elsewhere/code.yml")
    elif reach == "a grandparent":
        write(yml, f"base_config: {tmp_path}/elsewhere/middle.yml\n")
        write("elsewhere/middle.yml", "base_config: code.yml\n")
    elif reach == "through a linked folder":
        Path("theirs/link").symlink_to(tmp_path / "elsewhere")
        yml = "theirs/link/code.yml"
    elif reach == "through a linked folder and back":
        Path("theirs/link").symlink_to(tmp_path / "elsewhere/sub")
        yml = "theirs/link/../code.yml"
    else:
        Path("alias").symlink_to("theirs")
        write("theirs/config.yml", code)
        yml = "alias/sub/../config.yml"
    for key in ("load_parameters_path", "load_full_state_path"):
        with pytest.raises(UserError, match="code that a folder names runs only if you also name it"):
            load([yml, f"{key}=theirs"])
        assert load([yml, f"{key}=theirs", "decoder_block=a:B"]).config.decoder_block == "a:B"


@pytest.mark.parametrize(
    ("yml", "key", "value"),
    [
        ("theirs/c.yml", "load_parameters_path", "theirs/0/items"),  # MaxText's folder layout
        ("theirs/c.yml", "load_parameters_path", "theirs/weights"),
        ("theirs/c.yml", "load_parameters_path", "theirs/checkpoints/0/items"),
        ("theirs/c.yml", "load_full_state_path", "theirs/latest"),  # a link out of the folder
        ("theirs/latest/c.yml", "load_parameters_path", "theirs/latest"),
        ("models--a--b/snapshots/r/c.yml", "load_parameters_path", "models--a--b/snapshots/r/sub"),
        ("theirs/c.yml", "tokenizer_path", "theirs"),
        ("theirs/c.yml", "hf_path", "theirs"),
        ("theirs/c.yml", "dataset_path", "theirs"),
    ],
)
def test_a_yml_beside_what_is_read_is_of_the_same_folder(tmp_path, monkeypatch, yml, key, value):
    monkeypatch.chdir(tmp_path)
    Path("elsewhere").mkdir()
    Path("theirs").mkdir()
    Path("theirs/latest").symlink_to(tmp_path / "elsewhere")
    Path(yml).parent.mkdir(parents=True, exist_ok=True)
    write(yml, "base_config: base.yml\ndecoder_block: a:B\n")
    kind = {"hf_path": ["dataset_type=hf"], "dataset_path": ["dataset_type=tfds", "dataset_name=a"]}.get(key, [])
    with pytest.raises(UserError, match="code that a folder names runs only if you also name it"):
        load([yml, f"{key}={value}", *kind])
    load([yml, f"{key}={value}", *kind, "decoder_block=a:B"])


def test_the_yml_of_ones_own_project_may_name_code(tmp_path, monkeypatch):
    """The current folder is the project, which contains weights, data and a tokenizer."""
    for folder in ("weights/llama", "data", "configs"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "tokenizer.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    for yml in ("mine.yml", "configs/mine.yml"):
        write(yml, "base_config: base.yml\ndecoder_block: a:B\n")
        for words in ("load_parameters_path=weights/llama", "tokenizer_path=.", "dataset_type=hf hf_path=data"):
            assert load([yml, *words.split()]).config.decoder_block == "a:B"


def test_a_yml_of_ones_own_may_name_code(tmp_path, monkeypatch):
    (tmp_path / "theirs").mkdir()
    write(str(tmp_path / "mine.yml"), "base_config: base.yml\ndecoder_block: a:B\n")
    monkeypatch.chdir(tmp_path / "theirs")
    for yml in ("../mine.yml", f"{tmp_path}/theirs/../mine.yml", f"{tmp_path}/mine.yml"):
        assert load([yml, "load_parameters_path=."]).config.decoder_block == "a:B"


# ---- Control characters -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("theirs", KINDS[:1], indirect=True)
def test_inspect_prints_no_control_characters(theirs, capsys):
    checkpoint = theirs / "checkpoints/3"
    (checkpoint / "run/data.json").write_text(
        json.dumps({"position": {"\x1b[2J": "\x9b", "\ud800": 1}, "fingerprint": "\x1b]0;x\x07"})
    )
    (checkpoint / "run/tokenizer/\x1b[31m.json").write_text("{}")
    (checkpoint / "run/tokenizer/a\nb").write_text("{}")
    (checkpoint / "run/tokenizer" / os.fsdecode(b"\xff\x9b")).write_text("{}")
    inspect.main([str(theirs), "norms=false"])
    text = capsys.readouterr().out
    assert "\x1b" not in text
    assert "\\x1b[31m.json, a\\x0ab, tokenizer.json, \\udcff\\udc9b\n" in text
    assert "\\x1b]0;x\\x07" in text


@pytest.mark.parametrize("terminal", [True, False])
def test_generate_writes_no_control_characters_to_a_terminal(monkeypatch, capsys, terminal):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal, raising=False)
    generate._write("a\x1b[2J\tb\n")
    assert capsys.readouterr().out == ("a\\x1b[2J\tb\n" if terminal else "a\x1b[2J\tb\n")


def test_an_error_prints_no_control_characters(tmp_path, capsys):
    assert "\\x1b[2J" in error_of(capsys, inspect, tmp_path / "\x1b[2J")

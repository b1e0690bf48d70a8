"""Records that trainer.parity writes, and comparisons with them."""

import itertools
import json
import os
import random
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from parity_cases import SMALL, command, run
from safetensors.numpy import load_file
from support import ALL_COMBINATIONS, arguments

from trainer import train
from trainer.compare import record
from trainer.compare.record import Record
from trainer.config.errors import UserError
from trainer.models.llama2 import block as llama2
from trainer.weights.huggingface.safetensors_file import file_metadata, header, stored_tensors

KEYS = {"base_num_decoder_layers": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("records")


def written(capsys, path, *words, **keys):
    """Writes a record of a tiny model."""
    if not path.exists():
        code, _, error = run(capsys, f"record={path}", *words, **KEYS | keys)
        assert code == 0, error
    return path


@pytest.fixture
def plain(capsys, folder):
    return written(capsys, folder / "plain.safetensors")


@pytest.fixture
def full(capsys, folder):
    return written(capsys, folder / "full.safetensors", "arrays=true")


def test_a_record_of_the_first_combination_equals_the_last(capsys, plain):
    code, out, error = command(capsys, f"left={plain}", f"right={ALL_COMBINATIONS[-1]}", "--json")
    report = json.loads(out)
    assert (code, report["equal"]) == (0, True), error
    (comparison,) = report["comparisons"]
    assert comparison["right"] == ALL_COMBINATIONS[-1]
    quantities = comparison["quantities"]
    assert len(quantities) == 8
    assert all(it["bits"] and it["arrays"] for it in quantities.values())
    layers = [it["layer"] for it in quantities["gradients"]["arrays"] if it["name"] == "decoder/layers/mlp/wo/kernel"]
    assert sorted(layers) == [0, 1]
    assert comparison["facts"]["program text"].startswith("the same text")
    assert comparison["facts"]["FLOPs"][0] == comparison["facts"]["FLOPs"][1] > 0


def test_a_layer_that_computes_something_else_is_named(capsys, full, plain, monkeypatch):
    layers = itertools.count()

    class Wrong(llama2.MLP):
        def __call__(self, *args):
            return super().__call__(*args) * (1.001 if next(layers) == 1 else 1.0)

    monkeypatch.setattr(llama2, "MLP", Wrong)
    first = "differ first in activations: decoder/layers/mlp_output, layer 1"
    code, out, _ = command(capsys, f"left={plain}", "scan_layers=false", only_forward=True)
    assert code == 1
    assert f"plain.safetensors and nnx {first}: rms 0." in out
    assert out.splitlines()[-1].endswith("record with arrays=true to get difference sizes")
    layers = itertools.count()
    code, out, _ = command(capsys, f"left={full}", "scan_layers=false", only_forward=True)
    assert out.splitlines()[-1] == f"full.safetensors and nnx {first}"


@pytest.mark.rest(covered_by="a tolerance, which reads the same arrays")
def test_the_sizes_of_differences_are_those_of_a_comparison_in_one_process(capsys, full):
    keys = ("right.rope_max_timescale=20000", "--json")
    _, live, _ = run(capsys, *keys, **KEYS)
    code, out, _ = command(capsys, f"left={full}", *keys)
    assert code == 1
    there, here = json.loads(live)["comparisons"][0], json.loads(out)["comparisons"][0]
    assert here["quantities"] == there["quantities"]


def test_a_tolerance_needs_arrays(capsys, plain, full):
    code, _, error = command(capsys, f"left={plain}", "rtol=1e-5")
    assert code == 2
    assert "record with arrays=true" in error
    keys = ("right.attention=blockwise", "opt_type=sgd")
    assert command(capsys, f"left={full}", *keys, "rtol=1e-5", only_forward=True)[0] == 0


def test_batch_and_parameters_come_from_the_record(capsys, folder, tmp_path):
    """The recorded text is deleted, and this run would draw other parameters."""
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "one.txt").write_text("a b c d e f g h " * 400)
    data = {"dataset_type": "hf", "hf_path": "text", "hf_train_files": f"{texts}/*.txt"}
    data |= {"tokenizer_type": "bytes", "vocab_size": 512}
    path = written(capsys, folder / "text.safetensors", only_forward=True, **data)
    shutil.rmtree(texts)
    code, out, error = command(capsys, f"left={path}", "init_weights_seed=7", only_forward=True)
    assert code == 0, (out, error)


@pytest.mark.rest(covered_by="records of a first step")
def test_a_record_of_a_started_run_has_its_optimizer_state_and_batch(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mesh = {"ici_fsdp_parallelism": 8, "per_device_batch_size": 1}
    run_of = {"steps": 2, "run_name": "first", "enable_checkpointing": True, "opt_type": "adamw"}
    train.main(arguments("nnx", **SMALL | KEYS | mesh | run_of))
    words = {"load_full_state_path": "runs/first", "opt_type": "adamw"}
    path = written(capsys, tmp_path / "trained.safetensors", **words)
    shutil.rmtree(tmp_path / "runs")
    last = ALL_COMBINATIONS[-1]
    code, out, error = command(capsys, f"left={path}", f"right={last}", "--json")
    assert code == 0, (out, error)
    quantities = json.loads(out)["comparisons"][0]["quantities"]
    assert len(quantities) == 6  # a record of a started run has no midway state
    names = {it["name"] for it in quantities["optimizer state"]["arrays"]}
    assert "step" in names
    code, _, error = command(capsys, f"left={path}", "opt_type=sgd")
    assert code == 2
    assert "its optimizer state has a different structure" in error


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("left.attention=blockwise",), "is the left side"),
        (("left=nnx",), "is the left side"),
        (("per_device_batch_size=4",), "rows in its batch"),
        (("max_target_length=8",), "different in plain.safetensors and nnx"),
        (("dataset_type=hf", "hf_path=json", "hf_train_files=x"), "different in plain.safetensors and nnx"),
        (("parameter_memory_host_offload=true",), "comparisons need the state on the device"),
        (("arrays=true",), "applies only to a new record"),
        (("record=other.safetensors",), "recording a side compares nothing"),
    ],
)
def test_what_does_not_fit_a_record_is_refused(capsys, plain, words, message):
    code, _, error = command(capsys, f"left={plain}", *words)
    assert code == 2
    assert message in error


def test_a_yml_beside_a_record_is_refused(capsys, plain, tmp_path):
    (tmp_path / "my.yml").write_text("steps: 3\n")
    code, _, error = command(capsys, f"{tmp_path}/my.yml", f"left={plain}")
    assert code == 2
    assert "already has a configuration" in error


def test_a_batch_that_is_not_the_models_is_refused(capsys, plain, tmp_path):
    def smaller(about):
        return about | {"config": about["config"].replace("vocab_size: 64", "vocab_size: 32")}

    def shorter(about):
        return about | {"config": about["config"].replace("max_target_length: 16", "max_target_length: 8")}

    for change, message in ((smaller, "tokens outside of vocab_size=32"), (shorter, "needs inputs int32[8, 8]")):
        code, _, error = command(capsys, f"left={changed(plain, tmp_path, change)}")
        assert code == 2
        assert message in error


def test_a_record_is_not_overwritten_and_does_not_appear_half(capsys, plain, tmp_path, monkeypatch):
    before = plain.read_bytes()
    assert "this file exists" in run(capsys, f"record={plain}", **KEYS)[2]
    assert plain.read_bytes() == before
    assert "there is no folder" in run(capsys, f"record={tmp_path}/none/x.safetensors", **KEYS)[2]
    assert "only the left side is recorded" in run(capsys, f"record={tmp_path}/x.safetensors", "right=nnx")[2]

    def fails(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(record.shutil, "copyfileobj", fails)
    code, _, error = run(capsys, f"record={tmp_path}/x.safetensors", only_forward=True, **KEYS)
    assert (code, "No space left on device" in error) == (2, True)
    assert list(tmp_path.iterdir()) == []


def test_code_that_only_a_record_names_does_not_run(capsys, plain, tmp_path, monkeypatch):
    (tmp_path / "planted.py").write_text("raise SystemExit('ran')")
    monkeypatch.syspath_prepend(tmp_path)
    path = changed(
        plain,
        tmp_path,
        lambda about: (
            about
            | {
                "config": about["config"].replace('decoder_block: "llama2"', 'decoder_block: "planted:Block"'),
                "given": [*about["given"], "decoder_block"],
            }
        ),
    )
    code, _, error = command(capsys, f"left={path}")
    assert code == 2
    assert "decoder_block=planted:Block" in error
    assert "if you trust it" in error


def changed(path, folder, change):
    """Returns a copy of a record with a changed description and a matching digest."""
    about = json.dumps(change(json.loads(file_metadata(path)["record"])))
    tensors = {name: (it.shape, it.shown_dtype) for name, it in stored_tensors(path).items()}
    begin = header(tensors, {"record": about, "digest": record._digest(about)})
    data = path.read_bytes()
    copy = folder / "changed.safetensors"
    copy.write_bytes(begin + data[8 + int.from_bytes(data[:8], "little") :])
    return copy


def test_any_changed_byte_is_noticed(plain, tmp_path):
    data, rng = plain.read_bytes(), random.Random(0)
    start = 8 + int.from_bytes(data[:8], "little")
    spots = [*(rng.randrange(start) for _ in range(60)), *(rng.randrange(start, len(data)) for _ in range(60))]
    spaces = 0
    for at in spots:
        copy = tmp_path / "damaged.safetensors"
        copy.write_bytes(data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :])
        try:
            read_all(copy)
            spaces += 1
        except UserError:
            pass
    assert spaces == 0


def read_all(path):
    found = Record(path)
    found.head, found.side()
    left = found.reference()
    from trainer.compare import measure, programs

    for step in programs.MEASURES:
        for arrays in left.measured(step, left.batch, measure.Shared()).arrays.values():
            for summary in arrays.values():
                if summary.read:
                    summary.read()


@pytest.mark.parametrize("keep", [0, 5, 100, 0.5, 0.999])
def test_a_record_that_was_cut_off_is_refused(plain, tmp_path, keep):
    data = plain.read_bytes()
    copy = tmp_path / "cut.safetensors"
    copy.write_bytes(data[: keep if keep > 1 else int(keep * len(data))])
    with pytest.raises(UserError, match="cannot be read as a record"):
        Record(copy)


def test_a_description_by_a_stranger_ends_in_a_message(plain, tmp_path):
    """Each entry of the description is replaced by a wrong value, or removed, once."""
    about = json.loads(file_metadata(plain)["record"])
    for name in about:
        for other in (None, [], {}, "x", -1, [["y"]], {"z": {"dtype": "O", "shape": [1], "layers": None, "parts": []}}):
            path = changed(plain, tmp_path, lambda it, name=name, other=other: it | {name: other})
            try:
                read_all(path)
            except UserError:
                continue  # any other exception fails the test
    for field, entry in (("shape", "x"), ("layers", [1, 2, 3, 4]), ("parts", [[1]])):

        def planted(it, field=field, entry=entry):
            for array in it["measures"]["parameters"]["quantities"]["parameters"].values():
                array[field] = entry
            return it

        with pytest.raises(UserError, match="this record is damaged"):
            read_all(changed(plain, tmp_path, planted))


def test_a_file_that_is_no_record_is_refused(tmp_path):
    other = tmp_path / "other.safetensors"
    other.write_bytes(header({"x": ((2,), np.dtype(np.float32))}, {"format": "pt"}) + bytes(8))
    with pytest.raises(UserError, match="is not a record"):
        Record(other)
    with pytest.raises(UserError, match="cannot be read as a record"):
        Record(tmp_path / "none.safetensors")
    with pytest.raises(UserError, match=r"left=.*: this is a folder; give a record"):
        Record(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="this is a pipe"):
        Record(tmp_path / "pipe")


def test_a_record_tells_what_it_holds(plain, full):
    """The safetensors library reads it, and every dtype is preserved."""
    tensors = load_file(full)
    names = {name.partition("/")[0] for name in tensors}
    assert names == {"batch", "start parameters", "midway state", "measured", "program text"}
    assert not any(name.startswith("measured/") for name in load_file(plain))
    assert bytes(tensors["program text"]).startswith(b"module @")
    assert Record(full).has_arrays
    assert not Record(plain).has_arrays


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2fnuz", "int4", "uint2", "bool", "int8"])
def test_arrays_of_every_dtype_come_back(tmp_path, dtype):
    array = np.asarray(jnp.arange(6).astype(dtype)).reshape(2, 3)
    path = tmp_path / "x.safetensors"
    with record.Writer(path, (), arrays=True) as writer:
        writer._keep("batch/", {"x": array})
        writer._about |= {"config": "steps: 1\n", "given": []}
    back = Record(path)._arrays("batch/")["x"]
    assert back.dtype == array.dtype
    assert back.tobytes() == array.tobytes()

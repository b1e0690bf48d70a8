"""Untrusted or damaged folders: one message that names the file, and no code that the folder names is run."""

import json
import shutil
import struct
import sys
from pathlib import Path

import numpy as np
import pytest
from checkpoint_cases import FAMILIES, config_of, hf_config, hf_tensors, random_params, words, write_hf

from trainer import export
from trainer.config.errors import UserError
from trainer.config.load import load
from trainer.weights.huggingface.config_fields import neutral_keys
from trainer.weights.huggingface.config_json import model_keys
from trainer.weights.model_keys import model_config, read_model_yaml
from trainer.weights.open import open_source

GUIDES = Path(__file__).parents[3] / "docs" / "guides"
INDEX = "model.safetensors.index.json"
NAN, INF = float("nan"), float("inf")
# Values that are invalid for every field of config.json.
NEVER = [NAN, INF, -INF, 10**40, -1.5, "x" * 9000, "\ud800", [[["x"]]], [None]]
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
# Fields that are read, with further invalid values.
FIELDS = {
    **{size: [None, True, 0, 2**31, 0.5, {}] for size in SIZES},
    **{size: [True, 0, 2**31, 2**63] for size in ("num_key_value_heads", "head_dim")},
    "rms_norm_eps": [None, True, 0, 1e-320, 1e308, "1e-5"],
    "rope_theta": [True, 0, -1, 1e308, "1"],
    "hidden_act": [None, 3, {}],
    "model_type": [None, 3, {}],
    "layer_types": [[1], ["full_attention"], ["full_attention"] * 3, ["x"] * 2, {}],
    "rope_scaling": [[], "x", 3, {"rope_type": 3}, {"rope_type": "yarn"}, {"type": []}],
    "rope_parameters": [{"rope_type": "linear", "factor": it} for it in (None, 0, NAN, INF, "2", 1e308)],
    "partial_rotary_factor": [True, 0.5],
    "max_position_embeddings": [True, 0, 2**31],
    "eos_token_id": [True, 0.5, {}, [0.5]],
    "initializer_range": [True, "0.02"],
    "tie_word_embeddings": [1, "false"],
    "attention_bias": [1, True],
    "quantization_config": [{"bits": 4}, 3],
    "max_window_layers": [None, True],
    "sliding_window": [True, 2**31],
}


def refusal(call, *args) -> str:
    with pytest.raises(UserError) as caught:
        call(*args)
    assert len(str(caught.value)) < 1000
    return str(caught.value)


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_of_config_json_of_another_type_or_range(field):
    data = hf_config(config_of(decoder_block="qwen3", **FAMILIES["qwen3"]))
    for value in [*NEVER, *FIELDS[field]]:
        message = refusal(model_keys, data | {"use_sliding_window": True, field: value}, "config.json")
        assert message.startswith("config.json: ")
        told = (field, "RoPE type", "rope_type", "layers of kinds")
        assert any(words in message for words in told), value
    assert "values that are not allowed in config.json:" in refusal(model_keys, data | {field: 10**40}, "config.json")


@pytest.mark.parametrize(
    ("rope", "named"),
    [
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 0}, "original_max_position"),
        ({"rope_type": "yarn", "factor": 2.0, "mscale": -1e9, "mscale_all_dim": 1}, "mscale"),
        ({"rope_type": "yarn", "factor": 2.0, "attention_factor": NAN}, "attention_factor"),
        ({"rope_type": "yarn", "factor": 0.5}, "rope_factor=0.5: out of range"),
        ({"rope_type": "llama3", "factor": 2.0, "low_freq_factor": "1", "high_freq_factor": None}, "low_freq"),
        ({"rope_type": "default", "factor": None}, "factor in RoPE"),
        ({"rope_theta": INF}, "rope_theta=Infinity"),
        ({"rope_theta": {}}, "rope_theta={}"),
    ],
)
def test_words_of_rope(rope, named):
    data = hf_config(config_of(decoder_block="llama2", **FAMILIES["llama2"]))
    for key in ("rope_scaling", "rope_parameters"):
        assert named in refusal(model_keys, data | {"rope_parameters": None, key: rope}, "config.json")


def test_rope_of_a_type_without_any_length_is_refused():
    data = hf_config(config_of(decoder_block="llama2", **FAMILIES["llama2"]))
    data |= {"max_position_embeddings": None, "rope_parameters": {"rope_type": "yarn", "factor": 2.0}}
    assert "type yarn requires original_max_position_embeddings" in refusal(model_keys, data, "config.json")


def test_many_layers_are_not_counted_out():
    data = hf_config(config_of(decoder_block="mistral", **FAMILIES["mistral"])) | {"num_hidden_layers": 4096}
    assert model_keys(data, "config.json")["base_num_decoder_layers"] == 4096
    data["num_hidden_layers"] = 4097  # a model with more layers takes minutes
    assert "num_hidden_layers=4097, not an integer in [1, 4096]" in refusal(model_keys, data, "config.json")


def test_layers_whose_kinds_repeat_late_are_refused():
    """The layers of a period are compiled one by one."""
    said = {"model_type": "gemma3_text", "sliding_window": 16, "num_hidden_layers": 65, "query_pre_attn_scalar": 16}
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    said |= sizes | {"vocab_size": 64, "head_dim": 16, "rms_norm_eps": 1e-6, "max_position_embeddings": 64}
    kinds = ["sliding_attention"] * 64 + ["full_attention"]
    assert "a pattern of 65 layers" in refusal(model_keys, said | {"layer_types": kinds}, "config.json")
    kinds = [*kinds[1:], kinds[1]]
    assert model_keys(said | {"layer_types": kinds}, "config.json")["sliding_window_pattern"] == 64


@pytest.fixture
def hugging_face(tmp_path) -> Path:
    config = config_of(decoder_block="llama2", **FAMILIES["llama2"])
    write_hf(tmp_path / "hf", config, hf_tensors(random_params(config)))
    return tmp_path / "hf"


@pytest.mark.parametrize(
    "text", ["", "[]", "null", "[" * 100_000, '{"a":' * 100_000, '{"a": [' * 90, "\ufeff{}", "\xff"]
)
def test_json_that_is_none_or_nested_deeply(hugging_face, text):
    for name in ("config.json", INDEX):
        shutil.copy(hugging_face / "config.json", hugging_face / "good")
        (hugging_face / name).write_bytes(text.encode("latin-1" if text == "\xff" else "utf-8"))
        assert refusal(open_source, str(hugging_face)).startswith(str(hugging_face / name))
        shutil.move(hugging_face / "good", hugging_face / "config.json")


def test_json_that_python_can_read_but_not_show(hugging_face):
    """Depths near the recursion limit: the reader needs less depth than the code that prints the message."""
    path = hugging_face / "config.json"
    for depth in (70, *range(850, 1000, 5)):
        path.write_text(f'{{"rms_norm_eps": {"[" * depth}{"]" * depth}}}')
        assert refusal(open_source, str(hugging_face)) == f"{path}: cannot be read: nested deeper than 64", depth


@pytest.mark.parametrize(
    "name",
    [None, 3, True, {}, ["x"], "", ".", "..", "/etc/passwd", "../../etc/passwd", "a/b", "a\0b", "\ud800", "x" * 300],
)
def test_an_index_names_only_files_of_its_folder(hugging_face, name):
    (hugging_face / INDEX).write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": name}}))
    assert f"{INDEX} assigns b to" in refusal(open_source, str(hugging_face))
    (hugging_face / INDEX).write_text(json.dumps({"weight_map": name}))
    assert f"{INDEX}: " in refusal(open_source, str(hugging_face))


def headers(text: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"1234567",
        headers(b"{}", 2**63),
        headers(b"{}", 2**31),
        headers(b"[" * 100_000),
        headers(b"\xff" * 9),
        headers(
            json.dumps({"a": {"dtype": "F32", "shape": [2**40, 2**40], "data_offsets": [0, 4]}}).encode() + b"1234"
        ),
        headers(json.dumps({"a": {"dtype": "x" * 9000, "shape": [1], "data_offsets": [0, 4]}}).encode() + b"1234"),
        headers(json.dumps({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}).encode() + b"1234"),
    ],
    ids=range(9),
)
def test_damaged_headers_of_safetensors(hugging_face, content):
    (hugging_face / "model.safetensors").write_bytes(content)
    message = refusal(open_source, str(hugging_face))
    assert f"weights cannot be read:\n  {hugging_face / 'model.safetensors'}: " in message


def test_more_layers_than_tensors(hugging_face):
    data = json.loads((hugging_face / "config.json").read_text()) | {"num_hidden_layers": 4096}
    (hugging_face / "config.json").write_text(json.dumps(data))
    source = open_source(str(hugging_face))
    config = model_config(source.keys, [], str(source.path))
    shapes = {"decoder/layers/mlp/wi_0/kernel": (4096, 2, 2)}
    assert "too few for num_hidden_layers=4096" in refusal(source.leaves, config, shapes)


def test_a_long_list_of_tensors_is_cut_short(hugging_face):
    from trainer.leaves.source import check_tensors

    message = refusal(check_tensors, {"x" * 9000: ((1,), "float32")}, {f"tensor.{i}": (1,) for i in range(900)}, "at")
    assert message.endswith("and 881 more")


def test_sizes_that_do_not_go_together_name_the_folder(hugging_face):
    data = json.loads((hugging_face / "config.json").read_text()) | {"num_key_value_heads": 3}
    (hugging_face / "config.json").write_text(json.dumps(data))
    source = open_source(str(hugging_face))
    message = refusal(model_config, source.keys, [], str(source.path))
    assert f"base_num_kv_heads=3 ({hugging_face})" in message
    assert "command line" not in message


@pytest.mark.parametrize(
    "line",
    ["head_dim: [1]", "head_dim: nan", "head_dim: 33", "decoder_block: x y", "max_target_length: x", "a: &a [*a]"],
)
def test_the_config_yml_of_exported_parameters(tmp_path, line):
    (tmp_path / "config.yml").write_text(f"base_config: base.yml\n{line}\n")
    assert str(tmp_path / "config.yml") in refusal(read_model_yaml, tmp_path / "config.yml")


@pytest.mark.parametrize("value", ["x" * 9000, [[1]], {}, True, NAN])
def test_what_is_carried_over_is_of_its_type(value):
    assert "eos_token_id=" in refusal(neutral_keys, {"eos_token_id": value}, "huggingface.json")
    assert neutral_keys({"model_type": value, "eos_token_id": [1, 2]}, "") == {"eos_token_id": [1, 2]}


# ---- Code that a folder names --------------------------------------------------------------------------------------


@pytest.fixture
def named_by_a_folder(tmp_path, monkeypatch):
    """Returns a module that must not be imported, and a folder with parameters whose config.yml names it."""
    shutil.copy(GUIDES / "team_block.py", tmp_path / "a_strangers_block.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    yield "decoder_block=a_strangers_block:NNXBlock"
    sys.modules.pop("a_strangers_block", None)


@pytest.mark.parametrize("words_", [[], ["vocab_size=64"]])
def test_export_imports_no_module_that_only_the_folder_names(named_by_a_folder, words_, tmp_path, capsys):
    folder = tmp_path / "a_run"
    keys = words(logical_axis_rules="[]", **FAMILIES["llama2"])
    text = "\n".join(["base_config: base.yml", *(word.replace("=", ": ") for word in [named_by_a_folder, *keys]), ""])
    write_tree(folder, text)
    with pytest.raises(SystemExit) as exit_:
        export.main([str(folder), str(tmp_path / "out"), "format=params", *words_])
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert f"{named_by_a_folder} ({folder}" in error
    assert "code that a folder names runs only if you also name it" in error
    assert f"add {named_by_a_folder} to the command" in error
    assert "a_strangers_block" not in sys.modules
    # The module is accepted if the user names it. The tensors then do not fit.
    with pytest.raises(SystemExit):
        export.main([str(folder), str(tmp_path / "out"), "format=params", named_by_a_folder])
    assert "do not fit the configuration" in capsys.readouterr().err
    assert "a_strangers_block" in sys.modules


def write_tree(folder: Path, config_yml: str) -> None:
    from trainer.weights.params.write import write_params

    config = config_of(decoder_block="llama2", **FAMILIES["llama2"])
    from trainer.leaves.source import Leaf

    value = np.ones((2, 2), np.float32)
    folder.mkdir()
    write_params(folder, config, {"token_embedder/embedding": Leaf((2, 2), value.dtype, [lambda: value])}, None)
    (folder / "config.yml").write_text(config_yml)


@pytest.mark.parametrize("key", ["load_parameters_path", "load_full_state_path"])
def test_the_yml_of_the_folder_that_a_run_starts_from_is_data(tmp_path, monkeypatch, key):
    monkeypatch.chdir(tmp_path)
    for folder in ("theirs/checkpoints/7", "mine"):
        Path(folder).mkdir(parents=True)
    theirs, mine = "theirs/config.yml", "mine/config.yml"
    for name in (theirs, mine):
        Path(name).write_text("base_config: base.yml\ndecoder_block: a:B\ncompiled_trainstep_file: step.bin\n")
    below = ("theirs/checkpoints", "theirs/checkpoints/7", "theirs/checkpoints/7/items", "theirs/checkpoints/7/a/b")
    for path in ("theirs", *below, "./mine/../theirs/"):
        message = refusal(load, [theirs, f"{key}={path}"])
        assert "decoder_block=a:B (theirs/config.yml:2): code that a folder names runs only if" in message
        assert "compiled_trainstep_file=step.bin (theirs/config.yml:3)" in message
        load([theirs, f"{key}={path}", "decoder_block=a:B", "compiled_trainstep_file="])
        load([mine, f"{key}={path}"])
    # Any folder may be named checkpoints; a run's checkpoints folder has numbered folders.
    load([theirs, f"{key}=checkpoints/llama"])
    load([mine, f"{key}={tmp_path}/checkpoints/llama"])
    # The setting still comes from that folder if an intermediate yml refers to its yml as the parent.
    Path("child.yml").write_text(f"base_config: {theirs}\n")
    assert "code that a folder names" in refusal(load, ["child.yml", f"{key}=theirs"])
    load([theirs])


@pytest.mark.parametrize("words_", [["load_parameters_path=weights"], ["dataset_type=hf", "hf_path=."]])
def test_a_yml_of_the_folder_that_one_works_in_may_name_code(tmp_path, monkeypatch, words_):
    """Even though the weights are in a subfolder, or data are read from the same folder."""
    project = tmp_path / "project"
    (project / "weights").mkdir(parents=True)
    (project / "mine.yml").write_text("base_config: base.yml\ndecoder_block: a:B\n")
    monkeypatch.chdir(project)
    load(["mine.yml", *words_])
    monkeypatch.chdir(tmp_path)
    words_ = [word.replace("=weights", "=project/weights").replace("=.", "=project") for word in words_]
    assert "code that a folder names" in refusal(load, ["project/mine.yml", *words_])


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("data.json", "[]", "data.json cannot be read (not a JSON object)"),
        ("data.json", "[" * 100_000, "data.json cannot be read (nested deeper than 64)"),
        ("data.json", "{}", "data.json has no fingerprint"),
        ("data.json", '{"fingerprint": 3, "position": null}', "data.json has no fingerprint"),
        ("config.yml", b"\xff", "config.yml cannot be read"),
    ],
)
def test_what_lies_sidecar_a_checkpoint_is_of_its_types(tmp_path, name, content, problem):
    from trainer.checkpoint.sidecar import read_sidecar

    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "config.yml").write_text("steps: 3\n")
    (tmp_path / "data.json").write_text('{"fingerprint": "a", "position": null, "more": 1}')
    assert read_sidecar(tmp_path).fingerprint == "a"
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert problem in refusal(read_sidecar, tmp_path)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ('{"a\\u0000b": [1, 2]}', "cannot be read"),
        ('{"a": 3}', "sums.json cannot be read"),
        ('{"a": [Infinity, 2]}', "sums.json cannot be read"),
        ('{"a": [1.5, 2]}', "sums.json cannot be read"),
        ('{"a": [true, 2]}', "sums.json cannot be read"),
        ("[" * 100_000, "sums.json cannot be read"),
        ('{"/dev/zero": [0, 1]}', "sums.json names /dev/zero, which is not a file of the checkpoint"),
        ('{"../x": [0, 1]}', "sums.json names ../x, which"),
        ('{"a//x": [0, 1]}', "sums.json names a//x, which"),
    ],
)
def test_sums_of_other_types(tmp_path, content, problem):
    from trainer.checkpoint.sums import verify

    (tmp_path / "_CHECKPOINT_METADATA").write_text("{}")
    (tmp_path / "sums.json").write_text(content)
    assert problem in refusal(verify, tmp_path)

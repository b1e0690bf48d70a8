"""load_parameters_path provides the model's keys and the tokenizer: what is read, and what takes precedence."""

from pathlib import Path

import pytest
from checkpoint_cases import (
    FAMILIES,
    config_of,
    hf_tensors,
    maxtext_params,
    maxtext_run,
    random_params,
    words,
    write_hf,
)

from trainer import quantize
from trainer.config.capabilities.quantization_keys import OF_STORED
from trainer.config.errors import UserError
from trainer.config.load import begin, load
from trainer.config.resolve import resolve
from trainer.maxtext.command_line import parse
from trainer.maxtext.convert import EXPORT, convert
from trainer.weights.model_keys import described, model_config
from trainer.weights.model_of_command import _of_saved, with_model
from trainer.weights.open import open_source

GOLDENS = Path(__file__).parents[2] / "goldens"
CASES = sorted(path.parent.name for path in GOLDENS.glob("*/config.json"))
TEXT = ["dataset_type=hf", "hf_path=data"]


def loaded(*given, environment=None):
    return with_model(begin(["base.yml", *map(str, given)], environment))


def of(path, *given):
    return loaded("dataset_type=synthetic", f"load_parameters_path={path}", *given)


@pytest.fixture
def hf(tmp_path):
    config = config_of(decoder_block="llama2", **FAMILIES["llama2"])
    return write_hf(tmp_path / "hf", config, hf_tensors(random_params(config)))


@pytest.mark.parametrize("case", CASES)
def test_the_folder_of_each_family_gives_the_keys_that_it_states(case, monkeypatch):
    monkeypatch.syspath_prepend(str(GOLDENS.parents[1]))
    block = "docs.guides.exaone4.facts:FACTS" if case == "exaone4" else ""
    found = of(GOLDENS / case, *([f"decoder_block={block}"] if block else []))
    keys = open_source(str(GOLDENS / case), block).keys
    ours = described(resolve(found.config, device_count=1, platform="cpu"))
    assert {name: ours[name] for name in keys if name in ours} == {name: keys[name] for name in keys if name in ours}
    assert {name: found.config[name] for name in keys.keys() - ours.keys()} == {
        name: keys[name] for name in keys.keys() - ours.keys()
    }
    assert {found.sources[name] for name in keys} <= {f"load_parameters_path={GOLDENS / case}", "command line"}
    assert not found.warnings
    assert not keys.keys() & found.changed.keys() - {"decoder_block"}


def test_its_place_is_that_of_a_preset(hf, tmp_path):
    """It overrides maxtext.yml, but not the user's yml, the environment or the command line."""
    yml = tmp_path / "my.yml"
    path = f"load_parameters_path={hf}"
    yml.write_text(f"base_config: maxtext.yml\n{path.replace('=', ': ')}\nmax_target_length: 9\n")
    found = with_model(begin([str(yml), "dataset_type=synthetic", "rope_max_timescale=7"], {"M_STEPS": "3"}))
    assert (found.config.vocab_size, found.config.max_target_length, found.config.steps) == (64, 9, 3)
    assert (found.sources["vocab_size"], found.config.rope_max_timescale) == (path, 7)
    assert found.config.dtype == "bfloat16"  # from maxtext.yml
    yml.write_text(f"base_config: base.yml\n{path.replace('=', ': ')}\nvocab_size: 65\n")
    with pytest.raises(UserError, match=r"a different model .*vocab_size=65.* give: vocab_size=64"):
        with_model(begin([str(yml), "dataset_type=synthetic"]))


def test_keys_that_contradict_it_are_refused_as_when_it_is_loaded(hf):
    with pytest.raises(UserError, match=r"contains a different model .*base_emb_dim=24.* give: base_emb_dim=16"):
        of(hf, "base_emb_dim=24")
    with pytest.raises(UserError, match=r"global_parameter_scale|base_emb_dim"):
        of(hf, "global_parameter_scale=8")
    stretched = of(hf, "rope_type=yarn", "rope_factor=4", "original_max_position_embeddings=64").config
    assert (stretched.rope_type, stretched.base_emb_dim) == ("yarn", 16)


def test_keys_are_valid_only_together_with_those_of_the_model(tmp_path):
    config = config_of(decoder_block="mixtral", **FAMILIES["mixtral"])
    path = write_hf(tmp_path / "hf", config, hf_tensors(random_params(config)))
    found = of(path, "ici_expert_parallelism=3", "capacity_factor=1.5").config
    assert (found.num_experts, found.capacity_factor) == (3, 1.5)


def test_mistakes_that_no_model_changes_come_before_it_is_read():
    with pytest.raises(UserError) as error:
        begin(["base.yml", "load_parameters_path=absent", "steps=x", "base_emb_dim=0", "num_processes=3"])
    assert "3 mistakes" in str(error.value)
    with pytest.raises(UserError, match=r"only gs:// is supported"):
        begin(["base.yml", "load_parameters_path=az://b/c"])
    with pytest.raises(
        UserError, match=r"there is no such folder; .*\n  the model's keys are read from this path, because"
    ):
        of("absent")


@pytest.mark.parametrize("more", ["model_name=llama2-7b", "model_name=default", "load_parameters_path="])
def test_nothing_is_read_if_the_model_is_named_or_there_is_no_path(more):
    begun = begin(["base.yml", "dataset_type=synthetic", "load_parameters_path=absent", more])
    assert begun.path == ""
    assert with_model(begun).config.vocab_size == (32000 if "llama" in more else begun.config.vocab_size)


def test_a_checkpoint_of_maxtext_says_nothing(tmp_path):
    config = config_of()
    path = maxtext_run(tmp_path / "run", maxtext_params(config, random_params(config), scanned=True))
    found = of(path, *words())
    assert found.sources["base_emb_dim"] == "command line"
    assert not any("model" in note for note in found.notes)
    assert of(path).sources["base_emb_dim"] == "default"


def test_quantized_weights_are_trained_as_floats(hf, monkeypatch):
    from trainer.weights.huggingface import read as huggingface

    stored = {"checkpoint_is_quantized": True, "quantization": "int4", "weight_block_size": (8, 1)}
    monkeypatch.setattr(huggingface.HuggingFaceSource, "_stored_keys", lambda self: stored)
    monkeypatch.setattr(huggingface, "PackedMatrix", object)
    found = of(hf)
    assert {found.sources[name] for name in OF_STORED} == {"default"}


def test_code_that_a_folder_names_is_not_imported(tmp_path, monkeypatch):
    monkeypatch.setattr("trainer.leaves.orbax.headers", lambda tree: {})
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "config.yml").write_text("decoder_block: os:path\n")
    with pytest.raises(UserError, match=r"decoder_block=os:path .*code that a folder names runs only if you also name"):
        of(tmp_path)


@pytest.mark.parametrize(
    ("files", "given", "expected"),
    [
        ({"tokenizer.json": "{}"}, [], "auto"),
        ({"tokenizer.json": "{}"}, ["tokenizer_type=huggingface"], "huggingface"),
        ({"tokenizer.json": "{}"}, ["tokenizer_type=tiktoken"], "refused"),
        ({"tokenizer_config.json": '{"tokenizer_type": "bytes"}'}, [], "auto"),
        ({"vocab.json": "{}", "tokenizer_config.json": "{}"}, [], "has no tokenizer of tokenizer_type=auto"),
        ({"tokenizer.json": "{}"}, ["tokenizer_path=/mine.json"], ""),
        ({"tokenizer.json": "{}"}, ["tokenizer_type=bytes"], ""),
        ({"tokenizer.json": "{}"}, ["dataset_type=synthetic"], ""),
        ({}, ["tokenize_train_data=false", "eval_interval=-1", "tokenize_eval_data=false"], ""),
    ],
)
def test_its_tokenizer_is_the_default(hf, files, given, expected):
    (hf / "tokenizer.json").unlink()
    for name, content in files.items():
        (hf / name).write_text(content)
    if expected == "refused":
        with pytest.raises(UserError, match="tokenizer_type=tiktoken needs a file"):
            loaded(*TEXT, f"load_parameters_path={hf}", *given)
        return
    found = loaded(*TEXT, f"load_parameters_path={hf}", *given)
    notes = "\n".join(found.notes)
    if expected in ("auto", "huggingface"):
        assert (found.config.tokenizer_path, found.config.tokenizer_type) == (str(hf), expected)
        assert f"tokenizer_path={hf}: the tokenizer of the model" in notes
    else:
        assert found.config.tokenizer_path in ("", "/mine.json")
        assert ("the model has never seen its tokens" in notes) == bool(expected)
        assert expected in notes


def test_the_type_of_maxtexts_default_tokenizer_does_not_hide_it(hf):
    words = ["maxtext.yml", "run_name=a", *TEXT, f"load_parameters_path={hf}"]
    assert with_model(begin(words)).config.tokenizer_type == "auto"
    words = ["maxtext.yml", "run_name=a", *TEXT, f"load_parameters_path={hf}", "tokenizer_type=sentencepiece"]
    with pytest.raises(UserError, match="tokenizer_type=sentencepiece needs a file"):
        with_model(begin(words))


def test_a_tokenizer_that_leads_out_of_the_folder_is_refused(hf, tmp_path):
    (tmp_path / "secret.json").write_text("{}")
    (hf / "tokenizer.json").unlink()
    (hf / "tokenizer.json").symlink_to(tmp_path / "secret.json")
    with pytest.raises(UserError, match="leads out of"):
        loaded(*TEXT, f"load_parameters_path={hf}")


@pytest.mark.parametrize("words", [[], ["max_target_length=32"]])
def test_a_short_table_of_positions_needs_no_length_without_rows(words):
    """Commands that only read or write parameters have no rows."""
    trained = ["trainable_position_size=64", "max_target_length=64", "model_name=gpt3-52k"]
    keys = described(model_config({}, trained, "somewhere"))
    config = model_config(keys, words, "somewhere")
    assert config.max_target_length == (32 if words else 64)
    assert quantize._configuration(config, []).trainable_position_size == 64
    line = "python3 -m maxtext.checkpoint_conversion.to_huggingface model_name=gpt3-52k trainable_position_size=64 "
    assert convert(parse([line]), EXPORT).runs


@pytest.mark.parametrize(("word", "rate"), [("steps=9", 6e-3), ("learning_rate=1e-4", 1e-4)])
def test_a_run_that_goes_on_keeps_its_learning_rate(word, rate, tmp_path):
    """The trainer version that started the run may have had another default."""
    words = ["run_name=r", "load_parameters_path=/gone", "dataset_type=synthetic", "steps=9"]
    saved = {**load(words).config, "learning_rate": 6e-3}
    before = begin([*words, word])
    assert before.end(_of_saved(saved, tmp_path, before)).config.learning_rate == rate
    assert load(words).config.learning_rate == 2e-5

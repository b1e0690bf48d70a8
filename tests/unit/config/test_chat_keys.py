"""Keys of supervised fine-tuning: defaults of the command, warnings, and a function that the yml of a folder names."""

import pytest

from trainer.config.capabilities.chat_keys import SFT_DEFAULTS
from trainer.config.errors import UserError
from trainer.config.load import load

FILES = ["dataset_type=grain", "grain_train_files=x", "tokenizer_type=bytes"]


def test_the_defaults_of_the_command_are_below_a_yml(tmp_path):
    loaded = load(FILES, defaults=SFT_DEFAULTS)
    assert (loaded.config.use_sft, loaded.config.grain_packing_type) == (True, "best_fit")
    assert loaded.sources["use_truncation"] == "default of this command"
    assert not loaded.warnings
    (tmp_path / "mine.yml").write_text("base_config: base.yml\ngrain_packing_type: first_fit\n")
    loaded = load([str(tmp_path / "mine.yml"), *FILES, "use_truncation=false"], defaults=SFT_DEFAULTS)
    assert (loaded.config.grain_packing_type, loaded.config.use_truncation) == ("first_fit", False)
    assert load(FILES).config.use_sft is False


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["formatting_func_path=a.b"], 'formatting_func_path="a.b" (command line) has no effect: use_sft=false'),
        (["chat_template={{ x }}"], "has no effect: use_sft=false and use_chat_template=false"),
        (["use_sft=true", "add_bos=false"], "has no effect: the chat template writes the special tokens"),
        (["use_sft=true", "formatting_func_kwargs={a: 1}"], "has no effect: formatting_func_path is empty"),
    ],
)
def test_keys_without_effect(words, said):
    assert any(said in line for line in load([*FILES, *words]).warnings)
    assert not load([*FILES, "use_chat_template=true", "chat_template={{ x }}"]).warnings


def test_a_column_of_tools_is_in_addition():
    words = [*FILES, "use_sft=true", "eval_interval=-1"]
    for columns in ("[messages,tools]", "[prompt,completion,tools]"):
        load([*words, f"train_data_columns={columns}"])
    with pytest.raises(UserError, match="must be one column of messages, or two"):
        load([*words, "train_data_columns=[tools]"])


def test_a_function_that_a_folder_names_is_not_imported(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "sft.yml").write_text("base_config: base.yml\nformatting_func_path: os.system\n")
    words = ["theirs/sft.yml", *FILES[:2], "tokenizer_path=theirs"]
    with pytest.raises(UserError, match=r"formatting_func_path=os.system \(theirs/sft.yml:2\): code that a folder"):
        load(words, defaults=SFT_DEFAULTS)
    load([*words, "formatting_func_path=os.system"], defaults=SFT_DEFAULTS)


def test_a_dict_is_written_and_read_again(tmp_path):
    from trainer.config.dump import to_yaml
    from trainer.config.resolve import resolve

    words = [*FILES, "use_sft=true", "formatting_func_path=a.b", "formatting_func_kwargs={a: [1, x], b: {c: 'y: z'}}"]
    config = resolve(load(words).config, device_count=1, platform="cpu")
    (tmp_path / "config.yml").write_text(to_yaml(config))
    again = load([str(tmp_path / "config.yml")])
    assert resolve(again.config, device_count=1, platform="cpu") == config
    assert again.config.formatting_func_kwargs.to_dict() == {"a": [1, "x"], "b": {"c": "y: z"}}

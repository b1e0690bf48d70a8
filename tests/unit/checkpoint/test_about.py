"""What a model's folder says beside its weights: read once, added to by training, written again."""

import contextlib
import io
import json
import shutil

import numpy as np
import pytest
from checkpoint_cases import FAMILIES, config_of, hf_tensors, random_params, write_hf

from trainer import export
from trainer.checkpoint import About, about_in, about_tokenizer, open_source
from trainer.config import UserError
from trainer.data.tokenizer import train_bpe
from trainer.inference.ends import stop_tokens

SAID = {"eos_token_id": [2, 0], "bos_token_id": 1, "temperature": 0.6, "suppress_tokens": [4]}


def test_what_training_teaches_is_added_where_the_folder_says_it():
    about = About({"eos_token_id": 2, "max_position_embeddings": 128}, SAID)
    after = about.trained([2, 5], 64, False)
    assert (after.fields["eos_token_id"], after.generation["eos_token_id"]) == ([2, 5], [2, 0, 5])
    assert after.ends == [2, 0, 5]
    assert after.note() == "changed by training: eos_token_id=[2, 0, 5] (was [2, 0])"
    assert after.trained([5], 64, False) == after
    longer = after.trained([6], 256, True)
    assert longer.fields["max_position_embeddings"] == 256
    assert longer.changed == {"eos_token_id": [2, 0], "max_position_embeddings": 128, "chat_template": None}
    assert "max_position_embeddings=256 (was 128), chat_template" in longer.note()
    assert about.trained([0, 2], 128, False) == about
    assert about.note() == ""


@pytest.mark.parametrize(
    ("fields", "generation", "ends"),
    [
        ({"eos_token_id": 2}, None, [2]),
        ({"eos_token_id": [2, 3]}, {"temperature": 1.0}, [2, 3]),
        ({"eos_token_id": 2}, {"eos_token_id": 0}, [0]),
        ({"eos_token_id": None}, None, []),
        ({}, None, []),
    ],
)
def test_the_tokens_that_end_a_text(fields, generation, ends):
    about = About(fields, generation)
    assert about.ends == ends
    assert about.trained([7], None, False).ends == [*ends, 7]


def test_it_comes_back_from_its_files(tmp_path):
    about = About({"eos_token_id": 2, "pad_token_id": None, "top_p": 0.9}, SAID).trained([9], None, True)
    for name, data in about.files().items():
        (tmp_path / name).write_bytes(data)
    assert about_in(tmp_path) == about
    assert about_in(tmp_path / "absent") == About()
    assert about_tokenizer(1, 2) == About(
        {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}, {"bos_token_id": 1, "eos_token_id": 2}
    )


def test_another_tokenizer_keeps_what_names_no_token():
    about = About({"eos_token_id": 2, "tokenizer_class": "A", "max_position_embeddings": 9}, SAID).without_tokens()
    assert about == About({"max_position_embeddings": 9}, {"temperature": 0.6})


@pytest.mark.parametrize("generation", [{"eos_token_id": "two"}, {"bos_token_id": 1.5}, {"pad_token_id": -1}, []])
def test_a_damaged_file_is_named(tmp_path, generation):
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    with pytest.raises(UserError, match=r"generation_config\.json"):
        about_in(tmp_path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder of Hugging Face with a tokenizer, and all that it can say."""
    config = config_of(decoder_block="llama2", **FAMILIES["llama2"])
    folder = tmp_path_factory.mktemp("about") / "hf"
    said = {"eos_token_id": 2, "bos_token_id": 1, "pad_token_id": None, "max_position_embeddings": 8192, "top_k": 7}
    write_hf(folder, config, hf_tensors(random_params(config)), **said, tokenizer_class="A")
    train_bpe(["some text"], 260).save(folder)
    (folder / "generation_config.json").write_text(json.dumps(SAID))
    (folder / "special_tokens_map.json").write_text("{}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates/tool_use.jinja").write_text("t")
    (folder / "chat_template.jinja").write_text("c")
    return folder


def exported(source, out, *words):
    with contextlib.redirect_stdout(io.StringIO()):
        export.main([str(source), str(out), *words])
    return out


def everything(folder):
    """Returns what a folder says, without its weights, by file and field."""
    names = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json")
    found = {name: json.loads((folder / name).read_text()) for name in names}
    templates = [*folder.glob("*.jinja"), *folder.glob("*/*.jinja")]
    found |= {path.relative_to(folder).as_posix(): path.read_text() for path in templates}
    fields = open_source(str(folder)).about.fields
    return found | {"fields": {name: fields[name] for name in sorted(fields)}}


def test_parameters_and_back_says_the_same(folder, tmp_path):
    params = exported(folder, tmp_path / "params", "format=params")
    again = exported(params, tmp_path / "hf", "format=hf")
    assert everything(params) == everything(again) == everything(folder)
    said = json.loads((again / "config.json").read_text())
    kept = ("eos_token_id", "bos_token_id", "pad_token_id", "max_position_embeddings", "tokenizer_class", "top_k")
    assert [said[name] for name in kept] == [2, 1, None, 8192, "A", 7]


def test_every_form_of_a_model_ends_at_the_same_tokens(folder, tmp_path):
    """config.json alone says it, too."""
    config = config_of(decoder_block="llama2", **FAMILIES["llama2"])
    alone = shutil.copytree(folder, tmp_path / "alone")
    (alone / "generation_config.json").unlink()
    for source, ends in ((folder, [0, 2]), (alone, [0, 2])):
        params = exported(source, tmp_path / f"{source.name}-params", "format=params")
        for path in (source, params):
            own = type(config)({**config, "load_parameters_path": str(path)})
            tokenizer = train_bpe(["some text"], 260)
            tokenizer.eos = 0
            assert sorted(stop_tokens(own, tokenizer)) == ends


def test_adapters_without_a_tokenizer_take_that_of_their_base(folder, tmp_path):
    from safetensors.numpy import save_file

    said = json.loads((folder / "config.json").read_text())
    name = "base_model.model.model.layers.0.mlp.gate_proj.lora_{}.weight"
    sizes = {"A": (2, said["hidden_size"]), "B": (said["intermediate_size"], 2)}
    (tmp_path / "peft").mkdir()
    save_file(
        {name.format(it): np.ones(shape, np.float32) for it, shape in sizes.items()},
        tmp_path / "peft/adapter_model.safetensors",
    )
    fields = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["gate_proj"], "layers_to_transform": [0]}
    (tmp_path / "peft/adapter_config.json").write_text(json.dumps(fields | {"base_model_name_or_path": str(folder)}))
    merged = exported(tmp_path / "peft", tmp_path / "merged", "format=hf")
    assert everything(merged) == everything(folder)
    (tmp_path / "peft/generation_config.json").write_text('{"eos_token_id": 5}')  # the adapters were taught another end
    assert open_source(str(tmp_path / "peft")).about.ends == [5]

"""A model folder's metadata beside its weights: read once, extended by training, and written again."""

import contextlib
import io
import json
import shutil

import numpy as np
import pytest
from checkpoint_cases import FAMILIES, config_of, hf_tensors, random_params, write_hf

from trainer import export
from trainer.config.errors import UserError
from trainer.data.tokenizer import ByteTokenizer, train_bpe
from trainer.data.tokenizer_files import load_tokenizer
from trainer.inference.ends import stop_tokens
from trainer.leaves.about import About
from trainer.training.about import about_run
from trainer.weights.about_files import about_in, about_tokenizer
from trainer.weights.open import open_source

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
    assert About({"eos_token_id": 0}).trained([5], None, False).note().endswith("eos_token_id=[0, 5] (was 0)")


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
    base = About({"eos_token_id": 2, "tokenizer_class": "A", "max_position_embeddings": 9}, SAID)
    about = base.without_tokens()
    nothing = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
    assert about == About({"max_position_embeddings": 9} | nothing, {"temperature": 0.6}, {"eos_token_id": [2, 0]})
    merged = base.under(about.trained([50], None, False))  # as when a LoRA run with another tokenizer is exported
    assert (merged.ends, merged.fields["bos_token_id"]) == ([50], None)
    assert "eos_token_id=50 (was [2, 0])" in merged.note()


@pytest.mark.parametrize("generation", [{"eos_token_id": "two"}, {"bos_token_id": 1.5}, []])
def test_a_damaged_file_is_named(tmp_path, generation):
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    with pytest.raises(UserError, match=r"generation_config\.json"):
        about_in(tmp_path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Returns a Hugging Face folder with a tokenizer and all optional metadata."""
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
    """Returns a folder's metadata, without its weights, by file and field."""
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
    """config.json alone suffices, too."""
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


def begun(folder, tokenizer, own=None, **keys):
    """Returns `about_run` of a run that begins with `folder`, and its messages."""
    said = []
    config = config_of(decoder_block="llama2", **FAMILIES["llama2"], **keys)
    config = type(config)({**config, "load_parameters_path": str(folder), "max_target_length": 9000})
    return about_run(config, tokenizer, own, [9], said.append), said


def test_what_a_run_begins_with(folder, tmp_path):
    tokenizer = load_tokenizer(str(folder), "auto", add_bos=True, add_eos=True)
    about, said = begun(folder, tokenizer)
    assert (about.ends, about.fields["max_position_embeddings"], said) == ([2, 0, 9], 9000, [])
    assert about.fields["tokenizer_class"] == "A"
    yarn = {"rope_type": "yarn", "original_max_position_embeddings": 64, "rope_factor": 2.0}
    assert begun(folder, tokenizer, **yarn)[0].fields["max_position_embeddings"] == 8192
    about, (line,) = begun(folder, ByteTokenizer())
    assert (about.ends, about.generation["temperature"]) == ([9], 0.6)
    assert line.startswith(f"the tokenizer differs from that in {folder}: ")
    about, (line,) = begun(tmp_path / "gone", tokenizer)
    assert about.ends == [tokenizer.eos, 9]
    assert "is gone" in line
    adapters = tmp_path / "adapters"
    write_adapters(adapters, folder)
    (adapters / "generation_config.json").write_text('{"eos_token_id": 5}')
    lora = {"enable_lora": True, "lora_rank": 2, "lora_alpha": 4, "lora_restore_path": adapters}
    assert begun(folder, tokenizer, **lora)[0].ends == [5, 9]


def test_a_folder_that_says_there_is_no_end_stays_so(folder, tmp_path):
    alone = shutil.copytree(folder, tmp_path / "alone")
    (alone / "generation_config.json").unlink()
    config = json.loads((alone / "config.json").read_text()) | {"eos_token_id": None}
    (alone / "config.json").write_text(json.dumps(config))
    again = exported(exported(alone, tmp_path / "params", "format=params"), tmp_path / "hf", "format=hf")
    assert not (again / "generation_config.json").exists()
    assert json.loads((again / "config.json").read_text())["eos_token_id"] is None


def write_adapters(out, folder):
    """Writes a PEFT folder without a tokenizer."""
    from safetensors.numpy import save_file

    said = json.loads((folder / "config.json").read_text())
    name = "base_model.model.model.layers.0.mlp.gate_proj.lora_{}.weight"
    sizes = {"A": (2, said["hidden_size"]), "B": (said["intermediate_size"], 2)}
    tensors = {name.format(it): np.ones(shape, np.float32) for it, shape in sizes.items()}
    out.mkdir()
    save_file(tensors, out / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["gate_proj"], "layers_to_transform": [0]}
    (out / "adapter_config.json").write_text(json.dumps(fields | {"base_model_name_or_path": str(folder)}))


def test_adapters_without_a_tokenizer_take_that_of_their_base(folder, tmp_path):
    write_adapters(tmp_path / "peft", folder)
    merged = exported(tmp_path / "peft", tmp_path / "merged", "format=hf")
    assert everything(merged) == everything(folder)
    (tmp_path / "peft/generation_config.json").write_text('{"eos_token_id": 5}')  # the adapters changed the end token
    assert open_source(str(tmp_path / "peft")).about.ends == [5]

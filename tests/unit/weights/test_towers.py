"""Directories with towers beside a text model: what is read from them, and what is written back.

They are built from text models that transformers saved. scripts/check_towers.py compares with transformers' image
models.
"""

import itertools
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from checkpoint_cases import shapes_of
from published import QWEN3_5_397B_JSON, QWEN3_6_27B_JSON
from safetensors.numpy import load_file, save_file

from trainer import export
from trainer.config.errors import UserError
from trainer.config.load import load
from trainer.config.resolve import resolve
from trainer.leaves.about import About
from trainer.training.batches import LoadedAhead
from trainer.weights.contents import contents_of
from trainer.weights.huggingface.compressed_tensors import arrays_of, quantization_config, scheme_of
from trainer.weights.huggingface.config_json import model_keys
from trainer.weights.huggingface.like import Like
from trainer.weights.huggingface.towers import text_model
from trainer.weights.huggingface.write import write_huggingface
from trainer.weights.model_keys import described, model_config
from trainer.weights.open import open_source

TESTS = Path(__file__).parents[2]
GOLDENS = TESTS / "goldens"
VISION, PROJECTOR = "vision_tower", "multi_modal_projector"
PREPARED = "preprocessor_config.json"
# The published names, and the module names of transformers 5.
PUBLISHED = {"model.": "language_model.model.", "lm_head.": "language_model.lm_head.", "": ""}
MODULES = {"model.": "model.language_model.", "lm_head.": "lm_head.", "": "model."}
FORMS = {"published": PUBLISHED, "modules": MODULES}
OUTER = {
    "gemma3": {"model_type": "gemma3", "eos_token_id": [1, 9], "image_token_index": 61, "mm_tokens_per_image": 4},
    "mistral": {"model_type": "mistral3", "vision_feature_layer": -1, "tie_word_embeddings": False},
    "ministral3": {"model_type": "mistral3", "eos_token_id": [2, 5], "tie_word_embeddings": False},
    "mistral4": {"model_type": "mistral3", "eos_token_id": [2, 5], "tie_word_embeddings": False},
}
CASES = list(itertools.product(OUTER, FORMS))


def tower():
    """Returns tensors of several dtypes, one of which no other test reads."""
    rng = np.random.default_rng(0)
    return {
        f"{VISION}.embeddings.position_ids": np.arange(9)[None],
        f"{VISION}.encoder.layers.0.mlp.fc1.weight": rng.normal(size=(5, 3)).astype(ml_dtypes.bfloat16),
        f"{VISION}.head.probe": rng.normal(size=(2, 3, 4)),
        f"{PROJECTOR}.mm_input_projection_weight": rng.normal(size=(3, 7)).astype(np.float16),
    }


def named(text, form, other=None):
    """Returns the tensors of a text model and the others, with the names of `form`."""
    above = FORMS[form]
    found = {above[""] + name: value for name, value in (tower() if other is None else other).items()}
    for name, value in text.items():
        own = "lm_head." if name.startswith("lm_head.") else "model."
        found[above[own] + name.removeprefix(own)] = value
    return found


def folder_of(path, case="gemma3", form="published", tensors=None, **changes):
    """Writes the text model of a golden, with a tower.

    `changes`: changed fields of config.json; None removes a field.
    """
    path.mkdir()
    text = json.loads((GOLDENS / case / "config.json").read_text())
    data = {
        **OUTER.get(case, {}),
        "text_config": text,
        "vision_config": {"hidden_size": 8},
        "dtype": "float32",
        **changes,
    }
    data = {name: value for name, value in data.items() if value is not None}
    (path / "config.json").write_text(json.dumps(data))
    (path / PREPARED).write_text('{"image_mean": [0.5]}')
    tensors = named(load_file(GOLDENS / case / "model.safetensors"), form) if tensors is None else tensors
    save_file(tensors, path / "model.safetensors")
    return path


def values(source, **keys):
    config = model_config(source.keys, [f"{name}={value}" for name, value in keys.items()], "")
    leaves = source.leaves(config, shapes_of(config))
    return {name: leaf.read(leaf.dtype, lambda count: None).tobytes() for name, leaf in leaves.items()}


def bits(folder):
    """Returns all tensors of a directory as bytes, with dtype and shape."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= {name: (it.dtype.name, it.shape, it.tobytes()) for name, it in load_file(file).items()}
    return found


@pytest.mark.parametrize(("case", "form"), CASES)
def test_the_text_model_is_that_of_a_folder_of_its_own(case, form, tmp_path):
    whole, alone = open_source(str(folder_of(tmp_path / "it", case, form))), open_source(str(GOLDENS / case))
    assert whole.keys == alone.keys
    assert values(whole) == values(alone)
    found = contents_of(str(whole.path))
    kind = OUTER[case]["model_type"]
    left = "vision_tower (3 tensors, 294 B), multi_modal_projector (1 tensor, 42.0 B)"
    assert found.notes == (f"{whole.path}: only the text model of {kind} is read; left out: {left}",)
    expected = {"gemma3": {61: "image_token_index", 255_999: "boi_token_index", 256_000: "eoi_token_index"}}
    assert whole.about.images == expected.get(case, {10: "image_token_index"})
    assert whole.about.ends == OUTER[case].get("eos_token_id", [2])


# text_config of the published folders, in which transformers 4 wrote only differences from the class defaults.
GEMMA3 = {"model_type": "gemma3_text", "sliding_window": 1024, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
MANY = {"num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128, "query_pre_attn_scalar": 168}
SMALL = {
    **{"attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120, "initializer_range": 0.02},
    **{"intermediate_size": 32768, "max_position_embeddings": 131072, "model_type": "mistral", "use_cache": True},
    **{"num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8, "rms_norm_eps": 1e-05},
    **{"rope_theta": 1000000000.0, "sliding_window": None, "vocab_size": 131072},
}


def keys_of(data, names):
    return model_keys(text_model(data, dict.fromkeys(names), Path("config.json")).config, "config.json")


# Scout and Maverick, with the published lists of layers.
LLAMA4 = {"model_type": "llama4_text", "no_rope_layers": [], "attn_temperature_tuning": 4, "for_llm_compressor": False}
SCALED = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALED |= {"original_max_position_embeddings": 8192}
MAVERICK = {"num_local_experts": 128, "interleave_moe_layer_step": 2, "use_qk_norm": False}


@pytest.mark.parametrize(
    ("preset", "sizes"),
    [
        ("llama4-17b-16e", LLAMA4 | {"rope_scaling": SCALED, "moe_layers": [*range(48)]}),
        ("llama4-17b-128e", LLAMA4 | MAVERICK | {"rope_scaling": None, "moe_layers": [*range(1, 48, 2)]}),
        ("gemma3-4b", {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}),
        (
            "gemma3-12b",
            {"hidden_size": 3840, "intermediate_size": 15360, "num_hidden_layers": 48}
            | {"num_attention_heads": 16, "num_key_value_heads": 8},
        ),
        ("gemma3-27b", {"hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 62} | MANY),
    ],
)
def test_fields_that_a_published_text_config_leaves_out_are_those_of_the_preset(preset, sizes):
    outer = preset.partition("-")[0]
    data = {"model_type": outer, "boi_token_index": 255999, "eos_token_id": [1, 106], "text_config": GEMMA3 | sizes}
    data |= {"text_config": sizes} if outer == "llama4" else {}
    loaded = load(["base.yml", f"model_name={preset}", "dataset_type=synthetic"])
    assert keys_of(data, ["language_model.model.norm.weight"]) == described(
        resolve(loaded.config, device_count=1, platform="cpu")
    )


@pytest.mark.parametrize(
    ("preset", "data"), [("qwen3.5-397b-a17b", QWEN3_5_397B_JSON), ("qwen3.6-27b", QWEN3_6_27B_JSON)]
)
def test_a_published_config_json_of_qwen_is_its_preset(preset, data):
    """Including its multi-token prediction module. Some programs write the outer model_type into text_config."""
    loaded = load(["base.yml", f"model_name={preset}", "mtp_num_layers=1", "dataset_type=synthetic"])
    renamed = data | {"text_config": data["text_config"] | {"model_type": data["model_type"]}}
    for each in (data, renamed):
        assert keys_of(each, ["model.language_model.norm.weight", "lm_head.weight"]) == described(
            resolve(loaded.config, device_count=1, platform="cpu")
        )


def test_a_head_that_is_stored_is_not_tied_where_the_classes_contradict_each_other():
    """As in the published folders of Mistral Small 3.1: by default, MistralConfig is untied and Mistral3Config tied."""
    data = {"model_type": "mistral3", "text_config": SMALL}
    body, head = "language_model.model.norm.weight", "language_model.lm_head.weight"
    keys = keys_of(data, [body, head])
    assert (keys["logits_via_embedding"], keys["head_dim"], keys["rope_max_timescale"]) == (False, 128, 10**9)
    assert keys["attention_type"] == "global"
    assert keys_of(data, [body])["logits_via_embedding"]
    assert not keys_of(data | {"tie_word_embeddings": False}, [body])["logits_via_embedding"]
    tied = {"model_type": "mistral3", "text_config": SMALL | {"tie_word_embeddings": True}}
    assert keys_of(tied, [body, head])["logits_via_embedding"]


@pytest.mark.parametrize(("case", "form"), CASES)
def test_straight_after_loading_an_export_is_the_folder(case, form, tmp_path, capsys):
    first = folder_of(tmp_path / "first", case, form)
    export.main([str(first), str(tmp_path / "ours"), "format=params"])
    export.main([str(tmp_path / "ours"), str(tmp_path / "back"), "format=hf", f"like={first}"])
    back = tmp_path / "back"
    assert bits(back) == bits(first)
    assert json.loads((back / "config.json").read_text()) == json.loads((first / "config.json").read_text())
    assert (back / PREPARED).read_bytes() == (first / PREPARED).read_bytes()
    assert "copied unchanged: 4 other tensors" in capsys.readouterr().out
    assert not list(tmp_path.glob("*incomplete*"))


@pytest.mark.parametrize("case", ["qwen3-5", "qwen3-5-moe"])
def test_folders_of_qwen_have_bundled_experts_and_a_tower(case, tmp_path, capsys):
    """Experts of one layer, or of all layers, are bundled. The export has one tensor per expert."""
    text, kind = load_file(GOLDENS / case / "model.safetensors"), case.replace("-", "_")
    images = {"image_token_id": 61, "tie_word_embeddings": case == "qwen3-5"}
    for prefix in ("model.layers.0.", "model."):
        first, back = tmp_path / f"{prefix}first", tmp_path / f"{prefix}back"
        tensors = named(bundled(text, prefix), "modules", {"visual.x": np.ones((2, 3), ml_dtypes.bfloat16)})
        found = open_source(str(folder_of(first, case, tensors=tensors, model_type=kind, **images)))
        alone = open_source(str(GOLDENS / case))
        assert found.keys == alone.keys
        assert values(found) == values(alone)
        assert found.about.images[61] == "image_token_id"
        export.main([str(first), str(back), "format=hf", f"like={first}"])
        assert bits(back).keys() == {"model.visual.x", *named(text, "modules", {})}
        assert values(open_source(str(back))) == values(alone)
    assert "left out: visual (1 tensor, 12.0 B)" in "".join(found.notes(model_config(found.keys, [], "")))


def bundled(tensors, prefix):
    """Bundles the experts of each layer into one tensor, in layers whose names begin with `prefix`."""
    found, experts = dict(tensors), {}
    for name in [name for name in tensors if ".experts." in name and name.startswith(prefix)]:
        above, _, rest = name.partition(".experts.")
        number, part, _ = rest.split(".")
        experts.setdefault(above, {}).setdefault(part, {})[int(number)] = found.pop(name)
    for above, parts in experts.items():
        gate, up, down = (
            np.stack([it for _, it in sorted(parts[f"{name}_proj"].items())]) for name in ("gate", "up", "down")
        )
        found |= {f"{above}.experts.gate_up_proj": np.concatenate([gate, up], 1), f"{above}.experts.down_proj": down}
    return found


def test_other_weights_dtypes_and_ends_are_written_into_shards(tmp_path):
    """From a sharded folder whose tied head is also stored, as some programs do."""
    first = folder_of(tmp_path / "first")
    tensors = load_file(first / "model.safetensors")
    tensors["language_model.lm_head.weight"] = tensors["language_model.model.embed_tokens.weight"]
    tensors["language_model.model.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    (first / "model.safetensors").unlink()
    files = {f"model-{part}-of-2.safetensors": dict(list(tensors.items())[part::2]) for part in (0, 1)}
    for name, part in files.items():
        save_file(part, first / name)
    index = {"weight_map": {tensor: name for name, part in files.items() for tensor in part}}
    (first / "model.safetensors.index.json").write_text(json.dumps(index))
    source = open_source(str(first))
    config = model_config(source.keys, [], "")
    like = Like(str(first), config, shapes_of(config))
    leaves = source.leaves(config, shapes_of(config))
    about = source.about.trained([7], 300, False)
    assert like.notes(leaves, "bfloat16")[1:] == [
        f"like={first}: the text model is written in bfloat16, not in float32"
    ]
    (tmp_path / "out").mkdir()
    write_huggingface(tmp_path / "out", config, leaves, "bfloat16", about, 3000, like)
    found, before = bits(tmp_path / "out"), bits(first)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    assert found.keys() == before.keys() - {"language_model.lm_head.weight"}
    for name, (dtype, shape, _) in found.items():
        if name.startswith("language_model.") and not name.endswith("inv_freq"):
            assert (dtype, shape) == ("bfloat16", before[name][1])
        else:
            assert found[name] == before[name]
    assert open_source(str(tmp_path / "out")).keys == source.keys
    said = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (said["eos_token_id"], said["text_config"]["max_position_embeddings"]) == ([1, 9, 7], 300)


def test_the_text_model_alone_is_written_without_like(tmp_path):
    first = folder_of(tmp_path / "first")
    export.main([str(first), str(tmp_path / "out"), "format=hf"])
    assert bits(tmp_path / "out") == bits(GOLDENS / "gemma3")
    alone = open_source(str(tmp_path / "out"))
    assert alone.about.images == open_source(str(first)).about.images
    assert not alone.about.without_tokens().images


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["format=params", "like=LIKE"], "like=...: only with format=hf"),
        (["format=hf", "like=OTHER"], "another text model: it has decoder_block=mistral"),
        (["format=hf", "like=TEXT"], "not a multimodal model in Hugging Face format"),
        (["format=hf", "like=NOTHING"], "there is no such folder"),
        (["format=hf", "like=NARROW"], "another text model: it has vocab_size=32; the weights have vocab_size=64"),
        (["format=hf", "like=LACKING"], "model.norm.weight"),
    ],
)
def test_a_folder_that_does_not_fit_is_refused(words, said, tmp_path, capsys):
    text = load_file(GOLDENS / "gemma3" / "model.safetensors")
    lacking = {name: value for name, value in text.items() if name != "model.norm.weight"}
    fields = json.loads((GOLDENS / "gemma3" / "config.json").read_text()) | {"vocab_size": 32}
    places = {
        "LIKE": folder_of(tmp_path / "like"),
        "OTHER": folder_of(tmp_path / "other", "mistral"),
        "TEXT": GOLDENS / "gemma3",
        "NOTHING": tmp_path / "nothing",
        "NARROW": folder_of(tmp_path / "narrow", text_config=fields),
        "LACKING": folder_of(tmp_path / "lacking", tensors=named(lacking, "published")),
    }
    given = [re.sub(r"like=(\w+)", lambda found: f"like={places[found[1]]}", word) for word in words]
    with pytest.raises(SystemExit) as error:
        export.main([str(GOLDENS / "gemma3"), str(tmp_path / "out"), *given])
    assert error.value.code == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("changes", "tensors", "said"),
    [
        ({"text_config": [1]}, None, "text_config=[1], not an object"),
        ({"text_config": None}, None, "text_config=null, not an object"),
        ({"text_config": {"model_type": ["x"]}}, None, 'model_type=["x"]; known in gemma3: gemma3_text'),
        ({"text_config": {"model_type": "llama"}}, None, 'model_type="llama"; known in gemma3: gemma3_text'),
        ({"text_config": {"num_hidden_layers": 10**40}}, None, "num_hidden_layers"),
        ({"text_config": {"tie_word_embeddings": "no"}}, None, 'text_config: tie_word_embeddings="no", not true or'),
        ({"text_config": {"use_qkv": 1}}, None, "use_qkv=1: not known, so it may change the model's results"),
        ({"rope_scaling": {"factor": 2}}, None, "rope_scaling={"),
        ({"image_token_index": "<image>"}, None, "image_token_index"),
        (
            {},
            lambda text: named({}, "published"),
            "no text model: no tensor name begins with language_model.model.",
        ),
        ({}, lambda text: named(text, "published") | named(text, "modules"), "two text models: names of tensors begin"),
        ({}, lambda text: named(text, "published") | text, "neither to the text model nor to vision_tower and"),
        ({}, lambda text: named(text, "published", {"audio_tower.x": np.ones(1)}), "\n  audio_tower.x"),
        (
            {},
            lambda text: named({name: it for name, it in text.items() if ".6." not in name}, "modules"),
            "model.layers.6.mlp.down_proj.weight",
        ),
    ],
)
def test_what_cannot_be_read_is_one_message(changes, tensors, said, tmp_path, capsys):
    text = load_file(GOLDENS / "gemma3" / "model.safetensors")
    found = folder_of(tmp_path / "it", tensors=tensors and tensors(text), **changes)
    with pytest.raises(SystemExit) as error:
        export.main([str(found), str(tmp_path / "out"), "format=params"])
    assert error.value.code == 2
    assert said in capsys.readouterr().err


def test_a_tower_that_is_larger_than_its_file_is_refused(tmp_path):
    found = folder_of(tmp_path / "it")
    data = (found / "model.safetensors").read_bytes()
    shape = b'"shape":[5,3]'
    assert data.count(shape) == 1
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length].replace(shape, b'"shape":[9999999999,9999999999]')
    (found / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data[8 + length :])
    with pytest.raises(UserError, match="weights cannot be read"):
        open_source(str(found))


def test_quantized_matrices_are_read_as_without_a_tower(tmp_path):
    """quantization_config is at the top level, not in text_config, and its module names are the folder's names."""
    text, scheme = load_file(GOLDENS / "mistral" / "model.safetensors"), scheme_of("int8", (1, 0))
    packed, schemes, rng = dict[str, np.ndarray](), {}, np.random.default_rng(0)
    for name, value in text.items():
        if name.endswith("_proj.weight"):
            schemes[name] = scheme
            codes = rng.integers(-128, 128, value.shape).astype(np.int8)
            packed |= arrays_of(name, codes, rng.uniform(0.1, 1, (len(codes), 1)).astype(np.float32), scheme)
        else:
            packed[name] = value
    said = {"quantization_config": quantization_config(schemes, ["lm_head.weight", "re:.*vision_tower.*"])}
    found = open_source(str(folder_of(tmp_path / "it", "mistral", tensors=named(packed, "published"), **said)))
    alone = shutil.copytree(GOLDENS / "mistral", tmp_path / "alone")
    save_file(packed, alone / "model.safetensors")
    data = json.loads((alone / "config.json").read_text())
    (alone / "config.json").write_text(json.dumps(data | said))
    expected = open_source(str(alone))
    assert found.keys == expected.keys
    assert found.keys["quantization"] == "int8"
    assert values(found) == values(expected)
    path = found.path / "config.json"
    data = json.loads(path.read_text())
    for above in ({}, {"quantization_config": {}}, {"quantization_config": None}):
        below = data["text_config"] | said
        path.write_text(json.dumps({**data, "quantization_config": None, **above, "text_config": below}))
        assert open_source(str(found.path)).keys == expected.keys
    path.write_text(json.dumps(data))
    assert values(found, checkpoint_is_quantized="false") == values(expected, checkpoint_is_quantized="false")
    with pytest.raises(UserError, match="its matrices are quantized; give a directory with float weights"):
        export.main.__wrapped__([str(GOLDENS / "mistral"), str(tmp_path / "out"), "format=hf", f"like={found.path}"])


def test_an_adapter_of_peft_is_added_to_the_text_model(tmp_path):
    base, adapter = folder_of(tmp_path / "it"), shutil.copytree(TESTS / "peft" / "gemma3", tmp_path / "adapter")
    tensors = load_file(adapter / "adapter_model.safetensors")
    renamed = {name.replace(".model.layers.", ".model.language_model.layers."): it for name, it in tensors.items()}
    assert not renamed.keys() & tensors.keys()
    save_file(renamed, adapter / "adapter_model.safetensors")
    found = open_source(str(adapter), base=str(base))
    assert values(found) == values(open_source(str(TESTS / "peft" / "gemma3"), base=str(GOLDENS / "gemma3")))


@pytest.mark.parametrize("field", ["inputs", "targets"])
def test_tokens_of_images_are_not_trained(field):
    row = {"row": np.arange(4, 6)}
    batch = row | {name: np.zeros((2, 3), np.int32) for name in ("inputs", "targets")}
    batch |= {f"{name}_segmentation": np.array([[1, 1, 0], [1, 1, 1]], np.int32) for name in ("inputs", "targets")}

    class Stream:
        def __next__(self):
            return batch, {}

        def close(self):
            pass

    def taken(kind="hf", fields=(("image_token_index", 61), ("boi_token_index", None))):
        config = SimpleNamespace(dataset_type=kind, steps=1)
        run = SimpleNamespace(config=config, rows=2, batch_shardings={"row": None})
        start = SimpleNamespace(about=About(dict(fields)), position=None, updates=0)
        with LoadedAhead(run, SimpleNamespace(train_stream=lambda *args, **share: Stream()), start) as ahead:
            return ahead.take(lambda: None, lambda: False)

    batch[field][0, 2] = 61  # in the padding
    assert taken() == (batch, {})
    batch[field][1, 2] = 61
    with pytest.raises(UserError, match=r"row 5 of .* the token 61, which stands for an image \(image_token_index\)"):
        taken()
    assert taken("synthetic") == (batch, {})
    assert taken(fields=()) == (batch, {})

"""GGUF files: values read equal those of the package gguf, and llama.cpp computes the same from files written."""

import functools
import json
import re
import sys

import gguf
import jax
import numpy as np
import pytest
from gguf_cases import EXPECTED, GOLDENS, MODELS, OTHERWISE, content, exported, inputs, model_folder, with_tokenizer
from safetensors.numpy import load_file, save_file

from trainer import export
from trainer.backends.registry import make_model
from trainer.config.errors import UserError
from trainer.data.tokenizer_files import load_tokenizer
from trainer.leaves.gguf_file import read_gguf
from trainer.leaves.source import nested, parted
from trainer.models.families import family
from trainer.models.gguf import EPSILON, Gguf
from trainer.weights.contents import contents_of
from trainer.weights.gguf.fields import llama3_frequencies, read_fields
from trainer.weights.gguf.read import read_as
from trainer.weights.gguf.tensors import QUANTIZED, KeysAndValues, as_gguf, as_hugging_face, package, stored_tensors
from trainer.weights.huggingface.config_json import model_keys
from trainer.weights.model_keys import model_config
from trainer.weights.open import open_source, weights_of

_QKV = tuple(f"{name}_proj.weight" for name in "qkv")
LLAMA = Gguf("llama", pairs=True)


def weights(source, changes=()):
    config = model_config({**source.keys, **dict(changes)}, ["max_target_length=64"], str(source.path))
    leaves = source.leaves(config, weights_of(make_model(config))[0])
    return config, {name: leaf.read(leaf.dtype, lambda size: None) for name, leaf in leaves.items()}


def logits_of(config, arrays, tokens):
    model = make_model(config)

    @jax.jit
    def logits(arrays):
        params, rest = parted(nested(arrays), model.abstract[1])
        row = np.array([tokens], np.int32)
        positions = np.arange(len(tokens), dtype=np.int32)[None]
        hidden, _, _ = model.apply(params, rest, row, positions, np.ones_like(row), np.zeros(1, np.int32))
        return model.apply(params, rest, hidden, method="head")[0]

    return np.asarray(logits(arrays))[0]


@pytest.mark.parametrize("case", MODELS)
def test_a_model_is_written_as_llama_cpp_reads_it_and_read_back(case, tmp_path):
    """The expected llama.cpp logits are transformers' if the folder's values are unchanged, and ours otherwise."""
    folder = model_folder(case, tmp_path / case)
    file = exported(folder, tmp_path / "model.gguf")
    (theirs, before), (config, after) = (weights(open_source(str(path))) for path in (folder, file))
    assert config.decoder_block == ("llama2" if case == "mistral" else theirs.decoder_block)
    changed = {name for name in before if before[name].tobytes() != after[name].tobytes()}
    # GGUF stores 1 + scale for Gemma's norms, in float32.
    assert all(name.endswith("/scale") for name in changed) if "gemma" in case else not changed
    for name in changed:
        np.testing.assert_allclose(after[name], before[name], atol=2.0**-23, rtol=0)
    with np.load(EXPECTED) as golden, np.load(GOLDENS / case / "expected.npz") as transformers:
        assert content(file) == golden[f"content/{case}"]
        found, expected = golden[f"logits/{case}"], transformers["rows/logits"][0]
    if MODELS[case]:
        expected = logits_of(weights(open_source(str(file)), OTHERWISE.get(case, ()))[0], after, inputs(case))
    # llama.cpp uses a float16 table for Gemma's GELU. One position of phi3 is sensitive: half an ulp in the embeddings
    # changes it by 1.9e-6. llama.cpp differs from float64 by 4.4e-6 and this trainer by 7.4e-6, in opposite directions.
    limit = 1.5e-3 if "gemma" in case else 2e-5
    np.testing.assert_allclose(found, expected, atol=limit * np.abs(expected).max(), rtol=0)


def test_every_type_is_dequantized_as_the_package_does(tmp_path):
    """From random bytes, in parts and with reordered heads."""
    draw, file = np.random.RandomState(0), tmp_path / "model.gguf"
    writer, stored = gguf.GGUFWriter(None, "llama"), {}
    for name in QUANTIZED:
        kind = gguf.GGMLQuantizationType[name]
        values, size = gguf.GGML_QUANT_SIZES[kind]
        stored[name] = draw.randint(0, 256, (8, 512 // values * size), np.uint8)
        writer.add_tensor(name, stored[name], raw_dtype=kind)
    writer.write_header_to_file(file)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensors = stored_tensors(read_gguf(file))
    for name, tensor in tensors.items():
        with np.errstate(all="ignore"):
            whole = gguf.dequantize(stored[name], gguf.GGMLQuantizationType[name])
        box = slice(3, 6), slice(5, 400)
        assert tensor.read((slice(0, 8), slice(0, 512))).tobytes() == whole.tobytes(), name
        assert tensor.read(box).tobytes() == whole[box].tobytes(), name
        heads = as_hugging_face(tensor, LLAMA, "model.layers.0.self_attn.q_proj.weight", 4)
        assert heads.read(box).tobytes() == whole[[0, 2, 1, 3, 4, 6, 5, 7]][box].tobytes(), name
        assert tensor._replace(shape=(2, 4, 512)).expert(1).read(box[:0] + (slice(0, 2), box[1])).tobytes() == (
            whole[4:6, box[1]].tobytes()
        )


def test_heads_are_stored_as_pairs():
    name, rows = "model.layers.{}.self_attn.k_proj.weight", np.arange(8)[:, None]
    assert as_gguf(rows, LLAMA, name, 8)[:, 0].tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    assert as_gguf(rows, Gguf("qwen2"), name, 8)[:, 0].tolist() == [*range(8)]


def rewritten(file, architecture, values, tensors):
    """Writes a file with these tensors and keys; keys lack the architecture's prefix."""
    writer = gguf.GGUFWriter(None, architecture)
    for name, value in values.items():
        whole = name if name.startswith(("general.", "tokenizer.")) else f"{architecture}.{name}"
        writer.add_key_value(whole, value, gguf.GGUFValueType.get_type(value))
    for name, value in tensors.items():
        writer.add_tensor(name, np.ascontiguousarray(value))
    writer.write_header_to_file(file)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def values_and_tensors(file, architecture):
    """Returns a file's keys, without the architecture's prefix, and its tensors."""
    header = read_gguf(file)
    values = {name.removeprefix(f"{architecture}."): value for name, value in header.values.items()}
    del values["general.architecture"]
    tensors = stored_tensors(header)
    return values, tensors, {name: it.read(tuple(slice(0, size) for size in it.shape)) for name, it in tensors.items()}


def assert_same_model(file, other):
    (one, before), (two, after) = (weights(open_source(str(path))) for path in (file, other))
    assert one == two
    assert all(before[name].tobytes() == after[name].tobytes() for name in before)


def test_latents_in_one_tensor_are_read(tmp_path):
    """As llama.cpp wrote them before April 2025, with head sizes in other keys; and mixtures of both forms."""
    file, old = exported(model_folder("deepseek-v2", tmp_path / "of"), tmp_path / "new.gguf"), tmp_path / "old.gguf"
    values, tensors, arrays = values_and_tensors(file, "deepseek2")
    values |= {"attention.head_count_kv": 4, "attention.key_length": 12, "attention.value_length": 6}
    for name in ("attention.key_length_mla", "attention.value_length_mla"):
        del values[name]
    for name in [name for name in tensors if name.endswith("k_b.weight")]:
        second = name.replace("k_b", "v_b")
        joined, keys = KeysAndValues(tensors[name], tensors[second]), arrays.pop(name)
        whole = np.concatenate([keys.swapaxes(1, 2), arrays.pop(second)], 1).reshape(-1, keys.shape[1])
        for box in ((slice(5, 39), slice(3, 9)), (slice(0, 56), slice(0, 12)), (slice(14, 28), slice(0, 1))):
            assert joined.read(box).tobytes() == whole[box].tobytes()
        arrays[name.replace("k_b", "kv_b")] = whole
    rewritten(old, "deepseek2", values, arrays)
    assert_same_model(file, old)


@pytest.mark.parametrize("biases", [False, True])
def test_queries_keys_and_values_in_one_tensor_are_read(biases, tmp_path):
    """As llama.cpp writes them from GLM's original folders."""
    folder = model_folder("glm", tmp_path / "of", attention_bias=biases)
    if biases:
        tensors = load_file(folder / "model.safetensors")
        given = {name.replace("weight", "bias"): it[:, 0] for name, it in tensors.items() if name.endswith(_QKV)}
        save_file(tensors | {name: it.copy() for name, it in given.items()}, folder / "model.safetensors")
    file, old = exported(folder, tmp_path / "new.gguf"), tmp_path / "old.gguf"
    values, _, arrays = values_and_tensors(file, "chatglm")
    for name in [name for name in arrays if ".attn_q." in name]:
        arrays[name.replace("_q.", "_qkv.")] = np.concatenate(
            [arrays.pop(name.replace("_q.", f"_{it}.")) for it in "qkv"]
        )
    assert any("attn_qkv.bias" in name for name in arrays) == biases
    rewritten(old, "chatglm", values, arrays)
    assert_same_model(file, old)


def test_files_of_glm_flash_need_not_say_how_experts_are_scored(tmp_path):
    """Published files do not. The epsilon distinguishes them from DeepSeek-V2, whose files lack the field, too."""
    file, old = exported(model_folder("glm4-moe-lite", tmp_path / "of"), tmp_path / "new.gguf"), tmp_path / "old.gguf"
    values, _, arrays = values_and_tensors(file, "deepseek2")
    del values["expert_gating_func"]
    rewritten(old, "deepseek2", values, arrays)
    assert_same_model(file, old)


def test_what_a_file_leaves_out_is_not_that_of_a_published_model(tmp_path):
    """llama.cpp's defaults are a scale of 1, no dense layers, and unscaled RoPE; transformers has other defaults."""
    for case, name, keys in (
        ("glm4-moe-lite", "deepseek2", {"routed_scaling_factor": 1.0}),
        ("glm4-moe-air", "glm4moe", {"first_num_dense_layers": 0}),
        ("gpt-oss", "gpt-oss", None),
    ):
        file, less = exported(model_folder(case, tmp_path / case), tmp_path / f"{case}.gguf"), tmp_path / "less.gguf"
        values, _, arrays = values_and_tensors(file, name)
        left = ("expert_weights_scale", "leading_dense_block_count", "rope.scaling.")
        rewritten(less, name, {it: value for it, value in values.items() if not it.startswith(left)}, arrays)
        if keys is None:
            with pytest.raises(UserError, match="default"):
                open_source(str(less))
        else:
            assert keys.items() <= open_source(str(less)).keys.items()


@pytest.fixture(scope="module")
def header_of(tmp_path_factory):
    """Returns a function that writes a case's file with changed keys and returns the header; None removes a key."""
    folder = tmp_path_factory.mktemp("headers")

    @functools.cache
    def written(case):
        return read_gguf(exported(model_folder(case, folder / case), folder / f"{case}.gguf"))

    def header(case, changes):
        found = written(case)
        name = found.values["general.architecture"]
        values = found.values | {f"{name}.{key}": value for key, value in changes.items()}
        return found._replace(values={key: value for key, value in values.items() if value is not None})

    return header


def keys_of(header):
    hf = read_as(header, header.values["general.architecture"])
    return model_keys(read_fields(header, hf, {}), str(header.path))


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("gpt-oss", {"attention.sliding_window": None}, "gpt-oss.attention.sliding_window: missing"),
        ("gpt-oss", {"expert_used_count": None}, "gpt-oss.expert_used_count: missing"),
        ("llama4", {"interleave_moe_layer_step": None}, "llama4.interleave_moe_layer_step: missing"),
        ("glm4-moe-lite", {EPSILON: None, "expert_gating_func": None}, f"deepseek2.{EPSILON}: missing"),
        ("mistral4", {"expert_gating_func": 2}, "mistral4 with experts is not read with these values"),
        ("mistral4", {"expert_gating_func": 3}, "mistral4 with experts is not read with these values"),
        ("glm4-moe-lite", {"expert_gating_func": 3}, "deepseek2 with experts is not read with these values"),
        ("deepseek-v2", {"expert_gating_func": 3}, "deepseek2 with experts is not read with these values"),
        ("gpt-oss", {"expert_feed_forward_length": -1}, "intermediate_size=-1"),
        ("granite-moe-shared", {"expert_shared_feed_forward_length": -256}, "shared_intermediate_size=-256"),
        ("granite-moe", {"attention.key_length": 0, "attention.scale": None}, "is not 0, the number of entries"),
        ("glm4-moe-lite", {"block_count": -(2**63)}, f"num_hidden_layers={-(2**63)}"),
    ],
)
def test_keys_that_are_missing_or_make_no_sense_are_refused(case, changes, message, header_of):
    with pytest.raises(UserError, match=re.escape(message)):
        keys_of(header_of(case, changes))


@pytest.mark.parametrize(
    ("case", "changes", "expected"),
    [
        ("deepseek-v3", dict.fromkeys(["expert_group_count", "expert_group_used_count"]), {"n_routing_groups": -1}),
        ("gpt-oss", {"attention.head_count_kv": None}, {"base_num_kv_heads": 2}),
        ("gpt-oss", {"expert_feed_forward_length": 40}, {"base_moe_mlp_dim": 40}),
        ("llama4", {"expert_count": 128}, {"use_qk_norm": False}),
    ],
)
def test_keys_that_are_missing_have_llama_cpps_defaults(case, changes, expected, header_of):
    before, after = (keys_of(header_of(case, them)) for them in ({}, changes))
    assert before.items() & expected.items() == set()
    assert expected.items() <= after.items()


def test_a_module_may_repeat_the_models_tables(tmp_path):
    """As llama.cpp writes them from GLM's folders, with types that it chooses."""
    file, more = exported(model_folder("glm4-moe-air", tmp_path / "of"), tmp_path / "new.gguf"), tmp_path / "more.gguf"
    values, _, arrays = values_and_tensors(file, "glm4moe")
    copies = {"blk.2.nextn.embed_tokens.weight": "token_embd", "blk.2.nextn.shared_head_head.weight": "output"}
    tables = {name: arrays[f"{of}.weight"] for name, of in copies.items()}
    rewritten(more, "glm4moe", values, arrays | tables)
    assert_same_model(file, more)
    rewritten(more, "glm4moe", values, arrays | {name: table + 1 for name, table in tables.items()})
    source = open_source(str(more))
    with pytest.raises(UserError, match=r"modules of multi-token prediction share model.embed_tokens.weight"):
        weights(source)
    for name in ("embed_tokens", "shared_head.head"):
        whole = f"model.layers.2.{name}.weight"
        source._tensors[whole] = source._tensors[whole]._replace(type="Q8_0")
    assert weights(source)[0] == weights(open_source(str(file)))[0]


@pytest.mark.parametrize(("dtype", "of_matrices"), [("q8_0", "Q8_0"), ("q4_1", "Q4_1"), ("float16", "F16")])
def test_matrices_are_written_in_these_types(dtype, of_matrices, tmp_path, capsys):
    folder = model_folder("llama", tmp_path / "llama")
    file = exported(folder, tmp_path / "model.gguf", f"dtype={dtype}")
    types = {name: tensor.type for name, tensor in stored_tensors(read_gguf(file)).items()}
    assert types["blk.0.attn_q.weight"] == of_matrices
    assert types["token_embd.weight"] == types["output.weight"] == ("Q8_0" if of_matrices == "Q4_1" else of_matrices)
    assert types["blk.1.ffn_down.weight"] == "F16"  # its rows have 24 values
    assert types["blk.0.attn_norm.weight"] == "F32"
    said = capsys.readouterr().out
    assert ("not a multiple of 32 values are written as float16: blk.0.ffn_down.weight" in said) == (dtype != "float16")
    _, before = weights(open_source(str(folder)))
    _, after = weights(open_source(str(file)))
    limit = 0.1 if dtype == "q4_1" else 0.01
    assert all(np.abs(after[name] - before[name]).max() < limit * np.abs(before[name]).max() for name in before)


def test_biases_and_sinks_stay_float32(tmp_path):
    file = exported(model_folder("gpt-oss", tmp_path / "of"), tmp_path / "model.gguf", "dtype=float16")
    found = {name: tensor.type for name, tensor in stored_tensors(read_gguf(file)).items() if ".0." in name}
    matrices = {name for name, kind in found.items() if kind == "F16"}
    assert {"blk.0.ffn_gate_exps.weight", "blk.0.attn_q.weight"} < matrices
    others = {"blk.0.ffn_gate_exps.bias", "blk.0.attn_sinks.weight", "blk.0.ffn_gate_inp.weight"}
    assert others <= found.keys() - matrices


def test_bfloat16_stays(tmp_path):
    folder, half, back = (tmp_path / name for name in ("llama", "half", "back"))
    export.main([str(model_folder("llama", folder)), str(half), "format=hf", "dtype=bfloat16"])
    file = exported(half, tmp_path / "model.gguf")
    types = {tensor.type for tensor in stored_tensors(read_gguf(file)).values()}
    assert types == {"BF16", "F32"}
    export.main([str(file), str(back), "format=hf", "dtype=bfloat16"])
    assert (back / "model.safetensors").read_bytes() == (half / "model.safetensors").read_bytes()


def test_all_that_a_folder_says_is_in_the_file(tmp_path, monkeypatch):
    """Tokenizer, chat template, end-of-text tokens and maximum length are read in an empty folder and written again."""
    folder, alone, back = with_tokenizer("llama-bpe", tmp_path / "model"), tmp_path / "alone", tmp_path / "back"
    template = "{{ bos_token }}{% for m in messages %}{{ m.role + ':' + m.content + '<|im_end|>' }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3]}))
    alone.mkdir()
    exported(folder, alone / "model.gguf")
    monkeypatch.chdir(alone)
    source = open_source("model.gguf")
    assert (source.about.ends, source.length) == ([2, 3], open_source(str(folder)).length)
    tokenizer = load_tokenizer(str(source.tokenizer), "auto", add_bos=True, add_eos=True)
    assert tokenizer.chat_template == (template, "model.gguf", "")
    assert (tokenizer.bos, tokenizer.eos, tokenizer.before_text) == (1, 2, [])
    assert tokenizer.special_tokens == {"<unk>": 0, "<s>": 1, "</s>": 2, "<|im_end|>": 3}
    export.main(["model.gguf", str(back), "format=hf"])
    again = open_source(str(back))
    assert again.keys == source.keys == open_source(str(folder)).keys
    assert again.about.ends == [2, 3]
    assert (back / "chat_template.jinja").read_text() == template
    assert contents_of("model.gguf").kind == "a GGUF file"


def test_a_file_appears_when_it_is_complete(tmp_path, monkeypatch, capsys):
    folder, file = model_folder("llama", tmp_path / "llama"), tmp_path / "model.gguf"
    file.write_text("mine")
    with pytest.raises(SystemExit):
        exported(folder, file)
    assert "exists; choose a new file" in capsys.readouterr().err
    assert file.read_text() == "mine"

    def full(*args):
        raise UserError("no space")

    monkeypatch.setattr("trainer.weights.gguf.write._stored", full)
    with pytest.raises(SystemExit):
        exported(folder, tmp_path / "other.gguf")
    assert {path.name for path in tmp_path.iterdir()} == {"llama", "model.gguf"}


@pytest.mark.parametrize(
    ("case", "changes", "named"),
    [
        ("mistral", {"sliding_window": 8}, "llama cannot represent this model:\n .*attention_type=local_sliding"),
        ("ministral3", {"sliding_window": 8}, "mistral3 cannot represent this model:\n .*attention_type=local_sliding"),
        ("qwen3-moe", {"norm_topk_prob": False}, "norm_topk_prob=false"),
        ("gemma2", {"query_pre_attn_scalar": 12}, "query_pre_attn_scalar=12"),
        ("smollm3", {"no_rope_layers": [1, 0, 1, 0, 1]}, "nope_layer_interval=2"),
        ("llama-yarn-exact", {}, "rope_truncate=false"),
        ("phi3", {"sliding_window": 8}, "phi3 cannot represent this model:\n .*sliding_window=8: llama.cpp"),
        (
            "deepseek-v2",
            {"n_group": 3, "topk_group": 2, "topk_method": "group_limited_greedy"},
            "n_group=3: it chooses groups as",
        ),
        ("gpt-oss", {"swiglu_limit": 5.0}, "gpt-oss cannot represent this model:\n .*mlp_activations_limit=5.0"),
        ("llama4", {"attention_chunk_size": 5}, "llama4 cannot represent this model:\n .*chunk_attn_window_size=5"),
        ("llama4", {"use_qk_norm": False}, "llama4 cannot represent this model:\n .*use_qk_norm=false"),
        ("deepseek-v2-lite", {"num_hidden_layers": 3}, "q_lora_rank=null: it reads this in models of 26 and 27"),
    ],
)
def test_what_llama_cpp_cannot_compute_is_refused(case, changes, named, tmp_path, capsys):
    with pytest.raises(SystemExit):
        exported(model_folder(case, tmp_path / case, **changes), tmp_path / "model.gguf")
    said = capsys.readouterr().err
    assert all(part in said for part in named.split(".*"))
    assert not (tmp_path / "model.gguf").exists()


def test_granite_says_whether_it_rotates_and_may_leave_out_the_factor_on_scores():
    (declared,) = family("granite").hugging_face
    assert declared.gguf.fields({"head_dim": 16}) == {"attention_multiplier": 0.25}
    said = {"head_dim": 16, "attention_multiplier": 0.5}
    assert declared.gguf.fields(said | {"rope.scaling.finetuned": True}) == {}
    refused = declared.gguf.fields(said | {"rope.scaling.finetuned": False})  # an unknown field, which is refused
    assert refused == {"position_embedding_type": "nope"}


def test_queries_of_mistral_4_grow_from_the_original_length_only():
    (declared,) = family("mistral4").hugging_face
    length = "attention.temperature_length"
    said = {"rope_scaling": {"original_max_position_embeddings": 8192}, "attention.temperature_scale": 0.5}
    assert declared.gguf.fields(said)["rope_scaling"]["llama_4_scaling_beta"] == 0.5
    del said["attention.temperature_scale"]  # as llama.cpp's converter does
    assert declared.gguf.fields(said)["rope_scaling"]["llama_4_scaling_beta"] == 0.1
    assert declared.gguf.fields(said) == declared.gguf.fields(said | {length: 8192})
    assert declared.gguf.fields(said | {length: 4096})[length] == 4096  # an unknown field, which is refused


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UserError, match=r"pip install 'trainer\[gguf\]'"):
        package()


def test_frequencies_of_llama3_are_those_of_transformers():
    """For the published Llama 3.1: the first frequencies are unchanged, and the last are divided by the factor."""
    rope = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    found = llama3_frequencies(rope, 500_000.0, 128)
    assert (found[:29] == 1).all()
    assert (found[35:] == 8).all()
    assert (np.diff(found) >= 0).all()

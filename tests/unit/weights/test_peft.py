"""Adapters written by peft (tests/peft, see scripts/write_peft.py), and adapters written by this trainer."""

import functools
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from checkpoint_cases import shapes_of
from safetensors.numpy import load_file, save_file
from support import ALL_COMBINATIONS, pinned, state_from

from trainer.backends.registry import make_model
from trainer.config.dump import as_words
from trainer.config.errors import UserError
from trainer.leaves.source import Leaf, names_of, nested, parted
from trainer.training.batches import placed
from trainer.training.build import build
from trainer.weights.model_keys import model_config
from trainer.weights.open import open_source
from trainer.weights.peft.read import PeftSource, is_peft
from trainer.weights.peft.tensor_names import Tables
from trainer.weights.peft.write import write_peft

TESTS = Path(__file__).parents[2]
FOLDER, GOLDENS = TESTS / "peft", TESTS / "goldens"
CASES = sorted(path.parent.name for path in FOLDER.glob("*/expected.npz"))
assert len(CASES) == 14


def base_of(case):
    said = json.loads((FOLDER / case / "adapter_config.json").read_text())
    return GOLDENS / Path(said["base_model_name_or_path"] or "qwen3-moe").name


def config_for(base, source, **keys):
    """Returns the configuration of the model at `base` with the adapters of `source`."""
    keys = open_source(str(base)).keys, {"dtype": "float32", **pinned(ALL_COMBINATIONS[0]), **keys}
    plain = model_config(keys[0], as_words(keys[1]), str(base))
    return model_config(keys[0], as_words(keys[1] | source.lora_keys(plain)), str(base))


@functools.cache
def golden(case):
    """Returns a case's adapters and configuration. In every other case, RoPE rotates pairs."""
    source = PeftSource(FOLDER / case)
    return source, config_for(base_of(case), source, rope_interleave=CASES.index(case) % 2 == 0)


def weights_with(base, source, config):
    """Returns the weights at `base` with the adapters of `source`, by canonical name."""
    shapes = shapes_of(config)
    adapters = source.leaves(config, shapes)
    leaves = open_source(str(base)).leaves(config, {name: it for name, it in shapes.items() if "/product/" not in name})
    leaves |= adapters
    assert leaves.keys() == shapes.keys()
    return {name: leaf.read(np.dtype(np.float32), lambda size: None) for name, leaf in leaves.items()}


def logits_of(config, weights, base):
    batch = np.load(base / "expected.npz")
    model = make_model(config)
    params, rest = parted(nested(weights), model.abstract[1])
    inputs = [batch[f"rows/{name}"] for name in ("inputs", "inputs_position", "inputs_segmentation")]
    row = np.arange(len(inputs[0]), dtype=np.int32)
    hidden, _, _ = model.apply(params, rest, *inputs, row)
    return model.apply(params, rest, hidden, method="head")[0]


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_peft(case):
    (source, config), base = golden(case), base_of(case)
    weights = weights_with(base, source, config)
    found = jax.jit(lambda weights: logits_of(config, weights, base))(weights)
    expected = np.load(FOLDER / case / "expected.npz")["logits"]
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max(), rtol=0)


@pytest.mark.parametrize("case", CASES)
def test_what_is_written_reads_back_equal(case, tmp_path):
    """Experts are written with transformers 4's names. Everything else equals peft's files byte for byte."""
    source, config = golden(case)
    said = rewritten(case, tmp_path)
    theirs, ours = (load_file(folder / "adapter_model.safetensors") for folder in (FOLDER / case, tmp_path))
    if not any(".experts.lora_A" in key for key in theirs):
        assert ours.keys() == theirs.keys()
        assert all(ours[key].dtype == it.dtype and ours[key].tobytes() == it.tobytes() for key, it in theirs.items())
    again = PeftSource(tmp_path)
    assert again.lora_keys(config) == source.lora_keys(config) | {"lora_alpha": pytest.approx(source.alpha)}
    assert_equal_leaves(again, source, config)
    assert said["base_model_name_or_path"] == source.base


def rewritten(case, folder):
    """Returns the adapter_config.json that is written for a golden."""
    source, config = golden(case)
    how = {"base": source.base, "rank": source.rank, "alpha": source.alpha}
    write_peft(folder, config, source.leaves(config, shapes_of(config)), **how)
    return json.loads((folder / "adapter_config.json").read_text())


def assert_equal_leaves(one, other, config):
    one, other = (
        {name: values(leaf) for name, leaf in it.leaves(config, shapes_of(config)).items()} for it in (one, other)
    )
    assert one.keys() == other.keys()
    for name, value in one.items():
        np.testing.assert_array_equal(value, other[name], err_msg=name)


def values(leaf):
    return leaf.read(leaf.dtype, lambda size: None)


def test_adapters_of_parameters_that_a_module_merges(tmp_path):
    """The adapters of merged parameters become one adapter of a higher rank.

    A parameter without an adapter gets zeros. With the written file, peft computes the same logits up to 3e-6 of the
    largest (checked by hand).
    """
    source, config = golden("phi3")
    shapes, tables = shapes_of(config), Tables(config)
    rng = np.random.default_rng(3)
    trained = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items() if "/product/" in name}
    key = tables.adapters["decoder/layers/self_attention/key/kernel"]
    leaves = {name: Leaf(it.shape, it.dtype, [lambda it=it: it]) for name, it in trained.items() if name not in key}
    how = {"base": source.base, "rank": source.rank, "alpha": source.alpha}
    write_peft(tmp_path, config, leaves, **how)
    said = json.loads((tmp_path / "adapter_config.json").read_text())
    assert said["rank_pattern"] == {"self_attn.qkv_proj": 3 * source.rank, "mlp.gate_up_proj": 2 * source.rank}
    assert said["alpha_pattern"] == {name: it / source.rank * source.alpha for name, it in said["rank_pattern"].items()}
    again = PeftSource(tmp_path).leaves(config, shapes)
    for name, it in trained.items():
        np.testing.assert_array_equal(values(again[name]), it * (name not in key), err_msg=name)
    # An adapter of that rank that mixes the parameters is refused.
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    last = next(name for name in tensors if name.endswith("qkv_proj.lora_B.weight"))
    save_file(tensors | {last: tensors[last] + 1}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(UserError, match=r"qkv_proj\.lora_B\.weight: an adapter of a higher rank than the others"):
        [values(leaf) for leaf in PeftSource(tmp_path).leaves(config, shapes).values()]
    query = "decoder/layers/self_attention/query/kernel"
    whole = Leaf(shapes[query], np.dtype(np.float32), [lambda: np.ones(shapes[query], np.float32)])
    with pytest.raises(UserError, match=r"query/kernel: it is trained without .*key/kernel, .*value/kernel"):
        write_peft(tmp_path, config, {query: whole}, **how)


QKV, QUERY = (f"base_model.model.model.layers.0.self_attn.{it}_proj.lora_" for it in ("qkv", "q"))
OF_MERGED = {
    r"qkv_proj.lora_B.weight: .* found \[\]": lambda a, b: {f"{QKV}B.weight": np.array(1, np.float32)},
    r"qkv_proj.lora_B.weight: .*, 5\]": lambda a, b: {
        f"{QKV}A.weight": np.tile(a, (3, 1)),  # the combined rank of three parameters
        f"{QKV}B.weight": np.tile(b, (1, 3))[:, :5],
    },
    r"q_proj.lora_A.weight: .*qkv_proj of this model merges": lambda a, b: {f"{QUERY}A.weight": a},
}


@pytest.mark.parametrize("said", OF_MERGED)
def test_tensors_of_a_merged_module_that_do_not_fit_are_refused_by_name(tmp_path, said):
    _, config = golden("phi3")
    shutil.copytree(FOLDER / "phi3", tmp_path / "it")
    found = load_file(tmp_path / "it" / "adapter_model.safetensors")
    more = OF_MERGED[said](found[f"{QKV}A.weight"], found[f"{QKV}B.weight"])
    save_file(found | more, tmp_path / "it" / "adapter_model.safetensors")
    with pytest.raises(UserError, match=said):
        [values(leaf) for leaf in PeftSource(tmp_path / "it").leaves(config, shapes_of(config)).values()]


def test_targets_are_short_names_of_those_modules_only(tmp_path):
    found = {}
    for case in ("llama", "llama-saved", "deepseek-v3", "mixtral"):
        (tmp_path / case).mkdir()
        found[case] = rewritten(case, tmp_path / case)
    every = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert found["llama"]["target_modules"] == every
    assert found["llama-saved"]["target_modules"] == ["1.self_attn.q_proj", "1.self_attn.v_proj"]
    assert found["llama-saved"]["modules_to_save"] == ["embed_tokens", "lm_head", "model.norm"]
    assert found["mixtral"]["target_modules"] == ["gate", "q_proj", "w1", "w2", "w3"]
    # The dense layer has no adapters, so experts need names that do not match the dense layer's matrices.
    assert {"5.gate_proj", "q_a_proj", "gate"} <= {*found["deepseek-v3"]["target_modules"]}


def test_keys_name_the_matrices_and_what_else_is_trained():
    keys = {}
    for case in ("llama-saved", "qwen2-biases", "mixtral-down", "llama-head"):
        source, config = golden(case)
        keys[case] = source.lora_keys(config)
    assert keys["llama-saved"]["lora_module_path"] == "decoder/layers/self_attention/(query|value)"
    assert keys["llama-saved"]["lora_alpha"] == pytest.approx(8 * 2**0.5)
    norm_and_head = ("^decoder/decoder_norm/scale$", "^decoder/logits_dense/kernel$")
    assert {*keys["llama-saved"]["trainable_parameters_mask"]} == {"^token_embedder/embedding$", *norm_and_head}
    assert "^decoder/layers/self_attention/key/bias$" in keys["qwen2-biases"]["trainable_parameters_mask"]
    assert keys["mixtral-down"]["lora_module_path"] == "decoder/layers/MoeBlock_0/wo"
    assert "trainable_parameters_mask" not in keys["llama-head"]  # peft writes a copy of the base's head


def changed(tmp_path, case="llama", tensors=lambda found: found, **fields):
    """Returns a copy of a golden's folder with changed fields and tensors."""
    folder = tmp_path / "changed"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    said = json.loads((FOLDER / case / "adapter_config.json").read_text()) | fields
    (folder / "adapter_config.json").write_text(json.dumps({key: it for key, it in said.items() if it != ...}))
    save_file(tensors(load_file(FOLDER / case / "adapter_model.safetensors")), folder / "adapter_model.safetensors")
    return folder


NAMES = {
    "of memory": lambda name: name.replace(".weight", ".default.weight"),
    "of a base without a head": lambda name: name.replace("model.model.", "model."),
    "of a model of several kinds of input": lambda name: name.replace("model.layers", "model.language_model.layers"),
    "of the base alone": lambda name: name.removeprefix("base_model.model."),
}


@pytest.mark.parametrize("case", NAMES)
def test_other_names_of_the_same_tensors(tmp_path, case):
    source, config = golden("llama")
    folder = changed(tmp_path, tensors=lambda found: {NAMES[case](name): it for name, it in found.items()})
    assert_equal_leaves(PeftSource(folder), source, config)


def test_other_forms_of_the_configuration(tmp_path):
    """Of older versions, with a fork's unknown fields, and with fields that describe an adapter's origin."""
    plain = PeftSource(FOLDER / "llama")
    old = dict.fromkeys(
        ("peft_version", "use_rslora", "rank_pattern", "alpha_pattern", "use_dora", "lora_dropout"), ...
    )
    for fields in (
        old | {"enable_lora": None, "merge_weights": False, "a_field_of_a_fork": {"x": 1}},
        {"target_modules": "all-linear", "fan_in_fan_out": True, "layers_to_transform": [0, 1], "layers_pattern": None},
        {"init_lora_weights": "gaussian", "lora_dropout": 0.05, "auto_mapping": {"parent_library": "x"}},
        {"lora_alpha": 8.0, "task_type": None, "base_model_name_or_path": None},
    ):
        source = PeftSource(changed(tmp_path, **fields))
        assert (source.rank, source.alpha) == (plain.rank, plain.alpha)
        assert any("a_field_of_a_fork" in note for note in source.notes(None)) == ("a_field_of_a_fork" in fields)


def test_a_target_without_an_adapter_in_the_file_is_told(tmp_path):
    for case in CASES:
        assert not any("target_modules" in note for note in PeftSource(FOLDER / case).notes(None)), case
    folder = changed(tmp_path, target_modules=["q_proj", "up_proj", "lm_head", "proj"])
    (line,) = PeftSource(folder).notes(None)
    assert line == f"{folder}: adapter_model.safetensors has no adapter of target_modules: lm_head, proj"


REFUSED = {
    "use_dora=true": {"use_dora": True},
    "rank_pattern=": {"rank_pattern": {"q_proj": 8}},
    "alpha_pattern=": {"alpha_pattern": {"q_proj": 8}},
    "lora_bias=true": {"lora_bias": True},
    "trainable_token_indices=": {"trainable_token_indices": [1]},
    "layer_replication=": {"layer_replication": [[0, 1]]},
    'init_lora_weights="pissa_niter_16"': {"init_lora_weights": "pissa_niter_16"},
    'init_lora_weights="olora"': {"init_lora_weights": "olora"},
    'peft_type="IA3"': {"peft_type": "IA3"},
    "peft_type=null": {"peft_type": ...},
    "r=0": {"r": 0},
    "lora_alpha=": {"lora_alpha": "8"},
    "later peft": {"peft_version": "1.0.0", "use_something_new": True},
}


@pytest.mark.parametrize("said", REFUSED)
def test_fields_that_cannot_be_represented_are_refused_by_name(tmp_path, said):
    with pytest.raises(UserError, match=said.replace("[", r"\[")):
        PeftSource(changed(tmp_path, **REFUSED[said]))


def test_all_mistakes_of_a_configuration_at_once(tmp_path):
    with pytest.raises(UserError, match=r"use_dora=true(.|\n)*use_qalora=true(.|\n)*init_lora_weights"):
        PeftSource(changed(tmp_path, use_dora=True, use_qalora=True, init_lora_weights="loftq"))


Q = "base_model.model.model.layers.0.self_attn.q_proj."
TENSORS = {
    "lora_magnitude_vector": lambda found: found | {f"{Q}lora_magnitude_vector": np.ones(32, np.float32)},
    "lora_embedding_A": lambda found: found | {"model.embed_tokens.lora_embedding_A": np.ones((4, 64), np.float32)},
    r"q_proj.lora_B.bias": lambda found: found | {f"{Q}lora_B.bias": np.ones(32, np.float32)},
    r"q_proj.lora_A.weight: missing": lambda found: {
        name: it for name, it in found.items() if name != f"{Q}lora_A.weight"
    },
    r"q_proj.lora_B.weight: missing": lambda found: {
        name: it for name, it in found.items() if name != f"{Q}lora_B.weight"
    },
    r"layers.2.mlp": lambda found: found | {"model.layers.2.mlp.up_proj.lora_A.weight": np.ones((4, 32), np.float32)},
    r"q_proj.lora_A.weight: found \[2, 32\]": lambda found: found | {f"{Q}lora_A.weight": np.ones((2, 32), np.float32)},
    "are the same parameter": lambda found: found | {f"{Q}lora_A.other.weight": found[f"{Q}lora_A.weight"]},
    "q_proj.lora_A.weight: I32": lambda found: found | {f"{Q}lora_A.weight": np.ones((4, 32), np.int32)},
    "layers.1.input_layernorm.weight: missing": lambda found: (
        found | {"model.layers.0.input_layernorm.weight": np.ones(32, np.float32)}
    ),
}


@pytest.mark.parametrize("said", TENSORS)
def test_tensors_without_a_place_are_refused_by_name(tmp_path, said):
    _, config = golden("llama")
    with pytest.raises(UserError, match=said):
        PeftSource(changed(tmp_path, tensors=TENSORS[said])).leaves(config, shapes_of(config))


def test_one_of_a_tied_pair_is_refused(tmp_path):
    _, config = golden("llama-tied")
    for case, said in {"other": "different tensors", "alone": "only lm_head.weight"}.items():
        table = "base_model.model.model.embed_tokens.weight"

        def tensors(found, case=case, table=table):
            rest = {name: it for name, it in found.items() if name != table}
            return rest | ({table: found[table] + 1} if case == "other" else {})

        with pytest.raises(UserError, match=said):
            PeftSource(changed(tmp_path, "llama-tied", tensors)).leaves(config, shapes_of(config))


def test_a_model_with_other_adapters_is_refused_with_the_keys_to_give():
    source = PeftSource(FOLDER / "llama-saved")
    _, config = golden("llama")
    with pytest.raises(
        UserError, match=r"lora_rank=2 .*'lora_module_path=decoder/layers/self_attention/\(query\|value"
    ):
        source.leaves(config, shapes_of(config))


def test_a_pickled_file_is_refused_with_what_to_do(tmp_path):
    folder = changed(tmp_path)
    assert is_peft(folder)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(UserError, match="run code in it: load it with peft"):
        PeftSource(folder)


def test_a_file_outside_of_the_folder_is_not_read(tmp_path):
    folder = changed(tmp_path)
    (folder / "adapter_model.safetensors").rename(tmp_path / "other")
    (folder / "adapter_model.safetensors").symlink_to(tmp_path / "other")
    with pytest.raises(UserError, match="such a link is not followed"):
        PeftSource(folder)


def test_experts_are_written_completely_and_routers_as_transformers_5_names_them(tmp_path):
    """peft 0.21 drops adapters of gate and up if down has none; it renames only tensors of adapters."""
    source, config = golden("mixtral")
    leaves = source.leaves(config, shapes_of(config))
    leaves = {name: it for name, it in leaves.items() if "/wo/" not in name and "/gate/" not in name}
    router = "decoder/layers/MoeBlock_0/gate/kernel"
    leaves[router] = Leaf((2, 32, 4), np.dtype(np.float32), [lambda: np.ones((2, 32, 4), np.float32)])
    write_peft(tmp_path, config, leaves, base="", rank=2, alpha=8.0)
    found = load_file(tmp_path / "adapter_model.safetensors")
    added = [it for name, it in found.items() if ".w2.lora_" in name]
    assert len(added) == 2 * 4 * 2  # [layers, experts, halves]
    assert not any(it.any() for it in added)
    assert "base_model.model.model.layers.1.mlp.gate.weight" in found
    assert json.loads((tmp_path / "adapter_config.json").read_text())["modules_to_save"] == ["gate"]


def test_routers_that_peft_does_not_know_are_targets_by_their_parameter(tmp_path):
    """peft 0.21 recognizes only routers named gate."""
    base = GOLDENS / "gpt-oss"
    words = {"dtype": "float32", "lora.enable_lora": True, "lora.lora_rank": 2, "lora.lora_alpha": 8.0}
    words |= {"lora.lora_module_path": "decoder/.*(query|gate)", **pinned(ALL_COMBINATIONS[0])}
    config = model_config(open_source(str(base)).keys, as_words(words), str(base))
    shapes = {name: shape for name, shape in shapes_of(config).items() if "/product/" in name}
    ones = {it: functools.partial(np.ones, shape, np.float32) for it, shape in shapes.items()}
    leaves = {name: Leaf(shape, np.dtype(np.float32), [ones[name]]) for name, shape in shapes.items()}
    write_peft(tmp_path, config, leaves, base="", rank=2, alpha=8.0)
    said = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (said["target_modules"], said["target_parameters"]) == (["q_proj"], ["router.weight"])


@pytest.mark.parametrize("half", ["lora_a", "lora_b"])
def test_an_adapter_with_one_half_of_zeros_is_written(tmp_path, half):
    """b is zero when training begins. Only an adapter with both halves zero is omitted."""
    source, config = golden("llama")
    leaves = source.leaves(config, shapes_of(config))

    def first_layer_without(leaf):
        found = values(leaf).copy()
        found[0] = 0
        return Leaf(leaf.shape, leaf.dtype, [lambda: found])

    zeros = {name for name in leaves if half in name or "/query/" in name}
    leaves |= {name: first_layer_without(leaves[name]) for name in zeros}
    write_peft(tmp_path, config, leaves, base="", rank=source.rank, alpha=source.alpha)
    found = load_file(tmp_path / "adapter_model.safetensors")
    assert not any("layers.0.self_attn.q_proj" in name for name in found)
    every = {
        name for name in load_file(FOLDER / "llama" / "adapter_model.safetensors") if "layers.0.self_attn.q" not in name
    }
    assert found.keys() == every
    for name, leaf in PeftSource(tmp_path).leaves(config, shapes_of(config)).items():
        np.testing.assert_array_equal(values(leaf), values(leaves[name]), err_msg=name)


def test_matrices_beside_experts_are_targets_by_parameter(tmp_path):
    """peft 0.21 takes target_modules with these names for experts."""
    base = base_of("deepseek-v3")
    keys = {
        "enable_lora": True,
        "lora_module_path": "decoder/.*(shared_experts|mlp)/wo",
        "lora_rank": 1,
        "lora_alpha": 8,
    }
    config = model_config(open_source(str(base)).keys, as_words(keys | pinned(ALL_COMBINATIONS[0])), str(base))
    shapes = {name: shape for name, shape in shapes_of(config).items() if "/product/" in name}
    assert len(shapes) == 4
    leaves = {
        name: Leaf(it, np.dtype(np.float32), [lambda it=it: np.ones(it, np.float32)]) for name, it in shapes.items()
    }
    write_peft(tmp_path, config, leaves, base="", rank=1, alpha=8.0)
    said = json.loads((tmp_path / "adapter_config.json").read_text())
    assert said["target_modules"] == []
    assert said["target_parameters"] == ["mlp.down_proj.weight", "shared_experts.down_proj.weight"]


def test_the_bias_of_a_module_that_is_saved_is_none_beside_an_adapter(tmp_path):
    base = base_of("qwen2-biases")
    keys = {"enable_lora": True, "lora_module_path": "mlp/wo", "lora_rank": 1, "lora_alpha": 8}
    config = model_config(open_source(str(base)).keys, as_words(keys | pinned(ALL_COMBINATIONS[0])), str(base))
    shapes = {name: it for name, it in shapes_of(config).items() if "/product/" in name or "/query/" in name}
    assert len(shapes) == 4
    leaves = {
        name: Leaf(it, np.dtype(np.float32), [lambda it=it: np.ones(it, np.float32)]) for name, it in shapes.items()
    }
    write_peft(tmp_path, config, leaves, base="", rank=1, alpha=8.0)
    said = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (said["modules_to_save"], said["bias"]) == (["q_proj"], "none")


def test_trained_parameters_without_a_place_are_refused(tmp_path):
    source, config = golden("mixtral")
    leaves = source.leaves(config, shapes_of(config))
    leaves |= {"decoder/layers/MoeBlock_0/wo": leaves["decoder/layers/MoeBlock_0/product/wo/lora_a"]}
    with pytest.raises(UserError, match="MoeBlock_0/wo: the matrices of experts are not modules"):
        write_peft(tmp_path, config, leaves, base="", rank=2, alpha=8.0)


@pytest.mark.rest(covered_by="adamw", cases=("sgd",))
@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_twenty_steps_are_those_of_peft(name, tmp_path):
    """With the same base, initial adapter and batches, and torch's optimizers (`write_peft.train`)."""
    keys = {"sgd": {"opt_type": "sgd", "learning_rate": 0.1}, "adamw": {"opt_type": "adamw", "learning_rate": 0.01}}
    keys = {"gradient_clipping_threshold": 0, "max_target_length": 16, "per_device_batch_size": 2, **keys[name]}
    keys |= {"lr_schedule_type": "constant", "warmup_steps_fraction": 0}
    base, source = GOLDENS / "llama", PeftSource(FOLDER / "steps")
    config = config_for(base, source, **keys)
    run = build(config, jax.devices()[:1])
    tree = run.codec.unpack(run.abstract_args()[0])
    tree = jax.tree.map(lambda it: np.zeros(it.shape, it.dtype), tree)  # no step count, and zero moments
    params = parted(nested(weights_with(base, source, config)), tree.rest)[0]
    state = state_from(run, tree._replace(params=params))
    tokens = np.random.default_rng(0).integers(0, 64, (4, 2, 17)).astype(np.int32)
    step = run.step.lower(*run.abstract_args()).compile()
    losses = []
    for i in range(20):
        state, metrics = step(state, placed(run, batch_of(tokens[i % 4])), ())
        losses.append(float(metrics["loss"]))
    expected = json.loads((FOLDER / "steps" / "losses.json").read_text())[name]
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    shutil.copy(FOLDER / "steps" / "adapter_config.json", tmp_path)
    shutil.copy(FOLDER / "steps" / f"{name}.safetensors", tmp_path / "adapter_model.safetensors")
    after = names_of(run.codec.unpack(state).params)
    for leaf, theirs in PeftSource(tmp_path).leaves(config, shapes_of(config)).items():
        np.testing.assert_allclose(after[leaf], values(theirs), atol=1e-4 * np.abs(values(theirs)).max(), err_msg=leaf)


def batch_of(tokens):
    rows, length = tokens.shape[0], tokens.shape[1] - 1
    ones = np.ones((rows, length), np.int32)
    fields = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "inputs_position": np.cumsum(ones, 1) - 1}
    fields |= {"inputs_segmentation": ones, "targets_segmentation": ones, "row": np.arange(rows)}
    return {name: it.astype(np.int32) for name, it in fields.items()}

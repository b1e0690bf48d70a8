"""`load_parameters` from each kind of source, and the checkpoints that it refuses."""

import gc
import json
import logging
import re
import shutil

import jax
import numpy as np
import pytest
from checkpoint_cases import (
    BFLOAT16,
    FAMILIES,
    ROPES,
    abstract_of,
    assert_same,
    config_of,
    hf_tensors,
    hf_tensors_of,
    in_pairs,
    maxtext_params,
    random_params,
    write_hf,
    write_maxtext,
)
from support import ALL_COMBINATIONS, TINY, arguments, pinned

from trainer.config.errors import UserError
from trainer.config.load import load
from trainer.config.resolve import resolve
from trainer.leaves.orbax import _undamaged
from trainer.leaves.source import Leaf, names_of, nested, progress
from trainer.training.build import build
from trainer.weights import placing
from trainer.weights.load import load_parameters
from trainer.weights.maxtext.read import in_pairs as in_pairs_in_maxtext
from trainer.weights.open import open_source
from trainer.weights.params.write import write_params


def silent(text):
    """Fails if anything is printed, because short work prints nothing."""
    raise AssertionError(text)


def loaded(path, config, dtype=np.float32, say=silent):
    return load_parameters(str(path), config, abstract_of(config, dtype), say)


def refusal(path, config):
    with pytest.raises(UserError) as error:
        loaded(path, config)
    return str(error.value)


@pytest.mark.parametrize("interleave", [False, True])
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("block", FAMILIES)
def test_hugging_face(tmp_path, block, shards, interleave):
    config = config_of(decoder_block=block, **FAMILIES[block], rope_interleave=interleave)
    params = random_params(config, BFLOAT16)
    tensors = hf_tensors_of(config, params) | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    path = write_hf(tmp_path / "hf", config, tensors, shards=shards)
    assert_same(loaded(path, config, BFLOAT16), in_pairs(params) if interleave else params)


def test_rows_beyond_the_positions_of_the_model_are_told_before_anything_is_read(tmp_path):
    sizes = {"decoder_block": "llama2", **FAMILIES["llama2"]}
    folder = write_hf(tmp_path / "hf", config_of(**sizes), hf_tensors(random_params(config_of(**sizes))))
    for keys, told in (
        ({"max_target_length": 333}, False),
        ({"max_target_length": 334}, True),
        ({"max_target_length": 334, "rope_type": "yarn", "original_max_position_embeddings": 333}, False),
    ):
        lines = []
        config = config_of(**sizes | keys)
        load_parameters(str(folder), config, abstract_of(config, np.float32), lines.append, given=keys)
        assert any("max_target_length=334 exceeds the 333 positions" in line for line in lines) is told


def test_one_layer(tmp_path):
    config = config_of(decoder_block="llama2", **FAMILIES["llama2"], base_num_decoder_layers=1)
    params = random_params(config)
    assert_same(loaded(write_hf(tmp_path / "hf", config, hf_tensors(params)), config), params)


@pytest.mark.parametrize("combination", ALL_COMBINATIONS)
def test_the_result_has_the_dtypes_and_shardings_of_a_run(tmp_path, combination, monkeypatch):
    """Small leaves are stacked on the host; large leaves, or those of several processes, on the devices."""
    sizes = {"decoder_block": "mistral", "logits_via_embedding": False, "per_device_batch_size": 1}
    mesh = {"ici_fsdp_parallelism": 4, "ici_tensor_parallelism": 2}
    run = build(load(arguments(combination, **sizes, **mesh)).config, jax.devices())
    abstract = run.codec.unpack(run.abstract_args()[0]).params
    params = random_params(run.config, BFLOAT16)
    path = write_hf(tmp_path / "hf", run.config, hf_tensors(params))
    for small in (placing.SMALL, 0):
        monkeypatch.setattr(placing, "SMALL", small)
        result = load_parameters(str(path), run.config, abstract, silent)
        assert_same(result, {name: value.astype(np.float32) for name, value in params.items()})
        assert jax.tree.structure(result) == jax.tree.structure(abstract)
        for array, wanted in zip(jax.tree.leaves(result), jax.tree.leaves(abstract), strict=True):
            assert array.sharding == wanted.sharding
    run.init(result)


def test_a_tied_model_may_hold_its_head(tmp_path):
    config = config_of(decoder_block="qwen3", **FAMILIES["qwen3"])
    params = random_params(config)
    tensors = hf_tensors(params)
    same = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].copy()}
    assert_same(loaded(write_hf(tmp_path / "same", config, same), config), params)
    same["lm_head.weight"][-1, -1] += 1
    assert "lm_head.weight and model.embed_tokens.weight differ" in refusal(
        write_hf(tmp_path / "other", config, same), config
    )
    # Shapes are checked first, so another model's tables are not compared.
    path = write_hf(tmp_path / "misshaped", config, same | {"model.norm.weight": np.ones(3, np.float32)})
    assert "model.norm.weight: found [3]" in refusal(path, config)


def test_every_row_of_a_tied_head_is_compared(tmp_path, monkeypatch):
    monkeypatch.setattr("trainer.weights.huggingface.read._ROWS", 24)
    config = config_of(decoder_block="qwen3", **FAMILIES["qwen3"])
    params = random_params(config)
    tensors = hf_tensors(params)
    table = tensors["model.embed_tokens.weight"]
    assert len(table) > 2 * 24
    assert len(table) % 24, "the last rows are fewer"
    assert_same(loaded(write_hf(tmp_path / "same", config, tensors | {"lm_head.weight": table.copy()}), config), params)
    for row in (0, 23, 24, 47, 48, len(table) - 1):
        head = table.copy()
        head[row, 3] += 1
        path = write_hf(tmp_path / str(row), config, tensors | {"lm_head.weight": head})
        assert "lm_head.weight and model.embed_tokens.weight differ" in refusal(path, config)


def test_another_model_is_refused_with_all_that_differs(tmp_path):
    config = config_of(decoder_block="llama2", **FAMILIES["llama2"])
    path = write_hf(tmp_path / "hf", config, hf_tensors(random_params(config)), rms_norm_eps=1e-6, vocab_size=65)
    message = refusal(path, config)
    assert "vocab_size=65" in message
    assert "normalization_layer_epsilon=1.0e-06" in message
    assert "base_emb_dim" not in message
    # The keys that the message recommends do load the checkpoint.
    keys = dict(word.split("=") for word in message.partition("give: ")[2].split())
    changed = config_of(decoder_block="llama2", **FAMILIES["llama2"] | keys)
    assert (changed.vocab_size, changed.normalization_layer_epsilon) == (65, 1e-6)


def broken(names):
    """Plants three errors in a dict of tensors: a missing, an additional and a misshaped tensor."""
    missing, misshaped = names
    return lambda tensors: (
        {name: value for name, value in tensors.items() if name != missing}
        | {misshaped: np.ones((3, 2), np.float32), "odd": np.ones(4, np.float32)}
    )


def assert_names_all(message, missing, misshaped):
    assert "3 tensors do not fit" in message
    assert re.search(rf"{missing}: missing, wanted \[", message)
    assert re.search(rf"{misshaped}: found \[3, 2\], wanted \[", message)
    assert re.search(r"odd: the model has no such parameter, found \[4\]", message)


def test_tensors_that_do_not_fit_hugging_face(tmp_path):
    config = config_of(decoder_block="llama2", **FAMILIES["llama2"])
    names = "model.layers.1.mlp.up_proj.weight", "model.norm.weight"
    path = write_hf(tmp_path / "hf", config, broken(names)(hf_tensors(random_params(config))))
    assert_names_all(refusal(path, config), *names)


def test_tensors_that_do_not_fit_maxtext(tmp_path):
    config = config_of(decoder_block="llama2", **FAMILIES["llama2"])
    names = "decoder/layers/mlp/wi_1/kernel", "decoder/decoder_norm/scale"
    stored = broken(names)(maxtext_params(config, random_params(config), scanned=True))
    assert_names_all(refusal(write_maxtext(tmp_path / "items", stored), config), *names)


def test_tensors_in_other_dtypes_are_refused(tmp_path):
    config = config_of(decoder_block="llama2", **FAMILIES["llama2"])
    tensors = hf_tensors(random_params(config))
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.int8)
    assert "model.norm.weight: stored as I8" in refusal(write_hf(tmp_path / "hf", config, tensors), config)


MAXTEXT = [
    ("llama2", "default"),
    ("mistral", "llama3.1"),
    ("qwen3", "yarn"),
    ("mixtral", "default"),
    ("qwen3_moe", "default"),
]


@pytest.mark.parametrize(("block", "rope"), MAXTEXT)
def test_maxtext(tmp_path, block, rope):
    for interleave, scanned in ((False, True), (True, False)):
        config = config_of(decoder_block=block, **FAMILIES[block], **ROPES[rope], rope_interleave=interleave)
        params = random_params(config)
        items = tmp_path / str(interleave) / "0" / "items"
        write_maxtext(items, maxtext_params(config, params, scanned=scanned))
        lines = []
        result = names_of(loaded(items.parent, config, say=lines.append))
        order = "halves" if rope == "default" else "adjacent pairs"
        assert lines == [
            f"{items}: RoPE is assumed to rotate a head's entries as {order}, like MaxText with model_name=default and "
            f"rope_type={rope}"
        ]
        query = "decoder/layers/self_attention/query/kernel"
        params = in_pairs(params) if interleave else params
        # Divided by sqrt(head_dim), and multiplied again.
        np.testing.assert_allclose(result[query], params[query], rtol=1e-6)
        assert_same(result | {query: params[query]}, params)


@pytest.mark.parametrize(
    ("name", "rope", "expected"),
    [
        ("default", "default", False),
        ("default", "llama3.1", True),
        ("default", "yarn", True),
        ("llama3.1-8b", "llama3.1", True),
        ("llama3.1-8b", "default", True),
        ("llama3.3-70b", "llama3.1", False),  # MaxText's preset does not set rope_type
        ("llama3.3-70b", "yarn", True),
        ("llama3-8b", "default", False),
        ("mistral-7b", "llama3.1", True),
    ],
)
def test_the_order_of_a_heads_entries_in_maxtext_follows_from_name_and_rope(name, rope, expected):
    assert in_pairs_in_maxtext(load([f"model_name={name}", f"rope_type={rope}"]).config) == expected


def test_maxtexts_llama3_3_is_read_as_halves(tmp_path):
    sizes = {key: value for key, value in TINY.items() if key.startswith(("base_", "head_dim", "vocab_size"))}
    words = {"model_name": "llama3.3-70b", "dataset_type": "synthetic"} | pinned("nnx") | sizes
    config = load([f"{key}={value}" for key, value in words.items()]).config
    config = resolve(config, device_count=1, platform="cpu")
    assert config.rope_type == "llama3.1"
    params = random_params(config)
    # As in this trainer's preset: MaxText's layout of the default RoPE.
    plain = config_of(decoder_block="llama2", **FAMILIES["llama2"])
    items = write_maxtext(tmp_path / "items", maxtext_params(plain, params, scanned=True))
    lines = []
    result = names_of(loaded(items, config, say=lines.append))
    assert "entries as halves" in lines[0]
    key = "decoder/layers/self_attention/key/kernel"
    assert_same({key: result[key]}, {key: params[key]})


def test_bfloat16_queries_of_maxtext_are_scaled_in_float32(tmp_path):
    config = config_of(decoder_block="llama2", **FAMILIES["llama2"])
    query = "decoder/layers/self_attention/query/kernel"
    stored = maxtext_params(config, random_params(config, BFLOAT16), scanned=True)
    result = names_of(loaded(write_maxtext(tmp_path / "items", stored), config, BFLOAT16, say=print))
    wanted = np.moveaxis(stored[query], 1, 0).astype(np.float32) * np.float32(8**0.5)
    assert_same({query: result[query]}, {query: wanted.astype(BFLOAT16)})


def test_each_layer_is_cast_from_its_own_dtype(tmp_path):
    config = config_of(decoder_block="llama2", **FAMILIES["llama2"])
    params = random_params(config)
    tensors = hf_tensors(params)
    name, ours = "model.layers.0.mlp.up_proj.weight", "decoder/layers/mlp/wi_1/kernel"
    tensors[name] = tensors[name].astype(BFLOAT16)
    params[ours][0] = params[ours][0].astype(BFLOAT16)
    assert_same(loaded(write_hf(tmp_path / "hf", config, tensors), config), params)
    stored = maxtext_params(config, params, scanned=False)
    name = "decoder/layers_0/mlp/wi_1/kernel"
    stored[name] = stored[name].astype(BFLOAT16)
    result = names_of(loaded(write_maxtext(tmp_path / "items", stored), config, say=print))
    assert_same({ours: result[ours]}, {ours: params[ours]})


def damage(what):
    """Returns a function that damages the Orbax tree in a folder."""

    def apply(tree):
        for path in [tree, *tree.rglob("*")]:
            if what == "arrays gone" and path.parent.name == "d":
                path.unlink()
            elif what == "arrays cut" and path.parent.name == "d":
                path.write_bytes(path.read_bytes()[:10])
            elif path.name == "_METADATA" and what in ("{}", "[]", ""):
                path.write_text(what)
            elif path.name == "_METADATA" and what == "metadata cut":
                path.write_text(path.read_text()[:50])
        if what == "state gone" and (tree / "state").is_dir():
            shutil.rmtree(tree / "state")
        elif what == "state gone":
            shutil.rmtree(tree / "ocdbt.process_0")

    return apply


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("kind", ["params", "maxtext"])
def test_a_damaged_orbax_tree_is_one_message(tmp_path, kind):
    config = config_of(decoder_block="llama2", **FAMILIES["llama2"])
    params = random_params(config)
    if kind == "params":
        leaves = {name: Leaf(value.shape, value.dtype, [lambda it=value: it]) for name, value in params.items()}
        write_params(tmp_path / "whole", config, leaves, None)
        name = "checkpoint"
    else:
        name = write_maxtext(tmp_path / "whole" / "items", maxtext_params(config, params, scanned=True)).name
    for number, what in enumerate(("{}", "[]", "", "metadata cut", "arrays gone", "arrays cut", "state gone")):
        tree = shutil.copytree(tmp_path / "whole", tmp_path / str(number)) / name
        damage(what)(tree)
        with pytest.raises(UserError, match=rf"{tree}.*(damaged or incomplete|cannot be read|not a JSON object)"):
            loaded(tree.parent, config, say=print)
    gc.collect()  # Orbax abandons futures whose errors nobody retrieves


def test_errors_of_tasks_that_orbax_leaves_are_not_logged(tmp_path, caplog, monkeypatch):
    logger = logging.getLogger("asyncio")
    monkeypatch.setattr(logger, "filters", [])
    with _undamaged(tmp_path):
        pass
    logger.error("Task exception was never retrieved")
    assert len(caplog.records) == 1  # nothing is damaged, so the task is not Orbax's

    def read():
        with _undamaged(tmp_path):
            logger.error("Task exception was never retrieved")  # freed before the first error is raised
            raise ValueError("damaged")

    with pytest.raises(UserError):
        read()
    with _undamaged(tmp_path):
        pass
    logger.error("Future exception was never retrieved")  # freed later
    assert len(caplog.records) == 1
    logger.error("another error")
    assert len(caplog.records) == 2


def test_a_model_is_stretched_by_keys_that_were_given(tmp_path):
    keys = FAMILIES["llama2"]
    path = write_hf(tmp_path / "hf", (it := config_of(decoder_block="llama2", **keys)), hf_tensors(random_params(it)))
    config = config_of(decoder_block="llama2", **keys, rope_type="yarn", rope_factor=4.0)
    lines = []
    load_parameters(str(path), config, abstract_of(config), lines.append, ["rope_type", "rope_factor", "head_dim"])
    assert lines == [f"{path} has rope_type=default; rope_type=yarn was given and takes precedence"]
    assert "give: rope_type=default rope_linear_scaling_factor=1.0" in refusal(path, config)


def test_keys_that_decide_shapes_are_the_checkpoints(tmp_path):
    keys = FAMILIES["qwen3"]
    path = write_hf(tmp_path / "hf", (it := config_of(decoder_block="qwen3", **keys)), hf_tensors(random_params(it)))
    config = config_of(decoder_block="qwen3", **keys | {"use_qk_norm": False}, mlp_activations="[relu,linear]")
    with pytest.raises(UserError, match=r"give: use_qk_norm=true mlp_activations=\[silu,linear\]$"):
        load_parameters(str(path), config, abstract_of(config), print, config.keys())


def test_progress_off_a_terminal_is_a_line_in_ten_seconds(monkeypatch):
    clock = iter([0.0, 4.0, 11.0, 12.0, 22.0])
    monkeypatch.setattr("trainer.leaves.source._EVERY", 10.0)
    monkeypatch.setattr("trainer.leaves.source.time.monotonic", lambda: next(clock))
    monkeypatch.setattr("sys.stderr.isatty", lambda: False)
    lines = []
    with progress([Leaf((10**9,), np.dtype(np.float32), [])], "loading", lines.append) as tick:
        for _ in range(4):
            tick(1_000_000_000)
    assert lines == ["loading: 2.00 of 4.00 GB, 182 MB/s", "loading: 4.00 of 4.00 GB, 182 MB/s"]


def test_maxtext_is_read_without_its_moments(tmp_path):
    config = config_of(decoder_block="llama2", **FAMILIES["llama2"])
    params = {name: np.ones_like(value) for name, value in random_params(config).items()}
    stored = maxtext_params(config, params, scanned=True)
    moments = nested({name: 0 * value for name, value in stored.items()})
    items = write_maxtext(tmp_path / "items", stored, opt_state={"m": moments, "odd": 3})
    result = loaded(items, config, say=print)
    assert all(np.asarray(value).all() for value in names_of(result).values())


def test_nothing_there(tmp_path):
    config = config_of(decoder_block="llama2", **FAMILIES["llama2"])
    assert "there is no such folder; looked for config.json" in refusal(tmp_path / "none", config)
    assert "nothing in it is a checkpoint" in refusal(tmp_path, config)
    assert "only gs:// is supported for remote paths" in refusal("s3://bucket/model", config)


def test_a_damaged_directory(tmp_path):
    config = config_of(decoder_block="llama2", **FAMILIES["llama2"])
    path = write_hf(tmp_path / "hf", config, hf_tensors(random_params(config)), shards=3)
    second, third = sorted(path.glob("*.safetensors"))[1:]
    second.unlink()
    third.write_bytes(third.read_bytes()[:-4])
    message = refusal(path, config)
    assert second.name in message
    assert third.name in message
    (path / "model.safetensors.index.json").unlink()
    assert "2 safetensors files, but no" in refusal(path, config)
    (path / "config.json").write_text("[1")
    third.unlink()
    assert "config.json: cannot be read" in refusal(path, config)


def test_an_orbax_tree_of_something_else(tmp_path):
    import orbax.checkpoint as orbax

    config = config_of(decoder_block="llama2", **FAMILIES["llama2"])
    orbax.PyTreeCheckpointer().save((tmp_path / "items").absolute(), {"params": {"x": jax.numpy.ones(3)}})
    assert "without params/params/token_embedder/embedding" in refusal(tmp_path, config)


def test_a_shape_is_refused_before_values_are_read(tmp_path, monkeypatch):
    config = config_of(decoder_block="llama2", **FAMILIES["llama2"])
    path = write_hf(tmp_path / "hf", config, hf_tensors(random_params(config)))
    index = {"weight_map": {"a": "model.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    source = open_source(str(path))
    monkeypatch.setattr("trainer.models.huggingface.Layout.to_ours", None)
    shapes = {name: leaf.shape for name, leaf in names_of(abstract_of(config)).items()}
    source.leaves(config, shapes)
    with pytest.raises(UserError):
        source.leaves(config, shapes | {"decoder/decoder_norm/scale": (3,)})


def test_nested_and_back():
    flat = {"a/b/c": 1, "a/d": 2, "e": 3}
    assert nested(flat) == {"a": {"b": {"c": 1}, "d": 2}, "e": 3}
    assert names_of(nested(flat)) == flat

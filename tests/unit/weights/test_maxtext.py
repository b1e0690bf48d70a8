"""Checkpoints that MaxText saves, and checkpoints written for MaxText."""

import gc
import json
import re
import shutil

import jax
import numpy as np
import orbax.checkpoint as orbax
import pytest
from bucket import bucket  # noqa: F401, a fixture
from checkpoint_cases import (
    BFLOAT16,
    FAMILIES,
    ROPES,
    abstract_of,
    assert_same,
    config_of,
    in_pairs,
    maxtext_params,
    maxtext_run,
    random_params,
    shapes_of,
    write_maxtext,
)
from support import ALL_COMBINATIONS, TINY, pinned

from trainer.checkpoint.manager import CheckpointManager, inspect
from trainer.config.errors import UserError
from trainer.config.load import load
from trainer.config.resolve import resolve
from trainer.leaves.source import Leaf, names_of, nested
from trainer.weights.load import load_parameters
from trainer.weights.maxtext.model_arguments import maxtext_keys, maxtext_notes
from trainer.weights.maxtext.write import write_maxtext as write
from trainer.weights.open import open_source
from trainer.weights.params.write import write_params

# The query scale is then a power of two, so nothing is rounded.
KEYS = FAMILIES["llama2"] | {"head_dim": 16}


def loaded(path, config, say=print, dtype=np.float32):
    return load_parameters(str(path), config, abstract_of(config, dtype), say)


def on_the_host(path, config):
    """Returns the same arrays, read to the host, so that nothing is compiled for their shapes."""
    leaves = open_source(str(path)).leaves(config, shapes_of(config))
    return {name: leaf.read(np.dtype(np.float32), lambda size: None) for name, leaf in leaves.items()}


def refusal(path, config):
    with pytest.raises(UserError) as error:
        loaded(path, config)
    assert "damaged" not in str(error.value)
    return str(error.value)


def files(folder):
    """Returns the files in a folder, except for Orbax's random names."""
    names = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return {re.sub(r"(?<=process_0)[0-9a-f]{32}|\b[0-9a-f]{32}$", "*", name) for name in names}


# The files of a run of MaxText's commit e591f30 with orbax-checkpoint 0.12.8.
FILES = {
    "_CHECKPOINT_METADATA",
    "commit_success.txt",
    "items/_METADATA",
    "items/_sharding",
    "items/array_metadatas/process_0",
    "items/commit_success.txt",
    "items/d/*",
    "items/manifest.ocdbt",
    "items/ocdbt.process_0/d/*",
    "items/ocdbt.process_0/manifest.ocdbt",
}
# Host arrays have no sharding file, and each parameter has its own database.
WRITTEN = {name.replace("process_0", "process_0*") for name in FILES} - {
    "items/_sharding",
    "items/array_metadatas/process_0*",
}


@pytest.mark.parametrize(
    ("nnx", "full", "scanned"), [(False, True, True), (True, True, False), (False, False, False), (True, False, True)]
)
def test_a_run(tmp_path, nnx, full, scanned):
    config = config_of(decoder_block="llama2", **KEYS)
    params = random_params(config)
    stored = maxtext_params(config, params, scanned=scanned)
    # The data position, which MaxText saves with dataset_type=grain.
    run = maxtext_run(tmp_path / "run", stored, nnx=nnx, full=full, scan=scanned, iter={"last_seen": 3})
    newest = run / "checkpoints" / ("10" if full else "0")
    assert {name for name in files(newest) if not name.startswith("iter/")} == FILES
    assert json.loads((newest / "_CHECKPOINT_METADATA").read_text())["custom_metadata"] == (
        {"scan_layers": scanned} if full else {}
    )
    said = []
    assert_same(loaded(run, config, said.append), params)
    assert said[0].startswith(f"{newest / 'items'}: RoPE is assumed to rotate a head's entries as halves")
    for path in (run / "checkpoints", newest, newest / "items"):
        source = open_source(str(path))
        assert (source.path, source.notes(config)) == (newest / "items", said)
    # MaxText's checkpoint names MaxText's handlers, which are not installed here.
    metadata = newest / "_CHECKPOINT_METADATA"
    text = metadata.read_text()
    metadata.write_text(text.replace("orbax.checkpoint._src.handlers.json_checkpoint_handler", "maxtext.common"))
    assert metadata.read_text() != text
    assert open_source(str(run)).notes(config) == said


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_run_that_is_damaged_is_one_message(tmp_path, caplog):
    config = config_of(decoder_block="llama2", **KEYS)
    run = maxtext_run(tmp_path / "run", maxtext_params(config, random_params(config), scanned=True))
    items = run / "checkpoints/10/items"
    metadata = items.parent / "_CHECKPOINT_METADATA"
    for file, content, message in (
        (metadata, "{", f"{metadata}: cannot be read"),
        (metadata, "[]", f"{metadata}: not a JSON object"),
        (items / "_METADATA", "{", f"{items / '_METADATA'}: cannot be read"),
        (items / "manifest.ocdbt", "", f"{items}: the checkpoint is damaged or incomplete"),
        (next((items / "d").iterdir()), "", f"{items}: the checkpoint is damaged or incomplete"),
    ):
        whole = file.read_bytes()
        file.write_text(content)
        with pytest.raises(UserError, match=message):
            loaded(run, config)
        file.write_bytes(whole)
    loaded(run, config)
    gc.collect()  # Orbax abandons tasks whose errors nobody retrieves
    assert not [record for record in caplog.records if record.name == "asyncio"]


def on_axis(stored, axis):
    return {
        name: np.moveaxis(value, 1, axis) if name.startswith("decoder/layers/") else value
        for name, value in stored.items()
    }


def test_layers_on_another_axis_are_recognized_from_shapes(tmp_path):
    # There are as many layers as the width of the model, so some shapes are ambiguous.
    config = config_of(decoder_block="llama2", **KEYS | {"base_num_decoder_layers": 16})
    params = random_params(config)
    stored = maxtext_params(config, params, scanned=True)
    assert stored["decoder/layers/pre_self_attention_layer_norm/scale"].shape == (16, 16)
    assert_same(on_the_host(write_maxtext(tmp_path / "1", stored), config), params)
    stored = on_axis(stored, 0)
    pairs = config_of(decoder_block="llama2", **KEYS | {"base_num_decoder_layers": 16}, rope_interleave=True)
    assert_same(loaded(write_maxtext(tmp_path / "0", stored), pairs), in_pairs(params))
    stored["decoder/layers/mlp/wo/kernel"] = np.ones((3, 2), np.float32)
    message = refusal(write_maxtext(tmp_path / "misshaped", stored), config)
    assert "1 tensor does not fit" in message
    assert "wo/kernel: found [3, 2], wanted [16, 32, 16]" in message


def test_layers_on_an_axis_that_shapes_do_not_tell_are_refused(tmp_path):
    sizes = {"base_emb_dim": 4, "base_mlp_dim": 4, "base_num_query_heads": 4, "base_num_decoder_layers": 4}
    config = config_of(decoder_block="llama2", **KEYS | sizes)
    params = random_params(config)
    items = write_maxtext(tmp_path / "items", maxtext_params(config, params, scanned=True))
    assert "the shapes do not tell whether param_scan_axis is 0 or 1" in refusal(items, config)
    items = write_maxtext(tmp_path / "unscanned", maxtext_params(config, params, scanned=False))
    assert_same(on_the_host(items, config), params)


def test_metadata_that_say_otherwise_are_told(tmp_path):
    config = config_of(decoder_block="llama2", **KEYS)
    params = random_params(config)
    run = maxtext_run(tmp_path / "run", maxtext_params(config, params, scanned=False), scan=True)
    lines = []
    assert_same(loaded(run, config, lines.append), params)
    assert "its metadata has scan_layers=True, but its layers are stored one by one" in lines[1]


@pytest.mark.parametrize("root", ["model", "base"])
def test_other_roots_and_state_of_random_numbers(tmp_path, root):
    config = config_of(decoder_block="llama2", **KEYS)
    params = random_params(config)
    stored = maxtext_params(config, params, scanned=False)
    tree = nested({f"{root}/{name}/value": jax.numpy.asarray(value) for name, value in stored.items()})
    tree[root]["decoder"]["dropout"] = {"rngs": {"params": {"key": {"value": jax.numpy.ones(4, "uint32")}}}}
    orbax.PyTreeCheckpointer().save((tmp_path / "items").absolute(), tree | {"optimizer": {"step": jax.numpy.ones(())}})
    assert_same(loaded(tmp_path, config), params)


def test_a_part_of_our_own_checkpoint_is_not_maxtexts(tmp_path):
    config = config_of(decoder_block="llama2", **KEYS)
    write_params(tmp_path, config, leaves_of(random_params(config)), None)
    assert "a part of a checkpoint of this trainer, not of MaxText" in refusal(tmp_path / "checkpoint/state", config)


def test_weights_of_aqt_are_refused(tmp_path):
    """MaxText stores them beside the unquantized parameters."""
    config = config_of(**FAMILIES["llama2"])
    quantized = {
        "layers": {"mlp": {"wo": {"AqtDotGeneral_0": {"qrhs": {"frozen": {"qvalue": np.ones((2, 2), np.int8)}}}}}}
    }
    items = write_maxtext(
        tmp_path / "items", maxtext_params(config, random_params(config), scanned=True), aqt={"decoder": quantized}
    )
    with pytest.raises(UserError, match=r"quantized by AQT.* with python -m trainer\.quantize"):
        open_source(str(items))


def test_what_was_looked_for(tmp_path):
    config = config_of(decoder_block="llama2", **KEYS)
    (tmp_path / "3").mkdir()
    message = refusal(tmp_path, config)
    assert "nothing in it is a checkpoint; looked for" in message
    assert "items/_METADATA or _METADATA (a MaxText checkpoint)" in message


def test_a_run_does_not_go_on_from_maxtexts(tmp_path):
    config = config_of(decoder_block="llama2", **KEYS)
    run = maxtext_run(tmp_path / "run", maxtext_params(config, random_params(config), scanned=True))
    unfinished = run / "checkpoints" / "11.orbax-checkpoint-tmp"
    unfinished.mkdir()
    settings = load(["keep_best_checkpoints=1", "eval_interval=100"]).config
    for attempt in (lambda: CheckpointManager(run, settings, print), lambda: inspect(run / "checkpoints/10")):
        with pytest.raises(UserError, match=r"was written by MaxText. Only the parameters .*load_parameters_path="):
            attempt()
    assert unfinished.is_dir(), "it is not ours to clear away"


def test_load_full_state_path_says_what_is_possible(tmp_path, capsys):
    from trainer import train

    config = config_of(decoder_block="llama2", **KEYS)
    run = maxtext_run(tmp_path / "run", maxtext_params(config, random_params(config), scanned=True))
    keys = TINY | pinned("nnx") | {"load_full_state_path": run, "base_output_directory": tmp_path, "run_name": "x"}
    with pytest.raises(SystemExit):
        train.main([f"{key}={value}" for key, value in keys.items()])
    assert f"give load_parameters_path={run / 'checkpoints/10'}" in capsys.readouterr().err


def test_in_a_bucket(bucket, tmp_path):  # noqa: F811
    config = config_of(decoder_block="llama2", **KEYS)
    run = maxtext_run(tmp_path / "run", maxtext_params(config, random_params(config), scanned=True))
    shutil.copytree(run, bucket / "run")
    assert "load_parameters_path=a copy of it on this machine" in refusal("gs://bucket/run", config)


def leaves_of(params):
    """Returns leaves: a stacked leaf has one part per layer, any other leaf has one part."""
    return {
        name: Leaf(value.shape, value.dtype, [lambda x=x: x for x in (value if "layers/" in name else [value])])
        for name, value in params.items()
    }


@pytest.mark.parametrize(
    ("block", "rope", "interleave", "scan"),
    [
        ("llama2", "default", False, False),
        ("mistral", "yarn", False, True),
        ("llama2", "yarn", True, False),
        ("qwen3", "default", True, True),
        ("mixtral", "default", False, True),
    ],
)
def test_written_for_maxtext(tmp_path, block, rope, interleave, scan):
    keys = FAMILIES[block] | ROPES[rope] | {"head_dim": 16}
    halves = random_params(config_of(decoder_block=block, **keys))
    config = config_of(decoder_block=block, **keys, rope_interleave=interleave)
    params = in_pairs(halves) if interleave else halves
    out = tmp_path
    write(out, config, leaves_of(params), None, scan)
    wanted = maxtext_params(config, halves, scanned=scan)
    # Reads like MaxText: the tree alone, with Orbax's old interface, and the metadata beside it.
    tree = orbax.PyTreeCheckpointer().restore((out / "0/items").absolute())
    assert tree.keys() == tree["params"].keys() == {"params"}
    assert_same(jax.tree.map(np.asarray, tree["params"]["params"]), wanted)
    metadata = orbax.StandardCheckpointer().metadata((out / "0").absolute())
    assert metadata.custom_metadata["scan_layers"] is scan
    assert files(out / "0") == WRITTEN
    said = []
    assert_same(loaded(out, config, said.append), params)
    assert said == [], "what was written says how heads turn"
    for path in (out / "0", out / "0/items"):
        source = open_source(str(path))
        assert (source.path, source.notes(config)) == (out / "0/items", [])


@pytest.mark.parametrize("name", ["llama3.1-8b", "llama3.3-70b"])
def test_what_was_written_is_read_whatever_the_model_is_called(tmp_path, name):
    sizes = {key: TINY[key] for key in TINY if key.startswith(("base_", "head_dim", "vocab_size"))}
    own = {"dataset_type": "synthetic"} | pinned(ALL_COMBINATIONS[0])
    words = [f"{key}={value}" for key, value in ({"model_name": name} | sizes | own).items()]
    config = resolve(load(words).config, device_count=1, platform="cpu")
    params = random_params(config)
    write(tmp_path, config, leaves_of(params), None, True)
    key = "decoder/layers/self_attention/key/kernel"
    assert_same({key: names_of(loaded(tmp_path, config))[key]}, {key: params[key]})


def test_the_scale_of_queries_is_rounded_once(tmp_path):
    config = config_of(decoder_block="llama2", **FAMILIES["llama2"])  # heads with 8 entries
    params = random_params(config)
    query = "decoder/layers/self_attention/query/kernel"
    write(tmp_path, config, leaves_of(params), "bfloat16", True)
    stored = orbax.PyTreeCheckpointer().restore((tmp_path / "0/items").absolute())["params"]["params"]
    value = np.moveaxis(params[query] / np.float32(8**0.5), 0, 1)
    assert_same({query: np.asarray(names_of(stored)[query])}, {query: value.astype(BFLOAT16)})


def test_layers_on_axis_1_of_one_part(tmp_path):
    config = config_of(decoder_block="llama2", **KEYS | {"base_num_decoder_layers": 1})
    params = random_params(config)
    whole = {name: Leaf(value.shape, value.dtype, [lambda value=value: value]) for name, value in params.items()}
    write(tmp_path, config, whole, None, True)
    assert_same(loaded(tmp_path, config), params)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"decoder_block": "mistral", "attn_logits_soft_cap": 30.0}, "attn_logits_soft_cap=30.0: it does not read"),
        ({"decoder_block": "llama2", "use_qk_norm": True}, "use_qk_norm=True: it has no such norm"),
        ({"decoder_block": "llama2", "rope_type": "llama3.1", "rope_factor": 32.0}, "rope_factor=32.0: 8 is fixed"),
        (
            {"decoder_block": "qwen3", **ROPES["yarn"], "rope_factor": 2.5},
            "rope_factor=2.5: must be an integer in MaxText",
        ),
        (
            {"decoder_block": "qwen3_moe", **FAMILIES["qwen3_moe"], "norm_topk_prob": False},
            "norm_topk_prob=False: MaxText always weights",
        ),
    ],
)
def test_what_maxtext_cannot_compute_is_refused(tmp_path, keys, message):
    config = config_of(**keys)
    with pytest.raises(UserError, match=f"(?s)MaxText's block {keys['decoder_block']} cannot compute:.*{message}"):
        write(tmp_path, config, leaves_of(random_params(config)), None, True)
    assert list(tmp_path.iterdir()) == []


def test_keys_for_maxtext():
    config = config_of(decoder_block="llama2", **KEYS, attn_logits_soft_cap=30.0, **ROPES["yarn"])
    keys = maxtext_keys(config)
    assert (keys["base_emb_dim"], keys["head_dim"], keys["attn_logits_soft_cap"]) == (16, 16, 30.0)
    assert (keys["rope_factor"], keys["max_position_embeddings"], keys["rope_interleave"]) == (4, 256, True)
    assert isinstance(keys["rope_factor"], int)
    assert "rope_linear_scaling_factor" not in keys
    assert maxtext_notes(config) == []
    assert (
        "rows longer than sliding_window_size=5"
        in maxtext_notes(config_of(decoder_block="mistral", **FAMILIES["mistral"]))[0]
    )
    # MaxText's code contains the published values.
    assert maxtext_keys(load(["model_name=llama3.1-8b"]).config)["rope_type"] == "llama3.1"

"""Checkpoints that MaxText 0.2.5 wrote on a CPU, with its logits; see scripts/maxtext_folders.py."""

import importlib.util
import json
import zipfile
from pathlib import Path

import jax
import numpy as np
import pytest
from checkpoint_cases import assert_same, shapes_of
from orbax.checkpoint import PyTreeCheckpointer

from trainer.config.errors import UserError
from trainer.leaves.source import names_of, nested
from trainer.weights.load import load_parameters
from trainer.weights.maxtext.read import BIAS
from trainer.weights.open import open_source

ROOT = Path(__file__).parents[3]
spec = importlib.util.spec_from_file_location("maxtext_folders", ROOT / "scripts" / "maxtext_folders.py")
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)


@pytest.fixture
def case(request, tmp_path):
    """Returns the folder with a run and its expected logits, and the keys of its model."""
    zipfile.ZipFile(script.FOLDERS / f"{request.param}.zip").extractall(tmp_path)
    return tmp_path, json.loads((tmp_path / "keys.json").read_text())


def test_the_files_are_the_cases():
    assert {path.stem for path in script.FOLDERS.iterdir()} == script.CASES.keys()
    for path in script.FOLDERS.iterdir():
        assert json.loads(zipfile.Path(path, "keys.json").read_text()) == script.CASES[path.stem], path


UNSCANNED = [name for name in script.CASES if name.endswith("_unscanned")]
LEFT = [name for name in UNSCANNED if not name.startswith(("gemma2", "olmo3", "gpt_oss"))]


@pytest.mark.rest(covered_by="gemma2_unscanned", cases=("qwen3_5", *LEFT))
@pytest.mark.parametrize("case", script.CASES, indirect=True)
def test_logits_are_those_of_maxtext(case):
    folder, keys = case
    expected = np.load(folder / "expected.npz")
    ours, *exact = script.our_logits(folder / "run", keys, expected["tokens"])
    # The same float32 products are added in another order.
    np.testing.assert_allclose(ours, expected["logits"], rtol=0, atol=script.tolerance(keys))
    assert len(exact) == keys.get("logits_via_embedding", False)
    for unrounded in exact:
        assert np.abs(unrounded - expected["logits"]).max() > 1e-3, "MaxText rounds no longer: mend the guides"


@pytest.mark.parametrize("case", ["gemma2", "gemma2_unscanned"], indirect=True)
def test_layers_that_would_be_read_twice_are_an_error(case):
    folder, keys = case
    config = script.configured(keys, sliding_window_pattern=3, base_num_decoder_layers=6)
    with pytest.raises(UserError, match="another pattern of layers"):
        load_names(folder / "run", config, "float32")


@pytest.mark.parametrize("case", ["gemma2"], indirect=True)
def test_the_scale_of_scores_is_in_maxtexts_queries(case):
    """Whatever our query_pre_attn_scalar is, the scores equal MaxText's."""
    folder, keys = case
    expected = np.load(folder / "expected.npz")
    ours = script.our_logits(folder / "run", keys, expected["tokens"], query_pre_attn_scalar=3)[0]
    np.testing.assert_allclose(ours, expected["logits"], rtol=0, atol=script.TOLERANCE)


@pytest.mark.parametrize("case", ["gemma3_unscanned"], indirect=True)
def test_a_pattern_that_maxtext_does_not_have_is_noted(case):
    folder, keys = case
    source, config = open_source(str(folder / "run")), script.configured(keys, sliding_window_pattern=3)
    assert source.leaves(config, shapes_of(config))
    said = "MaxText's block computes something else: sliding_window_pattern=3: MaxText"
    assert any(said in note for note in source.notes(config))


@pytest.mark.parametrize("case", ["gemma"], indirect=True)
def test_values_are_converted_before_they_are_rounded(case):
    folder, keys = case
    config = script.configured(keys)
    exact, rounded = (load_names(folder / "run", config, dtype) for dtype in ("float32", "bfloat16"))
    assert exact["decoder/layers/pre_ffw_norm/scale"].any()
    for name, value in exact.items():
        np.testing.assert_array_equal(rounded[name], value.astype("bfloat16"), err_msg=name)


def load_names(folder, config, dtype):
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = {
        name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for name, shape in shapes_of(config).items()
    }
    loaded = load_parameters(str(folder), config, nested(abstract), print)
    return {name: np.asarray(value) for name, value in names_of(loaded).items()}


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
@pytest.mark.parametrize(
    "case", ["dense", "experts_unscanned", "deepseek", "deepseek_unscanned", "llama4", "qwen3_next"], indirect=True
)
def test_an_export_has_the_arrays_that_maxtext_wrote(case):
    """Bit for bit, because the query scale 1/4 is a power of two."""
    folder, keys = case
    script.exported(folder / "run", folder / "out", keys)
    written, made = (stored(newest) for newest in (folder / "run/checkpoints/1/items", folder / "out/0/items"))
    biases = {name.partition("/decoder/")[2]: value for name, value in written.items() if name.startswith("nnx_aux/")}
    parameters = {name: value for name, value in written.items() if name.startswith("params/")}
    for name, value in biases.items():
        # Releases before 0.2.5 stack the layers of this parameter on axis 1.
        parameters[f"params/params/decoder/{name}"] = value.T
        if keys["scan_layers"]:
            parameters[f"params/MoEBiasVar/decoder/{name}"] = value
    assert_same(made, parameters)
    assert any(map(np.any, biases.values())) == ("routed_bias" in keys), "training changed them"


def stored(items):
    """Returns the parameters in a tree, and the router biases stored beside them."""
    return {
        name: np.asarray(value)
        for name, value in names_of(PyTreeCheckpointer().restore(items)).items()
        if name.startswith("params/") or (name.startswith("nnx_aux/") and name.endswith(BIAS))
    }


@pytest.mark.parametrize("case", ["deepseek"], indirect=True)
def test_latent_attention_without_yarn_is_another_function_there(case):
    folder, keys = case
    plain = {name: value for name, value in keys.items() if "position_embeddings" not in name and name != "rope_factor"}
    plain |= {"rope_type": "default"}
    with pytest.raises(UserError, match="MaxText's MLA rotates halves with rope_type=default"):
        load_names(folder / "run", script.configured(plain), "float32")

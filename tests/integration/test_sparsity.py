"""Runs with weight sparsity: resumed across a mask update, loaded, and exported."""

import numpy as np
import pytest
from run_cases import assert_equal, train
from support import ALL_COMBINATIONS, pinned

from trainer.export import main as export
from trainer.observe.metrics import METRICS_FILE, read_rows
from trainer.weights.contents import contents_of

SPARSE = {
    "weight_sparsity_n": 2,
    "weight_sparsity_m": 4,
    "weight_sparsity_start_step": 2,
    "weight_sparsity_update_step": 2,
}
RUN = {
    "combination": ALL_COMBINATIONS[-1],
    "learning_rate_schedule_steps": 6,
    "checkpoint_period": 3,
    "eval_interval": -1,
    "base_num_decoder_layers": 1,
    "logits_via_embedding": False,
}
QUERY = "decoder/layers/self_attention/query"


def values_of(path):
    return {tensor.name: np.concatenate([*tensor.read()]) for tensor in contents_of(str(path)).tensors if tensor.shape}


def first_loss(run):
    return read_rows(run / METRICS_FILE)[0]["loss"]


@pytest.mark.rest(covered_by="unit/training/test_sparsity.py; integration/test_resume.py")
def test_a_run_is_resumed_loaded_and_exported(tmp_path):
    runs = tmp_path / "runs"

    def run(name, refused="", **keys):
        code, output = train(tmp_path, run_name=name, **RUN | keys)
        assert (code, refused in output) == (2 if refused else 0, True), output
        return output

    output = run("whole", steps=6, **SPARSE)
    assert (
        "sparse       2 of 4 inputs, from step 2: decoder/layers (mlp/wi_0, mlp/wi_1, mlp/wo, self_attention/" in output
    )
    run("resumed", steps=3, **SPARSE)
    run("resumed", steps=6, **SPARSE)  # masks are updated after steps 4 and 6
    assert_equal(runs / "resumed", runs / "whole", updates=6)
    run("whole", "weight_sparsity_n: 2 -> 1", steps=8, **SPARSE | {"weight_sparsity_n": 1})

    # A Hugging Face folder has zeros for masked weights, so that a dense model computes the same.
    export([str(runs / "whole"), str(tmp_path / "hf"), "format=hf"])
    found, mask = values_of(runs / "whole"), values_of(runs / "whole")[f"{QUERY}/product/mask"]
    kernel = found[f"{QUERY}/kernel"]
    np.testing.assert_array_equal(values_of(tmp_path / "hf")[f"{QUERY}/kernel"], np.where(mask, kernel, 0)[0])
    run("sparse", steps=2, load_parameters_path="runs/whole", **SPARSE)
    run("dense", steps=1, load_parameters_path="hf")
    assert first_loss(runs / "sparse") == first_loss(runs / "dense")
    run("as-it-is", steps=1, load_parameters_path="runs/whole")  # sparse, as its config.yml specifies
    assert first_loss(runs / "as-it-is") == first_loss(runs / "sparse")
    hint = "to load it, give: weight_sparsity_n=2 weight_sparsity_m=4"
    run("refused", hint, steps=1, load_parameters_path="runs/whole", model_name="default")
    output = run("from-dense", steps=2, load_parameters_path="runs/dense", **SPARSE)
    assert "absent, with initial values: decoder/layers/mlp/wi_0/product" in output

    # If the export reorders the entries of heads, it reorders the masks, too.
    words = [f"{key}={value}" for key, value in pinned(ALL_COMBINATIONS[0]).items()]
    export([str(runs / "whole"), str(tmp_path / "pairs"), "format=params", "rope_interleave=true", *words])
    pairs = values_of(tmp_path / "pairs")
    assert (pairs[f"{QUERY}/product/mask"] != mask).any()
    masked = np.where(pairs[f"{QUERY}/product/mask"], pairs[f"{QUERY}/kernel"], 0)
    np.testing.assert_array_equal(np.sort(masked.ravel()), np.sort(np.where(mask, kernel, 0).ravel()))

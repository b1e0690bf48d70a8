"""The commands with parameters stored as Qwix's types."""

import json
import re

import jax
import pytest
from parity_cases import command
from parity_cases import run as compared
from run_cases import RUN as RUNS
from run_cases import arrays_of, killed_at, train
from stored_qwix import FROZEN, PaddedQArray
from support import ALL_COMBINATIONS, arguments, copied

from trainer import inspect, shardings
from trainer.config.errors import UserError
from trainer.config.load import load
from trainer.inference.max_engine import MaxEngine
from trainer.inference.weights import canonical
from trainer.ops.paths import by_name

KEYS = {"decoder_block": "stored_qwix:mixed", **FROZEN}
LAST = ALL_COMBINATIONS[-1]
RUN = KEYS | {"checkpoint_period": 2, "eval_interval": -1, "steps": 4, "run_name": "run-0001"}


@pytest.mark.rest(covered_by="checkpoints and steps of these types in unit/products/")
def test_a_run_resumes_in_another_combination_and_its_parameters_are_shown_and_loaded(tmp_path, capsys):
    whole, half = tmp_path / "whole", tmp_path / "half"
    for folder, combination in ((whole, ALL_COMBINATIONS[0]), (half, LAST)):
        folder.mkdir()
        if folder == half:
            killed_at(2, whole / RUNS, half)
        code, out = train(folder, combination=combination, **RUN)
        assert code == 0, out
    first, left, right = (arrays_of(it / RUNS / f"checkpoints/{n}") for it, n in ((half, 2), (half, 4), (whole, 4)))
    assert left.keys() == right.keys()
    assert {name: it.tobytes() for name, it in left.items()} == {name: it.tobytes() for name, it in right.items()}
    trained = "params/decoder/layers/mlp/wo/kernel"
    assert (left[f"{trained}/array/scale"] != first[f"{trained}/array/scale"]).any()
    assert (left[f"{trained}/array/qvalue"] == first[f"{trained}/array/qvalue"]).all()

    inspect.main([str(half / RUNS)])
    lines = capsys.readouterr().out
    assert re.search(r"mlp/wi_0/kernel/qvalue +\[2, 16, 32\] +int8 +norm \d+ +layers \d+ to \d+\n", lines)
    assert re.search(r"mlp/wi_1/kernel/scale +\[2, 3, 32\] +float32 ", lines)
    assert re.search(r"mlp/wo/kernel/awq_scale +\[2, 32\] +float32 ", lines)

    def engine(name):
        keys = KEYS | {"decoder_block": f"stored_qwix:{name}", "load_parameters_path": half / RUNS}
        return MaxEngine(load(arguments(LAST, **keys)).config, jax.devices()[:1])

    params, _ = canonical(engine("mixed").load_params(say=print))
    assert isinstance(params["decoder"]["layers"]["mlp"]["wi_1"]["kernel"], PaddedQArray)
    assert all(leaf.tobytes() == left[f"params/{name}"].tobytes() for name, leaf in by_name(copied(params)).items())
    with pytest.raises(UserError, match="wi_0/kernel/qvalue: stored as int8, wanted int4: only floats can be cast"):
        engine("narrower").load_params(say=print)


def test_a_dtype_that_no_checkpoint_can_have_is_refused_before_training(tmp_path):
    code, out = train(tmp_path, **RUN | {"decoder_block": "stored_qwix:nf4"})
    assert code == 2
    assert "wi_0/kernel/qvalue is uint4, and 5 more arrays are: Orbax cannot save this dtype" in out


def test_the_table_of_shardings_has_the_parts(capsys):
    mesh = {"ici_data_parallelism": 2, "ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2}
    mesh |= {"shard_optimizer_over_data": True, "per_device_batch_size": 1, "sharding_tolerance": 1}
    tables = []
    for combination in (ALL_COMBINATIONS[0], LAST):
        shardings.main(["--json", *arguments(combination, **KEYS, **mesh)])
        tables.append(json.loads(capsys.readouterr().out))
    assert tables[0] == tables[1]
    rows = {row["name"].removeprefix("params/decoder/layers/"): row for row in tables[0]["tensors"]}
    for name, shape, here in (
        ("mlp/wi_0/kernel/qvalue", [2, 16, 32], [1, 8, 16]),
        ("mlp/wi_0/kernel/scale", [2, 4, 32], [1, 2, 16]),
        ("mlp/wi_1/kernel/scale", [2, 3, 32], [1, 3, 16]),  # its last tile is incomplete
        ("mlp/wo/kernel/awq_scale", [2, 32], [1, 16]),
        ("self_attention/query/kernel/inv_sq_scale", [2, 16], [1, 8]),
        ("self_attention/value/kernel/zero_point", [2, 4, 2, 8], [1, 2, 1, 8]),
    ):
        assert (rows[name]["shape"], rows[name]["per_device_shape"]) == (shape, here), name
    shardings.main(arguments(ALL_COMBINATIONS[0], **KEYS, **mesh))
    assert "params/decoder/layers/mlp/wo/kernel/array/qvalue " in capsys.readouterr().out


@pytest.mark.rest(covered_by="integration/test_parity_records.py")
def test_parity_and_its_record(capsys, tmp_path):
    """Linen matches a record. Doubling one scale's gradient in a product causes differences from there on."""
    record = tmp_path / "mixed.safetensors"
    keys, own = KEYS | {"base_num_decoder_layers": 2}, f"decoder_block={KEYS['decoder_block']}"
    code, out, error = compared(capsys, f"record={record}", **keys)
    assert code == 0, (out, error)
    code, out, error = command(capsys, f"left={record}", own, f"right={LAST}", "--json")
    assert (code, json.loads(out)["equal"]) == (0, True), error
    names = {it["name"] for it in json.loads(out)["comparisons"][0]["quantities"]["parameters"]["arrays"]}
    assert {"decoder/layers/mlp/wo/kernel/array/qvalue", "decoder/layers/mlp/wo/kernel/awq_scale"} <= names

    planted = "decoder_block=stored_qwix:planted"
    code, out, error = command(capsys, f"left={record}", planted, "--json")
    quantities = json.loads(out)["comparisons"][0]["quantities"]
    differing = {it["name"] for it in quantities["gradients"]["arrays"] if not it["bits"]}
    assert differing == {"decoder/layers/mlp/wi_0/kernel/scale"}
    assert quantities["activations"]["bits"]
    assert code == 1, error

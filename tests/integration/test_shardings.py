"""`python -m trainer.shardings`: the table as text, as JSON and side by side, and whether it is correct."""

import json
from pathlib import Path

import jax
import pytest
from support import ALL_COMBINATIONS, arguments

from trainer import shardings, train
from trainer.config.errors import UserError
from trainer.config.load import load
from trainer.ops.random import seed_key
from trainer.training.build import build as building

MESH = {"ici_data_parallelism": 2, "ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2}


def printed(capsys, *words):
    shardings.main(words)
    return capsys.readouterr().out


def as_json(capsys, combination=ALL_COMBINATIONS[0], **overrides):
    return json.loads(printed(capsys, "--json", *arguments(combination, **{**MESH, **overrides})))


@pytest.mark.parametrize("combination", ALL_COMBINATIONS)
def test_the_table_is_that_of_the_state_and_the_same_for_all_combinations(capsys, combination):
    found = as_json(capsys, combination)
    assert found == as_json(capsys)
    assert found["mesh"] == {"data": 2, "fsdp": 2, "tensor": 2}
    run = building(load(arguments(combination, **MESH)).config, jax.devices())
    state = run.abstract_state
    if combination == ALL_COMBINATIONS[0]:
        init = jax.jit(run.codec.init, out_shardings=run.states.shardings)
        state = init(seed_key(0))
    leaves = jax.tree.leaves(state)
    assert len(found["tensors"]) == len(leaves)
    assert sum(row["bytes"] for row in found["tensors"]) == sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    if combination == ALL_COMBINATIONS[0]:
        device = jax.devices()[3]
        shards = [shard.data for leaf in leaves for shard in leaf.addressable_shards if shard.device == device]
        assert sum(row["bytes_per_device"] for row in found["tensors"]) == sum(data.nbytes for data in shards)


def test_rows_and_totals_are_the_arithmetic_of_the_mesh(capsys):
    found = as_json(capsys)
    rows = {row["name"]: row for row in found["tensors"]}
    assert rows["params/decoder/layers/mlp/wi_0/kernel"] == {
        "name": "params/decoder/layers/mlp/wi_0/kernel",
        "axes": ["layers", "embed", "mlp"],
        "spec": [[], ["fsdp"], ["tensor"]],
        "dtype": "float32",
        "shape": [2, 16, 32],
        "per_device_shape": [2, 8, 16],
        "bytes": 4 * 2 * 16 * 32,
        "bytes_per_device": 4 * 2 * 8 * 16,
        "replicated": 0.5,  # sharded over data
    }
    assert rows["step"]["replicated"] == 1 - 1 / 8
    assert rows["params/decoder/layers/mlp/wo/kernel"]["spec"] == [[], ["tensor"], ["fsdp"]]
    totals = found["totals"]
    # The attention, MLP and norms of two blocks, the embedding table, and the final norm.
    assert totals["parameters"] == 2 * (2 * 16 * 8 * (4 + 2) + 3 * 16 * 32 + 2 * 16) + 64 * 16 + 16
    assert totals["parameters_bytes"] == totals["gradients_bytes"] == 4 * totals["parameters"]
    assert totals["optimizer_bytes"] == 2 * totals["parameters_bytes"] + 2 * 4  # two moments, and two counts
    assert all(type(value) is int for value in totals.values())


def test_zero1_halves_what_data_replicates(capsys):
    plain, split = as_json(capsys)["totals"], as_json(capsys, shard_optimizer_over_data=True)["totals"]
    counts = 2 * 4
    assert 2 * split["parameters_bytes_per_device"] == plain["parameters_bytes_per_device"]
    assert 2 * (split["optimizer_bytes_per_device"] - counts) == plain["optimizer_bytes_per_device"] - counts
    assert split["optimizer_bytes"] == plain["optimizer_bytes"]


def test_parameters_that_are_not_trained_have_no_gradients(capsys):
    found = as_json(capsys, trainable_parameters_mask="[mlp]")
    mlp = [row for row in found["tensors"] if row["name"].startswith("params/") and "mlp" in row["name"]]
    assert found["totals"]["gradients_bytes"] == sum(row["bytes"] for row in mlp) > 0


def test_the_text_has_a_line_a_tensor_and_the_totals(capsys):
    lines = printed(capsys, *arguments(ALL_COMBINATIONS[0], **MESH)).splitlines()
    assert lines[0].split() == ["name", "axes", "spec", "shape", "per_device_shape", "bytes_per_device", "replicated"]
    (line,) = [line for line in lines if line.startswith("params/token_embedder")]
    assert "[vocab, embed]" in line
    assert "[tensor, fsdp]" in line
    assert line.endswith("1,024       50.0%")
    assert "parameters: 7,488 of 28,992 bytes a device" in lines


def test_two_configurations_beside_each_other(capsys):
    words = arguments(ALL_COMBINATIONS[0], **MESH)
    out = printed(capsys, *words, "right.shard_optimizer_over_data=true", "right.opt_type=sgd")
    lines = out.splitlines()
    assert lines[0].split() == ["left", "right"]
    assert [line.split() for line in lines[1:3]] == [
        ["opt_type", '"adamw"', '"sgd"'],
        ["shard_optimizer_over_data", "false", "true"],
    ]
    assert any(line.startswith("opt_state/1/0/mu/") and line.endswith("absent") for line in lines)
    assert lines[-1].startswith("1 of ")  # only the step count is equal


def test_two_meshes_beside_each_other(capsys):
    words = arguments(ALL_COMBINATIONS[0], **MESH | {"ici_data_parallelism": 1, "ici_tensor_parallelism": 1})
    lines = printed(capsys, *words, "left.ici_fsdp_parallelism=4", "right.ici_fsdp_parallelism=8").splitlines()
    assert ["ici_fsdp_parallelism", "4", "8"] in [line.split() for line in lines]
    (line,) = [line for line in lines if line.startswith("params/token_embedder")]
    assert "[64, 4] of [64, 16]" in line
    assert "[64, 2] of [64, 16]" in line
    with pytest.raises(SystemExit, match="2"):
        shardings.main([*words, "left.ici_fsdp_parallelism=4", "right.ici_fsdp_parallelism=16"])
    assert "right: " in capsys.readouterr().err


def test_nothing_is_allocated_or_compiled(capsys, monkeypatch):
    """A model of terabytes, which fits on no machine."""
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda *args, **options: pytest.fail("compiled"))
    sizes = {"base_emb_dim": 65536, "base_mlp_dim": 262144, "base_num_decoder_layers": 1000}
    out = printed(capsys, *arguments(ALL_COMBINATIONS[0], **MESH | sizes))
    assert "params/decoder/layers/mlp/wi_0/kernel" in str(out)


def test_the_devices_of_a_topology():
    config = load(arguments(ALL_COMBINATIONS[0], compile_topology="cpu-4")).config
    assert shardings.describe(config)["mesh"] == {"fsdp": 4}


def test_a_layout_that_leaves_much_whole_is_refused():
    rules = {"logical_axis_rules": "[[mlp,[]]]"}
    expected = (
        r"mesh axis tensor leaves \d\d\.\d% of the parameters replicated, more than sharding_tolerance=0.02; "
        r"the largest: params/decoder/layers/mlp/wi_0/kernel \[layers, embed, mlp\] \[2, 16, 32\], "
        r".*Give one of their axes a rule"
    )
    with pytest.raises(UserError, match=expected) as caught:
        building(load(arguments(ALL_COMBINATIONS[0], **MESH, **rules)).config, jax.devices())
    assert "axis fsdp" not in str(caught.value)
    building(load(arguments(ALL_COMBINATIONS[0], **MESH, **rules, sharding_tolerance=1)).config, jax.devices())


def test_a_kernel_and_a_bias_that_disagree_are_named(capsys, monkeypatch):
    """A user's block with axis names for its kernels but not for its biases; also with Zero-1."""

    def outputs(name, axis):
        return f"[{name}] are sharded by [{axis}], the bias [-] by [-]; give the bias the axis names of the outputs"

    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "docs" / "guides"))
    words = arguments(ALL_COMBINATIONS[0], **MESH, decoder_block="team_block:NNXBlock", sharding_tolerance=1)
    for also in ([], ["shard_optimizer_over_data=true"]):
        lines = [line for line in printed(capsys, *words, *also).splitlines() if line.startswith("warning: ")]
        assert {line.split(":")[1].rpartition("/")[2]: line.partition("outputs ")[2] for line in lines} == {
            "qkv": outputs("mlp", "tensor"),
            "mlp_in": outputs("mlp", "tensor"),
            "attention_out": outputs("embed", "fsdp"),
            "mlp_out": outputs("embed", "fsdp"),
        }
    out = printed(capsys, *words, "right.ici_tensor_parallelism=1", "right.ici_fsdp_parallelism=4")
    assert "warning: left: params/decoder/layers/qkv: kernel and bias disagree" in out
    assert as_json(capsys)["warnings"] == []


def test_training_prints_the_table_where_it_is_asked_for(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "_train", lambda *everything: None)
    words = arguments(ALL_COMBINATIONS[0], debug_sharding=True, base_output_directory=tmp_path)
    train.main([*words, "shard_optimizer_over_data=true"])
    out = capsys.readouterr().out
    assert "params/token_embedder/embedding" in out
    assert "bytes a device" in out
    assert "shard_optimizer_over_data=true has no effect: the mesh axis data has size 1" in out

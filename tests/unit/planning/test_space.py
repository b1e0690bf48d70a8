"""The points among which a plan chooses."""

import math

import pytest
from support import arguments

from trainer.config.derived import DCN, ICI
from trainer.config.errors import UserError
from trainer.config.load import load
from trainer.planning.space import REMAT, ROWS, SHARDING, default_space

MESH = [*ICI.values(), *DCN.values()]


def space_of(devices=8, slices=1, fixed=("model_name",), search=None, tokens=0, **overrides):
    config = load(arguments("nnx", **overrides)).config
    return config, default_space(config, devices, slices, fixed, search, tokens)


def choices(space, name):
    return next(dimension.choices for dimension in space.dimensions if dimension.name == name)


@pytest.mark.parametrize(("devices", "slices", "experts"), [(8, 1, 1), (4, 2, 1), (2, 2, 4), (6, 1, 1), (1, 1, 1)])
def test_every_factorization_of_the_devices_is_a_mesh_once(devices, slices, experts):
    family = {"decoder_block": "mixtral", "num_experts": experts, "base_moe_mlp_dim": 32} if experts > 1 else {}
    config, space = space_of(devices, slices, **family)
    meshes = {tuple(mesh[key] for key in MESH if key in mesh) for mesh in choices(space, SHARDING)}
    for mesh in choices(space, SHARDING):
        assert (
            math.prod(mesh.get(key, config[key]) for key in ICI.values() if mesh.get(key, config[key]) > 0) == devices
        )
        assert math.prod(mesh.get(key, config[key]) for key in DCN.values() if mesh.get(key, config[key]) > 0) == slices
    axes = 5 + (experts > 1)  # data, pipeline, fsdp, context, tensor, expert

    def ways(count):  # the number of ordered factorizations, from the exponents of the prime factors
        total, prime = 1, 2
        while count > 1:
            exponent = 0
            while count % prime == 0:
                count, exponent = count // prime, exponent + 1
            total *= math.comb(exponent + axes - 1, axes - 1)
            prime += 1
        return total

    assert len(meshes) == ways(devices) * ways(slices)
    assert space.size == len([*space.points()])


def test_zero_1_only_where_there_is_a_data_axis_and_microbatches_only_in_pipelines():
    _, space = space_of()
    for mesh in choices(space, SHARDING):
        assert ("shard_optimizer_over_data" in mesh) == (mesh["ici_data_parallelism"] > 1)
        assert ("num_pipeline_microbatches" in mesh) == (mesh["ici_pipeline_parallelism"] > 1)


def test_keys_of_the_command_keep_their_values():
    fixed = ("remat_policy", "ici_tensor_parallelism", "per_device_batch_size", "num_vocab_tiling")
    _, space = space_of(fixed=fixed, ici_tensor_parallelism=2, remat_policy="full", per_device_batch_size=2)
    points = [*space.points()]
    assert not any(key in point for point in points for key in ("remat_policy", "num_vocab_tiling"))
    assert {point.get("ici_tensor_parallelism", 2) for point in points} == {2}
    assert {point.get("per_device_batch_size", 2) for point in points} == {2}
    with pytest.raises(UserError, match="ici_tensor_parallelism=3: no mesh of 8 devices has these sizes"):
        space_of(fixed=("ici_tensor_parallelism",), ici_tensor_parallelism=3)


def test_an_axis_of_size_minus_one_is_not_fixed():
    _, space = space_of(fixed=("ici_fsdp_parallelism",), ici_fsdp_parallelism=-1)
    assert {point["ici_fsdp_parallelism"] for point in space.points()} == {1, 2, 4, 8}


def test_search_narrows_widens_and_adds():
    search = {
        "ici_fsdp_parallelism": [4, 8],
        "remat_policy": ["custom"],
        "base_emb_dim": [32, 64],
        "per_device_batch_size": [5],
        "shard_optimizer_over_data": [True],
    }
    _, space = space_of(search=search)
    points = [*space.points()]
    assert {point["ici_fsdp_parallelism"] for point in points} == {4, 8}
    assert all(point["shard_optimizer_over_data"] for point in points)
    assert choices(space, REMAT) == ({"remat_policy": "custom"},)
    assert {(point["base_emb_dim"], point["per_device_batch_size"]) for point in points} == {(32, 5), (64, 5)}
    with pytest.raises(UserError, match="ici_fsdp_parallelism=3: no mesh of 8 devices has such a size"):
        space_of(search={"ici_fsdp_parallelism": [3]})


def test_search_varies_axes_that_a_plan_does_not_vary_by_default():
    _, space = space_of(search={"ici_fsdp_transpose_parallelism": [1, 2]})
    meshes = [{key: size for key, size in mesh.items() if key.startswith("ici_")} for mesh in choices(space, SHARDING)]
    assert {mesh["ici_fsdp_transpose_parallelism"] for mesh in meshes} == {1, 2}
    assert {math.prod(mesh.values()) for mesh in meshes} == {8}


def test_accumulation_makes_the_batch():
    config, space = space_of(tokens=8 * 64 * 12, max_target_length=64)
    for choice in choices(space, ROWS):
        tokens = choice["per_device_batch_size"] * 8 * choice["gradient_accumulation_steps"] * config.max_target_length
        assert tokens == 8 * 64 * 12
    assert {choice["per_device_batch_size"] for choice in choices(space, ROWS)} >= {0.125, 1, 3, 12}
    with pytest.raises(UserError, match="nearest: 6144"):
        space_of(tokens=8 * 64 * 12 + 1, max_target_length=64)
    with pytest.raises(UserError, match="give one of them"):
        space_of(tokens=6144, fixed=("gradient_accumulation_steps",))
    search = {"per_device_batch_size": [2, 3]}
    with pytest.raises(UserError, match=r"not a multiple of the tokens of a step \(1024 or 1536\); nearest: 1024"):
        space_of(tokens=512, max_target_length=64, search=search)
    with pytest.raises(UserError, match="per_device_batch_size gives less than one row for 8 devices"):
        space_of(tokens=512, search={"per_device_batch_size": [0.01]})

"""Zero-1's layout: the axis data shards everything that belongs to a parameter, and nothing else."""

import functools
import math

import jax
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from optimizers import OPTIMIZERS
from support import ALL_COMBINATIONS, model_of, tiny_config

from trainer.backends.base import StateCodec
from trainer.config.errors import UserError
from trainer.config.keys import Config
from trainer.config.rules import make_rules
from trainer.config.schema import schema
from trainer.optim.optimizer import make_optimizer
from trainer.sharding import get_mesh_from_config
from trainer.state.builders import (
    build_zero1_input_state_mesh_shardings,
    get_abstract_state_nnx,
    get_named_sharding_nnx,
    get_partition_spec_nnx,
    set_named_sharding_nnx,
)
from trainer.state.init import init_state_fn
from trainer.state.shardings import state_shardings, tensors
from trainer.state.zero1 import over_data

AXES = {"ici_data_parallelism": 2, "ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2}
REGISTERED = [f"opt_type={choice}" for choice in schema().keys["opt_type"].choices]
# With these keys, every optimizer keeps all optional state.
MOMENTA = {"sgd_momentum": 0.9, "adafactor_momentum": 0.9, "adafactor_min_dim_size_to_factor": 4}
# One combination per native state.
BOTH = sorted({ALL_COMBINATIONS[0], ALL_COMBINATIONS[-1]})


@pytest.mark.parametrize(
    ("spec", "shape", "expected"),
    [
        (P(None, "fsdp", "tensor"), (4, 16, 6), P("data", "fsdp", "tensor")),
        (P(None, "fsdp", "tensor"), (3, 16, 6), P(None, ("fsdp", "data"), "tensor")),
        (P(None, "fsdp", "tensor"), (3, 6, 8), P(None, "fsdp", "tensor")),  # 6 / 2 is odd; tensor has the last axis
        (P(("tensor", "none"), "fsdp"), (8, 8), P(("tensor", "none"), ("fsdp", "data"))),
        (P(("none", "tensor"), None), (8, 8), P(("none", "tensor"), "data")),
        (P("tensor_sequence"), (8,), P(("tensor_sequence", "data"))),  # this axis has size 1 and shards nothing
        (P("fsdp"), (16, 3), P(("fsdp", "data"), None)),
        (P(), (5, 7), P()),
        (P(), (), P()),
        (P(("fsdp", "data"), None), (16, 16), P(("fsdp", "data"), None)),
    ],
    ids=str,
)
def test_data_goes_to_the_first_dimension_that_it_can_split(spec, shape, expected):
    names = ("data", "fsdp", "tensor", "tensor_sequence", "none")
    mesh = jax.make_mesh((2, 2, 2, 1, 1), names, (AxisType.Auto,) * 5)
    assert over_data(NamedSharding(mesh, spec), shape) == NamedSharding(mesh, expected)


def test_without_a_data_axis_nothing_changes():
    sharding = NamedSharding(jax.make_mesh((1, 8), ("data", "fsdp"), (AxisType.Auto,) * 2), P("fsdp"))
    assert over_data(sharding, (16,)) is sharding


@functools.cache
def laid_out(combination, name):
    """Returns rows of (tensor, leaf, storage sharding, sharding without Zero-1)."""
    own = {"opt_type": name.partition("=")[2], **MOMENTA} if name in REGISTERED else {}
    keys = AXES | {"base_num_decoder_layers": 3}
    model = model_of(tiny_config(combination, devices=8, **keys))  # the same for every optimizer
    config = tiny_config(combination, devices=8, **keys, **own) if own else model.config
    codec = StateCodec(model, make_optimizer(config, model.param_axes) if own else OPTIMIZERS[name])
    native = codec.abstract
    mesh, rules = get_mesh_from_config(config), make_rules(config.logical_axis_rules)
    split, whole = (state_shardings(codec.model, native, mesh, rules, zero1=zero1) for zero1 in (True, False))
    return list(zip(*map(jax.tree.leaves, (tensors(codec.model, native), native, split, whole)), strict=True))


@pytest.mark.parametrize("combination", BOTH)
@pytest.mark.parametrize("name", [*OPTIMIZERS, *REGISTERED])
def test_all_that_belongs_to_a_parameter_is_split_whatever_the_optimizer(combination, name):
    for tensor, leaf, split, whole in laid_out(combination, name):
        per_device, before = split.shard_shape(leaf.shape), whole.shard_shape(leaf.shape)
        if tensor.path[0] == "step" or not tensor.of_parameter:
            assert split == whole, tensor.name
            assert leaf.size <= 3, tensor.name  # counts, coefficients, a random key
        elif per_device == before:
            # Row and column sums, and the single zero that Adafactor stores for arrays that it does not factor.
            axes = [*whole.spec, *[None] * leaf.ndim]
            free = [size for size, axis in zip(before, axes, strict=False) if "tensor" not in str(axis)]
            assert "adafactor" in name, tensor.name
            assert all(size % 2 for size in free), tensor.name
        else:
            assert sum(a != b for a, b in zip(per_device, before, strict=True)) == 1
            assert 2 * math.prod(per_device) == math.prod(before)


@pytest.mark.parametrize("combination", ALL_COMBINATIONS)
def test_the_named_builders_keep_one_structure_on_every_native_state(combination):
    config = tiny_config(combination, devices=8, **AXES, shard_optimizer_over_data=True)
    mesh, tx = get_mesh_from_config(config), OPTIMIZERS["clipped"]
    codec = StateCodec(model_of(config), tx)
    init = init_state_fn(codec)
    state, specs, shardings = get_abstract_state_nnx(config, mesh, init)
    assert jax.tree.structure(state) == jax.tree.structure(shardings) == jax.tree.structure(jax.eval_shape(init))
    assert jax.tree.all(jax.tree.map(lambda a, b: a is b, get_named_sharding_nnx(state), shardings))
    assert jax.tree.all(jax.tree.map(lambda spec, it: spec == it.spec, specs, shardings))
    assert get_partition_spec_nnx(shardings) == specs
    assert shardings == state_shardings(codec.model, state, mesh, make_rules(config.logical_axis_rules), zero1=True)

    offloading = Config({**config, "optimizer_memory_host_offload": True})
    waiting = get_abstract_state_nnx(offloading, mesh, init).shardings
    kinds = {leaf.memory_kind for leaf in jax.tree.leaves(codec.unpack(waiting).opt_state)}
    assert kinds == {"device", "pinned_host"}  # scalars stay on the device
    assert codec.unpack(waiting).params == codec.unpack(shardings).params

    _, _, whole = get_abstract_state_nnx(config, mesh, init, is_training=False)
    assert whole == state_shardings(codec.model, state, mesh, make_rules(config.logical_axis_rules))
    again = set_named_sharding_nnx(state, whole)
    assert get_named_sharding_nnx(again) == whole
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), again) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), state
    )

    during = build_zero1_input_state_mesh_shardings(config, shardings, codec.unpack(whole).params)
    assert during == codec.pack(codec.unpack(shardings)._replace(params=codec.unpack(whole).params))
    assert codec.unpack(during).params == codec.unpack(whole).params != codec.unpack(shardings).params
    assert codec.unpack(during).opt_state == codec.unpack(shardings).opt_state
    if isinstance(whole, nnx.State):
        given = nnx.state(whole["model"], nnx.Param)
        assert build_zero1_input_state_mesh_shardings(config, shardings, given) == during


def test_a_train_state_of_nnx_is_split_and_inference_needs_no_optimizer():
    config = tiny_config("nnx", devices=8, **AXES)
    mesh, codec = get_mesh_from_config(config), StateCodec(model_of(tiny_config("nnx", devices=8)), optax.sgd(0.1))
    whole = get_abstract_state_nnx(config, mesh, init_state_fn(codec))

    def train_state():
        return nnx.merge(nnx.graphdef(codec.model.train_state_module(codec.tx)), codec.init(jax.random.key(0)))

    assert get_abstract_state_nnx(config, mesh, train_state).specs == whole.specs

    def model_alone():
        return nnx.State({"model": codec.init(jax.random.key(0))["model"]})

    specs = get_abstract_state_nnx(config, mesh, model_alone, is_training=False).specs
    assert jax.tree.leaves(specs["model"]) == jax.tree.leaves(whole.specs["model"])


def test_parameters_that_are_missing_or_too_many_are_told():
    config = tiny_config("nnx", devices=8, **AXES)
    codec = StateCodec(model_of(config), optax.sgd(0.1))
    shardings = get_abstract_state_nnx(config, get_mesh_from_config(config), init_state_fn(codec)).shardings
    params = dict(codec.unpack(shardings).params)
    lacking = {"decoder": params["decoder"]}
    with pytest.raises(UserError, match="lacks the parameter token_embedder/embedding"):
        build_zero1_input_state_mesh_shardings(config, shardings, lacking)
    with pytest.raises(UserError, match="unknown parameters: odd"):
        build_zero1_input_state_mesh_shardings(
            config, shardings, params | {"odd": params["token_embedder"]["embedding"]}
        )

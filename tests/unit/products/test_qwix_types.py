"""Qwix's types as values of parameters: in NNX, in the codec and shardings, in a step and in checkpoints."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx, struct
from manager_cases import saved
from stored_qwix import FROZEN, STORES, as_floats, stored_by
from support import ALL_COMBINATIONS, arguments, assert_equal_bits, copied, lowered_update, packed_batch, state_from

from trainer.checkpoint.manager import restore
from trainer.config.load import load
from trainer.ops.paths import by_name
from trainer.state.builders import get_abstract_state_nnx
from trainer.state.init import init_state_fn
from trainer.training.batches import placed
from trainer.training.build import build

TYPES = ("qarray", "asymmetric", "padded", "with_aux", "with_awq", "with_sq")
MESH = {"ici_data_parallelism": 2, "ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2, "per_device_batch_size": 1}
ZERO1 = MESH | {"shard_optimizer_over_data": True}
ROWS = 8


@functools.cache
def made(name="", combination=ALL_COMBINATIONS[0], **keys):
    """Builds a run whose kernels are stored as the type `name`; "" builds the plain model."""
    if name:
        keys = FROZEN | {"decoder_block": f"stored_qwix:{name}"} | keys
    keys = {"per_device_batch_size": ROWS, "sharding_tolerance": 1, "opt_type": "sgd", "learning_rate": 0.1} | keys
    devices = 8 if any("parallelism" in key for key in keys) else 1
    return build(load(arguments(combination, **keys)).config, jax.devices()[:devices])


@functools.cache
def plain_params():
    run = made()
    return copied(jax.jit(run.model.init)(jax.random.key(0))[0])


@functools.cache
def stored_params(name):
    return copied(jax.jit(functools.partial(stored_by, name))(plain_params()))


def tree_of(name, run):
    """Returns the canonical state before the first step; its optimizer state has no arrays but counters."""
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), run.codec.unpack(run.codec.abstract))
    return zeros._replace(params=stored_params(name))


class Holder(nnx.Module):
    def __init__(self, value):
        self.kernel = value


@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize("name", TYPES)
def test_nnx_functions_keep_the_arrays_and_the_static_parts(name, graph):
    kernels = stored_params(name)["decoder"]["layers"]["mlp"]["wo"]["kernel"]
    first, second = (jax.tree.map(lambda part, i=i: jnp.asarray(part[i]), kernels) for i in range(2))
    assert jax.tree.structure(first) == jax.tree.structure(second)  # including the static parts
    with nnx.set_graph_mode(graph), nnx.set_graph_updates(graph), nnx.use_eager_sharding(False):
        module = Holder(nnx.Param(first))
        graphdef, state = nnx.split(module)
        assert [path for path, _ in nnx.to_flat_state(state)] == [("kernel",)]
        found = [nnx.merge(graphdef, state), nnx.graph.unflatten(*nnx.graph.flatten(module)), nnx.state(module)]
        found.append(jax.jit(lambda state: nnx.state(nnx.merge(graphdef, state)))(state))
        values = [it["kernel"] if isinstance(it, nnx.State) else it.kernel for it in found]
        for value in values:
            assert type(value.get_value()) is type(first)
            assert_equal_bits(value.get_value(), first)
        nnx.update(module, nnx.state(Holder(nnx.Param(second))))
        assert_equal_bits(module.kernel.get_value(), second)


def test_static_parts_take_part_in_the_comparison_of_structures():
    """Otherwise the tests here would not notice that a static part is lost."""
    kernel = jax.ShapeDtypeStruct((16, 8), jnp.float32)
    value = jax.eval_shape(STORES["with_awq"], kernel)
    others = [
        dataclasses.replace(value, contracting_axis=1),
        dataclasses.replace(value, how=dataclasses.replace(value.how, tiled_axes={0: 8})),
        dataclasses.replace(value, array=dataclasses.replace(value.array, qtype=jnp.int4)),
    ]
    for other in others:
        assert jax.tree.structure(value) != jax.tree.structure(other)
    padded = jax.eval_shape(STORES["padded"], kernel)
    assert jax.tree.structure(padded) != jax.tree.structure(dataclasses.replace(padded, original_shape=(15, 8)))


@struct.dataclass
class Unknown:
    """A pytree for JAX that NNX does not know."""

    q: jax.Array


class Plain:
    """Not a pytree."""

    def __init__(self):
        self.table = jnp.ones(3)


@pytest.mark.parametrize("graph", [True, False])
def test_nnx_refuses_an_unregistered_pytree_and_overlooks_a_plain_object(graph):
    """As documented in docs/guides/extending.md."""
    with nnx.set_graph_mode(graph), nnx.set_graph_updates(graph), nnx.use_eager_sharding(False):
        with pytest.raises(ValueError, match=r"Found data on value of type .*Unknown.* assigned to static attribute"):
            Holder(Unknown(jnp.ones(3)))
        for module in (Holder(nnx.Param(Unknown(jnp.ones(3)))), Holder(nnx.data(Unknown(jnp.ones(3))))):
            assert [leaf.shape for leaf in jax.tree.leaves(nnx.state(module))] == [(3,)]
        graphdef, state = nnx.split(Holder(Plain()))
        assert not jax.tree.leaves(state)
        assert nnx.merge(graphdef, state).kernel.table.shape == (3,)


@pytest.mark.parametrize(
    ("name", "combination"),
    [*((name, ALL_COMBINATIONS[0]) for name in TYPES), *(("mixed", combination) for combination in ALL_COMBINATIONS)],
)
def test_codec_builders_and_shardings_follow_the_kernel(name, combination):
    """With Zero-1: each type, and a model of all types in each combination.

    The plain model shows how a whole kernel is sharded.
    """
    run, plain = made(name, combination, **ZERO1), made(**ZERO1)
    leaves, structure = jax.tree.flatten(run.codec.abstract)
    numbered = structure.unflatten(range(len(leaves)))
    tree = run.codec.unpack(numbered)
    assert run.codec.pack(tree) == numbered
    expected = jax.eval_shape(functools.partial(stored_by, name), plain_params())
    assert jax.tree.structure(tree.params) == jax.tree.structure(expected)

    axes, whole_axes = by_name(run.model.param_axes), by_name(plain.model.param_axes)
    shapes, whole_shapes = (
        {name: leaf.shape for name, leaf in by_name(it.model.abstract[0]).items()} for it in (run, plain)
    )
    assert axes.keys() == shapes.keys()
    parts = {}  # per part: its owner, and which axes of the owner it has
    for part, shape in shapes.items():
        owner = next(owner for owner in whole_axes if f"{part}/".startswith(f"{owner}/"))
        # A part may lack only trailing axes.
        parts[part] = owner, [n > 1 and size % n == 0 for size, n in zip(whole_shapes[owner], shape, strict=False)]
    for part, (owner, has) in parts.items():
        assert list(axes[part]) == [axis if it else None for axis, it in zip(whole_axes[owner], has, strict=False)]
    incomplete = [part for part, (_, has) in parts.items() if not all(has)]
    assert len(incomplete) == {"padded": 6, "mixed": 1}.get(name, 0)
    for kind in ("compute", "storage"):
        specs, whole_specs = (by_name(getattr(it.param_shardings, kind)) for it in (run, plain))
        for part, (owner, has) in parts.items():
            spec = [axis if it else None for axis, it in zip(whole_specs[owner].spec, has, strict=False)]
            assert list(specs[part].spec) == spec, (kind, part)
            assert ("data" in str(spec)) == (kind == "storage"), (kind, part)

    built = get_abstract_state_nnx(run.config, run.mesh, init_state_fn(run.codec))
    assert built.shardings == run.states.shardings
    assert jax.tree.structure(built.state) == structure


def test_tiles_that_the_mesh_does_not_divide_are_on_all_devices():
    """4 tiles of 16 inputs, on 8 devices."""
    run = made("qarray", ici_fsdp_parallelism=8, per_device_batch_size=1)
    specs = {name: list(it.spec) for name, it in by_name(run.param_shardings.compute).items()}
    kernel = "decoder/layers/mlp/wi_0/kernel"
    whole = specs[f"{kernel}/qvalue"]
    assert "fsdp" in str(whole[1])
    assert specs[f"{kernel}/scale"] == [whole[0], None, whole[2]]


@functools.cache
def program_text(combination, scan):
    return lowered_update(made("mixed", combination, scan_layers=scan)).as_text()


@pytest.mark.rest(covered_by="the scanned step", cases=("False",))
@pytest.mark.parametrize("combination", ALL_COMBINATIONS[1:])
@pytest.mark.parametrize("scan", [True, False])
def test_the_step_is_the_same_program_in_all_combinations(scan, combination):
    assert program_text(combination, scan) == program_text(ALL_COMBINATIONS[0], scan)


def test_a_model_of_all_types_is_the_plain_model_of_their_values():
    run, plain = made("mixed"), made()
    batch = packed_batch(run.config, 2)
    inputs = [batch[field] for field in ("inputs", "inputs_position", "inputs_segmentation", "row")]

    def hidden(run):
        return jax.jit(lambda params: run.model.apply(params, {}, *inputs)[0])

    params = stored_params("mixed")
    values = jax.jit(as_floats)(params)
    kernel = values["decoder"]["layers"]["mlp"]["wi_1"]["kernel"]
    np.testing.assert_allclose(kernel, plain_params()["decoder"]["layers"]["mlp"]["wi_1"]["kernel"], atol=0.02)
    np.testing.assert_allclose(hidden(run)(params), hidden(plain)(values), atol=1e-6)


def stepped(run, tree, steps=1):
    """Runs steps from the canonical state `tree`, and returns their losses and the final canonical state."""
    state, step, losses = state_from(run, tree), run.compile(), []
    for i in range(steps):
        state, metrics = step(state, placed(run, packed_batch(run.config, ROWS, seed=i)), ())
        losses.append(run.computation.read(metrics, i)["loss"])
    return losses, copied(run.codec.unpack(state))


def test_training_around_the_frozen_integers_of_all_types():
    """With a stateful optimizer. Steps of the last combination on a mesh with Zero-1 have the same loss."""
    keys = {"sgd_momentum": 0.9, "gradient_clipping_threshold": 0}
    tree = tree_of("mixed", made("mixed", **keys))
    losses, trained = stepped(made("mixed", **keys), tree, 2)
    assert jax.tree.structure(trained.params) == jax.tree.structure(tree.params)  # including the static parts
    before = by_name(tree.params)
    for name, leaf in by_name(trained.params).items():
        assert (leaf == before[name]).all() == name.endswith(("/qvalue", "/zero_point", "out/kernel")), name
    assert not any("qvalue" in name for name in by_name(trained.opt_state))
    assert any(name.endswith("mlp/wo/kernel/awq_scale") for name in by_name(trained.opt_state))
    on_mesh = stepped(made("mixed", ALL_COMBINATIONS[-1], **keys | ZERO1), tree, 2)
    np.testing.assert_allclose(on_mesh[0], losses, rtol=1e-5)


@pytest.mark.rest(covered_by="stored experts in unit/products/test_stored.py")
def test_experts_that_are_stored_as_qarrays():
    """On devices that hold different experts, different tiles of inputs, and a share of the hidden units."""
    keys = {"num_experts": 4, "num_experts_per_tok": 2, "base_moe_mlp_dim": 32, "base_num_decoder_layers": 1}
    alone = made("experts", **keys)
    tree = copied(alone.codec.unpack(alone.init()))
    losses, trained = stepped(alone, tree)
    mesh = {"ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2, "ici_expert_parallelism": 2}
    run = made("experts", **keys, **mesh, per_device_batch_size=1)
    specs = {name: list(sharding.spec) for name, sharding in by_name(run.param_shardings.compute).items()}
    for name in ("wi_0", "wo"):
        kernel = f"decoder/layers/MoeBlock_0/{name}"
        assert specs[f"{kernel}/scale"] == specs[f"{kernel}/qvalue"]
        assert None not in specs[f"{kernel}/scale"][1:]
    on_mesh, spread = stepped(run, tree)
    np.testing.assert_allclose(on_mesh, losses, rtol=1e-5)
    before = by_name(tree.params)
    for name, leaf in by_name(spread.params).items():
        change = by_name(trained.params)[name].astype(float) - before[name]
        np.testing.assert_allclose(leaf - before[name], change, atol=2e-5 * np.abs(change).max() + 1e-9, err_msg=name)
        assert change.any() == name.endswith(("scale", "embedding")), name


@pytest.mark.parametrize("name", [*TYPES, "int4", "fp8"])
def test_a_checkpoint_keeps_arrays_static_parts_and_shardings(tmp_path, name):
    run = made(name, **ZERO1)
    tree = tree_of(name, run)
    state = run.codec.unpack(state_from(run, tree))
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)
    restored = restore(saved(tmp_path, tree=state), abstract)
    assert_equal_bits(copied(restored), tree)
    assert {leaf.sharding for leaf in jax.tree.leaves(restored)} == {it.sharding for it in jax.tree.leaves(abstract)}

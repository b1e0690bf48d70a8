"""Parameters that are stored as a pytree: int8 with scales, in training, in checkpoints and in generation."""

import functools

import jax
import numpy as np
import pytest
from manager_cases import saved
from stored_int8 import FROZEN, as_floats
from support import ALL_COMBINATIONS, arguments, assert_equal_bits, copied, packed_batch, state_from

from trainer.checkpoint.manager import restore
from trainer.config.errors import UserError
from trainer.config.load import load
from trainer.inference.max_engine import MaxEngine
from trainer.inference.scheduler import Scheduler
from trainer.layers.sown import MtpHidden
from trainer.objectives.base import prepared
from trainer.objectives.forward import ahead_of
from trainer.ops.paths import by_name
from trainer.training.batches import placed
from trainer.training.build import build

DENSE = {"decoder_block": "stored_int8:dense", "logits_via_embedding": False}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "base_moe_mlp_dim": 32, "base_num_decoder_layers": 1}
MESH = {"ici_data_parallelism": 2, "ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2, "per_device_batch_size": 1}
# One combination per native state; the other combinations with that state have the same program.
ENDS = sorted({ALL_COMBINATIONS[0], ALL_COMBINATIONS[-1]})
ROWS = 8


def made(combination=ALL_COMBINATIONS[0], **keys):
    keys = {"per_device_batch_size": ROWS, "sharding_tolerance": 1, "opt_type": "sgd", "learning_rate": 0.1} | keys
    devices = 8 if any("parallelism" in key for key in keys) else 1
    return build(load(arguments(combination, **keys)).config, jax.devices()[:devices])


def stepped(run, tree, steps=1):
    """Runs steps from the canonical state `tree`, and returns their losses and the final canonical state."""
    state, step, losses = state_from(run, tree), run.compile(), []
    for i in range(steps):
        state, metrics = step(state, placed(run, packed_batch(run.config, ROWS, seed=i)), ())
        losses.append(run.computation.read(metrics, i)["loss"])
    return losses, copied(run.codec.unpack(state))


@functools.cache
def initial(**keys):
    run = made(**keys)
    return copied(run.codec.unpack(run.init()))


@pytest.mark.rest(covered_by="unit/products/test_qwix_types.py")
def test_a_model_of_integers_is_the_plain_model_of_their_values():
    """In all combinations. Every matrix is stored as integers except the embedding table, which is looked up."""

    def logits(combination, **keys):
        run = made(combination, mtp_num_layers=1, **keys)
        batch = prepared(run.objective, packed_batch(run.config, 2))

        def of(params):
            inputs = [batch[name] for name in ("inputs", "inputs_position", "inputs_segmentation", "row")]
            hidden, sown, _ = run.model.apply(params, {}, *inputs, capture=(MtpHidden,), ahead=ahead_of(batch))
            return run.model.apply(params, {}, hidden, method="head")[0], sown

        return of

    params = initial(mtp_num_layers=1, **DENSE, **FROZEN).params
    lowered = [jax.jit(logits(combination, **DENSE, **FROZEN)).lower(params) for combination in ALL_COMBINATIONS]
    assert len({it.as_text() for it in lowered}) == 1
    plain = jax.jit(logits(ALL_COMBINATIONS[0], logits_via_embedding=False))
    assert_equal_bits(lowered[0].compile()(params), plain(as_floats(params)))


@pytest.mark.parametrize("combination", ALL_COMBINATIONS)
def test_the_parts_of_a_parameter_are_sharded_like_it(combination):
    """In every combination, with and without Zero-1; the plain model shows how the whole kernel is sharded."""
    keys = {"mtp_num_layers": 1, **FROZEN, **MESH, "shard_optimizer_over_data": True}
    run = made(combination, **DENSE, **keys)
    plain = made(combination, logits_via_embedding=False, mtp_num_layers=1, **MESH, shard_optimizer_over_data=True)
    axes, whole_axes = by_name(run.model.param_axes), by_name(plain.model.param_axes)
    shapes = {name: leaf.shape for name, leaf in by_name(run.model.abstract[0]).items()}
    assert axes.keys() == shapes.keys()
    assert sum(name.endswith("/q") for name in axes) == 7 + 1 + 7 + 1
    for kind in ("compute", "storage"):
        specs, whole_specs = (by_name(getattr(it.param_shardings, kind)) for it in (run, plain))
        for name, names in axes.items():
            owner, _, part = name.rpartition("/")
            if not owner.endswith("kernel"):
                assert (names, specs[name]) == (whole_axes[name], whole_specs[name])
                continue
            kept = [size > 1 for size in shapes[name]]
            assert part == "scale" or all(kept)
            expected = [axis if keep else None for axis, keep in zip(whole_axes[owner], kept, strict=True)]
            assert list(names) == expected, name
            if part == "q" or kind == "compute":
                spec = [axis if keep else None for axis, keep in zip(whole_specs[owner].spec, kept, strict=True)]
                assert list(specs[name].spec) == spec, name
    storage = by_name(run.param_shardings.storage)
    assert "data" in str(storage["decoder/layers/mlp/wo/kernel/q"].spec)
    assert "data" in str(storage["decoder/layers/mlp/wi_0/kernel/scale"].spec)
    found = {tensor.name: tensor for tensor in jax.tree.leaves(run.states.tensors)}
    assert found["params/decoder/layers/mlp/wi_0/kernel/q"].axes == ("layers", "embed", "mlp")
    assert found["params/decoder/layers/mlp/wi_0/kernel/q"].of_parameter
    assert found["params/decoder/layers/self_attention/out/kernel/scale"].axes == ("layers", None, None, "embed")


@pytest.mark.rest(covered_by="unit/products/test_qwix_types.py")
def test_training_around_frozen_integers_is_the_same_program_and_result():
    """NNX and Linen, with a stateful optimizer. A step on a mesh with Zero-1 has the same loss."""
    keys = DENSE | FROZEN | {"opt_type": "adamw", "learning_rate": 1e-3, "mtp_num_layers": 1}
    tree = initial(**keys)
    (losses, trained), (others, other) = (stepped(made(combination, **keys), tree, 2) for combination in ENDS)
    assert losses == others
    assert_equal_bits(trained, other)
    before, after = by_name(tree.params), by_name(trained.params)
    for name, leaf in after.items():
        assert (leaf == before[name]).all() == name.endswith("/q"), name
    assert not any("kernel/q" in name for name in by_name(trained.opt_state))
    on_mesh = stepped(made(**keys | MESH, shard_optimizer_over_data=True), tree, 2)
    np.testing.assert_allclose(on_mesh[0], losses, rtol=1e-5)


def test_integers_have_no_gradient():
    with pytest.raises(
        UserError, match=r"wi_0/kernel/q.*: integers and .* cannot be trained: set trainable_parameters_mask"
    ):
        made(**DENSE)


@pytest.mark.rest(covered_by="experts in groups", cases=("capacity", "all"))
@pytest.mark.parametrize("dispatch", ["groups", "capacity", "all"])
def test_experts_that_are_stored_as_integers(dispatch):
    """With experts and hidden units split over devices, the step equals that of one device."""
    how = {"groups": {}, "capacity": {"sparse_matmul": False, "capacity_factor": 1.0}, "all": {"sparse_matmul": False}}
    keys = EXPERTS | FROZEN | {"decoder_block": "stored_int8:experts"} | how[dispatch]
    tree = initial(**keys)
    losses, alone = stepped(made(**keys), tree)
    mesh = {"ici_fsdp_parallelism": 2, "ici_tensor_parallelism": 2, "ici_expert_parallelism": 2}
    run = made(**keys, **mesh, per_device_batch_size=1)
    specs = {name: sharding.spec for name, sharding in by_name(run.param_shardings.compute).items()}
    layer = "decoder/layers/MoeBlock_0"
    assert specs[f"{layer}/wi_0/q"][1] == "expert"
    assert list(specs[f"{layer}/wi_0/scale"]) == [None, "expert", None, specs[f"{layer}/wi_0/q"][3]]
    on_mesh, spread = stepped(run, tree)
    np.testing.assert_allclose(on_mesh, losses, rtol=1e-5)
    before = by_name(tree.params)
    for name, leaf in by_name(spread.params).items():
        change = by_name(alone.params)[name] - before[name]
        np.testing.assert_allclose(leaf - before[name], change, atol=2e-5 * np.abs(change).max() + 1e-9, err_msg=name)
        assert change.any() == (not name.endswith("/q")), name


@pytest.mark.rest(covered_by="tiles in unit/objectives/test_tiling.py")
def test_a_tiled_head_that_is_stored_as_integers():
    keys = DENSE | FROZEN | MESH
    tree = initial(**DENSE, **FROZEN)
    (losses, whole), (others, tiled) = (stepped(made(**keys, num_vocab_tiling=n), tree) for n in (1, 4))
    np.testing.assert_allclose(others, losses, rtol=1e-5)
    head, head_tiled, before = (it.params["decoder"]["logits_dense"]["kernel"] for it in (whole, tiled, tree))
    change = head["scale"] - before["scale"]
    assert change.any()
    np.testing.assert_allclose(head_tiled["scale"] - before["scale"], change, atol=1e-5 * np.abs(change).max())
    assert (head_tiled["q"] == before["q"]).all()


@pytest.mark.rest(covered_by="unit/products/test_qwix_types.py")
def test_a_checkpoint_has_the_parts(tmp_path):
    run, tree = made(**DENSE, **FROZEN, **MESH), initial(**DENSE, **FROZEN)
    state = run.codec.unpack(state_from(run, tree))
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)
    restored = restore(saved(tmp_path, tree=state), abstract)
    assert_equal_bits(copied(restored), tree)
    kernel = restored.params["decoder"]["layers"]["mlp"]["wi_0"]["kernel"]
    assert kernel["q"].sharding == abstract.params["decoder"]["layers"]["mlp"]["wi_0"]["kernel"]["q"].sharding


@pytest.mark.rest(covered_by="generation in unit/inference/test_weights.py")
@pytest.mark.parametrize("combination", ENDS)
def test_generation_with_integers(combination):
    """The tokens equal those of a plain model with the same values."""
    keys = {"per_device_batch_size": 1, "max_target_length": 16, "decode_sampling_strategy": "greedy"}

    def tokens(params, **keys):
        devices = jax.devices()[:2]
        engine = MaxEngine(load(arguments(combination, **keys)).config, devices)
        scheduler = Scheduler(engine, engine.load_params(params))
        scheduler.submit([5, 0, 17])
        return [event.token for event in scheduler.run()]

    mesh = {"ici_tensor_parallelism": 2, "ici_fsdp_parallelism": 1}
    drawn = tokens(initial(**DENSE, **FROZEN).params, **DENSE, **keys, **mesh)
    assert len(set(drawn)) > 1
    assert drawn == tokens(as_floats(initial(**DENSE, **FROZEN).params), logits_via_embedding=False, **keys, **mesh)

"""N:M weight sparsity in training: the masks, what changes them, and their effects."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import (
    ALL_COMBINATIONS,
    arguments,
    assert_equal_bits,
    copied,
    first_tree,
    lowered_update,
    model_of,
    packed_batch,
    state_from,
    tiny_config,
)

from trainer.backends.registry import make_model
from trainer.config.errors import UserError
from trainer.config.load import load
from trainer.models.matrices import check_matrices
from trainer.ops.paths import by_name
from trainer.state.diloco import without_islands
from trainer.training.batches import placed
from trainer.training.build import build
from trainer.weights.masks import check_masks

FIRST, LAST = ALL_COMBINATIONS[0], ALL_COMBINATIONS[-1]
START, EVERY = 2, 2
SPARSE = {
    "weight_sparsity_n": 1,
    "weight_sparsity_m": 4,
    "weight_sparsity_start_step": START,
    "weight_sparsity_update_step": EVERY,
}
EXPERTS = {"decoder_block": "mixtral", "num_experts": 4, "num_experts_per_tok": 2, "base_moe_mlp_dim": 32}
KEYS = SPARSE | EXPERTS | {"base_num_decoder_layers": 1, "learning_rate": 0.05, "warmup_steps_fraction": 0.0}
KEYS |= {"gradient_clipping_threshold": 0}
LAYER = "decoder/layers"
ATTENTION = [f"{LAYER}/self_attention/{name}" for name in ("query", "key", "value", "out")]
OF_EXPERTS = [f"{LAYER}/MoeBlock_0/{name}" for name in ("wi_0", "wi_1", "wo")]
# The name of each kernel's mask.
MASKS = {f"{name}/kernel": f"{name}/product/mask" for name in ATTENTION}
MASKS |= {name: f"{name.replace('MoeBlock_0', 'MoeBlock_0/product')}/mask" for name in OF_EXPERTS}
ROWS = 8


def made(combination=FIRST, devices=1, **overrides):
    keys = KEYS | {"per_device_batch_size": ROWS / devices} | overrides
    return build(load(arguments(combination, **keys)).config, jax.devices()[:devices])


def batch_of(run, seed=0, padding=False):
    batch = packed_batch(run.config, ROWS, seed)
    batch |= {"targets_segmentation": np.zeros_like(batch["targets_segmentation"])} if padding else {}
    return placed(run, batch)


@functools.cache
def compiled(combination=FIRST, **overrides):
    """Returns a run, its compiled step, and its first TrainTree."""
    run = made(combination, **overrides)
    rest = copied(jax.jit(lambda key: run.model.init(key)[1])(jax.random.key(0)))
    return run, run.compile(), first_tree(run)._replace(rest=rest)


@functools.cache
def trained(combination=FIRST, padding=(), **overrides):
    """Returns a run, its compiled step, its TrainTree before and after each of five steps, and the losses.

    The steps in `padding` have no loss.
    """
    run, step, begin = compiled(combination, **overrides)
    state, trees, losses = state_from(run, begin), [begin], []
    for i in range(5):
        state, metrics = step(state, batch_of(run, i, i in padding), ())
        trees.append(copied(run.codec.unpack(state)))
        losses.append(run.computation.read(metrics, i)["loss"])
    return run, step, trees, losses


def blocks_of(array, kernel):
    """Reshapes an array with the shape of a stacked kernel to [..., blocks, m, outputs]."""
    grouped, two_inputs = "MoeBlock_0" in kernel, kernel.endswith("out/kernel")
    above = array.shape[: 2 if grouped else 1]
    inputs = np.prod(array.shape[len(above) : len(above) + 1 + two_inputs])
    return np.reshape(array, (*above, inputs // 4, 4, -1))


def expected_mask(kernel, value):
    magnitudes = np.abs(blocks_of(value, kernel))
    largest = magnitudes.argmax(-2, keepdims=True)
    return np.reshape(np.arange(4)[:, None] == largest, value.shape)


def masks_of(tree):
    return {kernel: by_name(tree.rest)[mask] for kernel, mask in MASKS.items()}


def test_masks_are_made_from_the_updated_parameters_in_due_steps():
    trees = trained()[2]
    assert set(by_name(trees[0].rest)) == set(MASKS.values())  # routers, table and head stay dense
    for steps, tree in enumerate(trees):
        due = list(range(START, steps + 1, EVERY))
        for kernel, mask in masks_of(tree).items():
            value = by_name(trees[due[-1]].params)[kernel] if due else None
            expected = np.ones_like(mask) if value is None else expected_mask(kernel, value)
            np.testing.assert_array_equal(mask, expected, err_msg=f"{kernel} after {steps} steps", strict=True)
            assert (blocks_of(mask, kernel).sum(-2) == (1 if due else 4)).all()
    changed = [name for name, mask in masks_of(trees[4]).items() if (mask != masks_of(trees[2])[name]).any()]
    assert changed == list(MASKS), "weights return, and others leave"


def test_a_masked_weight_gets_no_gradient_and_the_product_is_that_of_zeros():
    """Loss and gradients equal those of a dense model whose masked weights are zero."""
    trees = trained()[2]
    params, rest = trees[4].params, trees[4].rest
    sparse_model = model_of(tiny_config(FIRST, **KEYS))
    dense_model = model_of(tiny_config(FIRST, **KEYS | {"weight_sparsity_n": "none", "weight_sparsity_m": "none"}))
    batch = packed_batch(sparse_model.config, 2)
    inputs = [batch[name] for name in ("inputs", "inputs_position", "inputs_segmentation", "row")]
    masks = masks_of(trees[4])
    zeroed = jax.tree_util.tree_unflatten(
        jax.tree.structure(params),
        [np.where(masks[name], leaf, 0) if name in masks else leaf for name, leaf in by_name(params).items()],
    )

    def gradients(model, params, rest):
        loss = lambda params: jnp.sum(jnp.sin(3 * model.apply(params, rest, *inputs)[0]))  # noqa: E731
        return jax.device_get(jax.jit(jax.value_and_grad(loss))(params))

    loss, grads = gradients(sparse_model, params, rest)
    same, others = gradients(dense_model, zeroed, {})
    assert loss == same
    others = by_name(others)
    for name, grad in by_name(grads).items():
        np.testing.assert_array_equal(grad, np.where(masks[name], others[name], 0) if name in masks else others[name])
        assert name not in masks or (others[name] != grad).any()


def test_a_skipped_step_leaves_the_masks():
    """Step 4 is due but skipped, so the masks of step 2 remain until step 6."""
    trees, skipping = trained()[2], trained(padding=(3,))[2]
    assert_equal_bits(skipping[3], trees[3])
    assert_equal_bits(skipping[4].rest, trees[2].rest)
    assert (skipping[4].step, skipping[5].step) == (4, 5)
    assert_equal_bits(skipping[5].rest, trees[2].rest)


FP8 = {"quantization": "fp8_full"}


@functools.cache
def with_fp8(combination):
    run = made(combination, **FP8)
    return run, lowered_update(run)


@pytest.mark.parametrize("combination", ALL_COMBINATIONS)
def test_all_combinations_are_one_program_and_no_intermediates_stay_in_the_state(combination):
    """After a step, the native state has the same structure, shapes and dtypes as before.

    Uses fp8, because MaxText's Linen model leaked intermediates with it.
    """
    run, lowered = with_fp8(combination)
    tree = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), lowered.out_info[0])
    assert set(by_name(tree.rest)) == set(MASKS.values())
    assert jax.eval_shape(run.codec.pack, tree) == run.abstract_state
    text = lowered.as_text()
    assert text == with_fp8(FIRST)[1].as_text()
    assert "f8E4M3FN" in text
    assert "f8E5M2" in text


@pytest.mark.rest(covered_by="Qwix's order in products; one program with fp8_full")
def test_fp8_takes_its_scales_from_the_weights_that_are_used():
    """The loss differs from the dense model's, and scaling the masked weights up does not change it."""
    run, step, trees, losses = trained(combination=LAST, **FP8)
    masks, tree = masks_of(trees[3]), trees[3]

    def loss(tree):
        _, metrics = step(state_from(run, tree), batch_of(run, 3), ())
        return run.computation.read(metrics, 3)["loss"]

    assert loss(tree._replace(rest=trees[1].rest)) != losses[3], "the masks of a dense model"
    names = by_name(tree.params)
    scaled = [np.where(masks[name], leaf, 100 * leaf) if name in masks else leaf for name, leaf in names.items()]
    other = tree._replace(params=jax.tree.unflatten(jax.tree.structure(tree.params), scaled))
    assert loss(other) == losses[3]


@pytest.mark.rest(covered_by="masks of one device; other buffers on meshes")
def test_a_mesh_makes_the_masks_of_one_device():
    """Masks are sharded like their kernels."""
    mesh = {"ici_fsdp_parallelism": 2, "ici_expert_parallelism": 2, "ici_tensor_parallelism": 2}
    _, _, trees, losses = trained()
    run = made(LAST, 8, **mesh)
    step, state = run.compile(), state_from(run, trees[0])
    for i in range(START):
        state, _ = step(state, batch_of(run, i), ())
    tree = run.codec.unpack(state)
    for kernel, mask in MASKS.items():
        value, found = by_name(tree.params)[kernel], by_name(tree.rest)[mask]
        assert found.sharding == value.sharding, kernel
        np.testing.assert_array_equal(found, expected_mask(kernel, np.asarray(value)), kernel)
        # Summing in another order may swap the ranks of two nearly equal weights.
        assert (np.asarray(found) == masks_of(trees[START])[kernel]).mean() > 0.99
    _, metrics = step(state, batch_of(run, START), ())
    np.testing.assert_allclose(run.computation.read(metrics, START)["loss"], losses[START], rtol=1e-3)


@pytest.mark.rest(covered_by="masks of one device; other buffers on meshes")
def test_islands_have_masks_of_their_own_until_they_synchronize():
    islands = {"enable_diloco": True, "ici_diloco_parallelism": 2, "diloco_sync_period": 3}
    run = made(devices=2, **islands, weight_sparsity_update_step=1)
    step, state = run.compile(), run.init()
    for i in range(3):
        state, _ = step(state, batch_of(run, i), ())
        tree = copied(run.codec.unpack(state))
        found, outer = by_name(tree.inner_state.rest), by_name(without_islands(tree)[1])
        for kernel, mask in MASKS.items():
            per_block = [blocks_of(of_island, kernel).sum(-2) for of_island in found[mask]]
            assert (np.array(per_block) == (1 if i + 1 >= START else 4)).all()
            assert (found[mask][0] != found[mask][1]).any() == (i == 1), (kernel, i)
            np.testing.assert_array_equal(outer[mask], found[mask][0])


def test_what_is_refused():
    def refusal(check=make_model, **keys):
        with pytest.raises(UserError) as error:
            check(tiny_config(FIRST, **SPARSE | keys))
        return str(error.value)

    assert refusal(check_matrices, weight_sparsity_m=12).splitlines()[:2] == [
        "weight_sparsity_m=12 does not divide the number of inputs of",
        "  decoder/layers/mlp/wi_0/kernel: 16",
    ]
    assert "must be 1 <= n < m" in refusal(weight_sparsity_n=4)
    assert "both are needed" in refusal(weight_sparsity_m="none")
    stored = refusal(decoder_block="stored_int8:dense", trainable_parameters_mask="[scale$,embedding]")
    assert "mlp/wi_0/kernel is stored in a format of its product that does not support masks" in stored


def test_a_checkpoint_without_masks_is_not_exported_as_a_sparse_one():
    class Source:
        path = "some/folder"
        held = staticmethod(lambda config, shapes: {})

    config = tiny_config(FIRST, **SPARSE)
    shapes = {name: leaf.shape for name, leaf in by_name(model_of(config).abstract[1]).items()}
    with pytest.raises(UserError, match="some/folder: it has no weight masks; leave out weight_sparsity_n and"):
        check_masks(config, Source, shapes)
    Source.held = staticmethod(lambda config, shapes: shapes.keys())
    check_masks(config, Source, shapes)
    check_masks(tiny_config(FIRST), Source, {})


def test_the_masks_of_other_models():
    """A family's custom product receives the masked kernel; multi-token prediction modules are dense."""
    adapted = model_of(tiny_config(FIRST, **KEYS | {"decoder_block": "docs.guides.own_product:FAMILY"}))
    params, rest = map(by_name, adapted.abstract)
    assert set(rest) == set(MASKS.values())
    assert {f"{LAYER}/self_attention/query/product/inner/down", f"{LAYER}/MoeBlock_0/product/wi_0/inner/up"} <= set(
        params
    )
    modules = model_of(tiny_config(FIRST, **KEYS | {"mtp_num_layers": 1, "logits_via_embedding": False}))
    assert set(by_name(modules.abstract[1])) == set(MASKS.values())

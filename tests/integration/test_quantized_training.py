"""Training with quantized products: which are quantized, in every combination, on meshes, and in whole runs."""

import dataclasses
import functools
import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import ClosedJaxpr, Jaxpr
from run_cases import train
from support import (
    ALL_COMBINATIONS,
    EVERY_MATRIX,
    arguments,
    assert_equal_bits,
    copied,
    first_tree,
    model_of,
    packed_batch,
    state_from,
    tiny_config,
)

from trainer.config.capabilities.quantization_keys import RECIPES
from trainer.config.errors import UserError
from trainer.config.load import load
from trainer.layers.sown import MtpHidden
from trainer.models.matrices import check_matrices, quantized_and_float
from trainer.models.quantization import quantization_rules
from trainer.objectives.base import prepared
from trainer.objectives.forward import ahead_of
from trainer.objectives.registry import make_objective
from trainer.products.quantized import Calibration, Recipe
from trainer.training.batches import placed
from trainer.training.build import build

FIRST, LAST = ALL_COMBINATIONS[0], ALL_COMBINATIONS[-1]
ALL_KINDS = EVERY_MATRIX | {"mtp_num_layers": 1}
EXPERTS = {"decoder_block": "mixtral", "num_experts": 4, "num_experts_per_tok": 2, "base_moe_mlp_dim": 32}
EVERYTHING = {"quantize_logits_proj": True, "quantize_mtp": True}
ROWS, LENGTH = 4, 128


def gradient_of(config):
    """Returns a function whose program has all products of a training step, forward and backward, and its argument."""
    model = model_of(config)
    batch = prepared(make_objective(config, model), packed_batch(config, 2))
    inputs = [batch[name] for name in ("inputs", "inputs_position", "inputs_segmentation", "row")]
    params, rest = model.abstract

    def loss(params, rest):
        ways = {"capture": (MtpHidden,), "key": jax.random.key(0), "ahead": ahead_of(batch)}
        hidden, sown, _ = model.apply(params, rest, *inputs, **ways)
        hiddens = [hidden, *jax.tree.leaves(sown)]
        return sum(jnp.sin(model.apply(params, rest, x, method="head")[0]).sum() for x in hiddens)

    return jax.grad(loss), (params, rest)


@functools.cache
def program_text(combination, recipe):
    rounding = {"bwd_stochastic_rounding": "uniform"} if recipe.startswith("int") else {}
    keys = {"base_num_decoder_layers": 1, "quantization": recipe, **rounding, **(EXPERTS if rounding else {})}
    fn, args = gradient_of(tiny_config(combination, **keys))
    return jax.jit(fn).lower(*args).as_text()


@pytest.mark.rest(
    covered_by="int8, fp8_full", cases=("int4", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_gpu", "fp8_nanoo", "nanoo_fp8")
)
@pytest.mark.parametrize("combination", ALL_COMBINATIONS[1:])
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_program_is_the_same_in_all_combinations(recipe, combination):
    expected = program_text(FIRST, recipe)
    kind = {"int8": "xi8>", "int4": "xi8>"}.get(recipe, "xf8E")  # on a CPU, int4 is multiplied as int8
    assert re.search(rf"dot_general .*{kind}", expected)
    assert program_text(combination, recipe) == expected


def products_in(jaxpr):
    """Counts the products of a program by the dtypes of their operands. A loop body counts once."""
    found = Counter()
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("dot_general", "ragged_dot_general"):
            found[tuple(variable.aval.dtype.name for variable in equation.invars[:2])] += 1
        for value in jax.tree.leaves(equation.params, is_leaf=lambda x: isinstance(x, ClosedJaxpr | Jaxpr)):
            if isinstance(value, ClosedJaxpr | Jaxpr):
                found += products_in(getattr(value, "jaxpr", value))
    return found


DISPATCH = {"sorted": {}, "all": {"sparse_matmul": False, "capacity_factor": -1}}


@pytest.mark.rest(covered_by="experts by sorted rows", cases=("all",))
@pytest.mark.parametrize("dispatch", DISPATCH)
def test_no_product_with_a_matrix_is_missing(dispatch):
    """Each matrix has three products: the forward product, the activation gradient and the matrix gradient."""

    def found(**keys):
        config = tiny_config(FIRST, base_num_decoder_layers=2, **ALL_KINDS | DISPATCH[dispatch] | keys)
        fn, args = gradient_of(config)
        quantized, left = quantized_and_float(config, model_of(config).param_axes)
        return products_in(jax.make_jaxpr(fn)(*args).jaxpr), quantized, left

    plain, none, _ = found()
    assert none == []
    float_products = plain.total()
    for keys in (EVERYTHING, {"unquantized_modules": "[gate,self_attention/out]"}):
        counts, quantized, left = found(quantization="int8", **keys)
        heads = 2 if "decoder/logits_dense/kernel" in quantized else 0  # the module uses the head, too
        experts = sum("/MoeBlock_0/w" in name for name in quantized) if dispatch == "sorted" else 0
        of_integers = 3 * (len(quantized) + max(heads - 1, 0))
        assert counts["int8", "int8"] == of_integers
        # In the forward pass, Qwix applies each expert's scales to sorted rows with a float product.
        assert counts.total() == float_products + experts
        assert sorted(quantized) == sorted({*quantized} - {*left})
    assert "decoder/moe_layers/DeepSeekMoeBlock_0/MoeBlock_0/gate/kernel" in left
    assert "decoder/dense_layers/self_attention/out/kernel" in left
    assert "token_embedder/embedding" in left


def test_what_stays_float():
    def names(**keys):
        config = tiny_config(FIRST, quantization="int8", **keys)
        check_matrices(config)
        return quantized_and_float(config, model_of(config).param_axes)

    quantized, left = names()
    layer = "decoder/layers/"
    attention = [f"{layer}self_attention/{name}/kernel" for name in ("query", "key", "value", "out")]
    assert sorted(quantized) == sorted([*attention, *(f"{layer}mlp/{name}/kernel" for name in ("wi_0", "wi_1", "wo"))])
    assert left == ["token_embedder/embedding"]
    assert names(quantize_logits_proj=True)[1] == []  # a tied head: the embedding lookup needs a float table
    assert names(**EXPERTS, quantize_router_proj=False)[1] == [
        f"{layer}MoeBlock_0/gate/kernel",
        "token_embedder/embedding",
    ]
    with pytest.raises(UserError, match=r"unquantized_modules: wi_2 matches no matrix; .*mlp/wi_0"):
        names(unquantized_modules="[wi_2]")


class OwnProducts(nnx.Module):
    """A block that creates its product itself, so that quantization cannot replace it."""

    def __init__(self, config, rngs):
        self.linear = nnx.Linear(config.base_emb_dim, config.base_emb_dim, rngs=rngs)

    def __call__(self, x, cache, context):
        return self.linear(x), cache


@pytest.mark.parametrize("keys", [{"quantization": "int8"}, {"weight_sparsity_n": 2, "weight_sparsity_m": 4}])
def test_keys_that_choose_no_matrix_are_refused(keys):
    words = arguments(FIRST, decoder_block=f"{__name__}:OwnProducts", logits_via_embedding=False, **keys)
    with pytest.raises(
        UserError, match=r"(quantization=int8: no matrix is quantized|sparsity_m=4: no matrix is masked);"
    ):
        build(load(words).config, jax.devices()[:1])


def test_the_keys_are_the_recipe():
    """The keys determine the recipes of the layers and of the head."""
    keys = {
        "act_quantization_calibration_method": "RMS,1",
        "weight_quantization_calibration_method": "rms,2",
        "bwd_quantization_calibration_method": "rms,3",
        "quantization_local_shard_count": 5,
    }

    def recipes(**more):
        (*_, (_, head), (_, layers)) = quantization_rules(tiny_config(FIRST, **keys | more))
        return layers.args[0], head.args[0]

    expected = Recipe("int8", "int8", Calibration("rms,1", "rms,2", "rms,3", "rms,3"), True, "uniform", 5)
    layers, head = recipes(quantization="int8", bwd_stochastic_rounding="uniform")
    assert (layers, head) == (expected, dataclasses.replace(expected, rounding=""))
    more = {"drhs_grad_quantization_calibration_method": "rms,4", "logits_proj_quant_calibration_method": "rms,6"}
    layers, head = recipes(quantization="fp8_gpu", num_vocab_tiling=2, **more)
    gpu = ("float8_e4m3fn", "float8_e5m2")
    assert layers == Recipe(*gpu, Calibration("rms,1", "rms,2", "rms,3", "rms,4"), False, "", 5)
    assert head == Recipe(*gpu, Calibration("rms,6", "rms,6", "rms,3", "rms,4"), False, "", 1)
    of_amd = {recipes(quantization=name)[0] for name in ("fp8_nanoo", "nanoo_fp8")}
    assert {(it.forward, it.backward, it.per_channel) for it in of_amd} == {
        ("float8_e4m3fnuz", "float8_e5m2fnuz", False)
    }
    assert recipes(quantization="fp8")[0].backward == "float8_e4m3fn"


def test_a_step_rounds_stochastically():
    one = {"steps": 1, "start": initial(), "quantization_local_shard_count": 1}
    nearest, _, end = losses(**one)
    rounded, _, there = losses(**one, bwd_stochastic_rounding="uniform")
    assert rounded == nearest  # only the backward pass rounds stochastically
    kernels = (tree.params["decoder"]["layers"]["mlp"]["wo"]["kernel"] for tree in (end, there))
    assert not np.array_equal(*kernels)


@functools.cache
def initial():
    """Returns a random initial state, which no quantization key changes."""
    words = arguments(FIRST, opt_type="sgd", base_num_decoder_layers=1)
    return first_tree(build(load(words).config, jax.devices()[:1]))


@functools.cache
def built(devices, combination, keys):
    """Returns a run, and a function that compiles its step."""
    run = build(load(arguments(combination, **dict(keys))).config, jax.devices()[:devices])
    return run, functools.cache(run.compile)


def losses(steps=2, devices=1, combination=FIRST, start=None, **keys):
    keys = {"max_target_length": LENGTH, "opt_type": "sgd", "learning_rate": 0.1, "base_num_decoder_layers": 1} | keys
    keys = {"per_device_batch_size": ROWS * 2 / devices, "quantization": "int8"} | keys
    run, compiled = built(devices, combination, tuple(keys.items()))
    state, found = run.init() if start is None else state_from(run, start), []
    start = copied(run.codec.unpack(state))
    step = compiled() if steps else None
    for i in range(steps):
        batch = placed(run, packed_batch(run.config, run.rows, seed=i))
        state, metrics = step(state, batch, ())
        found.append(run.computation.read(metrics, i)["loss"])
    return found, start, copied(run.codec.unpack(state))


MESH = {
    "ici_data_parallelism": 2,
    "ici_fsdp_parallelism": 2,
    "ici_tensor_parallelism": 2,
    "shard_optimizer_over_data": True,
}


# On either side, a difference in the last bit may round to the neighbouring integer.
ROUNDED = {"rtol": 2e-4}


def test_a_mesh_computes_what_one_device_computes():
    """Scales cover the whole microbatch or each device's rows, depending on quantization_local_shard_count.

    tests/unit/products/test_quantized.py compares the product exactly.
    """
    alone, *_ = losses(start=initial(), quantization_local_shard_count=1)
    spread, *_ = losses(devices=8, start=initial(), quantization_local_shard_count=1, **MESH)
    np.testing.assert_allclose(spread, alone, **ROUNDED)
    parted, *_ = losses(quantization_local_shard_count=4, start=initial())  # the mesh shares rows among 4 devices
    own, *_ = losses(devices=8, start=initial(), **MESH)
    np.testing.assert_allclose(own, parted, **ROUNDED)


def test_one_bit_of_the_parameters_moves_the_loss_as_far_as_a_mesh():
    """So rounding, not different scales, explains the difference between meshes."""

    def moved(**keys):
        tree = initial()
        last_bit = jax.tree.map(lambda x: np.nextafter(x, np.float32(np.inf)), jax.device_get(tree.params))
        (before,), _, _ = losses(steps=1, start=tree, **keys)
        (after,), _, _ = losses(steps=1, start=tree._replace(params=last_bit), **keys)
        return abs(after / before - 1)

    assert 1e-6 < moved(quantization_local_shard_count=1) < ROUNDED["rtol"]
    assert moved(quantization="") < 1e-6


@pytest.mark.rest(covered_by="its product, in parts")
def test_accumulation_changes_nothing_if_each_row_has_its_scale():
    """Scales of weight gradients cover the tokens of a shard; all other scales cover one token."""
    rows = ROWS * 2
    one, start, _ = losses(quantization_local_shard_count=rows)
    halves = {"gradient_accumulation_steps": 2, "per_device_batch_size": ROWS}
    two, *_ = losses(quantization_local_shard_count=rows // 2, start=start, **halves)
    np.testing.assert_allclose(two[0], one[0], rtol=1e-6)
    np.testing.assert_allclose(two, one, **ROUNDED)


@pytest.mark.rest(covered_by="its product, also on a mesh")
def test_experts_on_their_devices_compute_what_one_device_computes():
    """A scale over the hidden units covers all of them, although each device has only a share."""
    mesh = {"ici_expert_parallelism": 2, "ici_tensor_parallelism": 2, "ici_fsdp_parallelism": 2}
    alone, start, _ = losses(**EXPERTS, quantize_router_proj=False)
    spread, *_ = losses(devices=8, start=start, **EXPERTS, **mesh, quantize_router_proj=False)
    np.testing.assert_allclose(spread[0], alone[0], **ROUNDED)
    np.testing.assert_allclose(spread, alone, rtol=1e-3)  # the update's scales cover a device's rows


@pytest.mark.rest(covered_by="its product, mapped; one program")
@pytest.mark.parametrize("keys", [EXPERTS, {"bwd_stochastic_rounding": "low_bit_uniform"}], ids=["experts", "rounding"])
def test_islands(keys):
    """Products inside vmap over islands."""
    islands = {"enable_diloco": True, "ici_diloco_parallelism": 2, "diloco_sync_period": 2, "ici_fsdp_parallelism": 1}
    found, *_ = losses(steps=3, devices=2, **islands, **keys)
    assert np.isfinite(found).all()
    assert found[-1] < found[0]


@pytest.mark.rest(covered_by="its product, also on a mesh")
def test_recomputing_and_keeping_quantized_operands_change_no_bit():
    keys = {"base_num_decoder_layers": 2, "bwd_stochastic_rounding": "uniform", "mtp_num_layers": 1}
    keys["quantize_mtp"] = True
    one, start, end = losses(steps=1, **keys)
    for policy in ("minimal_with_quantization", "full"):
        other, _, there = losses(steps=1, start=start, remat_policy=policy, **keys)
        assert other == one
        assert_equal_bits(there.params, end.params)


@pytest.mark.rest(covered_by="its product, also on a mesh")
def test_a_tiled_head_and_modules():
    keys = {"mtp_num_layers": 1, "quantization": "fp8_full", **EVERYTHING}
    one, start, _ = losses(**keys)
    tiled, *_ = losses(start=start, num_vocab_tiling=4, **keys)
    np.testing.assert_allclose(tiled[0], one[0], rtol=1e-6)
    np.testing.assert_allclose(tiled, one, rtol=1e-3)


@pytest.mark.rest(covered_by="its step; checkpoints in unit/products/test_qwix_types.py")
@pytest.mark.parametrize("combination", [FIRST, LAST])
def test_a_run_from_end_to_end(tmp_path, combination):
    """The run reports what is quantized, evaluates, stops and resumes.

    A float run's parameters are loaded; resuming with another recipe is refused.
    """
    keys = {"combination": combination, "steps": 4, "checkpoint_period": 2, "eval_interval": 2, "run_name": "a"}
    keys |= {"learning_rate_schedule_steps": 4}
    code, output = train(tmp_path, quantization="fp8_full", **keys)
    assert code == 0, output
    assert re.search(
        r"^quantized +fp8_full: decoder/layers \(mlp/wi_0, mlp/wi_1, mlp/wo, self_attention/key", output, re.M
    )
    assert re.search(r"^float +token_embedder/embedding$", output, re.M)
    code, output = train(tmp_path, quantization="int8", **keys | {"steps": 6})
    assert code == 2
    assert 'quantization: "fp8_full" -> "int8"' in output
    code, output = train(tmp_path, quantization="int8", load_parameters_path="runs/a", **keys | {"run_name": "b"})
    assert code == 0, output


@pytest.mark.rest(covered_by="one program")
def test_all_combinations_train_the_same_bits():
    keys = {"quantization": "int8", "bwd_stochastic_rounding": "uniform", **EXPERTS}
    found, start, end = losses(**keys)
    for combination in ALL_COMBINATIONS[1:]:
        others, _, there = losses(combination=combination, start=start, **keys)
        assert others == found
        assert_equal_bits(there, end)

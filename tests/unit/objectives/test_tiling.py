"""The loss in tiles of tokens against the loss of all tokens at once: values, gradients, collectives, memory.

tests/integration/test_five_combinations.py shows that it is the same program in all combinations, tied and untied.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support import arguments, packed_batch

from trainer.aot.collectives import collectives
from trainer.aot.hlo import parse
from trainer.config.load import load
from trainer.layers.param import param
from trainer.models import transformer
from trainer.models.llama2 import family as llama2
from trainer.products.plain import product
from trainer.training.batches import placed
from trainer.training.build import build

SCALE = 3.5
TERMS = {"z_loss_multiplier": 0.1, "label_smoothing": 0.2}
FOUR = {"num_vocab_tiling": 4}
CASES = {
    "tied, logits not divided, a tile for each token": {"normalize_embedding_logits": False, "num_vocab_tiling": 64},
    "soft cap": {"logits_via_embedding": False, "final_logits_soft_cap": 1.0},
    "bfloat16": {"dtype": "bfloat16", "logits_via_embedding": False},
    "bfloat16, tied, weights too": {"dtype": "bfloat16", "weight_dtype": "bfloat16"},
}
MESHES = {
    "fsdp": {"ici_fsdp_parallelism": 8, "logits_via_embedding": False},
    "fsdp x tensor, tied": {"ici_fsdp_parallelism": 4, "ici_tensor_parallelism": 2},
    "tensor": {"ici_fsdp_parallelism": 1, "ici_tensor_parallelism": 2},  # no axis shards the tokens
    "data x fsdp_transpose x tensor_sequence": {
        "ici_data_parallelism": 2,
        "ici_fsdp_parallelism": 1,
        "ici_fsdp_transpose_parallelism": 2,
        "ici_tensor_sequence_parallelism": 2,
        "logits_via_embedding": False,
        "dtype": "bfloat16",
    },
    "Zero-1": {"ici_data_parallelism": 8, "ici_fsdp_parallelism": 1, "shard_optimizer_over_data": True},
}


@functools.cache
def built(**keys):
    """Returns a run whose tiled loss has every term, with rows of packed documents and padding."""
    devices = math.prod(size for key, size in keys.items() if "parallelism" in key)
    keys = TERMS | FOUR | ({} if devices == 1 else {"per_device_batch_size": 1}) | keys
    run = build(load(arguments("nnx", **keys)).config, jax.devices()[:devices])
    assert run.objective.tiling.tiles == run.config.num_vocab_tiling
    return run


def loss(run, tiled):
    """Returns `(params, hidden, batch) -> scaled loss, terms`, which starts from the hidden states."""
    objective = run.objective if tiled else dataclasses.replace(run.objective, tiling=None)

    def of(params, hidden, batch):
        terms, found = objective.token_terms(
            params, run.codec.unpack(run.abstract_state).rest, hidden, batch["targets"]
        )
        real = batch["targets_segmentation"] != 0
        return SCALE * sum(jnp.sum(jnp.where(real, term, 0)) for term in terms.values()), (terms, found)

    return run.sharded(jax.value_and_grad(of, argnums=(0, 1), has_aux=True))


def inputs(run):
    """Returns random parameters and hidden states, and a batch, on the devices."""
    config, rng = run.config, np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: (0.25 * rng.normal(size=leaf.shape)).astype(leaf.dtype), run.model.abstract[0])
    params = jax.tree.map(jax.device_put, params, run.param_shardings.compute)
    batch = packed_batch(config, run.rows)
    batch["targets_segmentation"][1, ::3] = 0  # real inputs whose targets bear no loss: prompts and ends of documents
    batch["targets_segmentation"][-1] = 0  # a row of padding
    batch = placed(run, batch)
    shape = (*batch["targets"].shape, config.base_emb_dim)
    hidden = jnp.asarray(np.random.default_rng(1).normal(size=shape), config.dtype)
    at = run.batch_shardings["targets"]
    return params, jax.device_put(hidden, at), batch


def compiled(run, tiled, *args):
    return jax.jit(loss(run, tiled)).lower(*args).compile()


@functools.cache
def program(tiled, **keys):
    """Returns the compiled loss of the run with `keys`."""
    run = built(**keys)
    return compiled(run, tiled, *inputs(run))


def both(**keys):
    """Returns the results of the tiled and of the plain loss on the host, and a mask of the tokens without loss."""
    args = inputs(built(**keys))
    results = [jax.device_get(program(tiled, **keys)(*args)) for tiled in (True, False)]
    return *results, jax.device_get(args[2]["targets_segmentation"]) == 0


def assert_close(actual, expected, tolerance):
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, atol=tolerance * np.abs(b).max(), rtol=0, err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize("case", CASES | MESHES)
def test_loss_and_gradients_equal_those_without_tiles(case):
    keys = (CASES | MESHES)[case]
    run = built(**keys)
    ((value, (terms, found)), grads), ((plain, (plain_terms, plain_found)), plain_grads), without_loss = both(**keys)
    low = run.config.dtype == "bfloat16"
    assert set(terms) == {"lm_loss", "z_loss", "label_smoothing_loss"}
    # Tiles compute each token in the same way, but XLA sums the smaller product in another order.
    assert_close((terms, found), (plain_terms, plain_found), 1e-2 if low and case in MESHES else 2e-6)
    np.testing.assert_allclose(value, plain, rtol=1e-5)
    # In bfloat16, the gradient of each tile is rounded (2^-9); the plain loss rounds once, after summing over all
    # tokens.
    assert_close(grads, plain_grads, 2**-6 if low else 2e-6)
    matrix, hidden = grads[0], grads[1]
    for name in transformer.head_matrix(run.config):
        matrix = matrix[name]
    assert np.abs(matrix).max() > 0.1
    assert not hidden[without_loss].any()
    assert hidden[~without_loss].any(-1).all()


def test_a_product_with_parameters_gets_its_gradients(monkeypatch):
    """The product's parameters are stored next to the head's matrix. Only these parameters have a gradient, tiled or
    not."""

    class Adapter(nnx.Module):
        def __init__(self, kernel, *, rngs):
            self.down = param(jax.random.normal(rngs.params(), (*kernel.in_shape, 2)), ("embed", None))
            self.up = param(jax.random.normal(rngs.params(), (2, *kernel.out_shape)), (None, "vocab"))

        def __call__(self, x, inputs, kernel, reduce_early, context):
            low = product(product(x, inputs, self.down[...]), 1, self.up[...])
            return product(x, inputs, jnp.round(8 * kernel) + kernel - jax.lax.stop_gradient(kernel)) + low

    family = dataclasses.replace(llama2.FAMILY, products=lambda config: [("logits_dense", Adapter)])
    monkeypatch.setattr(llama2, "FAMILY", family)
    mesh = {"ici_fsdp_parallelism": 4, "ici_tensor_parallelism": 2, "sharding_tolerance": 1}  # only in this test
    (tiled, grads), (plain, plain_grads), _ = both(logits_via_embedding=False, **mesh)
    assert_close(tiled, plain, 2e-6)
    assert_close(grads, plain_grads, 2e-6)
    head = grads[0]["decoder"]["logits_dense"]
    assert set(head["product"]) == {"down", "up"}
    assert all(leaf.any() for leaf in jax.tree.leaves(head))


def test_the_head_is_gathered_and_its_gradient_reduced_once():
    """Neither collective is inside the loop over tiles. Tensor parallelism adds logits and hidden states inside the
    loop, as it does without tiles."""
    for mesh, in_loops in (("fsdp", False), ("fsdp x tensor, tied", True)):
        run = built(**MESHES[mesh])
        found, notes = collectives(parse(program(True, **MESHES[mesh]).as_text()), run.mesh)
        assert not notes
        tensor = run.mesh.shape["tensor"]
        head = run.config.vocab_size * run.config.base_emb_dim * 4 // tensor
        assert sum(it.count for it in found if it.size >= head and it.kind == "all-reduce") == 1
        assert sum(it.count for it in found if it.size >= head and it.kind == "all-gather") <= 2  # one per pass
        repeated = [it for it in found if it.count >= run.config.num_vocab_tiling]
        assert bool(repeated) == in_loops
        assert all(it.axes == ("tensor",) and it.size < head for it in repeated)


def test_compiled_memory_falls_to_the_logits_of_a_tile():
    """Compares the peak in float32: logits and their gradient, of all tokens or of one tile."""
    sizes = {"vocab_size": 4096, "base_emb_dim": 32, "max_target_length": 512, "logits_via_embedding": False}
    logits = 2 * 4 * 512 * 4096 * 4
    hidden_and_head = 2 * 4 * 512 * 32 * 4 + 2 * 32 * 4096 * 4
    for tiles in (1, 32):
        run = built(num_vocab_tiling=max(tiles, 2), **sizes)
        state, batch, _ = run.abstract_args()
        hidden = jax.ShapeDtypeStruct((*batch["targets"].shape, 32), "float32")
        args = run.codec.unpack(state).params, hidden, batch
        memory = compiled(run, tiles > 1, *args).memory_analysis().temp_size_in_bytes
        assert logits / tiles <= memory <= logits / tiles + hidden_and_head


def test_the_gradient_of_the_head_is_summed_in_float32():
    """64 tiles whose gradients have the same sign: a bfloat16 sum would be off by 1.6 % of the largest entry."""
    keys = {"dtype": "bfloat16", "logits_via_embedding": False, "num_vocab_tiling": 64}
    run = built(**keys)
    params, hidden, batch = inputs(run)
    hidden = np.abs(np.asarray(hidden))
    changed = {"targets": np.zeros_like(batch["targets"]), "targets_segmentation": np.ones_like(batch["targets"])}
    batch |= jax.device_put(changed, batch["targets"].sharding)
    results = []
    for which, h in (
        (program(True, **keys), hidden),
        (program(True, logits_via_embedding=False), hidden.astype("float32")),
    ):
        grads = which(params, jax.device_put(h, batch["targets"].sharding), batch)[1][0]
        results.append(np.asarray(grads["decoder"]["logits_dense"]["kernel"]))
    assert np.abs(results[0] - results[1]).max() < 2**-7 * np.abs(results[1]).max()


def test_the_most_likely_tokens():
    run = built()
    params, hidden, batch = inputs(run)

    @jax.jit
    def best(params, hidden):
        rest = run.codec.unpack(run.abstract_state).rest
        tiled = run.objective.token_terms(params, rest, hidden, batch["targets"], best=True)[1].best
        return tiled, run.model.apply(params, rest, hidden, method="head")[0].argmax(-1)

    tiled, expected = best(params, hidden)
    assert tiled.dtype == jnp.int32
    np.testing.assert_array_equal(tiled, expected)


def test_a_backward_pass_traced_off_the_mesh_knows_it():
    run = built(**MESHES["fsdp"])
    params, hidden, batch = inputs(run)
    rest = run.codec.unpack(run.abstract_state).rest

    def lm_loss(head, hidden):
        tree = params | {"decoder": params["decoder"] | {"logits_dense": head}}
        return run.objective.token_terms(tree, rest, hidden, batch["targets"])[0]["lm_loss"].sum()

    def pulled(head, hidden, on_mesh):
        _, pull = jax.vjp(run.sharded(lm_loss), head, hidden)
        return (run.sharded(pull) if on_mesh else pull)(jnp.ones(()))

    head = params["decoder"]["logits_dense"]
    texts = [jax.jit(functools.partial(pulled, on_mesh=on_mesh)).lower(head, hidden).as_text() for on_mesh in (0, 1)]
    assert texts[0] == texts[1]

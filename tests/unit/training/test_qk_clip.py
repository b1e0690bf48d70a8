"""QK-Clip: which weights it scales and by how much, in a training step of every combination."""

import functools
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support import (
    ALL_COMBINATIONS,
    LAST_CASE,
    arguments,
    assert_equal_bits,
    copied,
    first_tree,
    model_of,
    packed_batch,
    random_params,
    state_from,
    tiny_config,
)

from trainer.backends.base import tree_mode
from trainer.backends.registry import make_model
from trainer.checkpoint.manager import CheckpointManager, restore
from trainer.checkpoint.sidecar import Sidecar
from trainer.config.errors import UserError
from trainer.config.load import load
from trainer.layers.attention import Attention
from trainer.layers.dense import Dense
from trainer.layers.sown import MaxLogit, capture
from trainer.models.clipped import clipped_layers
from trainer.models.llama2 import block as llama2
from trainer.objectives.next_token import NextToken
from trainer.ops.attention import Mask
from trainer.ops.max_logits import max_logits
from trainer.ops.rope import Rope
from trainer.optim.qk_clip import scaled
from trainer.products.context import Context
from trainer.training.batches import placed
from trainer.training.build import build
from trainer.training.rules import make_rules
from trainer.training.step import make_gradients

TAU = 2.0
KEYS = {
    "use_qk_clip": True,
    "qk_clip_threshold": TAU,
    "opt_type": "sgd",
    "gradient_clipping_threshold": 0,
    "learning_rate": 0,
    "per_device_batch_size": 8,
}
ROWS = 8
LAYERS, HEADS, GROUP = 2, 4, 2  # the heads of TINY; GROUP heads share a key
HOT = (1, 2)  # [layer, head]
QUERY = ("decoder", "layers", "self_attention", "query", "kernel")
KEY = ("decoder", "layers", "self_attention", "key", "kernel")


def at(tree, path):
    return functools.reduce(lambda node, name: node[name], path, tree)


def heated(params):
    """Returns `params` with large queries in one head of one layer, and small queries elsewhere."""
    kernel = at(params, QUERY)
    kernel *= np.float32(0.1)
    kernel[HOT[0], :, HOT[1]] *= 200
    return params


@functools.cache
def initial():
    return heated(random_params(model_of(tiny_config("nnx")).abstract[0]))


def steps_of(combination, count=2, devices=1, **keys):
    """Runs `count` steps on the same rows.

    Returns the run, its step, and host copies of trees and metrics.
    """
    keys = KEYS | {"per_device_batch_size": ROWS / devices / keys.get("gradient_accumulation_steps", 1)} | keys
    run = build(load(arguments(combination, **keys)).config, jax.devices()[:devices])
    assert run.rows == ROWS
    step = run.step.lower(*run.abstract_args()).compile()
    trees, metrics = [first_tree(run, initial())], []
    state = state_from(run, trees[0])
    for _ in range(count):
        state, found = step(state, placed(run, packed_batch(run.config, ROWS)), ())
        trees.append(copied(run.codec.unpack(state)))
        metrics.append(copied(found))
    return run, step, trees, metrics


@functools.cache
def trained(combination):
    return steps_of(combination)


MAX_LOGIT = "decoder/layers/self_attention/max_logit"


@functools.cache
def sown():
    """Returns a function from parameters to the model's largest logits [layers, heads]."""
    run, _, (tree, *_), _ = trained(ALL_COMBINATIONS[0])
    objective = NextToken(run.model.apply)
    batch = packed_batch(run.config, ROWS)
    found = jax.jit(lambda params: objective.sums(params, tree.rest, batch, None, (MaxLogit,)).sown)
    return lambda params: np.asarray(found(params)["MaxLogit"][MAX_LOGIT])


@pytest.mark.rest(covered_by="nnx; one program", cases=LAST_CASE)
# tests/integration/test_five_combinations.py shows that the update is the same program in all combinations.
@pytest.mark.parametrize("combination", sorted({ALL_COMBINATIONS[0], ALL_COMBINATIONS[-1]}))
def test_a_hot_head_comes_down_to_the_threshold_and_no_other_changes(combination):
    _, _, trees, metrics = trained(combination)
    assert_equal_bits((trees, metrics), trained(ALL_COMBINATIONS[0])[2:])
    before, after = (sown()(tree.params) for tree in trees[:2])
    assert before[HOT] > 4 * TAU
    assert (np.delete(before.ravel(), np.ravel_multi_index(HOT, before.shape)) < TAU).all()
    # The clip reduced the logit that the first step measured, so the second step does not clip.
    np.testing.assert_allclose(metrics[0]["max_logit"], before.max(), rtol=1e-6)
    assert metrics[0]["clipped_heads"] == 1
    np.testing.assert_allclose(metrics[1]["max_logit"], TAU, rtol=1e-6)
    assert metrics[1]["max_logit"] == trees[2].opt_state.rules["qk_clip"]["max_logit"]
    # All other heads compute the same as before, including the other heads of the group that shares the scaled key.
    expected = before.copy()
    expected[HOT] = TAU
    np.testing.assert_allclose(after, expected, rtol=1e-6)
    group = slice(HOT[1] // GROUP * GROUP, HOT[1] // GROUP * GROUP + GROUP)
    for path, heads in ((QUERY, group), (KEY, slice(HOT[1] // GROUP, HOT[1] // GROUP + 1))):
        one, other = at(trees[0].params, path), at(trees[1].params, path)
        changed = (one != other).any(axis=(1, 3))
        assert changed[HOT[0], heads].all()
        assert changed.sum() == len(range(*heads.indices(one.shape[2])))
    rest = [copied(tree.params) for tree in trees[:2]]
    for params in rest:
        for path in (QUERY, KEY):
            del at(params, path[:-1])[path[-1]]
    assert_equal_bits(*rest)


# tests/integration/test_covering.py tests other programs.
def test_microbatches_devices_and_loops_clip_alike():
    keys = {"gradient_accumulation_steps": 2, "scan_layers": False, "shard_optimizer_over_data": True}
    _, _, trees, metrics = steps_of("nnx", 1, 4, **keys, ici_data_parallelism=2, ici_tensor_parallelism=2)
    _, _, expected, expected_metrics = trained("nnx")
    assert metrics[0]["clipped_heads"] == 1
    np.testing.assert_allclose(metrics[0]["max_logit"], expected_metrics[0]["max_logit"], rtol=1e-5)
    # Logits are summed in another order.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), trees[1].params, expected[1].params)


def test_below_the_threshold_a_step_is_that_without_it():
    """The program of the gradients is the same, and no bit of the optimizer's result changes."""
    run, _, (old, *_), _ = trained("nnx")
    (rule,) = make_rules(run.config, run.model)

    def gradients(types, rules):
        fn = make_gradients(run.config, NextToken(run.model.apply), run.param_shardings, types, rules)
        one = jax.jit(lambda tree, batch: fn(tree, batch)._replace(sown={}))
        return one.lower(old, packed_batch(run.config, ROWS)).as_text()

    assert gradients((MaxLogit,), [rule]) == gradients((), [])
    new = old._replace(params=jax.tree.map(lambda leaf: np.float32(1.1) * leaf, old.params))

    @jax.jit
    def clipped(largest):
        measured = {"MaxLogit": {MAX_LOGIT: jnp.full((LAYERS, HEADS), largest)}}
        state, kept = rule.update(rule.init(old.params), old, new, measured)
        return rule.metrics(state)["clipped_heads"], kept.params

    for largest, heads in ((TAU, 0), (1.1 * TAU, LAYERS * HEADS)):
        found, kept = copied(clipped(largest))
        assert found == heads
        assert np.array_equal(at(kept, QUERY), at(new.params, QUERY)) == (heads == 0)
        if not heads:
            assert_equal_bits(kept, new.params)


def test_a_checkpoint_of_one_combination_is_the_state_of_another(tmp_path):
    """The update has the same program in all combinations (tests/integration/test_five_combinations.py)."""
    run, _, trees, _ = trained(ALL_COMBINATIONS[0])
    tree = jax.device_put(trees[1], jax.tree.map(lambda leaf: leaf.sharding, run.codec.unpack(run.abstract_args()[0])))
    with CheckpointManager(tmp_path, run.config, print) as manager:
        manager.save(1, tree, Sidecar("base_config: base.yml\n", None, "", {}), {})
    other = build(load(arguments(ALL_COMBINATIONS[-1], **KEYS)).config, jax.devices()[:1])
    restored = restore(tmp_path / "checkpoints" / "1", other.codec.unpack(other.abstract_args()[0]))
    assert_equal_bits(copied(other.codec.unpack(other.codec.pack(restored))), trees[1])


def test_between_samples_nothing_is_measured_or_clipped():
    _, step, trees, metrics = steps_of("nnx", count=4, qk_clip_interval=3)
    _, _, every, of_every = trained("nnx")
    assert_equal_bits(trees[1].params, every[1].params)
    assert metrics[0]["clipped_heads"] == 1
    for skipping in (1, 2):  # their largest logit is that of step 0, the last to measure
        assert metrics[skipping]["max_logit"] == metrics[0]["max_logit"] == of_every[0]["max_logit"]
        assert metrics[skipping]["clipped_heads"] == 0
        assert_equal_bits(trees[skipping + 1].params, trees[1].params)
    np.testing.assert_allclose(metrics[3]["max_logit"], TAU, rtol=1e-6)
    assert step.as_text().count(" conditional(") == 1  # the conditional around the product, only in the forward pass


@pytest.mark.parametrize(
    ("op", "sampled", "tiled"), [("dot_product", None, False), ("dot_product", True, True), ("blockwise", None, True)]
)
def test_only_a_product_that_the_compiler_merges_is_a_single_tile(monkeypatch, op, sampled, tiled):
    monkeypatch.setattr("trainer.layers.attention.BLOCK", 4)
    taken = []
    monkeypatch.setattr(
        "trainer.layers.attention.max_logits", lambda *args, block, **kw: taken.append(block) or jnp.zeros(4)
    )
    at = jnp.broadcast_to(jnp.arange(8), (1, 8))
    context = Context(at, jnp.ones_like(at), jnp.zeros(1, int), None, None if sampled is None else jnp.asarray(sampled))
    x = jnp.zeros((1, 8, 12))
    jax.eval_shape(lambda: capture(attention(4, 2, op=op), (MaxLogit,))(x, None, context)[1])
    assert taken == [4 if tiled else 8]


def test_a_skipped_step_clips_nothing():
    run, step, trees, _ = trained("nnx")
    tree = copied(trees[0])  # the step donates its argument
    tree.params["decoder"]["decoder_norm"]["scale"] *= np.nan
    params = copied(tree.params)
    batch = placed(run, packed_batch(run.config, ROWS))
    state, metrics = step(state_from(run, tree), batch, ())
    assert (metrics["skipped"], metrics["clipped_heads"]) == (1, 0)
    assert_equal_bits(copied(run.codec.unpack(state).params), params)


def attention(heads, kv_heads, **how):
    dtypes = {"dtype": jnp.dtype("float32"), "weight_dtype": jnp.dtype("float32")}
    return Attention(
        12, heads=heads, kv_heads=kv_heads, head_dim=8, rope=Rope(1, 10000), rngs=nnx.Rngs(0), **dtypes, **how
    )


@pytest.mark.parametrize(("heads", "kv_heads", "lead"), [(6, 2, (5,)), (3, 3, ()), (4, 1, ())])
def test_every_heads_logits_scale_by_exactly_its_own_factor(heads, kv_heads, lead):
    rng = np.random.default_rng(0)
    layer = nnx.eval_shape(lambda: attention(heads, kv_heads))
    params = {
        name: {"kernel": rng.normal(size=(*lead, 12, n, 8)), "bias": rng.normal(size=(*lead, n, 8))}
        for name, n in (("query", heads), ("key", kv_heads))
    }
    params = jax.tree.map(np.float32, params)
    eta = rng.uniform(0.01, 1, (*lead, heads)).astype(np.float32)
    x = rng.normal(size=(7, 12)).astype(np.float32)

    def logits(params):
        query, key = (
            np.einsum("te,...ehd->...thd", x, params[name]["kernel"]) + params[name]["bias"][..., None, :, :]
            for name in ("query", "key")
        )
        return np.einsum("...thd,...shd->...hts", query, np.repeat(key, heads // kv_heads, axis=-2))

    @jax.jit
    def clipped(params, eta):
        new = scaled(params | {"value": "untouched"}, layer.logit_factors, eta)
        assert new.pop("value") == "untouched"
        return new

    new = copied(clipped(params, eta))
    expected = logits(params) * eta[..., None, None]
    np.testing.assert_allclose(logits(new), expected, atol=1e-5 * np.abs(expected).max())
    # Without a clip no bit changes.
    assert_equal_bits(clipped(params, np.ones_like(eta)), params)


class Latent(nnx.Module):
    """Attention whose heads share a rotated key, like multi-head latent attention, with another scaling rule."""

    NOPE, ROPE = 4, 2

    def __init__(self, config, rngs):
        self.heads = config.base_num_query_heads
        dense = functools.partial(Dense, dtype=jnp.float32, weight_dtype=jnp.float32, rngs=rngs)
        width = config.base_emb_dim
        self.wq = dense([width], [self.heads, self.NOPE + self.ROPE], ("embed", "q_heads", "kv"))
        self.wk = dense([width], [self.heads, self.NOPE], ("embed", "q_heads", "kv"))
        self.wk_rope = dense([width], [self.ROPE], ("embed", "kv"))

    def logit_factors(self, eta_h):
        root = jnp.sqrt(eta_h)[:, None]
        query = jnp.concatenate([jnp.repeat(root, self.NOPE, 1), jnp.repeat(root**2, self.ROPE, 1)], axis=1)
        return {"wq": query, "wk": root}

    def __call__(self, x, cache, context):
        q, k = self.wq(x, (None,) * 4), self.wk(x, (None,) * 4)
        shared = jnp.broadcast_to(self.wk_rope(x, (None,) * 3)[:, :, None], (*k.shape[:3], self.ROPE))
        mask = mask_of(context)
        largest = max_logits(q, jnp.concatenate([k, shared], -1), mask)
        self.sow(MaxLogit, "max_logit", largest, reduce_fn=lambda _, new: new, init_fn=lambda: None)
        return x + q.mean() + k.mean() + shared.mean(), cache


def mask_of(context):
    return Mask(context.positions, context.positions, context.segments, context.segments)


def test_a_layer_states_its_own_rule(monkeypatch):
    monkeypatch.setitem(sys.modules, "own", SimpleNamespace(Block=Latent))
    keys = {**KEYS, "decoder_block": "own:Block", "qk_clip_threshold": 0.01}
    run = build(load(arguments("nnx", **keys)).config, jax.devices()[:1])
    step = run.step.lower(*run.abstract_args()).compile()
    batch = packed_batch(run.config, ROWS)
    state, first = step(state_from(run, first_tree(run)), placed(run, batch), ())
    # Step again: the second layer's input depends on the first layer's weights.
    state, _ = step(state, placed(run, batch), ())
    _, last = step(state, placed(run, batch), ())
    assert first["clipped_heads"] == LAYERS * HEADS
    assert first["max_logit"] > 1
    np.testing.assert_allclose(last["max_logit"], 0.01, rtol=1e-3)


def refused(combination="nnx", **keys):
    with pytest.raises(UserError) as error:
        build(load(arguments(combination, use_qk_clip=True, **keys)).config, jax.devices()[:1])
    return str(error.value)


def test_what_it_does_not_fit_is_refused_by_name(monkeypatch):
    both = refused(use_qk_norm=True, attn_logits_soft_cap=20)
    assert "use_qk_norm=true (command line): norms of queries and keys undo" in both
    assert "attn_logits_soft_cap=20.0 (command line): a soft cap already bounds the logits" in both
    frozen = refused(trainable_parameters_mask="[query]")
    assert "decoder/layers/self_attention/key/kernel: frozen by trainable_parameters_mask" in frozen
    assert "freezes the queries and keys of all layers" in refused(trainable_parameters_mask="[mlp]")

    class Silent(llama2.Block):
        def __init__(self, config, rngs):
            super().__init__(config, rngs)
            del self.self_attention

    class Without(Silent):
        logit_factors = None

    class Normed(llama2.Block):
        def __init__(self, config, rngs):
            super().__init__(config, rngs)
            self.self_attention = attention(4, 2, qk_norm_epsilon=1e-6)

    monkeypatch.setitem(sys.modules, "own", SimpleNamespace(Silent=Silent, Without=Without, Normed=Normed))
    assert "Silent of decoder_block=own:Silent has no layer that defines logit_factors" in refused(
        decoder_block="own:Silent"
    )
    assert "no block of decoder_block=own:Without has attention" in refused(decoder_block="own:Without")
    assert "their norms undo any scaling of the weights" in refused(decoder_block="own:Normed")


def test_a_layer_that_states_a_rule_also_sows(monkeypatch):
    class Silent(Latent):
        def __call__(self, x, cache, context):
            return x + self.wq(x, (None,) * 4).mean(), cache

    monkeypatch.setitem(sys.modules, "own", SimpleNamespace(Block=Silent))
    run = build(load(arguments("nnx", use_qk_clip=True, decoder_block="own:Block")).config, jax.devices()[:1])
    with pytest.raises(UserError, match="decoder/layers defines logit_factors, but sows no max_logit"):
        run.step.lower(*run.abstract_args())


def test_several_stacks_and_patterns_are_found_by_their_own_paths():
    config = tiny_config("nnx", decoder_block="two_kinds:family", base_num_decoder_layers=5)
    with tree_mode():
        found = clipped_layers(config)
    assert {path: layer.heads for path, layer in found.items()} == {"decoder/layers/layers_0/self_attention": HEADS}
    assert at(make_model(config).param_axes, ("decoder", "layers", "layers_0", "self_attention", "query"))

"""Blocks that differ from Llama's in shape (tests/other_shapes.py), in the layers and both stacks."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from other_shapes import EMBEDDING_SCALE, LIMIT, SCALE, clipped_gate
from support import ALL_COMBINATIONS, arguments, model_of, random_variables, tiny_config

from trainer.compare import measure
from trainer.config.errors import UserError
from trainer.config.load import load
from trainer.config.resolve import resolve
from trainer.inference.max_engine import MaxEngine
from trainer.inference.scheduler import Scheduler
from trainer.layers.attention import Attention
from trainer.layers.moe import MoE
from trainer.layers.norm import LayerNorm
from trainer.leaves.source import names_of
from trainer.models.llama2 import facts
from trainer.models.llama2.block import make_rope
from trainer.models.names import names_of_blocks
from trainer.ops.rope import rope
from trainer.ops.routing import softmax_of_chosen
from trainer.products.context import Context
from trainer.training.build import build

OWN = {"decoder_block": "other_shapes:FAMILY", "rope_interleave": False}
LENGTH, VOCABULARY = 24, 64


@functools.cache
def program(combination):
    run = build(load(arguments(combination, **OWN, opt_type="sgd")).config, jax.devices()[:1])
    return measure.Program("", run, names_of_blocks(run.config))


@functools.cache
def program_text(combination):
    return measure._text(program(combination))


@pytest.mark.parametrize("combination", ALL_COMBINATIONS[1:])
def test_it_trains_by_the_same_program_in_every_combination(combination):
    assert program_text(combination) == program_text(ALL_COMBINATIONS[0])


def test_single_projections_have_a_bias_and_heads_have_sinks():
    run = program("nnx").run
    tree = run.codec.unpack(run.abstract_state).params
    names = {name.removeprefix("decoder/layers/") for name in names_of(tree) if "bias" in name or "sinks" in name}
    assert names == {*(f"self_attention/{it}/bias" for it in ("query", "key", "value")), "mlp/wo/bias"} | {
        "self_attention/sinks"
    }
    assert run.model.param_axes["decoder"]["layers"]["self_attention"]["sinks"] == ("layers", "q_heads")


def test_the_forward_pass_is_that_of_its_formulas():
    """Compares with NumPy, for one row of one segment and one layer with random parameters."""
    keys = {"attention": "blockwise", "base_num_decoder_layers": 1, "max_target_length": LENGTH}
    config = tiny_config("nnx", **OWN | keys)
    model, rng = model_of(config), np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: rng.normal(0, 0.3, leaf.shape).astype(np.float32), model.abstract[0])
    tokens = rng.integers(0, config.vocab_size, (1, LENGTH))
    positions = np.arange(LENGTH)[None]
    inputs = tokens, positions, np.ones_like(positions), np.zeros(1, int)
    hidden = jax.jit(lambda params: model.apply(params, {}, *inputs)[0])(params)
    np.testing.assert_allclose(hidden[0], by_hand(config, params, tokens[0]), atol=2e-5)


def by_hand(config, params, tokens):
    layer = jax.tree.map(lambda leaf: leaf[0], params["decoder"]["layers"])
    attention, mlp = layer["self_attention"], layer["mlp"]
    x = params["token_embedder"]["embedding"][tokens] * EMBEDDING_SCALE
    h = normed(config, x, layer["norm"]["scale"])

    def projected(name):
        return np.einsum("te,ehd->thd", h, attention[name]["kernel"]) + attention[name]["bias"]

    positions = 3 * np.arange(len(tokens))[None]
    rotated = jax.jit(lambda *both: [rope(it[None], positions, make_rope(config))[0] for it in both])
    query, key = map(np.asarray, rotated(projected("query"), projected("key")))
    repeat = config.base_num_query_heads // config.base_num_kv_heads
    key, value = (np.repeat(array, repeat, axis=1) for array in (key, projected("value")))
    scores = np.einsum("thd,shd->hts", query, key) * SCALE
    weights = np.where(np.tri(len(tokens), dtype=bool), np.exp(scores), 0)
    weights = weights / (weights.sum(-1, keepdims=True) + np.exp(attention["sinks"])[:, None, None])
    x = x + np.einsum("hts,shd,hde->te", weights, value, attention["out"]["kernel"])
    x = x + (np.cumsum(h, axis=0) / np.arange(1, len(tokens) + 1)[:, None]) @ layer["mix"]["kernel"]
    gate, up = np.minimum(x @ mlp["wi_0"]["kernel"], LIMIT), np.clip(x @ mlp["wi_1"]["kernel"], -LIMIT, LIMIT)
    hidden = gate / (1 + np.exp(-1.7 * gate)) * (up + 1)
    x = x + hidden @ mlp["wo"]["kernel"] + mlp["wo"]["bias"]
    return normed(config, x, params["decoder"]["decoder_norm"]["scale"])


def normed(config, x, scale):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + config.normalization_layer_epsilon) * scale


def test_generation_carries_state_that_has_no_place_for_each_position():
    """A prompt that shares only a prefix with an earlier prompt must not start from the earlier prompt's sum."""
    keys = {"max_target_length": LENGTH, "vocab_size": VOCABULARY, "logits_via_embedding": False}
    keys |= {"per_device_batch_size": 2, "enable_prefix_caching": True, "prefix_caching_hbm_byte": 10**8}
    keys |= {"use_chunked_prefill": True, "prefill_chunk_size": 4, "decode_sampling_strategy": "greedy"}
    engine = MaxEngine(tiny_config("nnx", **OWN | keys), jax.devices()[:1])
    params, rest = random_variables(engine.served.model)
    params["decoder"]["layers"]["mix"]["kernel"] *= 20  # so that the mean decides the next token
    assert sorted(set(engine.places(engine.init_decode_state().cache))) == [0, LENGTH]

    @jax.jit
    def next_tokens(tokens):
        positions = jnp.arange(LENGTH)[None]
        hidden = engine.served.model.apply(params, rest, tokens, positions, jnp.ones_like(positions), jnp.zeros(1, int))
        return engine.served.model.apply(params, rest, hidden[0], method="head")[0][0].argmax(-1)

    scheduler = Scheduler(engine, engine.hold(params, rest))
    prompts = [[5, 0, 17, 3, 9, 1], [5, 0, 17, 44], [5, 0, 17, 3, 9, 1, 30], [5, 0, 17, 3, 9, 1]]
    for prompt in prompts:  # one by one, so that each prompt can reuse an earlier one
        number = scheduler.submit(prompt, limit=6)
        drawn = [event.token for event in scheduler.run() if event.request == number and event.token is not None]
        row = list(prompt)
        for _ in range(6):
            padded = np.zeros((1, LENGTH), np.int32)
            padded[0, : len(row)] = row
            row.append(int(next_tokens(padded)[len(row) - 1]))
        assert drawn == row[len(prompt) :], prompt


def test_prompts_do_not_share_a_row_if_there_is_state_without_positions():
    engine = MaxEngine(tiny_config("nnx", **OWN, max_target_length=LENGTH), jax.devices()[:1])
    with pytest.raises(ValueError, match="does not keep separate states for the prompts of a row"):
        engine.prefill_concat(None, *engine.packed([[5, 0], [1, 2, 3]]))


@pytest.mark.parametrize("attention", ["dot_product", "blockwise"])
def test_every_op_of_this_platform_runs_it(attention):
    config = load(arguments("nnx", **OWN, attention=attention)).config
    assert build(config, jax.devices()[:1]).config.attention == attention


def test_a_kernel_without_sinks_is_not_chosen_and_not_run(monkeypatch):
    words = ["base.yml", "dataset_type=synthetic", "attention=autoselected", "max_target_length=1024", "head_dim=64"]
    chosen = {"device_count": 1, "platform": "gpu"}
    assert resolve(load(words).config, **chosen).attention == "cudnn_flash_jax"
    monkeypatch.setattr(facts, "FACTS", dataclasses.replace(facts.FACTS, sinks=True))
    assert resolve(load(words).config, **chosen).attention == "blockwise"
    with pytest.raises(UserError, match="does not support the sinks of decoder_block=llama2"):
        resolve(load([*words, "attention=flash"]).config, **chosen)
    keys = {"heads": 2, "kv_heads": 1, "head_dim": 8, "rope": None, "rngs": nnx.Rngs(0)}
    dtypes = dict.fromkeys(("dtype", "weight_dtype"), jnp.dtype("bfloat16"))
    with pytest.raises(UserError, match="cudnn_flash_jax does not support sinks; choose attention=blockwise"):
        Attention(16, op="cudnn_flash_jax", sinks=True, **keys, **dtypes)


def test_a_layer_norm_without_a_bias_multiplies_by_its_scale():
    dtypes = dict.fromkeys(("dtype", "weight_dtype"), jnp.dtype("float32"))
    norm = LayerNorm(5, epsilon=0.1, offset=0.0, bias=False, **dtypes)
    assert names_of(nnx.to_pure_dict(nnx.state(norm, nnx.Param))).keys() == {"scale"}
    np.testing.assert_array_equal(norm.scale[...], 1)
    norm.scale.set_value(jnp.arange(5.0))
    x = np.random.default_rng(0).normal(size=(2, 3, 5)).astype(np.float32)
    expected = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 0.1) * np.arange(5)
    np.testing.assert_allclose(norm(x), expected, atol=1e-6)


@pytest.mark.parametrize("sparse", [True, False])
def test_experts_may_have_such_a_gate(sparse):
    dtypes = dict.fromkeys(("dtype", "weight_dtype"), jnp.dtype("float32"))
    how = {"experts": 3, "chosen": 1, "score": softmax_of_chosen, "sparse": sparse, "capacity_factor": -1.0}
    x, ids = np.random.default_rng(1).normal(size=(2, 5, 16)).astype(np.float32), np.zeros((2, 5), np.int32)

    @jax.jit
    def run(x):
        layer = MoE(16, 8, ("linear", "linear"), **how, combine=clipped_gate, rngs=nnx.Rngs(0), **dtypes)
        matrices = [getattr(layer, name)[...] for name in ("wi_0", "wi_1", "wo")]
        return layer(x, Context(ids, ids + 1, ids[:, 0], None)), layer.gate(x, (None,) * 3), matrices

    out, gate, matrices = jax.device_get(run(x))
    expert = gate.argmax(-1)  # the chosen expert has weight 1
    wi_0, wi_1, wo = (matrix[expert] for matrix in matrices)
    hidden = jax.jit(clipped_gate)(*(np.einsum("bte,bteh->bth", x, matrix) for matrix in (wi_0, wi_1)))
    np.testing.assert_allclose(out, np.einsum("bth,bthe->bte", hidden, wo), atol=1e-5)


@pytest.mark.parametrize("how", [{"sparse": True}, {"sparse": False}, {"sparse": False, "capacity_factor": 3.0}])
def test_the_gradient_of_a_bias_of_experts_is_a_sum_in_float32(how):
    """A bfloat16 sum of ones would stop at 256. Each token has one expert, with weight 1."""
    dtypes = {"dtype": jnp.dtype("bfloat16"), "weight_dtype": jnp.dtype("float32")}
    how = {"experts": 2, "chosen": 1, "score": softmax_of_chosen, "capacity_factor": -1.0, "bias": True, **how}
    layer = MoE(4, 3, ("silu", "linear"), **how, rngs=nnx.Rngs(0), **dtypes)
    x, ids = np.random.default_rng(0).normal(size=(3, 301, 4)).astype(np.float32), np.zeros((3, 301), np.int32)
    graphdef, params = nnx.split(layer, nnx.Param)

    @jax.jit
    def gradients(params):
        def total(params):
            layer = nnx.merge(graphdef, params)
            return layer(x, Context(ids, ids + 1, ids[:, 0], None)).astype(jnp.float32).sum()

        return jax.grad(total)(params), nnx.merge(graphdef, params).gate(x, (None,) * 3)

    found, logits = jax.device_get(gradients(params))
    counts = np.bincount(logits.argmax(-1).ravel(), minlength=2)
    assert counts.min() > 256
    np.testing.assert_array_equal(found["wo_bias"].get_value(), np.repeat(counts[:, None], 4, axis=1))

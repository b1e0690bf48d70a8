"""GPT-3 against a second implementation in NumPy and float64, and the keys that are special to GPT-3."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest
from flax import nnx
from support import ALL_COMBINATIONS, arguments, assert_equal_bits, copied, packed_batch, pinned, tiny_config

from trainer.backends.registry import make_model
from trainer.config.errors import UserError
from trainer.config.load import load
from trainer.config.resolve import resolve
from trainer.leaves.source import Leaf, names_of
from trainer.models.caches import init_cache
from trainer.models.gpt3.family import Block
from trainer.optim.qk_clip import scaled
from trainer.weights.maxtext.write import write_maxtext
from trainer.weights.model_keys import described
from trainer.weights.open import open_source

FIRST = ALL_COMBINATIONS[0]
ROWS, LENGTH, HEADS = 2, 16, 4
KEYS = {
    "decoder_block": "gpt3",
    "base_num_kv_heads": HEADS,
    "mlp_activations": "[gelu]",
    "trainable_position_size": 24,
    "fused_qkv": True,
}
# MaxText's names; 2 layers, width 16, 4 heads of 8, MLP 32, vocabulary 64.
FUSED = {
    "decoder/layers/self_attention/qkv_proj/kernel": (2, 16, 3, 4, 8),
    "decoder/layers/self_attention/qkv_proj/bias": (2, 3, 4, 8),
}
APART = {
    f"decoder/layers/self_attention/{name}/{leaf}": shape
    for name in ("query", "key", "value")
    for leaf, shape in {"kernel": (2, 16, 4, 8), "bias": (2, 4, 8)}.items()
}
NAMES = {
    "token_embedder/embedding": (64, 16),
    "decoder/position_embedder/embedding": (24, 16),
    "decoder/layers/pre_self_attention_norm/scale": (2, 16),
    "decoder/layers/pre_self_attention_norm/bias": (2, 16),
    "decoder/layers/self_attention/out/kernel": (2, 4, 8, 16),
    "decoder/layers/self_attention/out/bias": (2, 16),
    "decoder/layers/mlp/mlp_layer_norm/scale": (2, 16),
    "decoder/layers/mlp/mlp_layer_norm/bias": (2, 16),
    "decoder/layers/mlp/wi/kernel": (2, 16, 32),
    "decoder/layers/mlp/wi/bias": (2, 32),
    "decoder/layers/mlp/wo/kernel": (2, 32, 16),
    "decoder/layers/mlp/wo/bias": (2, 16),
    "decoder/decoder_norm/scale": (16,),
    "decoder/decoder_norm/bias": (16,),
}


@functools.cache
def made(combination=FIRST, **keys):
    config = tiny_config(combination, **KEYS | keys)
    return config, make_model(config)


@functools.cache
def params_of(fused):
    """Returns random entries everywhere. The initial norms and biases are constants, which could be confused."""
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(made(fused_qkv=fused)[1].init, jax.random.key(0))[0]
    return jax.tree.map(lambda leaf: rng.normal(0, 0.3, leaf.shape).astype(np.float32), shapes)


def forward(model, params, batch, cache=None):
    inputs = [batch[name] for name in ("inputs", "inputs_position", "inputs_segmentation", "row")]
    hidden, _, cache = model.apply(params, {}, *inputs, cache=cache)
    return model.apply(params, {}, hidden, method="head")[0], cache


def normed(x, norm):
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * (1 + norm["scale"]) + norm["bias"]


def projected(attention, x):
    """Returns queries, keys and values [t, heads, d]."""
    if "qkv_proj" in attention:
        both = attention["qkv_proj"]
        return (np.einsum("te,ehd->thd", x, both["kernel"][:, i]) + both["bias"][i] for i in range(3))
    parts = (attention[name] for name in ("query", "key", "value"))
    return (np.einsum("te,ehd->thd", x, part["kernel"]) + part["bias"] for part in parts)


def document(params, tokens):
    """Returns the logits of one document."""
    decoder, table = params["decoder"], params["token_embedder"]["embedding"]
    x = table[tokens] + decoder["position_embedder"]["embedding"][: len(tokens)]
    for i in range(2):
        layer = jax.tree.map(lambda leaf, i=i: leaf[i], decoder["layers"])
        attention, mlp = layer["self_attention"], layer["mlp"]
        q, k, v = projected(attention, normed(x, layer["pre_self_attention_norm"]))
        scores = np.einsum("thd,shd->hts", q, k) / np.sqrt(8)
        scores = np.where(np.tril(np.ones(scores.shape[1:], bool)), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        x = x + np.einsum("hts,shd,hde->te", weights, v, attention["out"]["kernel"]) + attention["out"]["bias"]
        h = normed(x, mlp["mlp_layer_norm"]) @ mlp["wi"]["kernel"] + mlp["wi"]["bias"]
        h = 0.5 * h * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3)))
        x = x + h @ mlp["wo"]["kernel"] + mlp["wo"]["bias"]
    return normed(x, decoder["decoder_norm"]) @ table.T / np.sqrt(16)  # normalize_embedding_logits


@pytest.mark.parametrize("fused", [True, False])
def test_logits_of_packed_rows_equal_a_second_implementation(fused):
    config, model = made(fused_qkv=fused)
    params, batch = params_of(fused), packed_batch(config, ROWS, seed=2)
    found = np.asarray(jax.jit(functools.partial(forward, model))(params, batch)[0])
    exact = jax.tree.map(np.float64, params)
    checked = 0
    for row, segment in [(row, segment) for row in range(ROWS) for segment in (1, 2, 3)]:
        places = np.flatnonzero(batch["inputs_segmentation"][row] == segment)
        if len(places):
            expected = document(exact, batch["inputs"][row, places])
            np.testing.assert_allclose(found[row, places], expected, atol=2e-5 * np.abs(expected).max())
            checked += 1
    assert checked > ROWS


@pytest.mark.parametrize("fused", [True, False])
def test_names_are_those_of_maxtext(fused):
    params, rest = jax.eval_shape(made(fused_qkv=fused)[1].init, jax.random.key(0))
    shapes = {name: leaf.shape for name, leaf in names_of(params).items()}
    assert shapes == NAMES | (FUSED if fused else APART)
    assert rest == {}


@functools.cache
def start_and_program(combination):
    config, model = made(combination, base_num_decoder_layers=1)
    params = copied(jax.jit(model.init)(jax.random.key(3))[0])
    batch = packed_batch(config, ROWS)
    return params, jax.jit(lambda params: forward(model, params, batch)).lower(params).as_text()


@pytest.mark.parametrize("combination", ALL_COMBINATIONS[1:])
def test_every_combination_begins_equally_and_is_the_same_program(combination):
    (params, text), (expected, other) = start_and_program(combination), start_and_program(FIRST)
    assert_equal_bits(params, expected)
    assert text == other


def test_prefill_and_decoding_give_the_logits_of_the_whole_row():
    """Each token looks up its position in the table of positions."""
    config, model = made()
    params, run = params_of(True), jax.jit(functools.partial(forward, model))
    tokens = np.random.default_rng(0).integers(0, 64, (ROWS, LENGTH)).astype(np.int32)
    positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), tokens.shape)
    fields = {"inputs": tokens, "inputs_position": positions, "inputs_segmentation": np.ones_like(tokens)}
    rows = {"row": np.arange(ROWS)}
    whole = np.asarray(run(params, fields | rows)[0])
    tolerance = 1e-5 * np.abs(whole).max()
    prompt = LENGTH // 2
    begun = {name: x[:, :prompt] for name, x in fields.items()} | rows
    logits, cache = run(params, begun, init_cache(config, ROWS, LENGTH))
    np.testing.assert_allclose(logits, whole[:, :prompt], atol=tolerance)
    assert dataclasses.asdict(cache)["filled"]
    for t in range(prompt, LENGTH):
        logits, cache = run(params, {name: x[:, t : t + 1] for name, x in fields.items()} | rows, cache)
        np.testing.assert_allclose(logits[:, 0], whole[:, t], atol=tolerance)


@pytest.mark.parametrize("scan", [True, False])
def test_maxtexts_checkpoints_are_written_and_read(tmp_path, scan):
    config, _ = made()
    assert described(config).items() >= {"trainable_position_size": 24, "fused_qkv": True}.items()
    arrays = names_of(params_of(True))
    leaves = {name: Leaf(array.shape, array.dtype, [lambda array=array: array]) for name, array in arrays.items()}
    write_maxtext(tmp_path, config, leaves, None, scan)
    found = open_source(str(tmp_path / "0" / "items")).leaves(config, {name: it.shape for name, it in arrays.items()})
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name].read(array.dtype, lambda *args: None), array)
    # MaxText does not record its RoPE layout. GPT-3 has no RoPE, so no layout is assumed.
    metadata = tmp_path / "0" / "_CHECKPOINT_METADATA"
    metadata.write_text(json.dumps(json.loads(metadata.read_text()) | {"custom_metadata": {}}))
    assert not open_source(str(tmp_path / "0" / "items")).notes(config)


def test_a_clip_scales_the_logits_of_a_head_by_its_factor():
    """In the fused matrix, queries and keys are scaled by the square root of the factor, and values not at all."""
    config, _ = made()
    layer = nnx.eval_shape(lambda: Block(config, nnx.Rngs(0)))
    attention = params_of(True)["decoder"]["layers"]["self_attention"]
    eta = np.random.default_rng(0).uniform(0.1, 1, (2, HEADS)).astype(np.float32)
    after = copied(scaled(attention, layer.self_attention.logit_factors, eta))
    x = np.random.default_rng(1).normal(size=(5, 16))
    for i in range(2):
        old, new = (list(projected(jax.tree.map(lambda leaf, i=i: leaf[i], it), x)) for it in (attention, after))
        logits, clipped = (np.einsum("thd,shd->hts", *it[:2]) for it in (old, new))
        np.testing.assert_allclose(clipped, logits * eta[i][:, None, None], rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(new[2], old[2])
    assert_equal_bits(after["out"], attention["out"])


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("gpt3-52k", 52_464),
        ("gpt3-6b", 5_588_736_000),
        ("gpt3-22b", 22_049_107_968),
        # The published 175 billion, but with MLPerf's tables of 50,304 tokens and 16,384 positions.
        ("gpt3-175b", 174_780_997_632),
    ],
)
def test_a_preset_has_as_many_parameters_as_its_sizes_say(name, parameters):
    words = [f"{key}={value}" for key, value in {"model_name": name, **pinned(FIRST)}.items()]
    config = resolve(load(["base.yml", *words]).config, device_count=1, platform="cpu")
    width, hidden = config.base_emb_dim, config.base_mlp_dim
    attention = 4 * width * width + 4 * width
    block = attention + 2 * width * hidden + hidden + width + 4 * width
    tables = (config.vocab_size + config.trainable_position_size) * width
    assert tables + config.base_num_decoder_layers * block + 2 * width == parameters
    shapes = jax.eval_shape(make_model(config).init, jax.random.key(0))[0]
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == parameters
    assert (config.opt_type, config.adam_b2, config.fused_qkv) == ("adam_pax", 0.95, True)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"trainable_position_size": 8}, "a row has more positions than the table"),
        ({"trainable_position_size": -1}, "this family has no RoPE: set the number of learned positions"),
        ({"base_num_kv_heads": 2}, "as many key-value heads as query heads"),
        ({"decoder_block": "llama2"}, "this family has separate matrices for queries, keys and values"),
    ],
)
def test_keys_that_contradict_each_other(keys, message):
    with pytest.raises(UserError, match=message):
        tiny_config(FIRST, **KEYS | keys)


def test_rope_has_no_effect():
    warnings = load([*arguments(FIRST, **KEYS), "rope_max_timescale=5"]).warnings
    assert any("rope_max_timescale" in line and "no rotary positions" in line for line in warnings)

"""Norm scales over merged heads, which RoPE's order rearranges: every conversion preserves the function."""

import dataclasses
import functools
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from checkpoint_cases import abstract_of, assert_same, config_of, pairs, random_params, read_hf, shapes_of, write_hf
from olmo2 import ATTENTION, MERGED
from support import arguments

from trainer.backends.registry import make_model
from trainer.config.errors import UserError
from trainer.config.load import load
from trainer.leaves.source import Leaf, names_of
from trainer.training.build import build
from trainer.weights.huggingface.write import write_huggingface
from trainer.weights.load import load_parameters
from trainer.weights.maxtext.write import write_maxtext
from trainer.weights.open import open_source
from trainer.weights.params.write import write_params

MODEL = {"base_emb_dim": 32, "logits_via_embedding": False, "mlp_activations": "[silu,linear]", "max_target_length": 12}
HEADS, KV_HEADS, SIZE = 4, 2, 8  # as in checkpoint_cases
BLOCKS = ["olmo2:MERGED", "olmo2:BY_HEAD"]
MODULE = "mtp_block/mtp_layer_1/mtp_1_transformer_layer"
ORDERS = (False, True)
ROTATED = ("query/kernel", "key/kernel", "query_norm/scale", "key_norm/scale")


def config(block, interleave, **keys):
    return config_of(decoder_block=block, rope_interleave=interleave, **MODEL | keys)


def theirs(seed=0, layers=2):
    """Returns tensors as transformers stores them: the scales of queries and keys have one axis."""
    rng = np.random.default_rng(seed)

    def matrix(out, into):
        return rng.normal(size=(out, into), scale=0.3).astype(np.float32)

    def scale(size):
        return rng.uniform(0.5, 1.5, size).astype(np.float32)

    tensors = {"model.embed_tokens.weight": matrix(64, 32), "lm_head.weight": matrix(64, 32)}
    tensors["model.norm.weight"] = scale(32)
    for i in range(layers):
        layer = {
            "self_attn.q_proj": matrix(HEADS * SIZE, 32),
            "self_attn.k_proj": matrix(KV_HEADS * SIZE, 32),
            "self_attn.v_proj": matrix(KV_HEADS * SIZE, 32),
            "self_attn.o_proj": matrix(32, HEADS * SIZE),
            "self_attn.q_norm": scale(HEADS * SIZE),
            "self_attn.k_norm": scale(KV_HEADS * SIZE),
            "mlp.gate_proj": matrix(32, 32),
            "mlp.up_proj": matrix(32, 32),
            "mlp.down_proj": matrix(32, 32),
            "post_attention_layernorm": scale(32),
            "post_feedforward_layernorm": scale(32),
        }
        tensors |= {f"model.layers.{i}.{name}.weight": value for name, value in layer.items()}
    return tensors


def rms(x, scale):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * scale


def rotated(x):
    """Rotates heads [t, heads, size], stored as halves, as complex numbers."""
    half = SIZE // 2
    angle = np.arange(len(x))[:, None, None] * 10000.0 ** (-np.arange(half) / half)
    complexes = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)
    return np.concatenate([complexes.real, complexes.imag], axis=-1)


def logits_by_hand(tensors, tokens, layers=2):
    """Returns the logits [t, vocab], computed with the published formulas in float64."""
    tensors = {name: value.astype(np.float64) for name, value in tensors.items()}
    x = tensors["model.embed_tokens.weight"][tokens]
    for i in range(layers):
        w = {name.removeprefix(f"model.layers.{i}.").removesuffix(".weight"): it for name, it in tensors.items()}
        query = rms(x @ w["self_attn.q_proj"].T, w["self_attn.q_norm"]).reshape(-1, HEADS, SIZE)
        key = rms(x @ w["self_attn.k_proj"].T, w["self_attn.k_norm"]).reshape(-1, KV_HEADS, SIZE)
        value = (x @ w["self_attn.v_proj"].T).reshape(-1, KV_HEADS, SIZE)
        key, value = (np.repeat(it, HEADS // KV_HEADS, axis=1) for it in (rotated(key), value))
        scores = np.einsum("qhd,khd->hqk", rotated(query), key) / np.sqrt(SIZE)
        scores = np.exp(np.where(np.tri(len(x), dtype=bool), scores, -np.inf))
        attended = np.einsum("hqk,khd->qhd", scores / scores.sum(-1, keepdims=True), value).reshape(len(x), -1)
        x = x + rms(attended @ w["self_attn.o_proj"].T, w["post_attention_layernorm"])
        gate = x @ w["mlp.gate_proj"].T
        hidden = gate / (1 + np.exp(-gate)) * (x @ w["mlp.up_proj"].T)
        x = x + rms(hidden @ w["mlp.down_proj"].T, w["post_feedforward_layernorm"])
    return rms(x, tensors["model.norm.weight"]) @ tensors["lm_head.weight"].T


@functools.cache
def expected():
    tokens = np.random.default_rng(1).integers(0, 64, 12).astype(np.int32)
    return tokens, logits_by_hand(theirs(), tokens)


def assert_logits(params, cfg):
    """Checks the logits of the model with `params`. Rounding alone changes them by 1e-6 of the largest logit."""
    tokens, wanted = expected()
    model, row = make_model(cfg), np.zeros(1, np.int32)
    rest = model.abstract[1]
    position = np.arange(12, dtype=np.int32)[None]

    def logits(params):
        hidden, _, _ = model.apply(params, rest, tokens[None], position, np.ones_like(position), row)
        return model.apply(params, rest, hidden, method="head")[0]

    found = np.asarray(jax.jit(logits)(params))[0]
    np.testing.assert_allclose(found, wanted, atol=1e-5 * np.abs(wanted).max())


def loaded(path, cfg):
    return load_parameters(str(path), cfg, abstract_of(cfg), lambda line: None)


def write_theirs(folder, tensors):
    return write_hf(folder, config(BLOCKS[0], False), tensors, model_type="olmo2", architectures=["Olmo2ForCausalLM"])


def source_of(folder):
    """Returns the arrays of a tree written for MaxText, by their MaxText names."""
    import orbax.checkpoint as orbax

    tree = orbax.PyTreeCheckpointer().restore((folder / "0/items").absolute())
    return {name: np.asarray(value) for name, value in names_of(tree["params"]["params"]).items()}


def leaves_of(params):
    return {name: Leaf(it.shape, it.dtype, [lambda it=it: np.asarray(it)]) for name, it in params.items()}


def in_pairs(params):
    """Reorders each head, of SIZE entries on the last axis, from halves to pairs."""

    def one(value):
        return pairs(value.reshape(*value.shape[:-1], -1, SIZE)).reshape(value.shape)

    return {name: one(value) if name.endswith(ROTATED) else value for name, value in params.items()}


@pytest.mark.parametrize("block", BLOCKS)
def test_the_function_is_the_same_in_both_orders(tmp_path, block):
    path = write_theirs(tmp_path / "hf", theirs())
    found = {order: loaded(path, config(block, order)) for order in ORDERS}
    for order in ORDERS:
        assert_logits(found[order], config(block, order))
    arrays = {order: {name: np.asarray(it) for name, it in names_of(found[order]).items()} for order in ORDERS}
    assert_same(arrays[True], in_pairs(arrays[False]))
    assert arrays[True][f"{ATTENTION}query_norm/scale"].shape == ((2, 32) if block == "olmo2:MERGED" else (2, 4, 8))

    for order in ORDERS:
        # Hugging Face: all tensors are bit-identical after the round trip.
        cfg, out = config(block, order), tmp_path / f"hf-{order}"
        out.mkdir()
        write_huggingface(out, cfg, open_source(str(path), block).leaves(cfg, shapes_of(cfg)), None)
        assert_same(read_hf(out), theirs())
        # The trainer's format, read in either order.
        out = tmp_path / f"params-{order}"
        out.mkdir()
        write_params(out, cfg, leaves_of(arrays[order]), None)
        for other in ORDERS:
            assert_same(loaded(out, config(block, other)), arrays[other])


def test_modules_of_multi_token_prediction(tmp_path):
    configs = {order: config(BLOCKS[0], order, mtp_num_layers=1) for order in ORDERS}
    halves = random_params(configs[False])
    for order, params in ((False, halves), (True, in_pairs(halves))):
        (out := tmp_path / str(order)).mkdir()
        write_huggingface(out, configs[order], leaves_of(params), None)
        assert_same(loaded(out, configs[order]), params)
        tensor = read_hf(out)["model.layers.2.self_attn.q_norm.weight"]  # the multi-token module's norm
        np.testing.assert_array_equal(tensor, halves[f"{MODULE}/self_attention/query_norm/scale"])


def test_maxtext_without_layouts_is_refused_if_the_order_differs(tmp_path, monkeypatch):
    """Which parameters to reorder is unknown, unless nothing has to be reordered."""
    monkeypatch.setitem(sys.modules, "bare", SimpleNamespace(FAMILY=dataclasses.replace(MERGED, hugging_face=())))
    params = random_params(config("bare:FAMILY", False))
    write_maxtext(tmp_path, config("bare:FAMILY", False), leaves_of(params), None, True)
    assert_same(loaded(tmp_path / "0/items", config("bare:FAMILY", False)), params)
    with pytest.raises(UserError, match=r"rotates halves, but .*=True is set: .*bare:FAMILY declares no Layouts"):
        loaded(tmp_path / "0/items", config("bare:FAMILY", True))
    with pytest.raises(UserError, match=r"format=maxtext: .* pairs, but rope_interleave=False .* declares no Layouts"):
        write_maxtext(tmp_path / "out", config("bare:FAMILY", False, rope_type="yarn"), leaves_of(params), None, True)


def test_norms_of_a_family_that_declares_none_are_not_left_as_they_are(tmp_path):
    """Llama's layouts contain no norms over heads, which `use_qk_norm` adds."""
    configs = {order: config("llama2", order, use_qk_norm=True) for order in ORDERS}
    params = random_params(configs[False])
    write_params(tmp_path, configs[False], leaves_of(params), None)
    assert_same(loaded(tmp_path, configs[False]), params)
    with pytest.raises(UserError, match=rf"no Layouts of 2 parameters, .*: {ATTENTION}key_norm.*query_norm/scale$"):
        loaded(tmp_path, configs[True])


def test_an_axis_that_is_not_made_of_heads_is_refused(tmp_path, monkeypatch):
    """The scale of the norm after attention has 32 entries, which heads of 12 do not divide."""
    tables = MERGED.hugging_face[0]
    name = "decoder/layers/attention_norm/scale"
    layouts = {**tables.layouts, name: tables.layouts[name]._replace(rotated="head_dim")}
    wrong = dataclasses.replace(MERGED, hugging_face=[tables._replace(layouts=layouts)])
    monkeypatch.setitem(sys.modules, "wrong", SimpleNamespace(FAMILY=wrong))
    cfg = config("wrong:FAMILY", True, head_dim=12)
    with pytest.raises(UserError, match=r"post_attention_layernorm.weight: .*head_dim=12 .*, 32, is not"):
        write_huggingface(tmp_path, cfg, leaves_of(random_params(cfg)), None)


@pytest.mark.parametrize(("rope", "scan"), [("default", True), ("yarn", False)])
def test_maxtext(tmp_path, rope, scan):
    """MaxText stores halves for RoPE of type default, and pairs for yarn."""
    halves = random_params(config(BLOCKS[0], False))
    orders = {False: halves, True: in_pairs(halves)}
    configs = {order: config(BLOCKS[0], order, rope_type=rope) for order in ORDERS}
    written = {}
    for order in ORDERS:
        (out := tmp_path / str(order)).mkdir()
        write_maxtext(out, configs[order], leaves_of(orders[order]), None, scan)
        written[order] = source_of(out)
    assert_same(written[False], there := written[True])
    for order in ORDERS:
        assert_same(loaded(out / "0/items", configs[order]), orders[order])
    name = f"{ATTENTION}query_norm/scale"
    layers = [there[name.replace("layers", f"layers_{i}")] for i in (0, 1)] if not scan else there[name].swapaxes(0, 1)
    np.testing.assert_array_equal(layers, orders[rope == "yarn"][name])


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("interleave", ORDERS)
def test_devices_that_hold_parts_of_a_head(tmp_path, block, interleave):
    words = arguments(
        "nnx",
        **MODEL | {"decoder_block": block, "rope_interleave": interleave, "per_device_batch_size": 1},
        ici_fsdp_parallelism=4 if block == "olmo2:MERGED" else 1,
        ici_tensor_parallelism=2,
    )
    run = build(load(words).config, jax.devices()[: 8 if block == "olmo2:MERGED" else 2])
    abstract = run.codec.unpack(run.abstract_args()[0]).params
    path = write_theirs(tmp_path / "hf", theirs())
    whole = {name: np.asarray(it) for name, it in names_of(loaded(path, config(block, interleave))).items()}
    other = config(block, not interleave)
    (tmp_path / "ours").mkdir()
    write_params(tmp_path / "ours", other, leaves_of(names_of(loaded(path, other))), None)
    for source in (path, tmp_path / "ours"):
        result = load_parameters(str(source), run.config, abstract, print)
        assert_same(result, whole)
    scale = names_of(result)[f"{ATTENTION}query_norm/scale"]
    part = scale.sharding.shard_shape(scale.shape)
    assert part == ((2, 4) if block == "olmo2:MERGED" else (2, 2, 8)), "less than a head, or some heads"

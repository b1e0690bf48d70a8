"""The model's names, shapes, axes and results, in all five combinations."""

import dataclasses
import functools
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support import ALL_COMBINATIONS, assert_equal_bits, copied, packed_batch, pinned, tiny_config

from trainer.backends.registry import make_model
from trainer.config.load import load
from trainer.config.resolve import resolve
from trainer.models.caches import init_cache
from trainer.models.transformer import finish_logits

ROWS, LENGTH = 2, 16
DROPOUT = {"enable_dropout": True, "dropout_rate": 0.4, "attention_dropout_rate": 0.3}
MODELS = {
    "tied, gated": {
        "logits_via_embedding": True,
        "normalize_embedding_logits": True,
        "mlp_activations": "[silu, linear]",
    },
    "tied, ungated, logits as they are": {
        "logits_via_embedding": True,
        "normalize_embedding_logits": False,
        "mlp_activations": "[gelu]",
    },
    "untied, ungated": {"logits_via_embedding": False, "mlp_activations": "[gelu]"},
}
CAP = 0.7
CAPPED = {"tied": "tied, gated", "separate": "untied, ungated"}

# MaxText's names; 2 layers, width 16, 4 query and 2 key heads of 8, MLP 32, vocabulary 64.
HEADED = {
    "decoder/layers/self_attention/query/kernel": ((2, 16, 4, 8), ("layers", "embed", "q_heads", "kv")),
    "decoder/layers/self_attention/key/kernel": ((2, 16, 2, 8), ("layers", "embed", "kv_heads", "kv_head_dim")),
    "decoder/layers/self_attention/value/kernel": ((2, 16, 2, 8), ("layers", "embed", "kv_heads", "kv_head_dim")),
    "decoder/layers/self_attention/out/kernel": ((2, 4, 8, 16), ("layers", "heads", "kv", "embed")),
}
COMMON = HEADED | {
    "token_embedder/embedding": ((64, 16), ("vocab", "embed")),
    "decoder/layers/pre_self_attention_layer_norm/scale": ((2, 16), ("layers", "norm")),
    "decoder/layers/post_self_attention_layer_norm/scale": ((2, 16), ("layers", "norm")),
    "decoder/layers/mlp/wo/kernel": ((2, 32, 16), ("layers", "mlp", "embed")),
    "decoder/decoder_norm/scale": ((16,), ("norm",)),
}
EXPECTED = {
    "tied, gated": COMMON
    | {
        "decoder/layers/mlp/wi_0/kernel": ((2, 16, 32), ("layers", "embed", "mlp")),
        "decoder/layers/mlp/wi_1/kernel": ((2, 16, 32), ("layers", "embed", "mlp")),
    },
    "untied, ungated": COMMON
    | {
        "decoder/layers/mlp/wi/kernel": ((2, 16, 32), ("layers", "embed", "mlp")),
        "decoder/logits_dense/kernel": ((16, 64), ("embed", "vocab")),
    },
}


def flat(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def with_random_scales(params):
    """Returns the parameters with random norm scales. All scales start as ones, so two norms could be confused."""
    rng = np.random.default_rng(0)

    def one(path, leaf):
        factor = rng.uniform(0.5, 2, leaf.shape) if "scale" in jax.tree_util.keystr(path) else 1
        return (leaf * factor).astype(np.float32)

    return jax.tree_util.tree_map_with_path(one, params)


@functools.cache
def model(combination, name="tied, gated"):
    """Returns the configuration, initial parameters and compiled functions of one model in one combination."""
    config = tiny_config(combination, max_target_length=LENGTH, **MODELS[name], **DROPOUT)
    made = make_model(config)
    init = jax.jit(lambda seed: made.init(jax.random.key(seed))[0])
    own = name == "tied, gated" or combination == ALL_COMBINATIONS[0]
    initial = copied(init(3)) if own else model(ALL_COMBINATIONS[0], name).initial
    params = with_random_scales(initial)

    def forward(params, batch, key=None, cache=None):
        inputs = [batch[field] for field in ("inputs", "inputs_position", "inputs_segmentation", "row")]
        hidden, _, cache = made.apply(params, {}, *inputs, key=key, cache=cache)
        return made.apply(params, {}, hidden, method="head")[0], cache

    run = jax.jit(forward)

    def logits(batch, key=None):
        return np.asarray(run(params, batch, key)[0])

    return SimpleNamespace(config=config, init=init, initial=initial, params=params, run=run, logits=logits)


@pytest.fixture(params=ALL_COMBINATIONS)
def combination(request):
    return request.param


def whole_rows(tokens):
    """Returns a batch in which each row of `tokens` [rows, length] is one document."""
    positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    fields = {"inputs": tokens, "inputs_position": positions, "inputs_segmentation": np.ones_like(tokens)}
    return {name: np.asarray(x, np.int32) for name, x in fields.items()} | {"row": np.arange(len(tokens))}


def random_rows(seed=0):
    return whole_rows(np.random.default_rng(seed).integers(0, 64, (ROWS, LENGTH)))


@pytest.mark.parametrize("name", EXPECTED)
def test_names_shapes_and_axes_are_those_of_maxtext(combination, name):
    made = make_model(tiny_config(combination, **MODELS[name]))
    params, rest = jax.eval_shape(made.init, jax.random.key(0))
    shapes = {path: leaf.shape for path, leaf in flat(params).items()}
    axes = {path: tuple(leaf) for path, leaf in flat(made.param_axes).items()}
    assert shapes == {path: shape for path, (shape, _) in EXPECTED[name].items()}
    assert axes == {path: names for path, (_, names) in EXPECTED[name].items()}
    assert {leaf.dtype for leaf in flat(params).values()} == {jnp.dtype("float32")}
    assert rest == {}


@pytest.mark.parametrize("scan_layers", [True, False])
def test_names_do_not_depend_on_how_the_loop_is_compiled(combination, scan_layers):
    made = make_model(tiny_config(combination, scan_layers=scan_layers, **MODELS["tied, gated"]))
    params, _ = jax.eval_shape(made.init, jax.random.key(0))
    assert {path: leaf.shape for path, leaf in flat(params).items()} == {
        path: shape for path, (shape, _) in EXPECTED["tied, gated"].items()
    }


def test_one_seed_gives_the_same_parameters_everywhere(combination):
    assert_equal_bits(model(combination).initial, model(ALL_COMBINATIONS[0]).initial)


def test_another_seed_gives_others(combination):
    other = flat(model(combination).init(4))
    for path, leaf in flat(model(combination).initial).items():
        assert path.endswith("scale") or not np.array_equal(leaf, other[path]), path


def test_llama2_7b_has_its_published_size(combination):
    arguments = ["base.yml", "model_name=llama2-7b", *(f"{key}={value}" for key, value in pinned(combination).items())]
    config = resolve(load(arguments).config, device_count=1, platform="cpu")
    params = flat(jax.eval_shape(make_model(config).init, jax.random.key(0))[0])
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in params.values())  # nothing is allocated
    assert sum(leaf.size for leaf in params.values()) == 6738415616


def test_decoding_token_by_token_gives_the_logits_of_the_whole_row(combination):
    m, batch = model(combination), random_rows()
    whole = m.logits(batch)
    cache = dataclasses.replace(init_cache(m.config, ROWS, LENGTH), filled=True)  # so that one program suffices
    for t in range(LENGTH):
        token = {name: x if name == "row" else x[:, t : t + 1] for name, x in batch.items()}
        logits, cache = m.run(m.params, token, None, cache)
        np.testing.assert_allclose(logits[:, 0], whole[:, t], atol=1e-5)
    assert all(
        np.asarray(x).any(axis=(3, 4)).all() for x in jax.tree.leaves(cache.entries)
    )  # every layer, row and position was written


def test_a_token_changes_no_logits_before_it(combination):
    m, batch, changed = model(combination), random_rows(), 9
    other = {**batch, "inputs": batch["inputs"].copy()}
    other["inputs"][:, changed] = (other["inputs"][:, changed] + 1) % 64
    before, after = m.logits(batch), m.logits(other)
    np.testing.assert_array_equal(after[:, :changed], before[:, :changed])
    assert (after[:, changed:] != before[:, changed:]).any(axis=(0, 2)).all()


def test_a_packed_row_gives_the_logits_of_its_documents_alone(combination):
    m, batch = model(combination), packed_batch(model(combination).config, ROWS, seed=2)
    packed = m.logits(batch)
    checked = 0
    for row, segment in [(r, s) for r in range(ROWS) for s in (1, 2, 3)]:
        places = np.flatnonzero(batch["inputs_segmentation"][row] == segment)
        if not len(places):
            continue
        alone = whole_rows(np.zeros((ROWS, LENGTH), np.int32))
        alone["inputs"][:, : len(places)] = batch["inputs"][row, places]
        alone["inputs_segmentation"][:, len(places) :] = 0
        np.testing.assert_allclose(packed[row, places], m.logits(alone)[0, : len(places)], atol=1e-5)
        checked += 1
    assert checked >= 4


def test_without_a_key_there_is_no_dropout_and_with_one_every_key_gives_its_own(combination):
    m, batch = model(combination), random_rows()
    plain = m.logits(batch)
    np.testing.assert_array_equal(m.logits(batch), plain)
    first, again, second = (m.logits(batch, jax.random.key(seed)) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    for left, right in [(first, plain), (second, plain), (first, second)]:
        assert (left != right).any(axis=-1).all()


class Reference:
    """A second implementation of the forward pass: NumPy, float64, loops over layers, rows and heads.

    With a key, it draws every dropout mask from the key folded with layer, site and row, and records the masks.
    """

    def __init__(self, config, params, key=None):
        self.config, self.key, self.masks = config, key, {}
        self.params = {path: np.asarray(leaf, np.float64) for path, leaf in flat(params).items()}

    def logits(self, batch):
        layers, table = self.config.base_num_decoder_layers, self.params["token_embedder/embedding"]
        rows = range(len(batch["inputs"]))
        x = np.stack([self.drop(table[batch["inputs"][row]], layers, 0, row) for row in rows])
        for layer in range(layers):
            x = np.stack([self.block(x[row], layer, row, batch) for row in rows])
        scale = self.params["decoder/decoder_norm/scale"]
        x = np.stack([self.drop(self.norm(x[row], scale), layers, 1, row) for row in rows])
        if self.config.logits_via_embedding:
            return x @ table.T / (math.sqrt(self.config.base_emb_dim) if self.config.normalize_embedding_logits else 1)
        return x @ self.params["decoder/logits_dense/kernel"]

    def block(self, x, layer, row, batch):
        p = {
            path.removeprefix("decoder/layers/"): leaf[layer] for path, leaf in self.params.items() if "layers" in path
        }
        normed = self.norm(x, p["pre_self_attention_layer_norm/scale"])
        x = x + self.attention(normed, p, layer, row, batch["inputs_position"][row], batch["inputs_segmentation"][row])
        normed = self.norm(x, p["post_self_attention_layer_norm/scale"])
        if "mlp/wi/kernel" in p:
            wide = normed @ p["mlp/wi/kernel"]
            hidden = wide / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)))
        else:
            gate = normed @ p["mlp/wi_0/kernel"]
            hidden = gate / (1 + np.exp(-gate)) * (normed @ p["mlp/wi_1/kernel"])
        return self.drop(x + self.drop(hidden, layer, 1, row) @ p["mlp/wo/kernel"], layer, 2, row)

    def attention(self, x, p, layer, row, position, segment):
        heads, kv_heads, width = self.config.base_num_query_heads, self.config.base_num_kv_heads, self.config.head_dim
        out = np.zeros_like(x)
        for head in range(heads):
            shared = head // (heads // kv_heads)
            query = self.rotated(x @ p["self_attention/query/kernel"][:, head], position)
            key = self.rotated(x @ p["self_attention/key/kernel"][:, shared], position)
            scores = query @ key.T / math.sqrt(width)
            scores[(position[:, None] < position) | (segment[:, None] != segment)] = -np.inf
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights = self.drop_attention(weights / weights.sum(-1, keepdims=True), layer, row, head)
            out += weights @ (x @ p["self_attention/value/kernel"][:, shared]) @ p["self_attention/out/kernel"][head]
        return out

    def rotated(self, x, position):
        half = x.shape[-1] // 2
        low, high = self.config.rope_min_timescale, self.config.rope_max_timescale
        angle = position[:, None] / (low * (high / low) ** (np.arange(half) / half))
        pairs = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * angle)
        return np.concatenate([pairs.real, pairs.imag], axis=-1)

    def norm(self, x, scale):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + self.config.normalization_layer_epsilon) * scale

    def drop(self, x, layer, site, row):
        if self.key is None:
            return x
        keep = self.keep(self.config.dropout_rate, x.shape, layer, site, row)
        return np.where(keep, x / (1 - self.config.dropout_rate), 0)

    def drop_attention(self, weights, layer, row, head):
        if self.key is None:
            return weights
        rate, heads = self.config.attention_dropout_rate, self.config.base_num_query_heads
        keep = np.stack([self.keep(rate, (heads, LENGTH), layer, 0, row, t)[head] for t in range(LENGTH)])
        return np.where(keep, weights / (1 - rate), 0)

    def keep(self, rate, shape, *folds):
        if folds not in self.masks:
            key = functools.reduce(jax.random.fold_in, folds, self.key)
            self.masks[folds] = np.asarray(jax.random.bernoulli(key, 1 - rate, shape))
        return self.masks[folds]


@functools.cache
def reference(name):
    m = model(ALL_COMBINATIONS[0], name)
    return Reference(m.config, m.params).logits(packed_batch(m.config, ROWS, seed=2))


# tests/integration shows that the other combinations are bit-identical to these two.
@pytest.mark.parametrize("combination", sorted({ALL_COMBINATIONS[0], ALL_COMBINATIONS[-1]}))
@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_a_second_implementation(combination, name):
    m = model(combination, name)
    np.testing.assert_allclose(m.logits(packed_batch(m.config, ROWS, seed=2)), reference(name), atol=1e-4)


@pytest.mark.parametrize("combination", sorted({ALL_COMBINATIONS[0], ALL_COMBINATIONS[-1]}))
@pytest.mark.parametrize("head", CAPPED)
def test_the_soft_cap_bounds_the_logits_of_either_head(combination, head):
    plain = model(ALL_COMBINATIONS[0], CAPPED[head])
    config = tiny_config(combination, final_logits_soft_cap=CAP, max_target_length=LENGTH, **MODELS[CAPPED[head]])
    made, batch = make_model(config), packed_batch(config, ROWS, seed=2)

    def forward(params):
        inputs = [batch[field] for field in ("inputs", "inputs_position", "inputs_segmentation", "row")]
        return made.apply(params, {}, made.apply(params, {}, *inputs)[0], method="head")[0]

    capped = np.asarray(jax.jit(forward)(plain.params))
    logits = reference(CAPPED[head])  # for the tied head, already divided by sqrt(width)
    np.testing.assert_allclose(capped, CAP * np.tanh(logits / CAP), atol=1e-4)
    assert np.abs(logits).max() > 2 * CAP


def test_soft_caps_worked_out_by_hand():
    settings = {"logits_via_embedding": True, "normalize_embedding_logits": True, "base_emb_dim": 16}
    config = tiny_config("nnx", final_logits_soft_cap=5, **settings)
    # Divided by sqrt(16): 0, 5, -10; then 5 tanh(0), 5 tanh(1), 5 tanh(-2).
    found = finish_logits(config, jnp.array([0.0, 20.0, -40.0]))
    np.testing.assert_allclose(found, [0, 3.8079708, -4.8201379], rtol=1e-6)


def test_the_gradient_of_the_soft_cap_is_that_of_finite_differences():
    config = tiny_config("nnx", final_logits_soft_cap=5, logits_via_embedding=True, base_emb_dim=16)
    rng, step = np.random.default_rng(0), 1e-4
    products, weight = np.append(rng.normal(0, 20, 100), [0, 1e4, -1e4]), rng.normal(size=103)

    def second(products):
        return 5 * np.tanh(products / np.sqrt(16) / 5)

    expected = weight * (second(products + step) - second(products - step)) / (2 * step)
    found = jax.grad(lambda x: (weight * finish_logits(config, x)).sum())(jnp.float32(products))
    # Float32 against finite differences in float64, with an error of 1e-9.
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert np.abs(found[:100]).max() > 0.1


@functools.cache
def reference_with_dropout(step):
    m = model(ALL_COMBINATIONS[0])
    reference = Reference(m.config, m.params, key=jax.random.key(step))
    return reference.logits(random_rows()), reference.masks


def test_dropout_equals_a_second_implementation(combination):
    actual = model(combination).logits(random_rows(), jax.random.key(0))
    np.testing.assert_allclose(actual, reference_with_dropout(0)[0], atol=1e-4)


def test_every_step_layer_site_and_row_has_a_mask_of_its_own():
    masks = [mask for step in (0, 1) for mask in reference_with_dropout(step)[1].values()]
    # Per step and row: the embedding and the head; in each layer, MLP hidden units, block output, and 16 attention
    # queries.
    assert len(masks) == 2 * ROWS * (2 + 2 * (2 + LENGTH))
    assert len({mask.tobytes() for mask in masks}) == len(masks)

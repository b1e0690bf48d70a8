"""Single layers against their formulas in NumPy."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from trainer import sharding
from trainer.config.capabilities.layer_keys import ACTIVATIONS as CHECKED
from trainer.layers.dense import Dense, Embed
from trainer.layers.mlp import ACTIVATIONS, MLP
from trainer.layers.norm import RMSNorm
from trainer.products.context import Context

FLOAT32 = {"dtype": jnp.float32, "weight_dtype": jnp.float32}

FORMULAS = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    # The tanh form of Hendrycks and Gimpel 2016, arXiv:1606.08415.
    "gelu": lambda x: x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "relu": lambda x: np.where(x > 0, x, 0),
    "tanh": np.tanh,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "linear": lambda x: x,
}


def normal(*shape):
    return np.random.default_rng(shape).normal(size=shape).astype(np.float32)


def double(x):
    return np.asarray(x, np.float64)


def run(layer, *args):
    """Calls the layer as one compiled program."""
    graph, state = nnx.split(layer)
    return jax.jit(lambda state: nnx.merge(graph, state)(*args))(state)


@pytest.mark.parametrize(
    ("in_shape", "out_shape"), [([64], [512]), ([64], [8, 64]), ([8, 8], [512]), ([4, 16], [16, 32])], ids=str
)
def test_dense_starts_with_variance_one_over_fan_in(in_shape, out_shape):
    names = [f"axis {i}" for i in range(len(in_shape) + len(out_shape))]
    kernel = Dense(in_shape, out_shape, names, rngs=nnx.Rngs(0), **FLOAT32).kernel
    assert kernel.shape == (*in_shape, *out_shape)
    assert kernel.get_metadata("out_sharding") == tuple(names)
    values = double(kernel[...])
    # 32768 draws determine the variance of a normal sample to 0.8 %.
    np.testing.assert_allclose(values.var() * 64, 1, rtol=0.03)
    assert abs(values.mean()) < 4 / math.sqrt(64 * values.size)
    # The normal distribution is truncated at two standard deviations, which scales its deviation by 0.8796.
    assert 2.1 < np.abs(values).max() * 8 < 2 / 0.8796 + 1e-3


@pytest.mark.parametrize(("in_shape", "out_shape"), [([6], [5]), ([6], [2, 3]), ([2, 3], [5])], ids=str)
def test_dense_is_a_sum_over_the_inputs(in_shape, out_shape):
    names = ["a"] * (len(in_shape) + len(out_shape))
    layer = Dense(in_shape, out_shape, names, rngs=nnx.Rngs(0), **FLOAT32)
    x = normal(4, 7, *in_shape)
    expected = np.tensordot(double(x), double(layer.kernel[...]), axes=len(in_shape))
    out = run(layer, x, ["a"] * (2 + len(out_shape)))
    assert out.shape == (4, 7, *out_shape)
    np.testing.assert_allclose(out, expected, atol=2e-6)


@pytest.mark.parametrize(("in_shape", "out_shape"), [([6], [5]), ([6], [2, 3]), ([2, 3], [5])], ids=str)
def test_dense_on_a_tpu_is_the_same_sum(monkeypatch, in_shape, out_shape):
    names = ["a"] * (len(in_shape) + len(out_shape))
    layer = Dense(in_shape, out_shape, names, rngs=nnx.Rngs(0), **FLOAT32)
    graph, state = nnx.split(layer)

    def value_and_gradients():
        def loss(state, x):
            return jnp.sum(nnx.merge(graph, state)(x, ["a"] * (2 + len(out_shape))) ** 2)

        gradients = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
        program = str(jax.make_jaxpr(loss)(state, normal(4, 7, *in_shape)))
        return program, jax.tree.leaves(gradients(state, normal(4, 7, *in_shape)))

    program, expected = value_and_gradients()
    monkeypatch.setattr(sharding, "on_tpu", lambda: True)
    without_reshapes, found = value_and_gradients()
    assert "reshape" in program
    assert "reshape" not in without_reshapes
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-5)  # summed in another order


def test_dense_keeps_weights_and_activations_in_their_own_dtypes():
    layer = Dense([4], [3], ["a", "b"], dtype=jnp.bfloat16, weight_dtype=jnp.float32, rngs=nnx.Rngs(0))
    assert layer.kernel.dtype == jnp.float32
    assert run(layer, normal(2, 4), ["a", "b"]).dtype == jnp.bfloat16


def test_rms_norm_equals_numpy():
    layer = RMSNorm(8, epsilon=0.1, **FLOAT32)
    np.testing.assert_array_equal(layer.scale[...], np.ones(8))
    layer.scale[...] = jnp.asarray(normal(8))
    x = normal(2, 5, 8)
    expected = double(x) / np.sqrt((double(x) ** 2).mean(-1, keepdims=True) + 0.1) * double(layer.scale[...])
    np.testing.assert_allclose(run(layer, x), expected, rtol=1e-5)


def test_rms_norm_computes_in_float32():
    layer = RMSNorm(8, epsilon=1e-5, dtype=jnp.bfloat16, weight_dtype=jnp.bfloat16)
    x = normal(2, 8).astype(jnp.bfloat16) * jnp.bfloat16(1e3)
    expected = double(x) / np.sqrt((double(x) ** 2).mean(-1, keepdims=True) + 1e-5)
    out = run(layer, x)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out, expected.astype(jnp.bfloat16))


def test_every_activation_that_the_configuration_allows_exists():
    assert set(ACTIVATIONS) == set(CHECKED) == set(FORMULAS)


@pytest.mark.parametrize("name", FORMULAS)
def test_activation_equals_its_formula(name):
    x = np.linspace(-4, 4, 101, dtype=np.float32)
    np.testing.assert_allclose(jax.jit(ACTIVATIONS[name])(x), FORMULAS[name](double(x)), atol=1e-6)


@pytest.mark.parametrize(
    "activations", [*([name] for name in FORMULAS), ["silu", "linear"], ["gelu", "linear", "sigmoid"]], ids="-".join
)
def test_mlp_equals_numpy(activations):
    layer = MLP(6, 10, activations, dropout_rate=0.5, rngs=nnx.Rngs(0), **FLOAT32)
    x = normal(2, 3, 6)
    projections = ["wi"] if len(activations) == 1 else [f"wi_{i}" for i in range(len(activations))]
    hidden = 1.0
    for name, activation in zip(projections, activations, strict=True):
        hidden = hidden * FORMULAS[activation](double(x) @ double(getattr(layer, name).kernel[...]))
    expected = hidden @ double(layer.wo.kernel[...])
    np.testing.assert_allclose(run(layer, x, context_of(np.arange(2))), expected, atol=5e-6)


def context_of(row_b, key=None):
    ids = np.zeros((len(row_b), 3), np.int32)
    return Context(ids, ids, row_b, key)


def test_the_gradient_of_a_bias_is_a_sum_in_float32():
    """With this many rows, a bfloat16 sum is off by 1 %."""
    sizes = {"dtype": jnp.dtype("bfloat16"), "weight_dtype": jnp.dtype("float32")}
    layer = Dense([4], [3], ("embed", "mlp"), bias=True, rngs=nnx.Rngs(0), **sizes)
    graphdef, params = nnx.split(layer, nnx.Param)
    by = jnp.asarray(normal(1, 4096, 3), jnp.bfloat16)

    @jax.jit
    @jax.grad
    def gradient(params):
        out = nnx.merge(graphdef, params)(normal(1, 4096, 4), (None,) * 3)
        assert out.dtype == jnp.bfloat16
        return (out * by).astype(jnp.float32).sum()

    bias = gradient(params)["bias"].get_value()
    np.testing.assert_allclose(bias, double(by).sum((0, 1)), rtol=1e-6)  # sums of 4096 numbers in another order


def test_mlp_has_biases_only_where_they_are_asked_for():
    for given, names in (({}, ["kernel"]), ({"bias": True}, ["bias", "kernel"])):
        layer = MLP(6, 10, ["silu", "linear"], dropout_rate=0.0, rngs=nnx.Rngs(0), **given, **FLOAT32)
        params = nnx.to_pure_dict(nnx.state(layer, nnx.Param))
        assert {name: sorted(own) for name, own in params.items()} == dict.fromkeys(("wi_0", "wi_1", "wo"), names)


def test_mlp_drops_hidden_units_before_the_last_projection():
    layer = MLP(6, 10, ["silu", "linear"], dropout_rate=0.5, rngs=nnx.Rngs(0), **FLOAT32)
    layer.wo.kernel[...] = jnp.ones((10, 6))  # every output is the sum of the remaining hidden units
    x, key, row = normal(2, 3, 6), jax.random.key(1), np.array([4, 9])
    hidden = FORMULAS["silu"](double(x) @ double(layer.wi_0.kernel[...])) * (double(x) @ double(layer.wi_1.kernel[...]))
    keep = np.stack([jax.random.bernoulli(jax.random.fold_in(key, r), 0.5, (3, 10)) for r in (4, 9)])
    expected = np.repeat((hidden * keep * 2).sum(-1, keepdims=True), 6, axis=-1)
    np.testing.assert_allclose(run(layer, x, context_of(row, key)), expected, atol=5e-6)


def test_embedding_takes_rows_and_attends_to_them():
    layer = Embed(64, 512, rngs=nnx.Rngs(0), **FLOAT32)
    table = double(layer.embedding[...])
    assert layer.embedding.get_metadata("out_sharding") == ("vocab", "embed")
    np.testing.assert_allclose([table.mean(), table.std()], [0, 1], atol=0.02)
    ids = np.array([[0, 63, 5], [5, 1, 2]])
    np.testing.assert_array_equal(run(layer, ids), table[ids])
    x = normal(2, 3, 512)
    np.testing.assert_allclose(layer.attend(x), double(x) @ table.T, atol=2e-4)


def test_a_frequent_token_loses_nothing_of_its_gradient():
    """4096 gradients near one: a bfloat16 sum would stop at 256."""
    layer = Embed(8, 16, dtype=jnp.bfloat16, weight_dtype=jnp.float32, rngs=nnx.Rngs(0))
    graph, state = nnx.split(layer)
    id_bt = np.zeros((2, 2048), np.int32)
    id_bt[1, 0] = 5
    cotangent = (1 + normal(2, 2048, 16)).astype(jnp.bfloat16)

    @jax.jit
    def backward(state):
        _, pull = jax.vjp(lambda state: nnx.merge(graph, state)(id_bt), state)
        return pull(jnp.asarray(cotangent))[0]["embedding"][...]

    gradient = backward(state)
    assert gradient.dtype == jnp.float32
    expected = np.zeros((8, 16))
    np.add.at(expected, id_bt, double(cotangent))
    np.testing.assert_allclose(gradient, expected, rtol=1e-5)


def test_ids_are_not_sorted_before_there_is_something_to_sum():
    """A TPU's compiler sorts the ids for the sum. They depend only on `id_bt`, so without a barrier it would sort early
    and keep the result in memory."""
    layer = Embed(8, 16, rngs=nnx.Rngs(0), **FLOAT32)
    graph, state = nnx.split(layer)
    gradient = jax.grad(lambda state, ids: nnx.merge(graph, state)(ids).sum())
    before, _ = str(jax.make_jaxpr(gradient)(state, jnp.zeros(4, int))).split("scatter-add")
    held = re.search(r"(\w+):i32\[4\] \w+:f32\[4,16\] = optimization_barrier", before)
    assert held
    assert f" {held[1]} " in before[held.end() :]  # the indices of the sum depend on the barrier

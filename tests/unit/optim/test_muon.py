"""Muon against Newton-Schulz in float64, on matrices that are reshaped explicitly."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optim_cases import B1, B2, EPS, EPS_ROOT, STEPS, config_of

from trainer.optim.muon import dimension_numbers
from trainer.optim.optimizer import make_optimizer
from trainer.optim.schedule import make_schedule
from trainer.sharding import Axes

L, D, H, K, F, E, V = 2, 6, 2, 4, 5, 3, 7
# Each parameter's axes and shape and, for a matrix, how many of the axes after the stack axes are inputs.
PARAMETERS = {
    "query": ("layers embed q_heads kv", (L, D, 2 * H, K), 1),
    "out": ("layers heads kv embed", (L, H, K, D), 2),
    "experts": ("layers exp mlp embed", (L, E, F, D), 1),
    "outside": ("embed mlp", (D, F), 1),
    "fused": ("layers embed qkv heads kv", (L, D, 3, H, K), 1),
    "router": ("layers embed exp", (L, D, E), None),
    "embedding": ("vocab embed", (V, D), None),
    "norm": ("layers norm", (L, D), None),
}
FEW = ("out", "embedding", "norm")
AXES = {name: Axes(names.split()) for name, (names, _, _) in PARAMETERS.items()}
SETTINGS = {"opt_type": "muon", "muon_beta": 0.9, "muon_weight_decay": 0.2, "gradient_clipping_threshold": 0}
DECAY = 0.3  # of AdamW; only norms have no decay


def drawn(seed, names=PARAMETERS):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=PARAMETERS[name][1]).astype(np.float32) for name in names}


def trained(config, names=PARAMETERS):
    params = drawn(0, names)
    tx = make_optimizer(config, {name: AXES[name] for name in names})
    state = jax.jit(tx.init)(params)
    update = jax.jit(tx.update)
    for step in range(STEPS):
        updates, state = update(drawn(step + 1, names), state, params)
        params = jax.tree.map(lambda old, change: old + np.asarray(change), params, updates)
    return params, state


def newton_schulz(x):
    """Applies five iterations of Jordan's quintic polynomial to one matrix [inputs, outputs]."""
    x = x / (np.sqrt((x**2).sum()) + EPS)
    for _ in range(5):
        x = 3.4445 * x - 4.7750 * x @ x.T @ x + 2.0315 * x @ x.T @ x @ x.T @ x
    return x


def scale(rows, columns, consistent_rms):
    return np.sqrt(max(1, columns / rows)) if consistent_rms is None else consistent_rms * np.sqrt(max(rows, columns))


def one_by_one(array, name, inputs, function):
    """Applies `function` to each matrix stacked in `array`."""
    if name == "fused":
        parts = [one_by_one(array[:, :, i], "query", inputs, function) for i in range(3)]
        return np.stack(parts, 2)
    stacked = sum(axis in ("layers", "exp") for axis in AXES[name]) if name != "outside" else 0
    rows = int(np.prod(array.shape[stacked : stacked + inputs]))
    matrices = array.reshape(-1, rows, array[(0,) * stacked].size // rows)
    return np.stack([function(matrix) for matrix in matrices]).reshape(array.shape)


def muon(name, inputs, rates, consistent_rms):
    params, mean = drawn(0)[name].astype(np.float64), 0
    for t, rate in enumerate(rates, start=1):
        grad = drawn(t)[name].astype(np.float64)
        mean = 0.9 * mean + 0.1 * grad
        ahead = 0.9 * mean / (1 - 0.9 ** (t + 1)) + 0.1 * grad / (1 - 0.9**t)
        update = one_by_one(ahead, name, inputs, lambda x: newton_schulz(x) * scale(*x.shape, consistent_rms))
        params = params - rate * (update + 0.2 * params)
    return params


def nadamw(name, rates):
    params, m, v = drawn(0)[name].astype(np.float64), 0, 0
    for t, rate in enumerate(rates, start=1):
        g = drawn(t)[name].astype(np.float64)
        m, v = B1 * m + (1 - B1) * g, B2 * v + (1 - B2) * g**2
        ahead = B1 * m / (1 - B1 ** (t + 1)) + (1 - B1) * g / (1 - B1**t)
        direction = ahead / (np.sqrt(v / (1 - B2**t) + EPS_ROOT) + EPS)
        params = params - rate * (direction + (name != "norm") * DECAY * params)
    return params


@pytest.mark.parametrize("consistent_rms", [None, 0.2])
def test_muon_equals_numpy(consistent_rms):
    config = config_of(**SETTINGS, muon_consistent_rms="none" if consistent_rms is None else consistent_rms)
    rates = [float(make_schedule(config)(step)) for step in range(STEPS)]
    params, _ = trained(config)
    for name, (_, _, inputs) in PARAMETERS.items():
        expected = nadamw(name, rates) if inputs is None else muon(name, inputs, rates, consistent_rms)
        # Newton-Schulz amplifies a float32 rounding error by 3.4 in each of five iterations: 500 x 6e-8.
        np.testing.assert_allclose(params[name], expected, rtol=0, atol=5e-5, err_msg=name)


def test_it_is_that_of_optax():
    """Compares with optax for settings that both have."""
    config = config_of(**SETTINGS | {"adam_weight_decay": 0, "muon_consistent_rms": 0.2})
    tx = optax.contrib.muon(
        make_schedule(config),
        beta=0.9,
        eps=EPS,
        weight_decay=0.2,
        adam_b1=B1,
        adam_b2=B2,
        adam_eps_root=EPS_ROOT,
        muon_weight_dimension_numbers=dimension_numbers({name: AXES[name] for name in FEW}),
        consistent_rms=0.2,
    )
    params = drawn(0, FEW)
    state = tx.init(params)
    update = jax.jit(tx.update)
    for step in range(STEPS):
        updates, state = update(drawn(step + 1, FEW), state, params)
        params = optax.apply_updates(params, updates)
    found, _ = trained(config, FEW)
    for name in FEW:
        # optax computes the scale of a matrix in float32.
        np.testing.assert_allclose(found[name], params[name], rtol=0, atol=1e-6, err_msg=name)


def products(config):
    """Returns the lines of an update's lowered program that contain a product."""
    tx = make_optimizer(config, {name: AXES[name] for name in FEW})
    params = drawn(0, FEW)
    text = jax.jit(tx.update).lower(drawn(1, FEW), tx.init(params), params).as_text()
    return [line for line in text.splitlines() if "stablehlo.dot_general" in line]


def test_newton_schulz_in_float32_asks_for_exact_products():
    found = products(config_of(**SETTINGS))
    assert found
    assert all("precision = [HIGHEST, HIGHEST]" in line and "bf16" not in line for line in found)


def test_newton_schulz_in_bfloat16_keeps_momentum_and_updates_in_float32():
    config = config_of(**SETTINGS, muon_newton_schulz_dtype="bfloat16")
    exact, _ = trained(config_of(**SETTINGS), FEW)
    params, state = trained(config, FEW)
    assert {leaf.dtype for leaf in jax.tree.leaves(optax.tree.get(state, "ema"))} == {jnp.dtype("float32")}
    found = products(config)
    assert found
    assert all("-> tensor" in line and "bf16>" in line.rpartition("->")[2] for line in found)
    for name in FEW:
        differing = np.abs(params[name] - exact[name]).max()
        assert (differing > 0) == (name == "out")
        # The error of five iterations of products with 8 significant bits, in four updates of at most 0.1 times
        # sqrt(outputs / inputs).
        assert differing < 0.1


def test_frozen_parameters_have_no_momentum():
    config = config_of(**SETTINGS, trainable_parameters_mask="[out,norm]", mu_dtype="bfloat16")
    params, state = trained(config, FEW)
    assert [name for name in FEW if np.array_equal(params[name], drawn(0, FEW)[name])] == ["embedding"]
    arrays = sorted((leaf.shape, str(leaf.dtype)) for leaf in jax.tree.leaves(state) if leaf.ndim)
    # The matrix has a momentum; the norm has two moments.
    assert arrays == sorted([((L, H, K, D), "bfloat16"), ((L, D), "bfloat16"), ((L, D), "float32")])

"""Grouped products, routing, and the three ways to compute experts: against NumPy, closed forms and manual counts."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trainer.ops.experts import dropless, every_expert, slots, within_capacity
from trainer.ops.grouped import grouped_matmul, grouped_matmul_reference
from trainer.ops.routing import (
    Routing,
    chosen_of_softmax,
    entropy,
    load_balance,
    softmax_of_chosen,
    squared_log_z,
    tokens_per_expert,
)

of_chosen = jax.jit(softmax_of_chosen, static_argnums=1)
EXPERTS, WIDTH = 4, 6
RNG = np.random.default_rng(0)
MATRIX = RNG.normal(size=(EXPERTS, WIDTH, WIDTH)).astype(np.float32)


def operands():
    x, matrix = RNG.normal(size=(9, 3)).astype(np.float32), RNG.normal(size=(4, 3, 5)).astype(np.float32)
    return x, matrix, np.array([2, 0, 6, 1], np.int32)


def squares(product, x, matrix, sizes):
    return jnp.sum(product(x, matrix, sizes) ** 2)


def test_a_product_of_groups_and_its_gradients():
    x, matrix, sizes = operands()
    group = np.repeat(np.arange(4), sizes)
    expected = np.stack([row @ matrix[g].astype(np.float64) for row, g in zip(x, group, strict=True)])
    for product in (grouped_matmul, grouped_matmul_reference):
        np.testing.assert_allclose(jax.jit(product)(x, matrix, sizes), expected, rtol=1e-5, atol=1e-6)
    ours, others = (
        jax.jit(jax.grad(functools.partial(squares, product), (0, 1)))(x, matrix, sizes)
        for product in (grouped_matmul, grouped_matmul_reference)
    )
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), ours, others)
    assert not ours[1][1].any(), "an empty group has no gradient"


def test_a_product_of_groups_is_mapped_over_any_of_its_operands():
    """JAX's own derivative does not support this: islands and pipeline stages are maps, and a cotangent of ones has no
    mapped axis."""
    x, matrix, sizes = operands()
    plus = np.stack([matrix, matrix + 1])

    def total(matrix):
        return grouped_matmul(x, matrix, sizes).sum()

    gradient = jax.jit(jax.grad(total))
    both = jax.jit(jax.vmap(jax.grad(total)))(plus)
    for one, alone in zip(both, plus, strict=True):
        np.testing.assert_allclose(one, gradient(alone), rtol=1e-6)


def test_of_equal_logits_the_first_experts_are_chosen():
    expert, weight = of_chosen(np.zeros((2, 3, EXPERTS), np.float32), 2)
    assert (np.asarray(expert) == [0, 1]).all()
    assert (np.asarray(weight) == 0.5).all()


def test_weights_of_both_scores():
    logits = RNG.normal(size=(5, EXPERTS)).astype(np.float32)
    probability = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    chosen, over_all = of_chosen(logits, 2), jax.jit(chosen_of_softmax, static_argnums=1)(logits, 2)
    best = np.argsort(-logits, axis=-1)[:, :2]
    for expert, _ in (chosen, over_all):
        np.testing.assert_array_equal(expert, best)
    picked = np.take_along_axis(probability, best, -1)
    np.testing.assert_allclose(over_all.weight, picked, rtol=1e-6)
    np.testing.assert_allclose(chosen.weight, picked / picked.sum(-1, keepdims=True), rtol=1e-6)


def test_statistics_leave_out_padding():
    logits = RNG.normal(size=(2, 5, EXPERTS)).astype(np.float32)
    real = np.array([[1, 1, 1, 0, 0], [0, 0, 0, 0, 0]], bool)
    expert = np.asarray(of_chosen(logits, 2).expert)
    probability = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    count = np.bincount(expert[0, :3].ravel(), minlength=EXPERTS)
    counts = jax.jit(tokens_per_expert, static_argnums=2)(expert, real, EXPERTS)
    np.testing.assert_array_equal(counts, [count, np.zeros(EXPERTS)])
    balance = EXPERTS * np.sum(count / 3 * probability[0, :3].mean(0))
    np.testing.assert_allclose(jax.jit(load_balance)(logits, expert, real), [balance, 0], rtol=1e-6)
    log_z = np.log(np.exp(logits[0, :3]).sum(-1))
    np.testing.assert_allclose(jax.jit(squared_log_z)(logits, real), [np.sum(log_z**2), 0], rtol=1e-6)
    nats = -np.sum(probability[0, :3] * np.log(probability[0, :3]))
    np.testing.assert_allclose(jax.jit(entropy)(logits, real), [nats, 0], rtol=1e-6)


def test_the_load_balance_loss_of_balanced_and_of_one_sided_tokens():
    real = np.ones((1, EXPERTS), bool)
    turns = 50 * np.eye(EXPERTS, dtype=np.float32)[None]  # token i chooses expert i with certainty
    balance = jax.jit(lambda logits: load_balance(logits, softmax_of_chosen(logits, 1).expert, real))
    np.testing.assert_allclose(balance(turns), [1])
    one_sided = np.broadcast_to(turns[:, :1], turns.shape)
    np.testing.assert_allclose(balance(one_sided), [EXPERTS])


def experts(rows, sizes):
    """Multiplies the rows of each expert with its matrix."""
    if sizes is None:
        return jnp.einsum("enw,ewv->env", rows, MATRIX)
    return grouped_matmul(rows, MATRIX, sizes)


def expected(x, routing, kept=None):
    out = np.zeros(x.shape)
    for b, t in np.ndindex(x.shape[:2]):
        for i, (e, weight) in enumerate(zip(routing.expert[b, t], routing.weight[b, t], strict=True)):
            if kept is None or kept[b, t, i]:
                out[b, t] += float(weight) * (x[b, t].astype(np.float64) @ MATRIX[int(e)])
    return out


@pytest.mark.parametrize("case", ["mixed", "an expert without tokens", "all tokens to the same experts"])
@pytest.mark.parametrize("way", [dropless, every_expert])
def test_no_token_is_dropped(way, case):
    logits = RNG.normal(size=(2, 7, EXPERTS)).astype(np.float32)
    if case == "an expert without tokens":
        logits[..., 1] = -100
    elif case != "mixed":
        logits[..., 2:] = 100
    x = RNG.normal(size=(2, 7, WIDTH)).astype(np.float32)
    routing = jax.device_get(of_chosen(logits, 2))
    found = jax.jit(functools.partial(way, apply=experts, experts=EXPERTS))(x, routing)
    np.testing.assert_allclose(found.out, expected(x, routing), rtol=1e-4, atol=1e-5)
    assert not np.any(found.dropped)


def test_what_an_expert_drops():
    """Each of five tokens chooses expert 0 and another one. Padding uses no capacity, and each row has its own
    capacity."""
    expert = np.array([[[0, 1], [0, 1], [0, 2], [3, 0], [0, 1]]] * 2, np.int32)
    real = np.array([[1, 1, 1, 1, 1], [0, 1, 1, 1, 1]], bool)
    routing = Routing(expert, RNG.uniform(0.1, 1, expert.shape).astype(np.float32))
    x = RNG.normal(size=(2, 5, WIDTH)).astype(np.float32)

    def run(factor):
        return jax.jit(functools.partial(within_capacity, apply=experts, experts=EXPERTS, real_bt=real, factor=factor))(
            x, routing
        )

    # ceil(5 x 2 / 4) = 3 tokens per expert, times the factor, rounded down, within 1 to 5.
    assert [slots(5, 2, EXPERTS, factor) for factor in (1.0, 0.5, 0.1, 9.0)] == [3, 1, 1, 5]
    kept = np.ones(expert.shape, bool)
    kept[0, 3, 1] = kept[0, 4, 0] = False  # the fourth and fifth token of expert 0
    kept[1, 0] = kept[1, 4, 0] = False
    found = run(factor=1.0)
    np.testing.assert_allclose(found.out, expected(x, routing, kept), rtol=1e-4, atol=1e-5)
    assert found.dropped.tolist() == [2, 1]
    # With a capacity of 1, expert 0 drops 4 and 3 tokens in the two rows, and expert 1 drops 2 and 1.
    assert run(factor=0.5).dropped.tolist() == [6, 4]
    whole = run(factor=9.0)
    assert whole.dropped.tolist() == [0, 0]
    np.testing.assert_allclose(whole.out[0], expected(x, routing)[0], rtol=1e-4, atol=1e-5)

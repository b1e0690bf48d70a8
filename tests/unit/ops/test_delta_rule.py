"""The chunked rule against its definition, token by token in float64, and against finite differences."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trainer.ops.delta_rule import gated_delta_rule

ROWS, HEADS, KEYS, VALUES = 2, 3, 8, 5
RULE = jax.jit(gated_delta_rule, static_argnames="chunk")
CASES = {  # tokens, chunk, range of the decays
    "chunks that do not divide": (37, 8, 1.0),
    "one chunk": (21, 64, 1.0),
    "chunks of one token": (9, 1, 1.0),
    "whole chunks, fast and slow decay": (48, 16, 40.0),
}


def arrays(tokens, spread):
    """Returns random float64 arguments. Documents begin anywhere, including at the start of a chunk."""
    rng = np.random.default_rng(tokens)
    query, key = (rng.normal(size=(ROWS, tokens, HEADS, KEYS)) for _ in range(2))
    key /= np.linalg.norm(key, axis=-1, keepdims=True)
    value = rng.normal(size=(ROWS, tokens, HEADS, VALUES))
    fast = rng.random((ROWS, tokens, HEADS)) < 0.3
    decay = -np.abs(rng.normal(size=fast.shape)) * np.where(fast, spread, 0.05)
    beta = rng.uniform(size=fast.shape)
    begins = rng.random((ROWS, tokens)) < 0.15
    begins[:, :3] = False
    begins[0, tokens // 2] = True
    memory = rng.normal(size=(ROWS, HEADS, KEYS, VALUES))
    return (query, key, value, decay, beta), np.cumsum(begins, axis=1), memory


def defined(query, key, value, decay, beta, document, memory, matmul=np.einsum):
    """The definition. Returns the results and the memory after each token, [b, t, ...]."""
    results, memories, before = [], [], np.zeros(ROWS, int)
    for t in range(query.shape[1]):
        kept = (document[:, t] == before)[:, None, None, None]
        before = document[:, t]
        memory = memory * kept * np.exp(decay[:, t])[..., None, None]
        wrong = value[:, t] - matmul("bhkv,bhk->bhv", memory, key[:, t])
        memory = memory + matmul("bhk,bhv->bhkv", key[:, t], beta[:, t, :, None] * wrong)
        results.append(matmul("bhkv,bhk->bhv", memory, query[:, t]))
        memories.append(memory)
    return np.stack(results, 1), np.stack(memories, 1)


def rounded(given, memory):
    return [jnp.asarray(x, jnp.float32) for x in (*given, memory)]


@pytest.mark.parametrize("case", CASES)
def test_results_and_memories_are_those_of_the_definition(case):
    tokens, chunk, spread = CASES[case]
    given, document, memory = arrays(tokens, spread)
    results, memories = defined(*given, document, memory)
    at = np.array([[0, tokens - 1, tokens // 2], [tokens // 3, tokens - 2, 1]])
    *inputs, start = rounded(given, memory)
    out, chosen = RULE(*inputs, document, start, chunk=chunk, at_br=jnp.asarray(at))
    np.testing.assert_allclose(out, results, atol=1e-5)
    for row in range(ROWS):
        np.testing.assert_allclose(chosen[row], memories[row, at[row]], atol=1e-5)


def test_gradients_are_those_of_the_definition():
    """Takes central differences of the definition in float64, along a random direction for each argument."""
    given, document, memory = arrays(37, 2.0)
    weights = np.random.default_rng(0).normal(size=(ROWS, 37, HEADS, VALUES))

    def loss(*arguments):
        *inputs, start = arguments
        out, last = RULE(*inputs, document, start, chunk=8)
        return (out * weights).sum() + last.sum()

    found = jax.jit(jax.grad(loss, argnums=tuple(range(6))))(*rounded(given, memory))
    out, last = RULE(*rounded(given, memory)[:5], document, rounded(given, memory)[5], chunk=8)
    results, memories = defined(*given, document, memory)
    np.testing.assert_allclose(out, results, atol=1e-5)
    np.testing.assert_allclose(last, memories[:, -1], atol=1e-5)
    rng, step = np.random.default_rng(1), 1e-5
    for i, gradient in enumerate(found):
        for _ in range(3):
            direction = rng.normal(size=gradient.shape)
            moved = []
            for sign in (1, -1):
                arguments = [x + sign * step * direction if j == i else x for j, x in enumerate((*given, memory))]
                results, memories = defined(*arguments[:5], document, arguments[5])
                moved.append((results * weights).sum() + memories[:, -1].sum())
            expected = (moved[0] - moved[1]) / (2 * step)
            # The float32 rounding of sums of about 1,000 terms of the order of 1.
            assert (gradient * direction).sum() == pytest.approx(expected, rel=1e-5, abs=1e-3)


def test_a_token_without_decay_and_beta_leaves_the_memory():
    given, document, memory = arrays(9, 1.0)
    query, key, value, decay, beta = given
    idle = np.array([False] * 4 + [True] * 5)[None, :, None]
    document = np.where(idle[..., 0], document[:, 3:4], document)
    masked = rounded((query, key, value, np.where(idle, 0, decay), np.where(idle, 0, beta)), memory)
    _, memories = RULE(*masked[:5], document, masked[5], chunk=4, at_br=jnp.array([[3, 8]] * ROWS))
    np.testing.assert_allclose(memories[:, 1], memories[:, 0], atol=1e-6)

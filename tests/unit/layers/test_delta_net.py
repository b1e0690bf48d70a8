"""Gated DeltaNet: packed documents give the same results as separate ones; memory of the compiled step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from support import drawn

from trainer.layers.delta_net import GatedDeltaNet
from trainer.products.context import Context

WIDTH = 12
DOCUMENTS = (1, 7, 2, 11)  # tokens per document; one is shorter than the convolution
PADDING = 3


@functools.cache
def layer(chunk=4, heads=2):
    sizes = {"key_heads": heads, "value_heads": 2 * heads, "key_dim": 4, "value_dim": 6, "conv": 4, "chunk": chunk}
    others = {"epsilon": 1e-6, "dtype": jnp.dtype("float32"), "weight_dtype": jnp.dtype("float32")}
    made = drawn(lambda: GatedDeltaNet(WIDTH, **sizes, **others, rngs=nnx.Rngs(0)))
    made.A_log.set_value(jnp.linspace(-4, 0, 2 * heads))  # slow decay: a memory of many tokens
    return made


def context_of(lengths, padding=0):
    """Returns the context of a row of documents with padding at its end."""
    positions = np.concatenate([np.arange(length) for length in lengths] + [np.zeros(padding, int)])
    segments = np.repeat(range(1, len(lengths) + 1), lengths)
    segments = np.concatenate([segments, np.zeros(padding, int)])
    return Context(jnp.asarray(positions)[None], jnp.asarray(segments)[None], jnp.zeros(1, int), None)


def inputs():
    """Returns a packed row, and the weights of its outputs in the loss (0 for padding)."""
    count = sum(DOCUMENTS) + PADDING
    x, weights = (np.random.default_rng(seed).normal(size=(1, count, WIDTH)).astype(np.float32) for seed in (0, 1))
    return x, weights * (np.arange(count) < sum(DOCUMENTS))[None, :, None]


def loss(graphdef, state, x, context, weights):
    out, _ = nnx.merge(graphdef, state)(x, None, context)
    return (out * weights).sum(), out


@functools.cache
def gradients():
    return jax.jit(jax.value_and_grad(loss, argnums=(1, 2), has_aux=True), static_argnums=0)


def results(x, weights, context):
    """Returns the outputs, and the gradients of the parameters and of x."""
    (_, out), (grads, of_x) = gradients()(*nnx.split(layer()), x, context, weights)
    return out, grads, of_x


def packed():
    out, grads, of_x = results(*inputs(), context=context_of(DOCUMENTS, PADDING))
    return out[:, :-PADDING], grads, of_x[:, :-PADDING]


def alone():
    """Returns the outputs of the documents, each at the beginning of a row of padding, the sum of their parameter
    gradients, and the gradients of x."""
    (x, weights), found = inputs(), []
    for end, length in zip(np.cumsum(DOCUMENTS), DOCUMENTS, strict=True):
        row, its_weights = np.full_like(x, 9), np.zeros_like(weights)
        row[:, :length], its_weights[:, :length] = (it[:, end - length : end] for it in (x, weights))
        out, grads, of_x = results(row, its_weights, context_of([length], x.shape[1] - length))
        found.append((out[:, :length], grads, of_x[:, :length]))
    out, grads, of_x = zip(*found, strict=True)
    return np.concatenate(out, axis=1), jax.tree.map(lambda *parts: sum(parts), *grads), np.concatenate(of_x, axis=1)


def off(found, expected):
    """Returns the largest difference relative to the largest entry of its array."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs)


def test_packed_documents_are_those_given_alone():
    assert off(packed(), alone()) < 1e-5


def test_temporaries_hold_no_square_of_the_length():
    (graphdef, state), length = nnx.split(layer(chunk=64)), 2**15
    x = jax.ShapeDtypeStruct((1, length, WIDTH), jnp.float32)
    context = jax.eval_shape(lambda: context_of([length]))
    step = jax.jit(jax.grad(loss, argnums=1, has_aux=True), static_argnums=0)
    memory = step.lower(graphdef, state, x, context, x).compile().memory_analysis()
    assert memory.temp_size_in_bytes < length**2 * 4 / 4

"""Gated DeltaNet: packed documents give the same results as separate ones; memory of the compiled step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from trainer.layers import delta_net
from trainer.layers.delta_net import GatedDeltaNet
from trainer.products.context import Context

WIDTH = 12
DOCUMENTS = (1, 7, 2, 11)  # tokens per document; one is shorter than the convolution
PADDING = 3


@functools.cache
def layer(chunk=4, heads=2):
    made = GatedDeltaNet(
        WIDTH,
        **{"key_heads": heads, "value_heads": 2 * heads, "key_dim": 4, "value_dim": 6, "conv": 4, "chunk": chunk},
        **{"epsilon": 1e-6, "dtype": jnp.dtype("float32"), "weight_dtype": jnp.dtype("float32"), "rngs": nnx.Rngs(0)},
    )
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


def results(x, weights, context):
    """Returns the outputs, and the gradients of the parameters and of x."""
    run = jax.jit(jax.value_and_grad(loss, argnums=(1, 2), has_aux=True), static_argnums=0)
    (_, out), (grads, of_x) = run(*nnx.split(layer()), x, context, weights)
    return out, grads, of_x


def packed():
    out, grads, of_x = results(*inputs(), context=context_of(DOCUMENTS, PADDING))
    return out[:, :-PADDING], grads, of_x[:, :-PADDING]


@functools.cache
def alone():
    """Returns the outputs of the documents one by one, the sum of their parameter gradients, and the gradients of x."""
    cuts = zip(*(np.split(it, np.cumsum(DOCUMENTS), axis=1) for it in inputs()), strict=True)
    found = [results(*cut, context=context_of([length])) for length, cut in zip(DOCUMENTS, cuts, strict=False)]
    out, grads, of_x = zip(*found, strict=True)
    return np.concatenate(out, axis=1), jax.tree.map(lambda *parts: sum(parts), *grads), np.concatenate(of_x, axis=1)


def off(found, expected):
    """Returns the largest difference relative to the largest entry of its array."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs)


def test_packed_documents_are_those_given_alone():
    assert off(packed(), alone()) < 1e-5


@pytest.mark.parametrize("part", ["convolution", "memory"])
def test_without_a_reset_they_are_not(part, monkeypatch):
    """Shows that the test above fails if the convolution or the memory crosses the start of a document."""
    expected = alone()
    if part == "convolution":
        conv = delta_net.short_conv
        monkeypatch.setattr(
            delta_net, "short_conv", lambda x, kernel, document, before: conv(x, kernel, document * 0, before)
        )
    else:
        rule = delta_net.gated_delta_rule
        monkeypatch.setattr(
            delta_net, "gated_delta_rule", lambda *args, **how: rule(*args[:5], args[5] * 0, *args[6:], **how)
        )
    assert off(packed(), expected) > 1e-2


def test_temporaries_grow_with_the_length_and_not_with_its_square():
    graphdef, state = nnx.split(layer(chunk=64))

    def temporaries(length):
        x = jax.ShapeDtypeStruct((1, length, WIDTH), jnp.float32)
        context = jax.eval_shape(lambda: context_of([length]))
        step = jax.jit(jax.grad(loss, argnums=1, has_aux=True), static_argnums=0)
        return step.lower(graphdef, state, x, context, x).compile().memory_analysis().temp_size_in_bytes

    assert temporaries(8192) <= 8.2 * temporaries(1024)

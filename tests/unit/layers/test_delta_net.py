"""Gated DeltaNet: packed documents are those given alone, and the memory of its compiled step."""

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
DOCUMENTS = (1, 7, 2, 11)  # tokens; one is shorter than the convolution
PADDING = 3


@functools.cache
def layer(chunk=4, heads=2):
    made = GatedDeltaNet(
        WIDTH,
        **{"key_heads": heads, "value_heads": 2 * heads, "key_dim": 4, "value_dim": 6, "conv": 4, "chunk": chunk},
        **{"epsilon": 1e-6, "dtype": jnp.dtype("float32"), "weight_dtype": jnp.dtype("float32"), "rngs": nnx.Rngs(0)},
    )
    made.A_log.set_value(jnp.linspace(-4, 0, 2 * heads))  # a memory of many tokens
    return made


def context_of(lengths, padding=0):
    """A row of documents, and padding at its end."""
    positions = np.concatenate([np.arange(length) for length in lengths] + [np.zeros(padding, int)])
    segments = np.repeat(range(1, len(lengths) + 1), lengths)
    segments = np.concatenate([segments, np.zeros(padding, int)])
    return Context(jnp.asarray(positions)[None], jnp.asarray(segments)[None], jnp.zeros(1, int), None)


def inputs():
    count = sum(DOCUMENTS) + PADDING
    return np.random.default_rng(0).normal(size=(1, count, WIDTH)).astype(np.float32)


def loss(graphdef, state, x, context, weights):
    out, _ = nnx.merge(graphdef, state)(x, None, context)
    return (out * weights).sum(), out


def results():
    """Results and gradients (of the parameters, and of x) of the packed row, and of its documents one by one."""
    graphdef, state = nnx.split(layer())
    x = inputs()
    real = (np.arange(x.shape[1]) < sum(DOCUMENTS))[None, :, None]
    weights = np.random.default_rng(1).normal(size=x.shape).astype(np.float32) * real
    run = jax.jit(jax.value_and_grad(loss, argnums=(1, 2), has_aux=True), static_argnums=0)
    (_, out), (grads, of_x) = run(graphdef, state, x, context_of(DOCUMENTS, PADDING), weights)
    alone, start = [], 0
    for length in DOCUMENTS:
        cut = (slice(None), slice(start, start + length))
        alone.append(run(graphdef, state, x[cut], context_of([length]), weights[cut]))
        start += length
    apart = np.concatenate([it[0][1] for it in alone], axis=1)
    total = jax.tree.map(lambda *parts: sum(parts), *(it[1][0] for it in alone))
    apart_x = np.concatenate([it[1][1] for it in alone], axis=1)
    return (out[:, : apart.shape[1]], grads, of_x[:, : apart.shape[1]]), (apart, total, apart_x)


def off(packed, alone):
    """The largest difference, as a share of the largest entry of each array."""
    pairs = zip(jax.tree.leaves(packed), jax.tree.leaves(alone), strict=True)
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs)


def test_packed_documents_are_those_given_alone():
    assert off(*results()) < 1e-5


@pytest.mark.parametrize("part", ["convolution", "memory"])
def test_without_a_reset_they_are_not(part, monkeypatch):
    """The test above notices if either of the two crosses the start of a document."""
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
    assert off(*results()) > 1e-2


def test_temporaries_grow_with_the_length_and_not_with_its_square():
    graphdef, state = nnx.split(layer(chunk=64))

    def temporaries(length):
        x = jax.ShapeDtypeStruct((1, length, WIDTH), jnp.float32)
        context = jax.eval_shape(lambda: context_of([length]))
        step = jax.jit(jax.grad(loss, argnums=1, has_aux=True), static_argnums=0)
        return step.lower(graphdef, state, x, context, x).compile().memory_analysis().temp_size_in_bytes

    assert temporaries(8192) <= 8.2 * temporaries(1024)

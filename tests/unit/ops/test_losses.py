import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compiler import TPU_QUICKLY
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from trainer.aot import dump
from trainer.aot.topologies import devices_of
from trainer.config.topologies import find_topology
from trainer.ops.losses import cross_entropy


def example():
    rng = np.random.default_rng(0)
    return rng.normal(size=(2, 5, 11)).astype(np.float32) * 3, rng.integers(0, 11, (2, 5))


def test_equals_optax_and_the_logsumexp():
    logits, target = example()
    nll, log_z = jax.jit(cross_entropy)(logits, target)
    expected = jax.jit(optax.softmax_cross_entropy_with_integer_labels)(logits, target)
    np.testing.assert_allclose(nll, expected, rtol=1e-6)
    np.testing.assert_allclose(log_z, np.log(np.exp(logits.astype(float)).sum(-1)), rtol=1e-6)


def test_low_precision_logits_give_float32_losses():
    logits, target = example()
    nll, log_z = jax.eval_shape(cross_entropy, logits.astype(jnp.bfloat16), target)
    assert nll.dtype == log_z.dtype == jnp.float32


def test_gradient_equals_finite_differences():
    logits, target = example()

    @jax.jit
    def loss(logits):
        nll, log_z = cross_entropy(logits, jnp.asarray(target))
        return jnp.sum(nll + 0.1 * log_z**2)

    grad = np.asarray(jax.jit(jax.grad(loss))(logits))
    for index in [(0, 0, 3), (1, 2, 7), (1, 4, int(target[1, 4]))]:
        step = np.zeros_like(logits)
        step[index] = 0.05
        slope = (float(loss(logits + step)) - float(loss(logits - step))) / 0.1
        np.testing.assert_allclose(grad[index], slope, atol=2e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_equal_those_of_the_plain_formula(dtype):
    logits, target = example()
    logits = logits.astype(jnp.dtype(dtype))

    def plain(logits, target):
        log_p = jax.nn.log_softmax(logits.astype(jnp.float32))
        nll = -jnp.take_along_axis(log_p, target[..., None], -1)[..., 0]
        return nll, jax.nn.logsumexp(logits.astype(jnp.float32), -1)

    def loss(fn):
        def of(logits):
            nll, log_z = fn(logits, target)
            return jnp.sum(nll * jnp.arange(5) + 0.1 * log_z**2)

        return of

    both = jax.jit(lambda logits: [jax.grad(loss(fn))(logits) for fn in (cross_entropy, plain)])
    actual, expected = jax.device_get(both(logits))
    assert actual.dtype == expected.dtype == dtype
    tolerance = 1e-5 if dtype == "float32" else 2**-7
    np.testing.assert_allclose(actual.astype("float32"), expected.astype("float32"), rtol=tolerance, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_mean_over_the_vocabulary_and_its_gradient(dtype):
    """Requesting the mean adds an output and changes no other output."""
    logits, target = example()
    logits = logits.astype(jnp.dtype(dtype))
    *others, mean = jax.jit(cross_entropy, static_argnums=2)(logits, target, True)
    np.testing.assert_array_equal(others, jax.jit(cross_entropy)(logits, target))
    exact = logits.astype(np.float64)
    exact -= np.log(np.exp(exact).sum(-1, keepdims=True))
    np.testing.assert_allclose(mean, -exact.mean(-1), rtol=1e-6)

    def smoothed(logits):
        """Returns the cross entropy with the target 0.7 x one-hot + 0.3 x uniform."""
        nll, _, mean = cross_entropy(logits, target, True)
        return jnp.sum((0.7 * nll + 0.3 * mean) * jnp.arange(5))

    def plain(logits):
        labels = optax.smooth_labels(jax.nn.one_hot(target, 11), 0.3)
        return jnp.sum(optax.softmax_cross_entropy(logits.astype("float32"), labels) * jnp.arange(5))

    both = jax.jit(lambda logits: [jax.value_and_grad(loss)(logits) for loss in (smoothed, plain)])
    (loss, actual), (expected_loss, expected) = jax.device_get(both(logits))
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
    actual, expected = actual.astype("float32"), expected.astype("float32")
    tolerance = 1e-5 if dtype == "float32" else 2**-7  # one rounding to the dtype of the logits
    np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=1e-5)


def test_the_backward_pass_keeps_the_logits_as_they_came():
    logits, target = example()
    logits = logits.astype(jnp.bfloat16)
    pull = jax.eval_shape(lambda logits: jax.vjp(lambda logits: cross_entropy(logits, target), logits)[1], logits)
    kept = [leaf for leaf in jax.tree.leaves(pull) if getattr(leaf, "size", 0) >= logits.size]
    assert [leaf.dtype for leaf in kept] == [logits.dtype]


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="there is no libtpu but for Linux on x86-64")
def test_a_tpu_holds_logits_once():
    """The gradient of the logits reuses their memory if libtpu materializes it, as it does for a ring that sums the
    head's gradient."""
    mesh = Mesh(np.array(devices_of(find_topology("v5e-16"))), ("fsdp",), axis_types=(AxisType.Auto,))
    split = NamedSharding(mesh, PartitionSpec("fsdp"))
    rows, width, vocab = 4096, 256, 32768
    shapes = ((16, rows, width), jnp.bfloat16), ((width, vocab), jnp.float32), ((16, rows), jnp.int32)
    args = [jax.ShapeDtypeStruct(*shape, sharding=split) for shape in shapes]

    def loss(x, head, target):
        logits = jax.lax.with_sharding_constraint(jnp.matmul(x, head.astype(x.dtype)), split)
        return jnp.sum(cross_entropy(logits, target)[0])

    gradients = jax.jit(jax.grad(loss, (0, 1)), out_shardings=(split, split))
    with dump.uncached():  # a program for an absent TPU cannot be loaded from the cache
        compiled = gradients.lower(*args).compile(TPU_QUICKLY)
    logits, head = (2 * count * vocab for count in (rows, width))
    assert "collective-permute" in compiled.as_text()  # the ring, without which this test would prove nothing
    assert logits + head <= compiled.memory_analysis().temp_size_in_bytes < 1.02 * (logits + head)

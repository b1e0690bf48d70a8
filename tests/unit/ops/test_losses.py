import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from trainer.ops.losses import cross_entropy


def example():
    rng = np.random.default_rng(0)
    return rng.normal(size=(2, 5, 11)).astype(np.float32) * 3, rng.integers(0, 11, (2, 5))


def test_equals_optax_and_the_logsumexp():
    logits, target = example()
    nll, log_z = cross_entropy(jnp.asarray(logits), jnp.asarray(target))
    np.testing.assert_allclose(nll, optax.softmax_cross_entropy_with_integer_labels(logits, target), rtol=1e-6)
    np.testing.assert_allclose(log_z, np.log(np.exp(logits.astype(float)).sum(-1)), rtol=1e-6)


def test_low_precision_logits_give_float32_losses():
    logits, target = example()
    nll, log_z = cross_entropy(jnp.asarray(logits, jnp.bfloat16), jnp.asarray(target))
    assert nll.dtype == log_z.dtype == jnp.float32


def test_gradient_equals_finite_differences():
    logits, target = example()

    def loss(logits):
        nll, log_z = cross_entropy(logits, jnp.asarray(target))
        return jnp.sum(nll + 0.1 * log_z**2)

    grad = jax.grad(loss)(jnp.asarray(logits))
    for index in [(0, 0, 3), (1, 2, 7), (1, 4, int(target[1, 4]))]:
        step = np.zeros_like(logits)
        step[index] = 0.05
        slope = (loss(jnp.asarray(logits + step)) - loss(jnp.asarray(logits - step))) / 0.1
        np.testing.assert_allclose(grad[index], slope, atol=2e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_equal_those_of_the_plain_formula(dtype):
    logits, target = example()
    logits, target = jnp.asarray(logits, dtype), jnp.asarray(target)

    def plain(logits, target):
        log_p = jax.nn.log_softmax(logits.astype(jnp.float32))
        nll = -jnp.take_along_axis(log_p, target[..., None], -1)[..., 0]
        return nll, jax.nn.logsumexp(logits.astype(jnp.float32), -1)

    def loss(fn):
        def of(logits):
            nll, log_z = fn(logits, target)
            return jnp.sum(nll * jnp.arange(5) + 0.1 * log_z**2)

        return of

    actual, expected = (jax.grad(loss(fn))(logits) for fn in (cross_entropy, plain))
    assert actual.dtype == expected.dtype == dtype
    tolerance = 1e-5 if dtype == "float32" else 2**-7
    np.testing.assert_allclose(actual.astype("float32"), expected.astype("float32"), rtol=tolerance, atol=1e-5)


def test_the_backward_pass_keeps_the_logits_as_they_came():
    logits, target = example()
    logits = jnp.asarray(logits, jnp.bfloat16)
    _, pull = jax.vjp(lambda logits: cross_entropy(logits, jnp.asarray(target)), logits)
    kept = [leaf for leaf in jax.tree.leaves(pull) if getattr(leaf, "size", 0) >= logits.size]
    assert [leaf.dtype for leaf in kept] == [logits.dtype]

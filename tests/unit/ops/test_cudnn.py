"""cuDNN's attention: the same call in XLA compared with the reference op, and its lowering for an absent GPU."""

import functools

import jax
import jax.numpy as jnp
import pytest
from attention_cases import assert_close, inputs, value_and_grads
from jax._src.cudnn import fused_attention_stablehlo

from trainer.ops.attention import Dropout, dot_product_attention
from trainer.ops.cudnn import cudnn_attention

in_xla = functools.partial(cudnn_attention, implementation="xla")


@pytest.mark.parametrize("window", [0, 1, 5, 40])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2)])
def test_the_call_equals_the_reference_op(heads, kv_heads, window):
    args = inputs(2, 24, heads, kv_heads, 8, dtype=jnp.bfloat16)
    actual = value_and_grads(in_xla, args, window=window)
    expected = value_and_grads(dot_product_attention, args, window=window)
    if window == 1:  # with a single visible token, query and key have no gradient
        actual, expected = ({name: arrays[name] for name in ("out", "value")} for arrays in (actual, expected))
    assert_close(actual, expected, 0.02)  # bfloat16 keeps 8 bits


def test_what_cudnn_does_not_support_is_refused():
    args = inputs(1, 24, 1, 1, 8, dtype=jnp.bfloat16)
    with pytest.raises(ValueError, match="neither dropout"):
        in_xla(*args, Dropout(jax.random.key(0), jnp.arange(1), 0.1))
    with pytest.raises(ValueError, match="soft cap"):
        in_xla(*args, soft_cap=1.0)
    with pytest.raises(ValueError, match="not 4 with keys of 8"):
        in_xla(*inputs(1, 24, 1, 1, 8, value_width=4, dtype=jnp.bfloat16))
    with pytest.raises(ValueError, match="bfloat16, not float32"):
        in_xla(*inputs(1, 24, 1, 1, 8))


def test_the_call_lowers_to_cudnn_kernels(monkeypatch):
    # Lowering asks for the version of the installed library, but none is installed.
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91100)
    query, key, value, mask = inputs(2, 256, 4, 2, 64, dtype=jnp.bfloat16)

    def text(window):
        def loss(query, key, value, mask):
            return cudnn_attention(query, key, value, mask, window=window).astype(jnp.float32).sum()

        step = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
        return step.trace(query, key, value, mask).lower(lowering_platforms=("cuda",)).as_text()

    # With the bias that encodes the segments, forward and backward.
    for window in (0, 100):
        calls = [line for line in text(window).splitlines() if "custom_call @__cudnn$" in line]
        assert [line.partition("@")[2].partition("(")[0] for line in calls] == [
            "__cudnn$fmhaScaleBiasSoftmax",
            "__cudnn$fmhaScaleBiasSoftmaxBackward",
        ]
        for line in calls:
            assert "tensor<2x1x256x256xbf16>" in line
            assert ("\\22sliding_window_length\\22: 100" in line) == (window == 100)
            assert "CAUSAL" in line

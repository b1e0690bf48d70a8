"""cuDNN's attention: the same call computed by XLA against the reference op, and its lowering for an absent GPU."""

import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import assert_close, inputs, value_and_grads
from jax._src.cudnn import fused_attention_stablehlo

from trainer.ops import documents
from trainer.ops.attention import Dropout, Mask, dot_product_attention
from trainer.ops.cudnn import cudnn_attention

in_xla = functools.partial(cudnn_attention, implementation="xla")
lengths = jax.jit(documents.lengths, static_argnums=1)


@pytest.mark.parametrize("window", [0, 1, 5, 40])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2)])
def test_the_call_equals_the_reference_op(heads, kv_heads, window):
    args = inputs(2, 24, heads, kv_heads, 8, dtype=jnp.bfloat16)
    actual = value_and_grads(in_xla, args, window=window)
    expected = value_and_grads(dot_product_attention, args, window=window)
    if window == 1:  # with a single visible token, query and key have no gradient
        actual, expected = ({name: arrays[name] for name in ("out", "value")} for arrays in (actual, expected))
    assert_close(actual, expected, 0.02)  # bfloat16 has 8 significant bits


def test_what_cudnn_does_not_support_is_refused():
    args = inputs(1, 24, 1, 1, 8, dtype=jnp.bfloat16)
    with pytest.raises(ValueError, match="neither dropout"):
        in_xla(*args, Dropout(jax.random.key(0), jnp.arange(1), 0.1))
    with pytest.raises(ValueError, match="soft cap"):
        in_xla(*args, soft_cap=1.0)
    with pytest.raises(ValueError, match="bfloat16, not float32"):
        in_xla(*inputs(1, 24, 1, 1, 8))


def test_values_may_be_narrower_than_keys():
    args = inputs(2, 64, 2, 2, 24, value_width=16, dtype=jnp.bfloat16)
    assert_close(value_and_grads(in_xla, args), value_and_grads(dot_product_attention, args), 0.02)
    forward, backward = calls(jax.grad(summed, argnums=(0, 1, 2)), *args)
    assert forward[1][:3] == backward[1][:3] == [f"tensor<2x64x2x{width}xbf16>" for width in (24, 24, 16)]


def calls(function, *args):
    """Returns the cuDNN calls in `function`, lowered for a GPU: (name, operand types, configuration)."""
    text = jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    found = []
    for name, config, types in re.findall(r'@(__cudnn\$\w+)\(.*backend_config = "(.*?)", .* : \((.*)\) ->', text):
        config = json.loads(config.replace("\\22", '"'))["cudnn_fmha_backend_config"]
        found.append((name.removeprefix("__cudnn$fmha"), types.split(", "), config))
    return found


def summed(*args, **how):
    return cudnn_attention(*args, **how).astype(jnp.float32).sum()


def test_jax_has_what_is_called():
    names = ("_dot_product_attention_fwd_p", "_dot_product_attention_bwd_p", "_dot_product_attention_fwd_cuda_lowering")
    lost = [name for name in (*names, "MaskType", "AttentionLayout") if not hasattr(fused_attention_stablehlo, name)]
    assert not lost, "JAX moved private names: see how its dot_product_attention binds them, and adapt cudnn_kernels.py"


@pytest.mark.parametrize("window", [0, 100])
def test_segments_are_a_bias_without_a_gradient(window):
    args = inputs(2, 256, 4, 2, 64, dtype=jnp.bfloat16)
    forward, backward = calls(jax.grad(functools.partial(summed, window=window), argnums=(0, 1, 2)), *args)
    assert (forward[0], backward[0]) == ("ScaleBiasSoftmax", "ScaleBiasSoftmaxBackward")
    for _, types, config in (forward, backward):
        assert "tensor<2x1x256x256xbf16>" in types
        assert (config["mask_type"], config["sliding_window_length"]) == ("CAUSAL", window)


def test_mapped_over_an_axis_it_is_one_call():
    """DiLoCo's islands and pipeline stages map the op over an axis."""
    args = jax.tree.map(lambda x: x.reshape(2, 3, *x.shape[1:]), inputs(6, 64, 4, 2, 64, dtype=jnp.bfloat16))
    for _, types, _ in calls(jax.grad(lambda *args: jax.vmap(summed)(*args).sum(), argnums=(0, 1, 2)), *args):
        assert types[0] == "tensor<6x64x4x64xbf16>"


def test_what_the_backward_pass_needs_is_kept_once():
    """A policy that saves "context" keeps the result and the softmax statistics."""
    args = inputs(2, 64, 4, 2, 64, dtype=jnp.bfloat16)
    weights = jnp.ones((4, 64, 8), jnp.bfloat16)

    def layer(query, key, value, mask, weights):
        return jnp.einsum("bthd,hde->bte", cudnn_attention(query, key, value, mask), weights)

    policy = jax.checkpoint_policies.save_only_these_names("context")

    def kept(policy):
        kept = jax.eval_shape(lambda *args: jax.vjp(jax.checkpoint(layer, policy=policy), *args)[1], *args, weights)
        return sorted((x.shape, str(x.dtype)) for x in jax.tree.leaves(kept))

    added = kept(policy)
    for shape in kept(jax.checkpoint_policies.nothing_saveable):
        added.remove(shape)
    assert added == [((2, 4, 64), "float32"), ((2, 64, 4, 64), "bfloat16")]


def one_document(rows, length, *, padding=True):
    """Returns the queries, keys, values and mask of `inputs`, with one document per row and with the documents'
    lengths."""
    query, key, value, _ = inputs(rows, length, 4, 2, 8, dtype=jnp.bfloat16)
    index = np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length))
    sizes = length - 7 * padding * np.arange(rows)[:, None]
    segment = (index < sizes).astype(np.int32)
    return query, key, value, Mask(index, index, segment, segment, lengths(segment, 1 if padding else 0))


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("padding", [True, False])
def test_lengths_equal_segments(padding, window):
    args = one_document(3, 24, padding=padding)
    expected = value_and_grads(dot_product_attention, args, window=window)
    assert_close(value_and_grads(in_xla, args, window=window), expected, 0.02)


@pytest.mark.parametrize(("padding", "mask_type", "operands"), [(True, "PADDING_CAUSAL", 2), (False, "CAUSAL", 0)])
def test_a_row_of_one_document_has_no_bias(padding, mask_type, operands):
    args = one_document(3, 64, padding=padding)
    forward, backward = calls(jax.grad(summed, argnums=(0, 1, 2)), *args)
    assert (forward[0], backward[0]) == ("Softmax", "SoftmaxBackward")
    for _, types, config in (forward, backward):
        assert types.count("tensor<3xi32>") == operands
        assert config["mask_type"] == mask_type


def test_a_row_of_padding_has_a_length():
    assert lengths(np.zeros((1, 4), np.int32), 1).tolist() == [[1]]


def packed_rows(length=24):
    """Returns the result of `inputs`, with the documents' lengths added to the mask."""
    query, key, value, mask = inputs(3, length, 4, 2, 8, dtype=jnp.bfloat16)
    return query, key, value, mask._replace(documents=lengths(mask.query_segment, 3))


@pytest.mark.parametrize("window", [0, 5])
def test_lengths_of_several_documents_equal_segments(window):
    args = packed_rows()
    expected = value_and_grads(dot_product_attention, args, window=window)
    assert_close(value_and_grads(in_xla, args, window=window), expected, 0.02)


@pytest.mark.parametrize("window", [0, 5])
def test_several_documents_have_offsets_and_no_bias(window):
    args = packed_rows()
    forward, backward = calls(jax.grad(functools.partial(summed, window=window), argnums=(0, 1, 2)), *args)
    assert (forward[0], backward[0]) == ("Softmax", "SoftmaxBackward")
    for _, types, config in (forward, backward):
        assert types[-4:] == ["tensor<3x4xi32>"] * 2 + ["tensor<3x5xi32>"] * 2  # lengths and offsets
        assert (config["mask_type"], config["max_seg_per_batch"]) == ("PADDING_CAUSAL", 4)
        assert config["sliding_window_length"] == window


def test_documents_of_all_rows_lie_one_after_the_other():
    found = np.array([[3, 0, 0, 5], [0, 0, 0, 8], [2, 2, 4, 0]], np.int32)
    sizes, starts = jax.jit(documents.packed, static_argnums=1)(found, 8)
    assert sizes.tolist() == [3, 5, 8, 2, 2, 4, *[0] * 6]
    assert starts.tolist() == [0, 3, 8, 16, 18, 20, *[24] * 9]


def test_offsets_serve_one_width_alone():
    """Keys and values share one array of offsets in entries, so their widths must be equal."""
    *arrays, mask = inputs(3, 24, 2, 2, 16, value_width=8, dtype=jnp.bfloat16)
    mask = mask._replace(documents=lengths(mask.query_segment, 3))
    assert [name for name, *_ in calls(summed, *arrays, mask)] == ["ScaleBiasSoftmax"]

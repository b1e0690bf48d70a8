"""Costs of custom calls."""

import itertools

import pytest
from jax.errors import JaxRuntimeError

from trainer.aot import kernels
from trainer.aot.hlo import Instruction, Shape, shapes_of
from trainer.config.errors import UserError


def call(name, text, results="bf16[1,4,2048,128]{3,2,1,0}"):
    text = f', custom_call_target="tpu_custom_call", metadata={{op_name="jit(f)/{name}/pallas_call"}}{text}'
    return Instruction("k", "custom-call", shapes_of(results), (), "", text)


def splash(kind, q, kv, steps, suffix="", turned="", shares=1, **results):
    """Returns the cost of a splash kernel for 2048 tokens, with queries split over `shares` devices, 4 query and 2 key
    heads of 128. `steps` is the grid's width."""
    layouts = "".join(f', \\"{name}_layout\\": {2 if name in turned else 1}' for name in "qkv")
    blocks = f'"{{\\"block_q{suffix}\\": {q}, \\"block_kv{suffix}\\": {kv}{layouts}}}"'
    rows, columns = 2048 // shares // q, 2048 // kv
    grid = (1, steps, columns) if suffix == "_dkv" else (1, rows, steps)
    tokens = {"q": 2048 // shares, "k": 2048, "v": 2048}
    sides = {name: (128, tokens[name]) if name in turned else (tokens[name], 128) for name in "qkv"}
    heads = [Shape("bf16", (1, n, *sides[name]), 0) for name, n in (("q", 4), ("k", 2), ("v", 2))]
    operands = [Shape("s8", grid, 0), Shape("s8", grid, 0), *heads, Shape("s32", (1, 2048, 128), 0)]
    return kernels.cost(call(f"splash_mha_{kind}_no_residuals", blocks, **results), operands)


def visible(q, kv, window=2048):
    """Returns the number of blocks in which some query sees some key, by checking the corners of every block."""
    places = itertools.product(range(2048 // q), range(2048 // kv))
    return sum(j * kv <= i * q + q - 1 and (j + 1) * kv - 1 > i * q - window for i, j in places)


@pytest.mark.parametrize(("q", "kv"), [(512, 512), (256, 512), (512, 256), (2048, 128)])
@pytest.mark.parametrize(("kind", "suffix", "products"), [("fwd", "", 2), ("dkv", "_dkv", 4), ("dq", "_dq", 3)])
def test_splash_counts_the_blocks_that_it_visits(kind, suffix, products, q, kv):
    steps = 2048 // q if suffix == "_dkv" else 2048 // kv
    cost = splash(kind, q, kv, steps, suffix)
    assert cost.flops == 2 * products * 4 * visible(q, kv) * q * kv * 128
    assert cost.dtype == "bf16"


@pytest.mark.parametrize(("kind", "suffix"), [("fwd", ""), ("dkv", "_dkv"), ("dq", "_dq")])
def test_a_window_makes_the_grid_narrow(kind, suffix):
    whole, narrow = (splash(kind, 256, 256, steps, suffix) for steps in (8, 3))
    assert narrow.flops / whole.flops == pytest.approx(visible(256, 256, window=512) / visible(256, 256))
    assert narrow.bytes < whole.bytes


@pytest.mark.parametrize(("kind", "suffix"), [("fwd", ""), ("dkv", "_dkv"), ("dq", "_dq")])
def test_devices_that_share_the_queries_of_a_row_share_its_work(kind, suffix):
    whole, part = (
        splash(kind, 256, 256, 8 // shares if suffix == "_dkv" else 8, suffix, shares=shares) for shares in (1, 4)
    )
    assert part.flops == whole.flops / 4


def test_the_fused_backward_kernel_gives_the_queries_gradient_too():
    gradients = "(bf16[1,2,2048,128]{3,2,1,0}, bf16[1,2,2048,128]{3,2,1,0})"
    plain = splash("dkv", 512, 512, 4, "_dkv", results=gradients)
    # As JAX's kernel writes it: a partial query gradient for each of the 4 blocks of keys.
    fused = splash("dkv", 512, 512, 4, "_dkv", results=f"(bf16[1,4,4,2048,128]{{4,3,2,1,0}}, {gradients[1:]}")
    assert fused.flops / plain.flops == 5 / 4
    assert fused.bytes - plain.bytes == 4 * 4 * 2048 * 128 * 2


@pytest.mark.parametrize(("kind", "suffix"), [("fwd", ""), ("dkv", "_dkv"), ("dq", "_dq")])
@pytest.mark.parametrize("turned", ["q", "k", "qk"])
def test_a_layout_changes_no_figure(kind, suffix, turned):
    assert splash(kind, 256, 512, 4, suffix, turned=turned) == splash(kind, 256, 512, 4, suffix)


def test_bytes_of_splash_are_keys_and_values_for_each_visited_block():
    cost = splash("fwd", 512, 512, 4)
    queries = results = 4 * 2048 * 128 * 2
    keys = 4 * visible(512, 512) * 512 * 128 * 2
    assert cost.bytes == queries + 2 * keys + results


def test_an_authors_estimate_is_taken():
    estimate = '{"flops":"12","transcendentals":"3","bytes_accessed":"99","remote_bytes_transferred":"0"}'
    text = f', backend_config={{"custom_call_config":{{"cost_estimate":{estimate}}}}}'
    assert kernels.cost(call("mine", text), [Shape("f32", (8,), 0)]) == (12, 3, 99, "f32")


def test_other_kernels_are_unknown_and_markers_cost_nothing():
    assert kernels.cost(call("mine", ""), [Shape("f32", (8,), 0)]) is None
    assert kernels.computes(call("mine", ""))
    marker = Instruction("m", "custom-call", (), (), "", ', custom_call_target="AsyncCollectiveDone"')
    assert not kernels.computes(marker)


# The message of libtpu 0.0.51 about tiles of 2048 x 2048 for a v5e, shortened.
OUT_OF_VMEM = """RESOURCE_EXHAUSTED: E1001: CompileTimeScopedVmemOom:
Ran out of memory in memory space vmem while allocating on stack for %splash_mha_fwd_segmented_residuals.1 = (f32[2048,
128]{1,0:T(8,128)}) custom-call(%get-tuple-element.5890), custom_call_target="tpu_custom_call", frontend_attributes={
}, metadata={}. Scoped allocation with size 22.98M and limit 16.00M exceeded scoped vmem limit by 6.98M."""


def test_tiles_that_exceed_vector_memory_are_the_users_mistake_and_other_errors_pass():
    with (
        pytest.raises(UserError, match=r"splash_mha_fwd\w+ needs 22.98M .* may use 16.00M; choose smaller tiles"),
        kernels.tiles_fit(),
    ):
        raise JaxRuntimeError(OUT_OF_VMEM)
    with pytest.raises(JaxRuntimeError, match="fusion"), kernels.tiles_fit():
        raise JaxRuntimeError(OUT_OF_VMEM.replace("splash_mha_fwd_segmented_residuals", "fusion"))

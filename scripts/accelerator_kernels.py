"""The checks of attention ops and grouped products in check_accelerator.py, and helpers for all of its checks.

Importing this module imports JAX.
"""

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from trainer.config.capabilities.kernels import KERNELS, Kernel
from trainer.layers.attention import OPS
from trainer.ops.attention import Mask
from trainer.ops.documents import lengths
from trainer.ops.grouped import grouped_matmul, grouped_matmul_reference
from trainer.sharding import hardware

PLAIN = "dot_product"
ROUNDS = 5


class Variant(NamedTuple):
    """A variant of attention."""

    segments: int = 1  # number of documents in each row
    window: bool = False
    sinks: bool = False
    soft_cap: float = 0.0
    padding: bool = False  # the last eighth of each row is padding; its outputs are not compared
    key_width: float = 1.0  # width of queries and keys, as a multiple of the head width in `Sizes`
    value_width: float = 1.0

    def widths(self, width: int) -> tuple[int, int]:
        """Returns the widths of keys and values."""
        return int(self.key_width * width), int(self.value_width * width)

    def documents(self) -> tuple[int, ...]:
        """Returns the values to test for the argument `most` of `trainer.ops.documents.lengths`: the maximum number of
        documents in a row, or 0 if the kernel gets no description of the documents."""
        if self.segments > 1:
            return (self.segments,) if self.key_width == self.value_width else ()
        return (1,) if self.padding else (0, 1)


VARIANTS = {
    "causal": Variant(),
    "segments": Variant(segments=3),
    "window": Variant(segments=3, window=True),
    "window, one document": Variant(window=True),
    "sinks": Variant(segments=3, sinks=True),
    "soft cap": Variant(segments=3, soft_cap=1.0),
    "padding": Variant(segments=3, padding=True),
    "padding, one document": Variant(padding=True),
    "wide heads": Variant(segments=3, key_width=2, value_width=2),
    "unequal widths": Variant(segments=3, key_width=1.5),
    "unequal widths, one document": Variant(key_width=1.5),
}
HOW = {0: "nothing", 1: "lengths"}  # `most` -> what describes the documents to a kernel; above 1: offsets


class Sizes(NamedTuple):
    """The sizes of the checks. `states`, `model` and `decoding` are configurations: key=value settings, separated by
    spaces."""

    dtype: str
    tolerance: float  # maximum error of a kernel's result, relative to the largest entry
    attention: tuple[int, int, int, int, int]  # rows, tokens, heads, key-value heads, head width
    window: int
    grouped: tuple[int, int, int, int]  # rows, groups, inputs, outputs
    matrix: tuple[int, int]  # side of the square matrices, number of their products in one program
    steps: int  # training or decode steps per round
    states: str
    model: str
    decoding: str


Checks = Iterator[tuple[str, Callable[[], str]]]  # the name of a check, and a function that returns its figure as text


class Failed(Exception):
    """A check found a wrong result."""


class LeftOut(Exception):
    """A check does not apply to these devices."""


def expect(right: bool, figure: str) -> str:
    """Returns `figure` if `right` is true; otherwise raises Failed with `figure`."""
    if not right:
        raise Failed(figure)
    return figure


def seconds(fn: Callable[..., Any], *args: Any) -> float:
    """Returns the seconds from a call of `fn` until its result is available."""
    started = time.perf_counter()
    jax.block_until_ready(fn(*args))
    return time.perf_counter() - started


def with_gradients(op: Callable[..., jax.Array]) -> Callable[..., Any]:
    """Returns a jitted function that maps the inputs of `op` to its result and to the gradients with respect to the
    inputs."""

    @jax.jit
    def both(*inputs: jax.Array) -> Any:
        out, pull = jax.vjp(op, *inputs)
        return out, pull(jax.random.normal(jax.random.key(1), out.shape, jnp.float32).astype(out.dtype))

    return both


def in_float32(plain: Callable[..., jax.Array], inputs: Sequence[jax.Array]) -> Callable[[], Any]:
    """Returns a cached function that computes the result and the gradients of the plain op in float32."""

    @functools.cache
    def right() -> Any:
        with jax.default_matmul_precision("highest"):
            return with_gradients(plain)(*(x.astype(jnp.float32) for x in inputs))

    return right


def beside(op: Callable[..., jax.Array], right: Callable[[], Any], inputs: Sequence[jax.Array], most: float) -> str:
    """Compares the result and the gradients of `op` with those that `right` returns, and times `op`. Returns the
    differences and the times as text. Raises Failed if a difference exceeds `most`."""
    forward, both = jax.jit(op), with_gradients(op)
    (out, grads), (right_out, right_grads) = both(*inputs), right()
    far = [furthest((forward(*inputs), out), (right_out, right_out)), furthest(grads, right_grads)]
    times = [1e3 * statistics.median(seconds(fn, *inputs) for _ in range(ROUNDS)) for fn in (forward, both)]
    figure = f"differs by {far[0]:.1e}, gradients by {far[1]:.1e}; {times[0]:.2f} ms, with gradients {times[1]:.2f} ms"
    return expect(all(each <= most for each in far), figure)  # fails for NaN


def furthest(found: Any, right: Any) -> float:
    """Returns the largest difference between an array in `found` and its counterpart in `right`, relative to the
    largest entry of the counterpart."""
    pairs = [[np.asarray(x, np.float32) for x in pair] for pair in zip(found, right, strict=True)]
    return float(np.max([np.max(np.abs(a - b)) / np.max(np.abs(b)) for a, b in pairs]))


def kernels(sizes: Sizes, platform: str) -> Checks:
    """Yields the checks of attention ops and grouped products."""
    keys = jax.random.split(jax.random.key(0), 6)
    capability = hardware(jax.devices())["capability"]
    for variant, what in VARIANTS.items():
        inputs, mask, of = attention(what, sizes)
        right = in_float32(of(PLAIN, mask), inputs)
        for name, kernel in KERNELS.items():
            here = kernel.on(capability)
            own = sizes.dtype == "float32" and name == PLAIN  # this op is the reference
            if platform not in kernel.platforms or own or not computes(here, what, sizes.attention[-1]):
                continue
            masks = {"": mask}
            for most in what.documents():
                if here.documents is None or 0 < max(most, 1) <= here.documents:
                    how = f", {HOW.get(most, 'offsets')}"
                    masks[how] = mask._replace(documents=lengths(mask.query_segment, most))
            for how, its in masks.items():
                op = of(name, its)
                yield f"attention {name}, {variant}{how}", functools.partial(beside, op, right, inputs, sizes.tolerance)
    count, groups, k, n = sizes.grouped
    size_g = jnp.array(
        [0, *[count // groups] * (groups - 2), count - count // groups * (groups - 2)]
    )  # with an empty group
    args = [
        jax.random.normal(key, shape, sizes.dtype) for key, shape in ((keys[4], (count, k)), (keys[5], (groups, k, n)))
    ]
    right = in_float32(lambda x, matrix: grouped_matmul_reference(x, matrix, size_g), args)
    grouped = functools.partial(grouped_matmul, size_g=size_g)
    yield "grouped products", functools.partial(beside, grouped, right, args, sizes.tolerance)


def computes(kernel: Kernel, what: Variant, width: int) -> bool:
    """Returns whether an attention kernel supports a variant."""
    widths = what.widths(width)
    equal = widths[0] == widths[1]
    wide = kernel.head_dim_most is not None and max(widths) > kernel.head_dim_most
    return (
        (kernel.sinks or not what.sinks)
        and (kernel.soft_cap or not what.soft_cap)
        and (kernel.unequal_widths or equal)
        and (not wide or widths in kernel.further_widths)
    )


def attention(what: Variant, sizes: Sizes) -> tuple[list[jax.Array], Mask, Callable[..., Callable[..., jax.Array]]]:
    """Returns the inputs of a variant of attention, its mask, and a factory. Given the name of an op and a mask, the
    factory returns a function that applies the op to the inputs and sets the result at padding to zero."""
    rows, length, heads, kv_heads, width = sizes.attention
    keys = jax.random.split(jax.random.key(0), 6)
    of_key, of_value = what.widths(width)
    shapes = (rows, length, heads, of_key), (rows, length, kv_heads, of_key), (rows, length, kv_heads, of_value)
    inputs = [jax.random.normal(key, shape, sizes.dtype) for key, shape in zip(keys, shapes, strict=False)]
    if what.sinks:
        inputs.append(jax.random.normal(keys[3], (heads,), jnp.float32))
    token, size = jnp.arange(length), length // what.segments + 1
    real = token < length - (length // 8 if what.padding else 0)
    position, segment = (
        jnp.broadcast_to(x, (rows, length)) for x in (token % size, jnp.where(real, token // size + 1, 0))
    )
    settings: dict[str, Any] = {"window": sizes.window * what.window, "soft_cap": what.soft_cap}

    def of(op: str, mask: Mask) -> Callable[..., jax.Array]:
        def call(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None = None) -> jax.Array:
            return jnp.where(real[:, None, None], OPS[op](q, k, v, mask, **settings, sinks=sinks), 0)

        return call

    return inputs, Mask(position, position, segment, segment), of

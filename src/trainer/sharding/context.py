"""The sharding functions for layers. They take logical axis names only.

Outside of `on_mesh` they do nothing, so a layer also works without a mesh, as in a notebook. Inside `shard_mapped` they
shard arrays over the mesh axes that are not manual there.
"""

import contextlib
import contextvars
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from trainer.sharding.capability import compute_capability
from trainer.sharding.rules import Axes, Rules, axes_of, entry, named_sharding, spec

# The name of the rule that lists the mesh axes over which `jax.vmap(..., spmd_axis_name=...)` maps traced code.
MAPPED = "mapped"

_STAGE = "activation_stage"  # the logical axis of a pipeline's stages in activations
_OF_STAGES = (_STAGE, "stages")  # the logical axes of stages in activations and in parameters

current_mesh: contextvars.ContextVar[tuple[Mesh, Rules] | None] = contextvars.ContextVar("mesh and rules", default=None)


@contextlib.contextmanager
def on_mesh(mesh: Mesh, rules: Rules) -> Iterator[None]:
    """A context in which traced code shards its arrays over `mesh` by `rules`."""
    with _traced_on((mesh, rules)):
        yield


@contextlib.contextmanager
def off_mesh() -> Iterator[None]:
    """A context in which traced code shards nothing, e.g. to initialize arrays whose sizes the mesh does not divide."""
    with _traced_on(None):
        yield


@contextlib.contextmanager
def _traced_on(where: tuple[Mesh, Rules] | None) -> Iterator[None]:
    token = current_mesh.set(where)
    try:
        yield
    finally:
        current_mesh.reset(token)


@contextlib.contextmanager
def inside_stages() -> Iterator[None]:
    """A context in which, of all logical axes, only `activation_stage` and `stages` are sharded over the mesh axes of a
    pipeline's stages."""
    current = current_mesh.get()
    with _traced_on(None if current is None else (current[0], _without_stages(current[1]))):
        yield


def _without_stages(rules: Rules) -> Rules:
    taken = rules[_STAGE]
    return {
        name: axes if name in _OF_STAGES else tuple(a for a in axes if a not in taken) for name, axes in rules.items()
    }


def over_stages(fn: Callable[..., Any], in_axes: Any) -> Callable[..., Any]:
    """Returns `fn`, mapped over the stages of a pipeline. `in_axes`: as in `jax.vmap`. Inside `fn`, the mapped axis
    of every array is sharded over the stages."""
    current = current_mesh.get()
    if current is None:
        return jax.vmap(fn, in_axes)
    mesh, rules = current
    inside = {**rules, MAPPED: (*rules.get(MAPPED, ()), *rules[_STAGE])}

    def on_stage(*args: Any) -> Any:
        with _traced_on((mesh, inside)):
            return fn(*args)

    return jax.vmap(on_stage, in_axes, spmd_axis_name=rules[_STAGE])


def same_mesh() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Returns a function that returns a context with the current mesh and rules, for a backward pass that is traced
    later."""
    return functools.partial(_traced_on, current_mesh.get())


def on_platform(name: str) -> bool:
    """Returns whether traced code will run on devices of the platform `name`: cpu, gpu or tpu.

    Looks at the devices of the mesh or, outside of `on_mesh`, at JAX's default devices.
    """
    current = current_mesh.get()
    return (current[0].devices.flat[0].platform if current else jax.default_backend()) == name


def capability_of_mesh() -> tuple[int, int] | None:
    """Returns the compute capability of the GPUs for which code is traced; see `on_platform`, `compute_capability`."""
    current = current_mesh.get()
    return compute_capability(current[0].devices.ravel().tolist() if current else jax.devices()[:1])


def on_tpu() -> bool:
    """Returns whether traced code will run on TPUs; see `on_platform`."""
    return on_platform("tpu")


def sum_dtype(x: jax.Array) -> jnp.dtype | None:
    """Returns the `preferred_element_type` of a product with `x`: float32 for bfloat16 on CPU, otherwise None, so
    that the product has the dtype of `x`. The caller casts a float32 result to the dtype of `x`.

    Every platform accumulates bfloat16 products in float32. But XLA's CPU backend has fast code only for products that
    return float32: a bfloat16 product that returns bfloat16 takes 2.5 to 4 times as long.
    """
    return jnp.dtype(jnp.float32) if x.dtype == jnp.bfloat16 and on_platform("cpu") else None


def constrain(x: jax.Array, names: Sequence[str | None]) -> jax.Array:
    """Returns `x`, sharded by the logical names of its axes.

    Raises:
      UserError: see `rules.named_sharding`.
    """
    at = sharding_of(names, x.shape)
    return x if at is None else jax.lax.with_sharding_constraint(x, at)


def for_product(x: jax.Array, rows: Sequence[str | None], names: Sequence[str | None]) -> jax.Array:
    """Returns `x`, the input or the result of a matrix product, with the axes after its row axes sharded like the
    corresponding axes of the matrix.

    Without this constraint, XLA in jaxlib 0.10.2 returns wrong rows if the mesh axes data, fsdp and tensor all have
    sizes above 1 and there are few tokens (docs/decisions/0021). libtpu is correct, so on TPU `x` is returned
    unchanged.

    Args:
      x: [*rows, *axes].
      rows: the logical names of the row axes.
      names: the logical names of the corresponding axes of the matrix. Mesh axes that shard the row axes do not shard
        these axes, because the matrix is all-gathered over such mesh axes.
    """
    current = current_mesh.get()
    if current is None or on_tpu() or jax.sharding.get_abstract_mesh().manual_axes:
        return x
    mesh, rules = current
    taken = {axis for of_name in spec(rows, rules) for axis in axes_of(of_name)}
    rest = [tuple(axis for axis in axes_of(of_name) if axis not in taken) for of_name in spec(names, rules)]
    partition = PartitionSpec(*spec(rows, rules), *map(entry, rest))
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, partition))


def mesh_axes(name: str) -> tuple[str, ...]:
    """Returns the manual mesh axes of the logical axis `name`, for collectives inside `shard_mapped`.

    Returns () outside of `shard_mapped` and for axes that are not manual there. A sum over no axes is the array itself,
    so `jax.lax.psum(x, mesh_axes("activation_kv_length"))` is correct inside and outside.

    Raises:
      UserError: `name` has no rule.
    """
    current = current_mesh.get()
    if current is None:
        return ()
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return tuple(axis for axis in axes_of(spec([name], current[1])[0]) if axis in manual)


def shards(names: Sequence[str | None]) -> int:
    """Returns the number of shards into which the compiler divides an array with axes `names`; 1 outside of `on_mesh`.

    Inside `shard_mapped`, manual mesh axes do not count.
    """
    current = current_mesh.get()
    if current is None:
        return 1
    manual = jax.sharding.get_abstract_mesh().manual_axes
    found = {axis for of_name in spec(names, current[1]) for axis in axes_of(of_name)}
    return math.prod(current[0].shape[axis] for axis in found if axis not in manual)


def splits_rows() -> bool:
    """Returns whether the compiler shards the tokens of each row (the logical axis `activation_length`)."""
    current = current_mesh.get()
    return current is not None and "activation_length" in current[1] and shards(("activation_length",)) > 1


def sharding_of(names: Sequence[str | None], shape: Sequence[int]) -> NamedSharding | None:
    """Returns the sharding of an array of `shape` with logical axes `names`; None outside of `on_mesh`.

    Inside `shard_mapped`, `shape` is the shape of one device's shard, and the returned sharding omits manual mesh axes.
    If a mesh axis of the rule MAPPED is manual, the result is None.
    """
    current = current_mesh.get()
    if current is None:
        return None
    mesh, rules = current
    inside = jax.sharding.get_abstract_mesh()
    if not inside.manual_axes:
        return named_sharding(mesh, names, shape, rules)
    if any(axis in inside.manual_axes for axis in rules.get(MAPPED, ())):
        return None  # no constraint, because JAX's vmap rule would add this manual axis to it
    free = {name: tuple(axis for axis in axes if axis not in inside.manual_axes) for name, axes in rules.items()}
    return named_sharding(inside, names, shape, free)


def shard_mapped(
    fn: Callable[..., Any], in_names: Any, out_names: Any, *, over: Sequence[str] | None = None, check: bool = True
) -> Callable[..., Any]:
    """Returns a function that runs `fn` on each device's shards and assembles the results by `out_names`.

    Inside `fn`, `mesh_axes` returns the mesh axes of a logical name, for collectives. An NNX module in tree mode may be
    an argument. Values that `fn` assigns to the module's Variables persist after the call; attributes that `fn` adds to
    the module do not.
    Outside of `on_mesh` the result is `fn` itself.

    Args:
      in_names: a tuple with an entry for each positional argument. The entry of an array or a subtree is one `Axes`
        (like a PartitionSpec in `jax.shard_map`), or a tree of `Axes`. The entry of a module is one `Axes` for the
        whole module, or a module with `Axes` in place of its Variables.
      out_names: the same for the result.
      over: logical names whose mesh axes are manual in `fn`; the compiler shards the other axes as usual. None: all
        mesh axes are manual.
      check: False for kernels and custom backward passes, such as the backward pass of `take`: JAX cannot tell whether
        their results are equal on all devices. With False, JAX trusts `out_names` and the names of the Variables that
        `fn` assigns.

    Raises:
      ValueError: when the returned function is called, if a Variable occurs twice in the arguments, or if a result or
        an assigned Variable may differ between devices that have equal copies according to its names.
      UserError: a name has no rule.
    """
    current = current_mesh.get()
    if current is None:
        return fn
    mesh, rules = current
    mapped = rules.get(MAPPED, ())
    if over is None:
        manual = set(mesh.axis_names)
    else:
        manual = {axis for name in over for axis in axes_of(spec([name], rules)[0])}
        if not manual:  # to JAX, an empty set means all axes
            return fn
        rules = {name: tuple(axis for axis in axes if axis in manual) for name, axes in rules.items()}
        manual.update(mapped)  # JAX's vmap rule shards arrays over these axes, so they must be manual

    def specs(names: Any) -> Any:
        return jax.tree.map(lambda axes: spec(axes, rules), names, is_leaf=lambda node: isinstance(node, Axes))

    return nnx.shard_map(
        fn,
        mesh=mesh,
        in_specs=specs(in_names),
        out_specs=specs(out_names),
        axis_names=manual,
        check_vma=check and not mapped,  # JAX cannot check under a vmap
        graph=False,
        graph_updates=False,
    )

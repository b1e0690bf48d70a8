"""Lower bounds on the memory and time of a compiled step, without compiling it.

The docstrings below prove the bounds. `scripts/check_plan_bounds.py` compares bounds with compiled steps. A "loop" is a
rolled loop over layers with more than one iteration, because a compiler may inline a loop with a single iteration.

Symbols: L is the number of iterations of a loop, B the rows of a microbatch over all devices, and T the tokens per row.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Literal, jaxprs_in_params
from jax.extend.core.primitives import dot_general_p, name_p, scan_p

from trainer.aot.chips import Chip, chip_of
from trainer.config.capabilities.expert_keys import drops, has_experts, sends
from trainer.config.capabilities.pipeline_keys import stages
from trainer.config.capabilities.remat_tensors import OWN_TENSORS, TENSORS
from trainer.config.derived import DCN, ICI, global_batch_rows, has_rollouts, mesh_axes, microbatch_rows
from trainer.config.keys import Config
from trainer.config.resolve import resolve
from trainer.models.families import family
from trainer.models.flops import matmul_parameters
from trainer.models.remat import check_offload
from trainer.optim.optimizer import trainable
from trainer.sharding import hardware, memory_kinds
from trainer.state.host import check_host_memory
from trainer.training.build import build
from trainer.training.run import Run

# Keys that change neither the train state nor its shardings. Configurations that differ only in these keys share a
# cached `_State`, and `build` runs only for the first of these configurations. For the others, `resolve` and
# `check_offload` check the keys.
_NOT_OF_STATE = (
    *("per_device_batch_size", "eval_per_device_batch_size", "gradient_accumulation_steps", "num_vocab_tiling"),
    *("remat_policy", *TENSORS, *OWN_TENSORS),
)
# Keys that, like the sizes of mesh axes, do not change the loops' computation for one row.
_NOT_OF_LOOPS = (
    *("per_device_batch_size", "eval_per_device_batch_size", "gradient_accumulation_steps", "num_vocab_tiling"),
    *("shard_optimizer_over_data", "optimizer_memory_host_offload", "parameter_memory_host_offload"),
    *("compile_topology", "compile_topology_num_slices"),
)
# The arrays of a batch that every step reads. jax.jit drops arguments that a step does not read.
_READ = ("inputs", "targets", "targets_segmentation")
# The most bytes outside of HBM that a TPU's compiler may use for temporaries: 128 MiB of CMEM and 32 of VMEM on v4.
_ON_CHIP = 160 * 1024**2
# A compiler may turn a matrix product with a smaller dimension than this into elementwise operations.
_NARROW = 64
# Primitives that only reshape, cast or move an operand, so that `_source` and `_flops` look through them.
_PASSING = frozenset(
    ("reshape", "transpose", "squeeze", "broadcast_in_dim", "expand_dims", "convert_element_type", "copy", "name")
    + ("sharding_constraint", "layout_constraint", "reduce_precision", "optimization_barrier", "device_put")
)

_CALLS = frozenset(("jit", "pjit", "closed_call", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call"))


class Bound(NamedTuple):
    """Lower bounds for one step on one device.

    Attributes:
      arguments: bytes of the step's arguments in device memory: parameters, optimizer state, batch. Layouts that pad
        arrays use more.
      memory: bytes of the arguments and of the temporaries that the step certainly stores. Never more than the
        `peak_bytes` of the compile report.
      seconds: never more than the `seconds` that `aot.roofline` estimates; 0.0 if the chip is unknown.
    """

    arguments: int
    memory: int
    seconds: float


class _State(NamedTuple):
    """Bytes of a step's arguments and of its gradient sums on one device.

    Attributes:
      constant: bytes of the train state, frozen arrays and other arguments that do not depend on the batch size.
      row: bytes for each row of an update's batch.
      updated: bytes of the parameters and their optimizer state if each step reads and writes all of them; else 0.
      sums: bytes of the float32 sums of gradients over microbatches; 0 if not known.
      trains_all: whether all parameters are trained.
    """

    constant: int
    row: float
    updated: int
    sums: int
    trains_all: bool


class _Loops(NamedTuple):
    """Memory and FLOPs of the loops over layers, summed over all devices. Each stack of layers has one loop.

    Attributes:
      kept: bytes that each loop keeps for the backward pass, per row of a microbatch, in the order of the forward pass.
      gradients: bytes of the gradients that each loop's backward loop stacks.
      flops: FLOPs of matrix products of all loops, per row.
    """

    kept: tuple[float, ...] = ()
    gradients: tuple[int, ...] = ()
    flops: float = 0.0

    def live(self, rows: int, microbatches: int) -> float:
        """Returns the largest number of bytes that are live when a backward loop begins.

        The live arrays are those that this loop and earlier loops of the forward pass kept, and this loop's gradients.
        With one microbatch, the gradients of later loops are also live, because the backward pass reaches later loops
        first. With several microbatches, the gradients of later loops have already been added to the sums.
        """
        return max(
            (
                rows * sum(self.kept[: i + 1]) + sum(self.gradients[i : i + 1 if microbatches > 1 else None])
                for i in range(len(self.kept))
            ),
            default=0.0,
        )


class Bounds:
    """Computes the `Bound` of configurations on the same devices.

    Caches results that configurations share. Building a train state takes about 0.1 s, and tracing a step 1 to 5 s. For
    a configuration that differs from an earlier one only in rows, microbatches or vocabulary tiles, `config.resolve`
    takes most of the time.
    """

    def __init__(self, devices: Sequence[jax.Device], chip: Chip | None = None):
        """`chip`: the chip for which to compute `seconds`; None: the devices' chip, if known."""
        self._devices = list(devices)
        self._chip = chip or chip_of(devices[0].device_kind)
        self._states: dict[Any, _State] = {}
        self._loops: dict[Any, _Loops] = {}

    def of(self, config: Config) -> Bound:
        """Returns the bounds of `config`, which this method resolves.

        `memory`, on one device, is the sum of:
        - the arguments. A step selects between old and new state once loss and gradient norm are known
          (`training.step`), so the whole old state stays live until the backward pass ends;
        - the arrays that the loops keep for the backward pass (`_loops_of`);
        - the gradients that the backward loops stack: a loop's results occupy their full size from its first
          iteration on, when all arrays that the forward loop kept are still live (`_Loops.live`);
        - with several microbatches, the float32 sums of gradients.
        On a TPU, `_ON_CHIP` bytes are subtracted from the sum of the last three items, because these may be stored
        outside of HBM. The arrays of loops are counted as if sharded over all devices. The loops of pipelines and
        DiLoCo are not counted, and unrolled layers have none. Logits are not counted, because a compiler may fuse them
        with the loss.

        Raises:
          UserError: `training.build` refuses the configuration on these devices.
        """
        resolved = resolve(config, **hardware(self._devices))
        kinds = memory_kinds(self._devices)
        check_offload(resolved, kinds)
        check_host_memory(resolved, kinds)
        state = self._state(resolved)
        loops = self._of_loops(resolved)
        arguments = state.constant + math.floor(state.row * global_batch_rows(resolved))
        microbatches = resolved.gradient_accumulation_steps
        temporary = loops.live(microbatch_rows(resolved), microbatches) / len(self._devices)
        if microbatches > 1:
            temporary += state.sums
        if self._devices[0].platform == "tpu":
            temporary = max(0, temporary - _ON_CHIP)
        seconds = self._seconds(resolved, state, loops) if self._chip else 0.0
        return Bound(arguments, arguments + math.floor(temporary), seconds)

    def _seconds(self, config: Config, state: _State, loops: _Loops) -> float:
        """Returns the larger of a time for computation and a time for memory traffic.

        Computation: the FLOPs of the model's matrix products for all rows, spread over all devices, at the highest rate
        that the products may reach. The number of FLOPs is the larger of two bounds: the FLOPs of the traced loops
        (including recomputation) plus those of the output head; and `_products`, multiplied by the number of passes (3
        if all parameters are trained, else 1).

        Memory traffic: each step reads and writes the trained parameters and their optimizer state in device memory
        once (`_State.updated`).
        """
        assert self._chip is not None
        rows, tokens = global_batch_rows(config), global_batch_rows(config) * config.max_target_length
        passes = 3 if state.trains_all else 1
        head = 2 * passes * config.base_emb_dim * config.vocab_size
        traced = loops.flops * rows + (head * tokens if loops.flops else 0)
        flops = 0.0 if _reads_rows_differently(config) else max(traced, passes * self._products(config) * tokens)
        memory = 2 * state.updated / (self._chip.hbm_bandwidth / self._chip.devices)
        return max(flops / len(self._devices) / _peak(config, self._chip), memory)

    def _products(self, config: Config) -> float:
        """Returns a lower bound on the FLOPs per token of the forward pass, from the matrix products with parameters.

        Leaves out attention, whose kernels may skip masked blocks, and modules of multi-token prediction, which may
        skip tokens. If experts drop tokens, the products of experts count for a share of `capacity_factor` of
        the tokens, at most 1. If experts drop no tokens and `sparse_matmul` is set, the products of experts count only
        where the lengths and costs of their loops are known: on TPUs without expert parallelism.
        """
        if family(config.decoder_block).forward_flops is None:
            return 0.0
        whole, others = (_matmuls(config, num_experts_per_tok=number) for number in (config.num_experts_per_tok, 0))
        share = 1.0
        if has_experts(config) and drops(config):
            share = min(1.0, config.capacity_factor)
        elif has_experts(config) and config.sparse_matmul:
            share = float(self._devices[0].platform == "tpu" and not sends(config))
        return 2.0 * (others + share * (whole - others))

    def _state(self, config: Config) -> _State:
        key = _key(config, _NOT_OF_STATE)
        if key not in self._states:
            self._states[key] = _state_of(build(config, self._devices))
        return self._states[key]

    def _of_loops(self, config: Config) -> _Loops:
        if not config.scan_layers or stages(config) > 1 or config.enable_diloco:
            return _Loops()
        axes = tuple(axis for axis, size in mesh_axes(config).items() if size > 1)
        key = axes, _narrows(config), _key(config, (*_NOT_OF_LOOPS, *ICI.values(), *DCN.values()))
        if key not in self._loops:
            run = build(config, self._devices)
            self._loops[key] = _loops_of(run.step.trace(*run.abstract_args()).jaxpr.jaxpr, run.config)
        return self._loops[key]


def _key(config: Config, without: Sequence[str]) -> bytes:
    """Returns a digest of `config` without the keys `without`, as a short cache key (the configuration has 14 kB)."""
    text = repr([item for item in sorted(config.items()) if item[0] not in without])
    return hashlib.sha256(text.encode()).digest()


def _narrows(config: Config) -> bool:
    """Returns whether all gradients are cast to bfloat16 before any use, so that a compiler may store only bfloat16."""
    return config.grad_dtype == "bfloat16" and config.gradient_accumulation_steps == 1


def _matmuls(config: Config, **values: Any) -> int:
    return matmul_parameters(Config(dict(config.items()) | {"mtp_num_layers": 0} | values))


def _reads_rows_differently(config: Config) -> bool:
    """Returns False if a step runs exactly one forward pass of `max_target_length` tokens for each row, else True."""
    return bool(config.use_dpo or has_rollouts(config))


def _peak(config: Config, chip: Chip) -> float:
    """Returns the highest FLOP/s per device that products of `config` may reach."""
    narrow = config.quantization or config.checkpoint_is_quantized
    return (max(chip.peak.values()) if narrow else chip.peak["bf16"]) / chip.devices


# ---- The train state ------------------------------------------------------------------------------------------------


def _state_of(run: Run) -> _State:
    """Returns the bytes of a run's arguments and gradient sums on one device. The sums are sharded like the stored
    parameters (`training.step`); with Muon, whose update shards the sums differently, they are counted as if
    sharded over all devices."""
    config, (state, _, frozen) = run.config, run.abstract_args()
    rows = run.rows
    one, two = (_bytes([run.abstract_batch(n).get(name) for name in _READ]) for n in (rows, 2 * rows))
    params = run.codec.unpack(state).params
    kept = jax.tree.leaves(trainable(config)(params))
    trained = [leaf for leaf, is_trained in zip(jax.tree.leaves(params), kept, strict=True) if is_trained]
    sums = 0 if config.enable_diloco else sum(_sum_bytes(leaf, config.opt_type == "muon") for leaf in trained)
    updated = [
        leaf
        for tensor, leaf in zip(jax.tree.leaves(run.states.tensors), jax.tree.leaves(state), strict=True)
        if tensor.of_parameter and "rules" not in tensor.path
    ]
    simple = all(kept) and not config.enable_diloco
    constant = _bytes(state) + _bytes(frozen) + one - rows * ((two - one) // rows)
    return _State(constant, (two - one) / rows, _bytes(updated) if simple else 0, sums, all(kept))


def _bytes(tree: Any) -> int:
    """Returns the bytes of abstract arrays on one device, in device memory. Two 4-bit integers count as one byte."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        if leaf.sharding.memory_kind in (None, "device", "unpinned_host"):
            bits = 4 if leaf.dtype in (jnp.int4, jnp.uint4) else 8 * leaf.dtype.itemsize
            total += math.prod(leaf.sharding.shard_shape(leaf.shape)) * bits // 8
    return total


def _sum_bytes(leaf: Any, over_all: bool) -> int:
    shape = leaf.shape if over_all else leaf.sharding.shard_shape(leaf.shape)
    return 4 * math.prod(shape) // (leaf.sharding.mesh.size if over_all else 1)


# ---- Loops over layers ----------------------------------------------------------------------------------------------


def _loops_of(jaxpr: Any, config: Config) -> _Loops:
    """Returns the memory and FLOPs of the loops of a traced step.

    Kept arrays: a forward loop writes the arrays that its backward loop (a reversed scan) reads, each to one buffer for
    all iterations. A compiler reorders and fuses operations within a loop's body, but it neither recomputes nor shrinks
    a loop's results. Only arrays [L, B, T, ...] or [L, B T, ...] in device memory are counted, so the bytes are
    proportional to the rows. An array is counted only if its source (`_source`) is the loop's input, a matrix product,
    or a tensor that a policy names; a compiler may recompute any other array. Arrays with the same source count once,
    because a compiler merges equal computations. Arrays other than the loop's input count at most two bytes per entry,
    because a TPU's compiler may narrow arrays that only products read.

    Gradients: only loops with counted kept arrays are included, which excludes loops over tiles of the vocabulary.
    Gradients count at most four bytes per entry, or two if `_narrows` returns True.

    FLOPs: a product is counted if the tokens, [B, T] or [B T], are a free dimension of one operand only, or if they are
    contracted. This includes the products that compute gradients. The FLOPs are proportional to the rows.
    """
    rows, length = microbatch_rows(config), config.max_target_length
    most = 2 if _narrows(config) else 4
    kept, gradients, flops = list[float](), list[int](), 0.0
    for forward, backward, times in _pairs(jaxpr, 1):
        for loop in (forward, backward):
            inside = _flops(loop.params["jaxpr"].jaxpr, rows, length)
            flops += inside * loop.params["length"] * times / config.gradient_accumulation_steps
        if found := _kept(forward, backward, rows, length):
            kept.append(found / rows)
            arrays = [v.aval for v in _stacked_outputs(backward) if jnp.issubdtype(v.aval.dtype, jnp.floating)]
            gradients.append(sum(array.size * min(most, array.dtype.itemsize) for array in arrays))
    return _Loops(tuple(kept), tuple(gradients), flops / rows)


def _pairs(jaxpr: Any, times: int) -> Iterator[tuple[Any, Any, int]]:
    """Yields triples of a forward loop, its backward loop, and the number of times that these run, in the order of the
    forward pass."""
    loops = [it for it in jaxpr.eqns if it.primitive is scan_p and it.params["length"] > 1]
    backward = [loop for loop in loops if loop.params["reverse"]]
    for forward in loops:
        written = set(_stacked_outputs(forward))
        found = next((loop for loop in backward if written.intersection(_variables(_stacked_inputs(loop)))), None)
        if found and not forward.params["reverse"]:
            backward.remove(found)
            yield forward, found, times
    for equation in jaxpr.eqns:
        turns = equation.params["length"] if equation.primitive is scan_p else 1
        if equation.primitive is scan_p or equation.primitive.name in ("jit", "pjit", "closed_call"):
            for inner in jaxprs_in_params(equation.params):
                yield from _pairs(inner, times * turns)


def _variables(values: Sequence[Any]) -> set[Any]:
    return {value for value in values if not isinstance(value, Literal)}


def _stacked_inputs(loop: Any) -> Sequence[Any]:
    return loop.invars[loop.params["num_consts"] + loop.params["num_carry"] :]


def _stacked_outputs(loop: Any) -> Sequence[Any]:
    return loop.outvars[loop.params["num_carry"] :]


def _kept(forward: Any, backward: Any, rows: int, length: int) -> float:
    """Returns the bytes, over all devices, of arrays that `forward` stacks and `backward` reads (see `_loops_of`)."""
    read = _variables(_stacked_inputs(backward))
    body, first = forward.params["jaxpr"].jaxpr, forward.params["num_consts"]
    carried = {(v,) for v in body.invars[first : first + forward.params["num_carry"]]}
    sizes: dict[Any, int] = {}
    for outside, inside in zip(_stacked_outputs(forward), body.outvars[forward.params["num_carry"] :], strict=True):
        aval = outside.aval
        if outside not in read or not _has_tokens(aval.shape[1:], rows, length):
            continue
        if "host" in str(getattr(aval, "memory_space", "")).lower():
            continue
        source, named, product = _source(body, inside)
        of_input = source in carried
        if of_input or named or product:
            itemsize = aval.dtype.itemsize if of_input else min(2, aval.dtype.itemsize)
            size = math.prod(aval.shape) * itemsize
            sizes[source] = min(size, sizes.get(source, size))
    return sum(sizes.values())


def _has_tokens(shape: Sequence[int], rows: int, length: int) -> bool:
    return tuple(shape[:2]) == (rows, length) or tuple(shape[:1]) == (rows * length,)


def _source(jaxpr: Any, var: Any) -> tuple[Any, bool, bool]:
    """Returns the source of `var`, whether the source or a copy of the source has a checkpoint name, and whether a
    matrix product computes the source.

    `var` is a copy of its source: the same values, only reshaped, cast or moved. The source is returned as a tuple:
    first the ids of the calls that contain this variable, from the outermost call to the innermost, then the variable.
    """
    named, outer = False, list[Any]()
    while not isinstance(var, Literal):
        made = next((equation for equation in jaxpr.eqns if var in equation.outvars), None)
        if made is None:  # an argument of `jaxpr`, or a constant
            if not outer or var not in jaxpr.invars:
                break
            # Counts from the end, because constants may come before the operands.
            behind = jaxpr.invars.index(var) - len(jaxpr.invars)
            jaxpr, equation = outer.pop()
            var = equation.invars[behind]
        elif (inner := _called(made)) is not None:
            outer.append((jaxpr, made))
            jaxpr, var = inner, inner.outvars[made.outvars.index(var)]
        elif made.primitive.name in _PASSING and made.invars[made.outvars.index(var)].aval.size == var.aval.size:
            named |= made.primitive is name_p
            var = made.invars[made.outvars.index(var)]
        else:
            return (*(id(call) for _, call in outer), var), named, made.primitive is dot_general_p
    return (*(id(call) for _, call in outer), var), named, False


def _called(equation: Any) -> Any:
    """Returns the jaxpr that `equation` calls exactly once with its operands; None for other equations."""
    if equation.primitive.name not in _CALLS:
        return None
    return next(iter(jaxprs_in_params(equation.params)), None)


def _flops(jaxpr: Any, rows: int, length: int) -> float:
    """Returns the FLOPs of the products with tokens in one run of `jaxpr` (see `_loops_of`).

    Products of the same arrays, even after casts and reshapes, count once, because a compiler merges equal
    computations.
    """
    found, seen = 0.0, set()
    makers = {var: equation for equation in jaxpr.eqns for var in equation.outvars}

    def origin(var: Any) -> Any:
        while not isinstance(var, Literal) and var in makers and makers[var].primitive.name in _PASSING:
            var = makers[var].invars[0]
        return var

    for equation in jaxpr.eqns:
        if equation.primitive is dot_general_p:
            key = (*map(origin, equation.invars), str(equation.params["dimension_numbers"]))
            if key not in seen:
                seen.add(key)
                found += _product_flops(equation, rows, length)
        elif (inner := _called(equation)) is not None:
            found += _flops(inner, rows, length)
    return found


def _product_flops(equation: Any, rows: int, length: int) -> float:
    contracting, batch = equation.params["dimension_numbers"]
    shapes = [v.aval.shape for v in equation.invars]
    roles = [_role(*sides, rows, length) for sides in zip(shapes, contracting, batch, strict=True)]
    if sorted(roles) not in (["", "free"], ["contracting", "contracting"]):
        return 0.0
    width = math.prod(shapes[0][axis] for axis in contracting[0])
    free = [
        math.prod(n for axis, n in enumerate(shape) if axis not in (*over, *each))
        for shape, over, each in zip(shapes, contracting, batch, strict=True)
    ]
    if batch[0] or min(width, *free) < _NARROW:
        return 0.0
    return 2.0 * width * math.prod(free)


def _role(shape: Sequence[int], contracting: Sequence[int], batch: Sequence[int], rows: int, length: int) -> str:
    """Returns the role of an operand's token axes in a product: "free", "contracting" or "batch"; "" if the operand has
    no token axes; "both" if the axes of rows and length have different roles."""
    found = set()
    for axis, size in enumerate(shape):
        whole = size == rows * length
        if whole or tuple(shape[axis : axis + 2]) == (rows, length):
            for each in (axis,) if whole else (axis, axis + 1):
                found.add("contracting" if each in contracting else "batch" if each in batch else "free")
    return "" if not found else found.pop() if len(found) == 1 else "both"

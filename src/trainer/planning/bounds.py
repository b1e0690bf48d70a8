"""Lower bounds on the memory and time of a compiled step, without compiling it.

Each bound has a proof, which the docstrings of its parts give. `scripts/check_plan_bounds.py` compares bounds with
compiled steps. "Loop" is a rolled loop over layers of more than one turn; a compiler may inline one turn.

Letters: L turns of a loop, B rows of a microbatch over all devices, T tokens of a row.
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

# Keys that change neither the train state nor its shardings. Their checks are in `resolve` and `check_offload`.
_NOT_OF_STATE = (
    *("per_device_batch_size", "eval_per_device_batch_size", "gradient_accumulation_steps", "num_vocab_tiling"),
    *("remat_policy", *TENSORS, *OWN_TENSORS),
)
# Keys that do not change what the loops do for one row, beside the sizes of mesh axes.
_NOT_OF_LOOPS = (
    *("per_device_batch_size", "eval_per_device_batch_size", "gradient_accumulation_steps", "num_vocab_tiling"),
    *("shard_optimizer_over_data", "optimizer_memory_host_offload", "parameter_memory_host_offload"),
    *("compile_topology", "compile_topology_num_slices"),
)
# The arrays of a batch that every step reads. jax.jit drops arguments that a step does not read.
_READ = ("inputs", "targets", "targets_segmentation")
# The largest memory beside HBM in which a TPU's compiler may place temporaries: 128 MiB of CMEM and 32 of VMEM on v4.
_ON_CHIP = 160 * 1024**2
# A product of fewer columns may become elementwise operations.
_NARROW = 64
# Equations that only pass their first operand on, for `_source`.
_PASSING = frozenset(
    ("reshape", "transpose", "squeeze", "broadcast_in_dim", "expand_dims", "convert_element_type", "copy", "name")
    + ("sharding_constraint", "layout_constraint", "reduce_precision", "optimization_barrier", "device_put")
)

_CALLS = frozenset(("jit", "pjit", "closed_call", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call"))


class Bound(NamedTuple):
    """Lower bounds for one step on one device.

    Attributes:
      arguments: bytes of the step's arguments in device memory: parameters, optimizer state, batch. Layouts that pad
        arrays take more.
      memory: bytes of the arguments and of what the step certainly keeps besides: at most the report's `peak_bytes`.
      seconds: at most the `seconds` of `aot.roofline`; 0.0 if the chip is unknown.
    """

    arguments: int
    memory: int
    seconds: float


class _State(NamedTuple):
    """The arguments on one device, in bytes.

    Attributes:
      constant: train state, frozen arrays.
      row: each row of the batch of an update.
      updated: parameters and their optimizer state, all of which each step reads and writes; 0 if not known.
      sums: the float32 sums of gradients over microbatches; 0 if not known.
      trains_all: whether all parameters are trained.
    """

    constant: int
    row: float
    updated: int
    sums: int
    trains_all: bool


class _Loops(NamedTuple):
    """What the loops over layers do, one for each stack of layers, over all devices together.

    Attributes:
      kept: bytes that each loop keeps for the backward pass, per row of a microbatch, in the order of the forward pass.
      gradients: bytes of the gradients that its backward loop stacks.
      flops: FLOPs of matrix products of all loops, per row.
    """

    kept: tuple[float, ...] = ()
    gradients: tuple[int, ...] = ()
    flops: float = 0.0

    def live(self, rows: int, microbatches: int) -> float:
        """Returns the most bytes that live when a backward loop begins: what this loop and earlier ones kept, its own
        gradients, and those of later ones, unless they are added to the sums over microbatches first."""
        return max(
            (
                rows * sum(self.kept[: i + 1]) + sum(self.gradients[i : i + 1 if microbatches > 1 else None])
                for i in range(len(self.kept))
            ),
            default=0.0,
        )


class Bounds:
    """Computes the `Bound` of configurations on the same devices.

    Keeps results that other configurations share: building the train state takes about 0.1 s, tracing a step 1 to 5 s;
    a configuration that differs only in rows, microbatches or vocabulary tiles takes the time of `config.resolve`.
    """

    def __init__(self, devices: Sequence[jax.Device], chip: Chip | None = None):
        """`chip`: for `seconds`; None: that of the devices, if known."""
        self._devices = list(devices)
        self._chip = chip or chip_of(devices[0].device_kind)
        self._states: dict[Any, _State] = {}
        self._loops: dict[Any, _Loops] = {}

    def of(self, config: Config) -> Bound:
        """Returns the bounds of `config`, which is as `config.load` returns it.

        `memory`, on one device, is the sum of:
        - the arguments. A step selects between old and new state once loss and gradient norm are known
          (`training.step`), so the whole old state lives until the backward pass ends;
        - what the loops keep for the backward pass (`_loops_of`);
        - the gradients that the backward loops stack: a loop's results take their whole size from its first turn, when
          everything that the forward loop kept still lives (`_Loops.live`);
        - with several microbatches, the float32 sums of gradients.
        A TPU may hold a part of the last three, `_ON_CHIP`, in memories beside HBM. Arrays are counted as sharded over
        all devices. Pipelines, DiLoCo and unrolled layers have no loops that the bound counts. Logits are not counted:
        a compiler may fuse them with the loss.

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
        """Returns the larger of two times.

        Compute: products of the model for every row, spread over all devices, at the fastest rate that they may have.
        The products of the loops are counted in the traced step (recomputation included), or by `_products`, whichever
        is more; the output head by its size. Memory: each step reads and writes trained parameters and their optimizer
        state, in device memory, once.
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
        """Returns FLOPs of the forward pass for a token: at most those of the matrix products with parameters.

        Leaves out attention, whose kernels may skip masked blocks, and modules of multi-token prediction, which may
        skip tokens. An expert with a capacity computes at least that share of its tokens. Experts without one count
        only where their loops have known lengths and costs: on TPUs without expert parallelism.
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
    """Returns a digest of `config` without some keys. The text itself would take 14 kB for each key of a cache."""
    text = repr([item for item in sorted(config.items()) if item[0] not in without])
    return hashlib.sha256(text.encode()).digest()


def _narrows(config: Config) -> bool:
    """Whether gradients are only read by casts to bfloat16, so that a compiler may keep nothing else."""
    return config.grad_dtype == "bfloat16" and config.gradient_accumulation_steps == 1


def _matmuls(config: Config, **values: Any) -> int:
    return matmul_parameters(Config(dict(config.items()) | {"mtp_num_layers": 0} | values))


def _reads_rows_differently(config: Config) -> bool:
    """Whether the step's rows are not the rows of one forward pass of `max_target_length` tokens each."""
    return bool(config.use_dpo or has_rollouts(config))


def _peak(config: Config, chip: Chip) -> float:
    """Returns the fastest FLOP/s of a device that products of `config` may have."""
    narrow = config.quantization or config.checkpoint_is_quantized
    return (max(chip.peak.values()) if narrow else chip.peak["bf16"]) / chip.devices


# ---- The train state ------------------------------------------------------------------------------------------------


def _state_of(run: Run) -> _State:
    """Returns the bytes of a run's arguments on one device. Sums of gradients are sharded as parameters are stored
    (`training.step`); under Muon, whose update shards them differently, they count as sharded over all devices."""
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
    """Returns the bytes of abstract arrays on one device, in device memory. Integers of 4 bits may be packed."""
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
    """Returns what the loops of a traced step do.

    A forward loop that a backward loop (a reversed scan) follows directly writes the arrays that the backward loop
    reads, each as one buffer for all turns: a compiler reorders and fuses within a loop's body, but it neither
    recomputes nor shrinks what a loop returns. Counted are arrays with the axes [L, B, T, ...] or [L, B T, ...] in
    device memory, so the bytes are proportional to the rows. Gradients count only of loops with such arrays: those over
    layers, not those over tiles of the vocabulary. Arrays with equal sources count once, because a compiler
    merges equal computations, and only with sources that it cannot recompute from other arrays: the loop's input, a
    matrix product, or a tensor that a policy names. All but the loop's input count as bfloat16 at most, as a TPU's
    compiler narrows arrays that only products read.

    Gradients count in float32, or in bfloat16 where only casts to grad_dtype=bfloat16 read them.

    FLOPs are those of products with exactly one axis of tokens, [B, T] or [B T], and of their gradients. They are
    proportional to the rows.
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
    """Yields each forward loop with its backward loop, in the order of the forward pass, and how often both run."""
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
    """Returns the bytes over all devices that `backward` reads of what `forward` stacks, see `_loops_of`."""
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
    """Returns the variable from which `var` is only reshaped or cast, with the equations whose calls compute it;
    whether a name was passed on the way, and whether a matrix product computes it."""
    named, outer = False, list[Any]()
    while not isinstance(var, Literal):
        made = next((equation for equation in jaxpr.eqns if var in equation.outvars), None)
        if made is None:  # an argument of `jaxpr`, or a constant
            if not outer or var not in jaxpr.invars:
                break
            behind = jaxpr.invars.index(var) - len(jaxpr.invars)  # constants may come before the operands
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
    """Returns the FLOPs of one call's products with tokens, see `_loops_of`. Products of the same arrays, also after
    casts and reshapes, count once, because a compiler merges equal ones."""
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
    """Returns the role in a product of an operand's axis of tokens: "free" or "contracting"; "" if it has none; "both"
    if its rows and its length have different roles."""
    found = set()
    for axis, size in enumerate(shape):
        whole = size == rows * length
        if whole or tuple(shape[axis : axis + 2]) == (rows, length):
            for each in (axis,) if whole else (axis, axis + 1):
                found.add("contracting" if each in contracting else "batch" if each in batch else "free")
    return "" if not found else found.pop() if len(found) == 1 else "both"

"""FLOPs and memory traffic of the instructions of an HLO module.

The rules follow XLA's cost analysis (openxla/xla, xla/service/hlo_cost_analysis.cc), which a compiled function reports
as `cost_analysis()`, with three exceptions. XLA counts a loop body once; this module counts it once per iteration. For
a scatter within a fusion, XLA counts the whole target array; this module counts only the written part. In a TPU's
grouped product, XLA counts every row for every group's matrix; this module counts a row only for its group's matrix.

The rules are:
- A multiplication and an addition are two operations, so a product of [m, k] and [k, n] has 2 m n k operations.
- An elementwise operation counts one operation per element of the result, for any dtype. exp, log, sqrt, tanh, power,
  sine and similar functions are counted separately, as transcendentals. A reduction counts one operation for each
  element by which it shrinks its operand.
- Bytes accessed: every instruction outside fusions reads its operands and writes its result once; slices and updates of
  a larger array access only the affected part; intermediate values of a fusion access no memory.
- `aot.kernels` determines the counts of kernels, which are custom calls.
"""

import functools
import math
from dataclasses import dataclass, field

from trainer.aot import kernels, loops, products
from trainer.aot.collectives import KINDS
from trainer.aot.hlo import Computation, Instruction, Module, Shape
from trainer.aot.opcodes import ELEMENTWISE, FREE, TRANSCENDENTAL

MAIN_MEMORY = 0
HOST_MEMORY = 5  # pinned memory of the host on every platform: xla/layout.h, Layout::kHostMemorySpace
# Maps an instruction that writes only a part of its first operand to the index of the operand that holds this part. For
# a scatter within a fusion, XLA counts the whole first operand, and so does `Counter` if `rolled`.
_IN_PLACE = {"dynamic-update-slice": 1, "scatter": -1}
_ALIASED = "output_to_operand_aliasing"
_OVERLAPPED = "async_collective_fusion"
_IN_PLACE_FOR_XLA = {"dynamic-update-slice": 1}


@dataclass(slots=True)
class Totals:
    """Sums over instructions on one device. `main_bytes` are the bytes accessed in main memory (HBM), `host_bytes`
    those in the host's memory."""

    flops: float = 0.0
    transcendentals: float = 0.0
    bytes: float = 0.0
    main_bytes: float = 0.0
    host_bytes: float = 0.0
    matmul_flops: dict[str, float] = field(default_factory=dict)

    def add(self, other: "Totals", times: float = 1) -> None:
        """Adds `other`, multiplied by `times`."""
        self.flops += times * other.flops
        self.transcendentals += times * other.transcendentals
        self.bytes += times * other.bytes
        self.main_bytes += times * other.main_bytes
        self.host_bytes += times * other.host_bytes
        for dtype, flops in other.matmul_flops.items():
            self.matmul_flops[dtype] = self.matmul_flops.get(dtype, 0.0) + times * flops

    def access(self, *shapes: Shape) -> None:
        """Adds one read or write of each array."""
        for shape in shapes:
            self.touch(shape.bytes, shape.space)

    def touch(self, size: float, space: int) -> None:
        """Adds an access to `size` bytes in a memory space."""
        self.bytes += size
        self.main_bytes += size if space == MAIN_MEMORY else 0
        self.host_bytes += size if space == HOST_MEMORY else 0

    def multiply(self, dtype: str, flops: float) -> None:
        """Adds the operations of a matrix product with operands of `dtype`."""
        self.flops += flops
        self.matmul_flops[dtype] = self.matmul_flops.get(dtype, 0.0) + flops


class Counter:
    """Totals of computations and instructions, each computed once. If `rolled`, a loop body counts once, as in XLA."""

    def __init__(self, module: Module, rolled: bool):
        self.module = module
        self.rolled = rolled
        self.in_place = _IN_PLACE_FOR_XLA if rolled else _IN_PLACE
        self.notes: list[str] = []
        self.unknown: list[str] = []
        self.known: dict[tuple[str, bool, int], Totals] = {}
        self.single: dict[tuple[str, str], Totals] = {}

    def computation(self, name: str, fused: bool = False, groups: int = 1) -> Totals:
        """Returns the totals of one execution of a computation.

        `fused`: whether the computation is in a fusion, so that its instructions access no memory. `groups`: the number
        of groups of the grouped product that contains the computation.
        """
        if (name, fused, groups) not in self.known:
            totals = self.known[name, fused, groups] = Totals()
            computation = self.module.computations[name]
            for instruction in computation:
                if fused:
                    self._work(totals, computation, instruction, True, groups)
                else:
                    totals.add(self.instruction(computation, instruction))
        return self.known[name, fused, groups]

    def instruction(self, computation: Computation, i: Instruction) -> Totals:
        """Returns the totals of one execution of an instruction outside fusions, including the computations that it
        calls."""
        if (computation.name, i.name) not in self.single:
            totals = self.single[computation.name, i.name] = Totals()
            self._work(totals, computation, i, False, 1)
            self._traffic(totals, computation, i)
        return self.single[computation.name, i.name]

    def dearest(self, conditional: Instruction, fused: bool = False) -> str:
        """Returns the name of the branch with the most operations. Between branches with equally many, memory traffic
        decides."""

        def price(name: str) -> tuple[float, float]:
            totals = self.computation(name, fused)
            return totals.flops, totals.bytes

        return max(conditional.called, key=price)

    def _work(self, totals: Totals, computation: Computation, i: Instruction, fused: bool, groups: int) -> None:
        """Adds an instruction's operations, and the totals of the computations that it calls."""
        if groups > 1 and products.masks(computation, i, groups):
            return
        if i.opcode in ELEMENTWISE:
            totals.flops += i.shape.elements
        elif i.opcode in TRANSCENDENTAL or i.opcode.startswith("rng"):
            totals.transcendentals += sum(shape.elements for shape in i.shapes)
        elif i.opcode in ("dot", "convolution"):
            left, right = (operand.shape for operand in computation.operands(i)[:2])
            flops = products.dot(i, left) if i.opcode == "dot" else products.convolution(i, left, right)
            totals.multiply(left.dtype, flops / groups)
        elif i.opcode in ("all-reduce", "all-reduce-start"):
            totals.flops += sum(shape.elements for shape in i.shapes)
        elif i.opcode in ("fusion", "fusion-start"):
            groups = groups if self.rolled else max(groups, products.groups(i))
            totals.add(self.computation(i.attribute("calls"), True, groups))
        elif i.opcode in ("call", "async-start"):
            totals.add(self.computation(i.called[0], fused))
        elif i.opcode == "while":
            for name in i.called:
                totals.add(self.computation(name, fused), self.trips(computation, i))
        elif i.opcode == "conditional":
            totals.add(self.computation(self.dearest(i, fused), fused))
        elif i.opcode == "custom-call":
            self._custom_call(totals, computation, i)
        else:
            self._applied(totals, computation, i)

    def _applied(self, totals: Totals, computation: Computation, i: Instruction) -> None:
        """Adds the operations of reductions, scatters and sorts, which apply a small function many times."""
        operands = [operand.shape.elements for operand in computation.operands(i)]
        window = math.prod(int(size) for size in products.window(i, "size"))
        if i.opcode == "reduce":
            times = operands[0] - i.shape.elements
        elif i.opcode == "reduce-window":
            times = (window - 1) * i.shape.elements
        elif i.opcode == "select-and-scatter":
            times = window * operands[1]
        elif i.opcode == "scatter":
            times = operands[-1]
        elif i.opcode == "map":
            times = i.shape.elements
        elif i.opcode == "sort":
            totals.flops += operands[0] * math.ceil(math.log2(max(2, operands[0])))
            return
        else:
            return
        one = self.computation(i.called[0], fused=True)
        totals.flops += times * one.flops
        totals.transcendentals += times * one.transcendentals

    def trips(self, computation: Computation, loop: Instruction) -> int:
        """Returns the trip count of a loop, or 1 if the trip count is unknown or `rolled` is set."""
        if self.rolled:
            return 1
        trips = loops.trips(self.module, computation, loop)
        if trips is None:
            self.unknown.append(loop.op_name or loop.name)
        return 1 if trips is None else trips

    def _custom_call(self, totals: Totals, computation: Computation, i: Instruction) -> None:
        operands = [operand.shape for operand in computation.operands(i)]
        kernel = kernels.cost(i, operands)
        if kernel is not None:
            totals.multiply(kernel.dtype, kernel.flops)
            totals.transcendentals += kernel.transcendentals
        elif kernels.computes(i):
            self.notes.append(
                f"the kernel {i.op_name or i.attribute('custom_call_target')} has no cost estimate: its operations are "
                "not counted, its operands and results count as read and written once"
            )

    def _traffic(self, totals: Totals, computation: Computation, i: Instruction) -> None:
        """Adds the bytes that an instruction outside fusions reads and writes."""
        operands = computation.operands(i)
        shapes = [shape for operand in operands for shape in operand.shapes]
        if i.opcode in FREE:
            return
        if i.opcode == "fusion":
            self._fusion_traffic(totals, i, operands, i.shapes)
        elif i.opcode == "fusion-start":  # the result is a tuple of the operands, the results, and a context
            self._fusion_traffic(totals, i, operands, i.shapes[len(shapes) : -1])
        elif i.opcode == "custom-call":
            kernel = kernels.cost(i, shapes)
            if kernel is not None and kernel.bytes is not None:
                totals.bytes += kernel.bytes
                totals.main_bytes += kernel.bytes
            elif kernel is not None or kernels.computes(i):
                totals.access(*shapes, *i.shapes)
        elif i.opcode in ("slice", "dynamic-slice"):
            totals.access(i.shape, i.shape._replace(space=shapes[0].space), *shapes[1:2])
        elif i.opcode == "gather":
            totals.access(i.shape, i.shape._replace(space=shapes[0].space), shapes[1])
        elif i.opcode == "dynamic-update-slice":
            totals.access(shapes[1], shapes[1]._replace(space=i.shape.space), *shapes[2:3])
        elif i.opcode == "scatter":
            totals.access(shapes[-1], *[shapes[-1]._replace(space=i.shape.space)] * 2, shapes[-2])
        elif i.opcode in ("copy-start", "slice-start"):
            # The result is a tuple of the copy, the source, and a context to wait on.
            copied = i.shapes[0] if i.opcode == "copy-start" else i.shapes[-2]
            totals.access(copied, copied._replace(space=shapes[0].space))
        elif i.opcode.endswith("-start"):
            totals.access(*shapes, *(i.shapes[len(shapes) : 2 * len(shapes)] or i.shapes))
        else:
            totals.access(*shapes, *i.shapes)

    def _fusion_traffic(
        self, totals: Totals, fusion: Instruction, operands: list[Instruction], results: tuple[Shape, ...]
    ) -> None:
        inside = self.module.computations[fusion.attribute("calls")]
        root = inside.instructions[inside.root]
        written = inside.operands(root) if root.opcode == "tuple" else [root]
        in_flight = self._in_flight(inside)
        if len(written) == len(results):
            for part, shape in zip(written, results, strict=True):
                while part.opcode == "bitcast":
                    part = inside.operands(part)[0]
                if part.opcode in self.in_place:
                    shape = inside.operands(part)[self.in_place[part.opcode]].shape._replace(space=shape.space)
                # A parameter in the result tuple is not copied.
                passed = part.opcode == "parameter" and root.opcode == "tuple"
                if not passed and part.name not in in_flight:
                    totals.access(shape)
        else:
            totals.access(*results)
        for number, operand in enumerate(operands):
            if inside.parameters[number].name in in_flight:
                continue
            size = self._read(inside.name, number)
            whole = sum(shape.bytes for shape in operand.shapes)
            for shape in operand.shapes:
                totals.touch(size * shape.bytes / whole if whole else 0, shape.space)

    def _in_flight(self, inside: Computation) -> set[str]:
        """Returns the names of the arrays in a fusion that belong to a collective that overlaps the fusion.

        A TPU's module repeats such a collective in every fusion that the collective overlaps. The bytes of the
        collective count only in its start and done instructions.
        """
        if self.rolled or not inside.name.startswith(_OVERLAPPED):
            return set()
        found = [i for i in inside if i.opcode in KINDS]
        return {name for i in found for name in (i.name, *i.operands)}

    @functools.cached_property
    def _users(self) -> dict[str, dict[str, list[Instruction]]]:
        return {name: computation.users() for name, computation in self.module.computations.items()}

    def _read(self, computation: str, number: int) -> int:
        """Returns the bytes that a fusion reads of its parameter `number`: the slices that it reads, or the whole array
        once."""
        return self._used(computation, self.module.computations[computation].parameters[number])

    def _used(self, computation: str, array: Instruction) -> int:
        """Returns the bytes of `array` that its users in a fusion read. XLA treats a bitcast as a user of the whole
        array, and so does this method if `rolled` is set."""
        whole = sum(shape.bytes for shape in array.shapes)
        users = self._users[computation]
        size, renamed, shared = 0, 0, False
        for user in users.get(array.name, []):
            if user.opcode == "tuple":
                continue
            if user.opcode == "fusion" and user.operands == (array.name,) and user.attribute(_ALIASED):
                size += self._used(computation, user)  # its result is the same memory, read in different tiles
            elif user.opcode == "fusion":
                numbers = [i for i, name in enumerate(user.operands) if name == array.name]
                size += sum(self._read(user.attribute("calls"), i) for i in numbers)
            elif user.opcode == "slice" or (user.opcode == "dynamic-slice" and user.operands[0] == array.name):
                size += user.shape.bytes
            elif user.opcode in ("broadcast", "reshape"):
                size += whole
            elif user.opcode == "bitcast" and users[user.name] and not self.rolled:
                renamed += self._used(computation, user)
            elif not (user.opcode in self.in_place and user.operands[0] == array.name):
                shared = True
        return size + (whole if shared else min(renamed, whole))

"""Trip counts of loops."""

import re

from trainer.aot.hlo import Computation, Instruction, Module

_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


def trips(module: Module, computation: Computation, loop: Instruction) -> int | None:
    """Returns the trip count of `loop`, a `while` instruction in `computation`; None if the text does not determine it.

    The text determines the count by `known_trip_count`, or by a condition `i < limit` with a constant limit, if i
    starts at a constant and the body adds a constant to i. `lax.scan` and the partitioner's loops have such conditions.
    """
    known = _TRIPS.search(loop.text)
    if known:
        return int(known[1])
    condition = module.computations[loop.attribute("condition")]
    compare = _through(condition, condition.root)
    if compare.opcode != "compare" or "direction=LT" not in compare.text:
        return None
    left, right = (_through(condition, name) for name in compare.operands)
    if left.opcode != "get-tuple-element":
        return None
    index = int(left.attribute("index"))
    first = _initial(computation, loop, index)
    limit = _constant(right)
    if right.opcode == "get-tuple-element":
        limit = _initial(computation, loop, int(right.attribute("index")))
    step = _step(module, module.computations[loop.attribute("body")], index)
    if first is None or limit is None or step is None or step <= 0:
        return None
    return max(0, -(-(limit - first) // step))


def _initial(computation: Computation, loop: Instruction, index: int) -> int | None:
    start = _through(computation, loop.operands[0])
    return _constant(_through(computation, start.operands[index])) if start.opcode == "tuple" else None


def _step(module: Module, body: Computation, index: int) -> int | None:
    """Returns the constant that `body` adds to element `index` of its carry; None if it is not a constant."""
    root = _through(body, body.root)
    if root.opcode != "tuple":
        return None
    step, inputs, name = 0, body, root.operands[index]
    fusion: Instruction | None = None
    while True:
        value = _through(inputs, name)
        if value.opcode == "fusion" and fusion is None:
            fusion, inputs = value, module.computations[value.attribute("calls")]
            name = inputs.root
        elif value.opcode == "parameter" and fusion is not None:
            inputs, name, fusion = body, fusion.operands[int(value.arguments)], None
        elif value.opcode == "add":
            left, right = (_constant(_through(inputs, operand)) for operand in value.operands)
            step += (left or 0) + (right or 0)
            name = value.operands[0 if left is None else 1]
        else:
            carried = value.opcode == "get-tuple-element" and int(value.attribute("index")) == index
            return step if carried else None


def _through(computation: Computation, name: str) -> Instruction:
    """Follows copies, bitcasts and casts back from `name`. Returns the instruction that computes the value."""
    instruction = computation.instructions[name]
    while instruction.opcode in ("copy", "bitcast", "convert", "copy-done", "copy-start"):
        instruction = computation.instructions[instruction.operands[0]]
    return instruction


def _constant(instruction: Instruction) -> int | None:
    if instruction.opcode != "constant" or not re.fullmatch(r"-?\d+", instruction.arguments):
        return None
    return int(instruction.arguments)

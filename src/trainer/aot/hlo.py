"""A parser of HLO text: computations, instructions, shapes, and the source lines of instructions.

The grammar is XLA's (openxla/xla, xla/hlo/parser). The parser reads the long form of HLO, which has `%` before names;
`compiled.as_text()` and the compiler's dumps use this form. The shapes in a partitioned module are per device.
Newer compilers (jaxlib 0.12) print an operand that is a tuple element as `%name#index`, without a `get-tuple-element`
instruction. The parser adds that instruction, so both spellings are parsed to the same module.
"""

import functools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

# Bits per element of dtypes that the function `bits` does not parse. Tokens and opaque values take no memory. A pred
# takes a byte.
BITS = {"pred": 8, "token": 0, "opaque": 0, "c64": 64, "c128": 128, "bf16": 16}

_LEAF = re.compile(r"(\w+)\[([\d,<= ]*)\](\{[^{}]*\})?")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%([^\s=]+) = ")
_COMPUTATION = re.compile(r"^(ENTRY )?%([^\s(]+) \(.*-> .*\{$")
_END = re.compile(r"^\}($| //|, execution_thread)")
_NAME = re.compile(r"%([\w.\-]+(?:#\d+)*)")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|select|scatter|true_computation|false_computation)=%([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")


class Shape(NamedTuple):
    """An array. `dims`: its size along each axis. `space`: its memory space; 0 is main memory (HBM on a TPU)."""

    dtype: str
    dims: tuple[int, ...]
    space: int

    @property
    def elements(self) -> int:
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Size in bytes, without the padding of a tiled layout."""
        return -(-self.elements * bits(self.dtype) // 8)


@functools.cache
def bits(dtype: str) -> int:
    """Returns the bits per element of the HLO dtype `dtype`, such as f32, s4 or f8e4m3fn."""
    if dtype in BITS:
        return BITS[dtype]
    match = re.match(r"[fsu](\d+)", dtype)
    assert match, f"unknown element type {dtype}"
    return int(match[1])


@dataclass(slots=True)
class Instruction:
    """One instruction.

    Attributes:
      shapes: the arrays of its result; a tuple is flattened.
      operands: the names of the operands.
      arguments: the text in the parentheses after the opcode.
      text: the text after these parentheses.
    """

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    arguments: str
    text: str

    @property
    def shape(self) -> Shape:
        return self.shapes[0]

    @property
    def called(self) -> tuple[str, ...]:
        """The names of the called computations, in the order of the text."""
        branches = _BRANCHES.search(self.text)
        return (*_CALLED.findall(self.text), *(_NAME.findall(branches[1]) if branches else ()))

    def attribute(self, name: str) -> str:
        """Returns the text of an attribute `name=%value`, `name={...}` or `name=word`; "" if it is absent."""
        match = re.search(rf"\b{name}=(\{{[^{{}}]*\}}|%?[^\s,]+)", self.text)
        return match[1].lstrip("%") if match else ""

    def numbers(self, name: str) -> tuple[int, ...]:
        """Returns the numbers of an attribute such as `dimensions={0,2}`."""
        return tuple(int(digits) for digits in re.findall(r"\d+", self.attribute(name)))

    @property
    def op_name(self) -> str:
        """The traced operation, such as `jit(step)/while/body/dot_general`; "" if the compiler added the
        instruction."""
        match = re.search(r'op_name="([^"]*)"', self.text)
        return match[1] if match else ""


@dataclass(slots=True)
class Computation:
    """A computation: its instructions by name, in the order of the text, and the name of its root instruction."""

    name: str
    instructions: dict[str, Instruction] = field(default_factory=dict)
    root: str = ""

    def __iter__(self) -> Iterator[Instruction]:
        return iter(self.instructions.values())

    def operands(self, instruction: Instruction) -> list[Instruction]:
        """Returns the instructions that produce `instruction`'s operands."""
        return [self.instructions[name] for name in instruction.operands]

    @property
    def parameters(self) -> list[Instruction]:
        """The parameter instructions, sorted by parameter number."""
        arguments = [i for i in self if i.opcode == "parameter"]
        return sorted(arguments, key=lambda i: int(i.arguments))

    def users(self) -> dict[str, list[Instruction]]:
        """Returns a dict from the name of each instruction to the instructions that use its result."""
        users: dict[str, list[Instruction]] = {name: [] for name in self.instructions}
        for instruction in self:
            for name in dict.fromkeys(instruction.operands):
                users[name].append(instruction)
        return users


@dataclass(slots=True)
class Module:
    """A module: computations by name, the name of the entry computation, and the source lines of stack frames."""

    computations: dict[str, Computation]
    entry: str
    frames: dict[int, tuple[str, int]]  # stack_frame_id -> (file, line), see `_frames`

    def source(self, instruction: Instruction) -> str:
        """Returns the source line from which `instruction` was traced, as `file:line`; "" if it is unknown."""
        direct = re.search(r'source_file="([^"]*)" source_line=(\d+)', instruction.text)
        if direct:
            return f"{direct[1]}:{direct[2]}"
        frame = re.search(r"stack_frame_id=(\d+)", instruction.text)
        file, line = self.frames.get(int(frame[1]), ("", 0)) if frame else ("", 0)
        return f"{file}:{line}" if file else ""


def parse(text: str) -> Module:
    """Returns the module in `text`.

    Raises:
      ValueError: `text` has no entry computation.
    """
    computations: dict[str, Computation] = {}
    current: Computation | None = None
    types: dict[str, str] = {}  # the text of each instruction's shape in the current computation
    entry = ""
    for line in _logical_lines(text):
        if current is None:
            header = _COMPUTATION.match(line)
            if header:
                current = computations[header[2]] = Computation(header[2])
                entry = header[2] if header[1] else entry
        elif _END.match(line):
            current = None
        else:
            match = _INSTRUCTION.match(line)
            if match:
                instruction = _instruction(match[2], line[match.end() :])
                types[instruction.name] = line[match.end() :]
                for name in instruction.operands:
                    _add_element(current, types, name)
                current.instructions[instruction.name] = instruction
                current.root = instruction.name if match[1] else current.root
    if not entry:
        raise ValueError("not an HLO module: it has no ENTRY computation")
    return Module(computations, entry, _frames(text))


def _logical_lines(text: str) -> Iterator[str]:
    """Yields lines, but each instruction as a single line, because attributes of kernels may contain newlines."""
    pending = ""
    for line in text.splitlines():
        starts = _INSTRUCTION.match(line)
        if pending and not starts and not _END.match(line):
            pending += line
            continue
        if pending:
            yield pending
        pending = line if starts else ""
        if not starts:
            yield line
    if pending:
        yield pending


def _instruction(name: str, rest: str) -> Instruction:
    """Parses the text after `%name = `: a shape, an opcode, operands in parentheses, attributes."""
    end = _closing(rest, 0) if rest.startswith("(") else rest.index(" ")
    opening = rest.index("(", end)
    opcode = rest[end:opening].strip()
    closing = _closing(rest, opening)
    arguments = rest[opening + 1 : closing - 1]
    operands = () if opcode in ("constant", "parameter") else tuple(_NAME.findall(arguments))
    return Instruction(name, opcode, shapes_of(rest[:end]), operands, arguments, rest[closing:])


def _add_element(computation: Computation, types: dict[str, str], name: str) -> None:
    """If the operand `name` has the form `tuple#index`, adds the get-tuple-element instruction with this name, unless
    it exists.

    `types` maps each instruction name of the computation to text that begins with the instruction's shape.
    """
    source, _, index = name.rpartition("#")
    if not source or name in computation.instructions:
        return
    _add_element(computation, types, source)
    types[name] = _element(types[source], int(index))
    computation.instructions[name] = Instruction(
        name, "get-tuple-element", shapes_of(types[name]), (source,), f"%{source}", f", index={index}"
    )


def _element(shape: str, index: int) -> str:
    """Returns the text of element `index` of a tuple's shape."""
    depth, begins = 0, [1]
    for match in re.finditer(r"[(\[{]|[)\]}]|,", shape):
        depth += {"(": 1, "[": 1, "{": 1, ",": 0}.get(match[0], -1)
        if depth == (1 if match[0] == "," else 0):
            begins.append(match.end())
        if depth == 0:
            break
    return re.sub(r"/\*.*?\*/", "", shape[begins[index] : begins[index + 1] - 1]).strip()


def _closing(text: str, opening: int) -> int:
    """Returns the index after the parenthesis that matches the one at `opening`."""
    depth = 0
    for parenthesis in re.finditer(r"[()]", text[opening:]):
        depth += 1 if parenthesis[0] == "(" else -1
        if depth == 0:
            return opening + parenthesis.end()
    raise ValueError(f"unbalanced parentheses: {text[:200]}")


def shapes_of(text: str) -> tuple[Shape, ...]:
    """Returns the arrays in `text`, which spells a shape. A tuple is flattened."""
    return tuple(_shape(*leaf.groups()) for leaf in _LEAF.finditer(text))


@functools.lru_cache(maxsize=4096)
def _shape(dtype: str, dims: str, layout: str | None) -> Shape:
    space = re.search(r"S\((\d+)\)", layout or "")
    sizes = tuple(int(digits) for digits in re.findall(r"\d+", dims))
    return Shape(dtype, sizes, int(space[1]) if space else 0)


def _frames(text: str) -> dict[int, tuple[str, int]]:
    """Returns a dict from `stack_frame_id` to (file, line), read from the tables before the first computation.

    The source line is that of the innermost frame of the call stack outside of installed packages or, if there is no
    such frame, of the innermost frame. `parent_frame_id` is the parent's number plus 1, so 1 means no parent.
    """
    tables: dict[str, dict[int, str]] = {"StackFrames": {}, "FileLocations": {}, "FileNames": {}}
    rows: dict[int, str] = {}
    for line in text.splitlines():
        if line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
            rows = tables[line] = {}
        elif line.startswith(("%", "ENTRY")):
            break
        elif match := re.match(r"(\d+) (.*)", line):
            rows[int(match[1])] = match[2]

    def source(frame: int) -> tuple[str, int]:
        location = tables["FileLocations"].get(_number(tables["StackFrames"][frame], "file_location_id"), "")
        file = tables["FileNames"].get(_number(location, "file_name_id"), "")
        return file.strip('"'), _number(location, "line")

    parents = {frame: _number(row, "parent_frame_id") - 1 for frame, row in tables["StackFrames"].items()}
    frames = {}
    for frame, outer in parents.items():
        stack = [source(frame)]
        while outer in parents and "site-packages" in stack[-1][0]:
            stack.append(source(outer))
            outer = parents[outer]
        frames[frame] = stack[0] if "site-packages" in stack[-1][0] else stack[-1]
    return frames


def _number(row: str, name: str) -> int:
    match = re.search(rf"\b{name}=(\d+)", row)
    return int(match[1]) if match else -1

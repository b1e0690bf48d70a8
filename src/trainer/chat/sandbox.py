"""Jinja's sandbox with limits on a template's CPU time and the size of its results (see `config/limits.py`).

Jinja's own sandbox lets a template read only its inputs. This sandbox also limits the number of turns. A turn is a loop
iteration or a call of a macro, function or filter. Before an operation whose result can be larger than its operands,
the sandbox checks that the resulting text, list or integer will not be too large. If a value contains the same list
several times, the list's contents count once per occurrence, because printing and comparing visit every occurrence.
"""

import contextlib
import functools
import re
import string
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.compiler
import jinja2.sandbox
from jinja2 import nodes

from trainer.config.limits import (
    FORMAT_DIGITS,
    INTEGER_BITS,
    MADE_CHARACTERS,
    MADE_TOGETHER,
    OPERAND,
    ROUND_DIGITS,
    SECONDS,
    TURNS,
)

_LOOKS = 256  # the number of turns between two checks of the CPU time
_SMALL = 1 << 12  # texts and lists up to this size, in characters, do not count toward the total
_VALUE, _REFERENCE = 64, 16  # assumed sizes of a value and of a reference in a list, in characters
_TEXT = (str, bytes, bytearray)
_WIDE_FILTERS = ("center", "indent", "batch", "slice", "wordwrap")
_WIDE_METHODS = ("ljust", "rjust", "center", "zfill", "expandtabs", "to_bytes")
_WIDE = rf"\d{{{FORMAT_DIGITS + 1}}}"
_WIDE_PERCENT = re.compile(rf"%(\(\w*\))?[-+ #0]*(\*|{_WIDE}|\d*\.(\*|{_WIDE}))")
_WIDE_FIELD = re.compile(rf"\{{|{_WIDE}")  # in a format spec: a nested field, or a width with too many digits


class _Budget(threading.local):
    """The remaining budget of the conversation that this thread is rendering."""

    turns, made, until = TURNS, MADE_TOGETHER, 0.0


class _Code(jinja2.compiler.CodeGenerator):
    """Jinja's code generator, extended: the generated code counts loop iterations and macro calls, and checks the sizes
    of the results of `~` and of list, tuple and dict literals."""

    def visit_For(self, node: nodes.For, frame: Any) -> None:
        super().visit_For(_counted(node), frame)

    def macro_body(self, node: Any, frame: Any) -> Any:
        return super().macro_body(_counted(node), frame)

    def visit_Concat(self, node: nodes.Concat, frame: Any) -> None:
        self._checked("joined", "(", node.nodes, ",)", frame)

    def visit_List(self, node: nodes.List, frame: Any) -> None:
        if all(isinstance(item, nodes.Const) for item in node.items):
            super().visit_List(node, frame)
        else:
            self._checked("weighed", "[", node.items, "]", frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Any) -> None:
        if node.ctx == "load" and node.items:
            self._checked("weighed", "(", node.items, ",)", frame)
        else:
            super().visit_Tuple(node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Any) -> None:
        self.write("environment.weighed(")
        super().visit_Dict(node, frame)
        self.write(")")

    def _checked(self, method: str, begin: str, items: Sequence[nodes.Expr], end: str, frame: Any) -> None:
        self.write(f"environment.{method}({begin}")
        for i, item in enumerate(items):
            self.write(", " if i else "")
            self.visit(item, frame)
        self.write(f"{end})")


def _counted(node: Any) -> Any:
    turn = nodes.ExprStmt(nodes.EnvironmentAttribute("turn", lineno=node.lineno), lineno=node.lineno)
    node.body = [turn, *node.body]
    return node


class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """A sandbox with the limits that the module docstring describes. Call `begin` before each conversation."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))
    code_generator_class = _Code

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        self._budget = _Budget()
        # Functions with random output are removed, because equal conversations must render to equal texts. pprint is
        # removed because it recurses and is not needed.
        del self.filters["random"], self.filters["pprint"], self.globals["lipsum"]
        self.filters = {name: self._guarded(name, function) for name, function in self.filters.items()}

    def begin(self) -> None:
        """Resets the budget for a new conversation."""
        self._budget.turns, self._budget.made = TURNS, MADE_TOGETHER
        self._budget.until = time.thread_time() + SECONDS

    @property
    def turn(self) -> None:
        """Counts a turn: a loop iteration or a call."""
        budget = self._budget
        budget.turns -= 1
        if budget.turns % _LOOKS == 0:
            self._look()

    def _look(self) -> None:
        if self._budget.turns <= 0 or time.thread_time() > self._budget.until > 0:
            raise _refused(f"it takes more than {TURNS:,} loop iterations and calls, or {SECONDS:g} s of CPU time")

    def made(self, size: int) -> None:
        """Counts a text or list of `size` characters toward the limits. Call this before creating a text or list that
        may be large."""
        if size > _SMALL:
            self._budget.made -= size
            if size > MADE_CHARACTERS or self._budget.made < 0:
                raise _refused(
                    f"it makes more than {MADE_CHARACTERS:,} characters at once, or {MADE_TOGETHER:,} in total"
                )
            self._look()

    def weighed(self, value: Any) -> Any:
        """Counts everything in `value` toward the limits. Returns `value`."""
        self.made(_weight(value))
        return value

    def joined(self, values: Sequence[Any]) -> str:
        """Returns the result of the operator `~`: the concatenated texts of `values`."""
        texts = [value if isinstance(value, str) else str(self.weighed(value)) for value in values]
        self.made(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Returns the result of a binary operator. Raises SecurityError if the result would be too large."""
        if operator == "+" and isinstance(left, _TEXT) and isinstance(right, _TEXT):
            if len(left) + len(right) > _SMALL:
                self.made(len(left) + len(right))
        elif operator == "*" and isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() + right.bit_length())
        elif operator == "**":
            if not all(isinstance(one, int | float) and abs(one) < OPERAND for one in (left, right)):
                raise _refused(f"operands of ** must be below {OPERAND}")
        elif operator == "%" and isinstance(left, _TEXT):
            self._check_percent(left, right)
        elif not (isinstance(left, int | float) and isinstance(right, int | float)):
            sizes = [one if isinstance(one, int) else _length_of(one) for one in (left, right)]
            self.made(sizes[0] * sizes[1] if operator == "*" else sizes[0] + sizes[1])
        return self.binop_table[operator](left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Counts a call in a template and performs it. Methods of texts and integers are called only if their results
        are not too large."""
        budget = __self._budget
        budget.turns -= 1
        if budget.turns % _LOOKS == 0:
            __self._look()
        owner = getattr(__obj, "__self__", None) if args or kwargs else None
        if owner is not None and isinstance(owner, (str, bytes, bytearray, int)):
            __self._check_method(owner, __obj.__name__, [*args, *kwargs.values()])
        elif __obj is dict:
            __self.weighed([args, kwargs])
        result = super().call(__context, __obj, *args, **kwargs)
        return result if type(result) is str and len(result) <= _SMALL else __self._result(result)

    def _result(self, value: Any) -> Any:
        """Counts `value`, the result of a call or a filter, toward the limits. Returns `value`."""
        if isinstance(value, _TEXT):
            if len(value) > _SMALL:
                self.made(len(value))
        elif isinstance(value, list):
            self.made(len(value) * _REFERENCE)
        elif isinstance(value, int):
            _check_bits(value.bit_length())
        return value

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """If `value` is the method `format` of a text, returns a version of this method that refuses wide fields.
        Otherwise, returns None."""
        function = super().wrap_str_format(value)
        if function is None:
            return None

        def checked(*args: Any, **kwargs: Any) -> str:
            form = value.__self__
            with contextlib.suppress(ValueError):  # `function` raises the same error
                specs = [spec for _, _, spec, _ in string.Formatter().parse(form) if spec]
                self._check_format(form, form.count("{"), any(map(_WIDE_FIELD.search, specs)), [args, kwargs])
            return function(*args, **kwargs)

        return checked

    def _check_method(self, owner: Any, name: str, args: Sequence[Any]) -> None:
        if name in _WIDE_METHODS:
            self.made(_width(args) * (_length(owner) + 1))
        elif name == "replace" and len(args) > 1 and all(isinstance(one, _TEXT) for one in args[:2]):
            self._check_replace(owner, *args[:2])
        elif name == "join" and args:
            self._check_join(owner, args[0])
        elif name == "translate":
            self.made(_length(owner) * (1 + _weight(args)))

    def _check_replace(self, text: Any, old: Any, new: Any) -> None:
        if (len(text) + 1) * len(new) > _SMALL and isinstance(old, type(text)):
            self.made(len(text) + text.count(old) * max(0, len(new) - len(old)))

    def _check_join(self, separator: Any, items: Any) -> None:
        if isinstance(items, str | list | tuple | dict):
            self.made(_weight(items) + _length(separator) * len(items))

    def _check_percent(self, form: Any, given: Any) -> None:
        text = form.decode("latin-1") if isinstance(form, bytes | bytearray) else form
        self._check_format(text, text.count("%"), _WIDE_PERCENT.search(text), given)

    def _check_format(self, form: str, fields: int, wide: Any, given: Any) -> None:
        if wide:
            raise _refused(f"a width in a format has at most {['no', 'one', 'two', 'three'][FORMAT_DIGITS]} digits")
        self.made(len(form) + fields * (10**FORMAT_DIGITS + _weight(given)))

    def _guarded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        passed = hasattr(function, "jinja_pass_arg")  # whether Jinja adds an environment or a context

        @functools.wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            self.turn  # noqa: B018, the property counts the call
            value, *more = args[passed:] or (None,)
            more += kwargs.values()
            if name in _WIDE_FILTERS:
                self.made(
                    (_width(more) + _weight([one for one in more if isinstance(one, _TEXT)])) * (_length(value) + 1)
                )
            elif name == "round" and _width(more) > ROUND_DIGITS:
                raise _refused(f"round has at most {ROUND_DIGITS} digits")
            elif name == "replace" and len(more) > 1 and isinstance(value, str):
                self._check_replace(value, str(more[0]), str(more[1]))
            elif name == "join":
                self._check_join(more[0] if more and isinstance(more[0], str) else "", value)
            elif name == "format" and isinstance(value, str):
                self._check_percent(value, more)
            return self._result(function(*args, **kwargs))

        return guarded


def _weight(value: Any) -> int:
    """Returns the size of `value` in characters. The size of a text is its length. The size of any other value is the
    total length of all texts in it, at any depth, plus _VALUE for the value itself and for each value in it. Counting
    stops above MADE_CHARACTERS."""
    if isinstance(value, _TEXT):
        return len(value)
    total, level = 0, [value]
    while level and total <= MADE_CHARACTERS:
        one = level.pop()
        if isinstance(one, _TEXT):
            total += len(one)
        elif isinstance(one, Mapping):
            level += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple | set | frozenset):
            level += one
        total += _VALUE
    return total


def _length_of(value: Any) -> int:
    """Returns the size, in characters, of the part of `value` that the operators `+` and `*` copy: the references in a
    list, or the complete content of any other value."""
    return len(value) * _REFERENCE if isinstance(value, list | tuple) else _weight(value)


def _length(value: Any) -> int:
    return len(value) if hasattr(value, "__len__") else 1


def _width(args: Sequence[Any]) -> int:
    return max((abs(one) for one in args if isinstance(one, int)), default=1)


def _check_bits(bits: int) -> None:
    if bits > INTEGER_BITS:
        raise _refused(f"an integer has more than {INTEGER_BITS:,} bits")


def _refused(text: str) -> Exception:
    return jinja2.sandbox.SecurityError(text)

"""Jinja's sandbox with limits on size: a template cannot make a text or a number without end.

Jinja's own sandbox limits `range` and keeps templates away from Python's internals. It lets
`'a' * 10 ** 10` take all memory. This one looks at each operation that can make something much
larger than what it gets, before it runs.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from jinja2 import TemplateError, nodes, pass_eval_context
from jinja2.compiler import CodeGenerator, Frame
from jinja2.filters import FILTERS
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_RENDERED = 2**24
"""The longest text, in characters, that a template may make, in parts or as a whole."""
_MAX_BITS = 2**16
"""The largest number, in bits."""
_SIZED = (str, bytes, list, tuple)


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, in which operations with a large result raise TemplateError."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.code_generator_class = _Generator
        for name in ("center", "format", "indent", "replace"):
            self.filters[name] = _checked(FILTERS[name])
        self.filters["join"] = _join

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute `left operator right`, unless the result is too large."""
        _check_binop(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call a function or method, unless a text method would make a text that is too long."""
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, _SIZED):
            _check_call(__obj.__name__, owner, [*args, *kwargs.values()])
        return super().call(__context, __obj, *args, **kwargs)


class _Generator(CodeGenerator):
    """Compiles `a ~ b` as a call that knows the limit. Jinja intercepts this operator nowhere."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.filters['join'](context.eval_ctx, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


def check_size(size: int) -> None:
    """Check the size of a text or list before it is made.

    Raises:
        TemplateError: it is above `MAX_RENDERED`.
    """
    if size > MAX_RENDERED:
        raise TemplateError(f"it makes a text of more than {MAX_RENDERED} characters")


def _check_binop(operator: str, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        times = {"*": 1, "**": right}.get(operator, 0)
        bits = left.bit_length() * times + (right.bit_length() if operator == "*" else 0)
        if bits > _MAX_BITS:
            raise TemplateError(f"it makes a number of more than {_MAX_BITS} bits")
    elif operator == "+" and isinstance(left, _SIZED) and isinstance(right, _SIZED):
        check_size(len(left) + len(right))
    elif operator == "*":
        for one, other in ((left, right), (right, left)):
            if isinstance(one, _SIZED) and isinstance(other, int):
                check_size(len(one) * other)
    elif operator == "%" and isinstance(left, str):
        values = right if isinstance(right, tuple) else (right,)
        _check_call("format", left, values)


def _check_call(name: str, text: Any, args: Any) -> None:
    """Check a method of a text, or a filter on it: widths, formats, joins and replacements."""
    if name in ("format", "format_map", "__mod__"):
        fields = "".join(re.findall(r"%[^a-zA-Z%]*|\{[^{}]*\}", str(text)))
        check_size(max(map(int, re.findall(r"\d{1,20}", fields)), default=0))
    if name == "replace" and len(args) >= 2 and all(isinstance(a, str) for a in args[:2]):
        check_size((len(text) + 1) * max(len(args[1]), 1))
    if name == "join" and args:
        _check_join(text, args[0])
    for arg in args:
        if isinstance(arg, int):
            check_size(arg)


def _check_join(separator: Any, parts: Any) -> None:
    if isinstance(parts, (list, tuple)) and isinstance(separator, str):
        check_size(sum(len(str(part)) + len(separator) for part in parts))


def _checked(real: Callable[..., Any]) -> Callable[..., Any]:
    """A filter of Jinja's that looks at its arguments first; some take a context before them."""
    name = real.__name__.removeprefix("do_")

    def checked(*args: Any, **kwargs: Any) -> Any:
        rest = [arg for arg in args if isinstance(arg, (str, int))]
        _check_call(name, rest[0] if rest else "", [*rest[1:], *kwargs.values()])
        return real(*args, **kwargs)

    # Jinja finds by this attribute what a filter wants as its first argument.
    vars(checked).update(vars(real))
    return checked


@pass_eval_context
def _join(eval_ctx: Any, value: Any, d: str = "", attribute: Any = None) -> Any:
    parts = list(value) if attribute is None else value
    _check_join(str(d), parts)
    real: Any = FILTERS["join"]
    return real(eval_ctx, parts, d, attribute)

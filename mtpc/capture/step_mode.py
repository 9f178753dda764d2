"""Fake tensors of one step, whose shared buffers have open sizes: symbols, not numbers.

A step that computes with a size as a number, or asks whether it is some number, is right for that
size alone. torch's `ShapeEnv` notices both. Such a size is *fixed* from then on; the others are
*open*, and the step serves all their values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy
import torch
from sympy.core.function import Application
from torch import Tensor, fx
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from mtpc.capture.fake_calls import FakeCalls
from mtpc.layout import Layout
from mtpc.layout.specs import Dim

LEAST = 2
"""An open size is at least this: torch's symbolic sizes exclude 0 and 1."""
_NOMINAL = 256
"""Stands for every open size where a choice must not depend on it."""


class StepMode(FakeTensorMode):
    """A fake mode of one step: it makes its buffers, leaves their open sizes open, and runs equal
    calls once."""

    def __init__(self, layout: Layout):
        self._env = ShapeEnv()
        super().__init__(shape_env=self._env)
        self._layout, self._fakes = layout, dict[str, Tensor]()
        self._calls = FakeCalls(self)
        self._forms: dict[tuple[sympy.Expr, frozenset[sympy.Symbol]], Dim] = {}
        self._dims: dict[sympy.Expr, Dim] = {}
        values = {s: layout.sizes[s] for s in layout.open_sizes}
        self._open = {
            s: self._env.create_symbol(n, ConstantSource(f"size_{s}"), DimDynamic.DYNAMIC)
            for s, n in values.items()
            if n >= LEAST
        }
        self._least = dict.fromkeys(self._open, LEAST)
        self._names = {ours: symbol for symbol, ours in self._open.items()}
        for spec in layout.values():
            for form in map(self.form, spec.dims):
                # The sizes that functions take, floor, Min and Max, are fixed.
                functions = () if isinstance(form, int) else form.atoms(Application)
                for symbol in set[sympy.Symbol]().union(*(f.free_symbols for f in functions)):
                    self._env.evaluate_expr(sympy.Eq(self._open[symbol], layout.sizes[symbol]))

    def form(self, dim: Dim) -> Dim:
        """A buffer's dimension with numbers for all sizes that are not open."""
        if isinstance(dim, int):
            return dim
        key = (dim, frozenset(self.open_sizes))
        if key not in self._forms:
            self._forms[key] = self._form(*key)
        return self._forms[key]

    def _form(self, dim: sympy.Expr, is_open: frozenset[sympy.Symbol]) -> Dim:
        sizes = self._layout.sizes
        form = dim.subs({s: n for s, n in sizes.items() if s not in is_open})
        # Min(size, number) is the number, for all sizes from the number on.
        for bound in form.atoms(sympy.Min):
            number, *symbols = sorted(bound.args, key=lambda arg: not arg.is_Integer)
            if number.is_Integer and len(symbols) == 1 and sizes.get(symbols[0], 0) >= number:
                form = form.subs(bound, number)
                self._least[symbols[0]] = max(self._least[symbols[0]], int(number))
        form = sympy.expand(form)
        return int(form) if form.is_Integer else form

    def fake(self, name: str, tensor: Tensor) -> Tensor:
        """The fake of a buffer, with open sizes, or of a weight."""
        if name in self._fakes:
            return self._fakes[name]
        forms = [self.form(dim) for dim in self._layout[name].dims] if name in self._layout else []
        if all(isinstance(form, int) for form in forms):
            return self.from_tensor(tensor, static_shapes=True)
        sizes = [self._size(form, n) for form, n in zip(forms, tensor.shape, strict=True)]
        with self:
            self._fakes[name] = torch.empty(sizes, dtype=tensor.dtype, device=tensor.device)
        return self._fakes[name]

    def call(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The result of a call on fake tensors of this mode."""
        return self._calls.value(target, args, kwargs)

    def _size(self, form: Dim, value: int) -> Any:
        if isinstance(form, int):
            return form
        return self._env.create_symintnode(sympy.expand(form.subs(self._open)), hint=value)

    @property
    def open_sizes(self) -> dict[sympy.Symbol, int]:
        """Sizes that are still open, each with the least number for which the step is right."""
        fixed, least = set(self._env.replacements), dict(self._least)
        for guard in self._env.guards:
            bound = _lower_bound(guard.expr)
            if bound is None:
                fixed |= guard.expr.free_symbols
            else:
                symbol = self._names[bound[0]]
                least[symbol] = max(least[symbol], bound[1])
        return {s: n for s, n in least.items() if self._open[s] not in fixed}

    def dim(self, size: torch.SymInt) -> Dim:
        """An open size of a fake tensor, over the layout's symbols."""
        expr = size.node.expr
        if expr not in self._dims:
            form = sympy.expand(expr)
            self._dims[expr] = int(form) if form.is_Integer else form.subs(self._names)
        return self._dims[expr]


def _lower_bound(guard: sympy.Expr) -> tuple[sympy.Symbol, int] | None:
    """(symbol, number) of a guard that says: at least this number. None for any other guard.

    Code that takes the smaller of a size and a number leaves such a guard.
    """
    if not isinstance(guard, (sympy.Ge, sympy.Gt, sympy.Le, sympy.Lt)):
        return None
    excess = sympy.expand(guard.gts - guard.lts)
    if len(excess.free_symbols) != 1 or not excess.is_polynomial():
        return None
    (symbol,) = excess.free_symbols
    slope, *rest = sympy.Poly(excess, symbol).all_coeffs()
    if len(rest) != 1 or slope <= 0:
        return None
    bound = -rest[0] / slope
    is_strict = isinstance(guard, (sympy.Gt, sympy.Lt))
    return symbol, int(sympy.floor(bound)) + 1 if is_strict else int(sympy.ceiling(bound))


def fake_of(mode: FakeTensorMode, name: str, tensor: Tensor) -> Tensor:
    """The fake of a buffer or a weight, by its name."""
    if isinstance(mode, StepMode):
        return mode.fake(name, tensor)
    return mode.from_tensor(tensor, static_shapes=True)


def nominal(size: Any) -> int:
    """A size as a number that does not depend on the values of open sizes."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    form = size.node.expr
    return int(form.subs(dict.fromkeys(form.free_symbols, _NOMINAL)))


def settled(value: Any) -> Any:
    """Arguments of a call with numbers only. This fixes the open sizes among them."""
    return fx.node.map_aggregate(value, lambda a: int(a) if isinstance(a, torch.SymInt) else a)

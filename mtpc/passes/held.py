"""Which dimension of a value is cut between ranks: rules for operators that can run on parts.

A value is cut along one dimension into as many equal parts as there are ranks. From the whole
shapes of a call, each rule here gives the dimension of the result that is cut. An operator's trait
`dims` says which rule is its own. A call without a rule, or one that combines elements of several
parts, raises `NeedsWholeError`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod

from torch import fx

from mtpc.capture.graph import arguments
from mtpc.ops.traits import Dims, traits_of
from mtpc.passes.base import GETITEM

Shape = Sequence[int]
Held = Mapping[fx.Node, int]
"""The cut dimension of each value that is cut."""


class NeedsWholeError(Exception):
    """A call reads across the dimension that is cut, or has no rule."""


class Call:
    """One call with whole shapes; of several values, that of the first. `held` has the cut
    dimension of each value of which a rank has one of `ranks` parts only."""

    def __init__(self, node: fx.Node, shapes: Mapping[fx.Node, Shape], held: Held, ranks: int):
        self.node, self.ranks = node, ranks
        self.arguments = {} if node.target is GETITEM else arguments(node)
        self.shape = shapes.get(node, ())
        self.inputs = [n for n in node.all_input_nodes if n in shapes]
        self.shapes, self.held = shapes, held

    def dim(self, name: str = "dim") -> int:
        """An argument that names a dimension of the first input, from 0."""
        return int(self.arguments[name]) % len(self.shapes[self.first])

    @property
    def first(self) -> fx.Node:
        """The first input, whose elements the call moves."""
        return self.inputs[0]

    @property
    def cut(self) -> int:
        """The dimension along which the first input is cut, if no other input is.

        Raises:
            NeedsWholeError: another input is cut.
        """
        if self.first not in self.held or any(n in self.held for n in self.inputs[1:]):
            raise NeedsWholeError
        return self.held[self.first]

    @property
    def common_cut(self) -> int:
        """The dimension along which every input is cut.

        Raises:
            NeedsWholeError: the inputs are not cut alike.
        """
        cuts = {self.held.get(node) for node in self.inputs}
        cut = cuts.pop()
        if cuts or cut is None:
            raise NeedsWholeError
        return cut


def follow(call: Call) -> int:
    """The dimension of the result that is cut. Sizes in the call's arguments become a part's.

    Raises:
        NeedsWholeError: the call has no rule, or needs the whole.
    """
    if call.node.target is GETITEM:
        return call.cut  # All entries of a result are cut alike.
    rule = _BY_DIMS.get(traits_of(call.node.target).dims)
    if rule is None:
        raise NeedsWholeError
    return rule(call)


def _elementwise(call: Call) -> int:
    """Operands align at their last dimensions. Each is cut like the others, or broadcast there."""
    ends = {call.held[n] - len(call.shapes[n]) for n in call.inputs if n in call.held}
    end = ends.pop()
    if ends:
        raise NeedsWholeError
    for node in call.inputs:
        shape = call.shapes[node]
        if node not in call.held and len(shape) >= -end and shape[end] != 1:
            raise NeedsWholeError
    return len(call.shape) + end


def _cast(call: Call) -> int:
    """Only the dtype of a second operand counts."""
    if call.first not in call.held:
        raise NeedsWholeError
    return call.held[call.first]


def _reshape(call: Call) -> int:
    """The cut dimension must be the first of those that it is merged with or split into.

    Then each part stays in one piece. The sizes before it have the same product in input and
    result, and the next size of the result must be a multiple of the number of ranks.
    """
    before, cut = call.shapes[call.first], call.cut
    ahead = prod(before[:cut])
    for dim, size in enumerate(call.shape):
        if prod(call.shape[:dim]) == ahead and size > 1:
            if size % call.ranks:
                break
            for place, name in enumerate(call.arguments):
                sizes, at = call.arguments[name], dim
                if name == "sizes":  # Of one dimension, which is divided.
                    at -= call.dim()
                elif name not in ("size", "shape"):
                    continue
                if 0 <= at < len(sizes) and sizes[at] != -1:
                    shared = [n // call.ranks if i == at else n for i, n in enumerate(sizes)]
                    call.node.update_arg(place, shared)
            return dim
    raise NeedsWholeError


def _transpose(call: Call) -> int:
    pair = (call.dim("dim0"), call.dim("dim1"))
    return {pair[0]: pair[1], pair[1]: pair[0]}.get(call.cut, call.cut)


def _add_dim(call: Call) -> int:
    """Adds a dimension; of several inputs, all are cut along the same one."""
    cut = call.common_cut
    return cut + (int(call.arguments["dim"]) % len(call.shape) <= cut)


def _drop(call: Call) -> int:
    """Removes a dimension, which must not be the cut one."""
    return _beside(call) - (call.dim() < call.cut)


def _beside(call: Call) -> int:
    """Works along one dimension, which must not be the cut one; all dimensions stay."""
    if call.dim() == call.cut:
        raise NeedsWholeError
    return call.cut


def _reduce(call: Call) -> int:
    dims = [int(dim) % len(call.shapes[call.first]) for dim in call.arguments["dim"] or ()]
    if call.cut in dims or not dims:
        raise NeedsWholeError
    return call.cut - (0 if call.arguments["keepdim"] else sum(dim < call.cut for dim in dims))


def _multiply(call: Call) -> int:
    """Batched matrix products: both operands are cut along the same batch dimension."""
    if call.common_cut >= len(call.shape) - 2:
        raise NeedsWholeError
    return call.common_cut


def _join(call: Call) -> int:
    """All inputs are cut along the same dimension, which is not the one that joins them."""
    if call.common_cut == call.dim():
        raise NeedsWholeError
    return call.common_cut


def _look_up(call: Call) -> int:
    """Rows of a table of which each rank has some columns."""
    if call.cut != 1:
        raise NeedsWholeError
    return len(call.shape) - 1


_BY_DIMS: Mapping[Dims | None, Callable[[Call], int]] = {
    "broadcast": _elementwise,
    "same": _cast,
    "cast": _cast,
    "reshape": _reshape,
    "swap": _transpose,
    "add": _add_dim,
    "drop": _drop,
    "along": _beside,
    "reduce": _reduce,
    "join": _join,
    "matmul": _multiply,
    "look_up": _look_up,
}

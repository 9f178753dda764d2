"""The orders of elements in which steps read weights: as stored, or as a kernel wants them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from torch import Tensor

from mtpc.errors import GraphError

_ORDER = "_mtpc_order"
"""Attribute of a tensor whose elements are in a kernel's order; see `order_of`."""
_ARRANGED_BYTES = 64 << 20
"""Bytes of a weight that are out of place at a time, while it is brought into another order."""


def order_of(tensor: Tensor) -> str:
    """In which kernel's order the elements of a weight are; "" as they are stored."""
    return str(getattr(tensor, _ORDER, ""))


class Orders:
    """The order of each weight, which all steps agree on. Passes have made those in `derived`;
    `owned` says whether nothing else holds the others."""

    def __init__(self, weights: Mapping[str, Tensor], derived: Collection[str], owned: bool):
        self._weights, self._derived, self._owned = weights, derived, owned
        self._read_as_stored: set[int] = set()
        self._arrangements: dict[str, Callable[[Tensor], Tensor]] = {}

    def check_stored(self, name: str) -> None:
        """Refuse to make a weight of one that a kernel has in an order of its own.

        Raises:
            GraphError: it is in another order.
        """
        order = order_of(self._weights[name])
        if order:
            raise GraphError(
                f"a weight is to be made of {name}, whose elements are in the order of {order}; "
                "no step may read it in any other way"
            )

    def why_as_stored(self, name: str) -> str | None:
        """Why the elements of a weight must stay where they are; None if they may be moved."""
        tensor = self._weights[name]
        if order_of(tensor):
            return None
        if tensor.data_ptr() in self._read_as_stored:
            return f"another step reads {name} as it is stored"
        if not self._owned and name not in self._derived:
            return "the model object keeps its weights, and a copy is not made: pass its directory"
        memory = tensor.untyped_storage()
        others = (t for t in self._weights.values() if t is not tensor)
        if not tensor.is_contiguous() or memory.nbytes() != tensor.nbytes:
            return f"{name} is a part of something else, or has gaps"
        if any(other.untyped_storage().data_ptr() == memory.data_ptr() for other in others):
            return f"{name} shares its memory with another weight"
        return None

    def arrange(self, name: str, order: str, arrange: Callable[[Tensor], Tensor]) -> None:
        """Move the elements of a stack of matrices to where a kernel reads them, in its own memory.

        The first call does it, and marks the tensor. Then all steps of all programs over this
        tensor must read it by that kernel: nothing else holds the elements as they are stored.

        `why_as_stored` has nothing against this weight. `arrange` makes of some matrices of the
        stack new ones of the same form. For the name of the order see `order_of`.

        Raises:
            GraphError: it is in another order, or `arrange` gives something of another form.
        """
        tensor, self._arrangements[order] = self._weights[name], arrange
        if order_of(tensor) == order:
            return
        self.check_stored(name)
        stack = tensor.detach()
        for part in stack.split(max(1, _ARRANGED_BYTES // max(1, stack[0].nbytes))):
            made = arrange(part)
            if made.shape != part.shape or made.dtype != part.dtype:
                raise GraphError(
                    f"{order} made {made.dtype} {list(made.shape)} of {name}'s {part.dtype} "
                    f"{list(part.shape)}; expected the same form"
                )
            part.copy_(made)
        setattr(tensor, _ORDER, order)

    def can_read_alike(self, name: str, other: str) -> bool:
        """Whether a weight can have the order of another, which is settled."""
        order = order_of(self._weights[other])
        return self.why_as_stored(name) is None if order else not order_of(self._weights[name])

    def read_alike(self, name: str, other: str) -> None:
        """A step reads a weight as it reads another; see `can_read_alike`."""
        order = order_of(self._weights[other])
        if order:
            self.arrange(name, order, self._arrangements[order])
        self.read(name, order)

    def read(self, name: str, order: str) -> str | None:
        """Note that a step reads a weight in an order of elements; "" is the stored order. Returns
        the weight's own order if it differs, else None."""
        found = order_of(self._weights[name])
        if not order:
            self._read_as_stored.add(self._weights[name].data_ptr())
        return None if found == order else found or "the checkpoint"

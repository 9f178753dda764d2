"""Traits of operators: each declares them, and its reference keeps them.

The calls are those of benchmarks.gpu.ops, with requests that are on and off and rows of none, and
some of what has kernels on the CPU alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.places import ROOT
from torch import Tensor

import mtpc.backends.gpu.ops  # noqa: F401  (declares the operators)
from benchmarks.gpu.op_inputs import CALLS, Inputs
from mtpc.backends.cpu.ops.chain import GATED, LINEAR, NORM
from mtpc.ops import references
from mtpc.ops.collectives import is_collective
from mtpc.ops.signatures import written_by
from mtpc.ops.traits import UNKNOWN, Traits, traits_of
from mtpc.weights.packing import pack

ARGUMENTS = ("rows", "requests", "pages", "slots")
Call = dict[str, Any]


def names(traits: Traits, *kinds: str) -> list[str]:
    """The arguments that traits name."""
    return [name for kind in kinds or ARGUMENTS for name in getattr(traits, kind).split()]


@pytest.mark.parametrize("name", references())
def test_traits_are_declared(name: str) -> None:
    """An operator without traits is refused, and so are traits of arguments that it lacks."""
    op = references()[name]
    traits, known = traits_of(op), {a.name for a in op._schema.arguments}
    assert traits is not UNKNOWN, f"{name}: declare it by mtpc.ops.traits.operator"
    assert known.issuperset(names(traits))
    assert len(names(traits)) == len({*names(traits)})
    assert all(known.issuperset(cut.arguments) for cut in traits.cuts)
    assert (traits.reach == "dims") == (traits.dims is not None)
    if traits.reach != "all":
        assert {*names(traits)}.issuperset(written_by(op)), "what it writes belongs to someone"
    for other in (traits.writes_as, traits.gated):
        assert other is None or other in references()


def test_operators_are_declared_in_one_way() -> None:
    """A function that torch alone knows would have no traits."""
    sources = [*(ROOT / "mtpc/ops").glob("*.py"), *(ROOT / "mtpc/backends").glob("*/ops/*.py")]
    found = [path.name for path in sources if re.search(r"custom_op\(.mtpc::", path.read_text())]
    assert found == []
    assert traits_of(torch.ops.mtpc_unheard_of) is UNKNOWN
    assert traits_of(torch.ops.aten.bernoulli.default) is UNKNOWN, "it draws"


def _on_cpu(new: Inputs) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Calls of operators that have no kernel on GPUs."""
    x, both, down = new.normal(5, 64), pack(new.normal(128, 64)), pack(new.normal(64, 64))
    yield "packed_linear", (x, both, 128)
    yield "packed_linear_max", (x, both, 128)
    yield "packed_gated_linear", (x, both, 128)
    heads = torch.stack([pack(new.normal(32, 64)) for _ in range(3)])
    yield "packed_head_linear", (new.normal(5, 3, 64), heads, 32)
    stacks = [torch.stack([part, part]) for part in (both, down)]
    choices = (torch.tensor([[0], [1], [1], [0], [1]]), new.uniform(5, 1))
    yield "packed_experts", (x, *stacks, *choices)
    operands = [down, new.normal(64), both]
    yield "linear_chain", (x, new.normal(5, 64), LINEAR + NORM + GATED, operands, 1e-5)
    yield "float32_linear", (x, new.normal(7, 64))
    yield "clear_idle_rows", (x, torch.tensor([3]), 1)
    yield "grouped_linear_max", next(CALLS["grouped_linear"][0](new))
    q, latents = new.rows(4, 48), new.cache(32 + 16)
    yield "expanded_latent_attention", (q, latents, new.normal(4 * 64, 32), *new.indices, 0.1, 32)


def _calls(name: str) -> Iterator[tuple[Any, ...]]:
    if name in CALLS:
        make, dtypes = CALLS[name]
        yield from make(Inputs(dtypes[0]))
    yield from (call for other, call in _on_cpu(Inputs(torch.bfloat16)) if other == name)


def _run(name: str, call: Call) -> tuple[list[Tensor], Call]:
    """Results, and the arguments after the call, which gets copies."""
    given = {n: v.clone() if isinstance(v, Tensor) else v for n, v in call.items()}
    out = references()[name](**given)
    return [out] if isinstance(out, Tensor) else list(out or ()), given


def _same(one: Tensor, other: Tensor) -> bool:
    one, other = (t.float() if t.is_floating_point() else t for t in (one, other))
    return torch.equal(one, other) or torch.allclose(one, other, 0, 0, equal_nan=True)


@pytest.mark.parametrize(
    "name", [n for n, op in references().items() if not is_collective(op) and n != "pack"]
)
def test_rows_depend_on_what_traits_say(name: str) -> None:
    """Of all operators but collectives, and `pack`, which no step calls."""
    op, calls = references()[name], list(_calls(name))
    assert calls
    check = {"row": _check_rows, "request": _check_requests}[traits_of(op).reach]
    for call in calls:
        given = dict(zip((a.name for a in op._schema.arguments), call, strict=False))
        check(name, traits_of(op), given)


def _check_rows(name: str, traits: Traits, call: Call) -> None:
    """A row of the results stays where all other rows become copies of it."""
    first = call[names(traits, "rows")[0]]
    lead = first.shape[: traits.row_dims(first)]
    results, after = _run(name, call)
    for row in {0, lead.numel() - 1}:
        changed = dict(call)
        for argument in names(traits, "rows"):
            value = call[argument]
            assert value.shape[: len(lead)] == lead, f"{argument} has other rows"
            flat = value.reshape(lead.numel(), *value.shape[len(lead) :])
            changed[argument] = flat[row].expand_as(flat).reshape(value.shape)
        again, changed = _run(name, changed)
        for one, other in zip(results, again, strict=True):
            assert one.shape[: len(lead)] == lead
            one, other = (t.reshape(lead.numel(), *t.shape[len(lead) :]) for t in (one, other))
            assert _same(one[row], other[row])
        slot = int(call["slot_mapping"][row]) if traits.pages else -1
        for argument in names(traits, "pages") if slot >= 0 else ():
            if call[argument] is not None:
                pair = (given[argument].flatten(0, 1)[slot] for given in (after, changed))
                assert _same(*pair)


class _Request:
    """Which rows, pages and slots of a call belong to one of its requests."""

    def __init__(self, traits: Traits, call: Call, number: int):
        self.traits, self.call, self.number = traits, call, number
        slots = call.get("row_slots", call.get("state_slots", call.get("state_indices")))
        self.by_row = "row_slots" in call
        if slots is not None:
            self.slot = int((slots.unique() if self.by_row else slots)[number])

    @staticmethod
    def count(call: Call) -> int:
        if "query_start_loc" in call:
            return len(call["query_start_loc"]) - 1
        return len(call["row_slots"].unique()) if "row_slots" in call else len(call["state_slots"])

    def rows(self, length: int) -> Tensor:
        """bool [length]."""
        at = torch.arange(length)
        if self.by_row:
            return self.call["row_slots"] == self.slot
        if "query_start_loc" in self.call:
            first, last = self.call["query_start_loc"][self.number : self.number + 2]
            return (at >= first) & (at < last)
        return at // (length // self.count(self.call)) == self.number

    def owned(self, argument: str, value: Tensor) -> Tensor:
        """bool [value.shape[0]]: what belongs to the request."""
        at = torch.arange(len(value))
        if argument in names(self.traits, "rows"):
            return self.rows(len(value))
        if argument in names(self.traits, "requests"):
            return at == self.number
        if argument in names(self.traits, "slots"):
            return at == self.slot
        return torch.isin(at, self.call["block_table"][self.number].long())


def _check_requests(name: str, traits: Traits, call: Call) -> None:
    """A request's rows and state stay where all that others have changes."""
    results, after = _run(name, call)
    for number in range(_Request.count(call)):
        request, changed = _Request(traits, call, number), dict(call)
        for argument in names(traits):
            value = call.get(argument)
            if value is not None and argument != "query_start_loc":
                others = ~request.owned(argument, value)
                mine = changed[argument] = value.clone()
                mine = mine.view(torch.uint8) if mine.dtype.itemsize == 1 else mine
                mine[others] = 1 if argument in names(traits, "slots", "pages") else 0
        again, changed = _run(name, changed)
        for one, other in zip(results, again, strict=True):
            at = request.rows(len(one))
            if len(one) == _Request.count(call) and not request.by_row:
                at = torch.arange(len(one)) == number
            assert _same(one[at], other[at]), number
        for argument in written_by(references()[name]):
            at = request.owned(argument, after[argument])
            assert _same(after[argument][at], changed[argument][at]), argument

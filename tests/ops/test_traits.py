"""Traits of operators: each declares them, and its reference keeps them.

The calls are those of benchmarks.gpu.ops, with requests that are on and off and rows of none, and
some of what has kernels on the CPU alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from helpers.blocks import BlockWeight, random_blocks
from torch import Tensor
from torch.library import CustomOpDef

import mtpc.ops
from benchmarks.gpu.op_inputs import CALLS, Inputs
from mtpc.backends.cpu import ops as cpu_ops
from mtpc.backends.cpu.ops.chain import GATED, LINEAR, NORM
from mtpc.backends.gpu import ops as gpu_ops
from mtpc.ops import members, references
from mtpc.ops.collectives import is_collective
from mtpc.ops.signatures import written_by
from mtpc.ops.traits import _ATEN_TRAITS, UNKNOWN, Traits, declared, traits_of
from mtpc.sampling_params import FLOATS, INTS
from mtpc.weights.packing import pack

ARGUMENTS = ("rows", "requests", "pages", "slots")
Call = dict[str, Any]


def names(traits: Traits, *kinds: str) -> list[str]:
    """The arguments that traits name."""
    return [name for kind in kinds or ARGUMENTS for name in getattr(traits, kind).split()]


WITHOUT_ROWS = ("pack", "pack_blocks")
"""Operators that prepare weights."""


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


@pytest.mark.parametrize("package", [mtpc.ops, cpu_ops, gpu_ops], ids=lambda p: p.__name__)
def test_no_operator_is_declared_without_traits(package: ModuleType) -> None:
    """torch alone would take a function; then nothing would be known of it."""
    assert set(members(package, CustomOpDef)) <= {*declared()}


def test_nothing_is_said_of_what_is_not_declared() -> None:
    aten = torch.ops.aten
    for target in (torch.ops.mtpc, getattr, aten.bernoulli.default, aten.cumprod.default):
        assert traits_of(target) is UNKNOWN
    assert traits_of(aten.gelu.default).dims == "broadcast"
    assert [traits_of(op).chooses for op in (aten.max.dim, aten.max.default)] == [True, False]


@pytest.mark.parametrize("name", sorted(_ATEN_TRAITS))
def test_names_of_the_table_are_operators(name: str) -> None:
    packet, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, packet), overload or "default", None)
    assert op is None or traits_of(op) is not UNKNOWN
    assert op is not None or not overload


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
    turned = [part for n in (128, 64) for part in (new.normal(2, 64, n), new.normal(2, n))]
    yield "biased_experts", (x, *turned, *choices, 3.0, 1.7)
    operands = [down, new.normal(64), both]
    yield "linear_chain", (x, new.normal(5, 64), LINEAR + NORM + GATED, operands, 1e-5)
    yield "float32_linear", (x, new.normal(7, 64))
    yield "clear_idle_rows", (x, torch.tensor([3]), 1)
    yield "grouped_linear_max", next(CALLS["grouped_linear"][0](new))
    blocks = BlockWeight(12, random_blocks(12, 40, 256))
    yield "grouped_embedding", (torch.tensor([[3, 39], [0, 3]]), *blocks.parts, 256)
    slots, starts = torch.tensor([3, 0, 5, 1]), torch.arange(0, 17, 4).int()
    texts, lens = new.integers(3, 7, 60).int(), new.integers(30, 4).int() + 9
    tokens = (new.integers(3, 16), new.integers(3, 16))
    yield "copy_drafts", (texts, *tokens, starts, lens, starts[:4].long() + 2, slots > 0, slots, 3)
    q, latents = new.rows(4, 48), new.cache(32 + 16)
    yield "expanded_latent_attention", (q, latents, new.normal(4 * 64, 32), *new.indices, 0.1, 32)


def _sample_after_drafts(new: Inputs) -> tuple[Any, ...]:
    """Two requests with four drafts each, likely tokens; those that were fed are penalised."""
    logits, _, positions, _, floats, ints, *others = next(CALLS["sample"][0](new))
    floats[:] = 0.0
    for name, value in (("top_p", 1.0), ("repetition_penalty", 1.0), ("frequency_penalty", 9.0)):
        floats[:, FLOATS.index(name)] = value
    ints[:, INTS.index("penalised")] = 1
    others[-1][:] = -1  # No token stops.
    logits, slots = logits[:1].repeat(10, 1), torch.tensor([4, 1])
    ids = logits[0].topk(5).indices.flip(0).repeat(2)
    return logits, ids, positions, slots, floats, ints, *others


def _calls(name: str) -> Iterator[tuple[Any, ...]]:
    if name in CALLS:
        make, dtypes = CALLS[name]
        yield from make(Inputs(dtypes[0]))
    if name == "sample":
        yield _sample_after_drafts(Inputs(torch.float32))
    yield from (call for other, call in _on_cpu(Inputs(torch.bfloat16)) if other == name)


def _run(name: str, call: Call) -> tuple[list[Tensor], Call]:
    """Results and what was written to rows; the arguments after the call, which gets copies."""
    op = references()[name]
    given = {n: v.clone() if isinstance(v, Tensor) else v for n, v in call.items()}
    out = op(**given)
    results = [out] if isinstance(out, Tensor) else list(out or ())
    rows = {*written_by(op)} & {*names(traits_of(op), "rows", "requests")}
    return results + [given[n] for n in sorted(rows)], given


def _same(one: Tensor, other: Tensor) -> bool:
    one, other = (t.float() if t.is_floating_point() else t for t in (one, other))
    return torch.equal(one, other) or torch.allclose(one, other, 0, 0, equal_nan=True)


@pytest.mark.parametrize(
    "name",
    [n for n, op in references().items() if not is_collective(op) and n not in WITHOUT_ROWS],
)
def test_rows_depend_on_what_traits_say(name: str) -> None:
    """Of all operators but collectives, and those that no step calls.

    A row of the results stays where all that it may not depend on changes: other rows become copies
    of it, and what belongs to other requests is overwritten. So does the state of a request.
    """
    op, calls = references()[name], list(_calls(name))
    assert calls
    for call in calls:
        given = dict(zip((a.name for a in op._schema.arguments), call, strict=False))
        owner = _Owner(traits_of(op), given)
        results, after = _run(name, given)
        for request in range(owner.count):
            own = owner.rows(request, owner.length).nonzero().flatten().tolist()
            for row in {*own[:1], *own[-1:]}:
                again, changed = _run(name, owner.changed(request, row, traits_of(op).reach))
                for one, other in zip(results, again, strict=True):
                    assert _same(owner.of_row(one, request, row), owner.of_row(other, request, row))
                owner.check_slot(row, after, changed)
            if own and owner.slots is not None:
                _, changed = _run(name, owner.changed(request, own[-1], "request"))
                owner.check_state(request, after, changed)


class _Owner:
    """Which rows, pages and slots of a call belong to which request; without requests, to one."""

    def __init__(self, traits: Traits, call: Call):
        self.traits, self.call = traits, call
        self.slots = call.get("state_slots", call.get("state_indices"))
        if "row_slots" in call:
            self.slots = call["row_slots"].unique()
        self.count = 1 if self.slots is None else len(self.slots)
        if "query_start_loc" in call:
            self.count = len(call["query_start_loc"]) - 1
        first = next((call[n] for n in names(traits, "rows")), None)
        self.lead = () if first is None else first.shape[: traits.row_dims(first)]
        self.length = torch.Size(self.lead).numel() if self.lead else 0
        assert self.length or not names(traits, "rows"), "the first argument with rows has some"

    def rows(self, request: int, length: int) -> Tensor:
        """bool [length]: the rows of a request."""
        at = torch.arange(length)
        if "row_slots" in self.call:
            return self.call["row_slots"] == self.slots[request]
        if "query_start_loc" in self.call:
            first, last = self.call["query_start_loc"][request : request + 2]
            return (at >= first) & (at < last)
        return at // (length // self.count or 1) == request

    def owned(self, argument: str, value: Tensor, request: int) -> Tensor:
        """bool [len(value)]: what belongs to a request."""
        at = torch.arange(len(value))
        if argument in names(self.traits, "rows"):
            return self.rows(request, len(value))
        if argument in names(self.traits, "requests"):
            return at == request
        if argument in names(self.traits, "slots"):
            return at == self.slots[request]
        if "block_table" in self.call:
            return torch.isin(at, self.call["block_table"][request].long())
        return at >= 0  # Pages of a cache write: the slots of rows decide.

    def changed(self, request: int, row: int, reach: str) -> Call:
        """The call with other values wherever a row of a request must not depend on them."""
        call = dict(self.call)
        for argument in names(self.traits):
            value = call.get(argument)
            if value is None or argument == "query_start_loc":
                continue
            if argument in names(self.traits, "rows"):
                call[argument] = self._copies(argument, request, row, reach)
                continue
            call[argument] = value.clone()
            mine = call[argument]
            mine = mine.view(torch.uint8) if mine.dtype.itemsize == 1 else mine
            is_state = argument in names(self.traits, "slots", "pages")
            mine[~self.owned(argument, value, request)] = 1 if is_state else 0
        return call

    def _copies(self, argument: str, request: int, row: int, reach: str) -> Tensor:
        """The rows of an argument, where those that a row may not read are copies of it."""
        value = self.call[argument]
        assert value.shape[: len(self.lead)] == self.lead, f"{argument} has other rows"
        flat = value.reshape(self.length, *value.shape[len(self.lead) :]).clone()
        at = torch.arange(self.length)
        read = self.rows(request, self.length)
        if reach != "request":
            read = read & (at <= row) if reach == "earlier" else at == row
        flat[~read] = flat[row].clone()
        return flat.view(value.shape)

    def of_row(self, result: Tensor, request: int, row: int) -> Tensor:
        if result.shape[: len(self.lead)] == self.lead:
            return result.reshape(self.length, *result.shape[len(self.lead) :])[row]
        assert len(result) == self.count
        return result[request]

    def check_slot(self, row: int, after: Call, changed: Call) -> None:
        """What a row wrote to pages at its own slot."""
        slot = int(self.call["slot_mapping"][row]) if "slot_mapping" in self.call else -1
        for argument in names(self.traits, "pages") if slot >= 0 else ():
            if after[argument] is not None:
                one, other = (given[argument].flatten(0, 1)[slot] for given in (after, changed))
                assert _same(one, other), argument

    def check_state(self, request: int, after: Call, changed: Call) -> None:
        """What the request's slot holds."""
        for argument in names(self.traits, "slots"):
            if after.get(argument) is not None:
                one, other = (given[argument][self.slots[request]] for given in (after, changed))
                assert _same(one, other), argument

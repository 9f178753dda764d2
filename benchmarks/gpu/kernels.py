"""Times mtpc's kernels alone at real sizes, and compares them with their bytes and with a library.

Calls of one kernel run one after another in a graph, on so many copies of their inputs that these
exceed the device's caches. A time includes the launch, as in a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.gpu.machine import Machine
from benchmarks.gpu.profile import fill_floor
from benchmarks.gpu.rows import Row
from mtpc.backends import torch_experts
from mtpc.backends.check_device import capability_of
from mtpc.backends.cuda import compile_call
from mtpc.layout import SCRATCH_SLOT
from mtpc.sampling_params import FLOATS, INTS

PAGE = 16
LENGTHS = (1024, 8192, 32_768)
BATCHES = (1, 64)
REPLAYS = 15
LINEARS = ((4096, 6144), (4096, 27_392), (13_696, 4096), (4864, 896), (4096, 151_552))
"""Inputs and features of weights that batch-invariant products are timed on: of the 8B shape, and
the down projection of the 0.5B shape."""
LINEAR_ROWS = (1, 4, 16, 64, 512)
INVARIANT = "batch_invariant"
_COLD_BYTES = 200 << 20
"""Bytes of inputs, more than the caches hold."""
_MOST_COPIES = 32


@dataclass(frozen=True)
class Call:
    """A call of a kernel, and the same call of a library.

    Attributes:
        name: name of the operator.
        what: its sizes, as text.
        rows: rows of the call.
        nbytes: bytes that it must read.
        make: makes new arguments on the device.
        library: makes the same call of PyTorch's own kernels; None if PyTorch has none, or they
            do not run on the device.
        configs: configuration of the call: the default, or `batch_invariant`.
    """

    name: str
    what: str
    rows: int
    nbytes: int
    make: Callable[[], tuple[Any, ...]]
    library: Callable[[], Callable[[], Any]] | None = None
    configs: str = ""


def kernel_times(machine: Machine) -> Iterator[tuple[Row, Callable[[Row], Row]]]:
    """The row of every call, and the function that fills it."""
    for call in _calls():
        title = ", ".join(filter(None, (call.name, call.configs)))
        row = Row("time", machine.name, call.what, title, 0, call.rows)
        yield row, partial(_fill, machine, call)


def _fill(machine: Machine, call: Call, row: Row) -> Row:
    from mtpc.backends.triton_kernels import load_kernels

    load_kernels()
    ours = partial(getattr(torch.ops.mtpc_triton, call.name), configs=call.configs)
    arguments = call.make()
    count = max(1, min(_MOST_COPIES, _COLD_BYTES // call.nbytes))
    copies = [arguments, *(_clone(arguments) for _ in range(count - 1))]
    row.copy_gb_s = machine.copy_bandwidth() / 1e9
    row.step_bytes = call.nbytes
    row.ms_device = _milliseconds(machine, [partial(ours, *one) for one in copies])
    fill_floor(row)
    row.of_bandwidth = (row.floor_ms or 0) / row.ms_device
    del arguments, copies
    if call.library:
        row.note = (
            f"library {_milliseconds(machine, [call.library() for _ in range(count)]):.4f} ms"
        )
    torch.cuda.empty_cache()
    return row


def _clone(arguments: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(a.clone() if isinstance(a, Tensor) else a for a in arguments)


def _milliseconds(machine: Machine, runs: Sequence[Callable[[], Any]]) -> float:
    """Milliseconds of one run, in a graph of all runs."""

    def run() -> None:
        for one in runs:
            one()

    graphs = machine.graphs()
    with torch.no_grad():
        graphs.warm_up(run)
        replay = graphs.record(run)
    clock = machine.clock()
    for _ in range(REPLAYS):
        clock.run(replay)
    return 1e3 * median(clock.read()) / len(runs)


def _calls() -> Iterator[Call]:
    for batch in BATCHES:
        for length in LENGTHS:
            for rows in (1, 4):
                yield _attention(batch, length, rows)
            yield _latent(batch, length)
    for tokens in (1, 64, 256, 512, 2048):
        yield _experts(tokens)
    for rows, sizes in ((1, (4096, 6144)), (4, (4096, 6144)), (1, (13_696, 4096))):
        yield _linear(rows, *sizes)
    for sizes in LINEARS:
        for rows in LINEAR_ROWS:
            yield _linear(rows, *sizes, name="batch_invariant_linear")
    for batch, length in product(BATCHES, LENGTHS):
        yield replace(_attention(batch, length, 1), configs=INVARIANT, library=None)
    yield replace(_latent(64, LENGTHS[1]), configs=INVARIANT)
    yield replace(_experts(64), configs=INVARIANT, library=None)
    for batch in BATCHES:
        yield _sample(batch)


def _new(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def _indices(batch: int, length: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    pages = length // PAGE
    table = 1 + torch.randperm(batch * pages, device="cuda").view(batch, pages)
    starts = torch.arange(0, rows * (batch + 1), rows, device="cuda")
    return table.int(), torch.full((batch,), length, device="cuda").int(), starts.int()


def _attention(batch: int, length: int, rows: int, heads: int = 32, groups: int = 8) -> Call:
    """The library is FlashAttention as PyTorch has it, on K and V without pages."""

    def make() -> tuple[Any, ...]:
        caches = (_new(1 + batch * length // PAGE, PAGE, groups, 128) for _ in range(2))
        return _new(batch * rows, heads, 128), *caches, *_indices(batch, length, rows), 0.09

    def library() -> Callable[[], Any]:
        query, key = _new(batch, heads, rows, 128), _new(batch, groups, length, 128)
        attend = F.scaled_dot_product_attention
        return partial(attend, query, key, key.clone(), scale=0.09, enable_gqa=True)

    what = f"{heads} heads of 128 in {groups} groups, batch {batch}, {length} tokens"
    nbytes = 2 * 2 * batch * length * groups * 128
    return Call("paged_attention", what, batch * rows, nbytes, make, library)


def _latent(batch: int, length: int) -> Call:
    def make() -> tuple[Any, ...]:
        cache = _new(1 + batch * length // PAGE, PAGE, 576)
        return _new(batch, 128, 576), cache, *_indices(batch, length, 1), 0.07, 512

    what = f"128 heads on latents of 576, batch {batch}, {length} tokens"
    return Call("latent_attention", what, batch, 2 * batch * length * 576, make)


def _experts(tokens: int) -> Call:
    """The library is the whole operator by PyTorch's grouped products, compiled by Inductor."""
    count, hidden, inner, chosen = 256, 7168, 2048, 8

    def make() -> tuple[Any, ...]:
        ids = torch.rand(tokens, count, device="cuda").topk(chosen).indices
        weights = (_new(count, 2 * inner, hidden), _new(count, hidden, inner))
        return _new(tokens, hidden), *weights, ids, _new(tokens, chosen)

    def library() -> Callable[[], Any]:
        return compile_call(torch_experts.experts, make(), {})

    may_run = torch_experts.takes(capability_of(torch.device("cuda"))) is None
    compared = library if may_run and tokens >= torch_experts.LEAST_ROWS else None
    hit = count * (1 - (1 - chosen / count) ** tokens)
    what = f"{tokens} tokens, {chosen} of {count} experts, {hidden} by {inner}"
    return Call("experts", what, tokens, int(2 * 3 * hit * inner * hidden), make, compared)


def _linear(rows: int, width: int, features: int, name: str = "skinny_linear") -> Call:
    def make() -> tuple[Any, ...]:
        return _new(rows, width), _new(features, width), None

    def library() -> Callable[[], Any]:
        return partial(F.linear, _new(rows, width), _new(features, width))

    what, nbytes = f"{width} to {features}", 2 * width * features
    return Call(name, what, rows, nbytes, make, library)


def _sample(batch: int, vocab: int = 151_936) -> Call:
    """Temperature 0.8, top-k 50, top-p 0.95."""

    def make() -> tuple[Any, ...]:
        slots, words = batch + 1, -(-vocab // 32)
        asked = {"temperature": 0.8, "top_p": 0.95, "top_k": 50, "repetition_penalty": 1}
        floats, ints = (
            torch.tensor([[asked.get(name, 0) for name in names]] * slots).to(dtype)
            for names, dtype in ((FLOATS, torch.float64), (INTS, torch.int64))
        )
        rows, bits = torch.arange(batch), torch.zeros(slots, words, dtype=torch.int32)
        no_id, no_bias = torch.full((slots, 1), -1), torch.zeros(slots, 1, dtype=torch.float64)
        counts = torch.zeros(slots, vocab, dtype=torch.int32)
        places = (rows, rows + 9, rows + 1 + SCRATCH_SLOT, floats, ints)
        host = (*places, no_id, no_bias, ~bits, bits, counts, no_id)
        return 3 * _new(batch, vocab), *(tensor.cuda() for tensor in host)

    what = f"top-k 50, top-p 0.95 of {vocab} tokens, batch {batch}"
    return Call("sample", what, batch, 2 * batch * vocab, make)

"""Memory, planned before anything is bound: a host's by `check_model`, a device's as follows.

    free memory - what graphs will take - state of fixed size = pages

For the plan, graphs are traced and rewritten, if need be over a temporary pool of one request's
pages. The memory of their intermediates does not depend on the pool.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from mtpc.backends.base import Backend
from mtpc.backends.placing import Live, place_live, pool_bytes
from mtpc.environment import free_bytes
from mtpc.errors import CapacityError
from mtpc.layout import Layout
from mtpc.layout.buffers import N
from mtpc.layout.progress import Detail, Report
from mtpc.layout.slot_state import snapshots_nbytes
from mtpc.passes.pack_groups import PackBlocks, PackGroups
from mtpc.plan import Plan
from mtpc.program.program import HostNeed, buffer_bytes
from mtpc.weights.packing import can_pack
from mtpc.weights.weights import Weights

if TYPE_CHECKING:
    from mtpc.program.compiler import StepCompiler
    from mtpc.ranks.group import Ranks

MARGIN = 64 << 20
"""Bytes for what nothing here computes: kernels' code, gaps between blocks. Never measured."""
_MIB = 1 << 20
_SURE = 0.5
"""The share of free memory that a pool may take if steps are planned over it before it is known
whether it fits."""
_STEADY_BITS = 6
"""Leading bits of a number of pages that `steady` leaves."""


@dataclass(frozen=True)
class MemoryPlan:
    """What a program will take on its device.

    Attributes:
        steps: bytes of intermediates at most, by step.
        fixed: bytes of state whose size does not depend on pages, of snapshots, and of weights that
            passes make.
        page: bytes of a page, of all layers together.
        pool: bytes of one pool in which the intermediates of every step are laid out.
        driver: bytes of the driver's copies of all graphs, and of libraries' workspaces.
    """

    steps: Mapping[str, int]
    fixed: int
    page: int
    pool: int
    driver: int

    @property
    def graphs(self) -> int:
        """Bytes for all graphs. One runs at a time, so they share a pool of the largest one's size.

        The warm-up of another step does not use that pool; it adds the second largest size.
        """
        return sum(sorted(self.steps.values())[-2:]) + self.driver + MARGIN

    def pages(self, free: int) -> int:
        """Pages for which there is memory."""
        return max(0, free - self.graphs - self.fixed) // max(1, self.page)

    def line(self, free: int, wanted: int) -> str:
        """What is planned, for people."""
        largest = max(self.steps, key=self.steps.__getitem__)
        return (
            f"{free / _MIB:.0f} MiB free: graphs {self.graphs / _MIB:.0f} MiB ({largest}: "
            f"{self.steps[largest] / _MIB:.1f} MiB, laid out {self.pool / _MIB:.1f} MiB, "
            f"driver {self.driver / _MIB:.0f} MiB, margin {MARGIN / _MIB:.0f} MiB), "
            f"state {self.fixed / _MIB:.1f} MiB; "
            f"{self.pages(free)} pages of {self.page / 1024:.1f} KiB fit, {wanted} are wanted"
        )


@torch.no_grad()
def plan_memory(compiler: StepCompiler) -> MemoryPlan:
    """Estimate every step of a program; the compiler keeps the steps (`rewrite_all`)."""
    from mtpc.backends.driver_memory import NODE_BYTES, kernel_count, workspace_bytes  # Of GPUs.
    from mtpc.backends.memory import live_memory, peak_bytes

    live, driver = dict[str, list[Live]](), workspace_bytes(compiler.backend.device)
    for key, graph in compiler.rewrite_all().items():
        live[str(key)] = live_memory(graph)
        driver += kernel_count(graph) * NODE_BYTES
    steps = {name: peak_bytes(items) for name, items in live.items()}
    pool = max(pool_bytes(place_live(items)) for items in live.values())
    state, page = state_bytes(compiler)
    return MemoryPlan(steps, state + _made(compiler.weights), page, pool, driver)


def state_bytes(compiler: StepCompiler) -> tuple[int, int]:
    """Bytes of state whose size does not depend on pages, and of snapshots; and of a page."""
    less = compiler.layout(compiler.keys[0])
    pages = less.value(N)
    more = Layout(less.values(), {**less.sizes, N: pages + 1})
    sizes = [
        sum(layout.nbytes(name) for name, spec in layout.items() if spec.shared)
        for layout in (less, more)
    ]
    page = sizes[1] - sizes[0]
    return sizes[0] - pages * page + snapshots_nbytes(less, compiler.plan), page


def _made(weights: Weights) -> int:
    """Bytes that derived weights add: without those of weights that are now views of them."""
    made = {weights[n].untyped_storage().data_ptr(): weights[n].nbytes for n in weights.recipes}
    views = {
        tensor.data_ptr(): tensor.nbytes
        for name, tensor in weights.items()
        if name not in weights.recipes and tensor.untyped_storage().data_ptr() in made
    }
    return sum(made.values()) - sum(views.values())


def planned_compiler(
    make: Callable[[Plan], StepCompiler],
    plan: Plan,
    backend: Backend,
    report: Report,
    ranks: Ranks | None = None,
) -> StepCompiler:
    """A compiler whose KV pool fits beside the graphs.

    If the pool that is wanted takes at most `_SURE` of what is free, steps are planned over it, and
    kept. Otherwise they are planned over the pages of one request, and traced again.

    Args:
        make: makes the compiler of a plan.
        plan: of the program; it knows the model's positions.
        backend: knows how much memory is free.
        report: hears the plan.
        ranks: the processes that share the model. All take the plan of the one with the fewest
            pages.

    Raises:
        CapacityError: `num_pages` was asked for and does not fit, or not even one request does.
    """
    free = backend.free_bytes()
    if free is None:
        return make(plan)
    few = plan.blocks_per_request(plan.max_len) + 1
    compiler = make(plan.given(num_pages=few))
    state, page = state_bytes(compiler)
    is_sure = state + plan.num_pages * page <= free * _SURE
    is_sure = all(ranks.tell_all(is_sure)) if ranks is not None else is_sure
    if is_sure:
        compiler = make(plan)
    notes, said = backend.notes.copy(), Counter[str]()
    memory = plan_memory(compiler)
    if ranks is not None:
        memory, free = least_pages(ranks.tell_all((memory, free)))
    settled = fit_pages(memory, plan, free, report, said)
    if not is_sure or settled != plan:
        backend.notes = notes  # The steps that are traced again add theirs again.
        del compiler
        gc.collect()  # Its graphs are cycles, and hold weights that passes have made.
        compiler = make(settled)
    backend.notes += said
    return compiler


def least_pages(plans: Sequence[tuple[MemoryPlan, int]]) -> tuple[MemoryPlan, int]:
    """Of plans with the free bytes of their ranks, the one for which the fewest pages fit."""
    return min(plans, key=lambda each: each[0].pages(each[1]))


def fit_pages(
    memory: MemoryPlan, plan: Plan, free: int, report: Report, notes: Counter[str]
) -> Plan:
    """The plan whose KV pool fits; where it had to be cut, a note says so.

    Args:
        memory: what else there is.
        plan: of the program.
        free: bytes that the device has left.
        report: hears the plan.
        notes: counts what differs from the plan.

    Raises:
        CapacityError: as `settle_pages`.
    """
    wanted, fit = plan.num_pages, memory.pages(free)
    line, least = memory.line(free, wanted), plan.blocks_per_request(2) + 1
    report(Detail(line))
    if wanted <= fit:
        return plan
    if plan.asked.num_pages is not None or fit < least:
        raise CapacityError(
            f"the KV pool does not fit the device: {line}, and {least} at least; lower num_pages, "
            "max_len, batch_buckets or snapshot_bytes"
        )
    pages = max(least, steady(fit))
    notes[f"a KV pool of {pages} pages instead of {wanted}: {line}"] += 1
    return plan.given(num_pages=pages)


def steady(pages: int) -> int:
    """A number of pages, at most 1/32 smaller, that most starts on a device agree on.

    Free memory differs a little from start to start, and kept steps serve one size of the pool.
    """
    step = 1 << max(0, pages.bit_length() - _STEADY_BITS)
    return pages - pages % step


def need_of_model(compiler: StepCompiler, owns_buffers: bool) -> HostNeed:
    """What the steps of a model will take, before any is traced.

    Args:
        compiler: of the model, whose weights may be without values.
        owns_buffers: whether the program has its own state.
    """
    layouts = [compiler.layout(key) for key in compiler.keys]
    buffers = buffer_bytes(layouts, compiler.plan) if owns_buffers else 0
    return HostNeed(_copies(compiler), buffers)


def check_model(compiler: StepCompiler, owns_buffers: bool, early: int = 0) -> None:
    """Refuse to build for a machine on which the result cannot run; see `HostNeed.check`."""
    need_of_model(compiler, owns_buffers).check(compiler.plan, free_bytes(), early)


def _copies(compiler: StepCompiler) -> int:
    """Bytes of the weights that are packed, or made of several stored ones."""
    loaded, share, total = compiler.loaded, compiler.share, 0
    headers, tables = loaded.headers, loaded.tables
    packing = {*compiler.backend.enables} - {*compiler.plan.disabled_passes}
    keeps_turned = bool(packing & {PackBlocks.name, PackGroups.name})
    for name, tensor in loaded.weights().items():
        is_table = id(tensor) in tables
        is_joined = headers is not None and headers.origin(tensor) is None
        scheme = compiler.plan.quantize
        spec = compiler.weights.spec(name)
        if spec is None and scheme:
            from mtpc.weights.quantise import spec_by_scheme  # Not above: few builds round.

            spec = spec_by_scheme(scheme, name, tensor)
        spec = None if spec is not None and spec.turned and not keeps_turned else spec
        held = tensor.numel() if share is None else share.held(name, tensor)
        if spec is not None and not is_table:
            total += spec.nbytes(held)
        elif is_joined or (can_pack(tensor) and not is_table):
            total += held * tensor.itemsize
    return total

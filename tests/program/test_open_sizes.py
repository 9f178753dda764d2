"""Open sizes: which numbers of a step are for one size of shared state alone, and which for all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import pytest
import sympy
import torch
from helpers import tiny
from helpers.families import FAMILY_NAMES
from helpers.plans import plan_of
from torch import Tensor

from mtpc.backends.cpu.backend import CpuBackend
from mtpc.backends.lower_tape import lower_to_tape
from mtpc.backends.package import sized
from mtpc.backends.tape import _sized
from mtpc.capture.graph import dim_of
from mtpc.capture.inline import fake_mode_of
from mtpc.capture.step_mode import StepMode, nominal
from mtpc.errors import CacheError
from mtpc.layout import BufferSpec, Layout, StepKey
from mtpc.layout.buffers import OPEN_SIZES, K, M, N, P, S, ring_pages, text_of
from mtpc.layout.buffers import C as STEP_ROWS
from mtpc.layout.open_sizes import is_size_text, shared_sizes, size_of
from mtpc.models.load import LoadedModel, load
from mtpc.program.compiler import StepCompiler

NUMBERS = {M: 9, N: 41, S: 3, P: 4, K: 3, STEP_ROWS: 8}
TABLE = BufferSpec("state.table", (S, M), torch.int32)
POOL = BufferSpec("kv.0.k", (N, P, 2), torch.float32)


def ring(window: int) -> BufferSpec:
    return BufferSpec("kv.1.ring_k", ((S - 1) * ring_pages(window) + 1, P, 2), torch.float32)


def opened(*specs: BufferSpec, **numbers: int) -> tuple[StepMode, Callable[[str], Tensor]]:
    """A mode, and its fakes of buffers by name."""
    sizes = {symbol: numbers.get(str(symbol), n) for symbol, n in NUMBERS.items()}
    layout = Layout(specs, sizes, OPEN_SIZES)
    mode = StepMode(layout)
    return mode, lambda name: mode.fake(name, layout.reserve(name))


def names(mode: StepMode) -> dict[str, int]:
    return {str(symbol): least for symbol, least in mode.open_sizes.items()}


def test_shapes_have_open_sizes() -> None:
    mode, fake = opened(TABLE, POOL, ring(5))
    with mode:
        rows = fake("state.table")[torch.zeros(2, dtype=torch.int64)]
    texts = [text_of(dim_of(mode, size)) for size in (*rows.shape, *rows.stride())]
    assert texts == [2, "1*M", "1*M", 1]
    assert [text_of(dim_of(mode, n)) for n in fake("kv.1.ring_k").shape] == ["3*S+-2", 4, 2]
    assert nominal(rows.numel()) == nominal(opened(TABLE, M=77)[1]("state.table")[:2].numel())
    assert names(mode) == {"M": 3, "N": 2, "S": 2}  # A ring has 3 pages, if a request has as many.


@pytest.mark.parametrize(
    ("use", "fixed"),
    [
        (lambda fake: torch.ones_like(fake("state.table")[0]).sum(0), set()),
        (lambda fake: torch.arange(int(fake("state.table").shape[1])), {"M"}),
        (lambda fake: fake("kv.0.k").view(-1, 2), set()),
        (lambda fake: fake("kv.0.k").view(164, 2), {"N"}),
        (lambda fake: fake("kv.0.k").flatten(0, 1), set()),
        (lambda fake: fake("state.table").shape[0] == 3, {"S"}),
        (lambda fake: bool(fake("state.table").shape[0] == 5), {"S"}),
        (lambda fake: bool(fake("state.table").shape[1] < 20), {"M"}),
    ],
)
def test_what_fixes_a_size(use: Callable[..., Any], fixed: set[str]) -> None:
    """A number that is computed with, a shape that is given as numbers, an answer to a question."""
    mode, fake = opened(TABLE, POOL)
    with mode:
        found = use(fake)
        if isinstance(found, torch.SymBool):
            bool(found)
    assert {"M", "N", "S"} - names(mode).keys() == fixed


def test_the_smaller_of_a_size_and_a_number() -> None:
    """The number, from some size on; below it the size is fixed."""
    mode, fake = opened(TABLE)
    assert min(6, fake("state.table").shape[1] * 4) == 6
    assert names(mode)["M"] == 2
    mode, fake = opened(TABLE)
    assert min(21, fake("state.table").shape[1] * 4) == 21
    assert names(mode)["M"] == 6
    mode, fake = opened(TABLE)
    assert int(min(60, fake("state.table").shape[1] * 4)) == 36
    assert "M" not in names(mode)


def test_a_ring_that_is_as_long_as_the_text_fixes_it() -> None:
    mode, _ = opened(TABLE, ring(90))
    assert names(mode) == {"N": 2, "S": 2}


def test_a_size_of_one_is_fixed() -> None:
    assert names(opened(TABLE, M=1)[0]) == {"N": 2, "S": 2}


def test_sizes_as_text() -> None:
    sizes = {"M": 7, "N": 11, "S": 4}
    for form in (5 * S - 4, M * S * 3, N * P.subs(P, 4) + 2 * M + 1, S**2, M):
        text = text_of(sympy.expand(form))
        assert size_of(text, sizes) == form.subs({M: 7, N: 11, S: 4})
    assert sized("int32[1*S,1*M](1*M,1)", sizes) == "int32[4,7](7,1)"
    for text in ("", "M+", "M**2", "M-1", "Q", "__import__", "1e9", " M", "M\n", "9" * 16):
        assert not is_size_text(text)
        with pytest.raises(CacheError, match="a step has the size"):
            size_of(text, sizes)


class _Stub:
    """A backend that has packages and no kernels: its tapes call the reference operators."""

    name, device, enables = "cpu", "cpu", CpuBackend.enables
    makes_files = True
    notes: ClassVar[Counter[str]] = Counter()

    def legalise(self) -> tuple[Any, ...]:
        return ()


ONE: dict[str, Any] = {"max_len": 64, "batch_buckets": (2,), "num_pages": 50}
OTHER: dict[str, Any] = {"max_len": 181, "batch_buckets": (2, 7)}
DECODE, PREFILL = StepKey.decode(2, 2), StepKey.prefill(2, 4, 2)
QUICK = ("mimo", PREFILL, True)
CASES = [
    pytest.param(*case, marks=() if case == QUICK else pytest.mark.slow)
    for case in product(FAMILY_NAMES, (DECODE, PREFILL), (False, True))
]


@pytest.mark.parametrize(("family", "key", "samples"), CASES)
def test_a_tape_is_the_same_for_all_sizes(
    family: str, key: StepKey, samples: bool, tmp_path: Path
) -> None:
    """Byte by byte, built for one program and for another; so nothing of either is in it."""
    tiny.make_checkpoint(family, tmp_path)
    loaded = load(tmp_path, "bfloat16", True, headers_only=True)
    (arena, entries, sizes, mode), other = (
        _tape(loaded, key, sampling=samples, token_mask=samples, **program)
        for program in (ONE, OTHER)
    )
    fixed = {"M", "N", "S"} - names(mode).keys()
    assert fixed == ({"M"} if family == "deepseek_v4" else set())
    if not fixed:
        assert (arena, entries) == other[:2]
    placed, numbered = _sized(arena, entries, sizes)
    assert placed > arena
    assert not any(is_size_text(n) for e in numbered for n in _numbers(e))


def _numbers(entry: Any) -> list[Any]:
    given = entry[1:] if entry[0] in ("planned", "returned", "tensor") else []
    return [n for part in given for n in (part if isinstance(part, list) else [part])]


@torch.no_grad()
def _tape(loaded: LoadedModel, key: StepKey, **changes: Any) -> tuple[int, Any, Any, Any]:
    options = plan_of(
        spec_tokens=2, page_size=4, prefill_chunk=8, prefill_rows=2, backend="cpu", **changes
    )
    compiler = StepCompiler(loaded, options, _Stub(), new_buffer=Layout.reserve)
    compiler.weights.defers = True
    graph = compiler.rewrite(compiler.trace(key))
    return *lower_to_tape(graph), shared_sizes(options), fake_mode_of(graph.graph)

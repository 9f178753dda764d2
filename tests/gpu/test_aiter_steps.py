"""Whole steps on aiter's kernels: what is bound, what the memory plan counts, and the text.

The fakes are those of `test_aiter`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.fake_aiter import ALL, installer
from helpers.plans import plan_of
from helpers.small_graphs import small_graph
from helpers.tapes import op_names
from helpers.whole_steps import beside, compiler_of
from torch import Tensor

import mtpc.ops.fused  # noqa: F401  (registers the references)
from mtpc.api import SpecModel
from mtpc.backends import aiter
from mtpc.backends.bindings import BindKernels
from mtpc.backends.cuda import CudaBackend
from mtpc.backends.eager import EagerBackend
from mtpc.backends.gpu.passes.check_invariance import CheckInvariance
from mtpc.backends.memory import GRANULE, live_memory
from mtpc.backends.null import NullGraphs
from mtpc.capture.graph import StepGraph
from mtpc.errors import BackendError
from mtpc.layout import StepKey
from mtpc.models.load import load
from mtpc.passes.hoist_shared import HoistShared
from mtpc.program.compiler import StepCompiler

pytestmark = pytest.mark.with_triton

REFERENCE = torch.ops.mtpc
LARGE = dict(kv_lora_rank=512, qk_rope_head_dim=64)
"""The latent's released widths on the tiny DeepSeek-V3."""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    yield from installer(tmp_path, monkeypatch)


def _bound(
    directory: Path, spec_tokens: int, dtype: str, found: aiter.Found, **changes: Any
) -> Any:
    """A decode step bound to what was found; which libraries' ops it calls, and the notes."""
    notes: list[str] = []
    graph = _decode_step(directory, spec_tokens, dtype, **changes)
    BindKernels(found.bindings, notes.append).apply(graph)
    return _attentions(graph), sorted(set(notes))


def _decode_step(
    directory: Path, spec_tokens: int, dtype: str = "bfloat16", **changes: Any
) -> StepGraph:
    """A greedy one of two requests, on the references."""
    sizes = {"batch_buckets": (2,), "max_len": 64, "page_size": 1, "sampling": False, **changes}
    backend = EagerBackend()
    compiler = compiler_of(directory, dtype, backend, spec_tokens=spec_tokens, **sizes)
    return compiler.rewritten(compiler.keys[0])


def _attentions(graph: StepGraph) -> list[str]:
    return sorted({name.split(".")[0] for name in _names(graph) if "attention" in name})


def _names(graph: StepGraph) -> list[str]:
    return [str(n.target) for n in graph.graph.nodes if n.op == "call_function"]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    from helpers import tiny

    def make(family: str, heads: int = 16) -> Path:
        more = {"index_head_dim": 128} if family == "deepseek_v32" else {}
        more |= {"num_attention_heads": heads, "num_key_value_heads": heads}
        directory = tmp_path_factory.mktemp(f"{family}-{heads}")
        return tiny.make_checkpoint(family, directory, **{**LARGE, **more})

    return cache(make)


@pytest.fixture
def wide_mla(wide: Callable[..., Path]) -> Path:
    return wide("deepseek_v3")


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "spec_tokens", "cuts"), [(16, 8, 0), (8, 2, 0), (64, 3, 1)])
def test_rows_beyond_a_kernel_of_so_many_heads(
    heads: int, spec_tokens: int, cuts: int, wide: Callable[..., Path],
    install: Callable[..., None],
) -> None:  # fmt: skip
    """Verified rows and single rows of drafts are aiter's, in two parts where there are 64 heads of
    several rows."""
    install(ALL)
    graph = _decode_step(wide("deepseek_v3", heads), spec_tokens)
    notes: list[str] = []
    BindKernels(aiter.aiter_bindings().bindings, notes.append).apply(graph)
    assert _attentions(graph) == ["mtpc_aiter"]
    assert not [note for note in notes if "latent_attention" in note]
    several = [n for n in graph.graph.nodes if str(n.target) == "aten.split.Tensor"]
    assert bool(several) == bool(cuts)


@pytest.mark.slow
def test_other_dtypes_and_widths_are_refused(
    wide_mla: Path, checkpoint: Callable[..., Path], install: Callable[..., None]
) -> None:
    install(ALL)
    found = aiter.aiter_bindings()
    libraries, notes = _bound(wide_mla, 2, "float32", found)
    assert libraries == ["mtpc"]
    assert any("(float32; it takes bfloat16)" in note for note in notes)
    libraries, notes = _bound(wide_mla, 2, "bfloat16", found, page_size=16)
    assert libraries == ["mtpc_aiter"]
    _, notes = _bound(checkpoint("deepseek_v3"), 2, "bfloat16", found)
    assert any("rows of 40 with rank 32; it takes 576 and 512" in note for note in notes)
    libraries, _ = _bound(checkpoint("mimo"), 2, "bfloat16", found, page_size=16)
    assert libraries == ["mtpc_aiter"]


# ---- memory -----------------------------------------------------------------------------------


def _scratch(graph: StepGraph) -> dict[str, int]:
    """What a step's plan counts beside the results of calls."""
    return {
        live.name.removesuffix(" (scratch)"): live.nbytes
        for live in live_memory(graph)
        if "scratch" in live.name
    }


@torch.no_grad()
def test_the_plan_counts_splits(wide_mla: Path, install: Callable[..., None]) -> None:
    """16 of one request with 16 heads: of four rows, or of a draft's one."""
    install(ALL)
    graph = _decode_step(wide_mla, 3, batch_buckets=(1,), max_len=512, page_size=16)
    BindKernels(aiter.aiter_bindings().bindings).apply(graph)
    theirs = "mtpc_aiter.latent_attention"
    calls = [n.name for n in graph.graph.nodes if str(n.target).startswith(theirs)]
    found = _scratch(graph)
    assert set(found) == set(calls)
    four, one = (rows * 16 * 16 * 4 * 513 + 2 * GRANULE for rows in (4, 1))
    assert set(found.values()) == {four, one}


def _paged_step(num_reqs: int = 1) -> StepGraph:
    """Attention of four rows to pages of 1,024 tokens a request."""

    def body(q: Tensor, table: Tensor, lens: Tensor, starts: Tensor, out: Tensor,
             k: Tensor, v: Tensor) -> Tensor:  # fmt: skip
        return out.copy_(REFERENCE.paged_attention(q, k, v, table, lens, starts, 1.0))

    pages = {name: torch.zeros(9, 16, 2, 32).bfloat16() for name in ("kv_k", "kv_v")}
    return small_graph(
        body,
        batch_q=torch.zeros(4, 4, 32).bfloat16(),
        batch_table=torch.zeros(num_reqs, 64).int(),
        batch_lens=torch.zeros(num_reqs).int(),
        batch_starts=torch.zeros(num_reqs + 1).int(),
        batch_out=torch.zeros(4, 4, 32).bfloat16(),
        **pages,
    )


def test_steps_of_equal_sizes_and_other_phases(install: Callable[..., None]) -> None:
    """A decode step's requests have equally many rows; one of a prompt may have all of them."""
    install(ALL)
    found, longest = aiter.aiter_bindings(), []
    for key in (StepKey.decode(2, 1), StepKey.prefill(2, 4, 1)):
        graph = _paged_step(num_reqs=2)
        graph.key = key
        BindKernels(found.bindings).apply(graph)
        (call,) = (n for n in graph.graph.nodes if str(n.target).startswith("mtpc_aiter."))
        longest.append(call.args[-1])
    assert longest == [2, 4]


def test_the_plan_counts_segments(install: Callable[..., None]) -> None:
    """64 of 16 tokens each."""
    install(ALL)
    graph = _paged_step()
    BindKernels(aiter.aiter_bindings().bindings).apply(graph)
    assert list(_scratch(graph).values()) == [4 * 4 * 64 * 4 * (32 + 2)]


# ---- batch invariance ------------------------------------------------------------------------


def test_no_step_whose_rows_are_apart_calls_it(install: Callable[..., None]) -> None:
    """`open_cuda` does not bind it then, and the last check finds it, with the reason."""
    install(ALL)
    graph = _paged_step()
    BindKernels(aiter.aiter_bindings().bindings).apply(graph)
    said = r"calls mtpc_aiter::paged_attention: unified_attention chooses tiles and splits by the"
    with pytest.raises(BackendError, match=said):
        CheckInvariance().apply(graph)


# ---- whole steps -----------------------------------------------------------------------------


@torch.no_grad()
def test_layers_share_what_is_computed_for_them(
    wide_mla: Path, install: Callable[..., None]
) -> None:
    """Once for the target and the draft over all its rows, once for each single-row draft."""
    install(ALL)
    graph = _decode_step(wide_mla, 3)
    BindKernels(aiter.aiter_bindings().bindings).apply(graph)
    HoistShared().apply(graph)
    names = _names(graph)
    calls = [n for n in graph.graph.nodes if str(n.target) == "mtpc_aiter.latent_attention.default"]
    assert len(calls) > 3 + 1
    users = {str(user.target) for call in calls for user in call.users}
    assert users == {"aten.masked_fill.Scalar"}, "in the graph, where Inductor fuses it"
    assert names.count("mtpc_aiter.token_lists.default") == 3
    assert names.count("aten.searchsorted.Tensor") == 3, "of rows that are off"
    assert names.count("aten.ones.default") == 1, "the same for all"


@pytest.mark.parametrize(
    "family",
    ["mimo", *(pytest.param(f, marks=pytest.mark.slow) for f in ("deepseek_v3", "deepseek_v32"))],
)
def test_text_is_that_of_the_references(
    family: str,
    checkpoint: Callable[..., Path],
    wide: Callable[..., Path],
    install: Callable[..., None],
) -> None:
    """Ragged prefill of several prompts, decode, and drafts, on the null device."""
    install(ALL)
    directory = checkpoint(family) if family == "mimo" else wide(family)
    options = plan_of(spec_tokens=1, batch_buckets=(3,), max_len=64, prefill_rows=4)
    prompts = [[5, 9, 2], [7] * 19, [3, 1, 4, 1, 5]]
    texts, graphs = [], NullGraphs()
    loaded = load(directory, "bfloat16", True)
    first = StepCompiler(loaded, options, EagerBackend())
    for bindings in (aiter.aiter_bindings().bindings, ()):
        backend = CudaBackend(graphs, EagerBackend().lower, bindings, device="cpu")
        compiler = beside(first, options, backend)
        compiled = SpecModel(loaded.served(), compiler.plan, compiler.compile())
        texts.append((compiled.generate(prompts, 8), compiled.stats.accepted))
        called = {name for tape in graphs.tapes for name in op_names(tape)}
        assert "aten.searchsorted.Tensor" in called
    assert texts[0] == texts[1]

"""The binding of aiter's kernels, against fakes: CONTRACT TESTS, nothing of aiter runs here.

A fake distribution `amd-aiter` is put on sys.path whose functions have the published signatures
and compute with our references what aiter is documented to compute. What is tested is our side:
detection, signatures, limits, and the translation of arguments.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.batches import close, make_batch
from helpers.fake_aiter import ALL, MLA, UNIFIED, installer
from helpers.tapes import op_names
from helpers.triton_steps import compile_on
from torch import fx

import mtpc.ops.fused  # noqa: F401  (registers the references)
from mtpc.backends import aiter
from mtpc.backends.aiter.ops import rows_on, token_lists
from mtpc.backends.bindings import BindKernels
from mtpc.backends.cuda import CudaBackend
from mtpc.backends.eager import EagerBackend
from mtpc.backends.null import NullGraphs
from mtpc.capture.graph import StepGraph
from mtpc.config import CompileOptions
from mtpc.layout import StepKey
from mtpc.models.load import load
from mtpc.program.compiler import StepCompiler

pytestmark = pytest.mark.with_triton

REFERENCE = torch.ops.mtpc


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    yield from installer(tmp_path, monkeypatch)


def _operator(found: aiter.Found, name: str) -> Any:
    reference = getattr(REFERENCE, name).default
    (binding,) = (b for b in found.bindings if b.reference is reference)
    return binding.target


class _Ours:
    """The ops of a binding, to be called as `torch.ops.mtpc` is.

    Args:
        found: the bindings.
        max_query_len: the most rows of a request, where a prefill step says it.
    """

    def __init__(self, found: aiter.Found, max_query_len: int = 3):
        self._found, self._max_query_len = found, max_query_len

    def paged_attention(
        self, q: Any, k: Any, v: Any, table: Any, lens: Any, starts: Any, *rest: Any
    ) -> Any:
        call = _operator(self._found, "paged_attention")
        on = rows_on(lens, starts, q.shape[0])
        longest = self._max_query_len
        return call(q, k, v, table, lens, starts, *rest, on, longest)

    def latent_attention(
        self, q: Any, cache: Any, table: Any, lens: Any, starts: Any, *rest: Any
    ) -> Any:
        call = _operator(self._found, "latent_attention")
        indptr, indices, last = token_lists(table, lens, cache.shape[1])
        on = rows_on(lens, starts, q.shape[0])
        return call(q, cache, table, lens, starts, *rest, on, indptr, indices, last)


# ---- detection -------------------------------------------------------------------------------


def test_without_aiter() -> None:
    found = aiter.aiter_bindings()
    assert found.bindings == ()
    assert found.message == "amd-aiter is not installed: Triton kernels only"


def test_the_unrelated_aiter_is_recognised(install: Callable[..., None]) -> None:
    install({"aiter/__init__.py": "def aiter(): ..."}, "aiter")
    found = aiter.aiter_bindings()
    assert found.bindings == ()
    assert "aiter 0.1.5 is the async-iterator helpers" in found.message
    assert "pip uninstall aiter" in found.message
    assert "aiter" not in sys.modules, "it is recognised without being imported"


def test_both_distributions_of_one_import_name(install: Callable[..., None]) -> None:
    """What is on disk may be of either; the note says so, whatever its signatures are."""
    install(ALL)
    install({}, "aiter")
    message = aiter.aiter_bindings().message
    assert message.startswith("amd-aiter 0.1.5, whose files aiter 0.1.5 of the public index")
    assert "uninstall both, then install amd-aiter" in message


def test_both_locations_of_a_function_that_moved(install: Callable[..., None]) -> None:
    moved = {**ALL, "aiter/ops/triton/attention/unified_attention.py": UNIFIED}
    del moved["aiter/ops/triton/unified_attention.py"]
    install(moved)
    found = aiter.aiter_bindings()
    assert found.message == "amd-aiter 0.1.5"
    assert len(found.bindings) == 5


# ---- signatures ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("max_seqlen_q,\n", "max_seqlen_qo,\n", "lacks ['max_seqlen_q']"),
        ("page_size=1", "page_size=1, *, work_plan", "newly requires ['work_plan']"),
        ("def mla_decode_fwd", "def mla_decode", "no attribute 'mla_decode_fwd'"),
        ("import torch", "import torch, no_such_module_of_rocm", "no_such_module_of_rocm"),
        ("import torch", "import torch; {}['GPU_ARCHS']", "KeyError: 'GPU_ARCHS'"),
        ("import torch", "raise RuntimeError('no rocminfo')", "RuntimeError: no rocminfo"),
        ("q, kv_buffer, o,", "q, o, kv_buffer,", "its order is ['q', 'o', 'kv_buffer'"),
        ("page_size=1", "page_size=16", "page_size is page_size=16, positional or keyword"),
        ("page_size=1", "*, page_size=1", "page_size is page_size=1, keyword-only"),
        ("nhead_kv=1", "nhead_kv=None", "nhead_kv is nhead_kv=None"),
    ],
    ids=[
        *("renamed", "required", "gone", "broken", "no architecture", "import fails", "order"),
        *("default", "kind", "other default"),
    ],
)
def test_a_deviation_leaves_that_op_to_triton_and_says_so(
    old: str, new: str, message: str, install: Callable[..., None]
) -> None:
    assert old in MLA
    install({**ALL, "aiter/mla.py": MLA.replace(old, new, 1)})
    found = aiter.aiter_bindings()
    names = ("paged_attention", "experts", "rms_norm", "add_rms_norm")
    left = [getattr(REFERENCE, name) for name in names]
    assert [b.reference for b in found.bindings] == [op.default for op in left]
    assert "; Triton stands in for mla_decode_fwd: " in found.message
    assert message in found.message


# ---- translation of arguments ----------------------------------------------------------------


@pytest.mark.parametrize("window", [0, 1, 9])
@pytest.mark.parametrize("sinks", [False, True])
def test_paged_attention_is_translated(
    window: int, sinks: bool, install: Callable[..., None]
) -> None:
    install(ALL)
    batch = make_batch([(37, 3), (0, 3), (16, 3)], dtype=torch.bfloat16)
    batch.window, batch.softcap = window, 5.0
    batch.sinks = torch.linspace(-3, 3, 4, dtype=torch.bfloat16) if sinks else None
    close(batch.paged(_Ours(aiter.aiter_bindings())), batch.paged(REFERENCE))


@pytest.mark.parametrize("page_size", [1, 16])
def test_latent_attention_is_translated(page_size: int, install: Callable[..., None]) -> None:
    """Requests that are off, page edges, wild entries behind a request's pages."""
    install(ALL)
    lengths = [(37, 3), (0, 3), (16, 3), (32, 3), (17, 3)]
    kinds: dict[str, Any] = dict(dtype=torch.bfloat16, heads=(16, 1), dims=(576, 1))
    batch = make_batch(lengths, page_size=page_size, **kinds)
    batch.k[0] = 0  # The null page, which lists of requests that are off name.
    expected = batch.latent(REFERENCE, 512)
    close(batch.latent(_Ours(aiter.aiter_bindings()), 512), expected)


def test_norms_are_translated(install: Callable[..., None]) -> None:
    """Bit for bit: aiter is asked to round where we do. Rows of any strides and dimensions."""
    install(ALL)
    found = aiter.aiter_bindings()
    joint = torch.randn(2, 7, 192, generator=torch.Generator().manual_seed(0)).bfloat16()
    for x in (joint, joint[..., :96], joint[..., 64:160].unflatten(-1, (6, 16))):
        weight, added = torch.linspace(-2, 2, x.shape[-1]).bfloat16(), x.flip(1)
        normed = _operator(found, "rms_norm")(x, weight, 1e-6)
        assert torch.equal(normed, REFERENCE.rms_norm(x, weight, 1e-6))
        both = _operator(found, "add_rms_norm")(x, added, weight, 1e-6)
        for ours, theirs in zip(both, REFERENCE.add_rms_norm(x, added, weight, 1e-6), strict=True):
            assert torch.equal(ours, theirs)


def test_token_lists() -> None:
    table = torch.tensor([[5, 6, -99], [7, 2**29, 2**29], [1, 2, 3]], dtype=torch.int32)
    indptr, indices, last = token_lists(table, torch.tensor([5, 0, 12], dtype=torch.int32), 4)
    assert indptr.tolist() == [0, 5, 6, 18]
    rest = [*range(4, 16)]
    assert indices.tolist() == [20, 21, 22, 23, 24, 0, *rest, *[0] * 18]
    assert last.tolist() == [1, 1, 1]
    assert {each.dtype for each in (indptr, indices, last)} == {torch.int32}


def test_rows_on() -> None:
    lens, starts = torch.tensor([5, 0, 2]).int(), torch.tensor([0, 2, 3, 4]).int()
    assert rows_on(lens, starts, 6).flatten().tolist() == [True, True, False, True, False, False]


def test_fakes_say_what_comes_out() -> None:
    table, lens = torch.zeros(3, 2).int(), torch.tensor([5, 0, 12]).int()
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(token_lists, (table, lens, 4), test_utils=checks)
    torch.library.opcheck(rows_on, (lens, torch.tensor([0, 2, 3, 4]).int(), 6), test_utils=checks)


def test_nothing_is_declared_mutated(install: Callable[..., None]) -> None:
    """Arguments are the reference's, but for those that a binding refuses where they are given."""
    install(ALL)
    for binding in aiter.aiter_bindings().bindings:
        assert not binding.target._schema.is_mutable
        names = [a.name for a in binding.target._schema.arguments]
        added = {"is_on", "max_query_len", "kv_indptr", "kv_indices", "kv_last_page_lens"}
        added |= {"expert_mask"}
        names = [name for name in names if name not in added]
        refused = {"rows", "k_scale", "v_scale", "limit", "limit_input", "gelu"}
        taken = [a.name for a in binding.reference._schema.arguments if a.name not in refused]
        assert names == taken


# ---- limits ----------------------------------------------------------------------------------

LARGE = dict(
    num_attention_heads=16,
    num_key_value_heads=16,
    kv_lora_rank=512,
    qk_rope_head_dim=64,
)
"""The latent's released widths on the tiny DeepSeek-V3."""


def _bound(
    directory: Path, spec_tokens: int, dtype: str, found: aiter.Found, **changes: Any
) -> Any:
    """A decode step bound to what was found; which libraries' ops it calls, and the notes."""
    sizes = {"batch_buckets": (2,), "max_len": 64, "page_size": 1, **changes}
    options = CompileOptions(spec_tokens=spec_tokens, **sizes)
    notes: list[str] = []
    compiler = StepCompiler(load(directory, dtype, True), options, EagerBackend())
    with torch.no_grad():
        graph = compiler.rewrite(compiler.trace(StepKey.decode(2, spec_tokens)))
    BindKernels(found.bindings, notes.append).apply(graph)
    return _attentions(graph), sorted(set(notes))


def _attentions(graph: StepGraph) -> list[str]:
    return sorted({name.split(".")[0] for name in _names(graph) if "attention" in name})


def _names(graph: StepGraph) -> list[str]:
    return [str(n.target) for n in graph.graph.nodes if n.op == "call_function"]


@pytest.fixture(scope="module")
def wide_mla(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from helpers import tiny

    return tiny.make_checkpoint("deepseek_v3", tmp_path_factory.mktemp("wide"), **LARGE)


def test_three_drafts_are_within_the_limits_and_four_are_not(
    wide_mla: Path, install: Callable[..., None]
) -> None:
    """With K = 4, verify's 5 rows go elsewhere and say so; the drafts' single rows do not."""
    install(ALL)
    found = aiter.aiter_bindings()
    libraries, notes = _bound(wide_mla, 3, "bfloat16", found)
    assert libraries == ["mtpc_aiter"]
    assert not [note for note in notes if "latent_attention" in note]
    libraries, notes = _bound(wide_mla, 4, "bfloat16", found)
    assert libraries == ["mtpc", "mtpc_aiter"]
    (note,) = (note for note in notes if "latent_attention" in note)
    assert "does not run on aiter (5 query rows a request; it takes up to 4)" in note


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


@pytest.mark.parametrize(
    ("dtype", "width", "plus_one", "reason"),
    [
        ("bfloat16", 7168, False, None),
        ("float16", 128, False, None),
        ("float32", 128, False, "float32 rows with float32 weights"),
        ("bfloat16", 128, True, "1 + weight; it scales by the weight"),
        ("bfloat16", 8200, False, "rows of 8200; it takes multiples of 8 up to 8192"),
        ("bfloat16", 100, False, "rows of 100; it takes multiples of 8 up to 8192"),
    ],
)
def test_limits_of_norms(
    dtype: str, width: int, plus_one: bool, reason: str | None, install: Callable[..., None]
) -> None:
    install(ALL)
    found = aiter.aiter_bindings()
    for name, count in (("rms_norm", 1), ("add_rms_norm", 2)):
        graph = fx.Graph()
        rows = [graph.placeholder(f"x{i}") for i in range(count)]
        weight = graph.placeholder("weight")
        for node, shape in (*((row, (3, width)) for row in rows), (weight, (width,))):
            node.meta["val"] = torch.empty(shape, dtype=getattr(torch, dtype))
        reference = getattr(REFERENCE, name).default
        call = graph.call_function(reference, (*rows, weight, 1e-6, plus_one))
        (binding,) = (b for b in found.bindings if b.reference is reference)
        assert binding.refuses(call, None) == reason  # type: ignore[arg-type]


def test_fused_norms_are_bound(
    checkpoint: Callable[..., Path], install: Callable[..., None]
) -> None:
    """Where the pass is enabled; the draft's entry is left to Triton."""
    install(ALL)
    enabled = ("fuse-elementwise", "fuse-draft-entry")
    options = CompileOptions(
        spec_tokens=2, batch_buckets=(2,), max_len=64, enabled_passes=enabled
    )  # fmt: skip
    compiler = StepCompiler(load(checkpoint("mimo"), "bfloat16", True), options, EagerBackend())
    with torch.no_grad():
        graph = compiler.rewrite(compiler.trace(StepKey.decode(2, 2)))
    BindKernels(aiter.aiter_bindings().bindings).apply(graph)
    norms = {name for name in _names(graph) if "norm" in name or "entry" in name}
    assert norms == {
        "mtpc.draft_entry.default", "mtpc_aiter.rms_norm.default", "mtpc_aiter.add_rms_norm.default"
    }  # fmt: skip


# ---- whole steps -----------------------------------------------------------------------------


@torch.no_grad()
def test_layers_share_what_is_computed_for_them(
    wide_mla: Path, install: Callable[..., None]
) -> None:
    """Once for the target and the draft over all its rows, once for each single-row draft."""
    install(ALL)
    options = CompileOptions(spec_tokens=3, batch_buckets=(2,), max_len=64)
    compiler = StepCompiler(load(wide_mla, "bfloat16", True), options, EagerBackend())
    graph = compiler.rewrite(compiler.trace(StepKey.decode(2, 3)))
    BindKernels(aiter.aiter_bindings().bindings).apply(graph)
    names = _names(graph)
    assert names.count("mtpc_aiter.latent_attention.default") > 3 + 1
    for shared in ("token_lists", "rows_on"):
        assert names.count(f"mtpc_aiter.{shared}.default") == 3


@pytest.mark.parametrize("family", ["mimo", pytest.param("deepseek_v3", marks=pytest.mark.slow)])
def test_text_is_that_of_the_references(
    family: str,
    checkpoint: Callable[..., Path],
    wide_mla: Path,
    install: Callable[..., None],
) -> None:
    """Ragged prefill of several prompts, decode, and drafts, on the null device."""
    install(ALL)
    directory = wide_mla if family == "deepseek_v3" else checkpoint(family)
    options = CompileOptions(spec_tokens=2, batch_buckets=(1, 3), max_len=64, prefill_rows=4)
    prompts = [[5, 9, 2], [7] * 19, [3, 1, 4, 1, 5]]
    texts, graphs = [], NullGraphs()
    for bindings in (aiter.aiter_bindings().bindings, ()):
        backend = CudaBackend(graphs, EagerBackend().lower, bindings, device="cpu")
        compiled = compile_on(directory, backend, options, "bfloat16")
        texts.append((compiled.generate(prompts, 8), compiled.stats.accepted))
        called = {name for tape in graphs.tapes for name in op_names(tape)}
        assert "mtpc_aiter.rows_on.default" in called
    assert texts[0] == texts[1]

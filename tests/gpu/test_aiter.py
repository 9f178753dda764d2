"""The binding of aiter's kernels, against fakes: CONTRACT TESTS, nothing of aiter runs here.

A fake distribution `amd-aiter` is put on sys.path whose functions have the published signatures
and compute with our references what aiter is documented to compute. What is tested is our side:
detection, signatures, limits, and the translation of arguments.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from helpers.batches import close, make_batch
from helpers.fake_aiter import ALL, MLA, UNIFIED, installer
from helpers.plans import plan_of
from helpers.small_graphs import small_graph
from helpers.tapes import op_names
from helpers.whole_steps import beside, compiler_of
from torch import Tensor, fx
from torch._inductor import metrics
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import mtpc.ops.fused  # noqa: F401  (registers the references)
from mtpc.api import SpecModel
from mtpc.backends import aiter
from mtpc.backends.aiter import around, limits, sizes
from mtpc.backends.aiter.around import rows_off, token_lists
from mtpc.backends.bindings import BindKernels
from mtpc.backends.cuda import CudaBackend, compile_flat
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


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    yield from installer(tmp_path, monkeypatch)


def _operator(found: aiter.Found, name: str) -> Any:
    reference = getattr(REFERENCE, name).default
    (binding,) = (b for b in found.bindings if b.reference is reference)
    return binding.target


class _Ours:
    """What takes the place of `torch.ops.mtpc`, to be called as it is."""

    def __init__(self, found: aiter.Found, phase: str = "decode"):
        self._found, self._phase = found, phase

    def paged_attention(self, *given: Any) -> Any:
        calls = (_operator(self._found, "paged_attention"),)
        return around.paged_attention(calls, self._phase, *given)

    def latent_attention(self, *given: Any) -> Any:
        decode = _operator(self._found, "latent_attention")
        calls = (decode, torch.ops.mtpc_aiter.latent_prefill.default)
        return around.latent_attention(calls, self._phase, *given)


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
    assert len(found.bindings) == 3


# ---- signatures ------------------------------------------------------------------------------

GUARD = """
def guard(function):
    def wrapper_custom(*args, **kwargs):
        return function(*args, **kwargs)
    return wrapper_custom

"""
"""As aiter's `torch_compile_guard`, which its norms have: no signature is left to compare."""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("max_seqlen_q,\n    page", "max_seqlen_qo,\n    page", "lacks ['max_seqlen_q']"),
        ("logit_cap=0.0, num_kv_splits=None,\n):", "*, cap):", "newly requires ['cap']"),
        ("page_size=1", "page_size=1, *, work_plan", "newly requires ['work_plan']"),
        ("def mla_decode_fwd", "def mla_decode", "no attribute 'mla_decode_fwd'"),
        ("import torch", "import torch, no_such_module_of_rocm", "no_such_module_of_rocm"),
        ("import torch", "import torch; {}['GPU_ARCHS']", "KeyError: 'GPU_ARCHS'"),
        ("import torch", "raise RuntimeError('no rocminfo')", "RuntimeError: no rocminfo"),
        (
            "wd(\n    q, kv_buffer, o,",
            "wd(\n    q, o, kv_buffer,",
            "its order is ['q', 'o', 'kv_buffer'",
        ),
        ("page_size=1", "page_size=16", "page_size is page_size=16, positional or keyword"),
        ("page_size=1", "*, page_size=1", "page_size is page_size=1, keyword-only"),
        ("nhead_kv=1", "nhead_kv=None", "nhead_kv is nhead_kv=None"),
        ("num_kv_splits_indptr=None", "indptr=None", "lacks ['num_kv_splits_indptr']"),
        ("def mla_decode_fwd", f"{GUARD}@guard\ndef mla_decode_fwd", "lacks ['q', 'kv_buffer', "),
    ],
    ids=[
        *(
            "renamed",
            "prompts",
            "required",
            "gone",
            "broken",
            "no architecture",
            "import fails",
            "order",
        ),
        *("default", "kind", "other default", "splits", "guarded"),
    ],
)
def test_a_deviation_leaves_that_op_to_triton_and_says_so(
    old: str, new: str, message: str, install: Callable[..., None]
) -> None:
    assert old in MLA
    install({**ALL, "aiter/mla.py": MLA.replace(old, new, 1)})
    found = aiter.aiter_bindings()
    left = [getattr(REFERENCE, name) for name in ("paged_attention", "experts")]
    assert [b.reference for b in found.bindings] == [op.default for op in left]
    assert "; Triton stands in for mla_decode_fwd, mla_prefill_fwd: " in found.message
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


@pytest.mark.parametrize(
    ("page_size", "heads", "rows"), [(1, 16, 3), (16, 16, 3), (16, 8, 1), (16, 32, 5), (1, 128, 2)]
)
def test_latent_attention_is_translated(
    page_size: int, heads: int, rows: int, install: Callable[..., None]
) -> None:
    """Requests that are off, page edges, wild entries behind a request's pages."""
    install(ALL)
    lengths = [(37, rows), (0, rows), (16, rows), (32, rows), (17, rows)]
    kinds: dict[str, Any] = dict(dtype=torch.bfloat16, heads=(heads, 1), dims=(576, 1))
    batch = make_batch(lengths, page_size=page_size, **kinds)
    batch.k[0] = 0  # The null page, which lists of requests that are off name.
    expected = batch.latent(REFERENCE, 512)
    close(batch.latent(_Ours(aiter.aiter_bindings()), 512), expected)
    assert sys.modules["aiter.mla"].prompts == []


def test_prompts_are_translated(install: Callable[..., None]) -> None:
    """Ragged rows; a request that is off."""
    install(ALL)
    rows = (5, 1, 17, 1)
    lengths = [*zip((37, 0, 17, 40), rows, strict=True)]
    kinds: dict[str, Any] = dict(dtype=torch.bfloat16, heads=(16, 1), dims=(576, 1))
    batch = make_batch(lengths, page_size=16, **kinds)
    batch.k[0] = 0
    ours = _Ours(aiter.aiter_bindings(), "prefill")
    close(batch.latent(ours, 512), batch.latent(REFERENCE, 512))
    assert sys.modules["aiter.mla"].prompts == [sum(rows)]


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_queries_of_other_strides(phase: str, install: Callable[..., None]) -> None:
    """As parts of one product: attention to pages reads them as they are, the latent one a copy."""
    install(ALL)
    ours = _Ours(aiter.aiter_bindings(), phase)
    batch = make_batch([(37, 3), (16, 3)], dtype=torch.bfloat16)
    batch.q = torch.cat([batch.q, batch.q], 1)[:, : batch.q.shape[1]]
    assert not batch.q.is_contiguous()
    close(batch.paged(ours), batch.paged(REFERENCE))
    batch = make_batch([(37, 3)], page_size=16, dtype=torch.bfloat16, heads=(16, 1), dims=(576, 1))
    batch.q = torch.cat([batch.q, batch.q], 1)[:, :16]
    close(batch.latent(ours, 512), batch.latent(REFERENCE, 512))


def test_token_lists() -> None:
    table = torch.tensor([[5, 6, -99], [7, 2**29, 2**29], [1, 2, 3]], dtype=torch.int32)
    indptr, indices, last = token_lists(table, torch.tensor([5, 0, 12], dtype=torch.int32), 4)
    assert indptr.tolist() == [0, 5, 6, 18]
    rest = [*range(4, 16)]
    assert indices.tolist() == [20, 21, 22, 23, 24, 0, *rest, *[0] * 18]
    assert last.tolist() == [1, 1, 1]
    assert {each.dtype for each in (indptr, indices, last)} == {torch.int32}


def test_rows_off() -> None:
    lens, starts = torch.tensor([5, 0, 2]).int(), torch.tensor([0, 2, 3, 4]).int()
    assert rows_off(lens, starts, 6).tolist() == [False, False, True, False, True, True]
    empty = torch.tensor([0, 0, 2, 2]).int()  # Requests without rows, the first one off.
    assert rows_off(torch.tensor([0, 3, 0]).int(), empty, 3).tolist() == [False, False, True]


@pytest.mark.slow
def test_lists_are_few_kernels() -> None:
    """Starts, lists, the constant that layers share; and the search, which is apart on the CPU."""
    table = torch.randint(0, 99, (6, 40), dtype=torch.int32)
    lens = torch.tensor([5, 0, 40, 17, 0, 2], dtype=torch.int32)
    mode = FakeTensorMode()
    with mode:
        fakes = mode.from_tensor(table), mode.from_tensor(lens)
        module = make_fx(partial(token_lists, page_size=1), pre_dispatch=True)(*fakes)
    metrics.reset()
    made = compile_flat(module, (table, lens))(table, lens)
    for ours, eager in zip(made, token_lists(table, lens, 1), strict=True):
        assert torch.equal(ours, eager)
    assert metrics.generated_kernel_count == 4


def test_nothing_is_declared_mutated(install: Callable[..., None]) -> None:
    """Arguments are the reference's, but for those that a binding refuses where they are given."""
    install(ALL)
    for binding in aiter.aiter_bindings().bindings:
        assert not binding.target._schema.is_mutable
    assert not torch.ops.mtpc_aiter.latent_prefill.default._schema.is_mutable
    for binding in aiter.aiter_bindings().bindings:
        names = [a.name for a in binding.target._schema.arguments]
        added = {"max_query_len", "kv_indptr", "kv_indices", "kv_last_page_lens", "expert_mask"}
        added |= {"num_kv_splits", "num_kv_splits_indptr"}
        names = [name for name in names if name not in added]
        refused = {"rows", "k_scale", "v_scale", "limit", "limit_input", "gelu"}
        taken = [a.name for a in binding.reference._schema.arguments if a.name not in refused]
        assert names == taken


# ---- limits ----------------------------------------------------------------------------------

LARGE = dict(kv_lora_rank=512, qk_rope_head_dim=64)
"""The latent's released widths on the tiny DeepSeek-V3."""
ANY_STEP = cast(
    StepGraph, SimpleNamespace(layout=SimpleNamespace(is_ragged=False), key=StepKey.decode(2, 1))
)
"""All that limits ask of a step."""


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
@pytest.mark.parametrize(("heads", "spec_tokens"), [(16, 7), (16, 8), (8, 2)])
def test_rows_within_the_limits_and_beyond(
    heads: int, spec_tokens: int, wide: Callable[..., Path], install: Callable[..., None]
) -> None:
    """Verified rows go elsewhere and say so; single rows of drafts do not."""
    install(ALL)
    found = aiter.aiter_bindings()
    libraries, notes = _bound(wide("deepseek_v3", heads), spec_tokens, "bfloat16", found)
    notes = [note for note in notes if "latent_attention" in note]
    if (heads, spec_tokens) == (16, 7):
        assert (libraries, notes) == (["mtpc_aiter"], [])
        return
    assert libraries == ["mtpc", "mtpc_aiter"]
    (note,) = notes
    most = {16: 8, 8: 1}[heads]
    said = f"{spec_tokens + 1} query rows a request with {heads} heads; it takes up to {most}"
    assert f"latent_attention does not run on aiter ({said})" in note


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


def _attention(page: int, dtype: torch.dtype = torch.bfloat16) -> fx.Node:
    """A call of `paged_attention` on pages of some size."""
    graph = fx.Graph()
    shapes = [(3, 4, 128), (9, page, 2, 128), (9, page, 2, 128), (3, 5), (3,), (4,)]
    given = [graph.placeholder(f"given_{index}") for index in range(len(shapes))]
    for node, shape in zip(given, shapes, strict=True):
        node.meta["val"] = torch.empty(shape, dtype=dtype if len(shape) > 2 else torch.int32)
    return graph.call_function(REFERENCE.paged_attention.default, (*given, 1.0))


@pytest.mark.parametrize("page", [1, 8, 16, 24, 32, 48, 63, 64, 96, 128])
def test_pages_that_are_no_part_of_a_tile(page: int, install: Callable[..., None]) -> None:
    """aiter's tiles have the next power of two, up to 64, and asserts that they are whole pages;
    larger pages are cut anywhere."""
    install(ALL)
    reference = REFERENCE.paged_attention.default
    (binding,) = (b for b in aiter.aiter_bindings().bindings if b.reference is reference)
    tile = min(64, 1 << (page - 1).bit_length())
    fits = page >= 16 and (tile <= page or tile % page == 0)
    reason = None if fits else f"pages of {page} tokens; it takes 16, 32, and 64 or more"
    assert binding.refuses(_attention(page), ANY_STEP) == reason


def test_other_devices_are_refused(install: Callable[..., None]) -> None:
    """gfx1250 and gfx90a have no such kernel of latent attention, and other tiles."""
    install(ALL)
    for device in ("gfx90a", "gfx1250", "gfx942"):
        binding = aiter.aiter_bindings(device).bindings[0]
        reason = None if device == "gfx942" else f"{device}; it is bound on gfx942 and gfx950"
        assert binding.refuses(_attention(16), ANY_STEP) == reason


def _latents(heads: int, rows: int, phase: str, device: str | None) -> str | None:
    """Why a call of latent attention of two requests is refused."""
    q = torch.empty(2 * rows, heads, 576, dtype=torch.bfloat16, device="meta")
    cache = q.new_empty(9, 16, 576)
    call = {"q": q, "latent_cache": cache, "block_table": q.new_empty(2, 4), "latent_rank": 512}
    return limits.latent_attention(call, phase, device)


@pytest.mark.parametrize("device", ["gfx942", "gfx950"])
def test_every_call_that_is_taken_has_one_kernel(device: str, install: Callable[..., None]) -> None:
    """By the dispatch of aiter's sources, for all heads and rows. What it would find, and mtpc
    leaves out, are the cases that `facts.UNBOUND` names, and more rows than a kernel has."""
    install(ALL)
    aiter.aiter_bindings()
    theirs = sys.modules["aiter.mla"]
    left_out = set()
    for heads in range(1, 130):
        for rows in range(1, 20):
            found = theirs.kernels_of(device, heads, rows)
            if _latents(heads, rows, "decode", device) is not None:
                left_out |= {(heads, rows)} if found else set()
                continue
            ((_, most),) = found
            assert rows <= (most or rows)
        prompts = _latents(heads, 5, "prefill", device) is None
        assert prompts == (heads in theirs.PROMPTS)
    beyond = {(16, rows) for rows in range(9, 20)} | {(64, rows) for rows in range(2, 20)}
    assert left_out == beyond | ({(8, 2)} if device == "gfx950" else set())


def test_what_bindings_take_is_what_the_data_say() -> None:
    """DeepSeek-V3's heads at 1, 2, 4, 8 and 16 ranks: K = 0, 1, 3, 7, 9, and prompts."""
    taken = {
        (heads, device): [
            *(rows for rows in (1, 2, 4, 8, 10) if not _latents(heads, rows, "decode", device)),
            *(["prompts"] if not _latents(heads, 4, "prefill", device) else []),
        ]
        for heads in (128, 64, 32, 16, 8)
        for device in ("gfx942", "gfx950")
    }
    rows = [1, 2, 4, 8, 10]
    assert taken == {
        (128, "gfx942"): [*rows, "prompts"], (128, "gfx950"): [*rows, "prompts"],
        (64, "gfx942"): [], (64, "gfx950"): [1],
        (32, "gfx942"): rows, (32, "gfx950"): rows,
        (16, "gfx942"): [1, 2, 4, 8, "prompts"], (16, "gfx950"): [1, 2, 4, 8, "prompts"],
        (8, "gfx942"): [1], (8, "gfx950"): [1],
    }  # fmt: skip
    assert _latents(64, 1, "decode", "gfx942") == (
        "1 query rows a request with 64 heads on gfx942; it takes them on gfx950"
    )
    assert _latents(48, 1, "decode", "gfx942") == "48 heads; it takes 8, 16, 32, 64, 128"
    assert _latents(32, 4, "prefill", None) == "prompts with 32 heads; it takes them with 16 or 128"
    alone = _latents(16, 1, "prefill", None)
    assert alone == "a row of each prompt; it would not split their contexts"


# ---- sizes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_reqs", "longest", "units", "splits"),
    [
        (1, 8192, 304, 16),  # 16 of 304 programs are nearest to full, and cost 14 % more keys.
        (64, 8192, 304, 9),  # 576 of 608 programs; 14 fill 896 of 912, and cost 13 % more keys.
        (304, 8192, 304, 1),  # Full.
        (64, 64, 304, 4),  # 256 of 304 programs, where a fifth split costs more than its keys.
    ],
)
def test_splits_are_those_that_aiter_would_choose(
    num_reqs: int, longest: int, units: int, splits: int
) -> None:
    assert sizes.latent_splits(num_reqs, longest, units) == splits


@pytest.mark.parametrize(
    ("rows", "num_reqs", "splits", "nbytes"),
    [
        (256, 64, 9, (603_979_776, 1_179_648, 256, 4)),  # 256 * 9 * 128 sums of 512 numbers.
        (64, 64, 1, (16_777_216, 32_768, 256, 4)),  # 64 * 128 sums.
        (256, 64, 1, (0, 131_072, 256, 4)),  # Four rows a request: written where results go.
        (64, 64, 1, (0, 8_192, 256, 4)),  # The same with 32 heads, whatever the rows.
    ],
)
def test_latent_scratch_by_hand(
    rows: int, num_reqs: int, splits: int, nbytes: tuple[int, ...]
) -> None:
    call = {
        "q": torch.empty(rows, 32 if nbytes[1] == 8_192 else 128, 576, device="meta"),
        "block_table": torch.empty(num_reqs, 7, device="meta"),
        "num_kv_splits": splits,
        "latent_rank": 512,
    }
    assert sizes.latent_scratch(call) == nbytes


@pytest.mark.parametrize(
    ("rows", "num_reqs", "longest", "heads", "width", "window", "segments"),
    [
        (1, 1, 32768, (32, 8), 128, 0, 128),  # 8 programs for 4,864: more than there may be.
        (64, 64, 8192, (32, 8), 128, 0, 16),  # 512 programs for 4,864: 10, the next power of two.
        (1, 1, 1024, (32, 8), 128, 0, 16),  # 1,024 keys have 16 tiles.
        (1, 1, 320 * 64, (32, 8), 512, 0, 128),  # 8 programs for 2,432: 304, and at most 128.
        (128, 128, 8192, (32, 8), 512, 0, 16),  # 1,024 programs for 2,432: 3, and at least 16.
        (1, 1, 512, (32, 8), 128, 0, 1),  # Short.
        (1, 1, 32768, (32, 8), 128, 9, 1),  # With a window.
        (256, 256, 32768, (32, 8), 128, 0, 1),  # 2,048 programs, more than 1,216.
        (4, 1, 32768, (32, 8), 128, 0, 128),  # Four rows in blocks of four: two blocks.
        (4, 1, 32768, (32, 8), 512, 0, 1),  # Wide heads, several rows.
        (9, 1, 32768, (100, 4), 128, 0, 128),  # 25 queries a key: blocks of one row of 32 places.
    ],
)
def test_paged_scratch_by_hand(
    rows: int, num_reqs: int, longest: int, heads: tuple[int, int], width: int, window: int,
    segments: int,
) -> None:  # fmt: skip
    """For an MI300X: 304 units, 1,216 programs wanted; 4,864 where contexts are cut."""
    call = {
        "q": torch.empty(rows, heads[0], width, device="meta"),
        "k_cache": torch.empty(9, 64, heads[1], width, device="meta"),
        "block_table": torch.empty(num_reqs, longest // 64, device="meta"),
        "sliding_window": window,
        "max_query_len": rows // num_reqs,
    }
    assert sizes.paged_segments(call) == segments
    sums = 4 * rows * heads[0] * segments
    expected = (sums * width, sums, sums) if segments > 1 else ()
    assert sizes.paged_scratch(call) == expected


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
    calls = [n.name for n in graph.graph.nodes if str(n.target).startswith("mtpc_aiter.")]
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
    assert names.count("aten.searchsorted.Tensor") == 2 * 3, "of lists, and of rows that are off"
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

"""The binding of aiter's kernels, against fakes: CONTRACT TESTS, nothing of aiter runs here.

A fake distribution `amd-aiter` is put on sys.path whose functions have the published signatures
and compute with our references what aiter is documented to compute. What is tested is our side:
detection, signatures, and the translation of arguments. `test_aiter_limits`, `test_aiter_steps` and
`test_aiter_experts` have the rest.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.batches import close, make_batch
from helpers.fake_aiter import ALL, FUSED_MOE, MLA, SHUFFLE, UNIFIED, installer

import mtpc.ops.fused  # noqa: F401  (registers the references)
from mtpc.backends import aiter
from mtpc.backends.aiter import around
from mtpc.backends.aiter.around import rows_off
from mtpc.backends.aiter.limits import Place
from mtpc.backends.aiter.token_lists import BEHIND, token_lists
from mtpc.ops.traits import UNKNOWN, traits_of

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
        self._found, self._place = found, Place(phase, "gfx950")

    def paged_attention(self, *given: Any) -> Any:
        calls = (_operator(self._found, "paged_attention"),)
        return around.paged_attention(calls, self._place, *given)

    def latent_attention(self, *given: Any) -> Any:
        decode = _operator(self._found, "latent_attention")
        calls = (decode, torch.ops.mtpc_aiter.latent_prefill.default)
        return around.latent_attention(calls, self._place, *given)


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


@pytest.mark.parametrize(
    ("file", "old", "new", "message"),
    [
        ("fused_moe", "topk_weight, topk_ids, e", "topk_ids, topk_weight, e", "its order is"),
        ("fused_moe", "=ActivationType.Silu", "=ActivationType.Gelu", "activation is activation="),
        ("fused_moe", "=QuantType.No", "=QuantType.per_Token", "quant_type is quant_type="),
        ("fused_moe", "doweight_stage1=False", "doweight_stage1=True", "doweight_stage1 is"),
        ("fused_moe", "def fused_moe(", "def fused_moe_2(", "no attribute 'fused_moe'"),
        ("ops/shuffle", "layout=(16, 16)", "layout=(32, 16)", "layout is layout=(32, 16)"),
        ("ops/shuffle", "use_int4=False", "use_int4=True", "use_int4 is use_int4=True"),
        ("ops/shuffle", "x, layout", "x, arch, layout", "newly requires ['arch']"),
    ],
)
def test_a_deviation_leaves_experts_to_triton_and_says_so(
    file: str, old: str, new: str, message: str, install: Callable[..., None]
) -> None:
    text = {"fused_moe": FUSED_MOE, "ops/shuffle": SHUFFLE}[file]
    assert old in text
    install({**ALL, f"aiter/{file}.py": text.replace(old, new, 1)})
    found = aiter.aiter_bindings()
    assert "experts" not in {str(b.reference).split(".")[1] for b in found.bindings}
    assert "; Triton stands in for fused_moe: " in found.message
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
    ("page_size", "heads", "rows", "calls"),
    [
        (1, 16, 3, 1), (16, 16, 3, 1), (16, 8, 1, 1), (16, 32, 5, 1), (1, 128, 2, 1),
        # In parts, of zeros, and both.
        (16, 64, 4, 2), (16, 8, 2, 1), (16, 20, 4, 1), (1, 72, 4, 3),
    ],
)  # fmt: skip
def test_latent_attention_is_translated(
    page_size: int, heads: int, rows: int, calls: int, install: Callable[..., None]
) -> None:
    """Requests that are off, page edges, wild entries behind a request's pages."""
    install(ALL)
    lengths = [(37, rows), (0, rows), (16, rows), (32, rows), (17, rows)]
    kinds: dict[str, Any] = dict(dtype=torch.bfloat16, heads=(heads, 1), dims=(576, 1))
    batch = make_batch(lengths, page_size=page_size, **kinds)
    batch.k[0] = 0  # The null page, which lists of requests that are off name.
    expected = batch.latent(REFERENCE, 512)
    close(batch.latent(_Ours(aiter.aiter_bindings()), 512), expected)
    assert len(sys.modules["aiter.mla"].splits) == calls
    assert sys.modules["aiter.mla"].prompts == []


@pytest.mark.parametrize(("heads", "calls"), [(16, 1), (64, 4), (20, 2), (8, 1)])
def test_prompts_are_translated(heads: int, calls: int, install: Callable[..., None]) -> None:
    """Ragged rows; a request that is off."""
    install(ALL)
    rows = (5, 1, 17, 1)
    lengths = [*zip((37, 0, 17, 40), rows, strict=True)]
    kinds: dict[str, Any] = dict(dtype=torch.bfloat16, heads=(heads, 1), dims=(576, 1))
    batch = make_batch(lengths, page_size=16, **kinds)
    batch.k[0] = 0
    ours = _Ours(aiter.aiter_bindings(), "prefill")
    close(batch.latent(ours, 512), batch.latent(REFERENCE, 512))
    assert sys.modules["aiter.mla"].prompts == [sum(rows)] * calls


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
    starts, rows = token_lists(table, torch.tensor([5, 0, 12], dtype=torch.int32), 4)
    assert starts.tolist() == [0, 5, 6, 18]
    assert rows[:18].tolist() == [20, 21, 22, 23, 24, 0, *range(4, 16)]
    assert rows[18:].tolist() == [0] * (3 * 12 - 18 + BEHIND)
    assert {each.dtype for each in (starts, rows)} == {torch.int32}
    longer = token_lists(table, torch.tensor([1, 0, 99], dtype=torch.int32), 4)
    assert longer[0].tolist() == [0, 1, 2, 14], "no longer than the table"
    torch.library.opcheck(
        token_lists, (table, starts[1:], 4), test_utils=("test_schema", "test_faketensor")
    )


def test_rows_off() -> None:
    lens, starts = torch.tensor([5, 0, 2]).int(), torch.tensor([0, 2, 3, 4]).int()
    assert rows_off(lens, starts, 6).tolist() == [False, False, True, False, True, True]
    empty = torch.tensor([0, 0, 2, 2]).int()  # Requests without rows, the first one off.
    assert rows_off(torch.tensor([0, 3, 0]).int(), empty, 3).tolist() == [False, False, True]


def test_operators_have_the_traits_of_what_they_compute(install: Callable[..., None]) -> None:
    """Else the verifier would not see that prompts read the cache, and refuse their steps."""
    install(ALL)
    assert len(aiter.aiter_bindings().bindings) == len(aiter.KERNELS)
    for kernel in aiter.KERNELS:
        wanted = traits_of(getattr(REFERENCE, kernel.around.__name__).default)
        assert wanted != UNKNOWN
        for call in kernel.calls:
            ours = getattr(torch.ops.mtpc_aiter, call.operator.__name__).default
            assert traits_of(ours) == wanted


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

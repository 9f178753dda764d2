"""The option batch_invariant in Triton's interpreter: a row's very bits, whatever rows there are.

Needs Triton's interpreter: `tests/run_triton.sh`. How a device's own products round is not seen
here. That they do so alike follows from the code: all numbers of rows run the same, in tiles of the
same size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.batches import Batch, Mixture, close, make_batch, make_mixture
from helpers.deltas import MAMBA, NARROW, Layer, Rule, make_rows
from helpers.grouped import experts_call, random_weight
from helpers.plans import plan_of
from helpers.theorem import poison
from helpers.triton_here import INTERPRETS, NO_INTERPRETER
from torch import Tensor
from torch.nn import functional as F

if not INTERPRETS:
    pytest.skip(NO_INTERPRETER, allow_module_level=True)

from helpers.triton_steps import compile_on

from mtpc.backends.cuda import CudaBackend
from mtpc.backends.eager import EagerBackend
from mtpc.backends.null import NullGraphs
from mtpc.backends.triton_kernels import combine, invariantly, load_kernels, triton_bindings
from mtpc.backends.triton_kernels.configs import BATCH_INVARIANT
from mtpc.backends.triton_kernels.plans import plan

pytestmark = pytest.mark.triton

load_kernels()
ROWS = (1, 2, 3, 4, 16, 17, 64, 65)
"""Of all together, the first and the last so many."""
SLOW = pytest.mark.slow
DTYPES = [torch.bfloat16, torch.float32]
FOLDED = pytest.mark.parametrize("is_folded", [False, True])


class Invariant:
    """The kernels, as the option has them."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(getattr(torch.ops.mtpc_triton, name), configs=BATCH_INVARIANT)


OURS = Invariant()


def check_rows(call: Callable[..., Tensor], *rows: Tensor) -> Tensor:
    """Every number of rows, from the first and up to the last, has the bits of all together."""
    whole = call(*rows)
    for count in ROWS:
        for part in (slice(count), slice(len(whole) - count, None)):
            assert torch.equal(call(*(tensor[part] for tensor in rows)), whole[part]), count
    return whole


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# ---- Products and sums -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("features", "width"), [(37, 104), (5, 1100)])
def test_a_linear(dtype: torch.dtype, features: int, width: int) -> None:
    """Of one product, and of two parts of its inputs; NaN of other rows reaches none."""
    x, bias = randn(130, width, dtype=dtype), randn(features, dtype=dtype, seed=2)
    weight = randn(features, width, dtype=dtype, seed=1)
    weight /= width**0.5
    found = check_rows(lambda x: OURS.batch_invariant_linear(x, weight, bias), x)
    close(found, F.linear(x.double(), weight.double(), bias.double()).to(dtype), scale=2)
    x[1:] = float("nan")
    assert torch.equal(OURS.batch_invariant_linear(x, weight, bias)[0], found[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_side_by_side(dtype: torch.dtype) -> None:
    """A matrix for each part, as latent attention has for each head; of any strides."""
    x, weight = randn(66, 3, 24, dtype=dtype), randn(3, 24, 10, dtype=dtype, seed=1)

    def call(x: Tensor) -> Tensor:
        return OURS.batch_invariant_linear(x.transpose(0, 1), weight.mT, None).transpose(0, 1)

    expected = torch.einsum("tbk,bkn->tbn", x.double(), weight.double()).to(dtype)
    close(check_rows(call, x), expected, scale=8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [3, 128, 1500])
def test_sums(dtype: torch.dtype, width: int) -> None:
    x = randn(66, width, dtype=dtype)
    found = check_rows(OURS.row_sum, x)
    torch.testing.assert_close(found, x.double().sum(1).float(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("width", [896, 4096, 14_336])
@pytest.mark.parametrize("features", [64, 896, 4096, 28_672, 151_936])
def test_tiles_follow_from_the_weight(features: int, width: int) -> None:
    """Sizes of real models: one kernel, the same constants, for one row as for 4,096."""
    weight = torch.empty(features, width, dtype=torch.bfloat16, device="meta")
    several = [
        plan("batch_invariant_linear", weight.new_empty(rows, width), weight, None)[0]
        for rows in (1, 16, 65, 4096)
    ]
    for launches in several:
        assert [launch.constants for launch in launches] == [
            launch.constants for launch in several[0]
        ]
        assert launches[0].grid[1:] == several[0][0].grid[1:]
    programs = several[0][0].grid[1] * several[0][0].grid[2]
    assert programs >= (56 if features >= 896 else min(64, features // 16 * (width // 512)))


# ---- Attention -------------------------------------------------------------------------------


def check_attention(batch: Batch, call: Callable[[Batch], Tensor]) -> Tensor:
    """Each row alone, with the rows of a verify step before it, in chunks of a prompt, beside other
    requests, and in company: the same."""
    whole = call(batch)
    for request, first in enumerate(batch.starts[:-1].tolist()):
        length, rows = int(batch.seq_lens[request]), int(batch.starts[request + 1]) - first
        for begin, end in _chunks(rows) if length else ():
            part = replace(
                batch,
                q=batch.q[first + begin : first + end],
                table=batch.table[request : request + 1],
                seq_lens=batch.seq_lens[request : request + 1] - (rows - end),
                starts=torch.tensor([0, end - begin], dtype=batch.starts.dtype),
            )
            assert torch.equal(call(part), whole[first + begin : first + end]), (begin, end)
    return whole


def _chunks(rows: int) -> Sequence[tuple[int, int]]:
    third = rows - rows // 3
    return [*((row, row + 1) for row in {0, rows - 1}), (max(0, rows - 4), rows), (0, third),
            *([(third, rows)] if third < rows else [])]  # fmt: skip


@FOLDED
@pytest.mark.parametrize(
    ("form", "dtype"),
    [
        ("window", torch.bfloat16),
        ("sinks", torch.float32),
        pytest.param("plain", torch.bfloat16, marks=SLOW),
        pytest.param("sinks", torch.bfloat16, marks=SLOW),
        pytest.param("window", torch.float32, marks=SLOW),
    ],
)
def test_paged_attention(
    form: str, dtype: torch.dtype, is_folded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = make_batch([(150, 9), (0, 3), (70, 1)], dtype=dtype, heads=(6, 2))
    if form == "window":
        batch.window, batch.softcap = 70, 5.0
    batch.sinks = torch.linspace(-3, 3, 6, dtype=dtype) if form == "sinks" else None
    split = batch.paged(OURS)
    if is_folded:
        monkeypatch.setattr(combine, "_SCRATCH", 0)
    found = check_attention(batch, lambda part: part.paged(OURS))
    assert torch.equal(found, split), "one program or several, the splits are joined alike"
    close(found, batch.paged(torch.ops.mtpc))


@FOLDED
@pytest.mark.parametrize("heads", [4, pytest.param(20, marks=SLOW)])
def test_latent_attention(heads: int, is_folded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: dict[str, Any] = dict(heads=(heads, 1), dims=(24, 1), page_size=4)
    batch = make_batch([(90, 7), (0, 3), (70, 1)], dtype=torch.bfloat16, **sizes)
    split = batch.latent(OURS, 12)
    if is_folded:
        monkeypatch.setattr(combine, "_SCRATCH", 0)
    found = check_attention(batch, lambda part: part.latent(OURS, 12))
    assert torch.equal(found, split)
    close(found, batch.latent(torch.ops.mtpc, 12))


def test_splits_follow_from_the_longest_context() -> None:
    """For one row as for a prompt; without the option a prompt has fewer."""
    batch = make_batch([(2000, 600)], heads=(8, 8))
    one, options = batch.only(0, 1), dict(scale=0.3, sliding_window=0, softcap=0.0, sinks=None)

    def splits(batch: Batch, configs: str) -> int:
        given = (batch.q, batch.k, batch.v, batch.table, batch.seq_lens, batch.starts)
        (launch, *_), _ = plan("paged_attention", *given, **options, configs=configs)
        return int(launch.constants["SPLITS"])

    assert splits(one, BATCH_INVARIANT) == splits(batch, BATCH_INVARIANT) == splits(one, "")
    assert splits(batch, "") < splits(one, "")


# ---- Experts, codes, recurrent state ---------------------------------------------------------


@pytest.mark.parametrize("form", [Mixture.run, Mixture.run_without_gates])
@pytest.mark.parametrize("dtype", DTYPES)
def test_experts(dtype: torch.dtype, form: Callable[..., Tensor]) -> None:
    """In tiles of one size: 130 rows of two of six experts would have larger ones, and shorter
    products, of which these inputs need several."""
    every = make_mixture(130, dtype=dtype, hidden=160, intermediate=72)

    def call(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return form(replace(every, x=x, ids=ids, weights=weights), OURS)

    found = check_rows(call, every.x, every.ids, every.weights)
    close(found, form(every, torch.ops.mtpc), scale=2)


@pytest.mark.parametrize("kind", ["int4", "float8"])
def test_codes(kind: Any) -> None:
    made, x = random_weight(kind, (40, 128), 64), randn(66, 128, dtype=torch.bfloat16)
    check_rows(lambda x: OURS.grouped_linear(x, *made.operands), x)


def test_codes_of_experts() -> None:
    x, *weights, ids, shares = experts_call(66, ("float8", 64, ""), torch.bfloat16)

    def call(x: Tensor, ids: Tensor, shares: Tensor) -> Tensor:
        return OURS.grouped_experts(x, *weights, ids, shares)

    check_rows(call, x, ids, shares)


@pytest.mark.parametrize(
    "rule", [NARROW, pytest.param(MAMBA, marks=SLOW)], ids=lambda rule: rule.name
)
def test_a_prompt_of_recurrent_state(rule: Rule) -> None:
    """In one step, which of one rule would go in chunks without the option, or row by row."""
    rows = make_rows(129)
    together, alone = (Layer(OURS, torch.float32, rule) for _ in range(2))
    (whole,) = together.run([rows], [4], [0], [len(rows)])
    for first, count in ((0, 1), (1, 3), (4, 125)):
        part = rows[first : first + count]
        (found,) = alone.run([part], [4], [first], [count])
        assert torch.equal(found, whole[first : first + count])
    for one, other in zip(together.state, alone.state, strict=True):
        assert torch.equal(one[4], other[4])


# ---- Whole steps -----------------------------------------------------------------------------

PROMPTS = [[5, 9, 14, 3, 7, 22, 6, 31, 17], [41, 8]]
NEW = 4
PLAIN = plan_of(
    spec_tokens=0, batch_buckets=(1,), max_len=32, page_size=4, prefill_chunk=12, num_pages=30,
    sampling=True,
)  # fmt: skip
DRAFTING = replace(PLAIN, spec_tokens=3, batch_buckets=(2,), prefill_chunk=8)


def backend() -> CudaBackend:
    bindings = triton_bindings(invariantly)
    lower = EagerBackend().lower
    return CudaBackend(NullGraphs(), lower, bindings, device="cpu", batch_invariant=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", ["mimo", "glm4_moe", "deepseek_v3", "qwen3_next", "mimo_v2", "nemotron_h"]
)
def test_steps(family: str, checkpoint: Callable[..., Path]) -> None:
    """Two requests that draft in company, beside prompts in chunks, have the tokens and the very
    log-probabilities that plain decoding has of each alone: so have the rows that heads read."""
    plain = compile_on(checkpoint(family), backend(), PLAIN, "bfloat16")
    drafting = compile_on(checkpoint(family), backend(), DRAFTING, "bfloat16")
    for spec in (plain, drafting):
        poison(spec)
    new = 12 if family == "nemotron_h" else NEW  # Its first drafts are all right.
    alone = [plain.generate(prompt, new, ignore_eos=True, logprobs=2) for prompt in PROMPTS]
    found = drafting.generate(PROMPTS, new, ignore_eos=True, logprobs=2)
    for one, other in zip(found, alone, strict=True):
        assert [*one] == [*other]
        assert one.logprobs == other.logprobs
    assert len({tuple(text) for text in alone}) == len(PROMPTS)
    assert 0 < sum(drafting.stats.accepted) < sum(drafting.stats.drafted)

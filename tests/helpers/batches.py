"""Ragged batches and mixtures of experts, for the kernel tests of every backend."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
TOLERANCE = {
    torch.float64: 1e-12,
    torch.float32: 2e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 1.6e-2,  # two roundings of 2^-8: ours and the reference's
}
EACH_WIDTH = [
    pytest.param(rows, dtype, marks=[pytest.mark.slow] * (rows != 4 and dtype != torch.float16))
    for rows in range(1, 6)
    for dtype in (torch.bfloat16, torch.float16, torch.float32)
]
"""Rows per request for K = 0 to 4, and a dtype: the fast tests have each number and each dtype."""
WILD = 2**30


def close(actual: Tensor, expected: Tensor, scale: float = 1.0) -> None:
    """Assert that values are equal within the dtype's tolerance, without NaN."""
    tolerance = TOLERANCE[expected.dtype] * scale
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@dataclass
class Batch:
    """Arguments of paged_attention; unused pages and KV slots are NaN, unused entries invalid."""

    q: Tensor
    k: Tensor
    v: Tensor
    table: Tensor
    seq_lens: Tensor
    starts: Tensor
    scale: float = 0.3
    window: int = 0
    softcap: float = 0.0
    sinks: Tensor | None = None

    def paged(self, ops: object) -> Tensor:
        indices = (self.table, self.seq_lens, self.starts)
        options = (self.scale, self.window, self.softcap, self.sinks)
        return ops.paged_attention(self.q, self.k, self.v, *indices, *options)  # type: ignore[attr-defined]

    def latent(self, ops: object, rank: int) -> Tensor:
        indices = (self.table, self.seq_lens, self.starts)
        return ops.latent_attention(self.q, self.k[:, :, 0], *indices, self.scale, rank)  # type: ignore[attr-defined]

    def poisoned(self) -> Batch:
        """With NaN in the queries of requests that are off and of rows after the last request."""
        owners = torch.arange(len(self.seq_lens)).repeat_interleave(self.starts.diff().long())
        live = torch.zeros(len(self.q), dtype=torch.bool)
        live[: len(owners)] = self.seq_lens[owners] > 0
        return replace(self, q=torch.where(live[:, None, None], self.q, float("nan")))

    def only(self, request: int, last_rows: int) -> Batch:
        """This request alone, with only its last rows."""
        end = int(self.starts[request + 1])
        return replace(
            self,
            q=self.q[end - last_rows : end],
            table=self.table[request : request + 1],
            seq_lens=self.seq_lens[request : request + 1],
            starts=torch.tensor([0, last_rows], dtype=self.starts.dtype),
        )


def make_batch(
    lengths: list[tuple[int, int]],
    *,
    dtype: torch.dtype = torch.float32,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (16, 16),
    page_size: int = 16,
    index: torch.dtype = torch.int32,
    spare_rows: int = 0,
    spare_pages: int = 1,
) -> Batch:
    """A batch of requests (seq_len, query_len), each with its own random pages.

    The block table is wider than the longest request by `spare_pages` invalid entries.
    """
    gen = torch.Generator().manual_seed(sum(7 * s + q for s, q in lengths) + dims[0])
    needed = [-(-seq // page_size) for seq, _ in lengths]
    pages = sum(needed) + 2
    order = 1 + torch.randperm(pages - 1, generator=gen)
    k = torch.full((pages, page_size, heads[1], dims[0]), float("nan"), dtype=dtype)
    v = torch.full((pages, page_size, heads[1], dims[1]), float("nan"), dtype=dtype)
    table = torch.full((len(lengths), max(max(needed), 1) + spare_pages), WILD, dtype=index)
    taken = 0
    for row, (seq, _) in enumerate(lengths):
        own = order[taken : taken + needed[row]]
        taken += needed[row]
        table[row, : needed[row]] = own.to(index)
        for position in range(seq):
            slot = (own[position // page_size], position % page_size)
            k[slot] = torch.randn(heads[1], dims[0], generator=gen).to(dtype)
            v[slot] = torch.randn(heads[1], dims[1], generator=gen).to(dtype)
    queries = [q for _, q in lengths]
    rows = torch.randn(sum(queries) + spare_rows, heads[0], dims[0], generator=gen)
    starts = torch.tensor([0, *torch.tensor(queries).cumsum(0).tolist()], dtype=index)
    seq_lens = torch.tensor([s for s, _ in lengths], dtype=index)
    return Batch(rows.to(dtype), k, v, table, seq_lens, starts)


@dataclass
class Mixture:
    """Arguments of experts."""

    x: Tensor
    gate_up: Tensor
    down: Tensor
    ids: Tensor
    weights: Tensor

    def run(self, ops: object, *limit: float | bool) -> Tensor:
        arguments = (self.x, self.gate_up, self.down, self.ids, self.weights, *limit)
        return ops.experts(*arguments)  # type: ignore[attr-defined]

    def run_without_gates(self, ops: object) -> Tensor:
        """Of the up rows alone."""
        up = self.gate_up[:, self.down.shape[2] :]
        arguments = (self.x, up, self.down, self.ids, self.weights)
        return ops.relu2_experts(*arguments)  # type: ignore[attr-defined]


def make_mixture(
    tokens: int,
    *,
    dtype: torch.dtype = torch.float32,
    experts: int = 6,
    chosen: int = 2,
    hidden: int = 64,
    intermediate: int = 48,
) -> Mixture:
    gen = torch.Generator().manual_seed(tokens)
    return Mixture(
        torch.randn(tokens, hidden, generator=gen).to(dtype),
        (torch.randn(experts, 2 * intermediate, hidden, generator=gen) / hidden**0.5).to(dtype),
        (torch.randn(experts, hidden, intermediate, generator=gen) / intermediate**0.5).to(dtype),
        torch.rand(tokens, experts, generator=gen).argsort(1)[:, :chosen],
        torch.rand(tokens, chosen, generator=gen).to(dtype),
    )


WITHIN = 2**-8
"""Half a unit in the last place of bfloat16, twice: one rounding here, one in the comparison."""


def bf16(*shape: int, seed: int = 0) -> Tensor:
    """Normally distributed numbers."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).bfloat16()


def mixture(tokens: int, sizes: tuple[int, int, int], dtype: torch.dtype) -> Mixture:
    experts, hidden, intermediate = sizes
    return make_mixture(
        tokens,
        dtype=dtype,
        experts=experts,
        chosen=min(2, experts),
        hidden=hidden,
        intermediate=intermediate,
    )

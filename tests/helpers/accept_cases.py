"""Random arguments of `mtpc::accept`, where every way to accept and to stop is common."""

from __future__ import annotations

import torch
from torch import Tensor

SLOTS = 9


def make_reports(num_reqs: int, width: int) -> list[Tensor]:
    """Output buffers with old contents, one column wider than a step's output."""
    counts = [torch.full((num_reqs,), 99, dtype=torch.int32) for _ in range(3)]
    return [torch.full((num_reqs, width + 1), 99), *counts]


def make_call(
    seed: int, num_reqs: int, spec_tokens: int, num_stops: int, prompts: bool
) -> list[Tensor]:
    """Arguments of one call, without those of `make_reports`.

    Some requests are off, tokens are chosen among few, and some logits are not finite.

    Args:
        seed: seed of all random numbers.
        num_reqs: requests, at most SLOTS - 1.
        spec_tokens: K.
        num_stops: stop tokens per request, some of them unused.
        prompts: whether some requests have rows of a prompt, which may not end in this chunk.
    """
    gen = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=gen)

    def flags(*shape: int, odds: int = 4) -> Tensor:
        """Random flags, each True with probability 1 / `odds`."""
        return integers(0, odds, *shape) == 0

    width = spec_tokens + 1
    active = ~flags(num_reqs)
    is_prompt = active & flags(num_reqs, odds=2) if prompts else torch.zeros(num_reqs).bool()
    lens = torch.where(is_prompt, integers(1, 6, num_reqs), active * width)
    if not prompts:
        lens = torch.full((num_reqs,), width)
    starts = torch.cat([lens.new_zeros(1), lens.cumsum(0)]).int()
    num_tokens = int(starts[-1]) + int(integers(0, 3, 1)) + 1
    call = [
        integers(0, 3, num_reqs * width),
        ~flags(num_reqs * width, odds=8),
        integers(0, 3, num_tokens),
        starts,
        (integers(0, 50, num_reqs) * active).int(),
        active,
        integers(1, width + 3, SLOTS).int(),
        # Of the four stop tokens one is unused, and one is never chosen.
        integers(-1, 6, SLOTS, num_stops),
        1 + torch.randperm(SLOTS - 1, generator=gen)[:num_reqs],
    ]
    return [*call, is_prompt, is_prompt & flags(num_reqs, odds=2)] if prompts else call


def run(ops: object, call: list[Tensor]) -> list[list[int]]:
    """Run a call; returns its results, then the buffers that it writes."""
    num_reqs = len(call[4])
    reports = make_reports(num_reqs, len(call[0]) // num_reqs)
    out = ops.accept(*reports, *call)  # type: ignore[attr-defined]
    dtypes = [torch.int64, *[torch.int32] * 2, torch.int64, *[torch.int32] * 3]
    both = [*out, *reports]
    assert [t.dtype for t in both] == dtypes
    return [values.tolist() for values in both]

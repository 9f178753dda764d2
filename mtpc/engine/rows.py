"""A request's rows of the state buffers: what the host writes when it gets a slot, and pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from mtpc.engine.request import Request
from mtpc.engine.sampling_rows import write_sampling_rows
from mtpc.layout import NULL_PAGE, StepKey
from mtpc.program.program import Program

REBUILT_ROWS = (
    "state.block_table",
    "state.committed_lens",
    "state.token_ids",
    "state.remaining_tokens",
    "state.stop_ids",
    "state.sampling_floats",
    "state.sampling_ints",
    "state.bias_ids",
    "state.bias_values",
    "state.allowed_tokens",
    "state.prompt_tokens",
    "state.output_counts",
)
"""State that the host can write for any point of a request, from its tokens and parameters alone
(`state.token_ids` is made by the prefill's last chunk)."""
PAGED_ROLES = ("k", "v", "latent", "index")
"""Roles of `kv.*` buffers whose rows are found by the block table, and by nothing else."""


def write_state(program: Program, request: Request) -> None:
    """Write all rows of a request that was just placed, with `num_prefilled` tokens reused.

    What is behind `output_ids` has been emitted before a preemption, and is prefilled again.
    """
    shared, write, slot = program.shared, program.write, request.slot
    assert slot is not None
    table = torch.full_like(shared["state.block_table"][slot], NULL_PAGE, device="cpu")
    table[: len(request.pages)] = torch.tensor(request.pages, dtype=table.dtype)
    stops = torch.full_like(shared["state.stop_ids"][slot], -1, device="cpu")
    stops[: len(request.stop_ids)] = torch.tensor(request.stop_ids, dtype=stops.dtype)
    write(shared["state.block_table"][slot], table)
    write(shared["state.stop_ids"][slot], stops)
    write(shared["state.committed_lens"][slot], request.num_prefilled)
    write(shared["state.remaining_tokens"][slot], request.remaining_tokens)
    write_sampling_rows(program, request, slot)


def write_new_pages(program: Program, request: Request, first: int) -> None:
    """Append a request's pages from its `first` on to its row of the block table."""
    table = program.shared["state.block_table"]
    pages = torch.tensor(request.pages[first:], dtype=table.dtype)
    program.write(table[request.slot, first : len(request.pages)], pages)


def write_chunks(
    program: Program,
    key: StepKey,
    num_decoding: int,
    requests: Sequence[Request],
    counts: Sequence[int],
) -> None:
    """Pack the next tokens of prompts into a prefill step, and count them as prefilled.

    Args:
        program: the step's.
        key: of the step.
        num_decoding: rows before those of prompts; the device knows their tokens.
        requests: in the order of the step's rows; rows behind them are off.
        counts: tokens of each.
    """
    buffers, write = program.steps[key].buffers, program.write
    is_decoding = [int(row < num_decoding) for row in range(key.bucket.num_reqs)]
    packed, following = list[int](), [-1] * num_decoding
    for request, count in zip(requests, counts, strict=True):
        begin, end = request.num_prefilled, request.num_prefilled + count
        packed += request.token_ids(begin, end)
        following += request.token_ids(end, end + 1) if end < request.num_input else [-1]
        request.num_prefilled = end
    write(buffers["batch.prompt_ids"], torch.tensor(packed))
    write(buffers["batch.num_input"], torch.tensor([*[0] * num_decoding, *counts]))
    write(buffers["batch.is_decoding"], torch.tensor(is_decoding))
    write(buffers["batch.next_prompt_id"], torch.tensor(following))


def unpaged_state(shared: Mapping[str, Tensor], num_pages: int) -> str | None:
    """The first buffer that holds part of a request's past elsewhere than in pages, if any.

    Recurrent state and ring caches are rows by request slot: a request that began with another's
    pages would lack them. What this table does not know counts as such.
    """
    for name, tensor in sorted(shared.items()):
        if name.startswith("kv."):
            paged = name.rpartition(".")[2] in PAGED_ROLES and tensor.shape[0] == num_pages
        else:
            paged = name in REBUILT_ROWS
        if not paged:
            return name
    return None

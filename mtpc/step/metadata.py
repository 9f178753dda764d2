"""Which rows a step works on, and what attention needs to know of them.

Closed forms (L = committed length, the tokens whose KV is final; P = page size): positions =
L + j; slot = block_table[pos // P] * P + pos % P; seq_lens = L + Q; a chained draft step works on
the single row at position L.
"""

from __future__ import annotations

import torch
from torch import nn

from mtpc.layout import NO_SLOT, NULL_PAGE, SCRATCH_SLOT, StepKey
from mtpc.ops.ragged import request_of


def flat_metadata(
    context_lens: torch.Tensor,
    active: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_tokens: int,
    page_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Positions, slots and lengths of a flat batch, from lengths and block tables alone.

    Args:
        context_lens: int32 [R], committed tokens per request.
        active: bool [R]; an inactive request gets no slots and length 0.
        block_table: int32 [R, M].
        query_start_loc: int32 [R+1], ascending from 0.
        num_tokens: flat tokens of the bucket; those past query_start_loc[R] are padding.
        page_size: tokens per page.

    Returns:
        positions int64 [T] (0 where padded), slot_mapping int64 [T] (NO_SLOT where padded or
        where no page is reserved), seq_lens int32 [R].
    """
    token = torch.arange(num_tokens, device=context_lens.device)
    request = request_of(token, query_start_loc)
    in_batch = request < context_lens.shape[0]
    request = request.clamp(max=context_lens.shape[0] - 1)
    position = context_lens[request].long() + token - query_start_loc[request].long()
    blocks = block_table.shape[1]
    live = active[request] & in_batch & (position < blocks * page_size)
    position = torch.where(live, position, 0)
    page = block_table[request, position // page_size].long()
    has_page = live & (page != NULL_PAGE)
    slot = torch.where(has_page, page * page_size + position % page_size, NO_SLOT)
    query_lens = query_start_loc[1:] - query_start_loc[:-1]
    seq_lens = torch.where(active, context_lens + query_lens, 0)
    return position, slot, seq_lens.int()


def starts_of(counts: torch.Tensor) -> torch.Tensor:
    """Where each request's rows begin, and the end of the last one's: int32 [R] -> int32 [R+1]."""
    return torch.cat([counts.new_zeros(1), counts.cumsum(0).int()])


class BeginDecode(nn.Module):
    """Gather the rows of this batch and form the verify inputs.

    Returns ids [R*Q], context_lens [R], active [R], block_table [R, M], state_slots [R] (where
    a row is off: the scratch slot), certain_lens [R] (the last emitted token is certain, drafts are
    not), positions [R*Q], slot_mapping [R*Q], seq_lens [R], query_start_loc [R+1].
    """

    def __init__(self, key: StepKey, page_size: int, vocab_size: int):
        super().__init__()
        self.key, self.page_size, self.vocab_size = key, page_size, vocab_size

    def forward(self, state_indices, committed_lens, remaining_tokens, token_ids, block_table):  # type: ignore[no-untyped-def]
        num_reqs, query_len = self.key.bucket.num_reqs, self.key.bucket.query_len
        active = (state_indices != SCRATCH_SLOT) & (remaining_tokens[state_indices] > 0)
        context_lens = torch.where(active, committed_lens[state_indices], 0)
        blocks = block_table[state_indices]
        rows = token_ids[state_indices][:, :query_len]
        # A padded row may hold any garbage: never let it index the embedding.
        ids = torch.where(active[:, None], rows, 0).clamp(0, self.vocab_size - 1).reshape(-1)
        starts = torch.arange(num_reqs + 1, device=ids.device, dtype=torch.int32) * query_len
        fresh = flat_metadata(
            context_lens, active, blocks, starts, self.key.bucket.num_tokens, self.page_size
        )
        state_slots = torch.where(active, state_indices, SCRATCH_SLOT)
        return ids, context_lens, active, blocks, state_slots, active.int(), *fresh, starts


class BeginPrefill(nn.Module):
    """As `BeginDecode`, for prompt tokens that the host packed into `batch.prompt_ids` [T].

    Prompt tokens are certain, all of them. Rows of requests that decode may stand among those of
    prompts: they have the tokens of a decode step, of which the host knows nothing.
    """

    def __init__(self, key: StepKey, page_size: int, vocab_size: int):
        super().__init__()
        self.key, self.page_size, self.vocab_size = key, page_size, vocab_size

    def forward(  # type: ignore[no-untyped-def]
        self,
        state_indices,
        committed_lens,
        remaining_tokens,
        token_ids,
        prompt_ids,
        num_input,
        is_decoding,
        block_table,
    ):
        num_tokens, width = self.key.bucket.num_tokens, self.key.max_emitted
        wanted = (state_indices != SCRATCH_SLOT) & (remaining_tokens[state_indices] > 0)
        decodes = wanted & (is_decoding != 0)
        packed = torch.where(wanted & ~decodes, num_input.clamp(0, num_tokens), 0)
        counts = torch.where(decodes, width, packed)
        # More than a step holds would read beyond it: such rows are off, and those behind them.
        counts = torch.where(counts.cumsum(0) <= num_tokens, counts, 0)
        active = counts > 0
        context_lens = torch.where(active, committed_lens[state_indices], 0)
        blocks = block_table[state_indices]
        starts = starts_of(counts)
        token = torch.arange(num_tokens, device=counts.device)
        request = request_of(token, starts).clamp(max=counts.shape[0] - 1)
        column = token - starts[request]
        drafted = token_ids[state_indices[request], column.clamp(0, width - 1)]
        before = packed.cumsum(0) - packed
        prompt = prompt_ids[(before[request] + column).clamp(0, num_tokens - 1)]
        ids = torch.where(decodes[request], drafted, prompt).clamp(0, self.vocab_size - 1)
        fresh = flat_metadata(context_lens, active, blocks, starts, num_tokens, self.page_size)
        state_slots = torch.where(active, state_indices, SCRATCH_SLOT)
        certain_lens = torch.where(decodes, active.int(), counts)
        return ids, context_lens, active, blocks, state_slots, certain_lens, *fresh, starts


class LogitsRows(nn.Module):
    """Which flat rows of a prefill step get logits: a prompt's last, all of who decodes.

    Returns logits_indices int64 [N] (one request's behind the other's; what is behind the last
    one is padding), logits_start_loc int32 [R+1] into them, their places in a rectangle, int64
    [R*W]: W = K + 1 to a request, of which a prompt's are all the same one; and bool [R*W], whether
    a place is the first of its row of logits.
    """

    def __init__(self, key: StepKey):
        super().__init__()
        self.key, self.width = key, key.max_emitted

    def forward(self, query_start_loc: torch.Tensor, is_decoding: torch.Tensor):  # type: ignore[no-untyped-def]
        lens = query_start_loc[1:] - query_start_loc[:-1]
        counts = torch.minimum(lens, torch.where(is_decoding != 0, self.width, 1))
        starts = starts_of(counts)
        row = torch.arange(self.key.num_logits, device=lens.device)
        request = request_of(row, starts).clamp(max=lens.shape[0] - 1)
        first = query_start_loc[1:] - counts
        # Padding is counted on from the last request's: any row that there is will do.
        indices = first[request] + row - starts[request]
        indices = indices.clamp(0, self.key.bucket.num_tokens - 1).long()
        column = torch.arange(self.width, device=lens.device)
        places = torch.minimum(starts[:-1, None] + column, starts[1:, None] - 1).clamp(min=0)
        is_first = column < counts[:, None]
        return indices, starts, places.reshape(-1).long(), is_first.reshape(-1)


class ChainMetadata(nn.Module):
    """Metadata of one chained draft step: a single row a request at position `lens`.

    Returns positions [R], slot_mapping [R], seq_lens [R], query_start_loc [R+1], lens + 1.
    """

    def __init__(self, key: StepKey, page_size: int):
        super().__init__()
        self.num_reqs, self.page_size = key.bucket.num_reqs, page_size

    def forward(self, lens: torch.Tensor, active: torch.Tensor, block_table: torch.Tensor):  # type: ignore[no-untyped-def]
        starts = torch.arange(self.num_reqs + 1, device=lens.device, dtype=torch.int32)
        positions, slots, seq_lens = flat_metadata(
            lens, active, block_table, starts, self.num_reqs, self.page_size
        )
        return positions, slots, seq_lens, starts, lens + 1

"""Which rows a step works on, and what attention needs to know of them.

The closed forms, with L the committed length, whose tokens' KV is final, and P the page size:
position = L + j for row j of a request; slot = block_table[position // P] * P + position % P;
seq_lens = L + Q. A chained draft step works on the single row at position L.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mtpc.layout import NO_SLOT, NULL_PAGE, SCRATCH_SLOT, StepKey
from mtpc.ops.ragged import request_of
from mtpc.step.records import Begun, Chained, LogitsIndices


def flat_metadata(
    context_lens: Tensor,
    active: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    num_tokens: int,
    page_size: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Positions, slots and lengths of a flat batch, from lengths and block tables alone.

    Args:
        context_lens: int32 [R], committed tokens per request.
        active: bool [R]; an inactive request gets no slots and length 0.
        block_table: int32 [R, M].
        query_start_loc: int32 [R+1], ascending from 0.
        num_tokens: flat tokens of the bucket; those past query_start_loc[R] are padding.
        page_size: tokens per page.

    Returns:
        The first fields of `Rows`: positions int64 [T] (0 where padded), slot_mapping int64 [T]
        (NO_SLOT where padded or where no page is reserved), seq_lens int32 [R].
    """
    token = torch.arange(num_tokens, device=context_lens.device)
    request = request_of(token, query_start_loc)
    in_batch = request < context_lens.shape[0]
    request = request.clamp(max=context_lens.shape[0] - 1)
    position = context_lens[request].long() + token - query_start_loc[request].long()
    # Counted, not `block_table.shape[1]`: no number of a step may depend on M.
    blocks = torch.ones_like(block_table[0]).sum(0)
    live = active[request] & in_batch & (position < blocks * page_size)
    position = torch.where(live, position, 0)
    page = block_table[request, position // page_size].long()
    has_page = live & (page != NULL_PAGE)
    slot = torch.where(has_page, page * page_size + position % page_size, NO_SLOT)
    query_lens = query_start_loc[1:] - query_start_loc[:-1]
    seq_lens = torch.where(active, context_lens + query_lens, 0)
    return position, slot, seq_lens.int()


def starts_of(counts: Tensor) -> Tensor:
    """The first row of each request, and the end of the last one: int [R] -> int32 [R+1]."""
    ends = counts.cumsum(0).int()
    return torch.cat([ends.new_zeros(1), ends])


def rows_within(starts: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """The request of each of T packed rows, and the row's place in it, int64 [T] each.

    Requests begin at `starts`, int32 [R+1]. Padding counts as rows of the last one.
    """
    row = torch.arange(num_rows, device=starts.device)
    request = request_of(row, starts).clamp(max=starts.shape[0] - 2)
    return request, row - starts[request]


class BeginDecode(nn.Module):
    """Gather the requests of a decode step; each has its last emitted token and K drafts."""

    def __init__(self, key: StepKey, page_size: int, vocab_size: int):
        super().__init__()
        self.key, self.page_size, self.vocab_size = key, page_size, vocab_size

    def forward(
        self,
        state_indices: Tensor,
        committed_lens: Tensor,
        remaining_tokens: Tensor,
        token_ids: Tensor,
        block_table: Tensor,
    ) -> tuple[Tensor, ...]:
        """The requests' slots [R] and the state of all slots -> `Begun`, with T = R * Q rows.

        The last emitted token is certain, drafts are not.
        """
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
        slots = torch.where(active, state_indices, SCRATCH_SLOT)
        return tuple(Begun(*fresh, starts, blocks, slots, active.int(), ids, context_lens, active))


class BeginPrefill(nn.Module):
    """Gather the requests of a prefill step: prompts, and requests that decode among them.

    The host packs prompt tokens into `batch.prompt_ids`; all of them are certain. A request that
    decodes has the tokens of a decode step, which are on the device.

    Args:
        key: of the step.
        page_size: tokens per page.
        num_ids: ids that a prompt may have: the vocabulary and, with images, rows of embeddings.
    """

    def __init__(self, key: StepKey, page_size: int, num_ids: int):
        super().__init__()
        self.key, self.page_size, self.num_ids = key, page_size, num_ids

    def forward(
        self,
        state_indices: Tensor,
        committed_lens: Tensor,
        remaining_tokens: Tensor,
        token_ids: Tensor,
        prompt_ids: Tensor,
        num_input: Tensor,
        is_decoding: Tensor,
        block_table: Tensor,
    ) -> tuple[Tensor, ...]:
        """As `BeginDecode`, with prompt_ids [T], and num_input and is_decoding [R] -> `Begun`."""
        num_tokens, width = self.key.bucket.num_tokens, self.key.max_emitted
        wanted = (state_indices != SCRATCH_SLOT) & (remaining_tokens[state_indices] > 0)
        decodes = wanted & (is_decoding != 0)
        packed = torch.where(wanted & ~decodes, num_input.clamp(0, num_tokens), 0)
        counts = torch.where(decodes, width, packed)
        # A request whose rows do not fit into the step is off, and so is each one behind it.
        counts = torch.where(counts.cumsum(0) <= num_tokens, counts, 0)
        active = counts > 0
        context_lens = torch.where(active, committed_lens[state_indices], 0)
        blocks = block_table[state_indices]
        starts = starts_of(counts)
        request, column = rows_within(starts, num_tokens)
        drafted = token_ids[state_indices[request], column.clamp(0, width - 1)]
        before = packed.cumsum(0) - packed
        prompt = prompt_ids[(before[request] + column).clamp(0, num_tokens - 1)]
        ids = torch.where(decodes[request], drafted, prompt).clamp(0, self.num_ids - 1)
        fresh = flat_metadata(context_lens, active, blocks, starts, num_tokens, self.page_size)
        slots = torch.where(active, state_indices, SCRATCH_SLOT)
        certain = torch.where(decodes, active.int(), counts)
        return tuple(Begun(*fresh, starts, blocks, slots, certain, ids, context_lens, active))


class LogitsRows(nn.Module):
    """Which rows of a ragged step get logits: the last of a prompt, all of a decoding request."""

    def __init__(self, key: StepKey):
        super().__init__()
        self.key, self.width = key, key.max_emitted

    def forward(self, query_start_loc: Tensor, is_decoding: Tensor) -> tuple[Tensor, ...]:
        """query_start_loc [R+1], is_decoding [R] -> `LogitsIndices`."""
        lens = query_start_loc[1:] - query_start_loc[:-1]
        counts = torch.minimum(lens, torch.where(is_decoding != 0, self.width, 1))
        starts = starts_of(counts)
        row = torch.arange(self.key.num_logits, device=lens.device)
        request = request_of(row, starts).clamp(max=lens.shape[0] - 1)
        first = query_start_loc[1:] - counts
        # Padding continues from the last request's rows; any row that exists will do.
        indices = first[request] + row - starts[request]
        indices = indices.clamp(0, self.key.bucket.num_tokens - 1).long()
        column = torch.arange(self.width, device=lens.device)
        places = torch.minimum(starts[:-1, None] + column, starts[1:, None] - 1).clamp(min=0)
        is_first = column < counts[:, None]
        flat_places = places.reshape(-1).long()
        return tuple(LogitsIndices(indices, starts, flat_places, is_first.reshape(-1)))


class ChainMetadata(nn.Module):
    """Metadata of one chained draft step: a single row of each request, at position `lens`."""

    def __init__(self, key: StepKey, page_size: int):
        super().__init__()
        self.num_reqs, self.page_size = key.bucket.num_reqs, page_size

    def forward(self, lens: Tensor, active: Tensor, block_table: Tensor) -> tuple[Tensor, ...]:
        """lens [R], active [R], block_table [R, M] -> `Chained`, with T = R rows."""
        starts = torch.arange(self.num_reqs + 1, device=lens.device, dtype=torch.int32)
        positions, slots, seq_lens = flat_metadata(
            lens, active, block_table, starts, self.num_reqs, self.page_size
        )
        return tuple(Chained(positions, slots, seq_lens, starts, lens + 1))

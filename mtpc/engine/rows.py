"""A request's rows of the state buffers, which the host writes when it gets a slot or pages."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mtpc.engine.request import Request
from mtpc.engine.sampling_rows import write_sampling_rows
from mtpc.layout import NULL_PAGE, PROMPT_EMBEDS, ROPE_OFFSETS, TEXT_IDS, StepKey
from mtpc.layout.specs import COPY_COUNTS, DRAFT_COUNTS, DRAFT_SOURCE
from mtpc.program.program import Program


def write_state(program: Program, request: Request) -> None:
    """Write the rows of a request that was just placed in a slot.

    `num_prefilled` tokens are reused from shared pages. A preempted request has `output_ids`, which
    are prefilled again.
    """
    shared, write, slot = program.shared, program.write, request.slot
    assert slot is not None
    table = torch.full_like(shared["state.block_table"][slot], NULL_PAGE, device="cpu")
    table[: len(request.pages)] = torch.tensor(request.pages, dtype=table.dtype)
    stops = torch.full_like(shared["state.stop_ids"][slot], -1, device="cpu")
    stops[: len(request.ends)] = torch.tensor(request.ends, dtype=stops.dtype)
    write(shared["state.block_table"][slot], table)
    write(shared["state.stop_ids"][slot], stops)
    write(shared["state.committed_lens"][slot], request.num_prefilled)
    write(shared["state.remaining_tokens"][slot], request.remaining_tokens)
    if TEXT_IDS in shared and request.num_prefilled:
        reused = request.token_ids(0, request.num_prefilled)
        write(shared[TEXT_IDS][slot, : len(reused)], torch.tensor(reused, dtype=torch.int32))
    for name in {COPY_COUNTS, DRAFT_SOURCE, DRAFT_COUNTS} & shared.keys():
        write(shared[name][slot], 0)
    if ROPE_OFFSETS in shared:
        offsets, images = shared[ROPE_OFFSETS][slot], request.images
        write(offsets, 0 if images is None else images.offset_rows(len(offsets)))
    write_sampling_rows(program, request, slot)


def write_new_pages(program: Program, request: Request, first: int) -> None:
    """Append `request.pages[first:]` to the request's row of the block table."""
    table = program.shared["state.block_table"]
    pages = torch.tensor(request.pages[first:], dtype=table.dtype)
    program.write(table[request.slot, first : len(request.pages)], pages)


def write_synthetic_draws(program: Program, rates: Sequence[float]) -> None:
    """Write how many drafts the next steps accept; without rates there is nothing to write."""
    if rates:
        from mtpc.step.synthetic import draws  # Here: it imports operators.

        table = program.shared["state.synthetic_draws"]
        program.write(table, draws(rates, table.shape[0]))


def write_chunks(
    program: Program,
    key: StepKey,
    num_decoding: int,
    requests: Sequence[Request],
    counts: Sequence[int],
    vocab_size: int,
) -> None:
    """Pack the next tokens of prompts into a prefill step, and count them as prefilled. Decoding
    requests' rows come first, and the device has their tokens. Ids from `vocab_size` on name rows
    of images."""
    buffers, write = program.steps[key].buffers, program.write
    is_decoding = [int(row < num_decoding) for row in range(key.bucket.num_reqs)]
    packed, following, embeds = list[int](), [-1] * num_decoding, list[Tensor]()
    first_id = vocab_size
    for request, count in zip(requests, counts, strict=True):
        begin, end = request.num_prefilled, request.num_prefilled + count
        ids = request.token_ids(begin, min(end + 1, request.num_input))
        if request.images is not None:
            ids, rows = request.images.take(ids, begin, first_id)
            first_id += len(rows)
            embeds.append(rows)
        packed += ids[:count]
        following += ids[count:] or [-1]
        request.num_prefilled = end
    if first_id > vocab_size:
        write(program.shared[PROMPT_EMBEDS], torch.cat(embeds))
    write(buffers["batch.prompt_ids"], torch.tensor(packed))
    write(buffers["batch.num_input"], torch.tensor([*[0] * num_decoding, *counts]))
    write(buffers["batch.is_decoding"], torch.tensor(is_decoding))
    write(buffers["batch.next_prompt_id"], torch.tensor(following))

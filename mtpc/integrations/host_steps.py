"""Whole iterations (verify, acceptance and all drafts) as one graph, over a host's slots and pools.

The host schedules, and gives requests their slots and pages. mtpc's state rows go by the host's
request slots, and the block tables are the host's. This module depends on no particular host.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mtpc.arguments import CompileArguments
from mtpc.engine.sampling_rows import sampling_rows
from mtpc.errors import UnsupportedModelError
from mtpc.host.compile import compile_host, page_bytes
from mtpc.host.hosted import HostedModel
from mtpc.sampling_params import SamplingParams

PREFILL_TOKENS = 2048
"""Most tokens of a prefill step; a host's chunks may be longer."""


@dataclass(frozen=True)
class Chunk:
    """Consecutive tokens of a request's text, whose KV a prefill step computes.

    Attributes:
        slot: the request's slot.
        begin: number of tokens before these, whose KV is in the request's pages.
        token_ids: at least one.
        following: the token after these; None if they end the text.
    """

    slot: int
    begin: int
    token_ids: Sequence[int]
    following: int | None = None

    def split(self, count: int) -> tuple[Chunk, Chunk | None]:
        """The first `count` tokens, and the rest if there is one."""
        if count >= len(self.token_ids):
            return self, None
        head, tail = self.token_ids[:count], self.token_ids[count:]
        rest = Chunk(self.slot, self.begin + count, tail, self.following)
        return Chunk(self.slot, self.begin, head, tail[0]), rest


@dataclass(frozen=True)
class Emitted:
    """What an iteration emits.

    Attributes:
        token_ids: int64 [R, K + 1]; of each row the first `counts`.
        counts: int32 [R], accepted drafts and one more. 0: the row's logits were not finite.
    """

    token_ids: Tensor
    counts: Tensor


class HostSteps:
    """Prefill and decode steps over a host's memory.

    Args:
        model: compiled with `form="fused"`. Its slots are the host's, 1 to `model.num_slots`.
        pools: the host's tensors, by mtpc's names of buffers. What the host does not have (the MTP
            layers' caches, recurrent state, mtpc's own rows) is allocated here.

    Raises:
        HostError: a pool does not fit, see `HostedModel.bind`.
    """

    def __init__(self, model: HostedModel, pools: Mapping[str, Tensor]):
        self.model = model
        self.state = {
            name: pools[name] if name in pools else buffer.allocate(model.device)
            for name, buffer in model.buffers.items()
        }
        self.steps = {
            key: {n: b.allocate(model.device) for n, b in model.step_buffers(key).items()}
            for key in model.keys
        }
        self.program = model.bind(self.state, self.steps)

    def set_tables(self, slots: Tensor, tables: Tensor) -> None:
        """Write the pages of requests.

        Args:
            slots: int64 [R].
            tables: int [R, columns], pages in order; 0 after a request's last one.
        """
        block_table = self.state["state.block_table"]
        width = min(tables.shape[1], block_table.shape[1])
        block_table[slots, :width] = tables[:, :width].to(block_table.dtype)

    def set_sampling(
        self,
        slot: int,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
    ) -> None:
        """Say how a request's next tokens are chosen; call it before chunks that may end its text.

        Args:
            slot: its slot, whose rows may still be another request's.
            params: the request gets a seed here if they have none.
            prompt_ids: tokens that only the repetition penalty counts.
            output_ids: tokens that all penalties count, of a request that comes again.
        """
        rows = sampling_rows(params.settled(), prompt_ids, output_ids, self.state)
        for name, row in rows.items():
            self.state[name][slot, : len(row)] = row

    def prefill(self, chunks: Sequence[Chunk]) -> list[int | None]:
        """Compute the KV of chunks, and choose the first token of texts that they end.

        A chunk may be a request's first, or go on where its last one ended. Its pages are set, and
        how it samples.

        Returns:
            For each chunk the token, or None: the text goes on, or its logits were not finite.
        """
        for chunk in chunks:
            self._join(chunk)
        found: dict[int, int] = {}
        pending = deque(chunks)
        while pending:
            for slot, token in self._run_prefill(_fill(pending, self.model)):
                found[slot] = token
        return [found.get(c.slot) if c.following is None else None for c in chunks]

    def decode(self, slots: Tensor) -> Emitted:
        """Verify the requests' drafts, accept, and draft anew: one replay.

        Args:
            slots: int64 [R] of requests whose texts were prefilled.
        """
        key, count = self.model.decode_key(len(slots)), len(slots)
        batch = self.steps[key]
        batch["batch.state_indices"].zero_()
        batch["batch.state_indices"][:count] = slots
        self.program.step(key)
        # Copies: the next step overwrites these buffers.
        results = batch["batch.out_token_ids"], batch["batch.num_emitted"]
        return Emitted(*(tensor[:count].clone() for tensor in results))

    def drafts(self, slots: Tensor) -> Tensor:
        """Drafts int64 [R, K] that the next step verifies, of requests in `slots` int64 [R]."""
        return self.state["state.token_ids"][slots, 1:]

    def set_drafts(self, slots: Tensor, drafts: Tensor) -> None:
        """Let the next step verify other drafts int64 [R, K]; -1 is none, and never accepted."""
        self.state["state.token_ids"][slots, 1:] = drafts

    def _join(self, chunk: Chunk) -> None:
        """Write a request's state rows. The host decides when a request ends."""
        left = self.model.options.max_len - chunk.begin - len(chunk.token_ids)
        self.state["state.committed_lens"][chunk.slot] = chunk.begin
        self.state["state.remaining_tokens"][chunk.slot] = left
        self.state["state.stop_ids"][chunk.slot] = -1

    def _run_prefill(self, chunks: list[Chunk]) -> list[tuple[int, int]]:
        """One prefill step; the slots of texts that end in it, and their first tokens."""
        key, count = self.model.prefill_key, len(chunks)
        batch, device = self.steps[key], self.model.device
        flat = [token for chunk in chunks for token in chunk.token_ids]
        following = [-1 if chunk.following is None else chunk.following for chunk in chunks]
        columns = {
            "state_indices": [chunk.slot for chunk in chunks],
            "prompt_ids": flat,
            "num_input": [len(chunk.token_ids) for chunk in chunks],
            "next_prompt_id": following,
        }
        batch["batch.state_indices"].zero_()
        batch["batch.is_decoding"].zero_()
        for name, values in columns.items():
            tensor = batch[f"batch.{name}"]
            tensor[: len(values)] = torch.tensor(values, dtype=tensor.dtype, device=device)
        self.program.step(key)
        rows = self.program.results(key)[:count]
        return [
            (c.slot, row.token_ids[0]) for c, row in zip(chunks, rows, strict=True) if row.token_ids
        ]


def _fill(pending: deque[Chunk], model: HostedModel) -> list[Chunk]:
    """Take what fits into one prefill step; what is left of a chunk stays in front."""
    bucket, taken = model.prefill_key.bucket, list[Chunk]()
    room = bucket.num_tokens
    while pending and room and len(taken) < bucket.num_reqs:
        head, rest = pending.popleft().split(room)
        if rest is not None:
            pending.appendleft(rest)
        taken.append(head)
        room -= len(head.token_ids)
    return taken


def compile_steps(
    directory: str,
    spec_tokens: int,
    pages: tuple[int | None, int],
    context: int,
    requests: int,
    placed: tuple[str, torch.dtype],
    pool_bytes: int = 0,
) -> HostedModel:
    """Compile whole steps for a host.

    Args:
        directory: the checkpoint.
        spec_tokens: K.
        pages: number of the host's pages, None for as many as `pool_bytes` hold, and their size.
        context: most tokens of a request.
        requests: most requests at once.
        placed: torch's type of the host's device, and dtype of weights and caches.
        pool_bytes: of the host's pool, where the pages of all buffers lie.

    Raises:
        MtpcError: as `mtpc.compile_host`.
    """
    device, dtype = placed
    on_cpu = "cpu" if dtype == torch.bfloat16 else "eager"
    options = CompileArguments(
        sampling=True,
        token_mask=False,
        spec_tokens=spec_tokens,
        page_size=pages[1],
        # The last step of a request verifies all K drafts, whatever the context has room for.
        max_len=context + spec_tokens + 1,
        prefill_chunk=min(PREFILL_TOKENS, context),
        batch_buckets=buckets_up_to(requests),
        dtype=str(dtype).removeprefix("torch."),
        backend="cuda" if device == "cuda" else on_cpu,
    )
    options["num_pages"] = pages[0] or pool_bytes // page_bytes(directory, **options)
    return compile_host(directory, form="fused", **options)


def buckets_up_to(most: int) -> tuple[int, ...]:
    """Batch sizes to capture: the powers of two below `most`, and `most` itself."""
    sizes = [1 << i for i in range((most - 1).bit_length())]
    return (*sizes, most)


def check_prefixes(model: HostedModel, shares_prefixes: bool) -> None:
    """Check that requests may begin with pages of others, if the host shares beginnings.

    Raises:
        UnsupportedModelError: a request keeps state by slot, which pages do not carry.
    """
    by_slot = [
        name
        for name, buffer in model.buffers.items()
        if not buffer.is_paged and name.startswith(("kv.", "state.chain_"))
    ]
    if by_slot and shares_prefixes:
        raise UnsupportedModelError(
            f"this model keeps {by_slot[0]} and {len(by_slot) - 1} more buffers by request; shared "
            "beginnings of texts carry pages alone: turn the host's prefix cache off"
        )

"""What rows of a step read of the images in prompts: embeddings, and positions in three grids.

The graph knows no images. A token id from the vocabulary's end on names a row of the buffer
`state.prompt_embeds`, which the host fills. Ids move through a step as ever: to the MTP layer,
whose row t embeds token t + 1, and from a chunk to the next one.

A row's rotary positions are its position plus an offset in each grid. The host writes the offsets
of a request by position when it joins. Slots, lengths and causal order know positions only. Models
whose positions have one coordinate number images' tokens as text, and have no offsets.

With several MTP layers a step also reads tokens that the step before kept by request slot. The
buffer of embeddings is then another chunk's, so `state.chain_embeds` keeps theirs.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from mtpc.layout import CHAIN_EMBEDS, PROMPT_EMBEDS, ROPE_OFFSETS
from mtpc.ops.ragged import request_of
from mtpc.step.records import Metadata


class ImageInputs(nn.Module):
    """The buffers that images add, and how rows read them.

    Args:
        vocab_size: the first id of a row in `embeds`.
        embeds: [N, H], rows that stand in place of embeddings.
        offsets: int32 [S, positions, grids], by request slot; None: positions are those of text.
        kept: [S, window, H], rows of the step before, which the ids after those of `embeds` name;
            None: no step reads another's tokens.
    """

    embeds: Tensor
    offsets: Tensor | None
    kept: Tensor | None

    def __init__(
        self, vocab_size: int, embeds: Tensor, offsets: Tensor | None, kept: Tensor | None
    ):
        super().__init__()
        self.vocab_size = vocab_size
        self.register_buffer("embeds", embeds, persistent=False)
        self.register_buffer("offsets", offsets, persistent=False)
        self.register_buffer("kept", kept, persistent=False)

    def embed(self, embedding: nn.Module, ids: Tensor) -> Tensor:
        """The embeddings of ids [T], those of the vocabulary and those of rows: [T, H]."""
        text = embedding(ids.clamp(max=self.vocab_size - 1))
        rows = self.embeds[(ids - self.vocab_size).clamp(min=0)]
        return torch.where((ids >= self.vocab_size)[:, None], rows, text)

    def embed_next(self, embedding: nn.Module, ids: Tensor, metadata: Metadata) -> Tensor:
        """As `embed`, for the tokens after a forward's rows: some were kept by request slot."""
        if self.kept is None:
            return self.embed(embedding, ids)
        first = self.vocab_size + self.embeds.shape[0]
        place = (ids - first).clamp(0, self.kept.shape[1] - 1)
        rows = self.kept[_slots(metadata), place]
        fresh = self.embed(embedding, ids.clamp(max=first - 1))
        return torch.where((ids >= first)[:, None], rows, fresh)

    def positions(self, metadata: Metadata) -> Tensor:
        """Rotary positions of a forward's rows, int64 [grids, T], or [T] where there is one."""
        positions = metadata.positions
        if self.offsets is None:
            return positions
        offsets = self.offsets[_slots(metadata), positions]
        return (positions[:, None] + offsets).t()


def _slots(metadata: Metadata) -> Tensor:
    """The request slot of each row of a forward, int64 [T]."""
    slots, positions = metadata.state_slots, metadata.positions
    token = torch.arange(positions.shape[0], device=positions.device)
    request = request_of(token, metadata.query_start_loc).clamp(max=slots.shape[0] - 1)
    return slots[request]


def image_inputs(pools: Mapping[str, Tensor], vocab_size: int) -> ImageInputs:
    """The buffers of images among state by name."""
    offsets, kept = pools.get(ROPE_OFFSETS), pools.get(CHAIN_EMBEDS)
    return ImageInputs(vocab_size, pools[PROMPT_EMBEDS], offsets, kept)

"""What rows of a step read of the images in prompts: embeddings, and positions in three grids.

The graph knows no images. A token id from the vocabulary's end on names a row of the buffer
`state.prompt_embeds`, which the host fills. Ids move through a step as ever: to the MTP layer,
whose row t embeds token t + 1, and from a chunk to the next one.

A row's rotary positions are its position plus an offset in each grid. The host writes the offsets
of a request by position when it joins. Slots, lengths and causal order know positions only.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from mtpc.layout import PROMPT_EMBEDS, ROPE_OFFSETS
from mtpc.ops.ragged import request_of
from mtpc.step.records import Metadata


class ImageInputs(nn.Module):
    """The buffers that images add, and how rows read them.

    Args:
        embeds: [N, H], rows that stand in the place of embeddings.
        offsets: int32 [S, positions, grids], by request slot.
        vocab_size: the first id of a row in `embeds`.
    """

    def __init__(self, embeds: Tensor, offsets: Tensor, vocab_size: int):
        super().__init__()
        self.vocab_size = vocab_size
        self.register_buffer("embeds", embeds, persistent=False)
        self.register_buffer("offsets", offsets, persistent=False)
        self.embeds: Tensor
        self.offsets: Tensor

    def embed(self, embedding: nn.Module, ids: Tensor) -> Tensor:
        """The embeddings of ids [T], those of the vocabulary and those of rows: [T, H]."""
        text = embedding(ids.clamp(max=self.vocab_size - 1))
        rows = self.embeds[(ids - self.vocab_size).clamp(min=0)]
        return torch.where((ids >= self.vocab_size)[:, None], rows, text)

    def positions(self, metadata: Metadata) -> Tensor:
        """Rotary positions of a forward's rows, int64 [grids, T]."""
        slots, positions = metadata.state_slots, metadata.positions
        token = torch.arange(positions.shape[0], device=positions.device)
        request = request_of(token, metadata.query_start_loc).clamp(max=slots.shape[0] - 1)
        offsets = self.offsets[slots[request], positions]
        return (positions[:, None] + offsets).t()


def image_inputs(pools: Mapping[str, Tensor], vocab_size: int) -> ImageInputs | None:
    """The buffers of images among state by name; None if a step has none."""
    if PROMPT_EMBEDS not in pools:
        return None
    return ImageInputs(pools[PROMPT_EMBEDS], pools[ROPE_OFFSETS], vocab_size)

"""Gemma 4's assistant, as transformers' own class runs it, driven by plain code.

The loop is that of transformers' assisted generation: the target's embedding of the last token
beside the target's features of the row before it, or beside what the assistant gave; one position
for all drafts, that of the last token. The keys and values are the target's of all tokens but the
last one, in sliding layers those of the last window. Text is never rejected here, so that the keys
are those of the text alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from helpers import assistant


class Gemma4Assistant:
    """An assistant in the directory `draft` of its target's checkpoint, uncached.

    Args:
        model: transformers' own model of the target.
        directory: the target's checkpoint.
        count: of MTP layers; an assistant is one drafter.
    """

    def __init__(self, model: Any, directory: Path, count: int = 1):
        self.model, self.count = model, count
        self.assistant = transformers.AutoModelForCausalLM.from_pretrained(
            directory / "draft", dtype=model.dtype, attn_implementation="eager"
        ).eval()

    @torch.no_grad()
    def drafts(self, committed: list[int], count: int) -> list[Tensor]:
        """Logits [V] of `count` drafts after `committed`, whose last token is the bonus token."""
        features, stored = assistant.read(self.model, torch.tensor([committed[:-1]]))
        fed, token, found = features[:, -1:], committed[-1], list[Tensor]()
        for _ in range(count):
            embedded = self.model.get_input_embeddings()(torch.tensor([[token]]))
            out = self.assistant(
                inputs_embeds=torch.cat([embedded, fed], -1),
                position_ids=torch.tensor([[len(committed) - 1]]),
                shared_kv_states=stored,
            )
            fed = out.last_hidden_state
            found.append(out.logits[0, 0])
            token = int(found[-1].argmax())
        return found

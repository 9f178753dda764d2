"""ERNIE 4.5, as FastDeploy's ernie4_5_mtp.py runs it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from helpers.released.base import ReleasedMTP


class Ernie(ReleasedMTP):
    """Features from after the target's norm, which is the MTP layer's, too; a dense block."""

    head_name = "model.embed_tokens.weight"  # Tied, as released.

    def prefix(self, index: int) -> str:
        return "model.mtp_"

    def block(self, index: int) -> Any:
        block = type(self.decoder.layers[0])(self.private_config(), self.config.num_hidden_layers)
        state = self.state(index, ("block.0.",))
        block.load_state_dict({n.removeprefix("block.0."): t for n, t in state.items()})
        return block

    def run(self, index: int, ids: list[int], fed: Tensor) -> Tensor:
        token = self.rms(self.embed(ids), self.tensor(index, "emb_norm.0.weight"))
        hidden = self.rms(fed, self.tensor(index, "hidden_norm.0.weight"))
        x = torch.cat([token, hidden], -1) @ self.tensor(index, "linear_proj.0.weight").t()
        return self.rms(self.run_block(index, x), self.stored["model.norm.weight"])

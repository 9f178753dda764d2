"""DeepSeek-V3, DeepSeek-V3.2 and GLM-4 MoE: NextN layers (arXiv:2412.19437, section 2.2).

As SGLang's deepseek_nextn.py and glm4_moe_nextn.py run them, and transformers' MtpModel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from helpers.released.base import ReleasedMTP, stack_experts


class NextN(ReleasedMTP):
    """Features from after both norms; the layer's own embedding and head, where it has them."""

    def prefix(self, index: int) -> str:
        return f"model.layers.{self.config.num_hidden_layers + index}."

    def block(self, index: int) -> Any:
        config = self.private_config()
        for name in ("layer_types", "mlp_layer_types"):
            if getattr(config, name, None):
                kinds = getattr(config, name)
                setattr(config, name, [*kinds, *[kinds[-1]] * (index + 1)])
        block = type(self.decoder.layers[0])(config, config.num_hidden_layers + index)
        names = ("self_attn.", "mlp.", "input_layernorm.", "post_attention_layernorm.")
        state = self.state(index, names)
        block.load_state_dict(stack_experts(state, ("gate_proj", "up_proj", "down_proj")))
        return block

    def own(self, index: int, name: str, shared: str) -> Tensor:
        return self.stored.get(self.prefix(index) + name, self.stored[shared])

    def tokens(self, index: int, ids: list[int]) -> Tensor:
        """Embeddings of the layer's own table, where it has one."""
        return self.own(index, "embed_tokens.weight", self.embedding_name)[torch.tensor(ids)]

    def run(self, index: int, ids: list[int], fed: Tensor) -> Tensor:
        token = self.rms(self.tokens(index, ids), self.tensor(index, "enorm.weight"))
        hidden = self.rms(fed, self.tensor(index, "hnorm.weight"))
        x = torch.cat([token, hidden], -1) @ self.tensor(index, "eh_proj.weight").t()
        return self.rms(self.run_block(index, x), self.tensor(index, "shared_head.norm.weight"))

    def logits(self, index: int, given: Tensor) -> Tensor:
        return given @ self.own(index, "shared_head.head.weight", "lm_head.weight").t()


class Glm4v(NextN):
    """GLM-4.5V: GLM-4.5's layer with the names of a multimodal checkpoint; text has one number in
    all three coordinates of a position."""

    embedding_name = "model.language_model.embed_tokens.weight"

    def prefix(self, index: int) -> str:
        return f"model.language_model.layers.{self.config.num_hidden_layers + index}."

    def tokens(self, index: int, ids: list[int]) -> Tensor:
        return self.embed(ids)

    def rotate(self, x: Tensor, positions: Tensor, kind: str | None = None) -> Any:
        return self.decoder.rotary_emb(x, positions.expand(3, 1, -1))


class GlmDsa(NextN):
    """GLM-5: the MTP layer has an indexer whatever the target's last layer has.

    With `index_share_for_mtp_iteration`, as vLLM's llm_base_proposer.py (set_skip_topk and
    compact_topk_indices): the rows of later drafts attend to what the last certain row chose, not
    even to themselves.
    """

    certain = 0
    """Rows that choose for themselves, where later ones do not; 0: all rows do."""

    def private_config(self) -> Any:
        config = super().private_config()
        config.indexer_types = [*config.indexer_types, *["full"] * self.count]
        return config

    def drafts(self, committed: list[int], count: int) -> list[Tensor]:
        shares = getattr(self.config, "index_share_for_mtp_iteration", False)
        self.certain = len(committed) - 1 if shares else 0
        return super().drafts(committed, count)

    def seen(self, positions: Tensor, window: int) -> Tensor:
        """Later rows may attend to what the last certain row may attend to."""
        seen = super().seen(positions, window)
        return torch.cat([seen[: self.certain], self._later(seen)]) if self.certain else seen

    def _later(self, rows: Tensor) -> Tensor:
        """For each row of a later draft, what the last certain row has."""
        return rows[self.certain - 1 : self.certain].expand(len(rows) - self.certain, -1)

    def _share(self, module: Any, inputs: Any, chosen: Tensor) -> Tensor:
        own = chosen[0]  # [L, k]
        return torch.cat([own[: self.certain], self._later(own)])[None] if self.certain else chosen

    def run_block(self, index: int, x: Tensor, kind: str | None = None, window: int = 0) -> Tensor:
        hook = self.blocks[index].self_attn.indexer.register_forward_hook(self._share)
        try:
            return super().run_block(index, x, kind, window)[0]  # A layer also gives its choice.
        finally:
            hook.remove()

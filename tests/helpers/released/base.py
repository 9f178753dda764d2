"""Plain code that the pages of all families use; none of it is mtpc's."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AttentionInterface

ATTENTION = "released"
"""The name in transformers of the attention below; transformers' own has a softmax in float32."""


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float,
    s_aux: Tensor | None = None,
    indices: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attention of heads [1, N, L, D] in their own dtype.

    `s_aux` [N] are logits of sinks, `indices` [1, L, k] the positions that each row attends to.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * scaling + attention_mask
    if indices is not None:
        chosen = torch.zeros(scores.shape[2:], dtype=torch.bool).scatter(1, indices[0], True)
        scores = scores.masked_fill(~chosen, float("-inf"))
    if s_aux is not None:
        scores = torch.cat([scores, s_aux[:, None, None].expand(*scores.shape[1:3], 1)[None]], -1)
    weights = scores.softmax(-1)[..., : key.shape[2]]
    return (weights @ value).transpose(1, 2), None


AttentionInterface.register(ATTENTION, attention)


class ReleasedMTP:
    """MTP layers of a checkpoint, read by their released names, over whole texts and uncached.

    A page says, for its family, what is fed to the first layer (`first`), what a layer gives to the
    next draft (`run`) and to the head (`logits`), and how drafts are chained (`fed_next`).

    Args:
        model: transformers' own model of the target, in float64, with eager attention.
        directory: the checkpoint.
        count: number of MTP layers.
    """

    adds_one = False
    """Whether norms multiply by 1 + weight."""
    embedding_name, head_name = "model.embed_tokens.weight", "lm_head.weight"
    """Released names of the target's embedding and output head."""

    def __init__(self, model: Any, directory: Path, count: int):
        self.model, self.count = model, count
        self.config = model.config.get_text_config(decoder=True)
        self.decoder = model.get_decoder()
        self.stored: dict[str, Tensor] = {}
        for path in sorted(directory.glob("*.safetensors")):
            self.stored |= {name: t.double() for name, t in load_file(path).items()}
        self.blocks = [self.block(index).double().eval() for index in range(count)]

    # ------------------------------------------------------------------ what a page says

    def prefix(self, index: int) -> str:
        """Prefix of the names of MTP layer `index`."""
        raise NotImplementedError

    def block(self, index: int) -> Any:
        """transformers' decoder layer, with the weights of MTP layer `index`."""
        raise NotImplementedError

    def first(self, ids: list[int]) -> Tensor:
        """What the target feeds to MTP layer 0, [L, ...]."""
        return self.after_norm(ids)

    def run(self, index: int, ids: list[int], fed: Tensor) -> Tensor:
        """What MTP layer `index` gives to the next draft, [L, ...]."""
        raise NotImplementedError

    def logits(self, index: int, given: Tensor) -> Tensor:
        """Logits [L, V] of what `run` gave."""
        return given @ self.stored[self.head_name].t()

    def fed_next(self, target: Tensor, given: Tensor) -> Tensor:
        """What the next of several layers is fed: what this one gave, or the target's features."""
        return given

    # ------------------------------------------------------------------ what all of them do

    def private_config(self) -> Any:
        """A copy of the config, with attention in float64."""
        config = copy.deepcopy(self.config)
        config._attn_implementation = ATTENTION
        return config

    def tensor(self, index: int, name: str) -> Tensor:
        return self.stored[self.prefix(index) + name]

    @torch.no_grad()
    def before_norm(self, ids: list[int]) -> Tensor:
        """The target's hidden states before its final norm, [L, H]."""
        seen: list[Tensor] = []
        hook = self.decoder.norm.register_forward_pre_hook(lambda module, x: seen.append(x[0]))
        self.decoder(input_ids=torch.tensor([ids]), use_cache=False)
        hook.remove()
        return seen[-1][0]

    @torch.no_grad()
    def after_norm(self, ids: list[int]) -> Tensor:
        """The target's hidden states after its final norm, [L, H]."""
        return self.decoder(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state[0]

    def embed(self, ids: list[int]) -> Tensor:
        return self.stored[self.embedding_name][torch.tensor(ids)]

    def rms(self, x: Tensor, weight: Tensor) -> Tensor:
        """All these models compute their norms in float32."""
        single = x.float()
        single = single * torch.rsqrt(single.pow(2).mean(-1, True) + self.config.rms_norm_eps)
        if self.adds_one:
            return (single * (1.0 + weight.float())).double()
        return weight * single.double()

    def run_block(self, index: int, x: Tensor, kind: str | None = None, window: int = 0) -> Tensor:
        """The decoder layer over rows x [L, H], with a causal mask or one of a sliding window."""
        positions = torch.arange(len(x))[None]
        seen = self.seen(positions, window or len(x))
        mask = torch.zeros(len(x), len(x)).double().masked_fill(~seen, float("-inf"))
        return self.blocks[index](
            x[None],
            attention_mask=mask[None, None],
            position_ids=positions,
            position_embeddings=self.rotate(x[None], positions, kind),
        )[0]

    def seen(self, positions: Tensor, window: int) -> Tensor:
        """bool [L, L], the positions [1, L] that each row may attend to."""
        distance = positions.t() - positions
        return (distance >= 0) & (distance < window)

    def rotate(self, x: Tensor, positions: Tensor, kind: str | None = None) -> Any:
        return self.decoder.rotary_emb(x, positions, **({"layer_type": kind} if kind else {}))

    def state(self, index: int, names: tuple[str, ...]) -> dict[str, Tensor]:
        """Stored tensors whose names within the layer begin with one of `names`."""
        prefix = self.prefix(index)
        own = {n.removeprefix(prefix): t for n, t in self.stored.items() if n.startswith(prefix)}
        return {name: tensor for name, tensor in own.items() if name.startswith(names)}

    @torch.no_grad()
    def drafts(self, committed: list[int], count: int) -> list[Tensor]:
        """Logits [V] of `count` drafts after `committed`, whose last token is the bonus token.

        Row t of a layer pairs what it is fed with token t + i + 1; the last ones are drafts. Beyond
        the last layer each draft appends a row to it: the draft before, and its own last output.
        """
        ids, fed = committed[1:], self.first(committed[:-1])
        target, found = fed, []
        for step in range(count):
            index = min(step, self.count - 1)
            given = self.run(index, ids, fed)
            found.append(self.logits(index, given[-1:])[0])
            draft = int(found[-1].argmax())
            if step + 1 < self.count:
                ids, fed = [*ids[1:], draft], self.fed_next(target, given)
            else:
                ids, fed = [*ids, draft], torch.cat([fed, given[-1:]])
        return found


def stack_experts(state: dict[str, Tensor], parts: tuple[str, str, str]) -> dict[str, Tensor]:
    """Experts that are stored one by one -> transformers' two stacks of them."""
    gate, up, down = parts
    out = {name: tensor for name, tensor in state.items() if ".experts." not in name}
    stems = {name.split(".experts.")[0] + ".experts." for name in state if ".experts." in name}
    for stem in stems:
        count = sum(name.startswith(stem) and name.endswith(f".{gate}.weight") for name in state)
        rows = [
            torch.cat([state[f"{stem}{i}.{part}.weight"] for part in (gate, up)])
            for i in range(count)
        ]
        out[f"{stem}gate_up_proj"] = torch.stack(rows)
        downs = [state[f"{stem}{i}.{down}.weight"] for i in range(count)]
        out[f"{stem}down_proj"] = torch.stack(downs)
    return out

"""DFlash drafters, as their authors' code runs them (github.com/z-lab/dflash, dflash/model.py at
44947fb: DFlashDraftModel and dflash_generate), uncached.

It reads a drafter's tensors by their public names, and nothing of it is mtpc's or transformers' but
the target itself. Training in tests goes through the same functions. Windows are vLLM's
(qwen3_dflash.py), which the authors' code leaves to its attention function. So are DSpark's blocks
and its Markov head (qwen3_dspark.py; speculators 0.9, models/dspark). DFlash2's convolutions and
selector, and windows that rows of a block see both ways, are those of speculators 0.9
(models/dflash2; models/dflash/attention.py); its three scales, vLLM's (qwen3_dflash2.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from helpers.released.eagle3 import captured, rms


def turned(x: Tensor, places: Tensor, base: float) -> Tensor:
    """Heads [B, N, L, D], each row turned by its place [L]."""
    width = x.shape[-1]
    frequencies = 1.0 / base ** (torch.arange(0, width, 2).float() / width)
    angles = torch.outer(places.float(), frequencies)
    cos, sin = (torch.cat([f, f], -1).to(x.dtype) for f in (angles.cos(), angles.sin()))
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat([-high, low], -1) * sin


def heads(t: Mapping[str, Tensor], c: Mapping[str, Any], at: str, kind: str, x: Tensor) -> Tensor:
    """Rows [B, L, H] -> queries, keys or values [B, N, L, D]; queries and keys are normed."""
    flat = x @ t[f"{at}.self_attn.{kind}_proj.weight"].t()
    split = flat.unflatten(-1, (-1, c["head_dim"]))
    if kind != "v":
        split = rms(split, t[f"{at}.self_attn.{kind}_norm.weight"], c["rms_norm_eps"])
    return split.transpose(1, 2)


def mask(c: Mapping[str, Any], index: int, start: int, rows: int) -> Tensor:
    """bool [rows, start + rows]: what each row of a block attends to in layer `index`."""
    kinds = c.get("layer_types") or ["full_attention"] * c["num_hidden_layers"]
    slides = kinds[index] == "sliding_attention"
    row, key = torch.arange(rows)[:, None] + start, torch.arange(start + rows)
    causal = c.get("dflash_config", {}).get("causal", c.get("is_causal"))
    if not (slides if causal is None else causal) or c.get("sliding_window_non_causal"):
        window = c["sliding_window"] if slides else start
        return (key >= start - window).expand(rows, -1)
    return (key <= row) & (~torch.tensor(slides) | (key > row - (c.get("sliding_window") or 0)))


def mixed(t: Mapping[str, Tensor], at: str, x: Tensor, own: Tensor, side: int) -> Tensor:
    """Rows of blocks [B, Q, H] by the kernels [B, Q, taps, groups], one row and tap at a time."""
    base, width = t[f"{at}.base_kernel"][side], x.shape[-1] // own.shape[-1]
    kernels = base + own.repeat_interleave(width, -1)
    rows = []
    for row in range(x.shape[1]):
        taps = range(min(row + 1, kernels.shape[2]))
        rows.append(torch.stack([x[:, row - tap] * kernels[:, row, tap] for tap in taps]).sum(0))
    return torch.stack(rows, 1)


def around(t: Mapping[str, Tensor], at: str, x: Tensor, part: Any) -> Tensor:
    """A part of a layer between DFlash2's convolutions, if the drafter has them."""
    if f"{at}.base_kernel" not in t:
        return part(x)
    kernels = x @ t[f"{at}.kernel_projection.weight"].t()
    own = kernels.unflatten(-1, (2, t[f"{at}.base_kernel"].shape[1], -1))
    return mixed(t, at, part(mixed(t, at, x, own[:, :, 0], 0)), own[:, :, 1], 1)


def layer(
    t: Mapping[str, Tensor], c: Mapping[str, Any], index: int, context: Tensor, block: Tensor
) -> Tensor:
    """Context rows [B, L, H] and a block's rows [B, Q, H], which follow them -> [B, Q, H]."""
    at, eps, base = f"layers.{index}", c["rms_norm_eps"], c["rope_theta"]
    start, rows = context.shape[1], block.shape[1]
    places = torch.arange(start + rows)

    def attend(x: Tensor) -> Tensor:
        q = turned(heads(t, c, at, "q", x), places[start:], base)
        both = torch.cat([context, x], 1)
        k, v = turned(heads(t, c, at, "k", both), places, base), heads(t, c, at, "v", both)
        k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
        scores = q @ k.transpose(-1, -2) / c["head_dim"] ** 0.5
        weights = scores.masked_fill(~mask(c, index, start, rows), float("-inf")).softmax(-1)
        return (weights @ v).transpose(1, 2).flatten(-2) @ t[f"{at}.self_attn.o_proj.weight"].t()

    def gated(x: Tensor) -> Tensor:
        gate, up, down = (t[f"{at}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return (F.silu(x @ gate.t()) * (x @ up.t())) @ down.t()

    x = rms(block, t[f"{at}.input_layernorm.weight"], eps)
    hidden = block + around(t, f"{at}.attention_conv", x, attend)
    x = rms(hidden, t[f"{at}.post_attention_layernorm.weight"], eps)
    return hidden + around(t, f"{at}.mlp_conv", x, gated)


def run(t: Mapping[str, Tensor], c: Mapping[str, Any], states: Tensor, block: Tensor) -> Tensor:
    """Captured rows [B, L, nH] and embeddings of a block [B, Q, H] -> normed rows [B, Q, H]."""
    eps = c["rms_norm_eps"]
    context = rms(states @ t["fc.weight"].t(), t["hidden_norm.weight"], eps)
    for index in range(c["num_hidden_layers"]):
        block = layer(t, c, index, context, block)
    return rms(block, t["norm.weight"], eps)


class DFlash:
    """A drafter beside the target's checkpoint, in its directory `draft`.

    Args:
        model: transformers' own model of the target.
        directory: the target's checkpoint.
    """

    def __init__(self, model: Any, directory: Path):
        self.model = model
        self.config = json.loads((directory / "draft" / "config.json").read_text())
        (path,) = (directory / "draft").glob("*.safetensors")
        self.stored = {
            name: x.double() if x.is_floating_point() else x for name, x in load_file(path).items()
        }
        self.inner = {**self.config, **self.config.get("transformer_layer_config", {})}
        self.inner = {**(self.inner.get("rope_parameters") or {}), **self.inner}
        self.embedding = model.get_input_embeddings().weight.detach()
        self.head = model.get_output_embeddings().weight.detach()

    def layers(self) -> list[int]:
        """The layers whose inputs are captured: hidden_states[i + 1] of the authors' ids."""
        ids = {**self.config, **self.config.get("dflash_config", {})}.get("target_layer_ids")
        return [i + 1 for i in ids] if ids else self.config["aux_hidden_state_layer_ids"]

    def mask_id(self) -> int:
        entries = {**self.config, **self.config.get("dflash_config", {})}
        return int(entries["mask_token_id"])

    def whole(self, logits: Tensor) -> Tensor:
        """Logits [V_d] -> [V]; a row i stands for token i + d2t[i]."""
        if "d2t" not in self.stored:
            return logits
        found = torch.full((self.inner["vocab_size"],), float("-inf"), dtype=logits.dtype)
        for row, offset in enumerate(self.stored["d2t"].tolist()):
            found[row + offset] = logits[row]
        return found

    @torch.no_grad()
    def block(self, committed: list[int], rows: int) -> Tensor:
        """Normed rows [Q, H] of the block that begins with the last token of `committed`."""
        states = captured(self.model, torch.tensor([committed[:-1]]), self.layers())
        ids = [committed[-1], *[self.mask_id()] * (rows - 1)]
        scale = self.inner.get("dflash_config", {}).get("input_embedding_scale", 1.0)
        embedded = scale * self.embedding[torch.tensor([ids])]
        return run(self.stored, self.inner, states, embedded)[0]

    def selected(self, logits: Tensor, row: Tensor, before: int) -> Tensor:
        """DFlash2's scores [V] of a draft, -inf for tokens that are no candidates."""
        says, t = {**self.inner, **self.inner.get("dflash_config", {})}, self.stored
        ids = logits.topk(says["selector_top_k"]).indices
        unary = logits[ids] * says.get("output_multiplier", 1.0)
        if cap := says.get("final_logit_softcapping"):
            unary = cap * torch.tanh(unary / cap)
        context = t["candidate_selector.hidden_projection.weight"] @ row
        context = t["candidate_selector.predecessor_codebook"][before] * context
        scores = torch.full_like(logits, float("-inf"))
        scores[ids] = unary + t["candidate_selector.successor_codebook"][ids] @ context
        return scores

    def drafts(self, committed: list[int], count: int) -> list[Tensor]:
        """Logits [V] of `count` drafts after `committed`, whose last token is the bonus token."""
        is_spark = "DSpark" in self.config["architectures"][0]
        skips = not self.config.get("sample_from_anchor", is_spark)
        rows = self.block(committed, count + skips)[int(skips) :]
        head = self.stored.get("lm_head.weight", self.head)
        before, found = committed[-1], []
        for row, logits in zip(rows, rows @ head.t(), strict=True):
            if "markov_head.markov_w1.weight" in self.stored:  # vLLM's DSparkMarkovHead
                one, two = (self.stored[f"markov_head.markov_w{i}.weight"] for i in (1, 2))
                logits = logits + two @ one[before]
            if "candidate_selector.successor_codebook" in self.stored:
                logits = self.selected(logits, row, before)
            found.append(self.whole(logits))
            before = int(found[-1].argmax())
        return found

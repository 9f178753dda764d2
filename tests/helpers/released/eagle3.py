"""EAGLE-3 heads, as their authors' code runs them (github.com/SafeAILab/EAGLE, eagle/model/cnets.py
for the head, modeling_llama_kv.py for what the target hands out).

It reads a head's tensors by their public names, and nothing of it is mtpc's or transformers' but
the target itself. Training in tests goes through the same functions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F


def captured(model: Any, ids: Tensor, layers: Sequence[int]) -> Tensor:
    """The residual stream of rows [B, L] as it enters some layers of the target: [B, L, n H].

    What enters the final norm counts as one layer more. transformers hands that out normed.
    """
    decoder, last = model.get_decoder(), list[Tensor]()
    hook = decoder.norm.register_forward_pre_hook(lambda _, args: last.append(args[0]))
    out = decoder(input_ids=ids, use_cache=False, output_hidden_states=True)
    hook.remove()
    states = [*out.hidden_states[:-1], *last]
    return torch.cat([states[layer] for layer in layers], -1)


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    single = x.float()
    single = single * torch.rsqrt(single.pow(2).mean(-1, keepdim=True) + eps)
    return weight * single.to(x.dtype)


def rotated(x: Tensor, base: float) -> Tensor:
    """Heads [B, N, L, D], each row turned by its place."""
    length, width = x.shape[-2:]
    frequencies = 1.0 / base ** (torch.arange(0, width, 2).float() / width)
    angles = torch.outer(torch.arange(length).float(), frequencies)
    cos, sin = (torch.cat([f, f], -1).to(x.dtype) for f in (angles.cos(), angles.sin()))
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat([-high, low], -1) * sin


def attend(t: Mapping[str, Tensor], config: Mapping[str, Any], x: Tensor) -> Tensor:
    """Causal attention of rows [B, L, 2H]."""
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    q, k, v = (
        (x @ t[f"midlayer.self_attn.{name}_proj.weight"].t()).unflatten(-1, (n, width))
        for name, n in (("q", heads), ("k", groups), ("v", groups))
    )
    base = config.get("rope_theta", 10000.0)
    q, k = (rotated(heads_of.transpose(1, 2), base) for heads_of in (q, k))
    k, v = (each.repeat_interleave(heads // groups, 1) for each in (k, v.transpose(1, 2)))
    scores = q @ k.transpose(-1, -2) / width**0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    weights = scores.masked_fill(later, float("-inf")).softmax(-1)
    return (weights @ v).transpose(1, 2).flatten(-2) @ t["midlayer.self_attn.o_proj.weight"].t()


def layer(t: Mapping[str, Tensor], config: Mapping[str, Any], token: Tensor, fed: Tensor) -> Tensor:
    """Token embeddings and features [B, L, H] -> what the next draft is fed, [B, L, H]."""
    eps = config["rms_norm_eps"]
    normed = rms(fed, t["midlayer.hidden_norm.weight"], eps)
    x = torch.cat([rms(token, t["midlayer.input_layernorm.weight"], eps), normed], -1)
    residual = normed if config.get("norm_before_residual") else fed
    hidden = residual + attend(t, config, x)
    x = rms(hidden, t["midlayer.post_attention_layernorm.weight"], eps)
    gate, up, down = (t[f"midlayer.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    return hidden + (F.silu(x @ gate.t()) * (x @ up.t())) @ down.t()


def normed(t: Mapping[str, Tensor], config: Mapping[str, Any], given: Tensor) -> Tensor:
    """What `layer` gave, after the head's norm."""
    return rms(given, t["norm.weight"], config["rms_norm_eps"])


def head(t: Mapping[str, Tensor], config: Mapping[str, Any], given: Tensor) -> Tensor:
    """Logits [..., V_d] of what `layer` gave."""
    return normed(t, config, given) @ t["lm_head.weight"].t()


class Eagle3:
    """A head beside the target's checkpoint, in its directory `draft`, uncached.

    Args:
        model: transformers' own model of the target.
        directory: the target's checkpoint.
        count: of MTP layers; a head is one.
    """

    def __init__(self, model: Any, directory: Path, count: int = 1):
        self.model, self.count = model, count
        self.config = json.loads((directory / "draft" / "config.json").read_text())
        (path,) = (directory / "draft").glob("*.safetensors")
        self.stored = {
            name: t.double() if t.is_floating_point() else t for name, t in load_file(path).items()
        }
        embedding = model.get_input_embeddings().weight.detach()
        self.embedding = self.stored.get("embed_tokens.weight", embedding)

    def layers(self) -> list[int]:
        """The layers whose inputs are captured: the authors' default, and SpecForge's ids, which
        count outputs."""
        depth = self.model.config.num_hidden_layers
        ids = self.config.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids")
        return [i + 1 for i in ids] if ids else [2, depth // 2, depth - 3]

    def whole(self, logits: Tensor) -> Tensor:
        """Logits [V_d] -> [V]; a row i stands for token i + d2t[i]."""
        if "d2t" not in self.stored:
            return logits
        found = torch.full((self.config["vocab_size"],), float("-inf"), dtype=logits.dtype)
        for row, offset in enumerate(self.stored["d2t"].tolist()):
            found[row + offset] = logits[row]
        return found

    @torch.no_grad()
    def drafts(self, committed: list[int], count: int) -> list[Tensor]:
        """Logits [V] of `count` drafts after `committed`, whose last token is the bonus token."""
        states = captured(self.model, torch.tensor([committed[:-1]]), self.layers())
        ids, fed, found = committed[1:], states @ self.stored["fc.weight"].t(), []
        for _ in range(count):
            token = self.embedding[torch.tensor([ids])]
            given = layer(self.stored, self.config, token, fed)
            found.append(self.whole(head(self.stored, self.config, given[0, -1])))
            last = given[:, -1:]
            if self.config.get("norm_output"):  # EAGLE-3.1
                last = normed(self.stored, self.config, last)
            ids, fed = [*ids, int(found[-1].argmax())], torch.cat([fed, last], 1)
        return found


class PEagle(Eagle3):
    """A P-EAGLE head (speculators 0.9, models/peagle/core.py; tensors below `layers.0.`, and plain
    Llama layers behind it): all drafts but the first hold the mask's token and `mask_hidden`."""

    def __init__(self, model: Any, directory: Path, count: int = 1):
        super().__init__(model, directory, count)
        stored = {n.replace("layers.0.", "midlayer."): t for n, t in self.stored.items()}
        self.stored = stored
        self.config = {**self.config, **self.config.get("transformer_layer_config", {})}

    def layers(self) -> list[int]:
        return list(self.config["eagle_aux_hidden_state_layer_ids"])

    def plain_layer(self, index: int, x: Tensor) -> Tensor:
        """A Llama layer over rows [B, L, H], by the code of the first one."""
        t = {
            n.replace(f"layers.{index}.", "midlayer."): w
            for n, w in self.stored.items()
            if n.startswith(f"layers.{index}.")
        }
        eps = self.config["rms_norm_eps"]
        hidden = x + attend(t, self.config, rms(x, t["midlayer.input_layernorm.weight"], eps))
        x = rms(hidden, t["midlayer.post_attention_layernorm.weight"], eps)
        gate, up, down = (t[f"midlayer.mlp.{n}_proj.weight"] for n in ("gate", "up", "down"))
        return hidden + (F.silu(x @ gate.t()) * (x @ up.t())) @ down.t()

    @torch.no_grad()
    def drafts(self, committed: list[int], count: int) -> list[Tensor]:
        """As `Eagle3.drafts`, in one pass."""
        states = captured(self.model, torch.tensor([committed[:-1]]), self.layers())
        masked = self.stored["mask_hidden"].reshape(1, 1, -1).expand(1, count - 1, -1)
        fed = torch.cat([states, masked], 1) @ self.stored["fc.weight"].t()
        ids = [*committed[1:], *[self.config["mask_token_id"]] * (count - 1)]
        given = layer(self.stored, self.config, self.embedding[torch.tensor([ids])], fed)
        for index in range(1, self.config["num_hidden_layers"]):
            given = self.plain_layer(index, given)
        rows = given[0, len(committed) - 2 :]
        return [self.whole(head(self.stored, self.config, row)) for row in rows]

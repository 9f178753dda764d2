"""Qwen4-Exp, as vLLM's qwen4_exp/nvidia/mtp.py and SGLang's qwen4_exp_mtp.py run it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from helpers.released.qwen import Qwen


class Qwen4(Qwen):
    """All streams are fed, [L, n H], under one norm; the layer's own mixer joins them."""

    kind = "indexed_attention"

    def first(self, ids: list[int]) -> Tensor:
        seen: list[Tensor] = []
        mixer = self.decoder.hyper_connection_mixer
        hook = mixer.register_forward_pre_hook(lambda module, x: seen.append(x[0]))
        self.decoder(input_ids=torch.tensor([ids]), use_cache=False)
        hook.remove()
        return seen[-1][0]

    def run(self, index: int, ids: list[int], fed: Tensor) -> Tensor:
        token = self.rms(self.embed(ids), self.tensor(index, "pre_fc_norm_embedding.weight"))
        token = token @ self.tensor(index, "fc_embedding.weight").t()
        normed = self.rms(fed, self.tensor(index, "pre_fc_norm_hidden.weight"))
        project = self.tensor(index, "fc_hidden.weight").t()
        streams = [part @ project + token for part in normed.chunk(self.config.hc_count, -1)]
        return self.run_block(index, torch.cat(streams, -1))

    def logits(self, index: int, given: Tensor) -> Tensor:
        count, name = self.config.hc_count, "hyper_connection_mixer."
        weights = self.tensor(index, f"{name}hc_norm.weight").chunk(count)
        parts = zip(given.chunk(count, -1), weights, strict=True)
        normed = torch.cat([self.rms(part, weight) for part, weight in parts], -1)
        low = normed @ self.tensor(index, f"{name}input_mix_weight_down.weight").t()
        mix = F.silu(low / count) @ self.tensor(index, f"{name}input_mix_weight_up.weight").t()
        mixed = torch.sigmoid(mix) * normed
        return sum(mixed.chunk(count, -1)) / count @ self.stored[self.head_name].t()

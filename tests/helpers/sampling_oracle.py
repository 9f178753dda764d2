"""Plain sampling with transformers and numpy, and its parameters."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from typing import Any

import numpy as np
import torch

from helpers.oracles import MIN_MARGIN, Oracle
from helpers.philox import scalar_uniform
from mtpc import SamplingParams

V = 96
WARM = SamplingParams(temperature=0.9, seed=11)
FILTERS = {
    "temperature": WARM,
    "hot": SamplingParams(temperature=3.0, seed=2**63 - 1),
    "top_k": dataclasses.replace(WARM, top_k=7),
    "top_p": dataclasses.replace(WARM, top_p=0.8),
    "min_p": dataclasses.replace(WARM, min_p=0.1),
    "all filters": dataclasses.replace(WARM, top_k=20, top_p=0.9, min_p=0.02),
    "repetition": dataclasses.replace(WARM, repetition_penalty=1.7),
    "presence": dataclasses.replace(WARM, presence_penalty=1.5, frequency_penalty=-0.5),
    "frequency": dataclasses.replace(WARM, frequency_penalty=2.0),
    "bias": dataclasses.replace(WARM, logit_bias={5: 4.0, 9: -100.0, 40: 3.5}),
    "allowed": dataclasses.replace(WARM, allowed_ids=tuple(range(20, 64))),
    "banned": dataclasses.replace(WARM, banned_ids=tuple(range(30, 60))),
    "min_tokens": dataclasses.replace(WARM, logit_bias={1: 9.0}, min_tokens=6),
    "greedy, penalised": SamplingParams(repetition_penalty=1.5, min_tokens=4),
    "greedy": SamplingParams(),
    "everything": SamplingParams(
        temperature=1.2, top_k=30, top_p=0.95, min_p=0.01, seed=77, repetition_penalty=1.2,
        presence_penalty=0.3, frequency_penalty=0.2, logit_bias={3: 2.0}, banned_ids=(7, 8),
        min_tokens=3,
    ),
}  # fmt: skip
NEW = 14


class SamplingOracle:
    """Plain uncached sampling with transformers and numpy, without mtpc."""

    def __init__(self, oracle: Oracle):
        self.oracle = oracle
        self._known: dict[Any, list[int]] = {}

    @torch.no_grad()
    def logits(self, ids: list[int]) -> np.ndarray:
        head = self.oracle.model.get_output_embeddings()
        return head(self.oracle.hidden(ids)[0, -1]).double().numpy()

    def generate(self, prompt: list[int], count: int, params: SamplingParams) -> list[int]:
        """`count` new tokens, ended by the model's stop token."""
        key = (tuple(prompt), count, params)
        if key not in self._known:
            out: list[int] = []
            while len(out) < count and not (out and out[-1] in self.oracle.stop_ids):
                out.append(self.choose(prompt, out, params))
            self._known[key] = out
        return self._known[key]

    def choose(self, prompt: list[int], out: list[int], params: SamplingParams) -> int:
        x = self.logits([*prompt, *out])
        x = distribution(x, prompt, out, params, self.oracle.stop_ids)
        if params.temperature > 0:
            position = len(prompt) + len(out)
            noise = [scalar_uniform(params.seed or 0, position, v) for v in range(len(x))]
            x = x - np.log(-np.log(np.array(noise)))
        second, first = np.sort(x)[-2:]
        assert first - second > MIN_MARGIN, "a near tie proves nothing"
        return int(np.argmax(x))


def distribution(
    logits: np.ndarray,
    prompt: list[int],
    out: list[int],
    params: SamplingParams,
    stop_ids: set[int],
) -> np.ndarray:
    """Logits after all stages before the noise; -inf for removed tokens."""
    x = logits.copy()
    for token, bias in dict(params.logit_bias).items():
        x[token] += bias
    for token in {*prompt, *out}:
        x[token] *= 1 / params.repetition_penalty if x[token] > 0 else params.repetition_penalty
    for token, count in Counter(out).items():
        x[token] -= params.frequency_penalty * count + params.presence_penalty
    barred = set(params.banned_ids)
    if params.allowed_ids is not None:
        barred |= set(range(len(x))) - set(params.allowed_ids)
    if len(out) < params.min_tokens:
        barred |= stop_ids
    x[list(barred)] = -math.inf
    if params.temperature == 0:
        return x
    x /= params.temperature
    p = np.exp(x - x.max())
    x[p < params.min_p * p.max() * (1 - 1e-12)] = -math.inf
    if params.top_k:
        x[x < np.sort(x)[-params.top_k]] = -math.inf
    p = np.exp(x - x.max())
    p /= p.sum()
    mass = 0.0
    for token in np.argsort(-x):
        if mass >= params.top_p and params.top_p < 1:
            x[token] = -math.inf
        mass += p[token]
    return x

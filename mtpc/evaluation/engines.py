"""The engines that answer a task: transformers, and mtpc with a backend and K. All are greedy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from transformers import StoppingCriteria

import mtpc
from mtpc.engine.request import Request
from mtpc.engine.stream import check_all, stream
from mtpc.engine.text import TextAssembler
from mtpc.layout.progress import Listener
from mtpc.models.load import family_of, load, read_target
from mtpc.models.rotary import max_positions
from mtpc.plan import NO_LIMIT, longest
from mtpc.sampling_params import TokenLogprobs
from mtpc.weights.checkpoint import Checkpoint
from mtpc.weights.served_model import ServedModel


class MtpcEngine:
    """mtpc on one backend, with one K: of `options` of `mtpc.compile`. A prompt and its text have
    at most `max_len` tokens."""

    def __init__(self, checkpoint: Path, listener: Listener, **options: Any):
        self.model = mtpc.compile(checkpoint, progress=listener, **options)
        self.name = f"mtpc, {options['backend']}"
        self.spec_tokens: int | None = options["spec_tokens"]
        self.served, self.max_len = self.model.served, self.model.engine.longest

    def answer(
        self, prompts: Sequence[list[int]], limits: Sequence[int], stops: Sequence[tuple[str, ...]]
    ) -> list[str]:
        """Continue each prompt of token ids, up to its limit of new tokens or before one of its
        stop strings. The engine batches the prompts."""
        engine, served = self.model.engine, self.served
        requests = [
            Request(-1, prompt, limit, served.stop_ids)
            for prompt, limit in zip(prompts, limits, strict=True)
        ]
        check_all(engine, requests)
        texts = [""] * len(requests)
        assemblers = [TextAssembler(served.decode, strings) for strings in stops]
        for output in stream(engine, requests, assemblers):
            texts[output.index] += output.text or ""
        return texts

    def prompt_logprobs(
        self, prompts: Sequence[list[int]], starts: Sequence[int]
    ) -> list[list[TokenLogprobs]]:
        """See `mtpc.SpecModel.prompt_logprobs`; `top` is 1."""
        return self.model.prompt_logprobs(prompts, starts)


class TransformersEngine:
    """transformers' eager code on dequantised weights, one prompt at a time.

    It has the attributes of `MtpcEngine`; its K is None. Without a `dtype`, weights keep the
    checkpoint's.
    """

    name: str = "transformers, eager"
    spec_tokens: int | None = None

    def __init__(self, checkpoint: Path, dtype: str | None, max_len: int | None):
        stored = Checkpoint(checkpoint)
        family = family_of(stored)
        self.model: Any = read_target(stored, family, dtype)
        self.model.eval()
        self.served = load(stored, None, needs_mtp=False, headers_only=True).served()
        most = max_positions(self.model.config.get_text_config())
        self.max_len = longest(max_len, NO_LIMIT if most is None else most)

    @torch.no_grad()
    def answer(
        self, prompts: Sequence[list[int]], limits: Sequence[int], stops: Sequence[tuple[str, ...]]
    ) -> list[str]:
        return [self._answer(*row) for row in zip(prompts, limits, stops, strict=True)]

    def _answer(self, prompt: list[int], limit: int, strings: tuple[str, ...]) -> str:
        ids, ends = torch.tensor([prompt]), list(self.served.stop_ids)
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=limit,
            do_sample=False,
            eos_token_id=ends or None,
            pad_token_id=ends[0] if ends else 0,
            stopping_criteria=[_AtString(self.served, len(prompt), strings)] if strings else [],
        )
        text = TextAssembler(self.served.decode, strings)
        return text.push(out[0, len(prompt) :].tolist(), last=True)

    @torch.no_grad()
    def prompt_logprobs(
        self, prompts: Sequence[list[int]], starts: Sequence[int]
    ) -> list[list[TokenLogprobs]]:
        rows = []
        for ids, start in zip(prompts, starts, strict=True):
            logits = self.model(torch.tensor([ids]), use_cache=False).logits[0, start - 1 : -1]
            known = logits.double().log_softmax(-1)
            best = known.max(-1)
            numbers = known.gather(1, torch.tensor(ids[start:])[:, None])[:, 0].tolist()
            tops = zip(best.indices.tolist(), best.values.tolist(), strict=True)
            entries = zip(ids[start:], numbers, tops, strict=True)
            rows.append([TokenLogprobs(i, number, (top,)) for i, number, top in entries])
        return rows


AnsweringEngine: TypeAlias = MtpcEngine | TransformersEngine


class _AtString(StoppingCriteria):
    """Ends transformers' loop when the new text contains a stop string."""

    def __init__(self, served: ServedModel, start: int, strings: tuple[str, ...]):
        self._served, self._start, self._strings = served, start, strings

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        text = self._served.decode(input_ids[0, self._start :].tolist())
        return torch.tensor([any(string in text for string in self._strings)])

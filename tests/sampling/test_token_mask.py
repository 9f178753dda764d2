"""A host's own masks, on the target's tokens and on drafts: text that obeys, and drafts that do."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import host as example
import pytest
from helpers.families import TINY
from helpers.sampling_oracle import FILTERS, SamplingOracle
from helpers.theorem import PROMPTS

import mtpc
from mtpc import SamplingParams
from mtpc.engine.request import Request
from mtpc.engine.sampling_rows import pack_bits
from mtpc.layout import StepKey
from mtpc.layout.buffers import sampling_specs

V, NEW = 96, 20
KINDS = 3
"""The grammar: after a token of kind k comes one of kind k + 1, where kinds are remainders."""
ROWS = [pack_bits(range(kind, V, KINDS), V) for kind in range(KINDS)]


def obeys(text: list[int]) -> bool:
    """Whether a text's tokens follow the grammar, its first one excepted."""
    return all((b - a) % KINDS == 1 for a, b in pairwise(text))


def wanted(plain: SamplingOracle, prompt: list[int], params: SamplingParams) -> list[int]:
    """Plain decoding of a text that obeys: a mask a token, by the token before it."""
    out: list[int] = []
    for _ in range(NEW):
        kind = ([*prompt, *out][-1] + 1) % KINDS
        only = dataclasses.replace(params, allowed_ids=tuple(range(kind, V, KINDS)))
        out.append(plain.choose(prompt, out, only))
    return out


class Masker:
    """One request on the engine, whose masks are written before each step, those of drafts too.

    The tokens of a draft's path are known before a step, and of the token that is chosen after
    them its kind: so is the kind of every draft that the step will make.
    """

    def __init__(self, spec: mtpc.SpecModel, masks_drafts: bool):
        self.spec, self.masks_drafts = spec, masks_drafts
        self.seen: Counter[str] = Counter()

    def generate(self, prompt: list[int], params: SamplingParams) -> list[int]:
        engine = self.spec.engine
        engine.add(prompt, NEW, (), params)
        (request,) = engine.waiting
        while engine.has_work:
            self.write(request)
            engine.step()
            if request.slot is not None and request.is_prefilled:
                self.look(request)
        for step in self.spec.program.steps.values():
            for name in ("batch.token_mask", "batch.draft_mask"):
                if name in step.buffers:
                    step.buffers[name].fill_(-1)
        return request.output_ids

    def write(self, request: Request) -> None:
        drafts = self.drafts(request) if request.slot and request.is_prefilled else []
        path = [request.token_ids(0, request.num_tokens)[-1], *drafts]
        for step in self.spec.program.steps.values():
            buffers, rows = step.buffers, len(step.buffers["batch.token_mask"])
            for row, token in zip(range(rows), path, strict=False):
                buffers["batch.token_mask"][row] = ROWS[(token + 1) % KINDS]
                for i in range(step.key.spec_tokens if self.masks_drafts else 0):
                    buffers["batch.draft_mask"][row, i] = ROWS[(token + 2 + i) % KINDS]

    def drafts(self, request: Request) -> list[int]:
        row = self.spec.program.shared["state.token_ids"][request.slot].tolist()
        return row[1 : 1 + self.spec.options.spec_tokens]

    def look(self, request: Request) -> None:
        """Whether what is drafted obeys."""
        found = obeys([request.output_ids[-1], *self.drafts(request)])
        self.seen["drafts that obey" if found else "drafts that do not"] += 1


@pytest.mark.parametrize(
    ("spec_tokens", "name"),
    [
        pytest.param(1, "temperature", marks=pytest.mark.slow),
        (3, "greedy"),
        (3, "everything"),
    ],
)
def test_drafts_obey_the_mask_of_a_whole_step(
    spec_tokens: int,
    name: str,
    compiled: Callable[..., Any],
    sampling_oracle: Callable[..., Any],
) -> None:
    """The same text with drafts masked and not, plain decoding's; masked, more are accepted."""
    options = {"batch_buckets": (1,), "sampling": True, "token_mask": True}
    spec, plain = compiled("mimo", spec_tokens, **options), sampling_oracle("mimo")
    params = dataclasses.replace(FILTERS[name], banned_ids=(), min_tokens=0)
    text = wanted(plain, PROMPTS[6], params)
    assert obeys([PROMPTS[6][-1], *text])
    accepted = {}
    for masks_drafts in (False, True):
        masker, before = Masker(spec, masks_drafts), sum(spec.stats.accepted)
        assert masker.generate(PROMPTS[6], params) == text
        accepted[masks_drafts] = sum(spec.stats.accepted) - before
        assert bool(masker.seen["drafts that do not"]) != masks_drafts
    assert 0 <= accepted[False] < accepted[True] < len(text)


class GrammarHost(example.Host):
    """Masks the target before `verify`, and drafts before `propose`, knowing what was accepted."""

    def __init__(self, model: mtpc.HostedModel):
        super().__init__(model)
        self.proposed: Counter[bool] = Counter()
        for step in self.steps.values():  # Rows that are not written must not be read.
            step["batch.draft_mask"].zero_()

    def _run(
        self, key: StepKey, decoding: list[example.Request], prompts: list[example.Request]
    ) -> None:
        batch = decoding + prompts
        self.now = (key, batch)
        mask = self.steps[key]["batch.token_mask"]
        for row, request in enumerate(batch):
            first, drafts = request.text[-1], self.shared["state.token_ids"][request.slot, 1:]
            path = [first, *drafts.tolist()] if request in decoding else [first]
            for j, token in enumerate(path):
                mask[row * key.max_emitted + j] = ROWS[(token + 1) % KINDS]
        slots = [request.slot for request in batch]
        super()._run(key, decoding, prompts)
        for request, slot in zip(batch, slots, strict=True):
            if request.output and not request.is_finished:
                drafts = self.shared["state.token_ids"][slot, 1:].tolist()
                self.proposed[obeys([request.text[-1], *drafts])] += 1

    def take(self, request: example.Request, row: mtpc.RowResult) -> None:
        super().take(request, row)
        key, batch = self.now
        width = key.max_emitted
        masks = self.steps[key]["batch.draft_mask"]
        masks[batch.index(request) * width : (batch.index(request) + 1) * width] = 0
        for i in range(key.spec_tokens):
            mask = ROWS[(request.text[-1] + 1 + i) % KINDS]
            masks[batch.index(request) * width + row.num_accepted, i] = mask


@pytest.fixture(scope="module")
def grammar_models(checkpoint: Callable[..., Path]) -> Callable[..., mtpc.HostedModel]:
    def get(family: str, form: str) -> mtpc.HostedModel:
        options: dict[str, Any] = {**TINY, "batch_buckets": (3,), "num_pages": 40, "sampling": True}
        return mtpc.compile_host(
            checkpoint(family), form=form, spec_tokens=3, backend="eager", dtype="float64",
            **options,
        )  # fmt: skip

    return get


@pytest.mark.parametrize("family", ["mimo", pytest.param("step3p7", marks=pytest.mark.slow)])
def test_drafts_obey_a_mask_written_between_the_halves(
    family: str,
    grammar_models: Callable[..., mtpc.HostedModel],
    sampling_oracle: Callable[..., Any],
) -> None:
    """Ragged batches, chunks, joins and leaves; with one MTP layer and with several."""
    host, plain = GrammarHost(grammar_models(family, "split")), sampling_oracle(family)
    requests = [host.add(prompt, NEW) for prompt in PROMPTS[2:8]]
    while host.step():
        pass
    greedy = SamplingParams()
    assert [r.output for r in requests] == [wanted(plain, r.prompt, greedy) for r in requests]
    assert host.proposed[True] > 20
    assert host.proposed[False] == 0
    assert host.accepted[0]
    assert host.accepted[1] + host.accepted[2] + host.accepted[3]


def test_a_draft_mask_that_allows_nothing(
    compiled: Callable[..., Any],
    sampling_oracle: Callable[..., Any],
) -> None:
    """Drafts are token 0 then, and the text is what it is without."""
    spec = compiled("mimo", 3, batch_buckets=(1,), sampling=True, token_mask=True)
    plain, params = sampling_oracle("mimo"), FILTERS["temperature"]
    masks = [step.buffers["batch.draft_mask"] for step in spec.program.steps.values()]
    for mask in masks:
        mask.zero_()
    before = sum(spec.stats.accepted)
    assert spec.generate(PROMPTS[5], 12, sampling=params) == plain.generate(PROMPTS[5], 12, params)
    assert not spec.program.shared["state.token_ids"][1, 1:].any()
    assert sum(spec.stats.accepted) == before
    for mask in masks:
        mask.fill_(-1)


def test_no_mask_of_drafts_without_drafts() -> None:
    for key in (StepKey.decode(2, 0), StepKey.prefill(1, 8, 0)):
        names = {spec.name for spec in sampling_specs(key, token_mask=True)}
        assert {name for name in names if name.endswith("_mask")} == {"batch.token_mask"}

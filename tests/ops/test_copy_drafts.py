"""Copies of a text's own tokens: the reference and the C++ kernel against the rule in Python."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from helpers.copies import copied, repeating

import mtpc.step.copying  # noqa: F401  (registers the op)
from mtpc.backends.cpu_kernels import load_kernels
from mtpc.layout import NO_TOKEN

WIDTH, SLOTS, WILD = 90, 7, 2**30


def make_call(seed: int, num_drafts: int) -> tuple[list[Any], list[list[int] | None], list[int]]:
    """A ragged step over 5 requests, one of them off: its arguments, texts after it, and slots."""
    draw = random.Random(seed)
    slots = draw.sample(range(1, SLOTS), 5)
    text_ids = torch.full((SLOTS, WIDTH), WILD, dtype=torch.int32)
    ids, following, starts, context, anchors, active = [], [], [0], [], [], []
    after: list[list[int] | None] = []
    for index, slot in enumerate(slots):
        text = repeating(draw.randrange(2, WIDTH), 31 * seed + index, draw.choice([1, 2, 4, 40]))
        rows = draw.randrange(1, min(len(text), 9))
        rejected = draw.randrange(3)
        known = len(text) - 1 - rows
        is_on = index != seed % 5
        text_ids[slot, :known] = torch.tensor(text[:known], dtype=torch.int32)
        anchors.append(len(ids) + rows - 1)
        ids += [*text[known:-1], *[99] * rejected]
        following += [*text[known + 1 :], *[98] * rejected]
        starts.append(len(ids))
        context.append(known)
        active.append(is_on)
        after.append(text if is_on else None)
    pad = draw.randrange(4)
    arguments = [
        text_ids,
        torch.tensor([*ids, *[97] * pad]),
        torch.tensor([*following, *[96] * pad]),
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor(context, dtype=torch.int32),
        torch.tensor(anchors),
        torch.tensor(active),
        torch.tensor(slots) * torch.tensor(active),  # Requests that are off have the scratch slot.
        num_drafts,
    ]
    return arguments, after, slots


@pytest.mark.parametrize("num_drafts", [1, 3, 7, 16])
@pytest.mark.parametrize("kind", ["mtpc", "mtpc_cpu"])
def test_drafts_equal_the_rule(kind: str, num_drafts: int) -> None:
    """Ragged rows with rejected ones behind them; no row but its own is read or written."""
    load_kernels()
    matches = 0
    for seed in range(40):
        arguments, after, slots = make_call(seed, num_drafts)
        before = arguments[0].clone()
        drafts, matched = getattr(torch.ops, kind).copy_drafts(*arguments)
        untouched = set(range(SLOTS)) - {s for s, t in zip(slots, after, strict=True) if t}
        for slot in untouched:
            assert torch.equal(arguments[0][slot], before[slot])
        for row, (slot, text) in enumerate(zip(slots, after, strict=True)):
            wanted = None if text is None else copied(text, num_drafts)
            assert drafts[row].tolist() == (wanted or [NO_TOKEN] * num_drafts)
            assert bool(matched[row]) == (wanted is not None)
            if text is not None:
                end = len(text)
                assert arguments[0][slot, :end].tolist() == text
                assert torch.equal(arguments[0][slot, end:], before[slot, end:])
            matches += wanted is not None
    assert 60 < matches < 150


@pytest.mark.parametrize("kind", ["mtpc", "mtpc_cpu"])
@pytest.mark.parametrize("length", [2, 3, 32, 33])
def test_how_many_tokens_match(kind: str, length: int) -> None:
    """Two tokens are too few; beyond 32 the last place counts, not the longest."""
    load_kernels()
    end = list(range(50, 50 + length))
    text = [*[7, *end, 1], *end[-32:], 2, 3, 4, *end]
    row = torch.tensor([[0] * 140, text[:-2] + [0] * (142 - len(text))], dtype=torch.int32)
    given = [torch.tensor(text[-2:-1]), torch.tensor(text[-1:])]
    numbers = [torch.tensor(n, dtype=torch.int32) for n in ([0, 1], [len(text) - 2])]
    rest = (torch.tensor([0]), torch.tensor([True]), torch.tensor([1]), 1)
    drafts, matched = getattr(torch.ops, kind).copy_drafts(row, *given, *numbers, *rest)
    expected = (NO_TOKEN, 0) if length < 3 else (2, min(length, 32))
    assert (int(drafts), int(matched)) == expected

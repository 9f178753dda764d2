"""Derived families with Mamba-2 layers, alone or beside attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers import derived
from helpers.derived import EQUAL

import mtpc

NAMES = [
    "FalconH1ForCausalLM",
    *(
        pytest.param(name, marks=pytest.mark.slow)
        for name in ("BambaForCausalLM", "GraniteMoeHybridForCausalLM", "Mamba2ForCausalLM")
    ),
]


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    assert derived.outcome(name, tmp_path).startswith(EQUAL)


@pytest.mark.parametrize("name", NAMES)
def test_drafts_leave_recurrent_state_as_it_was(name: str, tmp_path: Path) -> None:
    """Copies, most of which are rejected, in bfloat16 on the cpu backend with its default options:
    the text is that of plain decoding, and goes on from kept state as from none."""
    derived.tiny_model(name, vocab_size=16).bfloat16().save_pretrained(tmp_path)
    prompts = [[5, 9, 7, 5], [*range(3, 15)] * 2, [7 * i % 11 + 3 for i in range(37)], [5, 6] * 12]
    sizes: dict[str, Any] = {"max_len": 128, "backend": "cpu"}
    plain = mtpc.compile(tmp_path, spec_tokens=0, prefix_caching=False, **sizes)
    spec = mtpc.compile(tmp_path, spec_tokens=3, draft="copy", **sizes)
    for _ in range(2):
        wanted = plain.generate(prompts, 30, ignore_eos=True)
        assert spec.generate(prompts, 30, ignore_eos=True) == wanted
        prompts = [prompt + text for prompt, text in zip(prompts, wanted, strict=True)]
    drafted, accepted = sum(spec.stats.drafted), sum(spec.stats.accepted)
    assert drafted > accepted

"""Models, backends and drafts of one process do not see each other, in whatever order they come."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.oracles import DraftOracle, Oracle
from helpers.plain_host import TOKENS, Causal
from helpers.theorem import PROMPTS
from safetensors.torch import load_file

import mtpc
from mtpc.errors import MtpcError, UnsupportedModelError
from mtpc.integrations.draft import DraftOptions, TracedDraft

Check = Callable[[], None]


@pytest.fixture
def damaged(checkpoint: Callable[..., Path], tmp_path: Path) -> Path:
    """A checkpoint whose config announces another width than its tensors have."""
    directory = tmp_path / "damaged"
    shutil.copytree(checkpoint("mimo"), directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"hidden_size": 48}))
    return directory


@pytest.mark.parametrize("is_reversed", [pytest.param(False, marks=pytest.mark.slow), True])
def test_one_process_has_several_models(
    is_reversed: bool,
    damaged: Path,
    warm: Callable[..., mtpc.SpecModel],
    checkpoint: Callable[..., Path],
    oracle: Callable[..., Oracle],
) -> None:
    """A tape, two drafts of a host, and an eager model of other options; before each, a load that
    fails. After each, all that are there do what they did."""

    def text(spec: mtpc.SpecModel, family: str) -> Check:
        def check() -> None:
            for prompt in PROMPTS[3:5]:
                (found,) = spec.generate([prompt], max_new_tokens=6)
                assert found == oracle(family).generate(prompt, 6)

        return check

    def tape() -> Check:
        return text(warm("mimo"), "mimo")

    def eager() -> Check:
        sizes = dict(max_len=48, page_size=8, prefill_chunk=16, batch_buckets=(1,))
        spec = mtpc.compile(
            checkpoint("glm4_moe"), spec_tokens=0, backend="eager", dtype="float64", **sizes
        )
        return text(spec, "glm4_moe")

    def draft(family: str) -> Check:
        directory, reference = checkpoint(family, "random"), DraftOracle(oracle(family, "random"))
        with pytest.raises(UnsupportedModelError, match="MTP layer 7 was asked for"):
            TracedDraft(directory, Causal, DraftOptions(dtype=torch.float64, index=7))
        draft = TracedDraft(directory, Causal, DraftOptions(dtype=torch.float64))
        draft.load_weights(load_file(directory / "model.safetensors").items())
        draft.embedding = reference.oracle.model.get_input_embeddings()

        @torch.no_grad()
        def check() -> None:
            ids, features = TOKENS[1:8], reference.page.first(TOKENS[:7])
            found = draft(torch.tensor(ids), torch.arange(7), features)
            expected = reference.page.run(0, ids, features)
            torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)

        return check

    makers = [tape, lambda: draft("deepseek_v3"), eager, lambda: draft("mimo")]
    checks: list[Check] = []
    for make in reversed(makers) if is_reversed else makers:
        with pytest.raises(MtpcError, match=r"hidden_size|shape"):
            mtpc.compile(damaged, backend="eager", spec_tokens=1)
        checks.append(make())
        for check in checks:
            check()

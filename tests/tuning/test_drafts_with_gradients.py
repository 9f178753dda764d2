"""What training compares with the target are the drafts of decoding: logits against the oracle."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.families import EVERY_FAMILY
from helpers.oracles import DraftOracle
from helpers.theorem import PROMPTS
from helpers.told import told
from torch.nn import functional

from mtpc.errors import UnsupportedModelError
from mtpc.tuning.chain import Teacher, TrainedModel
from mtpc.weights.checkpoint import Checkpoint

HERE = ("mimo", "step3p5@3", "qwen3_next", "glm4_moe")
UNSUPPORTED = ("deepseek_v32", "glm_moe_dsa", "deepseek_v4", "qwen4_exp")


@pytest.mark.parametrize(
    "family",
    [
        *HERE,
        *(
            pytest.param(family, marks=pytest.mark.slow)
            for family in EVERY_FAMILY
            if family not in (*HERE, *UNSUPPORTED)
        ),
    ],
)
def test_draft_logits_equal_the_oracle(
    family: str, checkpoint: Callable[..., Path], oracle: Callable[..., Any]
) -> None:
    """K = 4, beyond the layers of each; two texts in a batch, each with its oracle's drafts."""
    files = Checkpoint(checkpoint(family))
    teacher = Teacher(files, dtype="float64")
    model = TrainedModel(files, 4, teacher)
    page = DraftOracle(oracle(family)).page
    texts = [PROMPTS[9][:13], PROMPTS[10][:13]]
    wanted = [page.drafts(text, 4) for text in texts]
    rows = [
        [*text, *(int(logits.argmax()) for logits in found)]
        for text, found in zip(texts, wanted, strict=True)
    ]
    ids = torch.tensor(rows)
    states = model.draft_states(ids, told(teacher.model, ids).fed)
    for depth, state in enumerate(states):
        assert state.shape[:2] == (2, ids.shape[1] - 1 - depth)
        logits = functional.linear(*model.head_rows(depth, state))[:, 11]
        expected = torch.stack([found[depth] for found in wanted])
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("family", UNSUPPORTED)
def test_families_without_gradients(family: str, checkpoint: Callable[..., Path]) -> None:
    files = Checkpoint(checkpoint(family, "random"))
    with pytest.raises(UnsupportedModelError, match=f"no gradient for {family}: its MTP layer"):
        TrainedModel(files, 3, Teacher(files))

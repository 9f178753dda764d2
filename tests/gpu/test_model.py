"""The roofline model: launches are those that steps have, and bytes what kernels load.

Needs Triton, whose kernels it counts; `tests/run_triton.sh` runs it.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from helpers.triton_here import INTERPRETS, NO_INTERPRETER

if not INTERPRETS:
    pytest.skip(NO_INTERPRETER, allow_module_level=True)

from helpers.shipped_launches import gqa
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks import gpu_model
from benchmarks.gpu.traffic import Work, moved_bytes
from mtpc.backends.triton_kernels.plans import plan

pytestmark = pytest.mark.triton


def test_attention_reads_the_context_once_for_each_tile_of_rows() -> None:
    """However long its tables are; five rows of a group of 16 are two tiles."""
    position = 8 * 128 * 2
    for reqs, rows, heads, tiles in ((2, 4, 32, 1), (3, 5, 128, 2)):
        with FakeTensorMode():
            attend, _ = gqa(reqs, rows, (heads, 8), (128, 128))
        found = moved_bytes(attend, Work(reqs, 1000))
        assert found["k_ptr"] == found["v_ptr"] == tiles * reqs * 1000 * position
        assert found["table_ptr"] == reqs * 63 * 4


@pytest.mark.parametrize(("tokens", "times"), [(1, 8), (64, None), (256, None)])
def test_experts_are_read_for_each_tile_that_chose_them(tokens: int, times: int | None) -> None:
    """A row chooses eight; of four tiles of 64, each reads most of 256 experts."""
    with FakeTensorMode():
        x, ids = torch.empty(tokens, 512), torch.empty(tokens, 8, dtype=torch.int64)
        weights = torch.empty(256, 256, 512), torch.empty(256, 512, 128)
        up, down, _ = plan("experts", x, *weights, ids, ids.float(), 0.0, False)[0]
    each = 256 * 512 * 4
    found = moved_bytes(up, Work(tokens, 1))["weight_ptr"]
    hit = 256 * (1 - (1 - 8 / 256) ** min(tokens, 64))
    assert found == pytest.approx(each * hit * -(-tokens // 64))
    assert times is None or found == pytest.approx(times * each)
    assert moved_bytes(down, Work(tokens, 1))["hidden_ptr"] > down.arguments["hidden_ptr"].nbytes


@pytest.mark.slow
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "model.json"
    words = ["--cases", "tiny-mla-moe:2:1:sampled", "--context", "128", "--out", str(out)]
    assert gpu_model.main(words) == 0
    record = json.loads(out.read_text())
    whole, *slowest = record["rows"]
    assert whole["operator"] == "whole step"
    assert len(slowest) == gpu_model.SLOWEST
    assert whole["seconds"] > whole["floor"] > 0
    assert whole["moved"] >= whole["least"]
    gaps = [row["seconds"] - row["floor"] for row in slowest]
    assert gaps == sorted(gaps, reverse=True)
    assert len(gpu_model.table(record).cells) == 1 + gpu_model.SLOWEST
    with pytest.raises(SystemExit):
        gpu_model.main(["--cases", "no-such-shape:1:1"])
    assert "no-such-shape" in capsys.readouterr().err

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


def test_batch_invariant_linears_are_read_once_for_each_tile() -> None:
    """65 rows are two tiles of rows, 6,144 features 192 tiles of 32."""
    with FakeTensorMode():
        x, weight = torch.empty(65, 64).bfloat16(), torch.empty(6144, 64).bfloat16()
        (launch,), _ = plan("batch_invariant_linear", x, weight, None)
    found = moved_bytes(launch, Work(65, 1))
    assert found["weight_ptr"] == 2 * weight.nbytes
    assert found["x_ptr"] == 192 * x.nbytes


@pytest.mark.parametrize(("tokens", "tile"), [(1, 16), (64, 16), (256, 16), (1024, 32)])
def test_experts_are_read_for_each_tile_of_rows_that_chose_them(tokens: int, tile: int) -> None:
    """A row chooses eight of 256. So 1,024 rows have about 32 for each expert, 256 rows eight."""
    with FakeTensorMode():
        x, ids = torch.empty(tokens, 512), torch.empty(tokens, 8, dtype=torch.int64)
        weights = torch.empty(256, 256, 512), torch.empty(256, 512, 128)
        sort, up, down, _ = plan("experts", x, *weights, ids, ids.float(), 0.0, False)[0]
    assert up.constants["BLOCK_T"] == tile
    each, work = 256 * 512 * 4, Work(tokens, 1)
    generator = torch.Generator().manual_seed(0)
    choices = torch.rand(200, tokens, 256, generator=generator).argsort(2)[..., :8]
    rows = torch.stack([torch.bincount(one.flatten(), minlength=256) for one in choices])
    tiles = float((-(-rows // tile)).sum(1).float().mean())
    assert moved_bytes(up, work)["weight_ptr"] == pytest.approx(each * tiles, rel=0.01)
    assert tokens > 1 or moved_bytes(up, work)["weight_ptr"] == pytest.approx(8 * each)
    assert moved_bytes(down, work)["hidden_ptr"] > down.arguments["hidden_ptr"].nbytes
    assert moved_bytes(sort, work)["ids_ptr"] == 2 * 257 * ids.nbytes


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

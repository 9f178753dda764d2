"""The benchmark of attention to slots: its calls, and a run at a tiny size. Never a time."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import torch
from helpers.batches import close

from benchmarks import slots


def test_kernel_and_reference_compute_the_same() -> None:
    torch.manual_seed(0)
    slots.load_kernels()
    cases = list(slots.calls(Namespace(heads=3, width=16, length=2000, rows=[1, 4, 9])))
    assert len(cases) == 3 * len(slots.LAYERS)
    assert [keys for *_, keys, _ in cases][2::3] == [128, 128 + 15, 128 + 15, 128 + 500]
    for *_, given in cases:
        found = torch.ops.mtpc_cpu.slot_attention(*given)
        close(found, torch.ops.mtpc.slot_attention(*given))


def test_a_row_for_each_call(tmp_path: Path) -> None:
    sizes = ["--heads", "2", "--width", "16", "--length", "300", "--rows", "1", "5"]
    assert slots.main([*sizes, "--seconds", "0", "--out", str(tmp_path / "s.json")]) == 0
    record = json.loads((tmp_path / "s.json").read_text())
    assert [row["rows"] for row in record["rows"]] == [1, 5] * 4
    assert slots.cells([slots.Row("HCA", 8192, 4, 143, 10.0, 0.25)]) == [
        ["HCA", "8,192", "4", "143", "10.00", "0.25", "40x"]
    ]

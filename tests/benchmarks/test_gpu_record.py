"""benchmarks.gpu_record: rows of CSV files as a record, its table, and its picture."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import gpu_record, plot
from benchmarks.gpu.rows import FUSED, Row, RowFile


def test_a_record_of_two_runs(tmp_path: Path) -> None:
    step = {"ms_device": 2.0, "step_bytes": 3_000_000_000, "copy_gb_s": 3000.0}
    runs = {
        "second": [
            Row("ops", "a GPU", "accept", "int64", 3, 4, passed=True),
            Row("ops", "a GPU", "sample", "int64", 3, 4, passed=False, note="differs"),
            Row("speed", "a GPU", "glm4-8b", FUSED, 0, 1, of_bandwidth=0.5, **step),
        ],
        "third": [Row("time", "a GPU", "batch 4, 1024 tokens", "paged_attention", 0, 8, **step)],
    }
    runs["third"][0].of_bandwidth = 0.5
    for name, rows in runs.items():
        file = RowFile(tmp_path / f"{name}.csv")
        for row in rows:
            file.add(row)
    out, picture = tmp_path / "gpu.json", tmp_path / "gpu.png"
    files = [str(tmp_path / f"{name}.csv") for name in runs]
    assert gpu_record.main([*files, "--out", str(out)]) == 0
    record = json.loads(out.read_text())
    table = gpu_record.table(record)
    assert record["machine"]["gpu"] == "a GPU"
    assert [cells[:3] for cells in table.cells] == [
        ["second", "speed", "glm4-8b"],
        ["third", "time", "batch 4, 1024 tokens"],
    ]
    assert "ops: 1 of 2 cases passed: accept, sample" in table.notes
    assert plot.main([str(out), str(picture)]) == 0
    assert picture.read_bytes()[:4] == b"\x89PNG"

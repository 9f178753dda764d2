"""What `benchmarks.products` writes."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import products
from mtpc.store.machine import cpu_flags


def test_products_are_counted(tmp_path: Path) -> None:
    """None is faster than the instruction, where the processor has it."""
    out = tmp_path / "products.json"
    arguments = ["--kinds", "iq4", "--rows", "1", "2", "--repeats", "1", "--out", str(out)]
    assert products.main(arguments) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [(row["kind"], row["rows"]) for row in rows] == [("iq4", 1), ("iq4", 2)]
    for row in rows:
        counted = 4 * row["rows"] * (9728 * 896 + 896 * 4864) / row["seconds"]
        assert row["products"] == counted
        if "avx512_vnni" in cpu_flags():
            assert row["products"] < row["peak"]
        else:
            assert row["peak"] is None

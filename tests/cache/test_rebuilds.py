"""Which steps are built anew after one option has changed; docs/cache.md has the table.

    pytest -n 0 tests/cache/test_rebuilds.py -s      # prints it

Nothing is built here: a step is there if its key is among those of the first program, and its
checkpoint is one whose steps leave all sizes open (test_other_sizes.py runs such steps).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from helpers.places import ROOT

import mtpc
from mtpc.cli.demo import demo_checkpoint
from mtpc.cli.main import main
from mtpc.config import CompileOptions
from mtpc.errors import RequestError
from mtpc.layout import StepKey, graph_keys
from mtpc.program.open_cache import open_cache, plan_model
from mtpc.store.key import digest

HEADING = "## What is built again"
CHANGES: list[tuple[str, dict[str, Any] | Sequence[str]]] = [
    ("`max_len=256`", {"max_len": 256}),
    ("`num_pages=100`", {"num_pages": 100}),
    ("`batch_buckets=(1,)`", {"batch_buckets": (1,)}),
    ("`batch_buckets=(1, 2, 4, 6, 8)`", {"batch_buckets": (1, 2, 4, 6, 8)}),
    ("`batch_buckets=(1, 2, 4, 8, 16)`", {"batch_buckets": (1, 2, 4, 8, 16)}),
    ("the same, with `prefill_rows=8`", {"batch_buckets": (1, 2, 4, 8, 16), "prefill_rows": 8}),
    ("`sampling=False`", {"sampling": False}),
    ("`mtpc run`", ["run"]),
    ("`mtpc run --temperature 0.7`", ["run", "--temperature", "0.7"]),
    ("`mtpc run` with three prompts", ["run", "-p", "a", "-p", "b", "-p", "c"]),
    ("`mtpc serve --spec-tokens 3`", ["serve", "--port", "0", "--spec-tokens", "3"]),
    ("`mtpc serve`, whose K goes by load", ["serve", "--port", "0"]),
    ("`prefill_chunk=256`", {"prefill_chunk": 256}),
    ("`spec_tokens=2`", {"spec_tokens": 2}),
    ("`page_size=32`", {"page_size": 32}),
    ('`kv_cache_dtype="int8"`', {"kv_cache_dtype": "int8"}),
]


class _Caught(RequestError):
    """Ends a command where it would compile."""


def options_of(command: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a command passes to `mtpc.compile`."""
    caught: dict[str, Any] = {}

    def compile(checkpoint: Path, progress: Any, **options: Any) -> None:
        caught.update({name: each for name, each in options.items() if name != "reads_text"})
        raise _Caught("caught")

    monkeypatch.setattr(mtpc, "compile", compile)
    assert main([*command]) == 2
    assert caught
    return caught


def steps_of(**changes: Any) -> dict[StepKey, str]:
    """Each step of the demo model's program, and the name of its entry."""
    source, plan = plan_model(demo_checkpoint(), CompileOptions.parse(changes))
    cache = open_cache(source, plan, print)
    assert cache is not None
    return {key: digest(cache.fields(key, part)) for key, part in graph_keys(plan, "fused")}


def said(steps: Sequence[StepKey]) -> str:
    """In words: `decode of 1, 2 at K = 3; prefill`."""
    buckets = dict[str, list[int]]()
    for tier, group in groupby(sorted(steps), lambda key: (key.phase, key.spec_tokens)):
        rows = ", ".join(str(key.bucket.num_reqs) for key in group)
        buckets.setdefault(rows if tier[0] == "decode" else "", []).append(tier[1])
    words = [
        f"decode of {rows} at K = {', '.join(map(str, tiers))}"
        for rows, tiers in buckets.items()
        if rows
    ]
    return "; ".join([*words, *(["prefill"] if "" in buckets else [])]) or "none"


def test_the_table_of_the_docs(monkeypatch: pytest.MonkeyPatch) -> None:
    built = steps_of()
    rows = []
    for name, change in CHANGES:
        changes = change if isinstance(change, dict) else options_of(change, monkeypatch)
        wanted = steps_of(**changes)
        missing = [key for key, entry in wanted.items() if entry not in built.values()]
        rows.append((name, f"{len(missing)} of {len(wanted)}", said(missing)))
    table = [f"| {name} | {count} | {steps} |" for name, count, steps in rows]
    print("", *table, sep="\n")
    text = (ROOT / "docs" / "cache.md").read_text()
    lines = text.partition(HEADING)[2].partition("## ")[0].splitlines()
    shown = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line[:1] == "|"]
    assert [tuple(row) for row in shown[2:]] == rows

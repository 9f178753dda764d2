"""What `benchmarks.compile` builds from and writes; and the memory that building takes."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from helpers.compiled import give_kernels

from benchmarks import compile as benchmark
from benchmarks.compile import LARGE
from benchmarks.harness.large import write_hollow
from benchmarks.harness.models import MOE_SHAPES, SHAPES, Shape, write_checkpoint
from benchmarks.harness.tables import to_markdown
from mtpc.weights.checkpoint import Checkpoint

GIB = 2**30


@pytest.mark.parametrize("family", ["mimo", "glm4_moe"])
def test_a_hollow_checkpoint_has_the_headers_of_a_whole_one(family: str, tmp_path: Path) -> None:
    """Experts one by one, as they are released; and hardly a byte on the disk."""
    shape = (SHAPES if family == "mimo" else MOE_SHAPES)["tiny"]
    write_hollow(tmp_path / "hollow", family, shape)
    write_checkpoint(tmp_path / "whole", family, shape, accepting=False)
    hollow, whole = Checkpoint(tmp_path / "hollow"), Checkpoint(tmp_path / "whole")
    assert _headers(hollow) == _headers(whole)
    unlike = {"transformers_version", "dtype", "torch_dtype"}
    for name in hollow.config.keys() & whole.config.keys() - unlike:
        assert hollow.config[name] == whole.config[name], name
    (file,) = (tmp_path / "hollow").glob("*.safetensors")
    assert file.stat().st_size > whole.nbytes // 2
    assert 512 * file.stat().st_blocks < 64 * 2**10


def _headers(checkpoint: Checkpoint) -> dict[str, object]:
    return {name: (t.dtype, t.shape) for name, t in checkpoint.tensors.items()}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("family", "shape", "least"),
    [
        ("mimo", Shape(2048, 20, 8192, 65536, 16, 4), 2 * 10**9),
        (*LARGE["glm4_moe 30b-a3b"], 60 * 10**9),
    ],
    ids=["2 GB", "30b-a3b"],
)
def test_building_holds_no_weight(family: str, shape: Shape, least: int, tmp_path: Path) -> None:
    """The resident memory of all processes of a build, for models that are larger than it."""
    write_hollow(tmp_path / "model", family, shape)
    assert Checkpoint(tmp_path / "model").nbytes > least
    give_kernels(tmp_path / "kernels")
    options = {"spec_tokens": 1, "batch_buckets": [1], "max_len": 512}
    case = dict(what="build", options=options)
    row = benchmark.build(tmp_path / "model", case, tmp_path / "cache", tmp_path / "kernels")
    assert row["steps"] == 2
    assert 0.2 * GIB < row["peak_bytes"] < 1.9 * GIB, "of two processes that build"


@pytest.mark.slow
def test_the_benchmark_writes_a_record(tmp_path: Path) -> None:
    out = tmp_path / "out" / "compile.json"
    (tmp_path / "work").mkdir(mode=0o755)
    give_kernels(tmp_path / "work" / "kernels")
    words = ["--shape", "tiny", "--layers", "2", "3", "--options", "1", "--large"]
    more = ["--max-len", "64", "--buckets", "1", "--workdir", str(tmp_path / "work")]
    assert benchmark.main([*words, *more, "--out", str(out)]) == 0
    record = json.loads(out.read_text())
    rows = record["rows"]
    assert [(row["what"], row["layers"]) for row in rows] == [
        *(("kernels", 0), ("build", 2), ("build", 3), ("build", 2), ("start", 2))
    ]
    for row in rows[1:4]:
        assert row["steps"] == 2
        assert 0 < row["cache_bytes"] < 10**7
        assert min(row["stages"].values()) > 0
        assert row["seconds"] * row["processes"] > sum(row["stages"].values())
    assert all(row["peak_bytes"] > 2**27 for row in rows[1:])
    text = to_markdown(record, benchmark.table(record))
    assert re.search(r"a layer more costs -?\d+\.\d\d s, from 2 to 3 layers", text)
    assert "| spec_tokens 0 |" in text

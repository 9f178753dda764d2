"""benchmarks/gpu.py without a GPU: every step of it on the null device, never a time."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu_engines import Fused
from benchmarks.gpu_machine import NullMachine
from benchmarks.gpu_models import build, weigh
from benchmarks.gpu_pieces import cut_step
from benchmarks.gpu_rows import APART, COMPILED, FUSED, PLAIN, USE_MTP, Row, RowFile, findings
from benchmarks.gpu_speed import Case, cases
from mtpc.config import CompileOptions
from mtpc.models.load import load

PROMPTS = [[5, 9, 14, 3, 7, 22, 31], [41, 8], [17, 90, 33, 12, 5]]


def _read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_speed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every engine does the same work; a file that has all rows gets no more of them."""
    path = tmp_path / "gpu.csv"
    words = ["--dry-run", "--parts", "speed", "--shapes", "tiny-glm4", "--spec-tokens", "1"]
    words += ["--batches", "1", "--csv", str(path), "--prompt-tokens", "8"]
    assert gpu.main(words) == 0
    rows = {row["engine"]: row for row in _read(path)}
    assert list(rows) == [FUSED, APART, COMPILED, USE_MTP]
    assert all(float(row["acceptance"]) == 1 for row in rows.values()), "weights accept"
    assert [rows[engine]["launches"] for engine in (FUSED, APART, COMPILED)] == ["1", "2", "2"]
    assert int(rows[FUSED]["kernels"]) > 100
    assert "no time means anything" in capsys.readouterr().out
    before = path.read_text()
    assert gpu.main([*words, "--resume"]) == 0
    assert path.read_text() == before


def test_profile(tmp_path: Path) -> None:
    """Passes leave fewer kernels, fused norms the fewest; and each is timed."""
    path = tmp_path / "gpu.csv"
    words = ["--dry-run", "--parts", "profile", "--shapes", "tiny-glm4", "--spec-tokens", "1"]
    words += ["--batches", "1", "--csv", str(path), "--prompt-tokens", "8", "--new-tokens", "8"]
    assert gpu.main(words) == 0
    rows = _read(path)
    kernels = [int(row["kernels"]) for row in rows]
    assert kernels[2] < kernels[0] < kernels[1]
    assert rows[2]["engine"] == f"{FUSED}, norms fused by us"
    assert all(float(row["ms_device"]) > 0 and float(row["copy_gb_s"]) > 0 for row in rows)


def test_many_requests_that_accept_all(tmp_path: Path) -> None:
    """The first are not done before the last one's prompt is: steps of the whole batch are left."""
    path = tmp_path / "gpu.csv"
    words = ["--dry-run", "--parts", "speed", "--shapes", "tiny-glm4", "--spec-tokens", "4"]
    words += ["--batches", "6", "--csv", str(path), "--prompt-tokens", "8", "--new-tokens", "16"]
    assert gpu.main(words) == 0
    assert {row["engine"] for row in _read(path)} == {FUSED, APART, COMPILED}


@pytest.mark.slow
def test_the_whole_dry_run(tmp_path: Path) -> None:
    path = tmp_path / "gpu.csv"
    words = ["--dry-run", "--csv", str(path), "--spec-tokens", "0", "4", "--deadline", "3600"]
    assert gpu.main(words) == 0
    rows = _read(path)
    gates = [row for row in rows if row["part"] == "gate"]
    assert [row["passed"] for row in gates] == ["True"] * len(gpu.FAMILIES)
    assert {row["engine"] for row in rows if row["part"] == "speed"} >= {FUSED, APART, PLAIN}
    assert {row["launches"] for row in rows if row["engine"] == APART} == {"1", "5"}
    profiles = [row["shape"] for row in rows if row["part"] == "profile"]
    assert len(profiles) == 3 * len(set(profiles)) > 0


def test_what_the_deadline_leaves_out_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu.Session, "is_late", lambda self, share=1.0: True)
    assert gpu.main(["--dry-run", "--families", "mimo", "--shapes", "tiny-glm4"]) == 0
    assert "gate mimo; all of tiny-glm4; see --resume" in " ".join(capsys.readouterr().out.split())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main([]) == 2
    assert "--dry-run goes through every step" in capsys.readouterr().err


@pytest.mark.parametrize(
    "family",
    ["glm4_moe", *(pytest.param(f, marks=pytest.mark.slow) for f in ("step3p7@3", "mimo"))],
)
def test_pieces_do_what_the_whole_does(family: str, checkpoint: Callable[..., Path]) -> None:
    """Partial acceptance, joins and leaves; the same bits from one graph, from many, from none."""
    machine, loaded = NullMachine(), load(checkpoint(family), "float64", True)
    options = CompileOptions(spec_tokens=3, batch_buckets=(2,), max_len=64, prefill_chunk=8)
    fused = Fused(machine, loaded, options)
    graph = fused.step.graph
    assert graph is not None
    assert len(cut_step(graph)) == 3 + 1, "the target's pass, and each draft's"
    pieces = fused.pieces()
    graphs = machine.graphs()
    replays = (None, pieces.run, pieces.capture(graphs))
    decoders = [fused.decoder(replay) for replay in replays]
    texts = [decoder.model.generate(PROMPTS, 14) for decoder, _ in decoders]
    assert texts[0] == texts[1] == texts[2]
    accepted = [decoder.model.stats.accepted for decoder, _ in decoders]
    assert accepted[0] == accepted[1] == accepted[2]
    assert 0 < sum(accepted[0]) < sum(decoders[0][0].model.stats.drafted)
    steps = decoders[2][0].model.stats.decode_steps
    assert [tape.replays for tape in graphs.tapes] == [steps] * 4  # type: ignore[attr-defined]
    assert all(len(timed.launch_s) == len(timed.clock.read()) == steps for _, timed in decoders)


def test_bytes_of_a_step() -> None:
    """By hand, of a dense model: everything but the embedding; of experts those chosen."""
    loaded, model = build("tiny-mla-moe", "cpu")
    nbytes = {name: p.nbytes for name, p in model.named_parameters()}
    routed = sum(n for name, n in nbytes.items() if ".mlp.experts." in name)
    head = nbytes["lm_head.weight"]
    rest = sum(nbytes.values()) - head - nbytes["model.embed_tokens.weight"]
    assert routed > 0
    assert weigh(loaded, 100).target == rest
    assert weigh(loaded, 1).target == rest - routed // 2, "two of four experts"
    sizes = weigh(loaded, 100)
    assert sizes.step(2) == rest + head + 2 * (sizes.draft + head)


def test_findings_and_order() -> None:
    """By hand: 1 GB a draft at 1000 GB/s is 1 ms; two more drafts took 2.6 ms."""
    rows = []
    for k, ms in ((1, 2.0), (3, 4.6)):
        row = Row("speed", "d", "s", FUSED, k, 1, ms_step=ms, ms_device=ms, launches=1)
        row.host_us, row.step_bytes, row.copy_gb_s, row.of_bandwidth = 40.0, k * 10**9, 1000.0, 0.8
        rows.append(row)
    rows.append(Row("speed", "d", "s", APART, 3, 1, ms_step=5.75, ms_device=5.0))
    assert list(findings(rows)) == [
        "graph launches per iteration: [1] (goal 1)",
        "host time per iteration: at most 40 us (goal 50 us)",
        "s, K=1, batch 1: 80% of the copy bandwidth (goal 75%)",
        "s, K=3, batch 1: 80% of the copy bandwidth (goal 75%)",
        "s, K=3, batch 1: 1.25x the speed of a graph a piece (goal 1.15x at small batch)",
        "s, batch 1: a draft costs 1.30x its bytes (goal 1.3x)",
    ]
    assert list(findings([])) == []
    order = [case.spec_tokens for case in cases((0, 1, 2, 3, 4), (1,))]
    assert order == [0, 4, 1, 2, 3]
    assert cases((3,), (1, 4)) == [Case(3, 1), Case(3, 4)]


def test_rows_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    row = Row("gate", "d", "mimo", "x", 3, 2, passed=False, note="other, drafts")
    RowFile(path).add(row)
    again = RowFile(path, resume=True)
    assert row.case in again.there
    again.add(Row("gate", "d", "mimo", "x", 2, 2))
    assert [r["spec_tokens"] for r in _read(path)] == ["3", "2"]
    assert _read(path)[0]["note"] == "other, drafts"
    RowFile(path)
    assert _read(path) == []

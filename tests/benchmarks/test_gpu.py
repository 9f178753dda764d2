"""benchmarks.gpu without a GPU: every step of it on the null device, never a time."""

from __future__ import annotations

import ast
import csv
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import gpu_decode
import pytest
import torch
from helpers.places import ROOT
from helpers.plans import plan_of
from torch._dynamo.utils import counters

import mtpc
from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu.engines import Fused
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.models import build, weigh
from benchmarks.gpu.op_inputs import CALLS
from benchmarks.gpu.ops import difference
from benchmarks.gpu.pieces import cut_step
from benchmarks.gpu.profile import OperatorProfiler, gap_rows, kernel_rows, launches_in
from benchmarks.gpu.rows import (
    APART,
    COMPILED,
    ENGINES,
    FUSED,
    LATE,
    Row,
    RowFile,
    findings,
)
from benchmarks.gpu.schedule import Schedule
from benchmarks.gpu.speed import PROFILES, Case, Plan, tasks
from mtpc.backends.cuda import compile_flat
from mtpc.cli.demo import BENCH_PROMPTS, demo_checkpoint
from mtpc.models.load import load

PROMPTS = [[5, 9, 14, 3, 7, 22, 31], [41, 8], [17, 90, 33, 12, 5]]


@pytest.mark.slow
def test_it_starts_where_pytest_adds_no_path() -> None:
    """The gates train tests' tiny models: `python -m benchmarks.gpu` finds them by itself."""
    line = [sys.executable, "-m", "benchmarks.gpu", "--help"]
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    options = subprocess.run(line, cwd=ROOT, env=bare, check=True, capture_output=True, text=True)
    assert "--dry-run" in options.stdout


def _read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_speed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every engine does the same work; a file that has all rows gets no more of them."""
    path = tmp_path / "gpu.csv"
    words = ["--dry-run", "--parts", "speed", "profile", "--shapes", "tiny-glm4"]
    words += ["--spec-tokens", "1", "--batches", "1", "--csv", str(path), "--prompt-tokens", "8"]
    assert gpu.main(words) == 0
    found = _read(path)
    rows = {row["engine"]: row for row in found if row["part"] == "speed"}
    assert list(rows) == [*ENGINES]
    assert all(float(row["acceptance"]) == 1 for row in rows.values()), "weights accept"
    assert [rows[engine]["launches"] for engine in (FUSED, APART, COMPILED)] == ["1", "2", "2"]
    assert rows[COMPILED]["note"].startswith("torch.compile of the same modules piecewise: our")
    whole, *gaps = (row for row in found if row["part"] in ("profile", "gap"))
    kernels = [int(row["kernels"]) for row in found if row["part"] == "kernel"]
    assert int(whole["kernels"]) == sum(kernels) > 100
    assert len(gaps) == 3 + len(PROFILES) - 1, "three, then the other profiles"
    assert float(whole["floor_ms"]) + float(whole["gap_ms"]) == pytest.approx(
        float(whole["ms_device"]), rel=1e-4
    )
    assert "no time means anything" in capsys.readouterr().out
    before = path.read_text()
    assert gpu.main([*words, "--resume"]) == 0
    assert path.read_text() == before


@pytest.mark.slow
def test_profile(tmp_path: Path) -> None:
    """Passes leave fewer kernels, fused norms, too; and each is timed."""
    path = tmp_path / "gpu.csv"
    words = ["--dry-run", "--parts", "profile", "--shapes", "tiny-glm4", "--spec-tokens", "1"]
    words += ["--batches", "1", "--csv", str(path), "--prompt-tokens", "8", "--new-tokens", "8"]
    assert gpu.main(words) == 0
    rows = [row for row in _read(path) if row["part"] == "profile"]
    kernels = [int(row["kernels"]) for row in rows]
    assert kernels[0] == min(kernels) < min(kernels[1:3])  # Of those without passes.
    assert rows[2]["engine"] == f"{FUSED}, norms fused by Inductor"
    assert all(float(row["ms_device"]) > 0 and float(row["copy_gb_s"]) > 0 for row in rows)


@pytest.mark.slow
def test_many_requests_that_accept_all(tmp_path: Path) -> None:
    """The first are not done before the last one's prompt is: steps of the whole batch are left."""
    path = tmp_path / "gpu.csv"
    words = ["--dry-run", "--parts", "speed", "--shapes", "tiny-glm4", "--spec-tokens", "4"]
    words += ["--batches", "6", "--csv", str(path), "--prompt-tokens", "8", "--new-tokens", "16"]
    assert gpu.main(words) == 0
    assert {row["engine"] for row in _read(path)} == {*ENGINES}


@pytest.mark.slow
def test_the_whole_dry_run(tmp_path: Path) -> None:
    path = tmp_path / "gpu.csv"
    words = ["--dry-run", "--csv", str(path), "--spec-tokens", "0", "4", "--deadline", "3600"]
    words += ["--families", "all"]
    assert gpu.main(words) == 0
    rows = _read(path)
    gates = [row for row in rows if row["part"] == "gate"]
    assert [row["passed"] for row in gates] == ["True"] * len(gpu.FAMILIES)
    assert {row["passed"] for row in rows if row["part"] in ("ops", "sampling")} == {"True"}
    assert [row["shape"] for row in rows if row["part"] == "aot"] == ["deepseek_v3"]
    assert {row["engine"] for row in rows if row["part"] == "speed"} == {*ENGINES}
    assert {row["launches"] for row in rows if row["engine"] == APART} == {"1", "5"}
    profiles = [row["shape"] for row in rows if row["part"] == "profile"]
    assert len(profiles) == 3 * len(set(profiles)) > 0


def test_what_the_deadline_leaves_out_is_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a case that raises, too, what it says; and that it is no success."""
    monkeypatch.setattr(gpu, "Schedule", partial(Schedule, clock=itertools.count(0, 60).__next__))
    monkeypatch.setattr(gpu, "check_family", _broken)
    words = ["--dry-run", "--parts", "gate", "sampling", "--families", "mimo", "step3p7"]
    assert gpu.main([*words, "--deadline", "120"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "FAILED ValueError: a broken gate" in said
    assert "left out for want of time: gate step3p7" in said
    assert "; see --resume" in said


def _broken(*_: object) -> Row:
    raise ValueError("a broken gate")


def test_nothing_is_begun_that_would_end_late() -> None:
    now = [0.0]
    schedule = Schedule(100, clock=lambda: now[0])

    def work(kind: str, seconds: float) -> bool:
        begins = schedule.fits(kind, f"{kind} at {now[0]:g}")
        with schedule.timed(kind) if begins else nullcontext():
            now[0] += seconds if begins else 0
        return begins

    assert work("small", 5)
    assert work("large", 40), "nothing is known of it but what others took"
    assert work("large", 30)
    assert not work("large", 1), "at 75, with 40 to come"
    assert not work("new", 1), "as long as the longest, as far as is known"
    assert work("small", 25)
    assert not work("small", 1), "25 by now"
    assert schedule.fits("other", "in half", 0.5) is False
    assert schedule.left_out == ["large at 75", "new at 75", "small at 100", "in half"]


def test_errors_are_rows_and_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    plan = Plan(4, 4, 64, None, tmp_path)
    session = gpu.Session(Machine(), Schedule(1e9), RowFile(path), lambda line: None, plan)
    rows = [Row("gate", "d", name, "x", 3, 2) for name in ("a", "b")]

    def work(wanted: Sequence[Row]) -> Iterator[Row]:
        yield wanted[0]
        raise RuntimeError("no kernel image")

    session.attempt("gate", rows, work)
    assert [row["note"] for row in _read(path)] == ["", "RuntimeError: no kernel image"]
    session.file = RowFile(path, resume=True)
    assert [row["shape"] for row in _read(path)] == ["a"], "what failed is dropped"
    tried: list[str] = []
    session.attempt("gate", rows, lambda wanted: (tried.append(r.shape) or r for r in wanted))
    assert tried == ["b"]


def test_each_op_with_a_kernel_has_calls() -> None:
    """The names are those in the sources, which cannot be imported without Triton. Those of
    exchanges need several GPUs (`tests/gpu/test_two_gpus.py`)."""
    files = (Path(mtpc.__file__).parent / "backends/triton_kernels/ops").glob("*.py")
    found = {
        node.name
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef)
        and any(ast.unparse(each).startswith("operator(") for each in node.decorator_list)
    }
    assert found - {"gather_ranks", "sum_ranks"} == set(CALLS)


def test_differences() -> None:
    """In tolerances: 0.016 for bfloat16, of 1 + |wanted|; a NaN where none should be is no pass."""
    one = torch.ones(2, dtype=torch.bfloat16)
    nan = torch.tensor([1, torch.nan], dtype=torch.bfloat16)
    assert difference([one], [one], torch.bfloat16) == 0
    assert difference([one * 1.03125], [one], torch.bfloat16) == pytest.approx(0.03125 / 2 / 0.016)
    assert difference([one.float() * 1.03125], [one.float()], torch.float32) > 100
    assert difference([nan], [one], torch.bfloat16) == difference([one], [nan], torch.bfloat16)
    assert difference([nan], [one], torch.bfloat16) == float("inf")
    assert difference([nan], [nan], torch.bfloat16) == 0
    integers = torch.tensor([3, 4])
    assert difference([integers + 1], [integers], torch.bfloat16) == float("inf")


def test_gaps() -> None:
    """By hand: 2 GB of matrices at 1000 GB/s are 2 of 3 ms; what is left of 6 ms is idle time."""
    profiler = OperatorProfiler()
    profiler.steps = 2
    for name, milliseconds in (("nvjet_a", 2), ("gemv_b", 4), ("triton_norm", 3), ("copy", 1)):
        profiler.add(name, 1e-3 * milliseconds)
        profiler.add(name, 0.0)
    whole = Row("profile", "d", "s", "e", 3, 1, ms_device=6.0, copy_gb_s=1000.0)
    kernels = list(kernel_rows(whole, profiler))
    assert [(r.engine, r.kernels, r.ms_device) for r in kernels][:2] == [
        ("gemv_b", 1, 2.0),
        ("triton_norm", 1, 1.5),
    ]
    assert launches_in(profiler) == 4
    gaps = gap_rows(whole, kernels, products=2 * 10**9)
    assert [(r.engine, r.ms_device, r.floor_ms, r.gap_ms) for r in gaps] == [
        ("triton_norm", 1.5, 0.0, 1.5),
        ("matrix products", 3.0, 2.0, 1.0),
        ("time between kernels", 1.0, 0.0, 1.0),
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main([]) == 2
    assert "--dry-run goes through every step" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mimo", "step3p7@3", "glm4_moe"])
def test_pieces_do_what_the_whole_does(family: str, checkpoint: Callable[..., Path]) -> None:
    """Partial acceptance, joins and leaves; the same bits from one graph, from many, from none."""
    machine, loaded = Machine(), load(checkpoint(family), "float64", True)
    options = plan_of(
        spec_tokens=3, batch_buckets=(2,), max_len=64, prefill_chunk=8, sampling=False
    )
    fused = Fused(machine, loaded, options)
    graph = fused.step.graph
    assert graph is not None
    assert len(cut_step(graph)) == 3 + 1, "the target's pass, and each draft's"
    pieces = fused.pieces
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
    loaded = build("tiny-mla-moe", "cpu")
    nbytes = {name: p.nbytes for name, p in loaded.target.named_parameters()}
    routed = sum(n for name, n in nbytes.items() if ".mlp.experts." in name)
    head = nbytes["lm_head.weight"]
    rest = sum(nbytes.values()) - head - nbytes["model.embed_tokens.weight"]
    assert routed > 0
    sizes = weigh(loaded)
    assert sizes.target_bytes == rest
    assert sizes.step_bytes(0, batch=100) == rest + head
    assert sizes.step_bytes(0) == rest + head - routed // 2, "two of four experts"
    assert sizes.step_bytes(2, batch=100) == rest + head + 2 * (sizes.draft_bytes + head)
    own = sum(sizes.expert_bytes)
    assert sizes.step_bytes(1, batch=0) == rest + 2 * head + sizes.draft_bytes - own


def test_findings_and_order() -> None:
    """By hand: 1 GB a draft at 1000 GB/s is 1 ms; two more drafts took 2.6 ms."""
    rows = []
    for k, ms in ((1, 2.0), (3, 4.6)):
        row = Row("speed", "d", "s", FUSED, k, 1, ms_step=ms, ms_device=ms, launches=1)
        row.host_us, row.step_bytes, row.copy_gb_s, row.of_bandwidth = 40.0, k * 10**9, 1000.0, 0.8
        rows.append(row)
    rows.append(Row("speed", "d", "s", APART, 3, 1, ms_step=5.75, ms_device=5.0))
    rows.append(Row("speed", "d", "s", LATE, 3, 1, host_us=12.0))
    rows.append(Row("gap", "d", "s", "a kernel", 3, 1, ms_device=1.0, gap_ms=0.75))
    assert list(findings(rows)) == [
        "graph launches per iteration: [1] (goal 1)",
        "host time per iteration, read at once: at most 40 us (goal 50 us)",
        "host time per iteration, read late: at most 12 us (goal 50 us)",
        "s, K=1, batch 1: 80% of the copy bandwidth (goal 75%)",
        "s, K=3, batch 1: 80% of the copy bandwidth (goal 75%)",
        "s, K=3, batch 1: 1.25x the speed of a graph a piece (goal 1.15x at small batch)",
        "s, batch 1: a draft costs 1.30x its bytes (goal 1.3x)",
        "s, K=3: a kernel takes 1.000 ms, 0.750 ms beyond its bytes",
    ]
    assert list(findings([])) == []


def test_order() -> None:
    """Without drafts and with three, of each shape; then all else, once."""
    found = tasks(("glm4-8b", "mla-moe-16b"), (0, 1, 2, 3, 4), (1, 4))
    first = [(shape, Case(k, 1)) for shape in ("glm4-8b", "mla-moe-16b") for k in (0, 3)]
    assert [(task.shape, task.case) for task in found[:4]] == first
    assert len(found) == len(set(found)) == 2 * 5 * 2
    alone = tasks(("glm4-8b",), (3,), (1, 4))
    assert [task.case for task in alone] == [Case(3, 1), Case(3, 4)]


def test_rows_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    row = Row("gate", "d", "mimo", "x", 3, 2, passed=True, note="other, drafts")
    RowFile(path).add(row)
    again = RowFile(path, resume=True)
    assert row.case in again.there
    again.add(Row("gate", "d", "mimo", "x", 2, 2))
    assert [r["spec_tokens"] for r in _read(path)] == ["3", "2"]
    assert _read(path)[0]["note"] == "other, drafts"
    RowFile(path)
    assert _read(path) == []


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(
            [],
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
        pytest.param(["--dry-run"], marks=pytest.mark.slow),
    ],
)
def test_the_example(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """examples/gpu_decode.py: on the null device the text of plain decoding; else it refuses."""
    monkeypatch.setattr(sys, "argv", ["gpu_decode.py", *words, "--max-new-tokens", "8"])
    code = gpu_decode.main()
    seen = capsys.readouterr()
    if not words:
        assert code == 2
        assert "backend 'cuda' needs a GPU" in seen.err
        assert "--dry-run" in seen.err
        return
    assert code == 0
    texts = mtpc.compile(demo_checkpoint(), backend="eager", spec_tokens=0).generate(
        list(BENCH_PROMPTS), 8
    )
    written = [p + t for p, t in zip(BENCH_PROMPTS, texts, strict=True)]
    assert seen.out.startswith("\n".join(written))
    assert "32 tokens, " in seen.out


@pytest.mark.slow
def test_what_was_compiled_is_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor's own cache takes our flat modules: what --cache-dir relies on."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    graph = torch.fx.Graph()
    x, y = (graph.placeholder(name) for name in "xy")
    graph.output((graph.call_function(torch.ops.aten.mul.Tensor, (x, y)),))
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    tensors = [torch.rand(3, 5), torch.rand(3, 5)]
    found = []
    for _ in range(2):
        counters.clear()
        (out,) = compile_flat(module, tensors)(*tensors)
        assert torch.equal(out, tensors[0] * tensors[1])
        found.append({n for n in counters["inductor"] if n.startswith("fxgraph_cache")})
    assert found == [{"fxgraph_cache_miss"}, {"fxgraph_cache_hit"}]

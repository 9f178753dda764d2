"""Seconds from the start of a process to its first token: mtpc beside its floor and its peers.

    python -m benchmarks.startup                     # the demo model and the 0.5B shape
    python -m benchmarks.startup --vllm-python VENV/bin/python --repeats 5
    python -m benchmarks.startup --shape tiny --workloads random --engines floor mtpc --repeats 1

Every sample is a process of its own. *Cold* starts find no compiled code anywhere; what they leave
is what *warm* starts find, and nothing else: mtpc's have an empty Inductor cache and no compiler
on the path. All warm engines take turns. Files have been read before, so disks play no part.

The floor imports torch and maps the weights, which every engine here has to do. The torch.compile
row is one compiled prefill, without a decode step, so it prepares less than mtpc does.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.machine import CpuWatch, describe_machine, describe_versions
from benchmarks.models import SHAPES, write_checkpoint
from benchmarks.report import write_json
from benchmarks.sampling import ATTEMPTS, Tell
from mtpc.cli.demo import DEFAULT_PROMPT, demo_checkpoint
from mtpc.cli.tables import output, print_table
from mtpc.models.load import find_family

ROOT = Path(__file__).parent.parent
NOWHERE = "/nonexistent"
"""Where warm starts of mtpc have to look for programs."""
STAGES = ("python", "import", "load", "token")
MTPC_COLD, MTPC_WARM = "mtpc cold", "mtpc warm"
RATIOS = (
    (MTPC_WARM, "floor"),
    (MTPC_COLD, MTPC_WARM),
    ("transformers eager", MTPC_WARM),
    ("torch.compile warm", MTPC_WARM),
    ("vLLM warm", MTPC_WARM),
    ("vLLM eager", MTPC_WARM),
)
NOTES = (
    "best s, median s: from just before the process is started to its first token.",
    "python, import, load, token: medians of the stages that add up to it.",
    "vs floor: median over the floor's; mtpc's goal for warm starts is at most 2.",
    "mtpc warm: with an empty Inductor cache, without a C++ compiler; all buckets are loaded.",
    "torch.compile: one prefill graph of this length, no decode step: less than mtpc prepares.",
    "cache MB: what a warm start is given; for mtpc kernels and all steps, weights are not in it.",
    "samples: kept + dropped because others used the CPU; *: all were disturbed, none dropped.",
)


@dataclass(frozen=True)
class Engine:
    """One row to be: what is started, and on which cache.

    Attributes:
        name: as in the table.
        kind: its function in `startup_child`, and its name for `--engines`.
        state: "cold", "warm", or "" for what keeps no cache.
        is_text: the prompt is text, which takes a tokenizer.
    """

    name: str
    kind: str
    state: str = ""
    is_text: bool = False


ENGINES = (
    Engine("floor", "floor"),
    Engine(MTPC_COLD, "mtpc", "cold"),
    Engine(MTPC_WARM, "mtpc", "warm"),
    Engine("mtpc warm, text", "mtpc", "warm", is_text=True),
    Engine("transformers eager", "transformers"),
    Engine("torch.compile cold", "torch.compile", "cold"),
    Engine("torch.compile warm", "torch.compile", "warm"),
    Engine("vLLM cold", "vllm", "cold"),
    Engine("vLLM warm", "vllm", "warm"),
    Engine("vLLM eager", "vllm"),
)
KINDS = tuple(dict.fromkeys(engine.kind for engine in ENGINES))


class StartError(Exception):
    """A start that came to nothing; says why."""


@dataclass(frozen=True)
class Sample:
    """One start.

    Attributes:
        stages: seconds by stage; their sum is the time to the first token.
        foreign_share: share of the CPU time that others used meanwhile.
        cache_bytes: size of the engine's cache afterwards.
        scratch_bytes: what it wrote to the empty directory beside its cache.
        report: what the process said of itself, its tokens among it.
    """

    stages: dict[str, float]
    foreign_share: float
    cache_bytes: int
    scratch_bytes: int
    report: dict[str, Any]

    @property
    def seconds(self) -> float:
        return sum(self.stages.values())


@dataclass
class Case:
    """An engine on a checkpoint, its samples so far, and why there will be no more."""

    workload: str
    directory: Path
    engine: Engine
    samples: list[Sample] = field(default_factory=list)
    failure: str | None = None

    def undisturbed(self, max_foreign: float) -> list[Sample]:
        """Samples during which others used at most `max_foreign` of the CPU time."""
        return [sample for sample in self.samples if sample.foreign_share <= max_foreign]

    def __str__(self) -> str:
        return f"{self.workload}, {self.engine.name}"


@dataclass(frozen=True)
class Row:
    """What a case's samples say: of undisturbed ones where there are any; None if it never ran."""

    workload: str
    engine: str
    best_s: float | None
    median_s: float | None
    stages: dict[str, float]
    cache_bytes: int
    samples: int
    discarded: int
    disturbed: bool
    not_run: str | None
    taken: tuple[Sample, ...]


def summarise(case: Case, max_foreign: float) -> Row:
    """The row of a case that has been sampled, or could not be."""
    clean = case.undisturbed(max_foreign)
    kept = clean or case.samples
    seconds = [sample.seconds for sample in kept]
    return Row(
        workload=case.workload,
        engine=case.engine.name,
        best_s=min(seconds, default=None),
        median_s=median(seconds) if seconds else None,
        stages={s: median(sample.stages[s] for sample in kept) for s in STAGES if kept},
        cache_bytes=kept[-1].cache_bytes if kept else 0,
        samples=len(kept),
        discarded=len(case.samples) - len(kept),
        disturbed=bool(kept) and not clean,
        not_run=case.failure,
        taken=tuple(case.samples),
    )


class FamilyWatch(CpuWatch):
    """Counts processes that this one started, and waited for, as its own."""

    def __init__(self) -> None:
        self._children = _children_seconds()
        super().__init__()

    def foreign_share(self) -> float:
        """Share of all CPUs' time that others used, 0 to 1."""
        elapsed = (time.perf_counter() - self._start) * (os.cpu_count() or 1)
        own = (_children_seconds() - self._children) / elapsed
        return max(super().foreign_share() - own, 0.0)


def _children_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


class Starter:
    """Starts processes and takes their times.

    Args:
        args: the command line's.
        workdir: caches, reports and logs go here.
    """

    def __init__(self, args: argparse.Namespace, workdir: Path) -> None:
        self.args, self.workdir = args, workdir
        (workdir / "logs").mkdir(exist_ok=True)

    def start(self, case: Case) -> Sample:
        """One sample; a cold one begins by emptying the cache.

        Raises:
            StartError: there was no first token.
        """
        cache = self.workdir / "caches" / case.workload / case.engine.kind
        scratch = self.workdir / "scratch"
        for path in (scratch, cache) if case.engine.state == "cold" else (scratch,):
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir(mode=0o700, parents=True)  # mtpc opens no cache that others may write.
        job = self._job(case, cache)
        watch, begin = FamilyWatch(), time.monotonic()
        self._run(case, job, _environment(case.engine, cache, scratch, self.args))
        share, report = watch.foreign_share(), json.loads(Path(job["report"]).read_text())
        moments = [begin, *(report.pop("moments")[stage] for stage in STAGES)]
        stages = {stage: moments[i + 1] - moments[i] for i, stage in enumerate(STAGES)}
        return Sample(stages, share, _size(cache), _size(scratch), report)

    def _job(self, case: Case, cache: Path) -> dict[str, Any]:
        """What the process is told."""
        args, engine = self.args, case.engine
        config = json.loads((case.directory / "config.json").read_text())
        family = find_family(config["architectures"])
        prefix = family.layer_prefix(config["num_hidden_layers"], 0)
        generator = torch.Generator().manual_seed(args.seed)
        shape = (args.prompt_tokens,)
        ids = torch.randint(0, config["vocab_size"], shape, generator=generator).tolist()
        options: dict[str, Any] = dict(
            spec_tokens=args.spec_tokens, batch_buckets=args.batch_buckets, max_len=args.max_len
        )
        if engine.kind == "mtpc":  # Frozen: what the cache lacks is an error, not a slow start.
            frozen = engine.state == "warm"
            options |= dict(cache_dir=str(cache), backend="cpu", frozen=frozen)
        return dict(
            kind=engine.kind,
            directory=str(case.directory),
            prompt=DEFAULT_PROMPT if engine.is_text else ids,
            new_tokens=args.new_tokens,
            options=options,
            hf_class=family.hf_class,
            mtp_pattern=re.escape(prefix),
            eager=not engine.state,
            report=str(self.workdir / "report.json"),
        )

    def _run(self, case: Case, job: dict[str, Any], environment: dict[str, str]) -> None:
        """The process from its start to its end; its output goes to a log."""
        is_vllm = case.engine.kind == "vllm"
        python = str(self.args.vllm_python) if is_vllm else sys.executable
        command = [python, "-m", "benchmarks.startup_child", json.dumps(job)]
        log = self.workdir / "logs" / f"{case.workload} {case.engine.name}.log"
        with log.open("w") as file:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=file, stderr=file, start_new_session=True
            )
            try:
                code = process.wait(self.args.timeout)
            except subprocess.TimeoutExpired:
                raise StartError(f"no end within {self.args.timeout} s") from None
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        if code != 0:
            lines = [line.strip() for line in log.read_text().splitlines() if line.strip()]
            raise StartError(f"ended with status {code}: {lines[-1] if lines else 'no output'}")


def _environment(
    engine: Engine, cache: Path, scratch: Path, args: argparse.Namespace
) -> dict[str, str]:
    """The process's environment: its caches, and for warm starts of mtpc no compiler."""
    threads = args.threads or torch.get_num_threads()
    keeps_inductors = engine.kind in ("torch.compile", "vllm") and engine.state
    extra = {
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TORCHINDUCTOR_CACHE_DIR": str((cache if keeps_inductors else scratch) / "inductor"),
    }
    if engine.kind == "mtpc" and engine.state == "warm":
        extra |= {"CXX": f"{NOWHERE}/c++", "PATH": NOWHERE}
    if engine.kind == "vllm":
        extra |= {
            "VLLM_CACHE_ROOT": str((cache if engine.state else scratch) / "vllm"),
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            # Its kernels are linked against the OpenMP that it brings along.
            "LD_PRELOAD": str(args.vllm_python.parent.parent / "lib" / "libiomp5.so"),
        }
    return os.environ | extra


def _size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())

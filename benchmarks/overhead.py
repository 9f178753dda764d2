"""The overhead of serving: the same work by bare replay, Engine, AsyncEngine and `mtpc serve`.

    python -m benchmarks.overhead --out RESULTS.json

Bare replay repeats the writes and replays of an engine in order, without reading results,
scheduling or output. The other paths get the same requests again. All run in one process on one
program, in rounds. The server listens on loopback, and its clients are in another process.
"""

from __future__ import annotations

import asyncio
import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import tokenizers
import torch
from torch import Tensor

import mtpc
from benchmarks import ROOT
from benchmarks.harness import command
from benchmarks.harness.bench import Benchmark, Run
from benchmarks.harness.decoders import Prompts
from benchmarks.harness.rounds import Case
from benchmarks.harness.tables import SAMPLES, Column, Row, TableForm, fields
from mtpc import AsyncEngine, Engine
from mtpc.layout import StepKey
from mtpc.program.program import CapturedStep, Program
from mtpc.server.options import ServerOptions
from mtpc.server.run import Running, run_server

GOALS = {"replay": 1.0, "Engine": 0.97, "AsyncEngine": 0.95, "mtpc serve": 0.90}
"""The goal: the least share of bare replay's tokens per second."""
NAME = "model"


@dataclass(frozen=True)
class Work:
    """The requests of one batch, which arrive together and have equal lengths."""

    prompts: Prompts
    new_tokens: int

    @property
    def tokens(self) -> int:
        """New tokens of all requests."""
        return len(self.prompts) * self.new_tokens


class TapedProgram:
    """A program that records an engine's writes and replays.

    Args:
        program: the program that does the work; other attributes are its own.
    """

    def __init__(self, program: Program):
        self._program = program
        program.forget_batches()  # What is there already is not written; at a replay it is gone.
        self.tape: list[StepKey | tuple[Tensor, Tensor | int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._program, name)

    def write(self, tensor: Tensor, value: Tensor | int) -> None:
        """Note, and do it."""
        self.tape.append((tensor, value.clone() if isinstance(value, Tensor) else value))
        self._program.write(tensor, value)

    def set_batch(self, key: StepKey, slots: list[int]) -> None:
        """Call the program, and record its writes."""
        Program.set_batch(self, key, slots)  # type: ignore[arg-type]

    def run(self, key: StepKey) -> Any:
        """Note, and do it."""
        self.tape.append(key)
        return self._program.run(key)


class Paths:
    """The paths by which a model can be called.

    Args:
        model: compiled without prefix reuse, so that repeated requests are the same work.
        running: a server on the model.
        client: the process of benchmarks/harness/stream_client.py.
    """

    def __init__(self, model: mtpc.SpecModel, running: Running, client: subprocess.Popen[str]):
        self._model, self._running, self._client = model, running, client
        self._tapes: dict[int, tuple[list[Any], Tensor]] = {}

    def run(self, path: str, work: Work) -> tuple[float, float]:
        """Run a path; returns seconds, and CPU seconds of the clients."""
        if path == "replay":
            return self._replay(work), 0.0
        if path == "Engine":
            return self._engine(work), 0.0
        if path == "AsyncEngine":
            return asyncio.run(self._async_engine(work)), 0.0
        return self._serve(work)

    def _new_engine(self, program: Any = None) -> Engine:
        model = self._model
        return Engine(program or model.program, model.options, model.served.vocab_size)

    def _engine(self, work: Work, program: Any = None) -> float:
        engine, tokens = self._new_engine(program), 0
        start = time.perf_counter()
        for prompt in work.prompts:
            engine.add(prompt, work.new_tokens)
        while engine.has_work:
            tokens += sum(len(output.token_ids) for output in engine.step())
        seconds = time.perf_counter() - start
        _check(tokens, work)
        return seconds

    async def _async_engine(self, work: Work) -> float:
        async def consume(engine: AsyncEngine, prompt: list[int]) -> int:
            outputs = engine.generate(prompt, work.new_tokens, stop_ids=())
            return sum([len(output.token_ids) async for output in outputs])

        made = self._model
        fresh = mtpc.SpecModel(made.served, made.options, made.program, made.loaded)
        async with AsyncEngine(fresh) as engine:
            start = time.perf_counter()
            counts = await asyncio.gather(*(consume(engine, prompt) for prompt in work.prompts))
            seconds = time.perf_counter() - start
        _check(sum(counts), work)
        return seconds

    def _serve(self, work: Work) -> tuple[float, float]:
        assert self._client.stdin is not None
        assert self._client.stdout is not None
        fields = {
            "model": NAME, "max_tokens": work.new_tokens, "temperature": 0, "ignore_eos": True,
        }  # fmt: skip
        bodies = [{**fields, "prompt": prompt} for prompt in work.prompts]
        print(json.dumps({"port": self._running.port, "bodies": bodies}), file=self._client.stdin)
        self._client.stdin.flush()
        answer = json.loads(self._client.stdout.readline())
        _check(answer["tokens"], work)
        return answer["seconds"], answer["cpu_s"]

    def _replay(self, work: Work) -> float:
        if id(work) not in self._tapes:
            taped = TapedProgram(self._model.program)
            self._engine(work, taped)
            self._tapes[id(work)] = taped.tape, self._last_step(taped.tape).clone()
        tape, expected = self._tapes[id(work)]
        steps: dict[StepKey, CapturedStep] = dict(self._model.program.steps)
        write = self._model.program.write
        start = time.perf_counter()
        for entry in tape:
            if isinstance(entry, StepKey):
                steps[entry].replay()
            else:
                write(*entry)
        seconds = time.perf_counter() - start
        self._model.program.forget_batches()
        self._model.program.replays.update(key for key in tape if isinstance(key, StepKey))
        if not torch.equal(self._last_step(tape), expected):
            raise RuntimeError("bare replay computed something else than the engine")
        return seconds

    def _last_step(self, tape: list[Any]) -> Tensor:
        """The tokens of the last step of a tape."""
        key = next(entry for entry in reversed(tape) if isinstance(entry, StepKey))
        return self._model.program.steps[key].buffers["batch.out_token_ids"]


def _check(tokens: int, work: Work) -> None:
    if tokens != work.tokens:
        raise RuntimeError(f"{tokens} tokens came, {work.tokens} were asked for")


def take(paths: Paths, program: Program, work: Work) -> Row:
    """One sample: all paths, one after another; seconds and steps of each."""
    found, child_cpu_s = Row(), 0.0
    for path in GOALS:
        before = sum(program.replays.values())
        seconds, cpu_s = paths.run(path, work)
        found[path] = dict(seconds=seconds, steps=sum(program.replays.values()) - before)
        child_cpu_s += cpu_s
    return {**found, "child_cpu_s": child_cpu_s}


def summary(work: Work, samples: Sequence[Row]) -> Row:
    """The rows of all paths; ratios are of the same round."""
    rows = []
    for path, goal in GOALS.items():
        runs = [sample[path] for sample in samples]
        replays = [sample["replay"]["seconds"] for sample in samples]
        pairs = list(zip(replays, runs, strict=True))
        row = dict(
            path=path,
            tokens_per_s=median(work.tokens / run["seconds"] for run in runs),
            of_replay=median(replay / run["seconds"] for replay, run in pairs),
            goal=goal,
            steps=round(median(run["steps"] for run in runs)),
            ms_per_step=median(1e3 * run["seconds"] / run["steps"] for run in runs),
        )
        rows.append(row)
    return dict(paths=rows)


FORM = TableForm(
    "Overhead",
    (
        *fields("batch, path"),
        Column(
            "tokens/s", "tokens_per_s", ".1f",
            "all new tokens, over the time from the first request to the last token, prefill "
            "included; medians.",
        ),
        Column(
            "of replay", "of_replay", ".1%",
            "tokens/s over those of bare replay in the same round; median over rounds.",
        ),
        Column("goal", "goal", ".0%"),
        Column("steps", "steps", "", "replays, of prefill chunks and decode steps."),
        Column("ms/step", "ms_per_step", ".2f", "time over steps."),
        SAMPLES,
    ),
)  # fmt: skip


def give_tokenizer(directory: Path, vocab_size: int) -> None:
    """Add a tokenizer with one word per id, which a server needs."""
    words = {f"w{token_id}": token_id for token_id in range(vocab_size)}
    model = tokenizers.models.WordLevel(words, unk_token="w0")
    tokenizers.Tokenizer(model).save(str(directory / "tokenizer.json"))


@contextmanager
def served(model: mtpc.SpecModel) -> Iterator[Running]:
    """Run `mtpc serve` in a thread."""
    ready: queue.Queue[Running] = queue.Queue()
    options = ServerOptions(port=0, model_name=NAME)
    target: Callable[[], None] = lambda: run_server(model, options, ready.put)  # noqa: E731
    thread = threading.Thread(target=target, name="server", daemon=True)
    thread.start()
    running = ready.get(timeout=60)
    try:
        yield running
    finally:
        running.stop()
        thread.join()


@contextmanager
def clients() -> Iterator[subprocess.Popen[str]]:
    """Start the clients' process."""
    line = [sys.executable, "-m", "benchmarks.harness.stream_client"]
    pipe = subprocess.PIPE
    with subprocess.Popen(line, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as process:
        yield process


def measure(run: Run) -> Iterator[list[Row]]:
    """A case for each batch, which has a row for each path."""
    args = run.args
    directory = run.write_mimo(args.weights == "accepting").directory
    give_tokenizer(directory, run.vocab_size)
    run.tell("compile")
    model = mtpc.compile(
        directory,
        spec_tokens=args.spec_tokens,
        batch_buckets=args.batches,
        max_len=args.prompt_tokens + args.new_tokens,
        backend=args.backend,
        sampling=True,
        prefix_caching=False,
    )
    prompts = run.prompts(max(args.batches))
    with served(model) as running, clients() as client:
        paths, cases = Paths(model, running, client), list[Case]()
        for batch in args.batches:
            work = Work(prompts[:batch], args.new_tokens)
            once = partial(take, paths, model.program, work)
            cases.append(Case(dict(batch=batch), once, once, summary=partial(summary, work)))
        rows = run.sample(cases)
    yield [{**row, **path} for row in rows for path in row.pop("paths")]


BENCHMARK = Benchmark(
    "overhead",
    __doc__,
    measure,
    FORM.of,
    (*command.FILES, "--shape", "--backend", *command.SAMPLING),
    dict(
        weights="accepting", spec_tokens=3, batches=[1, 4, 8], prompt_tokens=32, new_tokens=128,
        repeats=5,
    ),
)  # fmt: skip
main, table = BENCHMARK.commands(__name__)

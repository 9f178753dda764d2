"""Compiling ahead of time: steps that go through the cache.

StepCompiler -> graph -> package and record -> cache entry
"""

from __future__ import annotations

import gzip
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cached_property, partial
from pathlib import Path

import torch

from mtpc.capture.graph import StepGraph, is_buffer_name
from mtpc.capture.inline import fake_mode_of
from mtpc.capture.split import split_step
from mtpc.capture.step_mode import StepMode
from mtpc.layout import Part, StepKey, dtype_name
from mtpc.layout.buffers import text_of
from mtpc.models.weight_recipes import weight_recipes
from mtpc.program.compiler import StepCompiler
from mtpc.program.forecast import Forecast
from mtpc.program.step_cache import CONSTANTS, CachedStep, StepCache, Steps, graph_file
from mtpc.program.step_record import StepRecord, settled_buffers
from mtpc.weights.recipes import Recipe, names
from mtpc.weights.tensor_file import save_tensors


class CachingCompiler:
    """A `StepCompiler` whose steps are taken from the cache, and kept there.

    Args:
        compiler: traces and rewrites what the cache lacks.
        cache: of this very model and options.
    """

    def __init__(self, compiler: StepCompiler, cache: StepCache):
        self.compiler, self.cache = compiler, cache
        self._prepared: dict[StepKey, float] = {}
        compiler.weights.defers = True

    def obtain_all(self, wanted: Iterable[tuple[StepKey, Part]]) -> Steps:
        """The entry of every graph, in order."""
        steps, graphs = {}, tuple(wanted)
        lacking = [graph for graph in graphs if self.cache.lacks(*graph)]
        seconds = self.cache.seconds_of_nearest(lacking)
        names = [(self._spec_tokens, *graph) for graph in lacking]
        self.compiler.forecast = Forecast(dict(zip(names, seconds, strict=True)))
        for key, part in graphs:
            steps[key, part] = self.obtain(key, part)
            self.compiler.forecast.finished((self._spec_tokens, key, part))
            self.compiler.finished()
        return steps

    @property
    def _spec_tokens(self) -> int:
        return self.compiler.options.spec_tokens

    def _tell(self, stage: str, key: StepKey, part: Part) -> None:
        """Say what begins."""
        self.compiler.forecast.begins((self._spec_tokens, key, part), stage)
        self.compiler.tell(stage, key)

    def prepare(self, key: StepKey) -> None:
        """Trace the model, which all steps share. The record of `key` gets the seconds."""
        start = time.perf_counter()
        with torch.no_grad():
            self.compiler.trace_model(key)
        self._prepared[key] = time.perf_counter() - start

    def obtain(self, key: StepKey, part: Part = "step") -> CachedStep:
        """One step's entry, built if the cache lacks it."""
        return self.cache.obtain(key, partial(self._build, key, part), part)

    @torch.no_grad()
    def _build(self, key: StepKey, part: Part, directory: Path) -> StepRecord:
        """Compile a step's files into `directory`."""
        timer = _Timer()
        timer.add("trace", self._prepared.pop(key, 0.0))
        graph = self._graph(key, part, directory, timer)
        self._tell("lower", key, part)
        with timer("lower"):
            make_package = self.compiler.backend.package
            assert make_package is not None, "the cache is for backends that make packages"
            package = make_package(graph, directory)
        mode = fake_mode_of(graph.graph)
        assert isinstance(mode, StepMode), "steps of packages leave sizes open"
        held = [name for name in package.tensors if not is_buffer_name(name)]
        constants = self._constants(held)
        weights = self.compiler.weights
        tensors = {name: weights[name].detach().clone() for name in sorted(constants)}
        save_tensors(tensors, directory / CONSTANTS)
        derived = {n: r for n, r in weights.recipes.items() if n in held}
        base = {name for n in held for name in (names(derived[n]) if n in derived else [n])}
        stored = {n: r for n, r in self._recipes.items() if n in base and r is not None}
        loaded = self.compiler.loaded
        return StepRecord(
            step=key,
            part=part,
            buffers=settled_buffers(graph.layout, lambda dim: text_of(mode.form(dim))),
            package=package,
            derived=derived,
            stored=stored,
            dtypes={n: dtype_name(weights[n].dtype) for n in stored},
            unexplained=tuple(sorted(base - self._recipes.keys() - constants)),
            ends=tuple(sorted(loaded.ends() & stored.keys())),
            max_positions=loaded.max_positions,
            vocab_size=loaded.served().vocab_size,
            history=tuple(graph.history),
            seconds=timer.seconds,
            source=loaded.source,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
        )

    def _graph(self, key: StepKey, part: Part, directory: Path, timer: _Timer) -> StepGraph:
        """The step after all passes. Its text after each pass is written to `directory`."""

        def write(index: int, name: str, graph: StepGraph) -> None:
            path = directory / graph_file(index, name)
            path.write_bytes(gzip.compress(graph.text().encode(), mtime=0))

        def keep(name: str, graph: StepGraph) -> None:
            write(len(graph.history), name, graph)

        self._tell("trace", key, part)
        with timer("trace"):
            graph = self.compiler.trace(key)
        write(0, "traced", graph)
        self._tell("rewrite", key, part)
        with timer("rewrite"):
            self.compiler.rewrite(graph, seen=keep)
            whole = self.compiler.all_layers(graph)
        if whole is None:
            return self._graph(key, part, directory, timer)
        if len(whole.history) > len(graph.history):
            keep(whole.history[-1].name, whole)
        if part == "step":
            return whole
        with timer("split"):
            split = split_step(whole)
        half = split.verify if part == "verify" else split.propose
        write(len(whole.history) + 1, part, half)
        return half

    @cached_property
    def _recipes(self) -> dict[str, Recipe | None]:
        return weight_recipes(self.compiler.loaded)

    def _constants(self, held: list[str]) -> set[str]:
        """Of the weights a package takes, those that no checkpoint holds."""
        return {
            name
            for name in held
            if name.startswith("constant.")
            or (name in self._recipes and self._recipes[name] is None)
        }


class _Timer:
    """Seconds by stage."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.add(stage, time.perf_counter() - start)

    def add(self, stage: str, seconds: float) -> None:
        self.seconds[stage] = round(self.seconds.get(stage, 0.0) + seconds, 3)

"""How to add a pass, a family and a backend (docs/extending.md): in its file and its row alone.

The steps are followed in a copy of the package. An operator's are in tests/ops/test_recipe.py.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.oracles import Oracle
from helpers.places import ROOT, TESTS

FILES = {
    "passes/drop_double_negation.py": '''\
"""Drop a negation of a negation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mtpc.capture.graph import StepGraph
from mtpc.passes.base import Pass, aten, is_call, sweep


@dataclass(frozen=True)
class DropDoubleNegation(Pass, policy="on"):
    """drop-double-negation: x instead of -(-x)."""

    def apply(self, graph: StepGraph) -> int:
        rewrites = 0
        for node in graph.graph.nodes:
            inner: Any = node.args[0] if is_call(node, aten.neg.default) else None
            if is_call(inner, aten.neg.default):
                node.replace_all_uses_with(inner.args[0])
                rewrites += 1
        sweep(graph)
        return rewrites
''',
    "models/families/toy.py": '''\
"""A family that differs from MiMo by its name."""

from dataclasses import replace

from mtpc.models.families.mimo import MIMO

TOY = replace(MIMO, name="toy", architectures=("ToyForCausalLM",))
''',
    "backends/toy.py": '''\
"""A backend that counts the steps that it lowers; otherwise it is eager."""

from __future__ import annotations

from collections import Counter

from mtpc.backends.base import Artifact
from mtpc.backends.eager import EagerBackend
from mtpc.capture.graph import StepGraph
from mtpc.passes.base import Pass


class ToyBackend:
    """Builds what the eager backend builds."""

    name = "toy"
    enables: tuple[str, ...] = ()
    device = "cpu"
    makes_files = False

    def __init__(self) -> None:
        self.notes: Counter[str] = Counter()
        self._eager = EagerBackend()

    def free_bytes(self) -> int | None:
        return None

    def legalise(self) -> tuple[Pass, ...]:
        return ()

    def build(self, graph: StepGraph) -> Artifact:
        self.notes["built"] += 1
        return self._eager.build(graph)
''',
}
ROWS = {
    "backends/pipeline.py": (
        ("import FuseCacheWrite\n", "import FuseCacheWrite\nfrom mtpc.passes.drop_double_negation "
         "import DropDoubleNegation\n"),
        ("        Canonicalise(),\n", "        Canonicalise(),\n        DropDoubleNegation(),\n"),
    ),
    "models/families/__init__.py": (
        ('    "nextn": (', '    "toy": ("ToyForCausalLM",),\n    "nextn": ('),
    ),
    "backends/__init__.py": (
        ("BACKENDS = {\n", "def _toy(report: Report, store: EntryStore | None) -> Backend:\n"
         "    from mtpc.backends.toy import ToyBackend\n\n    return ToyBackend()\n\n\n"
         'BACKENDS = {\n    "toy": Row(_toy),\n'),
    ),
}  # fmt: skip
"""What the recipes change in files that are there: text -> what takes its place."""
SCRIPT = """
import sys, json, torch, mtpc
from mtpc.backends.pipeline import pass_names, select_passes
from mtpc.config import CompileOptions
from mtpc.passes import Verifier, run_pipeline
from mtpc.plan import make_plan
from helpers.small_graphs import operations, small_graph

plan = make_plan(CompileOptions())
assert pass_names().index("drop-double-negation") == pass_names().index("canonicalise") + 1
assert "drop-double-negation" in [step.name for step in select_passes(plan)]
tensors = dict(x=torch.randn(3), batch_out=torch.zeros(3))
graph = small_graph(lambda x, out: out.copy_(x.neg().neg().sin()), **tensors)
passes = [step for step in select_passes(plan) if step.name == "drop-double-negation"]
run_pipeline(graph, passes, Verifier(propagate=True))
assert graph.history[-1].rewrites == 1
assert not any(name.startswith("neg") for name in operations(graph))
sizes = dict(batch_buckets=(1,), max_len=64, page_size=4, prefill_chunk=8, sampling=False)
spec = mtpc.compile(sys.argv[1], backend="toy", spec_tokens=1, dtype="float64", **sizes)
passed = [record.name for record in next(iter(spec.program.steps.values())).graph.history]
print(json.dumps([spec.generate([3, 4, 5], 8), spec.stats.fallbacks["built"], passed]))
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of mtpc in which the recipes were followed."""
    copy = shutil.copytree(
        ROOT / "mtpc", tmp_path / "mtpc", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name, text in FILES.items():
        (copy / name).write_text(text)
    for name, changes in ROWS.items():
        source = (copy / name).read_text()
        for old, new in changes:
            assert source.count(old) == 1, f"{name} has {old!r} more than once, or not at all"
            source = source.replace(old, new)
        (copy / name).write_text(source)
    return copy


def test_a_file_and_a_row_each(
    package: Path, checkpoint: Callable[..., Path], oracle: Callable[..., Oracle], tmp_path: Path
) -> None:
    """The text of the toy family, on the toy backend, with the toy pass, is MiMo's own."""
    directory = shutil.copytree(checkpoint("mimo"), tmp_path / "toy")
    config = json.loads((directory / "config.json").read_text())
    config["architectures"] = ["ToyForCausalLM"]
    (directory / "config.json").write_text(json.dumps(config))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(TESTS)])}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(directory)],
        env=env, cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    text, built, passed = json.loads(done.stdout)
    assert built == 2, "a decode step and a prefill step"
    assert "drop-double-negation" in passed
    assert text == oracle("mimo").generate([3, 4, 5], 8)

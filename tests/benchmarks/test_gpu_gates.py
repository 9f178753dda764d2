"""The gates of benchmarks.gpu, without a GPU: bfloat16 passes, and each planted fault is seen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx

from benchmarks.gpu.gate import COMPARED, check_family, check_shape
from benchmarks.gpu.lockstep import Errors, Found, row_errors
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.rows import Row
from mtpc.backends.base import Run
from mtpc.backends.cuda import CudaBackend
from mtpc.backends.null import NullGraphs
from mtpc.capture.graph import StepGraph

Plant = Callable[[fx.Graph], None]


class _Faulty(Machine):
    """A device whose compiler has a fault; its reference has none."""

    def __init__(self, plant: Plant):
        self._plant = plant

    def backend(self) -> CudaBackend:
        return CudaBackend(NullGraphs(), self._lower_wrongly, (), device="cpu")

    def _lower_wrongly(self, graph: StepGraph) -> Run:
        self._plant(graph.graph)
        graph.module.recompile()
        return self.lower(graph)


def _calls(graph: fx.Graph, name: str) -> list[fx.Node]:
    return [node for node in graph.nodes if name in str(node.target)]


def _wrong_values(graph: fx.Graph) -> None:
    """Attention that takes keys for values."""
    node = _calls(graph, "paged_attention")[0]
    node.args = (*node.args[:2], node.args[1], *node.args[3:])


def _wrong_draft(graph: fx.Graph) -> None:
    """A draft that is not its logits' largest: the text stays right."""
    _calls(graph, "argmax")[-1].target = torch.ops.aten.argmin.default


def _unwritten(graph: fx.Graph) -> None:
    """Keys and values of one layer stay where they were made."""
    node = _calls(graph, "rotate_and_write")[0]
    with graph.inserting_before(node):
        slots = graph.call_function(torch.ops.aten.full_like.default, (node.args[7], -1))
    slots.meta = dict(node.args[7].meta)
    node.args = (*node.args[:7], slots, *node.args[8:])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "said"),
    [
        (lambda graph: None, ""),
        (_wrong_values, "hidden rows err by"),
        (_wrong_draft, "is not its logits' largest"),
        (_unwritten, "cache rows err by"),
    ],
    ids=["right", "values", "draft", "cache"],
)
def test_a_fault_is_seen(plant: Plant, said: str, tmp_path: Path) -> None:
    """In two layers of a shape, with random weights."""
    row = Row("gate", "null device", "tiny-glm4", COMPARED, 3, 2)
    check_shape(row, _Faulty(plant), tmp_path / "model")
    assert row.passed is (not said), row.note
    assert said in row.note
    assert "of 0 choices" not in row.note


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "said"), [(lambda graph: None, ""), (_wrong_draft, "is not its logits' largest")]
)
def test_a_drafter_of_its_own_is_compared(plant: Plant, said: str, tmp_path: Path) -> None:
    """Of a family without MTP layers; its head has rows for some tokens only."""
    row = Row("gate", "null device", "llama", COMPARED, 3, 2)
    check_family(row, _Faulty(plant), tmp_path / "model")
    assert row.passed is (not said), row.note
    assert said in row.note


def _rows(*errors: float) -> tuple[Tensor, Tensor]:
    """Rows of ones with these errors; and what they should be."""
    truth = torch.ones(len(errors), 4)
    return truth * (1 + torch.tensor(errors)[:, None]), truth


def test_errors_of_rows() -> None:
    rows, truth = _rows(0.0, 0.25, float("nan"))
    assert row_errors(rows, truth).tolist() == pytest.approx([0.0, 0.25, float("inf")])


@pytest.mark.parametrize(
    ("ours", "experts", "said"),
    [
        ([0.01] * 9, False, []),
        ([0.03] * 9, False, ["hidden rows err by 0.03, PyTorch's by 0.01"]),
        ([0.01] * 8 + [0.5], False, ["1 of 9 hidden rows err by more than 0.1, PyTorch's 0"]),
        ([0.01] * 8 + [float("nan")], False, ["1 of 9 hidden rows err by more than 0.1, P"]),
        ([0.01] * 8 + [0.5], True, []),
        ([0.01] * 6 + [0.5] * 3, True, ["hidden rows err by 0.5", "3 of 9 hidden rows"]),
    ],
)
def test_what_is_worse_than_bfloat16(ours: list[float], experts: bool, said: list[str]) -> None:
    """By hand: PyTorch's own rows err by a hundredth."""
    found = Found()
    (rows, truth), (others, _) = _rows(*ours), _rows(*[0.01] * 9)
    found.hidden.add(rows, others, truth)
    found.caches.add(truth, truth, truth)
    faults = found.faults(experts)
    assert len(faults) == len(said)
    assert all(fault.startswith(start) for fault, start in zip(faults, said, strict=True))


def test_nothing_compared_is_a_fault() -> None:
    assert Found().faults(False) == ["no row was compared"]
    assert str(Errors([0.5], [0.25])) == "1 rows, 0.5 against 0.25"

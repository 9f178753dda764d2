"""Experts by PyTorch's grouped products, which run on the CPU, too: numbers, limits, whole steps.

No test needs Triton. How a measurement chooses is in test_tuning.py and test_trial.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.batches import Mixture, close, make_mixture
from helpers.expert_steps import experts_step
from helpers.plans import plan_of
from helpers.tapes import lower_eagerly
from helpers.triton_steps import compile_on
from helpers.whole_steps import beside
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from mtpc.api import SpecModel
from mtpc.backends import torch_experts
from mtpc.backends.bindings import Binding, BindKernels
from mtpc.backends.cuda import CudaBackend, compile_call, cut_step, lower_by_inductor
from mtpc.backends.driver_memory import kernel_count
from mtpc.backends.eager import EagerBackend
from mtpc.backends.expand import trace_call
from mtpc.backends.gpu.passes.check_invariance import CheckInvariance
from mtpc.backends.memory import live_memory, peak_bytes
from mtpc.backends.null import NullGraphs
from mtpc.capture.graph import StepGraph
from mtpc.errors import BackendError
from mtpc.models.load import load
from mtpc.ops import references
from mtpc.passes.base import GETITEM
from mtpc.program.compiler import StepCompiler

BF16, NAN, HOPPER = torch.bfloat16, float("nan"), (9, 0)
REFERENCE = torch.ops.mtpc
ACTIVATIONS = [(), (0.3,), (0.3, True), (0.0, False, True), (0.3, False, True)]


def mixture(tokens: int = 40, chosen: int = 3, **sizes: int) -> Mixture:
    return make_mixture(tokens, dtype=BF16, chosen=chosen, **sizes)


def hidden_memory(patch: pytest.MonkeyPatch) -> None:
    """Rows for which no product is computed hold NaN, as they may on a device."""
    multiply = functional.grouped_mm

    def poisoned(rows: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
        is_live = torch.arange(len(rows)) < offs[-1]
        return torch.where(is_live[:, None], multiply(rows, weight, offs=offs), NAN)

    patch.setattr(functional, "grouped_mm", poisoned)


# ---- numbers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_it_agrees_with_the_reference(
    activation: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a row chooses no expert, or all choose one, and one has no row."""
    hidden_memory(monkeypatch)
    for seed in (40, 33):
        call = mixture(seed)
        call.ids[call.ids == 4] = 6  # Of six: nobody chooses the fourth.
        call.ids[2:5] = torch.tensor([-1, 2**40, 6])
        call.ids[7] = torch.tensor([5, -7, 0])
        close(call.run(torch_experts, *activation), call.run(REFERENCE, *activation), scale=2)
        one = replace(call, ids=torch.tensor([[3]] * seed), weights=call.weights[:, :1])
        close(one.run(torch_experts, *activation), one.run(REFERENCE, *activation), scale=2)
        none = replace(call, ids=torch.full_like(call.ids, 6))
        assert not none.run(torch_experts, *activation).any()
    close(call.run_without_gates(torch_experts), call.run_without_gates(REFERENCE), scale=2)


def _oracle(call: Mixture, limit: float, limit_input: bool, gelu: bool) -> Tensor:
    """Row by row and number by number, in float64."""
    rows = []
    for row, ids, scales in zip(call.x.double(), call.ids, call.weights.double(), strict=True):
        total = torch.zeros_like(row)
        for index, scale in sorted(zip(ids.tolist(), scales.tolist(), strict=True)):
            if not 0 <= index < len(call.down):
                continue
            both = (call.gate_up[index].double() @ row).tolist()
            inner = []
            for gate, up in zip(both[: len(both) // 2], both[len(both) // 2 :], strict=True):
                up = max(-limit, min(limit, up)) if limit else up
                gate = min(gate, limit) if limit and limit_input else gate
                if gelu:
                    bent = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
                    gate = 0.5 * gate * (1 + math.tanh(bent))
                else:
                    gate = gate / (1 + math.exp(-gate))
                gate = min(gate, limit) if limit and not limit_input else gate
                inner.append(gate * up)
            total += scale * (call.down[index].double() @ torch.tensor(inner).double())
        rows.append(total)
    return torch.stack(rows)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_it_agrees_with_an_oracle(activation: tuple[Any, ...]) -> None:
    """As closely as the reference, which rounds more often. Each of six roundings on the way (gate,
    up, activation, their product, the down projection, the sum) changes a number by 2^-8 at most,
    up or down: together by sqrt(6 / 3) 2^-8 in the mean.
    """
    call = mixture()
    call.ids[3] = torch.tensor([1, -1, 9])
    wanted = _oracle(call, *(*activation, *(0.0, False, False)[len(activation) :]))
    found = call.run(torch_experts, *activation)
    assert found.dtype == BF16
    error, theirs = ((x - wanted).norm() for x in (found, call.run(REFERENCE, *activation)))
    assert error <= theirs
    assert error <= math.sqrt(2) * 2**-8 * wanted.norm()


def test_what_is_not_a_number_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a row, in an expert that nobody chose, in memory behind the last product."""
    hidden_memory(monkeypatch)
    call = mixture()
    call.ids[call.ids == 4] = -1
    wanted = call.run(torch_experts)
    call.x[5] = NAN
    call.gate_up[4], call.down[4] = NAN, NAN
    found = call.run(torch_experts)
    assert found[5].isnan().all()
    assert torch.equal(found[:5], wanted[:5])
    assert torch.equal(found[6:], wanted[6:])


def test_a_sum_does_not_depend_on_the_order_of_choices() -> None:
    """Two experts that cancel, with numbers beside which the others are lost: in another order the
    rest would differ."""
    call = mixture(64, chosen=4, experts=4)
    call.gate_up[3], call.down[3] = call.gate_up[0], -call.down[0]
    call.weights[(call.ids == 0) | (call.ids == 3)] = 2.0**16
    order = torch.rand(call.ids.shape, generator=torch.Generator().manual_seed(1)).argsort(1)
    other = replace(call, ids=call.ids.gather(1, order), weights=call.weights.gather(1, order))
    assert torch.equal(call.run(torch_experts), other.run(torch_experts))


def test_a_sum_is_rounded_once() -> None:
    """Of products with scales in float32."""
    call = mixture()
    scales = torch.rand(call.ids.shape, generator=torch.Generator().manual_seed(2))
    ones = torch.ones(len(scales), 1)
    total = torch.zeros(call.x.shape, dtype=torch.float64)
    for ids, column in zip(call.ids.split(1, 1), scales.split(1, 1), strict=True):
        total += replace(call, ids=ids, weights=ones).run(torch_experts).double() * column.double()
    found = replace(call, weights=scales).run(torch_experts).double()
    assert ((found - total).abs() <= 1.001 * 2**-8 * total.abs() + 1e-6).all()


# ---- capture and Inductor ---------------------------------------------------------------------


def test_no_call_waits_for_the_device() -> None:
    """Fake tensors have no values: a call that reads some fails. None of these copies to the host
    on a GPU, either."""
    mode, call = FakeTensorMode(), mixture()
    tensors = (call.x, call.gate_up, call.down, call.ids, call.weights)
    traced = trace_call(mode, torch_experts.experts, tuple(map(mode.from_tensor, tensors)), {})
    calls = [n for n in traced.graph.nodes if n.op == "call_function"]
    called = {str(n.target).split(".")[1] for n in calls if n.target is not GETITEM}
    called -= {"lt", "gt", "__or__", "eq", "mul", "silu", "floor_divide"}
    called -= {"to", "chunk", "transpose", "flatten", "view", "unsqueeze", "slice", "arange"}
    called -= {"empty_like", "sum"}
    assert called == {
        "sort", "searchsorted", "_grouped_mm", "index", "gather", "scatter", "masked_fill",
    }  # fmt: skip


@pytest.mark.slow
def test_inductor_compiles_it_without_copies_of_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.utils import run_and_get_code

    call = mixture()
    arguments = (call.x, call.gate_up, call.down, call.ids, call.weights)
    with torch.no_grad():
        found, (code, *_) = run_and_get_code(
            lambda: compile_call(torch_experts.experts, arguments, {"limit": 0.3})()
        )
    close(found[0], call.run(REFERENCE, 0.3), scale=2)
    assert code.count("extern_kernels._grouped_mm(") == 2
    made = [line for line in code.splitlines() if "empty_strided_cpu((" in line and "=" in line]
    assert made
    assert not [line for line in made if "empty_strided_cpu((6, " in line.replace("(6, )", "")]


# ---- limits -----------------------------------------------------------------------------------


def racing(is_won: bool, *notes: str) -> tuple[torch_experts.Race, list[str]]:
    """A measurement with a given end, and the calls that it was asked for."""
    asked: list[str] = []

    def race(function: Any, node: fx.Node, graph: StepGraph) -> tuple[bool, tuple[str, ...]]:
        asked.append(function.__name__)
        return is_won, notes

    return race, asked


@pytest.mark.parametrize(
    ("changes", "capability", "reason"),
    [
        ({}, (8, 0), "capability 8.0; it takes compute capability 9.0 and 10.0"),
        ({}, (12, 0), "capability 12.0; it takes"),
        ({}, None, "no device of NVIDIA's; it takes compute capability"),
        ({"rows": 31}, HOPPER, "31 rows; it takes 32 or more"),
        ({"experts": 1024}, HOPPER, "1024 experts; it takes up to 1023"),
        ({"dtype": torch.float16}, HOPPER, "float16; it takes bfloat16"),
        ({"hidden": 60}, HOPPER, "rows of 60 numbers; it takes multiples of 8"),
        ({"inner": 44}, HOPPER, "rows of 44 numbers; it takes multiples of 8"),
        ({"strided": True}, HOPPER, "strides (6144, 1, 96) at 0; it takes contiguous"),
        ({"offset": 1}, HOPPER, "at 1; it takes contiguous ones at multiples of 8"),
    ],
)
def test_limits(changes: dict[str, Any], capability: tuple[int, int] | None, reason: str) -> None:
    """What cannot run is neither measured nor noted: there is another kernel."""
    node, graph = experts_step(**changes)
    race, asked = racing(True)
    binding, _ = torch_experts.torch_bindings(capability, race)
    assert reason in str(binding.refuses(node, graph))
    notes: list[str] = []
    assert BindKernels((binding,), notes.append).apply(graph) == 0
    assert not asked
    assert not notes


def test_ranks_do_not_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    node, graph = experts_step()
    monkeypatch.setattr(torch_experts, "is_collective", lambda target: True)
    binding, _ = torch_experts.torch_bindings(HOPPER, racing(True)[0])
    assert "ranks agree" in str(binding.refuses(node, graph))


@pytest.mark.parametrize("name", ["experts", "relu2_experts"])
@pytest.mark.parametrize("capability", torch_experts.CAPABILITIES)
def test_the_winner_is_bound(name: str, capability: tuple[int, int]) -> None:
    """The library's calls where it wins, the next candidate where it loses; and the notes."""
    reference = references()[name]
    other = Binding("next", reference, torch.ops.aten.add.Tensor, lambda node, graph: None)
    for is_won in (True, False):
        _, graph = experts_step(name)
        race, asked = racing(is_won, "a damaged row")
        notes: list[str] = []
        bindings = (*torch_experts.torch_bindings(capability, race), other)
        assert BindKernels(bindings, notes.append).apply(graph) == 1
        assert asked == [name]
        assert notes == ["a damaged row"]
        targets = [str(n.target) for n in graph.graph.nodes if n.op == "call_function"]
        assert str(reference) not in targets
        assert targets.count("aten._grouped_mm.default") == 2 * is_won
        assert targets.count("aten.add.Tensor") == (not is_won)
        ((given,),) = graph.graph.output_node().args
        assert isinstance(given, fx.Node)
        assert given.meta["val"].shape == (32, 64)
        assert not is_won or given.meta["val"].dtype == BF16
        graph.graph.lint()


def test_batch_invariance_refuses_it() -> None:
    """`open_cuda` does not bind it then, and the last check would find it."""
    _, graph = experts_step()
    BindKernels(torch_experts.torch_bindings(HOPPER, racing(True)[0])).apply(graph)
    with pytest.raises(BackendError, match=r"_grouped_mm: PyTorch's sums depend on the rows"):
        CheckInvariance().apply(graph)


# ---- whole steps ------------------------------------------------------------------------------

OPTIONS = plan_of(
    spec_tokens=2, batch_buckets=(2,), max_len=64, page_size=4, prefill_chunk=32, num_pages=40,
    sampling=False,
)  # fmt: skip
PROMPTS = [[5, 9, 14, 3, 7, 22] * 6, [41, 8], [60, 3, 8, 17, 2] * 7]


def _backend(bindings: Sequence[Binding]) -> CudaBackend:
    return CudaBackend(NullGraphs(), lower_eagerly, bindings, device="cpu")


@cache
def _plain_compiler(directory: Path) -> StepCompiler:
    return StepCompiler(load(directory, "bfloat16", True), OPTIONS, _backend(()))


def _prompt_step(directory: Path, bindings: Sequence[Binding]) -> StepGraph:
    compiler = beside(_plain_compiler(directory), OPTIONS, _backend(bindings))
    (key,) = [key for key in compiler.keys if key.phase == "prefill"]
    return compiler.rewritten(key)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
def test_steps_emit_the_same_tokens(family: str, checkpoint: Callable[..., Path]) -> None:
    """Prompts of 32 rows take the library's experts; decode steps have fewer rows."""
    race, asked = racing(True)
    bindings = torch_experts.torch_bindings(HOPPER, race)
    ours, theirs = (
        compile_on(checkpoint(family), _backend(found), OPTIONS, "bfloat16")
        for found in (bindings, ())
    )
    called = {
        key.phase: sum("_grouped_mm" in str(n.target) for n in step.graph.graph.nodes)
        for key, step in ours.program.steps.items()
    }
    assert called["decode"] == 0 < called["prefill"]
    assert len(asked) > 0
    assert ours.generate(PROMPTS, 8) == theirs.generate(PROMPTS, 8)
    assert ours.stats.accepted == theirs.stats.accepted
    _same_pages(ours, theirs)


def _same_pages(ours: SpecModel, theirs: SpecModel) -> None:
    """What layers behind the experts wrote: tokens alone would hide much."""
    pools = {n: t for n, t in theirs.program.shared.items() if n.startswith("kv.")}
    assert pools
    for name, wanted in pools.items():
        found = ours.program.shared[name][1:]
        error = (found - wanted[1:]).nan_to_num(0.0).float().norm()
        assert error <= 2**-5 * wanted[1:].nan_to_num(0.0).float().norm(), name


@torch.no_grad()
def test_what_walks_a_step_knows_its_calls(checkpoint: Callable[..., Path]) -> None:
    """Kernels of the driver's copy, memory, and layers that repeat."""
    bound = _prompt_step(
        checkpoint("glm4_moe"), torch_experts.torch_bindings(HOPPER, racing(True)[0])
    )
    plain = _prompt_step(checkpoint("glm4_moe"), ())
    calls = sum("_grouped_mm" in str(n.target) for n in bound.graph.nodes)
    assert kernel_count(bound) >= kernel_count(plain) + 10 * calls // 2
    names = {item.name for item in live_memory(bound)}
    products = {n.name for n in bound.graph.nodes if "_grouped_mm" in str(n.target)}
    assert products <= names
    assert peak_bytes(live_memory(bound)) > 0
    held = [s for s in cut_step(bound).segments for c in s.calls if "_grouped_mm" in str(c.target)]
    assert len(held) == calls


@pytest.mark.slow
@torch.no_grad()
def test_inductor_compiles_a_step_with_it(checkpoint: Callable[..., Path]) -> None:
    """The lowering for GPUs, on the CPU: the same buffers as by the same calls one by one."""
    graph = _prompt_step(
        checkpoint("glm4_moe"), torch_experts.torch_bindings(HOPPER, racing(True)[0])
    )
    run, buffers = lower_by_inductor(graph), graph.buffers()
    buffers["state.block_table"][1] = 1 + torch.arange(buffers["state.block_table"].shape[1])
    buffers["state.token_ids"][1] = torch.arange(buffers["state.token_ids"].shape[1]) % 50
    before = {name: tensor.clone() for name, tensor in buffers.items()}
    EagerBackend().lower(graph)()
    expected = {name: tensor.clone() for name, tensor in buffers.items()}
    for name, tensor in buffers.items():
        tensor.copy_(before[name])
    run()
    for name, tensor in buffers.items():
        torch.testing.assert_close(
            tensor, expected[name], rtol=2**-5, atol=2**-5, equal_nan=True, msg=name
        )

"""Experts on aiter's `fused_moe`, against a fake: CONTRACT TESTS, nothing of aiter runs here.

The fake undoes aiter's published shuffle before it computes, so it is wrong on other weights.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.fake_aiter import ALL, installer
from helpers.plans import plan_of
from helpers.small_graphs import run, small_graph
from helpers.tapes import op_names
from helpers.whole_steps import beside
from torch import Tensor

from mtpc.api import SpecModel
from mtpc.backends import aiter
from mtpc.backends.bindings import BindKernels
from mtpc.backends.cuda import CudaBackend
from mtpc.backends.eager import EagerBackend
from mtpc.backends.gpu.passes.check_invariance import CheckInvariance
from mtpc.backends.memory import live_memory
from mtpc.backends.null import NullGraphs
from mtpc.capture.graph import StepGraph
from mtpc.errors import BackendError, GraphError
from mtpc.models.load import load
from mtpc.program.compiler import StepCompiler
from mtpc.weights import orders
from mtpc.weights.orders import order_of
from mtpc.weights.recipes import Join
from mtpc.weights.weights import Weights

pytestmark = pytest.mark.with_triton

OURS, REFERENCE = "mtpc_aiter.experts.default", "mtpc.experts.default"
COUNT, HIDDEN, INNER = 5, 128, 256


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    yield from installer(tmp_path, monkeypatch)


@pytest.fixture
def found(install: Callable[..., None]) -> aiter.Found:
    install(ALL)
    return aiter.aiter_bindings()


def _tensors(rows: int = 6, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    ids = torch.rand(rows, COUNT, generator=generator).argsort(1)[:, :3].contiguous()
    return {
        "batch_x": normal(rows, HIDDEN).to(dtype),
        "batch_ids": ids,
        "batch_weights": normal(rows, 3).softmax(1),
        "batch_out": torch.zeros(rows, HIDDEN, dtype=dtype),
        "gate_up": (normal(COUNT, 2 * INNER, HIDDEN) / 8).to(dtype),
        "down": (normal(COUNT, HIDDEN, INNER) / 8).to(dtype),
    }


def _step(
    tensors: dict[str, Tensor], weights: Weights | None = None, times: int = 1, **given: Any
) -> StepGraph:
    """A step that calls the same experts several times in a row, over weights that mtpc owns."""

    def body(x: Tensor, ids: Tensor, choices: Tensor, out: Tensor, *held: Tensor) -> Tensor:
        for _ in range(times):
            x = torch.ops.mtpc.experts(x, *held, ids, choices, **given)
        return out.copy_(x)

    step = small_graph(body, **tensors)
    step.weights = weights or Weights(dict(step.weights.items()), owned=True)
    return step


def _bind(step: StepGraph, *found: aiter.Found) -> list[str]:
    """Bind a step; the notes on it."""
    notes: list[str] = []
    BindKernels([b for each in found for b in each.bindings], notes.append).apply(step)
    return notes


def _calls(step: StepGraph) -> set[str]:
    names = {str(n.target) for n in step.graph.nodes if n.op == "call_function"}
    return {name for name in names if "experts" in name}


def _shuffled(weight: Tensor) -> Tensor:
    shuffled: Tensor = sys.modules["aiter.ops.shuffle"].shuffle_weight(weight)
    return shuffled


# ---- what is computed ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_choices_are_translated(dtype: torch.dtype, found: aiter.Found) -> None:
    """Choices of nothing of every kind beside real ones, of expert 0 and the last one, too; NaN in
    rows and weights that no result may have. Bit for bit."""
    tensors = _tensors(dtype=dtype)
    nothing = (-1, COUNT, 2**40, -(2**40))
    ids, weights = tensors["batch_ids"], tensors["batch_weights"]
    ids[0] = torch.tensor([0, -1, COUNT])
    ids[1] = torch.tensor([nothing[2], COUNT - 1, nothing[3]])
    ids[2] = torch.tensor(nothing[:3])
    weights[0, 1:] = weights[1, 0] = weights[1, 2] = weights[2] = torch.nan
    # An idle row, and choices of nothing in a row of NaN.
    tensors["batch_x"][3] = tensors["batch_x"][2] = torch.nan
    weights[3], kept = torch.nan, weights[:3].clone()
    step = _step(tensors)
    step.buffer("batch.weights")[:3] = weights[:3].nan_to_num()  # The reference multiplies by 0.
    expected = run(step)
    step.buffer("batch.weights")[:3] = kept
    assert _bind(step, found) == []
    assert _calls(step) == {OURS}
    result = run(step)
    assert result[3].isnan().all()
    assert not result[[0, 1, 2, 4, 5]].isnan().any()
    assert torch.equal(result.nan_to_num(), expected.nan_to_num())
    assert sys.modules["aiter.fused_moe"].shapes == [(6, 4)]


def test_the_fake_is_wrong_on_other_weights(found: aiter.Found) -> None:
    """As aiter is: it says nothing."""
    tensors = _tensors()
    call = next(b.target for b in found.bindings if str(b.target) == OURS)
    mask = torch.tensor([1] * COUNT + [0]).int()
    ids = torch.nn.functional.pad(tensors["batch_ids"], (0, 1), value=COUNT).int()
    choices = torch.nn.functional.pad(tensors["batch_weights"], (0, 1))
    held = tensors["gate_up"], tensors["down"]
    plain = torch.ops.mtpc.experts(
        tensors["batch_x"], *held, tensors["batch_ids"], tensors["batch_weights"]
    )
    once = [_shuffled(each) for each in held]
    twice = [_shuffled(each) for each in once]
    results = [
        call(tensors["batch_x"], *each, ids, choices, mask) for each in (once, held, twice)
    ]  # fmt: skip
    assert [torch.equal(result, plain) for result in results] == [True, False, False]


# ---- the order of weights --------------------------------------------------------------------


def test_weights_are_shuffled_once_in_their_own_memory(
    found: aiter.Found, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several calls, steps, and a second table over the same tensors, as the memory plan's is."""
    monkeypatch.setattr(orders, "_ARRANGED_BYTES", 2 * 2 * HIDDEN * INNER)  # Some experts.
    tensors = _tensors()
    stored = {name: tensors[name].clone() for name in ("gate_up", "down")}
    memory = {name: tensors[name].data_ptr() for name in stored}
    first = _step(tensors, times=3)
    expected = run(first)
    second = _step(tensors, first.weights, times=3)
    planned = _step(tensors, times=3)
    for step in (planned, first, second):
        assert _bind(step, found) == []
        assert _calls(step) == {OURS}
        assert torch.equal(run(step), expected)
    for name, as_stored in stored.items():
        assert torch.equal(tensors[name], _shuffled(as_stored))
        assert not torch.equal(tensors[name], as_stored)
        assert tensors[name].data_ptr() == memory[name]
        assert order_of(tensors[name]) == aiter.SHUFFLED
    assert [name for name, _ in first.weights.items()] == ["gate_up", "down"], "no copy"
    assert first.weights.recipes == {}


def test_a_step_that_reads_it_as_stored_keeps_the_others_from_it(found: aiter.Found) -> None:
    tensors = _tensors()
    plain = _step(tensors, limit=7.0)
    expected = run(plain)
    notes = _bind(plain, found)
    assert notes == [
        "mtpc::experts does not run on aiter (it takes no limit): the slow PyTorch reference "
        "instead"
    ]
    other = _step(tensors, plain.weights)
    (note,) = _bind(other, found)
    assert "(another step reads gate_up as it is stored)" in note
    assert _calls(plain) == _calls(other) == {REFERENCE}
    assert torch.equal(run(plain), expected)
    assert order_of(tensors["gate_up"]) == order_of(tensors["down"]) == ""


@pytest.mark.parametrize("bound", [True, False], ids=["refused", "no aiter"])
def test_a_step_never_reads_shuffled_weights_as_stored(bound: bool, found: aiter.Found) -> None:
    tensors = _tensors()
    first = _step(tensors)
    _bind(first, found)
    later = _step(tensors, first.weights, limit=7.0)
    with pytest.raises(
        GraphError, match=r"experts_default reads gate_up, which other calls made the"
    ):
        _bind(later, *([found] if bound else []))


def test_one_step_whose_calls_disagree_is_an_error(found: aiter.Found) -> None:
    def body(x: Tensor, ids: Tensor, choices: Tensor, out: Tensor, *held: Tensor) -> Tensor:
        ours = torch.ops.mtpc.experts(x, *held, ids, choices)
        return out.copy_(torch.ops.mtpc.experts(ours, *held, ids, choices, gelu=True))

    step = small_graph(body, **_tensors())
    step.weights = Weights(dict(step.weights.items()), owned=True)
    with pytest.raises(GraphError, match="in another order; expected one kernel for all of them"):
        _bind(step, found)


def test_nothing_is_derived_of_shuffled_weights(found: aiter.Found) -> None:
    step = _step(_tensors())
    _bind(step, found)
    with pytest.raises(GraphError, match=r"is to be made of down, .* the order of aiter's shuffle"):
        step.weights.derive("joined", Join("cat", ("down", "down")))


def test_another_form_is_refused(found: aiter.Found) -> None:
    step = _step(_tensors())
    with pytest.raises(GraphError, match=r"some order made torch.bfloat16 \[5, 1\] of down's"):
        step.weights.orders.arrange("down", "some order", lambda part: part[:, :1, 0])


# ---- limits ----------------------------------------------------------------------------------


def _cut(tensors: dict[str, Tensor], hidden: int, inner: int) -> dict[str, Tensor]:
    cut = {name: tensors[name][:, :hidden].contiguous() for name in ("batch_x", "batch_out")}
    gate_up = tensors["gate_up"][:, : 2 * inner, :hidden].contiguous()
    return {**tensors, **cut, "gate_up": gate_up, "down": gate_up.new_ones(COUNT, hidden, inner)}


@pytest.mark.parametrize(
    ("changed", "given", "reason"),
    [
        (lambda t: _cut(t, 64, 128), {}, "experts of 128 features of 64; it takes multiples of"),
        (lambda t: _cut(t, 128, 192), {}, "experts of 192 features of 128; it takes multiples of"),
        (lambda t: {**t, "gate_up": t["gate_up"].mT.contiguous().mT}, {}, "or has gaps"),
        (lambda t: {**t, "down": torch.stack([t["down"]] * 2)[0]}, {}, "a part of something else"),
        (lambda t: {**t, "copy": t["down"].view(-1)}, {}, "down shares its memory with another"),
        (dict, {"gelu": True}, "it takes no gelu"),
        (dict, {"limit": 7.0, "limit_input": True}, "it takes no limit, limit_input"),
    ],
    ids=["hidden", "inner", "gaps", "part", "shared", "gelu", "limit"],
)
def test_limits(
    changed: Callable[..., dict[str, Tensor]], given: dict[str, Any], reason: str, found: Any
) -> None:
    tensors = changed(_tensors())
    copy = tensors.pop("copy", None)
    step = _step(tensors, **given)
    if copy is not None:
        step.weights.bind("copy", copy)
    expected = run(step)
    (note,) = _bind(step, found)
    assert reason in note
    assert torch.equal(run(step), expected), "the weights are untouched"


def test_float32_is_refused(found: aiter.Found) -> None:
    (note,) = _bind(_step(_tensors(dtype=torch.float32)), found)
    assert "(float32 rows with float32 weights)" in note


def test_weights_of_a_users_object_are_left_alone(found: aiter.Found) -> None:
    tensors = _tensors()
    (note,) = _bind(_step(tensors, Weights({n: tensors[n] for n in ("gate_up", "down")})), found)
    assert "the model object keeps its weights, and a copy is not made: pass its directory" in note


def test_computed_weights_are_refused(found: aiter.Found) -> None:
    def body(x: Tensor, ids: Tensor, choices: Tensor, out: Tensor, *held: Tensor) -> Tensor:
        gate_up, down = held
        return out.copy_(torch.ops.mtpc.experts(x, gate_up * 2, down, ids, choices))

    (note,) = _bind(small_graph(body, **_tensors()), found)
    assert "weights that a step computes; it takes those of the model" in note


def test_other_devices_are_refused(found: aiter.Found) -> None:
    (note,) = _bind(_step(_tensors()), aiter.aiter_bindings("gfx1250"))
    assert "(gfx1250; it is bound on gfx942 and gfx950)" in note
    assert _bind(_step(_tensors()), aiter.aiter_bindings("gfx942")) == []


def test_a_sum_by_atomic_additions_is_not_batch_invariant(found: aiter.Found) -> None:
    step = _step(_tensors())
    _bind(step, found)
    (call,) = (node for node in step.graph.nodes if str(node.target) == OURS)
    assert aiter.row_bound(call) == "fused_moe sums by atomic additions, in any order"
    with pytest.raises(BackendError, match="batch_invariant is True, and"):
        CheckInvariance().apply(step)


# ---- whole programs --------------------------------------------------------------------------

WIDE: dict[str, Any] = {"hidden_size": 128, "moe_intermediate_size": 128}
PROMPTS = [[5, 9, 2], [7] * 19, [3, 1, 4, 1, 5]]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Tiny models whose experts are as wide as aiter's tiles."""
    from helpers import tiny

    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            made[family] = tiny.make_checkpoint(family, tmp_path_factory.mktemp(family), **WIDE)
        return made[family]

    return make


@pytest.mark.slow
@pytest.mark.parametrize("spec_tokens", [pytest.param(0, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize(
    "family", ["glm4_moe", pytest.param("deepseek_v3", marks=pytest.mark.slow)]
)
def test_text_is_that_of_the_eager_backend(
    family: str, spec_tokens: int, wide: Callable[[str], Path], found: aiter.Found
) -> None:
    """Ragged prefill of several prompts, decode of buckets, and drafts, on the null device.

    Shuffled twice, a weight of 128 inputs is as it was (its 16 rows of 16 pieces are transposed):
    with an odd number of steps, one that is shuffled for each step would be right at last.
    """
    options = plan_of(
        spec_tokens=spec_tokens, batch_buckets=(1, 2, 3), max_len=64, prefill_rows=4
    )  # fmt: skip
    graphs = NullGraphs()
    backend = CudaBackend(graphs, EagerBackend().lower, found.bindings, device="cpu")
    loaded, texts = load(wide(family), "bfloat16", True), []
    plain = StepCompiler(loaded, options, EagerBackend())
    for compiler in (plain, beside(plain, options, backend)):  # The second one shuffles weights.
        model = SpecModel(loaded.served(), compiler.plan, compiler.compile())
        texts.append((model.generate(PROMPTS, 8), model.stats.accepted))
    assert texts[0] == texts[1]
    assert len(graphs.tapes) % 2 == 0
    for tape in graphs.tapes:
        names = op_names(tape)
        assert OURS in names, "every step"
        assert REFERENCE not in names
    assert not [note for note in backend.notes if "mtpc::experts" in note]
    assert {rows for rows, _ in sys.modules["aiter.fused_moe"].shapes} >= {1, 3, 64}


@pytest.mark.parametrize("shared", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_layers_that_are_copied_have_their_weights_shuffled(
    shared: bool, found: aiter.Found, tmp_path: Path
) -> None:
    """Where one of them keeps its weights as they are stored, every layer is traced."""
    from helpers import tiny

    tiny.make_checkpoint("glm4_moe", tmp_path, **WIDE, num_hidden_layers=7)
    options = plan_of(spec_tokens=0, batch_buckets=(2,), max_len=64, sampling=False)
    texts, graphs = [], NullGraphs()
    backend = CudaBackend(graphs, EagerBackend().lower, found.bindings, device="cpu")
    loaded = load(tmp_path, "bfloat16", False)
    experts: Any = loaded.target.get_decoder().layers[5].mlp.experts
    if shared:
        experts.down_proj.data = torch.stack([experts.down_proj.data] * 2)[0]
    plain = StepCompiler(loaded, options, EagerBackend())
    assert plain.pattern is not None
    assert plain.pattern.traced < 6, "layer 5 is a copy"
    for compiler in (plain, beside(plain, options, backend)):
        model = SpecModel(loaded.served(), compiler.plan, compiler.compile())
        assert (compiler.pattern is None) == (shared and compiler.backend is backend)
        texts.append(model.generate(PROMPTS, 8))
        order = aiter.SHUFFLED if compiler.backend is backend and not shared else ""
        assert order_of(experts.gate_up_proj) == order_of(experts.down_proj) == order
    assert texts[0] == texts[1]
    counts = {Counter(op_names(tape))[OURS] for tape in graphs.tapes}
    assert counts == {6 if not shared else 5}


def test_the_plan_counts_what_fused_moe_allocates(found: aiter.Found) -> None:
    step = _step(_tensors())
    _bind(step, found)
    (scratch,) = [live for live in live_memory(step) if "scratch" in live.name]
    assert scratch.nbytes >= 6 * 4 * INNER * 2

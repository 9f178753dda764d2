"""The cuda backend without a GPU: its capture on the null device, and what it says here.

What touches a device (`graphs.TorchGraphs`, `cuda.open_cuda` beyond its checks) cannot run here
and is not tested; docs/gpu.md says so.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.plans import plan_of
from helpers.tapes import counting_graph, lower_eagerly
from helpers.theorem import PROMPTS
from helpers.whole_steps import compiler_of
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import mtpc
from mtpc.api import SpecModel
from mtpc.backends.bindings import Binding, BindKernels
from mtpc.backends.cuda import INDUCTOR, CudaBackend, lift_tensors, lower_by_inductor
from mtpc.backends.eager import EagerBackend
from mtpc.backends.graphs import (
    WARM_UPS,
    TorchGraphs,
    capture_step,
    check_addresses,
)
from mtpc.backends.null import NullGraphs
from mtpc.backends.targets import parse_target
from mtpc.capture.graph import StepGraph
from mtpc.errors import BackendError, CaptureError, OptionError
from mtpc.layout import StepKey
from mtpc.models.load import load
from mtpc.models.place import place
from mtpc.program.compiler import StepCompiler
from mtpc.weights.recipes import Join, Packed, make

pytestmark = pytest.mark.with_triton

OPTIONS = dict(
    spec_tokens=3, batch_buckets=(1, 2), max_len=64, page_size=4, prefill_chunk=8, sampling=False
)


@pytest.fixture(scope="module")
def on_null(checkpoint: Callable[..., Path]) -> tuple[SpecModel, CudaBackend, NullGraphs]:
    """A model compiled by the cuda backend on recorded graphs, with the reference ops."""
    options, graphs = plan_of(**OPTIONS), NullGraphs()
    backend = CudaBackend(graphs, lower_eagerly, (), device="cpu")
    loaded = load(checkpoint("mimo"), "float64", True)
    program = StepCompiler(loaded, options, backend).compile()
    return SpecModel(loaded.served(), options, program), backend, graphs


def test_captured_steps_generate_what_eager_ones_do(
    on_null: tuple[SpecModel, CudaBackend, NullGraphs], compiled: Callable[..., Any]
) -> None:
    """Joins, leaves, partial rejections and two buckets, on graphs captured with an empty batch."""
    spec, backend, graphs = on_null
    eager = compiled("mimo", 3, batch_buckets=(2,))
    before = list(eager.stats.accepted)
    assert spec.generate(PROMPTS[2:7], 16) == eager.generate(PROMPTS[2:7], 16)
    accepted = [now - then for now, then in zip(eager.stats.accepted, before, strict=True)]
    assert spec.stats.accepted == accepted
    assert 0 < sum(spec.stats.accepted) < sum(spec.stats.drafted), "partial acceptance occurred"
    assert graphs.warm_ups == WARM_UPS * len(spec.program.steps)
    assert sum(tape.replays for tape in graphs.tapes) == sum(spec.program.replays.values())
    tokens = {str(key): key.bucket.num_tokens for key in spec.program.steps}
    order = [tokens[name] for name in backend.captured]
    assert order == [8, 8, 4], "the largest first"
    first, *others = (captured.pool_bytes for captured in backend.captured.values())
    assert max(others) < first / 2, "smaller steps use the memory of larger ones"


def test_capture_leaves_buffers_and_pages_as_they_were(
    on_null: tuple[SpecModel, CudaBackend, NullGraphs],
) -> None:
    """Even in the middle of serving: pages are not copied, so they must not be written."""
    spec, backend, _ = on_null
    spec.engine.add(PROMPTS[3], 24)
    for _ in range(4):
        spec.engine.step()
    step = spec.program.steps[StepKey.decode(1, 3)]
    assert step.buffers["state.committed_lens"].any(), "a request is being served"
    before = {name: tensor.clone() for name, tensor in step.buffers.items()}
    backend.capture(lower_eagerly(step.graph), step.graph)
    for name, tensor in step.buffers.items():
        assert torch.equal(tensor, before[name]), name


def test_a_moved_buffer_is_seen(on_null: tuple[SpecModel, CudaBackend, NullGraphs]) -> None:
    spec, backend, _ = on_null
    step = spec.program.steps[StepKey.decode(1, 3)]
    captured = backend.captured[step.graph.name]
    check_addresses(step.graph, captured.addresses)
    state = step.graph.module.get_submodule("state")
    there = state.token_ids
    state.token_ids = there.clone()
    with pytest.raises(CaptureError, match=r"state.token_ids moved"):
        check_addresses(step.graph, captured.addresses)
    state.token_ids = there


@pytest.mark.parametrize(
    ("function", "message"),
    [(lambda c: c[0].item(), "host"), (lambda c: c[c > 1], "depends on data")],
    ids=["item", "mask"],
)
def test_what_a_graph_would_freeze_is_refused(function: Any, message: str) -> None:
    graph = counting_graph(function)
    with pytest.raises(CaptureError, match=message):
        CudaBackend(NullGraphs(), lower_eagerly, ()).capture(graph.module, graph)


class _Cuda:
    """torch.cuda's allocator and capture, as far as `TorchGraphs` asks: bytes by what holds them.

    Attributes:
        cached: what warm-ups left, given back by `empty_cache`, which a capture calls.
        pool: what graphs hold.
        current: the current stream.
        captures: pool and stream of each capture.
    """

    def __init__(self, patch: pytest.MonkeyPatch):
        self.cached = self.pool = 0
        self.current: Any = "the caller's stream"
        self.captures: list[tuple[int, Any]] = []
        self._handles = itertools.count()
        cuda = dict(
            Stream=lambda device: _Stream(self), graph_pool_handle=self._handles.__next__,
            CUDAGraph=lambda: self, stream=lambda stream: nullcontext(),
            current_stream=lambda device: self.current,
            set_stream=lambda stream: setattr(self, "current", stream),
            memory_reserved=lambda device: self.cached + self.pool, empty_cache=self.empty,
            graph=self._graph,
        )  # fmt: skip
        for name, value in cuda.items():
            patch.setattr(torch.cuda, name, value)

    def empty(self) -> None:
        self.cached = 0

    def _graph(self, graph: Any, pool: int, stream: Any, capture_error_mode: str) -> _Cuda:
        self.captures.append((pool, stream))
        return self

    def replay(self) -> None:
        raise AssertionError("nothing is replayed here")

    def __enter__(self) -> None:
        self.empty()
        self.pool += 64
        self._before, self.current = self.current, self.captures[-1][1]

    def __exit__(self, kind: Any, *rest: Any) -> None:
        if kind is not None:  # As torch, which leaves the stream by its next line.
            raise RuntimeError("operation failed due to a previous error during capture")
        self.current = self._before


class _Stream:
    """A stream of `_Cuda`."""

    def __init__(self, cuda: _Cuda):
        self._cuda = cuda

    def wait_stream(self, stream: Any) -> None:
        assert stream == self._cuda.current

    def synchronize(self) -> None:
        self._cuda.cached += 1000  # Of a warm-up.


def test_a_graphs_bytes_are_those_of_its_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not less what warm-ups had left, which a capture gives back before it begins."""
    cuda, graph = _Cuda(monkeypatch), counting_graph(lambda counter: counter.add_(1))
    captured = capture_step(graph.module, graph, TorchGraphs(torch.device("cpu")))
    assert captured.pool_bytes == cuda.pool == 64


@pytest.mark.parametrize(
    ("error", "seen"),
    [
        (RuntimeError("not permitted when stream is capturing"), CaptureError),
        (BackendError("no such kernel"), BackendError),
    ],
)
def test_the_first_error_of_a_capture_is_told(
    error: Exception, seen: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ending a capture that has failed raises another one, which says nothing. Later captures get
    a pool and a stream of their own."""
    cuda = _Cuda(monkeypatch)
    graphs = TorchGraphs(torch.device("cpu"))

    def run() -> None:
        raise error

    graphs.record(lambda: None)
    graphs.record(lambda: None)
    with pytest.raises(seen, match=str(error)):
        graphs.record(run)
    assert cuda.current == "the caller's stream"
    graphs.record(lambda: None)
    first, second, failed, last = cuda.captures
    assert first == second == failed
    assert last[0] != failed[0]
    assert last[1] is not failed[1]


def test_a_model_on_another_device_of_the_kind_is_not_taken() -> None:
    """Captured on one device's stream, it would run on the other's memory."""
    embedding = SimpleNamespace(weight=SimpleNamespace(device=torch.device("cuda:1")))
    target = SimpleNamespace(get_input_embeddings=lambda: embedding)
    model: Any = SimpleNamespace(target=target, owned=False)
    assert place(model, "cuda") is place(model, "cuda:1") is model
    with pytest.raises(OptionError, match=r"is on cuda:1; this backend runs on cuda:0"):
        place(model, "cuda:0")


# ---- binding ---------------------------------------------------------------------------------


def _bind(checkpoint: Path, *bindings: Binding, **changes: Any) -> tuple[StepGraph, list[str]]:
    """A decode step of a checkpoint, bound; and the notes taken on the way."""
    notes: list[str] = []
    graph = _decode_graph(checkpoint, **changes)
    BindKernels(bindings, notes.append).apply(graph)
    return graph, notes


def _targets(graph: StepGraph) -> set[str]:
    return {str(node.target) for node in graph.graph.nodes if node.op == "call_function"}


def test_the_first_candidate_whose_limits_hold_is_taken(checkpoint: Callable[..., Path]) -> None:
    reference, other = torch.ops.mtpc.paged_attention.default, torch.ops.mtpc.write_cache.default

    def binding(library: str, target: Any, reason: str | None) -> Binding:
        return Binding(library, reference, target, lambda node, graph: reason)

    bindings = (
        binding("fast", torch.ops.aten.add.Tensor, "too many rows"),
        binding("good", torch.ops.aten.sub.Tensor, None),
        binding("late", torch.ops.aten.mul.Tensor, None),
        Binding("none", other, torch.ops.aten.add.Tensor, lambda node, graph: "no"),
    )
    graph, notes = _bind(checkpoint("mimo"), *bindings)
    calls = [n for n in graph.graph.nodes if n.target is torch.ops.aten.sub.Tensor]
    attentions = [n for n in calls if len(n.args) > 5]
    assert len(attentions) == 2 + 3, "two decoder layers, and the MTP layer three times"
    assert "mtpc.paged_attention.default" not in _targets(graph)
    assert "mtpc.write_cache.default" in _targets(graph), "its one candidate refuses"
    assert set(notes) == {
        "mtpc::paged_attention does not run on fast (too many rows): good instead",
        "mtpc::write_cache does not run on none (no): the slow PyTorch reference instead",
        "mtpc::accept has no GPU kernel: the slow PyTorch reference instead",
    }


def test_an_op_without_candidates_is_noted(checkpoint: Callable[..., Path]) -> None:
    _, notes = _bind(checkpoint("glm4_moe"), spec_tokens=0)
    assert "mtpc::experts has no GPU kernel: the slow PyTorch reference instead" in notes


def test_packed_weights_are_where_the_weights_are() -> None:
    """Joined ones, too; packing itself happens in the host's memory."""
    with FakeTensorMode():
        # Stands for a GPU, whose fake tensors torch's builds for the CPU cannot index.
        weight = torch.empty(64, 64, dtype=torch.bfloat16, device="meta")
        for part in ("one", Join("cat", ("one", "other"))):
            made = make(Packed(part), lambda name: weight)
            assert made.device.type == "meta"


# ---- lowering --------------------------------------------------------------------------------


def _decode_graph(checkpoint: Path, **changes: Any) -> StepGraph:
    """A decode step of one request, on the references."""
    compiler = compiler_of(checkpoint, "float64", EagerBackend(), **{**OPTIONS, **changes})
    return compiler.rewritten(StepKey.decode(1, compiler.plan.spec_tokens))


@torch.no_grad()
def test_lifted_graphs_take_all_tensors_as_arguments(checkpoint: Callable[..., Path]) -> None:
    graph = _decode_graph(checkpoint("mimo"))
    module, tensors = lift_tensors(graph)
    assert not any(node.op == "get_attr" for node in module.graph.nodes)
    assert any(node.op == "get_attr" for node in graph.graph.nodes), "the graph itself is kept"
    held = {t.data_ptr() for t in (*graph.module.buffers(), *graph.module.parameters())}
    assert {t.data_ptr() for t in tensors} <= held
    graph.module()
    expected = {name: tensor.clone() for name, tensor in graph.buffers().items()}
    for name, tensor in graph.buffers().items():
        tensor.fill_(graph.layout[name].pad)
    module(*tensors)
    for name, tensor in graph.buffers().items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.slow
@pytest.mark.parametrize("spec_tokens", [0, 3])
@torch.no_grad()
def test_inductor_mutates_the_very_buffers(
    spec_tokens: int, checkpoint: Callable[..., Path]
) -> None:
    """The lowering for GPUs, on the CPU: Inductor's code leaves in the buffers what eager does."""
    options = plan_of(**{**OPTIONS, "spec_tokens": spec_tokens, "batch_buckets": (1,)})
    directory = checkpoint("mimo") if spec_tokens else checkpoint("mimo", "plain")
    loaded = load(directory, "float64", spec_tokens > 0)
    compiler = StepCompiler(loaded, options, EagerBackend())
    graph = compiler.rewrite(compiler.trace(StepKey.decode(1, spec_tokens)))
    run = lower_by_inductor(graph)
    buffers = graph.buffers()
    buffers["state.block_table"][1] = 1 + torch.arange(buffers["state.block_table"].shape[1])
    buffers["state.token_ids"][1] = 7
    buffers["state.committed_lens"][1], buffers["state.remaining_tokens"][1] = 0, 9
    buffers["batch.state_indices"].fill_(1)
    before = {name: tensor.clone() for name, tensor in buffers.items()}
    graph.module()
    expected = {name: tensor.clone() for name, tensor in buffers.items()}
    assert expected["state.committed_lens"][1] == 1, "the request went on by a token"
    for name, tensor in buffers.items():
        tensor.copy_(before[name])
    run()
    for name, tensor in buffers.items():
        # Slots that nobody wrote hold what memory held, NaN too; rotary angles are float32.
        torch.testing.assert_close(
            tensor, expected[name], rtol=1e-6, atol=1e-6, equal_nan=True,
            msg=partial("{}: {}".format, name),
        )  # fmt: skip


@pytest.mark.slow
def test_inductor_rounds_a_residual_sum_before_its_norm() -> None:
    """What `emulate_precision_casts` is for: fused, the norm would be that of the float32 sum."""

    def body(x: torch.Tensor, added: torch.Tensor, weight: torch.Tensor) -> Any:
        total = x + added
        wide = total.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return total, weight * normed.to(total.dtype)

    generator = torch.Generator().manual_seed(0)
    shapes = ((64, 1024), (64, 1024), (1024,))
    inputs = [torch.randn(shape, generator=generator).bfloat16() for shape in shapes]
    graph, expected = make_fx(body)(*inputs), body(*inputs)

    def differing(options: dict[str, Any]) -> float:
        with torch.no_grad():
            found = torch._inductor.compile(graph, inputs, options=options)(*inputs)
        assert torch.equal(found[0], expected[0])
        return float((found[1] != expected[1]).float().mean())

    assert differing(dict(INDUCTOR)) < 0.001
    assert differing({**INDUCTOR, "emulate_precision_casts": False}) > 0.1


# ---- messages --------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_message_says_what_to_do(checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(BackendError, match=r"needs a GPU.*(built for the CPU only|finds none)"):
        mtpc.compile(checkpoint("mimo"), backend="cuda")


def test_targets() -> None:
    assert parse_target("cuda:sm_90") is parse_target("CUDA:90")
    assert parse_target("hip:gfx942").warp_size == 64
    assert parse_target("hip:gfx1201").warp_size == 32
    for name in ("hip:gfx1", "hip:gfx1250"):
        with pytest.raises(
            OptionError, match=rf"unknown target '{name}'; expected one of hip:gfx942, "
        ):
            parse_target(name)

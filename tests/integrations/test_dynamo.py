"""`torch.compile(module, backend="mtpc")`: outputs, weights that change, and what is said.

Most tests let torch run what is left to Inductor, because a graph of Inductor's takes seconds to
compile. Those named `inductor` are the whole way.
"""

from __future__ import annotations

import copy
import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, fx, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.nn import functional as F
from transformers import DynamicCache, StaticCache

from mtpc.integrations.dynamo import Backend, Report, backend
from mtpc.models.seams import CACHE

TOLERANCE, BY_INDUCTOR = 2**-6, 2**-5
"""Of the largest value, whose last bit in bfloat16 is 2^-8 to 2^-7 of it. Kernels round where the
module does and sum in other orders; Inductor also leaves out roundings between what it fuses."""
SIZES: dict[str, Any] = dict(
    vocab_size=96,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
    initializer_range=0.08,
)
EXPERTS: dict[str, Any] = dict(
    num_experts=4, num_experts_per_tok=4, moe_intermediate_size=32, decoder_sparse_step=1
)
"""All are chosen for each token: with fewer, a rounding decides between two at times."""
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "qwen2": (transformers.Qwen2Config, {}),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 16}),
    "llama": (transformers.LlamaConfig, {}),
    "qwen3_moe": (transformers.Qwen3MoeConfig, {"head_dim": 16, **EXPERTS}),
}

HIDES_A_CACHE = pytest.mark.filterwarnings(
    "ignore:Dynamo detected a call to a .functools.lru_cache"
)
"""transformers' experts ask for the version of torch through one."""


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def tiny_model(name: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    torch.manual_seed(0)
    make, more = MODELS[name]
    model = transformers.AutoModelForCausalLM.from_config(make(**SIZES, **more), dtype=dtype)
    return model.eval()


def plain(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """In Inductor's place: torch runs the graph."""
    return module.forward


def compiled(module: Any, rest: Any = plain, **options: Any) -> tuple[Any, Backend]:
    """A module by a backend of its own; a graph that mtpc takes no part of is an error."""
    ours = Backend(rest)
    options = {"fallback": "error", **options}
    return torch.compile(module, backend=ours, fullgraph=True, options=options), ours


def check_close(found: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    largest = expected.float().abs().max()
    assert (found.float() - expected.float()).abs().max() <= tolerance * largest


def check_tokens(
    called: Any, model: Any, parts: Sequence[Tensor], make_cache: Any, tolerance: float = TOLERANCE
) -> None:
    """Forwards of parts of a text, each over its own cache."""
    caches = [make_cache(), make_cache()]
    for part in parts:
        found = called(part, **{CACHE: caches[0]}).logits
        check_close(found, model(part, **{CACHE: caches[1]}).logits, tolerance)


class Norm(nn.Module):
    """RMSNorm as transformers has it."""

    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class Block(nn.Module):
    """Norm, SwiGLU, residual sum; counts its calls in a buffer that it does not read."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.norm = Norm(64)
        self.gate, self.up = nn.Linear(64, 96, bias=False), nn.Linear(64, 96, bias=False)
        self.down = nn.Linear(96, 64, bias=False)
        self.to(dtype)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


def rows(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, 64, dtype=dtype)


@HIDES_A_CACHE
@pytest.mark.parametrize("name", ["qwen2", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
@pytest.mark.usefixtures("without_gradients")
def test_models_compute_what_they_compute(name: str) -> None:
    """A prompt and one more token over a DynamicCache, and a batch without a cache."""
    model = tiny_model(name)
    called, ours = compiled(model)
    ids = torch.randint(0, 96, (2, 7))
    check_tokens(called, model, (ids, ids[:, :1]), partial(DynamicCache, config=model.config))
    check_close(called(ids[:, :5]).logits, model(ids[:, :5]).logits)
    for report in ours.reports:
        # The joint projections, and from an attention to the next one a chain.
        assert report.kernels["mtpc_cpu.linear_chain.default"] >= 1
        assert "aten.scaled_dot_product_attention.default" in report.left
        assert "aten.linear.default" not in report.left


@pytest.mark.usefixtures("without_gradients")
def test_a_static_cache_is_written() -> None:
    model = tiny_model("llama")
    called, ours = compiled(model)
    ids = torch.randint(0, 96, (1, 6))
    caches = [StaticCache(config=model.config, max_cache_len=16) for _ in range(2)]
    for cache in caches:
        model(ids, **{CACHE: cache})
    for _ in range(3):
        found = called(ids[:, :1], **{CACHE: caches[0]}).logits
        check_close(found, model(ids[:, :1], **{CACHE: caches[1]}).logits)
    assert len(ours.reports) == 1
    for one, other in zip(caches[0].layers, caches[1].layers, strict=True):
        check_close(one.keys, other.keys)
        check_close(one.values, other.values)


@pytest.mark.usefixtures("without_gradients")
def test_inductor_compiles_the_rest() -> None:
    """By the name of the entry point; several batch sizes, inference mode, changed weights."""
    block = Block()
    called = torch.compile(block, backend="mtpc", options={"fallback": "error"})
    for batch in (2, 3, 5):
        check_close(called(x := rows(batch, 7)), block(x))
    with torch.inference_mode():
        check_close(called(x), block(x))
    block.up.weight.mul_(3)
    check_close(called(x), block(x))
    assert block.calls == 10, "a write that nothing reads was lost"
    assert len(backend.reports) <= 3, "one graph for a size, one for all, one in inference mode"


@pytest.mark.slow
@HIDES_A_CACHE
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.usefixtures("without_gradients")
def test_inductor_compiles_the_rest_of_models(name: str) -> None:
    model = tiny_model(name)
    called = torch.compile(model, backend="mtpc", options={"fallback": "error"})
    dynamic = partial(DynamicCache, config=model.config)
    static = partial(StaticCache, config=model.config, max_cache_len=16)
    for shape in ((2, 7), (3, 9), (4, 1)):
        ids = torch.randint(0, 96, shape)
        for make_cache in (dynamic, static):
            check_tokens(called, model, (ids, ids[:, :1], ids[:, :1]), make_cache, BY_INDUCTOR)


def updated_in_place(block: Block) -> None:
    block.up.weight.mul_(3)


def given_other_memory(block: Block) -> None:
    block.up.weight.data = block.up.weight.data * 3


def given_another_parameter(block: Block) -> None:
    block.up.weight = nn.Parameter(block.up.weight * 3)


def trained(block: Block) -> None:
    optimizer = torch.optim.SGD(block.parameters(), lr=1.0)
    with torch.enable_grad():
        block(rows(4)).float().square().sum().backward()
    optimizer.step()


def loaded(block: Block) -> None:
    block.load_state_dict(Block(seed=1).state_dict())


@pytest.mark.parametrize(
    "change", [updated_in_place, given_other_memory, given_another_parameter, trained, loaded]
)
@pytest.mark.usefixtures("without_gradients")
def test_weights_that_change_are_packed_anew(change: Callable[[Block], None]) -> None:
    block, x = Block(), rows(3)
    called, ours = compiled(block)
    before = called(x)
    change(block)
    expected = block(x)
    assert (before - expected).abs().max() > 0.1, "the change is too small to be seen"
    check_close(called(x), expected)
    assert len(ours.reports) <= 2


@pytest.mark.usefixtures("without_gradients")
def test_reset_packs_anew() -> None:
    """What `.data` changes raises no counter; torch.compiler.reset() forgets packed weights."""
    block, x = Block(), rows(3)
    called, _ = compiled(block)
    called(x)
    block.up.weight.data.mul_(3)
    torch.compiler.reset()
    check_close(called(x), block(x))


@pytest.mark.usefixtures("without_gradients")
def test_equal_modules_share_a_graph_and_no_weights() -> None:
    """Dynamo compiles the class once; each call then brings its own module's parameters."""
    ours = Backend(plain)
    blocks = [Block(seed=seed) for seed in range(3)]
    x = rows(3)
    for block in blocks:
        block.compile(backend=ours, fullgraph=True, options={"fallback": "error"})
    for _ in range(2):
        for block in blocks:
            check_close(block(x), Block.forward(block, x))


@pytest.mark.usefixtures("without_gradients")
def test_graphs_of_a_module_share_packed_weights() -> None:
    block = Block()
    called, ours = compiled(block)
    called(rows(3))
    tensors = [id(tensor) for tensor in ours._store.values()]
    called(rows(1, 1))
    assert len(ours.reports) == 2
    assert [id(tensor) for tensor in ours._store.values()] == tensors
    assert len(tensors) == 2, "gate and up as one, and down"


@pytest.mark.usefixtures("without_gradients")
def test_a_weight_that_the_graph_writes_is_not_packed() -> None:
    class Decays(Block):
        def forward(self, x: Tensor) -> Tensor:
            self.alias.mul_(-8)
            return super().forward(x)

    block, x = Decays(), rows(3)
    block.alias = nn.Parameter(block.up.weight.data)
    called, ours = compiled(block)
    first, second = block(x), block(x)
    block.alias.mul_(1 / 64)
    check_close(called(x), first)
    check_close(called(x), second)
    assert (first - second).abs().max() > 0.1
    assert ours.reports[0].left["aten.linear.default"] == 1


@pytest.mark.usefixtures("without_gradients")
def test_weights_are_read_by_data() -> None:
    """As vLLM's norms read theirs: tracing does not see `.data`, and made a constant of it."""

    class Reads(Block):
        def forward(self, x: Tensor) -> Tensor:
            y = self.norm.weight.data * F.rms_norm(x, (64,), eps=1e-6)
            return x + F.linear(F.linear(y, self.up.weight.data), self.down.weight)

    block, x = Reads(), rows(3)
    called, ours = compiled(block)
    check_close(called(x), block(x))
    for changed in (block.norm.weight, block.up.weight):
        before = block(x)
        changed.mul_(-4)
        check_close(called(x), block(x))
        assert (block(x) - before).abs().max() > 0.1
    assert len(ours.reports) == 1
    assert ours.reports[0].kernels["mtpc_cpu.packed_linear.default"] == 2


@pytest.mark.usefixtures("without_gradients")
def test_writes_between_reads_are_left_alone() -> None:
    """Joint projections would read the input once, before the write or after it."""

    class Writes(Block):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            gate = self.gate(y)
            y[..., :1].mul_(-8)
            return self.down(F.silu(gate) * self.up(y))

    block, x, ours = Writes(), rows(3), Backend(plain)
    assert torch.equal(torch.compile(block, backend=ours)(x), block(x))
    assert "mul_" in str(ours.reports[0].reason)


def test_graphs_that_need_gradients_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    block = Block()
    twin, ours = copy.deepcopy(block), Backend(plain)
    called = torch.compile(block, backend=ours)
    x = rows(3)
    with caplog.at_level(logging.WARNING, "mtpc"):
        for module in (called, twin):
            module(x).float().square().mean().backward()
    assert torch.equal(block.up.weight.grad, twin.up.weight.grad)
    (report,) = ours.reports
    assert report.reason is not None
    assert report.kernels == {}
    assert caplog.messages == [
        "a graph is left to Inductor: it may need gradients, and mtpc's kernels have none; call "
        "the module under torch.no_grad() or torch.inference_mode()"
    ]
    with torch.no_grad():
        check_close(called(x), twin(x))
    assert ours.reports[1].kernels


def float32(block: Block) -> Block:
    return block.float()


def made_in_inference_mode(block: Block) -> Block:
    with torch.inference_mode():
        return copy.deepcopy(block)


@pytest.mark.parametrize("change", [float32, made_in_inference_mode])
@pytest.mark.usefixtures("without_gradients")
def test_graphs_without_a_weight_to_pack_are_left_alone(change: Callable[[Block], Block]) -> None:
    """Tensors of inference mode have no version counter, so a change of them would not be seen."""
    block, ours = change(Block()), Backend(plain)
    x = rows(3, dtype=block.up.weight.dtype)
    with torch.inference_mode():
        assert torch.equal(torch.compile(block, backend=ours)(x), block(x))
    (report,) = ours.reports
    assert report.reason == "no linear layer of it has a parameter in bfloat16"
    with pytest.raises(BackendCompilerFailed, match="no part of a graph: no linear layer"):
        compiled(block)[0](x)


@pytest.mark.usefixtures("without_gradients")
def test_autocast_is_left_alone() -> None:
    block, ours = Block(torch.float32), Backend(plain)
    x = rows(3, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(torch.compile(block, backend=ours)(x), block(x))
    assert "torch.autocast" in str(ours.reports[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scheme", ["int8", "int4-g32"])
@pytest.mark.usefixtures("without_gradients")
def test_quantised_weights(scheme: str, dtype: torch.dtype) -> None:
    """Near the module's own outputs, and not equal to them; the head is told by its name."""
    block, x = Block(dtype), rows(5, dtype=dtype)
    called, ours = compiled(block, quantize=scheme)
    found, expected = called(x), block(x)
    difference = (found - expected).float().norm() / (expected - x).float().norm()
    assert 0 < difference < {"int8": 0.03, "int4-g32": 0.2}[scheme]
    assert ours.reports[0].rewrites["pack-groups"] == 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"options": {"quantise": "int8"}}, "unknown option 'quantise'; did you mean 'quantize'"),
        ({"options": {"quantize": "int4"}}, "quantize is 'int4'.*expected one of iq4_nl"),
        ({"options": {"fallback": "eager"}}, "fallback is 'eager'; expected 'inductor' or 'error'"),
        ({"mode": "max-autotune"}, "mode is 'max-autotune', a setting of the backend 'inductor'"),
    ],
)
@pytest.mark.usefixtures("without_gradients")
def test_options_that_are_none(given: Any, message: str) -> None:
    with pytest.raises(BackendCompilerFailed, match=message):
        torch.compile(Block(), backend="mtpc", **given)(rows(2))


@pytest.mark.usefixtures("without_gradients")
def test_the_report(caplog: pytest.LogCaptureFixture) -> None:
    called, ours = compiled(Block())
    with caplog.at_level(logging.INFO, "mtpc"):
        called(rows(3))
    (report,) = ours.reports
    assert isinstance(report, Report)
    assert dict(report.kernels) == {
        "mtpc_cpu.rms_norm.default": 1,
        "mtpc_cpu.packed_gated_linear.default": 1,
        "mtpc_cpu.packed_linear.default": 1,
    }
    assert dict(report.left) == {"aten.add.Tensor": 1, "aten.add_.Tensor": 1}
    assert caplog.messages == [str(report)]
    assert str(report).endswith("Inductor compiles 1 aten.add.Tensor, 1 aten.add_.Tensor")


@pytest.mark.usefixtures("without_gradients")
def test_packed_weights_go_with_their_module() -> None:
    block = Block()
    called, ours = compiled(block)
    called(rows(3))
    assert len(ours._store) == 2
    del block, called
    gc.collect()
    assert len(ours._store) == 0

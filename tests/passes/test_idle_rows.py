"""skip-idle-rows: kernels leave out rows that are not in use, and nothing that is used changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.batches import bf16, make_mixture
from helpers.families import EACH_FAMILY_OF_FEW, TINY
from helpers.grouped import experts_call, random_weight
from helpers.whole_steps import compiler_of, model_of
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mtpc.api import SpecModel
from mtpc.backends.cpu.backend import CpuBackend
from mtpc.backends.cpu_kernels import kernel_table, load_kernels
from mtpc.backends.eager import EagerBackend
from mtpc.ops.ragged import keep_rows
from mtpc.weights.packing import pack

load_kernels()
NAMESPACES = (torch.ops.mtpc_cpu, torch.ops.mtpc)
PACKED = ("pack-weights", "quantise-draft", "skip-idle-rows")
K = 2


def linear(namespace: Any, x: Tensor, rows: Tensor | None) -> Tensor:
    return namespace.packed_linear(x, pack(bf16(70, 96)), 70, bf16(70), rows)


def grouped(namespace: Any, x: Tensor, rows: Tensor | None) -> Tensor:
    return namespace.grouped_linear(x, *random_weight("int8", (70, 96), 96).operands, None, rows)


def experts(namespace: Any, x: Tensor, rows: Tensor | None) -> Tensor:
    mix = make_mixture(len(x), dtype=torch.bfloat16, hidden=96, intermediate=64)
    weights = (pack(mix.gate_up), pack(mix.down), mix.ids, mix.weights)
    return namespace.packed_experts(x, *weights, 0.4, True, False, rows)


def head_linear(namespace: Any, x: Tensor, rows: Tensor | None) -> Tensor:
    heads = x.view(-1, 3, 32)
    return namespace.packed_head_linear(heads, pack(bf16(3, 40, 32)), 40, rows).flatten(1)


def grouped_experts(namespace: Any, x: Tensor, rows: Tensor | None) -> Tensor:
    arguments = experts_call(len(x), ("int8", 96, ""), torch.bfloat16, 96)
    return namespace.grouped_experts(x, *arguments[1:], 0.4, True, False, rows)


CALLS = [linear, head_linear, grouped, experts, grouped_experts]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("used", [0, 1, 12, 13, 20, 99])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("namespace", NAMESPACES, ids=["kernel", "reference"])
def test_idle_rows_are_not_read_and_others_as_ever(
    namespace: Any, call: Callable[..., Tensor], used: int, dtype: torch.dtype
) -> None:
    """What stands in idle rows is never looked at: not even that it is not a number."""
    x = bf16(20, 96, seed=1)
    expected = call(namespace, x, None)
    found = call(namespace, torch.cat([x[:used], torch.full_like(x[used:], torch.nan)]),
                 torch.tensor([used], dtype=dtype))  # fmt: skip
    assert torch.equal(found[:used], expected[:used])
    assert bool(expected.any(-1).all())


@pytest.mark.parametrize("used", [0, 1, 12, 20, 99])
@pytest.mark.parametrize("namespace", NAMESPACES, ids=["kernel", "reference"])
def test_idle_rows_are_cleared(namespace: Any, used: int) -> None:
    for shape, features in (((20, 7), 1), ((1, 20, 7), 1), ((20, 3, 7), 2)):
        x = torch.full(shape, torch.nan, dtype=torch.bfloat16)
        rows = x.view(20, -1)
        rows[:used] = 1
        namespace.clear_idle_rows(x, torch.tensor([used]), features)
        assert torch.equal(rows, (torch.arange(20) < used)[:, None].expand_as(rows).bfloat16())
        torch.library.opcheck(
            namespace.clear_idle_rows.default, (x, torch.tensor([used]), features),
            test_utils=("test_schema", "test_faketensor"),
        )  # fmt: skip


def test_rows_are_counted_over_leading_dimensions() -> None:
    x = bf16(1, 20, 96)
    for namespace in NAMESPACES:
        found = linear(namespace, x, torch.tensor([7]))
        assert found.shape == (1, 20, 70)
        assert torch.equal(found[0, :7], linear(namespace, x, None)[0, :7])
    assert keep_rows(x, None) is x


def test_schemas_and_fakes() -> None:
    for namespace in NAMESPACES:
        torch.library.opcheck(
            namespace.packed_linear.default,
            (bf16(3, 96), pack(bf16(70, 96)), 70, None, torch.tensor([2])),
            test_utils=("test_schema", "test_faketensor"),
        )


def compiled(directory: Path, **options: Any) -> SpecModel:
    fixed = {"spec_tokens": K, "batch_buckets": (5,), **TINY, "enabled_passes": PACKED}
    return model_of(compiler_of(directory, "bfloat16", EagerBackend(), **{**fixed, **options}))


PROMPTS = [[5, 9, 17, 33], [3], list(range(40, 51))]
JOINED: dict[str, Any] = {"prefill_chunk": 24, "busy_prefill_chunk": 6}
QUEUE = [*PROMPTS, [8, 8], [21, 3, 30], list(range(60, 69)), [71]]
"""More than a bucket's: the last ones are prefilled in steps that others decode in."""


@pytest.mark.slow
@pytest.mark.parametrize("family", EACH_FAMILY_OF_FEW)
def test_nothing_that_is_used_changes(family: str, checkpoint: Callable[..., Path]) -> None:
    """Requests of unlike length in a bucket of five, on the same reference operators: the same
    tokens, and as many drafts accepted at each position, as without the pass."""
    seen = []
    for disabled in ((), ("skip-idle-rows",)):
        model = compiled(checkpoint(family), disabled_passes=disabled, **JOINED)
        seen.append((model.generate(QUEUE, max_new_tokens=12), tuple(model.stats.accepted)))
        assert model.stats.joined.steps > 0
        skipping = [call for call in calls(model) if "rows" in call.kwargs]
        assert bool(skipping) == (not disabled)
    assert seen[0] == seen[1]
    assert sum(seen[0][1]) > 0


@pytest.fixture
def uninitialised_is_nan() -> Iterator[None]:
    """New tensors hold NaN until they are written: torch fills them where asked to."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize("family", EACH_FAMILY_OF_FEW)
@pytest.mark.usefixtures("uninitialised_is_nan")
def test_what_stands_in_idle_rows_is_never_seen(
    family: str, checkpoint: Callable[..., Path]
) -> None:
    """On the kernels, whose results hold NaN in idle rows, all passes of the backend."""
    seen = []
    for disabled in ((), ("skip-idle-rows",)):
        model = compiled(
            checkpoint(family), enabled_passes=CpuBackend.enables,
            disabled_passes=disabled, **JOINED,
        )  # fmt: skip
        with OnKernels() as kernels:
            found = model.generate(QUEUE, max_new_tokens=12)
        assert model.stats.joined.steps > 0
        assert "packed_linear" in kernels.ran
        seen.append((found, tuple(model.stats.accepted)))
    assert seen[0] == seen[1]
    assert sum(seen[0][1]) > 0


class OnKernels(TorchDispatchMode):
    """Runs the kernels in the place of the reference operators, and notes which."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.ran = kernel_table(), set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.table:
            self.ran.add(func.__name__.removesuffix(".default"))
        return self.table.get(func, func)(*args, **(kwargs or {}))


def test_the_backend_decides(checkpoint: Callable[..., Path]) -> None:
    """Only the cpu's kernels leave rows out; elsewhere int8 drafts take no number of rows."""
    assert "skip-idle-rows" in CpuBackend.enables
    model = compiled(checkpoint("mimo"), enabled_passes=("quantise-draft",), **JOINED)
    assert [call for call in calls(model) if "rows" in call.kwargs] == []


def test_rows_is_one_number() -> None:
    with pytest.raises(RuntimeError, match="one integer"):
        linear(torch.ops.mtpc_cpu, bf16(3, 96), torch.tensor([1, 2]))


@pytest.mark.slow
def test_parts_of_a_row_are_not_rows(checkpoint: Callable[..., Path]) -> None:
    """DeepSeek-V4's output projection has two groups a row: as many as a chunk here has tokens."""
    directory = checkpoint("deepseek_v4")
    options = {"prefill_chunk": 2, "batch_buckets": (1,), "spec_tokens": 1}
    found, expected = (
        compiled(directory, **options, disabled_passes=disabled).generate(PROMPTS, 8)
        for disabled in ((), ("skip-idle-rows",))
    )
    assert found == expected


@pytest.mark.slow
def test_heads_of_a_draft_are_not_rows_of_logits(checkpoint: Callable[..., Path]) -> None:
    """GLM-4 norms each of its four heads: as many as one request has rows of logits at K = 3."""
    seen = []
    for disabled in ((), ("skip-idle-rows",)):
        options = {"batch_buckets": (1,), "spec_tokens": 3, "disabled_passes": disabled}
        passes = (*PACKED, "fuse-elementwise")
        model = compiled(checkpoint("glm4_moe"), enabled_passes=passes, **options)
        seen.append((model.generate(PROMPTS, 12), tuple(model.stats.accepted)))
    assert seen[0] == seen[1]
    assert seen[0][1][2] > 0


def test_rows_of_logits_are_not_requests(checkpoint: Callable[..., Path]) -> None:
    """Three tokens, and three rows: two of who decodes, one of a prompt, are two requests'."""
    seen = []
    for disabled in ((), ("skip-idle-rows",)):
        options = {"batch_buckets": (2,), "spec_tokens": 1, "disabled_passes": disabled}
        model = compiled(checkpoint("mimo"), **{**options, "prefill_chunk": 3})
        seen.append((model.generate(QUEUE, 12), tuple(model.stats.accepted)))
        assert model.stats.joined.steps > 0
    assert seen[0] == seen[1]


def calls(model: SpecModel) -> list[torch.fx.Node]:
    """Calls on packed weights in the graphs of a model."""
    nodes = [n for step in model.program.steps.values() for n in step.graph.graph.nodes]
    return [n for n in nodes if n.op == "call_function" and "mtpc" in str(n.target)]


class Counted(TorchDispatchMode):
    """Notes how many rows each product was told of, by how many it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, set[int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.mtpc.packed_linear.default:
            given = args[0].numel() // args[0].shape[-1]
            rows = args[4] if len(args) > 4 else None
            self.seen.setdefault(given, set()).add(given if rows is None else int(rows))
        return func(*args, **(kwargs or {}))


def test_what_is_counted(checkpoint: Callable[..., Path]) -> None:
    """Chunks for prompts of 4, 1, and 9 tokens, one behind others that decode; then the requests of
    five that there are."""
    passes = ("pack-weights", "skip-idle-rows")
    model = compiled(checkpoint("mimo"), enabled_passes=passes, **JOINED)
    with Counted() as counted:
        for prompt in PROMPTS[:2]:
            model.engine.add(prompt, 9)
        model.engine.step()
        model.engine.add(PROMPTS[2][:9], 9)
        while any(not r.is_prefilled for r in model.engine.running) or model.engine.waiting:
            model.engine.step()
    assert counted.seen[24] == {5, 2 * (K + 1) + 6, 2 * (K + 1) + 3}
    rows = model.program.prefill_key().bucket.num_reqs
    assert counted.seen[rows * (K + 1)] == {2, 2 * (K + 1) + 1}, "of logits"
    with Counted() as counted:
        while model.engine.has_work:
            model.engine.step()
    verified, requests = counted.seen[5 * (K + 1)], counted.seen[5]
    assert verified == {(K + 1) * count for count in requests}
    assert max(requests) == 3

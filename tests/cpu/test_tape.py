"""Tapes: what a graph becomes gives what the graph gives, and a damaged tape is refused."""

from __future__ import annotations

import ctypes
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers.accept_cases import make_call, make_reports
from helpers.small_graphs import run, small_graph
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mtpc.backends.cpu_kernels import build_kernels, kernel_table, load_kernels
from mtpc.backends.cpu_kernels.build import LIBRARY
from mtpc.backends.cpu_kernels.generate import SOURCE_DIR
from mtpc.backends.lower_tape import lower_to_tape
from mtpc.backends.tape import (
    BOOLEAN,
    FLOATS,
    FOLDINGS,
    FUNCTIONS,
    INTEGER,
    LIST,
    TENSOR,
    Entry,
    open_tape,
    write_tape,
)
from mtpc.capture.graph import StepGraph, get_tensor
from mtpc.errors import BackendError
from mtpc.weights.packing import pack

load_kernels()
OPS = torch.ops.mtpc_cpu
BF16 = torch.bfloat16


def tape_of(graph: StepGraph) -> str:
    return write_tape(*lower_to_tape(graph))


def play(graph: StepGraph, text: str) -> Tensor:
    """What the tape leaves in `batch.out`, in two runs."""
    replay = open_tape(text, lambda name: get_tensor(graph.module, name).detach())
    for _ in range(2):
        graph.buffer("batch.out").fill_(-7)
        replay()
    return graph.buffer("batch.out").clone()


def calls(text: str) -> Counter[str]:
    return Counter(entry[0] for entry in json.loads(text)["entries"])


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_numbers_mean_what_they_mean_in_c() -> None:
    """Functions and folds have a number in a tape: their place in an enum."""
    text = re.sub(r"//.*", "", (SOURCE_DIR / "tape.h").read_text())
    for name, wanted in (("Function", FUNCTIONS), ("Folding", FOLDINGS)):
        (body,) = re.findall(rf"enum class {name} : int64_t {{(.*?)}};", text, re.DOTALL)
        found = [re.sub(r"(?<!^)(?=[A-Z])", "_", n).lower() for n in re.findall(r"k(\w+)", body)]
        assert found[-1] == "count"
        assert [n.replace("is_finite", "isfinite") for n in found[:-1]] == list(wanted)


def test_the_library_has_the_calls_and_torch_has_none_of_their_names() -> None:
    """A name that torch had, too, would be called in place of ours."""
    built = build_kernels()
    directory = built.parent if isinstance(built, Path) else built.directory
    library = ctypes.CDLL(str(directory / LIBRARY))
    theirs = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    names = [op.__name__.removesuffix(".default") for op in kernel_table().values()]
    assert len(names) > 10
    for name in names:
        assert hasattr(library, f"mtpc_bind_{name}")
        assert not hasattr(theirs, f"mtpc_bind_{name}")


INT = torch.tensor([[7, -3, 0, 5], [1, 2, -9, 4]])

BETWEEN: list[Callable[[Tensor, Tensor], Tensor]] = [
    lambda out, x: out.copy_(x * 3 - x // 2 + x % 5),
    lambda out, x: out.copy_((-x.T + 1).T),
    lambda out, x: out.copy_((1 - x).clamp(-2, 3)),
    lambda out, x: out.copy_(torch.where(x > 0, x, -1) + torch.where((x == 2) | (x < -1), 5, x)),
    lambda out, x: out.copy_(((x >= 0) & ~(x != 5)).to(torch.int64).cumsum(1)),
    lambda out, x: out.copy_(torch.cat([x[:, 1:], x[:, :1]], 1)),
    lambda out, x: out.copy_(torch.stack([x[0], x[1]], 1).reshape(2, 4)),
    lambda out, x: out.copy_(x.sum(1, keepdim=True) + x.amax(0) - x.amin(0)),
    lambda out, x: out.copy_((x > 3).any(1).unsqueeze(1) | (x < 9).all(0)),
    lambda out, x: out.copy_(x[torch.arange(1, -2, -1)][1:, torch.arange(-2, 2)]),
    lambda out, x: out.copy_(x.index_select(1, torch.arange(4) // 2)),
    lambda out, x: out.copy_(x[torch.arange(2)[:, None], torch.arange(3, -1, -1)]),
    lambda out, x: out.copy_(torch.zeros_like(x).index_copy_(1, torch.arange(1, 3), x[:, :2])),
    lambda out, x: out.index_put_((torch.arange(2), torch.arange(2)), x[:, 3]),
    lambda out, x: out.copy_(torch.full((2, 4), 3).add_(x).mul_(2)),
    lambda out, x: out.copy_(x.masked_fill(x < 0, 11).minimum(torch.arange(4))),
    lambda out, x: out.copy_(torch.topk(x, 4, dim=-1).values),  # torch's own.
    lambda out, x: out.copy_(x.gather(1, x.clamp(0, 3))),  # torch's own.
]


@pytest.mark.parametrize("body", BETWEEN)
def test_integers_are_those_of_the_graph(body: Callable[..., Tensor]) -> None:
    """Views, in-place operators, folds, rows by index: each is what torch computes."""
    graph = small_graph(lambda out, x: body(out, x), batch_out=INT.clone(), batch_x=INT.clone())
    wanted = run(graph)
    text = tape_of(graph)
    assert torch.equal(play(graph, text), wanted)
    assert not torch.equal(wanted, torch.full_like(wanted, -7))


@pytest.mark.parametrize("dtype", [BF16, torch.float32, torch.float64])
def test_arithmetic_rounds_where_the_graph_does(dtype: torch.dtype) -> None:
    """Sums, products and quotients are torch's bits in each dtype; functions are close."""
    x, y = numbers(3, 40, dtype=dtype), numbers(40, seed=1, dtype=dtype)

    def exact(out: Tensor, x: Tensor, y: Tensor) -> None:
        out.copy_(((x + y) * 0.37 - x) / (y * y + 1) + x.to(torch.float32).to(x.dtype))

    def close(out: Tensor, x: Tensor, y: Tensor) -> None:
        out.copy_(x.sigmoid() * torch.nn.functional.silu(y) + x.cos() - y.sin() + x.exp().rsqrt())

    for body, bound in ((exact, 0.0), (close, 4 * torch.finfo(dtype).eps)):
        graph = small_graph(body, batch_out=torch.zeros_like(x), x=x, y=y)
        wanted, text = run(graph), tape_of(graph)
        assert not calls(text)["aten"]
        bound = max(bound, 1e-6 if dtype == torch.float64 and body is close else bound)
        torch.testing.assert_close(play(graph, text), wanted, rtol=bound, atol=bound)


@settings(max_examples=25, deadline=None)
@given(length=st.integers(1, 300), start=st.integers(0, 299), threads=st.sampled_from([1, 2]))
def test_a_value_does_not_depend_on_its_place(length: int, start: int, threads: int) -> None:
    """Functions and sums of a row are the same bits wherever the row stands."""
    rows = numbers(5, 300)

    def body(out: Tensor, x: Tensor) -> None:
        y = x.sigmoid() + x.cos() * torch.nn.functional.silu(x)
        out.copy_(y / y.sum(-1, keepdim=True))

    def result(x: Tensor) -> Tensor:
        graph = small_graph(body, batch_out=torch.zeros_like(x), x=x)
        return play(graph, tape_of(graph))

    start = min(start, 300 - length)
    part = rows[:, start : start + length].contiguous()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = result(part)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(result(part[3:4].clone())[0], together[3])


def _streams(out: Tensor, mix: Tensor, streams: Tensor) -> None:
    """What a model does with the few streams of a row: products, sums, a mean, a function."""
    mixed = mix.transpose(1, 2) @ torch.nn.functional.softplus(streams)
    total = mixed.sum(1) + (mixed * streams).mean(-2) - streams.cumsum(1)[:, 3]
    out.copy_(total * (streams * streams).sum(-1).sum(1, keepdim=True))


@pytest.mark.parametrize("dtype", [BF16, torch.float32, torch.float64])
def test_sums_over_streams_have_one_order(dtype: torch.dtype) -> None:
    """They are near torch's, and the same bits for a row alone and in company."""
    given = {"mix": numbers(9, 4, 4, dtype=dtype), "streams": numbers(9, 4, 300, dtype=dtype)}

    def results(rows: slice) -> tuple[Tensor, Tensor]:
        named = {name: each[rows].clone() for name, each in given.items()}
        out = torch.zeros_like(named["streams"][:, 0])
        graph = small_graph(_streams, batch_out=out, **named)
        wanted, text = run(graph), tape_of(graph)
        assert not calls(text)["aten"]
        return wanted, play(graph, text)

    wanted, found = results(slice(None))
    bound = 16 * torch.finfo(dtype).eps
    torch.testing.assert_close(found, wanted, rtol=bound, atol=bound * float(wanted.abs().max()))
    for row in range(9):
        assert torch.equal(results(slice(row, row + 1))[1][0], found[row])


def test_kernels_take_every_kind_of_argument_and_result() -> None:
    x, bias, weight = numbers(5, 64, dtype=BF16), numbers(48, dtype=BF16), numbers(64, dtype=BF16)

    def body(
        out: Tensor, cache: Tensor, x: Tensor, packed: Tensor, bias: Tensor, weight: Tensor,
        rows: Tensor, slots: Tensor,
    ) -> None:  # fmt: skip
        some = OPS.packed_linear(x, packed, 48, None, rows)
        OPS.clear_idle_rows(some, rows, 1)
        biased = OPS.packed_linear(x, packed, 48, bias, None)
        total, normed = OPS.add_rms_norm(x, x, weight, 1e-5, True, None)
        OPS.write_cache(cache, biased, slots, None)
        out.copy_(torch.cat([some, total, normed, cache.view(-1, 48)[:5]], 1))

    graph = small_graph(
        body, batch_out=torch.zeros(5, 224, dtype=BF16), kv_cache=torch.zeros(2, 4, 48, dtype=BF16),
        x=x, packed=pack(numbers(48, 64, dtype=BF16)), bias=bias, weight=weight,
        rows=torch.tensor([3]), slots=torch.tensor([7, -1, 0, 5, 2]),
    )  # fmt: skip
    wanted, text = run(graph), tape_of(graph)
    assert torch.equal(play(graph, text), wanted)
    assert calls(text)["kernel"] == 5
    assert not calls(text)["aten"]


def test_a_kernel_writes_arguments_and_has_results() -> None:
    call = make_call(5, 6, 3, 2, True)

    def body(out: Tensor, *tensors: Tensor) -> None:
        results = OPS.accept(*tensors)
        out.copy_(torch.cat([t.reshape(-1).to(torch.int64) for t in (*results, *tensors[:3])]))

    given = [*make_reports(6, 4), *call]
    if any(not isinstance(each, Tensor) for each in given):
        pytest.skip("this case has options that are no tensors")
    named = {f"batch_t{i:02d}": t.clone() for i, t in enumerate(given)}
    size = sum(t.numel() for t in (*OPS.accept(*[t.clone() for t in given]), *given[:3]))
    graph = small_graph(body, batch_out=torch.zeros(size, dtype=torch.int64), **named)
    begin = {name: t.clone() for name, t in graph.buffers().items()}
    wanted, text = run(graph), tape_of(graph)
    for name, tensor in graph.buffers().items():
        tensor.copy_(begin[name])
    open_tape(text, lambda name: get_tensor(graph.module, name))()
    assert torch.equal(graph.buffer("batch.out"), wanted)


def test_the_stride_of_one_element_says_nothing() -> None:
    """A product of one row has other strides than its fake, though it lies at the same places."""
    x, weight = numbers(1, 4, 16, dtype=torch.float64), numbers(16, 8, dtype=torch.float64)

    def body(out: Tensor, x: Tensor, weight: Tensor) -> None:
        out.copy_(torch.ops.aten.einsum.default("bth,ho->bto", [x, weight]))

    out = torch.zeros(1, 4, 8, dtype=torch.float64)
    graph = small_graph(body, batch_out=out, x=x, weight=weight)
    wanted = run(graph)
    assert torch.equal(play(graph, tape_of(graph)), wanted)


_W, _X, _ROWS, _USED, _SCALES, _NEW, _CACHE = ([TENSOR, number] for number in range(7))
WRITES: dict[str, Entry] = {
    "map": ("map", FUNCTIONS.index("neg"), FLOATS, [0, 1, 1]),
    "fold": ("fold", FOLDINGS.index("scan"), FLOATS, 0, 1, 1),
    "rows": ("move_rows", False, 0, 1, [2]),
    "table": ("move_rows", True, 1, 0, [2]),
    "in place": ("aten", "aten::add_", "Tensor", [*_W, *_X, INTEGER, 1], [], []),
    "copy": ("aten", "aten::copy_", "", [*_W, *_X, BOOLEAN, 0], [], []),
    "out": ("aten", "aten::neg", "out", [*_X, *_W], [], []),
    "list": ("aten", "aten::_foreach_neg_", "", [LIST, 2, *_X, *_W], [], []),
    "reference": ("aten", "mtpc::clear_idle_rows", "", [*_W, *_USED, INTEGER, 1], [], []),
    "kernel": ("kernel", "clear_idle_rows", [*_W, *_USED, INTEGER, 1], [], []),
    "option": ("kernel", "write_cache", [*_CACHE, *_NEW, *_ROWS, *_SCALES], [], []),
}
"""Each way to write the first memory of the tape below: its tensors 0 and 4."""


@pytest.mark.parametrize("place", ["batch.out", "weight", "numbers"])
@pytest.mark.parametrize("way", WRITES)
def test_a_result_lies_in_no_weight(way: str, place: str) -> None:
    """A tape writes buffers. One that writes a weight is refused before it runs."""
    given = {"batch.out": numbers(2, 4), "weight": numbers(2, 4), "batch.x": numbers(2, 4, seed=1)}
    before = given["weight"].clone()
    entries: list[Entry] = [
        ("numbers", 6, [0] * 8) if place == "numbers" else ("bound", place),
        ("bound", "batch.x"), ("numbers", 4, [0, 1]), ("planned", 0, 8),
        ("tensor", 0, 6, [2, 4], [4, 1], 0), ("tensor", 1, 6, [2, 4], [4, 1], 0),
        ("tensor", 2, 4, [2], [1], 0), ("tensor", 2, 4, [1], [1], 0),
        ("tensor", 0, 6, [1, 2, 4], [8, 4, 1], 0), ("tensor", 1, 6, [2, 4, 1], [4, 1, 1], 0),
        ("tensor", 3, 1, [1, 2, 4, 1], [8, 4, 1, 1], 0),
    ]  # fmt: skip
    text = write_tape(64, [*entries, WRITES[way]])
    if place == "batch.out":
        open_tape(text, given.__getitem__)()
        assert not torch.equal(given["batch.out"], before)
    else:
        call = re.escape(json.dumps(WRITES[way])[:20])
        with pytest.raises(BackendError, match=rf"does not fit at {call}.* writes tensor [04], "):
            open_tape(text, given.__getitem__)()
    assert torch.equal(given["weight"], before)


_STARTS = """
import sys, torch
from mtpc.backends.cpu_kernels import build_kernels, load_library
from mtpc.backends.tape import open_tape

load_library(build_kernels())
assert "mtpc.ops" not in sys.modules
given = {"batch.out": torch.ones(2, 4)}
open_tape(sys.stdin.read(), given.__getitem__)()
print(given["batch.out"].tolist())
"""


def test_a_start_runs_a_tape_that_calls_a_reference() -> None:
    """A process that has not imported mtpc's operators declares them where a tape needs them."""
    call: Entry = ("aten", "mtpc::clear_idle_rows", "", [TENSOR, 0, TENSOR, 1, INTEGER, 1], [], [])
    text = write_tape(64, [("bound", "batch.out"), ("numbers", 4, [0, 1]),
                           ("tensor", 0, 6, [2, 4], [4, 1], 0), ("tensor", 1, 4, [1], [1], 0),
                           call])  # fmt: skip
    words = [sys.executable, "-c", _STARTS]
    done = subprocess.run(words, input=text, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout) == [[0.0] * 4] * 2


_NEG: Entry = ("aten", "aten::neg", "", [TENSOR, 1], [], [2])
_COPY: Entry = ("map", FUNCTIONS.index("copy"), FLOATS, [0, 1, 3])
_READS: Entry = ("aten", "aten::copy_", "", [TENSOR, 0, TENSOR, 3, BOOLEAN, 0], [], [])


@pytest.mark.parametrize(
    ("nbytes", "calls", "said"),
    [
        (32, [_NEG, _COPY, _READS], None),
        (32, [_COPY, _NEG], "no call has returned"),
        (32, [_READS, _NEG], "no call has returned"),
        (32, [_NEG, ("release", [2]), _COPY], "no call has returned"),
        (36, [_NEG, _COPY], r"returned Float.* in 32 bytes where .* in 36"),
        (28, [_NEG, _COPY], "ends at byte 32"),
    ],
)
def test_returned_memory_is_there_and_no_smaller(
    nbytes: int, calls: list[Entry], said: str | None
) -> None:
    """What a call is to return is read behind that call alone, and only as far as it goes."""
    given = {"batch.out": torch.zeros(2, 4), "x": numbers(2, 4)}
    memory: list[Entry] = [("bound", "batch.out"), ("bound", "x"), ("returned", nbytes)]
    tensors = [("tensor", storage, 6, [2, 4], [4, 1], 0) for storage in (0, 1, 2)]
    to_its_end = ("tensor", 2, 6, [2, 4], [4, 1], max(nbytes - 32, 0) // 4)
    text = write_tape(0, [*memory, *tensors, to_its_end, *calls])
    if said is None:
        open_tape(text, given.__getitem__)()
        assert torch.equal(given["batch.out"], -given["x"])
    else:
        with pytest.raises((BackendError, RuntimeError), match=said):
            open_tape(text, given.__getitem__)()


@pytest.fixture(scope="module")
def graph() -> StepGraph:
    def body(out: Tensor, x: Tensor, packed: Tensor) -> None:
        y = OPS.packed_linear(x, packed, 48, None, None)
        out.copy_(torch.topk(y[torch.arange(3) - 1].float().cos(), 4).values.sum(1, keepdim=True))

    x = numbers(5, 64, dtype=BF16)
    packed = pack(numbers(48, 64, dtype=BF16))
    return small_graph(body, batch_out=torch.zeros(3, 1), x=x, packed=packed)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_a_damaged_tape_is_refused_or_harmless(graph: StepGraph, data: st.DataObject) -> None:
    """Any number, name or entry may be wrong: one clear error, when it is opened or when it runs;
    what no check can see computes something else within the tape's own memory."""
    tape = json.loads(tape_of(graph))
    entries = tape["entries"]
    at = data.draw(st.integers(0, len(entries) - 1))
    places = [(entries[at], i) for i in range(len(entries[at]))]
    places += [(v, i) for v in entries[at] if isinstance(v, list) for i in range(len(v))]
    owner, index = data.draw(st.sampled_from(places))
    wild = [-1, 0, 1, 3, 99, 2**31, 2**62, -(2**62), "run", "aten", "x", None, [], [1], True]
    owner[index] = data.draw(st.sampled_from(wild))
    before = {name: get_tensor(graph.module, name).clone() for name in ("packed", "x")}
    try:
        replay = open_tape(json.dumps(tape), lambda name: get_tensor(graph.module, name).detach())
        replay()
    except (BackendError, RuntimeError, IndexError):
        pass  # Refused, or a call refuses its arguments when it runs.
    for name, weight in before.items():
        assert torch.equal(get_tensor(graph.module, name), weight), name


def test_the_error_names_the_entry_and_what_to_do(graph: StepGraph) -> None:
    tape = json.loads(tape_of(graph))
    entry = next(entry for entry in tape["entries"] if entry[0] == "tensor")
    entry[3] = [10**9, 10**9]
    with pytest.raises(BackendError, match=r'tape does not fit at \["tensor", .*`mtpc cache ver'):
        open_tape(json.dumps(tape), lambda name: get_tensor(graph.module, name))
    for text in ("", "{}", '{"arena": 1, "entries": [["run"]]}', '{"arena": -1, "entries": []}'):
        with pytest.raises(BackendError, match=r"step's tape does not fit"):
            open_tape(text, lambda name: get_tensor(graph.module, name))

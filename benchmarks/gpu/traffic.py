"""A roofline model of a GPU: the bytes that a step's launches move, and the least that they must.

Nothing runs. Launches are those that operators plan for a graph's fake tensors. The first load of a
byte in a launch comes from memory, and repeated loads from the second-level cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from math import comb, prod
from typing import Any

from torch import Tensor, fx

from benchmarks.gpu.count import Lowered
from mtpc.backends.triton_kernels.launch import Launch
from mtpc.backends.triton_kernels.plans import node_launches, op_name
from mtpc.capture.graph import StepGraph
from mtpc.capture.inline import fake_mode_of

_CACHES = ("k_ptr", "v_ptr", "cache_ptr", "k_scale_ptr", "v_scale_ptr")
_BY_SLOT = ("floats_ptr", "ints_ptr", "bias_ids_ptr", "bias_values_ptr", "allowed_ptr",
            "prompt_ptr", "stops_ptr", "remaining_ptr")  # fmt: skip
"""Parameters of kernels that hold a row for each request slot."""
_EDGE_PASSES = 52
"""Times that the logits near the edges of top-k and top-p are read: two bisections."""
_PRODUCTS = tuple(f"aten.{n}" for n in ("linear", "mm", "addmm", "bmm", "baddbmm", "matmul"))
_RESULTS = ("out_ptr", "total_ptr", "values_ptr", "places_ptr")


@dataclass(frozen=True)
class Device:
    """The figures of a GPU.

    Attributes:
        memory: bytes a second.
        cache: bytes a second out of the second-level cache.
        flops: bfloat16 products' operations a second.
        processors: a launch of fewer programs has that share of the above.
        launch_s: seconds of each launch in a captured graph, whatever it does.
    """

    memory: float
    cache: float
    flops: float
    processors: int
    launch_s: float


DEVICES = {
    "h100": Device(3.35e12, 5.5e12, 989e12, 132, 2e-6),
    "h200": Device(4.8e12, 7e12, 989e12, 132, 2e-6),
}
"""Memory, operations and processors are NVIDIA's figures; the other two are assumed."""


@dataclass(frozen=True)
class Work:
    """The batch of a step: requests with equal contexts, whose rows choose experts at random."""

    requests: int
    context: int


@dataclass(frozen=True)
class Cost:
    """The cost of an operator in a step.

    Attributes:
        operator: of ours, of ATen, or what Inductor generates.
        calls: how many.
        launches: of all calls.
        moved: bytes that programs load and store.
        least: bytes of what it is given and gives, each once.
        seconds: by the model.
        floor: seconds of `least` out of memory, or of the operations if they take longer.
    """

    operator: str
    calls: int
    launches: int
    moved: float
    least: float
    seconds: float
    floor: float

    def __add__(self, other: Cost) -> Cost:
        """Both."""
        return Cost(
            self.operator, self.calls + other.calls, self.launches + other.launches,
            self.moved + other.moved, self.least + other.least, self.seconds + other.seconds,
            self.floor + other.floor,
        )  # fmt: skip

    def extended(self, fewer: Cost, copies: int) -> Cost:
        """Of a step with so many times what this one has more than another."""

        def line(name: str) -> Any:
            less = getattr(fewer, name)
            return less + copies * (getattr(self, name) - less)

        numbers = {f.name: line(f.name) for f in fields(Cost)[1:]}
        return Cost(self.operator, **numbers)


def step_costs(graph: StepGraph, made: Lowered, work: Work, device: Device) -> list[Cost]:
    """Every operator of a rewritten step on mtpc's references, the farthest from its floor first.

    Args:
        graph: the step.
        made: the same step as Inductor schedules it: what is between our operators.
        work: lengths.
        device: where.
    """
    found: dict[str, Cost] = {}
    with fake_mode_of(graph.graph):
        for cost in (*_of_nodes(graph.graph.nodes, work, device), *_of_others(made, device)):
            seen = found.get(cost.operator)
            found[cost.operator] = cost if seen is None else seen + cost
    return sorted(found.values(), key=lambda cost: cost.floor - cost.seconds)


def _of_nodes(nodes: Iterable[fx.Node], work: Work, device: Device) -> Iterator[Cost]:
    for node in nodes:
        name = str(node.target)
        if node.op == "call_function" and name.startswith("mtpc."):
            yield _of_launches(node, work, device)
        elif node.op == "call_function" and _short(name) in _PRODUCTS:
            yield _of_product(node, device)


def _of_others(made: Lowered, device: Device) -> Iterator[Cost]:
    """What Inductor generates, and operators of ATen that are no products."""
    seconds = made.generated * device.launch_s + made.generated_bytes / device.memory
    floor, nbytes = made.generated_bytes / device.memory, made.generated_bytes
    yield Cost("generated", made.generated, made.generated, nbytes, nbytes, seconds, floor)
    for name, calls in made.called.items():
        short = _short(name)
        if short not in _PRODUCTS and not name.startswith("mtpc."):
            yield Cost(short, calls, calls, 0, 0, calls * device.launch_s, 0)


def _of_product(node: fx.Node, device: Device) -> Cost:
    """One launch, which reads each operand once."""
    values = [n.meta["val"] for n in node.all_input_nodes] + [node.meta["val"]]
    nbytes = sum(value.nbytes for value in values)
    operations = 2 * values[-1].numel() * values[0].shape[-1]
    floor = max(nbytes / device.memory, operations / device.flops)
    seconds = device.launch_s + floor
    return Cost(_short(str(node.target)), 1, 1, nbytes, nbytes, seconds, floor)


def _of_launches(node: fx.Node, work: Work, device: Device) -> Cost:
    launches = node_launches(node)
    given = {_memory(n.meta["val"]) for n in node.all_input_nodes}
    value = node.meta["val"]
    results = [value] if isinstance(value, Tensor) else list(value or ())
    shapes = {(tuple(t.shape), t.dtype) for t in results}
    least: dict[object, float] = {}
    moved = seconds = 0.0
    for launch in launches:
        unique, again = _unique(launch, work), moved_bytes(launch, work)
        share = min(1.0, _programs(launch, work) / device.processors)
        times = (sum(unique.values()) / device.memory, sum(again.values()) / device.cache)
        seconds += device.launch_s + max(times) / share
        moved += sum(again.values())
        for name, nbytes in unique.items():
            tensor = launch.arguments[name]
            is_result = (tuple(tensor.shape), tensor.dtype) in shapes and name in _RESULTS
            if _memory(tensor) in given or is_result:
                key = _view(tensor)
                least[key] = max(least.get(key, 0.0), nbytes)
    needed = sum(least.values())
    floor = needed / device.memory
    return Cost(op_name(node), 1, len(launches), moved, needed, seconds, floor)


def moved_bytes(launch: Launch, work: Work) -> dict[str, float]:
    """Bytes of each tensor that a launch's programs load and store, by parameter."""
    live = _unique(launch, work)
    return {name: nbytes * _times(launch, name, work) for name, nbytes in live.items()}


def _unique(launch: Launch, work: Work) -> dict[str, float]:
    """Bytes of each tensor that a launch has to do with, by parameter; of a tensor once."""
    seen: dict[object, str] = {}
    for name, value in launch.arguments.items():
        if isinstance(value, Tensor):
            seen.setdefault(_view(value), name)
    return {name: _live(launch, name, work) for name in seen.values()}


def _live(launch: Launch, name: str, work: Work) -> float:
    """Of a tensor: the pages of the requests, their rows, and the experts that are chosen."""
    tensor, sizes = launch.arguments[name], launch.constants
    row = tensor.nbytes / max(1, tensor.shape[0]) if tensor.dim() else tensor.nbytes
    if name in _CACHES and "attention" in launch.name:
        seen = min(work.context, sizes.get("WINDOW", 0) or work.context)
        return work.requests * seen * row / sizes["PAGE"]
    if name == "table_ptr" and "PAGE" in sizes:
        return work.requests * -(-work.context // sizes["PAGE"]) * tensor.itemsize
    if name.endswith(("cache_ptr", "scale_ptr")) and "slots_ptr" in launch.arguments:
        return launch.arguments["slots_ptr"].shape[0] * row / tensor.shape[1]
    if name == "weight_ptr" and "CHOICES" in sizes:
        return row * _hit(launch, _tokens(launch))
    if name == "acc_ptr":
        return row * min(tensor.shape[0], _blocks(launch, work))
    if name in _BY_SLOT:
        return min(tensor.nbytes, work.requests * row)
    if name == "scores_ptr" and launch.name in ("cut_kernel", "choose_token_kernel"):
        return 0.0  # Of a row, a block or none.
    is_penalty = name == "counts_ptr" and "BINS" not in sizes
    return 0.0 if is_penalty else float(tensor.nbytes)


def _times(launch: Launch, name: str, work: Work) -> float:
    """How often a launch's programs load a tensor, or what is live of it."""
    sizes, grid = launch.constants, launch.grid
    if launch.name == "skinny_kernel" and name in ("x_ptr", "added_ptr", "norm_ptr"):
        return float(grid[0])
    if launch.name == "batch_invariant_linear_kernel" and name in ("x_ptr", "weight_ptr"):
        return float(grid[1] if name == "x_ptr" else grid[0])
    if "attention" in launch.name and name in _CACHES:
        rows = -(-launch.arguments["num_tokens"] // work.requests)
        heads = grid[1] if "TILE_HEADS" in sizes else 1
        return -(-rows // sizes["TILE_ROWS"]) * heads
    if "BLOCK_F" in sizes and name == "weight_ptr":
        return _tiles(launch) / _hit(launch, _tokens(launch))
    if "BLOCK_F" in sizes and name in ("x_ptr", "hidden_ptr"):
        if name == "hidden_ptr" and "LIMIT" in sizes:
            return 1.0  # Gate and up write it.
        return grid[1] * (sizes["CHOICES"] if name == "x_ptr" else 1)
    if launch.name == "sort_choices_kernel" and name == "ids_ptr":
        return 2 * grid[0]  # Every program counts all of them, and then lists its own.
    return _EDGE_PASSES if (launch.name, name) == ("cut_kernel", "near_ptr") else 1.0


def _programs(launch: Launch, work: Work) -> float:
    """Of the grid, those that have something to do."""
    sizes, grid = launch.constants, launch.grid
    if "TILE_ROWS" in sizes:
        rows = -(-launch.arguments["num_tokens"] // work.requests)
        tiles = work.requests * -(-rows // sizes["TILE_ROWS"])
        return tiles * grid[1] * min(grid[2], _blocks(launch, work))
    if "BLOCK_F" in sizes:
        return grid[1] * _tiles(launch)
    return float(prod(grid))


def _blocks(launch: Launch, work: Work) -> int:
    """Blocks of positions of one request, as far as it is known how long they are."""
    return -(-work.context // launch.constants.get("BLOCK_N", 64))


def _tokens(launch: Launch) -> int:
    """Rows of the operator: those of x, or of the weights of their choices."""
    given = launch.arguments
    return int(given["x_ptr" if "x_ptr" in given else "scale_ptr"].shape[0])


def _hit(launch: Launch, rows: int) -> float:
    """Experts that some of so many rows choose, if they choose at random."""
    count = launch.arguments["weight_ptr"].shape[0]
    return float(count * (1 - (1 - launch.constants["CHOICES"] / count) ** rows))


def _tiles(launch: Launch) -> float:
    """Tiles of the rows that chose an expert, over all experts, if rows choose at random."""
    tokens, tile = _tokens(launch), launch.constants["BLOCK_T"]
    count, chosen = launch.arguments["weight_ptr"].shape[0], launch.constants["CHOICES"]
    tiles = 0.0
    for rows in range(1, tokens + 1):  # Whole numbers, for they are beyond what a float holds.
        ways = comb(tokens, rows) * chosen**rows * (count - chosen) ** (tokens - rows)
        tiles += ways / count**tokens * -(-rows // tile)
    return count * tiles


def _memory(value: object) -> object:
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None


def _view(tensor: Tensor) -> object:
    return _memory(tensor), tensor.storage_offset(), tuple(tensor.shape)


def _short(name: str) -> str:
    """An overload's name without the overload."""
    return name.rpartition(".")[0] or name


def launches_of(costs: Iterable[Cost]) -> int:
    """Kernels of a step."""
    return sum(cost.launches for cost in costs)

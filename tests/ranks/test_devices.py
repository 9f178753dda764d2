"""Which GPU each rank takes, the group of their steps, what ranks agree on; without a GPU."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.families import TINY
from helpers.forked_ranks import forks_of, run_ranks
from helpers.oracles import Oracle
from helpers.plans import plan_of
from helpers.small_graphs import run, small_graph
from torch import Tensor

import mtpc
from mtpc.api import SpecModel
from mtpc.backends import cuda, make_backend
from mtpc.backends.cuda import lower_by_inductor
from mtpc.backends.gpu.ops import exchanges
from mtpc.backends.gpu.passes.spell_collectives import SpellCollectives
from mtpc.backends.graph_artifact import GraphBackend
from mtpc.backends.graphs import GraphReplay
from mtpc.capture.graph import get_tensor, operators
from mtpc.errors import BackendError, OptionError, RankError
from mtpc.models.load import load
from mtpc.ops.collectives import group_of, is_collective
from mtpc.passes.shard import Sharding
from mtpc.program.compiler import StepCompiler
from mtpc.program.follow import FollowingProgram, LeadingProgram, ranked
from mtpc.program.memory_plan import MemoryPlan, least_pages
from mtpc.program.program import BuiltSteps, StepBinder
from mtpc.ranks import exchanges as between_ranks
from mtpc.ranks import watch as watching
from mtpc.ranks.exchanges import Seen, choose_device, make_group, step_timeout_s, why_apart
from mtpc.ranks.group import Ranks
from mtpc.ranks.share import AgreeOnCalls, RankShare, read_part
from mtpc.ranks.watch import StepWatch

ours = torch.ops.mtpc
GPUS = ("a", "b", "c")
GIB = 2**30


def machine(name: str, current: int = 0, devices: tuple[str, ...] = GPUS) -> Seen:
    return Seen(name, devices, current)


@pytest.mark.parametrize(
    ("seen", "wanted"),
    [
        ([machine("one"), machine("one"), machine("one")], [0, 1, 2]),
        # As torchrun places them: each machine's ranks are counted from its first GPU.
        ([machine("one"), machine("one"), machine("two"), machine("two")], [0, 1, 0, 1]),
        # A host has set each process's device, in an order of its own.
        ([machine("one", 2), machine("one", 0)], [2, 0]),
        # Each process sees one GPU, and not the same one.
        ([machine("one", 0, ("a",)), machine("one", 0, ("b",))], [0, 0]),
    ],
)
def test_each_rank_has_a_gpu(seen: list[Seen], wanted: list[int]) -> None:
    assert [choose_device(rank, seen) for rank in range(len(seen))] == wanted


def test_more_ranks_than_gpus() -> None:
    """On one machine; the error names the rank, the others have theirs."""
    seen = [machine("one", 0, ("a", "b"))] * 3 + [machine("two")]
    assert [choose_device(rank, seen) for rank in (0, 1, 3)] == [0, 1, 0]
    with pytest.raises(
        BackendError, match=r"rank 2 of 4 has no GPU: 3 ranks run on its machine, and .* 2 GPU"
    ):
        choose_device(2, seen)
    alone = [machine("one", 0, ("a",))] * 2  # NCCL refuses two ranks on one GPU, too.
    with pytest.raises(BackendError, match=r"rank 1 of 2 has no GPU"):
        choose_device(1, alone)


@pytest.mark.parametrize(
    ("seen", "chosen", "reaches", "wanted"),
    [
        ([machine("one"), machine("one")], "ab", True, ["", ""]),
        (
            [machine("one"), machine("two")], "aa", True,
            ["is on another machine than rank 1", "is on another machine than rank 0"],
        ),
        (
            [machine("one", 0, ("a",)), machine("one")], "ab", True,
            ["does not see the GPU of rank 1: check CUDA_VISIBLE_DEVICES", ""],
        ),
        (
            [machine("one"), machine("one")], "ca", False,
            [f"has a GPU that cannot read the memory of rank {other}'s" for other in (1, 0)],
        ),
    ],
)  # fmt: skip
def test_which_gpus_share_memory(
    seen: list[Seen],
    chosen: str,
    reaches: bool,
    wanted: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = list[tuple[int, int]]()

    def can(one: int, other: int) -> bool:
        asked.append((one, other))
        return reaches

    monkeypatch.setattr(torch.cuda, "can_device_access_peer", can)
    assert [why_apart(rank, seen, chosen) for rank in range(2)] == wanted
    places = tuple(map(GPUS.index, chosen))
    assert {*asked} <= {places, places[::-1]}


def refuse(ranks: Ranks) -> list[str]:
    """What each rank says where there is no GPU, and where torch lacks NCCL."""
    said = []
    patch = pytest.MonkeyPatch()
    for found in (False, True):
        if found:
            patch.setattr(torch.cuda, "is_available", lambda: True)
            patch.setattr(dist, "is_nccl_available", lambda: ranks.rank == 0)
            patch.setattr(torch.cuda, "device_count", lambda: 0)
            patch.setattr(torch.cuda, "current_device", lambda: 0)
        with pytest.raises((BackendError, RankError)) as caught:
            between_ranks.join_devices(ranks)
        said.append(f"{type(caught.value).__name__}: {caught.value}")
    patch.undo()
    return said


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_what_a_rank_lacks_is_said_on_all(tmp_path: Path) -> None:
    one, other = run_ranks(2, tmp_path, refuse)
    assert one[0].startswith("BackendError: backend 'cuda' needs a GPU")
    assert other[0].startswith("BackendError: backend 'cuda' needs a GPU")
    assert one[1].startswith("RankError: rank 1 of 2 failed: BackendError: ")
    assert "needs a torch with NCCL (RCCL on ROCm)" in one[1]
    assert other[1].startswith("BackendError: backend 'cuda' with tensor_parallel_size > 1")


def made_over_gloo(ranks: Ranks, patch: pytest.MonkeyPatch) -> tuple[str, Any]:
    """The name of a group as on GPUs, of which gloo takes the part of NCCL; what it was to be."""
    given, new_group = list[Any](), dist.new_group

    def gloo(backend: str, device_id: torch.device) -> Any:
        given.append((backend, device_id))
        return new_group(backend="gloo")

    patch.setattr(dist, "new_group", gloo)
    return make_group(ranks, torch.device("cpu")), given[0]


def make_groups(ranks: Ranks) -> tuple[Any, ...]:
    """A group, and one whose first exchange goes wrong."""
    patch = pytest.MonkeyPatch()
    name, given = made_over_gloo(ranks, patch)
    assert ours.gather_ranks(torch.ones(2), 2, name).shape == (2, 2)
    patch.setattr(exchanges, "gather_ranks", lambda part, ranks, name: torch.zeros(2, 1))
    with pytest.raises(BackendError, match=r"first exchange on cpu gave \[0.0, 0.0\]; expected"):
        make_group(ranks, torch.device("cpu"))
    dist.destroy_process_group(group_of(name))
    patch.undo()
    return name, given, step_timeout_s()


def test_exchanges_have_a_group_of_their_own(tmp_path: Path) -> None:
    """Of NCCL, on the rank's device, whatever the default group is."""
    one, other = run_ranks(2, tmp_path, make_groups)
    assert one == other
    assert one[0] != "0"
    assert one[1:] == (("nccl", torch.device("cpu")), 60.0)


def test_options() -> None:
    """GPUs are asked for by name, as with one rank."""
    assert plan_of(tensor_parallel_size=2, backend="cuda").backend == "cuda"
    assert plan_of(tensor_parallel_size=2).backend == "cpu"


def test_all_take_the_fewest_pages() -> None:
    plan = MemoryPlan({"decode": 0}, GIB, 2**20, 0, 0)
    larger = MemoryPlan({"decode": 0}, 3 * GIB, 2**20, 0, 0)
    assert least_pages([(plan, 9 * GIB), (plan, 8 * GIB)]) == (plan, 8 * GIB)
    assert least_pages([(plan, 9 * GIB), (larger, 10 * GIB)]) == (larger, 10 * GIB)


def agree(ranks: Ranks) -> tuple[Any, ...]:
    """Rank 1 has chosen another configuration, then has another exchange."""
    library = torch.library.Library("mtpc_test_choice", "DEF")
    library.define('twice(Tensor x, *, str configs="") -> Tensor')
    library.impl("twice", lambda x, configs="": 2 * x, "CompositeExplicitAutograd")
    twice = torch.ops.mtpc_test_choice.twice.default

    def step(out: Tensor, x: Tensor) -> None:
        out.copy_(ours.first_rank(twice(twice(x, configs="wide")), "0"))

    def another(out: Tensor, x: Tensor) -> None:
        out.copy_(ours.all_reduce(twice(x), "0"))

    graph = small_graph(step, batch_out=torch.zeros(3), x=torch.ones(3))
    calls = [node for node, target in operators(graph.graph) if target is twice]
    if ranks.rank:
        calls[0].kwargs, calls[1].kwargs = {}, {"configs": "deep"}
    changed = AgreeOnCalls(ranks).apply(graph)
    found = [node.kwargs.get("configs", "") for node in calls]
    run(graph)
    graph = small_graph(another if ranks.rank else step, batch_out=torch.zeros(3), x=torch.ones(3))
    with pytest.raises(RankError) as caught:
        AgreeOnCalls(ranks).apply(graph)
    return found, changed, str(caught.value)


def test_ranks_agree_on_calls(tmp_path: Path) -> None:
    """They run the configurations of rank 0, and notice exchanges that would hang."""
    one, other = run_ranks(2, tmp_path, agree)
    assert one[:2] == (["wide", ""], 0)
    assert other[:2] == (["wide", ""], 2)
    assert "exchange 0 of rank 1 of 2 is mtpc.all_reduce.default, and rank 0's is" in one[2]
    assert "exchange 0 of rank 0 of 2 is mtpc.first_rank.default, and rank 1's is" in other[2]


def test_ranks_meet_before_a_step_runs() -> None:
    """When it is compiled, and before it warms up."""
    seen = list[str]()

    class Backend(GraphBackend):
        def lower(self, graph: Any) -> Callable[[], None]:
            seen.append("lower")
            return lambda: None

        def capture(self, run: Any, graph: Any) -> Any:
            seen.append("capture")
            return run

    def step(out: Tensor, x: Tensor) -> None:
        out.copy_(x)

    graph = small_graph(step, batch_out=torch.zeros(3), x=torch.ones(3))
    built = BuiltSteps({}, graph.weights, meet=partial(seen.append, "meet"))
    artifact, binder = Backend().build(graph), StepBinder(built, graph.buffers())
    artifact.open(partial(get_tensor, graph.module), {}, binder._begin)
    assert seen == ["lower", "meet", "capture"]


def fail_beside(ranks: Ranks) -> str:
    """Rank 1 fails where rank 0 waits for it."""

    def make() -> None:
        if ranks.rank:
            raise BackendError("no compiler")
        ranks.meet()

    with pytest.raises((BackendError, RankError)) as caught:
        ranks.all_succeed(make)
    ranks.meet()  # Both go on from the same place.
    return str(caught.value)


def test_a_rank_that_fails_while_others_wait(tmp_path: Path) -> None:
    one, other = run_ranks(2, tmp_path, fail_beside)
    assert one == "rank 1 of 2 failed: BackendError: no compiler"
    assert other == "no compiler"


class Graph:
    """A device's graph, as far as `GraphReplay` knows it."""

    def __init__(self, replay: Callable[[], None], done: list[str]):
        self.replay, self._done = replay, done

    def reset(self) -> None:
        self._done.append("reset")


def generate(ranks: Ranks, directory: Path) -> tuple[Any, int, list[str]]:
    """Text of steps whose cut weights are not on the device; bytes that are; how it ended."""
    patch, done, destroy = pytest.MonkeyPatch(), list[str](), dist.destroy_process_group
    ranks = replace(ranks, group=made_over_gloo(ranks, patch)[0], on_gpus=True)

    def leave(group: Any) -> None:
        done.append(group.group_name)
        destroy(group)

    patch.setattr(dist, "destroy_process_group", leave)
    whole = load(str(directory), "float64", True).weights()
    part = read_part(load(str(directory), "float64", True, headers_only=True), ranks, "cpu")
    assert part is not None
    loaded, cut = part, RankShare(part, ranks).cut_weights
    held = 0
    for name, tensor in loaded.weights().items():
        held += tensor.untyped_storage().nbytes() if name in cut else tensor.nbytes
        assert tensor.isnan().all() if name in cut else torch.equal(tensor, whole[name])
    options = plan_of(spec_tokens=1, batch_buckets=(1,), **TINY)
    compiler = StepCompiler(loaded, options, make_backend("eager"), ranks=ranks)
    plain = compiler.compile()
    for key, step in plain.steps.items():
        graph: Any = Graph(step.replay, done)
        plain.steps[key] = replace(step, replay=GraphReplay(graph))
        assert step.graph is not None
        calls = [n for n, op in operators(step.graph.graph) if is_collective(op)]
        assert {n.args[-1] for n in calls} == {ranks.group}
    program = ranked(plain, ranks)
    if isinstance(program, FollowingProgram):
        program.follow()
        return None, held, done
    spec = SpecModel(loaded.served(), options, program)
    text = spec.generate([5, 6, 7], 12, ignore_eos=True)
    spec.close()
    assert isinstance(program, LeadingProgram)
    assert program.watch is not None
    assert program.watch.launched == sum(program.replays.values()) > 4
    return text, held, [*done, ranks.group]


@pytest.mark.parametrize("family", ["mimo", pytest.param("deepseek_v3", marks=pytest.mark.slow)])
def test_a_device_has_only_its_rank_s_part(
    family: str, checkpoint: Callable[..., Path], oracle: Callable[..., Oracle], tmp_path: Path
) -> None:
    """Of weights that are cut. In the place of a whole one there is NaN, which no step reads.

    Over gloo, but with the group, the watch and the end of ranks on GPUs.
    """
    directory = checkpoint(family)
    one, other = run_ranks(2, tmp_path, partial(generate, directory=directory))
    text, held, (*ended, group) = one
    assert ended == other[2] == ["reset", "reset", group], "graphs first, then their group"
    assert text == oracle(family).generate([5, 6, 7], 12, stop=False)
    whole = sum(t.nbytes for t in load(str(directory), "float64", True).weights().values())
    assert held < whole / 2


def watch_steps(ranks: Ranks) -> Iterator[Any]:
    """Rank 0 launches a step that does not end until it is aborted."""
    watching._POLL_S, watching._ANSWER_S, watching._END_S = 0.05, 1.0, 30.0
    aborted = threading.Event()
    store = dist.distributed_c10d._get_default_store()
    watch = StepWatch(ranks.rank, ranks.size, store, "test", 0.5, aborted.set)
    watch.launched += 1
    watch.wait(lambda: None)
    yield None
    if ranks.rank:
        signal.pause()
    watch.launched += 1
    start = time.monotonic()
    try:
        watch.wait(partial(_until, aborted))
    except RankError as error:
        yield str(error), time.monotonic() - start


def _until(event: threading.Event) -> None:
    event.wait(50)


@pytest.mark.parametrize("case", ["hangs", pytest.param("behind", marks=pytest.mark.slow)])
def test_a_step_that_does_not_end(case: str, tmp_path: Path) -> None:
    """Rank 0 stops waiting, and names the rank that does not answer, or is behind."""
    with forks_of(2, tmp_path, watch_steps) as forks:
        for fork in forks:
            fork.told()
        if case == "hangs":
            forks[1].kill(signal.SIGSTOP)
        error, took_s = forks[0].told()
        wanted = {
            "hangs": "rank 1 of 2 has not answered for 0 s",
            "behind": "rank 1 of 2 has launched 1 steps and hangs; rank 0 has launched 2",
        }
        assert error.startswith(wanted[case])
        assert 0.4 < took_s < 10


def test_a_process_ends_if_nothing_ends_its_step(tmp_path: Path) -> None:
    """When the abort of exchanges has no effect."""
    child = os.fork()
    if not child:
        watching._POLL_S, watching._ANSWER_S, watching._END_S = 0.05, 0.1, 0.3
        watch = StepWatch(0, 2, dist.HashStore(), "test", 0.2, lambda: None)
        watch.wait(lambda: time.sleep(60))
    until = time.monotonic() + 20
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < until:
        time.sleep(0.05)
    if not ended[0]:
        os.kill(child, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(ended[1]) == 2


def lower(ranks: Ranks) -> None:
    """A step of exchanges, one of which does not depend on the other, by Inductor."""

    def step(out: Tensor, x: Tensor, y: Tensor) -> None:
        out.copy_(ours.all_reduce(x.relu(), "0") + ours.all_reduce(y.sin(), "0"))

    x, y = torch.randn(2, 64), torch.randn(2, 64)
    graph = small_graph(step, batch_out=torch.zeros(2, 64), x=x, y=y)
    wanted = run(graph)
    assert cuda.options_of(graph)["deterministic"]
    SpellCollectives(Sharding(0, 2, "0", {}, {})).apply(graph)
    compiled = lower_by_inductor(graph)
    graph.buffer("batch.out").zero_()
    ranks.meet()
    compiled()
    torch.testing.assert_close(graph.buffer("batch.out"), wanted)


@pytest.mark.slow
def test_inductor_compiles_exchanges(tmp_path: Path) -> None:
    run_ranks(2, tmp_path, lower, 300.0)


def test_steps_of_one_rank_are_compiled_as_before() -> None:
    def step(out: Tensor, x: Tensor) -> None:
        out.copy_(x)

    graph = small_graph(step, batch_out=torch.zeros(3), x=torch.ones(3))
    assert cuda.options_of(graph) == cuda.INDUCTOR


def test_the_command_takes_the_backend(checkpoint: Callable[..., Path]) -> None:
    """It fails for want of a process group here, not of the option."""
    with pytest.raises(OptionError, match="with no process group; expected one of 2 ranks"):
        mtpc.compile(checkpoint("mimo"), tensor_parallel_size=2, backend="cuda")

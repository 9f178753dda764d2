"""Two ranks on two GPUs: exchanges by NCCL or RCCL, and by a kernel, within captured graphs.

**Nothing here has ever run.** It needs a machine with two GPUs; NCCL refuses two ranks on one.
`python -m pytest -n 0 -m '' tests/gpu/test_two_gpus.py` runs it there.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.families import TINY
from helpers.oracles import Oracle
from helpers.ranks import Group, group_of
from helpers.theorem import PROMPTS

from mtpc.backends.graphs import GraphReplay, kernels_of

pytestmark = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="needs two GPUs: docs/gpu.md, Several GPUs"
)

OPTIONS: dict[str, Any] = {**TINY, "backend": "cuda", "batch_buckets": (1, 4)}
BY_NCCL = "GPUs exchange small values by NCCL"
"""What is said where the GPUs cannot read each other's memory."""
LIMIT_S = 60.0
"""A rank that hangs is noticed after 30 seconds."""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_rank_ends_all(number: signal.Signals, checkpoint: Callable[..., Path]) -> None:
    """A killed one within seconds, one that hangs within the bound; rank 0 names it."""
    command = [sys.executable, "-m", "mtpc", "run", str(checkpoint("mimo")), "--backend=cuda"]
    shape = ["--max-len=512", "--dtype=float32", "--tensor-parallel-size=2", "--batch-buckets=1"]
    work = ["--ids=5 6 7"] * 400 + ["-n500", "--ignore-eos"]
    run = subprocess.Popen([*command, *shape, *work], stderr=subprocess.PIPE, text=True)
    assert run.stderr is not None
    try:
        for line in run.stderr:
            if "generate up to" in line:
                break
        time.sleep(2.0)
        (other,) = _children(run.pid)
        os.kill(other, number)
        start = time.monotonic()
        _, said = run.communicate(timeout=LIMIT_S)
        assert time.monotonic() - start < (10 if number is signal.SIGKILL else LIMIT_S)
        assert run.returncode == 2
        assert "rank 1 of 2" in said.splitlines()[-1], said
    finally:
        run.kill()
        run.wait()


def _children(parent: int) -> list[int]:
    """Processes that run ranks below one."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):
            stat = (path / "stat").read_text().rpartition(")")[2].split()
            if int(stat[1]) == parent and b"mtpc.cli.ranks" in (path / "cmdline").read_bytes():
                found.append(int(path.name))
    return found


HOST = """
import os, sys
import torch
import torch.distributed as dist
import mtpc

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
model = mtpc.compile(
    sys.argv[1], tensor_parallel_size=2, backend="cuda", dtype="float32", max_len=64
)
assert model.program.ranks.group != dist.group.WORLD.group_name
if dist.get_rank() == 0:
    print(list(model.generate([5, 6, 7], 16, ignore_eos=True)))
    model.close()
else:
    model.follow()
dist.barrier()
dist.destroy_process_group()
"""


def test_a_host_s_own_group(
    checkpoint: Callable[..., Path], oracle: Callable[..., Oracle], tmp_path: Path
) -> None:
    """Of NCCL alone, by torchrun; mtpc's groups are beside it, and are given back."""
    script = tmp_path / "host.py"
    script.write_text(HOST)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    done = subprocess.run(
        [*command, str(script), str(checkpoint("mimo"))],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert str(oracle("mimo").generate([5, 6, 7], 16, stop=False)) in done.stdout


EXCHANGES = """
import os
import torch
import torch.distributed as dist
from mtpc.ranks.group import join_ranks

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("gloo")
ranks = join_ranks(2, on_gpus=True)
torch.manual_seed(ranks.rank)
ours, kernels = torch.ops.mtpc, torch.ops.mtpc_loaded
for dtype in () if ranks.apart else (torch.bfloat16, torch.float16, torch.float32):
    part, graph = torch.zeros(3, 4099, dtype=dtype, device="cuda"), torch.cuda.CUDAGraph()

    def exchange():
        total = kernels.sum_ranks(part, ranks.group)
        return total, kernels.gather_ranks(total, 2, ranks.group)

    exchange()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        total, both = exchange()
    for call in range(300):
        part.normal_()
        if call % 7 == ranks.rank:
            torch.cuda._sleep(5_000_000)
        graph.replay()
        if call % 5 == 0:  # In between, nothing but the kernel waits.
            assert torch.equal(total, ours.sum_ranks(part, ranks.group)), (dtype, call)
            assert torch.equal(both, total.expand(2, -1, -1)), (dtype, call)
print(ranks.apart or "equal", flush=True)
dist.barrier()
"""


def test_the_kernel_of_small_exchanges_has_the_bits_of_nccl_s(tmp_path: Path) -> None:
    """In a graph that is replayed, with ranks that are late by turns."""
    script = tmp_path / "exchanges.py"
    script.write_text(EXCHANGES)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    if BY_NCCL in done.stdout:
        pytest.skip(done.stdout)
    assert done.stdout.count("equal") == 2


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Group]:
    with group_of(2, tmp_path_factory.mktemp("two")) as group:
        yield group


@pytest.mark.parametrize("spec_tokens", [0, 3])
@pytest.mark.parametrize("family", ["mimo", "glm4_moe", "deepseek_v3"])
def test_text_is_that_of_plain_decoding(
    family: str,
    spec_tokens: int,
    two: Group,
    checkpoint: Callable[..., Path],
    oracle: Callable[..., Oracle],
) -> None:
    """In float32: one graph a step, with exchanges in it."""
    spec = two.compile(checkpoint(family), spec_tokens=spec_tokens, dtype="float32", **OPTIONS)
    prompts = PROMPTS[4:8]
    wanted = [oracle(family).generate(prompt, 16, stop=False) for prompt in prompts]
    assert spec.generate(prompts, 16, ignore_eos=True) == wanted
    assert not [line for line in spec.stats.fallbacks if BY_NCCL not in line]
    first, second = two.close()
    assert first == second


def test_exchanges_are_in_the_graph(two: Group, checkpoint: Callable[..., Path]) -> None:
    """Of a warm program, which has replayed each step; both ranks replay it again."""
    spec = two.compile(checkpoint("mimo"), spec_tokens=1, dtype="bfloat16", **OPTIONS)
    spec.generate(PROMPTS[4], 4, ignore_eos=True)
    key = next(key for key in spec.program.steps if key.phase == "decode")
    assert isinstance(spec.program.steps[key].replay, GraphReplay)
    kernels = kernels_of(lambda: spec.program.run(key))
    of_nccl = sum(count for name, count in kernels.items() if "nccl" in name.lower())
    of_ours = sum(count for name, count in kernels.items() if "exchange_kernel" in name)
    is_apart = any(BY_NCCL in line for line in spec.stats.fallbacks)
    assert (of_nccl > 4, of_ours > 4) == (is_apart, not is_apart)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_ranks_do_not_part(dtype: str, two: Group, checkpoint: Callable[..., Path]) -> None:
    """Sampled and greedy, over many steps."""
    options = {**OPTIONS, "sampling": True, "async_scheduling": True}
    spec = two.compile(checkpoint("glm4_moe"), spec_tokens=3, dtype=dtype, **options)
    for seed in range(4):
        spec.generate(PROMPTS[4:8], 24, ignore_eos=True, temperature=seed / 2, seed=seed)
    first, second = two.close()
    assert first == second

"""What a rank's start takes of the host's memory where steps are compiled over weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.families import TINY
from helpers.forked_ranks import run_ranks
from helpers.plans import plan_of
from helpers.tiny import build_mtp_layers, build_target, save_checkpoint
from safetensors.torch import load_file, save_file

import mtpc
from mtpc.backends import make_backend
from mtpc.errors import CheckpointError, RankError
from mtpc.models.load import load
from mtpc.program.compiler import StepCompiler
from mtpc.ranks import share
from mtpc.ranks.group import Ranks
from mtpc.ranks.share import read_part

MIB = 1 << 20
OPTIONS: dict[str, Any] = {**TINY, "spec_tokens": 1, "batch_buckets": (1,), "max_len": 16}
WIDE: dict[str, Any] = dict(
    vocab_size=8192, hidden_size=512, intermediate_size=2048, moe_intermediate_size=1024,
    n_routed_experts=8, initializer_range=0.02,
)  # fmt: skip
STACK = ("n_routed_experts", "moe_intermediate_size", "hidden_size")


def most_at_once(run: Callable[[], object]) -> int:
    """The most bytes of tensors that a call holds at a time, as torch's allocator counts them.

    Tensors over mapped files do not count: the system can drop their pages.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as seen:
        run()
    results = seen.profiler.kineto_results
    changes = [event for event in results.events() if event.name() == "[memory]"]
    changes.sort(key=lambda event: event.start_ns())
    return max(accumulate(event.nbytes() for event in changes))


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """glm4_moe in bfloat16, whose weights are far larger than what compiling takes."""
    directory = tmp_path_factory.mktemp("wide")
    target = build_target("glm4_moe", **WIDE)
    layers = build_mtp_layers("glm4_moe", target)
    layers = [layer.bfloat16() for layer in layers]
    save_checkpoint("glm4_moe", target.bfloat16(), layers, directory)
    return directory


def start(ranks: Ranks, directory: Path, dtype: str) -> int:
    """Bytes that a start takes at most."""
    given = {**OPTIONS, "tensor_parallel_size": ranks.size, "backend": "eager", "dtype": dtype}
    return most_at_once(lambda: mtpc.compile(directory, **given))


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_a_start_takes_the_rank_s_part(dtype: str, wide: Path, tmp_path: Path) -> None:
    """Also of weights that are cast. While a stack is made, its rows are in memory twice."""
    size = getattr(torch, dtype).itemsize
    whole = (wide / "model.safetensors").stat().st_size // 2 * size
    stack = math.prod((2, *map(WIDE.__getitem__, STACK))) * size
    body = partial(start, directory=wide, dtype=dtype)
    for peak in run_ranks(2, tmp_path, body, 300.0):
        assert stack < peak < whole / 2 + stack + 8 * MIB


def damaged(ranks: Ranks, directory: Path) -> str:
    with pytest.raises((CheckpointError, RankError)) as caught:
        mtpc.compile(directory, **OPTIONS, tensor_parallel_size=ranks.size, backend="eager")
    return f"{type(caught.value).__name__}: {caught.value}"


@pytest.mark.parametrize(
    "name", ["lm_head.weight", pytest.param("model.norm.weight", marks=pytest.mark.slow)]
)
def test_a_rank_checks_what_it_reads(
    name: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """The last row is rank 1's, where a weight is cut; all of a norm is on both."""
    source = checkpoint("mimo")
    for path in source.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[name][-1] = torch.nan
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    one, other = run_ranks(2, tmp_path, partial(damaged, directory=tmp_path))
    assert other.startswith("CheckpointError: ")
    assert f"1 tensor(s) hold NaN or infinity: {name}" in other
    assert one.startswith("RankError: rank 1 of 2 failed: " if name == "lm_head.weight" else other)


def copies(directory: Path) -> list[bool]:
    """Whether the parts of the target's ends and of the MTP layer's share memory on a rank."""
    ranks = Ranks(1, 2, "0")
    part = read_part(load(directory, None, True, headers_only=True), ranks, "cpu")
    assert part is not None
    compiler = StepCompiler(part, plan_of(**OPTIONS), make_backend("eager"), ranks=ranks)
    graph = compiler.rewritten(compiler.keys[0])
    pairs = [("model.embed_tokens", "mtp.0.embedding"), ("lm_head", "mtp.0.head")]
    tables = [[f"shard.{one.replace('.', '_')}_weight" for one in pair] for pair in pairs]
    return [len({graph.weights[one].data_ptr() for one in table}) == 1 for table in tables]


@pytest.mark.parametrize("is_equal", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_equal_ends_are_in_memory_once(is_equal: bool, tmp_path: Path) -> None:
    """A rank's rows of an embedding and a head that a checkpoint stores twice."""
    target = build_target("glm4_moe")
    (layer,) = build_mtp_layers("glm4_moe", target, own=("embedding", "head"))
    if is_equal:
        layer.embedding.weight.data = target.get_input_embeddings().weight.data.clone()
        layer.head.weight.data = target.get_output_embeddings().weight.data.clone()
    directory = tmp_path / "checkpoint"
    save_checkpoint("glm4_moe", target, [layer], directory)
    assert copies(directory) == [is_equal] * 2


def unexplained(ranks: Ranks, directory: Path) -> list[str]:
    """The fallbacks where nothing says how one weight is made of stored tensors."""
    known = share.weight_recipes
    pytest.MonkeyPatch().setattr(
        share,
        "weight_recipes",
        lambda loaded: {n: r for n, r in known(loaded).items() if n != "lm_head.weight"},
    )
    given = {**OPTIONS, "spec_tokens": 0}
    given |= {"tensor_parallel_size": ranks.size, "backend": "eager"}
    return list(mtpc.compile(directory, **given).stats.fallbacks)


def test_what_only_transformers_can_read(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Every rank then loads the whole model, and says so."""
    body = partial(unexplained, directory=checkpoint("mimo"))
    said = ["weights that only transformers can read: all are on every rank"]
    assert run_ranks(2, tmp_path, body) == [said, said]

"""A rank reads its slices of a checkpoint, and holds its share of weights and pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from helpers.plans import changed, plan_of
from safetensors.torch import load_file, save_file

from mtpc.errors import CacheError, CheckpointError
from mtpc.layout import graph_keys
from mtpc.plan import Plan
from mtpc.program.build import build
from mtpc.program.open_cache import open_cache, restore
from mtpc.program.program import BuiltSteps, bind_program
from mtpc.ranks.group import Ranks, all_parts
from mtpc.weights.checkpoint import Checkpoint
from mtpc.weights.recipes import Join, Rows, make, take_early


def test_rows_are_taken_before_tensors_are_joined() -> None:
    """The same tensor, of which no more is read."""
    tensors = {name: torch.arange(24.0).reshape(4, 6) + 100 * i for i, name in enumerate("abcd")}
    both = Join("cat_rows", (Join("stack", ("a", "b")), Join("stack", ("c", "d"))))
    recipes = [
        Rows(((1, 3), (5, 7)), both, 1),
        Rows(((2, 5),), both, 2),
        Rows(((1, 2),), both, 0),
        Rows(((1, 6),), Join("cat", ("a", "b"))),
        Rows(((0, 2), (5, 6)), Join("cat", ("a", "b", "c"))),
        Rows(((1, 3),), Join("cat", ("a", "b")), 1),
    ]
    for recipe in recipes:
        early = take_early(recipe, tensors.__getitem__)
        assert torch.equal(make(early, tensors.__getitem__), make(recipe, tensors.__getitem__))
    assert take_early(recipes[0], tensors.__getitem__) == Join(
        "cat_rows",
        tuple(
            Join("stack", tuple(Rows((run,), name) for name in names))
            for names, run in (("ab", (1, 3)), ("cd", (1, 3)))
        ),
    )


@pytest.fixture
def options(built: list[str], cpu_cache: Path) -> Plan:
    """Of the steps that are built."""
    return plan_of(
        dtype="float64", spec_tokens=1, max_len=512, prefill_chunk=16, batch_buckets=(1,),
        tensor_parallel_size=2, cache_dir=cpu_cache, sampling=False,
    )  # fmt: skip


def restored(
    directory: Path,
    options: Plan,
    part: Ranks | None,
    others: Sequence[Ranks | None] = (None,),
) -> BuiltSteps:
    """What a rank finds in the cache.

    Args:
        directory: the checkpoint.
        options: of the steps.
        part: the rank; None: one that has all.
        others: all ranks in order, None for this one; those whose entries are pinned, too.
    """
    source = Checkpoint(directory)
    cache = open_cache(source, options, print, part)
    assert cache is not None
    caches = [None if each is None else open_cache(source, options, print, each) for each in others]
    found = restore(source, cache, graph_keys(options, "fused"), caches)
    assert found is not None
    return found


@pytest.mark.parametrize("rank", [0, 1])
def test_one_digest_pins_the_entries_of_all_ranks(
    rank: int, options: Plan, checkpoint: Callable[..., Path]
) -> None:
    """`mtpc build` tells it; entries of two ranks in another order are others."""
    every = all_parts(2)
    report = build(checkpoint("mimo"), (options,), jobs=1, parts=every)
    assert all(step.was_there for step in report.steps)
    pinned = changed(options, require_sha256=report.pins[1])
    others = [None if part == every[rank] else part for part in every]
    restored(checkpoint("mimo"), pinned, every[rank], others)
    for wrong in (others[::-1], [None]):
        with pytest.raises(CacheError, match=r"the cache holds .* built again"):
            restored(checkpoint("mimo"), pinned, every[rank], wrong)


@pytest.mark.slow
def test_each_rank_holds_its_share(options: Plan, checkpoint: Callable[..., Path]) -> None:
    """Weights and pages of a rank are half of all, but for norms."""
    build(checkpoint("mimo"), (changed(options, tensor_parallel_size=1),), jobs=1)
    held = []
    for part in (None, *all_parts(2)):
        size = 1 if part is None else 2
        shared = changed(options, tensor_parallel_size=size)
        found = restored(checkpoint("mimo"), shared, part)
        program, weights = bind_program(found), found.weights
        pages = [tensor for name, tensor in program.shared.items() if name.startswith("kv.")]
        held.append(sum(tensor.nbytes for tensor in (*dict(weights.items()).values(), *pages)))
    whole, *parts = held
    assert parts[0] == parts[1]
    assert whole / 2 <= parts[0] <= 1.08 * whole / 2


@pytest.mark.parametrize("rank", [0, 1])
def test_no_rank_reads_the_slices_of_others(
    rank: int, options: Plan, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """What is damaged in another rank's slices is not noticed; in its own it is."""
    source = checkpoint("mimo")
    for path in source.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][:, -1] = torch.nan  # Rank 1's.
    tensors["lm_head.weight"][-1] = torch.nan
    tensors["model.layers.0.self_attn.q_proj.weight"][-1] = torch.nan
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    found = restored(tmp_path, options, all_parts(2)[rank])
    bind_program(found)
    if rank == 0:
        found.weights.check()
        return
    with pytest.raises(CheckpointError, match=r"3 tensor\(s\) hold NaN"):
        found.weights.check()

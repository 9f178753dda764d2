"""bfloat16 on the cpu backend: a request's tokens are the same alone or in any company."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.compiled import run_on
from helpers.families import ASSISTED, CPU_FAMILY_NAMES, DRAFTED, NEAR_FAMILIES, TINY
from helpers.oracles import Oracle
from helpers.small_graphs import small_graph
from helpers.theorem import poison
from helpers.tiny import drafter
from helpers.uncached import logits_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

import mtpc
from mtpc.api import SpecModel
from mtpc.backends.cpu_kernels import load_kernels
from mtpc.backends.gpu.passes.batch_invariant import BatchInvariant
from mtpc.backends.gpu.passes.fuse_skinny_linears import FuseSkinnyLinears
from mtpc.backends.gpu.passes.lower_choices import LowerChoices
from mtpc.backends.lower_tape import lower_to_tape
from mtpc.backends.pipeline import pass_names
from mtpc.backends.tape import open_tape, write_tape
from mtpc.capture.graph import get_tensor
from mtpc.passes.trim_draft_head import TrimDraftHead

NEW_TOKENS = 24
PROGRAMS: dict[str, dict[str, Any]] = {
    "plain": dict(spec_tokens=0, batch_buckets=(1,)),
    "K=3": dict(spec_tokens=3, batch_buckets=(1, 4)),
    "K=1, small chunks": dict(spec_tokens=1, batch_buckets=(2,), prefill_chunk=3),
}
"""Numbers of drafts, buckets and prefill chunks; a program takes half a minute to compile."""
FEW = ("plain", "K=1, small chunks")
MODELS = [
    *((family, (*PROGRAMS,)) for family in ("glm4_moe", "deepseek_v3", "mimo")),
    *((family, FEW) for family in ("deepseek_v32", "qwen3_next", "mimo_v2", "step3p7")),
]
"""Routers, experts, shared ones, and a dense layer first; with latent attention; all dense.
Of the others: sparse attention, recurrent state, sliding windows in rings."""
GPU_PASSES = {FuseSkinnyLinears.name, BatchInvariant.name, LowerChoices.name}
"""A CPU refuses the first two. The last chooses the first of equal experts, where torch's topk may
choose another, and so does plain decoding without it."""
PASSES = tuple(name for name in pass_names() if name not in GPU_PASSES)
EVERY_PASS: dict[str, Any] = dict(spec_tokens=3, enabled_passes=PASSES, draft_vocab=48)
PROMPT = st.lists(st.integers(2, 95), min_size=1, max_size=20)


@dataclass
class Programs:
    """A model's programs, and what plain decoding made of each prompt that was asked for."""

    by_name: dict[str, SpecModel]
    known: dict[tuple[int, ...], list[int]] = field(default_factory=dict)

    def alone(self, prompt: list[int]) -> list[int]:
        """Plain decoding of one prompt by itself."""
        key = tuple(prompt)
        if key not in self.known:
            (self.known[key],) = decode(self.by_name["plain"], [prompt])
        return self.known[key]


def decode(spec: SpecModel, prompts: list[list[int]]) -> list[list[int]]:
    return spec.generate(prompts, NEW_TOKENS, ignore_eos=True)


@pytest.fixture
def build(checkpoint: Callable[..., Path], cpu_cache: Path) -> Callable[..., SpecModel]:
    """build(family, **options): a model for the cpu in bfloat16, over poisoned memory."""

    def get(family: str, **options: Any) -> SpecModel:
        fixed = dict(dtype="bfloat16", backend="cpu", cache_dir=cpu_cache)
        directory = checkpoint(family)
        spec = mtpc.compile(directory, **{**TINY, **fixed, **drafter(directory), **options})
        poison(spec)
        return spec

    return get


def check_invariance(programs: Programs, names: tuple[str, ...], max_examples: int) -> None:
    """Draw batches for programs: each request is as plain decoding has it alone."""

    @settings(max_examples=max_examples, deadline=None, derandomize=True)
    @given(prompts=st.lists(PROMPT, min_size=1, max_size=6), name=st.sampled_from(names))
    def holds(prompts: list[list[int]], name: str) -> None:
        found = decode(programs.by_name[name], prompts)
        assert found == [programs.alone(prompt) for prompt in prompts]

    holds()
    outputs = {tuple(ids) for ids in programs.known.values()}
    assert len(outputs) > len(programs.known) // 2  # They do differ.
    for name in names:
        stats = programs.by_name[name].stats
        assert name == "plain" or 0 < sum(stats.accepted) < sum(stats.drafted)


@torch.no_grad()
def choices(plain: Oracle, prompt: list[int], text: list[int]) -> list[int]:
    """The oracle's choice in the place of each token of a text, after the tokens before it."""
    rows = logits_of(plain.model, plain.hidden([*prompt, *text]))[0, len(prompt) - 1 : -1]
    return rows.argmax(1).tolist()


@pytest.mark.parametrize(
    "family",
    [
        CPU_FAMILY_NAMES[3],
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in (*CPU_FAMILY_NAMES[:3], *NEAR_FAMILIES, *DRAFTED, *ASSISTED)
        ),
    ],
)
def test_every_pass_keeps_plain_decoding(
    family: str, build: Callable[..., SpecModel], oracle: Callable[..., Oracle]
) -> None:
    """The theorem in bfloat16: drafts, batches and all passes change no token, nor does a restart.

    And plain decoding is the model's: it chooses as float64 does, but for near ties of logits or of
    experts, and hardly less often than transformers' own bfloat16.
    """
    every = EVERY_PASS
    if family in DRAFTED:  # Its drafter has a vocabulary of its own.
        names = (name for name in PASSES if name != TrimDraftHead.name)
        every = {**EVERY_PASS, "enabled_passes": tuple(names), "draft_vocab": ()}
    spec = build(family, batch_buckets=(2,), **every)
    programs = Programs({"plain": build(family, **PROGRAMS["plain"]), "K=3": spec})
    check_invariance(programs, ("K=3",), 25)
    prompts = list(map(list, programs.known))[:6]
    exact = oracle(family)
    rounded = Oracle(family, exact.directory, torch.bfloat16)
    ours, theirs = [], []
    for prompt in prompts:
        text = programs.alone(prompt)
        best = choices(exact, prompt, text)
        ours += [a == b for a, b in zip(text, best, strict=True)]
        theirs += [a == b for a, b in zip(choices(rounded, prompt, text), best, strict=True)]
    print(f"as float64: {sum(ours)}, transformers in bfloat16: {sum(theirs)}, of {len(ours)}")
    assert sum(ours) > max(sum(theirs) - 0.03 * len(ours), 0.9 * len(ours))
    again = build(family, batch_buckets=(2,), frozen=True, **every)
    assert decode(again, prompts) == [programs.alone(prompt) for prompt in prompts]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "names"), MODELS)
def test_batch_invariance(
    family: str, names: tuple[str, ...], build: Callable[..., SpecModel]
) -> None:
    """Over prompts, batches, K, buckets and chunks, against plain decoding of each alone."""
    programs = Programs({name: build(family, **PROGRAMS[name]) for name in names})
    check_invariance(programs, names, 40)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "names"),
    [("int8", FEW), *((kind, (*PROGRAMS,)) for kind in ("int8", "fp8"))],
)
def test_pages_of_codes(kind: str, names: tuple[str, ...], build: Callable[..., SpecModel]) -> None:
    """The same with keys and values as codes: a token's depend on no other row that is written."""
    programs = {name: build("mimo", kv_cache_dtype=kind, **PROGRAMS[name]) for name in names}
    check_invariance(Programs(programs), names, 25)


def test_sums_between_kernels_do_not_depend_on_rows() -> None:
    """The one row of a wide norm is not given to two threads, whose sums would be added."""
    load_kernels()
    x = torch.randn(64, 8192, generator=torch.Generator().manual_seed(0))

    def norm(out: Tensor, x: Tensor) -> None:
        out.copy_(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))

    def normed(part: Tensor) -> Tensor:
        graph = small_graph(norm, batch_out=torch.zeros_like(part), x=part.clone())
        text = write_tape(*lower_to_tape(graph))
        open_tape(text, lambda name: get_tensor(graph.module, name))()
        return graph.buffer("batch.out")

    with run_on(2):
        together = torch.cat([normed(part) for part in x.split(32)])
        assert torch.equal(together[::8], torch.cat([normed(row) for row in x[::8].split(1)]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("function", [lambda x: F.gelu(x, approximate="tanh"), torch.tanh])
def test_functions_do_not_depend_on_the_place(
    function: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    """PyTorch's gelu does: it computes what fills no vector in another way."""
    load_kernels()

    def on_tape(x: Tensor) -> Tensor:
        graph = small_graph(
            lambda out, x: out.copy_(function(x)), batch_out=torch.zeros_like(x), x=x.clone()
        )
        text = write_tape(*lower_to_tape(graph))
        open_tape(text, lambda name: get_tensor(graph.module, name))()
        return graph.buffer("batch.out")

    x = 3 * torch.randn(37, 17, generator=torch.Generator().manual_seed(0)).to(dtype)
    together = on_tape(x)
    assert torch.equal(together, torch.cat([on_tape(row) for row in x.split(1)]))
    torch.testing.assert_close(together, function(x))

"""Which kernels the operators of a decode step are bound to on AMD's GPUs, for released models.

    python -m benchmarks.gpu_bound            # print the tables; needs Triton, and no GPU
    python -m benchmarks.gpu_bound --write    # put them into docs/gpu.md

Layers are cut to one of each kind, and files of weights have no data. aiter is not asked: its
limits are those of `mtpc.backends.aiter.facts`.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks import ROOT
from benchmarks.gpu_model import BEFORE, Case, one_layer
from benchmarks.harness import command
from benchmarks.harness.released_shapes import RELEASED
from mtpc import CompileOptions
from mtpc.backends import aiter
from mtpc.backends.aiter.facts import DEVICES, UNBOUND
from mtpc.backends.aiter.limits import latent_parts
from mtpc.backends.bindings import BindKernels
from mtpc.backends.cuda import CrossBackend
from mtpc.capture.graph import StepGraph, operators
from mtpc.layout import Layout
from mtpc.models.load import load_planned
from mtpc.plan import make_plan
from mtpc.program.compiler import StepCompiler
from mtpc.ranks.group import Ranks

PAGE = ROOT / "docs" / "gpu.md"
BATCH, SPEC_TOKENS, CONTEXT = 8, 3, 4096
END = "<!-- end of what was made -->"
_NAMES = ("aiter", "triton", "reference")
_LIBRARIES = dict(zip(("mtpc_aiter", "mtpc_triton", "mtpc"), _NAMES, strict=True)) | {
    "mtpc_loaded": "triton"
}
_NOTE = re.compile(r"mtpc::(\w+) does not run on aiter \((.*)\): .* instead")


@dataclass(frozen=True)
class Count:
    """What became of a step's operators.

    Attributes:
        calls: (library, operator, calls).
        products: calls of PyTorch's matrix products.
        why: operators that run elsewhere, with why aiter's kernel refuses them, or the functions of
            aiter that mtpc does not bind.
    """

    calls: tuple[tuple[str, str, int], ...]
    products: int
    why: tuple[tuple[str, str], ...]

    def of(self, library: str) -> str:
        """Operators of a library, with how many calls there are of each."""
        found = (f"{name} {count}" for of, name, count in self.calls if of == library)
        return ", ".join(found) or "-"


class _Rewriter(CrossBackend):
    """Rewrites steps for a GPU, and leaves operators unbound."""

    def legalise(self) -> tuple[()]:
        """Nothing."""
        return ()


def _absent(published: aiter.Published) -> Callable[..., Any]:
    """Stands for a function of aiter, which nothing calls here; weights stay where they are."""
    return lambda weight, **_: weight


def compiler_of(name: str, directory: Path, ranks: int = 1) -> StepCompiler:
    """Of a released model's steps, on the first of some ranks; operators stay unbound."""
    model = RELEASED[name]
    model.write(directory)
    drafts = SPEC_TOKENS if model.has_drafts else 0
    options = CompileOptions(
        spec_tokens=drafts, batch_buckets=(BATCH,), max_len=4096, page_size=16, prefill_chunk=64,
        sampling=False, token_mask=False,
    )  # fmt: skip
    plan = make_plan(options)
    loaded = load_planned(directory, plan, headers_only=True)
    shared = Ranks(0, ranks) if ranks > 1 else None
    compiler = StepCompiler(loaded, plan, _Rewriter(), new_buffer=Layout.reserve, ranks=shared)
    compiler.weights.defers = True
    return compiler


@torch.no_grad()
def count(graph: StepGraph, device: str) -> Count:
    """Bind a copy of a step for a device.

    Raises:
        BackendError: there is no Triton.
    """
    from mtpc.backends.triton_kernels import triton_bindings

    theirs = (aiter.bind(kernel, device, _absent) for kernel in aiter.KERNELS)
    notes: list[str] = []
    bound = graph.clone()
    BindKernels([*theirs, *triton_bindings()], notes.append).apply(bound)
    calls, products = Counter[tuple[str, str]](), 0
    for _, target in operators(bound.graph):
        space, _, name = str(target).removesuffix(".default").partition(".")
        if space in _LIBRARIES:
            calls["triton" if name == "token_lists" else _LIBRARIES[space], name] += 1
        products += space == "aten" and name in ("linear", "matmul", "mm", "bmm", "addmm")
    found = (_NOTE.fullmatch(note) for note in notes)
    ordered = tuple((*key, n) for key, n in sorted(calls.items()))
    refused = {(m[1], m[2]) for m in found if m}
    return Count(ordered, products, tuple(sorted(refused | {*_left_out(calls)})))


def _left_out(calls: Counter[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Operators on other kernels that aiter has functions for, and these."""
    for each in UNBOUND:
        for operator in each.operator.split(", "):
            if any(key in calls for key in (("triton", operator), ("reference", operator))):
                yield operator, each.function


def rows(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """A row for each model, number of ranks, and devices on which it is bound alike."""
    for name in names:
        model = RELEASED[name]
        for ranks in model.ranks:
            with tempfile.TemporaryDirectory() as directory, torch.no_grad():
                compiler = compiler_of(name, Path(directory), ranks)
                decode = next(key for key in compiler.keys if key.phase == "decode")
                graph = compiler.rewritten(decode)
                counts = {device: count(graph, device) for device in DEVICES}
            for found in dict.fromkeys(counts.values()):
                on = " ".join(device for device, other in counts.items() if other == found)
                why = "; ".join(f"{operator}: {reason}" for operator, reason in found.why)
                told = [found.of(library) for library in _NAMES]
                whole = name if ranks == 1 else f"{name}, a rank of {ranks}"
                yield (whole, model.form, on, *told, str(found.products), why or "-")


COLUMNS = ("model", "stored as", "on", "aiter", "Triton", "a reference", "products", "not aiter")


def counts_table(names: Sequence[str] = tuple(RELEASED)) -> str:
    """The table of counts."""
    return _table(COLUMNS, rows(names))


LAYERS = ("glm4-8b", "glm4.5-air", "mla-moe-16b", "deepseek-v3")


def layers_table(shapes: Sequence[str] = LAYERS) -> str:
    """A layer of a decode step, before and after the passes of GPUs, on Triton's kernels."""
    made = []
    for shape in shapes:
        case, cells = Case(shape, BATCH, SPEC_TOKENS, False), list[str]()
        for disabled in (BEFORE, ()):
            launches, moved = one_layer(case, CONTEXT, disabled)
            cells += [str(launches), f"{moved / 1e6:.1f}"]
        made.append((shape, *cells))
    return _table(("shape", "launches before", "MB before", "launches", "MB"), made)


SHOWN = (128, 64, 32, 20, 16, 8)
"""Heads: DeepSeek-V3's on 1 to 16 ranks, and GLM-4.7-Flash's."""


def heads_table() -> str:
    """Latent attention by heads."""
    made = []
    for heads in SHOWN:
        cells = {device: _parts(heads, device) for device in DEVICES}
        for found in dict.fromkeys(cells.values()):
            on = " ".join(device for device, other in cells.items() if other == found)
            made.append((str(heads), on, *found))
    return _table(("heads", "on", "1 row", "2", "4", "8", "more", "prompts"), made)


def _parts(heads: int, device: str) -> tuple[str, ...]:
    """The calls of aiter by rows of a request, each with its heads."""
    told = []
    for rows in (1, 2, 4, 8, 16, None):
        parts = latent_parts(heads, rows, device)
        several = f"{parts.calls} x " if parts.calls > 1 else ""
        told.append(f"{several}{parts.heads}")
    return tuple(told)


def _table(columns: Sequence[str], made: Any) -> str:
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in made)]) + "\n"


def put(text: str, part: str, table: str) -> str:
    """A page with one of its tables made again.

    Raises:
        ValueError: the page has no such part.
    """
    begin = f"<!-- made by benchmarks.gpu_bound: {part} -->\n"
    if text.count(begin) != 1:
        raise ValueError(f"the page has {text.count(begin)} parts {part!r}; expected one")
    before, rest = text.split(begin)
    return f"{before}{begin}{table}{END}{rest.split(END, 1)[1]}"


def main(argv: Sequence[str] | None = None) -> int:
    """Print or write the tables."""
    parser = command.new_parser("gpu_bound", __doc__)
    parser.add_argument("--write", action="store_true", help="into docs/gpu.md")
    args: argparse.Namespace = parser.parse_args(argv)
    transformers.utils.logging.set_verbosity_error()
    makers = {"heads": heads_table, "layers": layers_table, "counts": counts_table}
    for part, make in makers.items():
        table = make()
        print(table)
        if args.write:
            PAGE.write_text(put(PAGE.read_text(), part, table))
    return 0


if __name__ == "__main__":
    sys.exit(main())

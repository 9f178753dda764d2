"""docs/embedding.md against the code: the contract's table, the examples, what is public."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.families import FAMILY_NAMES, TINY
from helpers.places import ROOT
from helpers.plans import plan_of

import mtpc
from mtpc.backends import make_backend
from mtpc.capture.split import CROSS_MEANING
from mtpc.host.contract import HostBuffer, host_buffers
from mtpc.host.hosted import _as_stated
from mtpc.layout import HOST, VERIFY, BufferSpec, Layout, dtype_name
from mtpc.models.load import load
from mtpc.program.compiler import StepCompiler

PAGE = (ROOT / "docs" / "embedding.md").read_text()
TABLE = re.compile(
    r"(?<=<!-- made by tests/host/test_contract.py -->\n).*?(?=\n<!-- end of what was made -->)",
    re.DOTALL,
)


@pytest.fixture(scope="module")
def layouts(checkpoint: Callable[..., Path]) -> dict[str, Layout]:
    """Every buffer of every family, with sampling, by family; crossing values left out."""
    made = {}
    options = plan_of(
        **{**TINY, "spec_tokens": 2, "batch_buckets": (4,), "num_pages": 89, "sampling": True},
        prefill_rows=4,
    )
    for family in FAMILY_NAMES:
        loaded = load(checkpoint(family, "random"), "bfloat16", True)
        compiler = StepCompiler(loaded, options, make_backend("eager"), new_buffer=Layout.reserve)
        decode, prefill = (compiler.layout(key) for key in compiler.keys)
        prompts = [prefill[n] for n in prefill if n not in decode]
        made[family] = Layout([*decode.values(), *prompts], prefill.sizes)
        if family == "mimo":  # Metadata grows to one row a token, in all families alike.
            grown = compiler.rewrite(compiler.trace(compiler.keys[0]), "resize-metadata").layout
            for name in decode:
                made[family] = made[family].resized(name, grown[name].dims)
    return made


WELL_KNOWN = {"Q*R": "T", "R*(K+1)": "R(K+1)", "floor(V/32+31/32)": "V/32"}
"""Sizes as sympy writes them, and as the table does."""


def contract_table(specs: Iterable[BufferSpec], model_dtype: torch.dtype) -> str:
    """The contract as a Markdown table, as it stands in docs/embedding.md.

    Args:
        specs: with symbols for sizes; layers of one kind become one row.
        model_dtype: the weights', which the table calls "model".
    """
    rows: dict[str, str] = {}
    for spec in specs:
        name = re.sub(r"(?<=^kv\.)\d+", "*", spec.name)
        dtype = "model" if spec.dtype == model_dtype else dtype_name(spec.dtype)
        cells = (
            f"`{name}`",
            f"[{', '.join(size_of(spec, dim) for dim in spec.dims)}]",
            dtype,
            str(spec.pad) if spec.needs_pad else "any",
            ", ".join(spec.writers),
            spec.meaning,
        )
        rows.setdefault(name, f"| {' | '.join(cells)} |")
    head = ["| buffer | shape | dtype | pad | written by | what |", "|---|---|---|---|---|---|"]
    return "\n".join([*head, *rows.values()])


def size_of(spec: BufferSpec, dim: object) -> str:
    """A size as the table shows it: a model's own numbers and rings as letters."""
    text = str(dim).replace("K_max", "K").replace(" ", "")
    text = WELL_KNOWN.get(text, text)
    own = spec.name.startswith(("kv.", "state.chain_"))
    return "n" if own and (text.isdigit() or (len(text) > 1 and text != "any")) else text


def test_the_table_is_the_code(layouts: dict[str, Layout]) -> None:
    """`pytest -k table_is_the_code` prints the table where the page's is another."""
    cross = BufferSpec("cross.*", ("any",), torch.int8, 0, VERIFY, CROSS_MEANING, needs_pad=False)
    specs = [spec for layout in layouts.values() for spec in layout.values()]
    kinds = ("state.", "kv.", "batch.")
    ordered = [spec for kind in kinds for spec in specs if spec.name.startswith(kind)]
    table = contract_table([*ordered, cross], torch.bfloat16)
    found = TABLE.search(PAGE)
    assert found, "docs/embedding.md has no such block"
    assert found.group() == table, table


def test_every_buffer_is_explained(layouts: dict[str, Layout]) -> None:
    """Each has a meaning and a writer; a pool of pages is what the block table names."""
    for family, layout in layouts.items():
        for name, spec in layout.items():
            assert spec.meaning, f"{family} {name}"
            assert spec.writers, f"{family} {name}"
        buffers = host_buffers(layout, layout)
        paged = {n for n in buffers if n.startswith("kv.") and buffers[n].shape[0] == 89}
        assert {n for n, buffer in buffers.items() if buffer.is_paged} == paged


def test_strides_are_stated(layouts: dict[str, Layout]) -> None:
    for buffer in host_buffers(layouts["mimo"], layouts["mimo"]).values():
        assert buffer.allocate().stride() == buffer.strides


def run_blocks(page: str, namespace: dict[str, Any]) -> None:
    """The page's examples, one after the other, on the eager backend."""
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        assert block.count("spec_tokens=2,") == block.count("compile(") + block.count(
            "compile_host("
        )
        exec(block.replace("spec_tokens=2,", 'spec_tokens=1, backend="eager",'), namespace)


def test_the_examples_in_the_docs(capsys: pytest.CaptureFixture[str]) -> None:
    """Each level continues the same prompts alike."""
    run_blocks(PAGE, {"__name__": "docs"})
    by_hand, by_coroutine, by_host = capsys.readouterr().out.strip().split("\n---\n")
    assert sorted(by_hand.splitlines()) == sorted(by_coroutine.splitlines())
    assert by_host in by_hand.splitlines()


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", PAGE):
        assert (ROOT / "docs" / target).exists(), target


def test_the_upper_level_is_public() -> None:
    from mtpc.engine.async_engine import AsyncEngine
    from mtpc.engine.engine import Engine

    assert mtpc.Engine is Engine
    assert mtpc.AsyncEngine is AsyncEngine
    assert all(getattr(mtpc, name) is not None for name in mtpc.__all__)


def test_import_is_light() -> None:
    """What a warm start needs of this level, without compiler, sympy or transformers."""
    heavy = ("transformers", "torch._inductor", "torch._dynamo", "sympy", "networkx")
    code = (
        "import sys, mtpc; assert 'torch' not in sys.modules; mtpc.compile_host; "
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=ROOT
    )
    assert done.stdout.strip() == "[]"


def test_tensors_are_bound_with_the_strides_that_were_stated() -> None:
    """A dimension of size 1 may have any stride; a parameter is taken as the tensor it is."""
    buffer = HostBuffer("state.stop_ids", (1, 8), torch.int64, -1, True, HOST, "", False)
    row = torch.zeros(4, 16, dtype=torch.int64)[2:3, :8]
    parameter = torch.nn.Parameter(row, requires_grad=False)
    assert row.is_contiguous()
    assert row.stride() != buffer.strides
    for tensor in (row, parameter):
        bound = _as_stated({buffer.name: buffer}, {buffer.name: tensor})[buffer.name]
        assert bound.stride() == buffer.strides
        assert bound.data_ptr() == row.data_ptr()
        assert type(bound) is torch.Tensor

"""Launches that begin before the one before them has ended, as compiled for GPUs.

Needs Triton, compiling: `tests/run_triton.sh`. Nothing here runs a kernel.
"""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.triton_here import COMPILES, NO_COMPILER
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

if not COMPILES:
    pytest.skip(NO_COMPILER, allow_module_level=True)

from helpers.shipped_launches import SHIPPED

from mtpc.backends.targets import TARGETS
from mtpc.backends.triton_kernels import early_bindings
from mtpc.backends.triton_kernels.crosscompile import Specialisation, compile_for
from mtpc.backends.triton_kernels.launch import Launch
from mtpc.backends.triton_kernels.plans import early_in_few_rows, plan
from mtpc.layout import StepKey

pytestmark = pytest.mark.gpu_compile

WAIT, RELEASE = "griddepcontrol.wait", "griddepcontrol.launch_dependents"
_MEMORY = re.compile(
    r"^\s*(?:@!?%p\d+ )?(?:ld\.global|ld\.volatile|st\.|cp\.async|atom|red\.)", re.M
)
AHEAD = {"skinny_kernel"}
"""Kernels that ask for weights before they wait."""


def _early_launches() -> dict[str, Launch]:
    """One of each kernel that may begin early."""
    with FakeTensorMode():
        launches = [launch for shipped in SHIPPED.values() for launch in shipped()]
    return {x.name: replace(x, early=True) for x in launches if "EARLY" in x.kernel.arg_names}


def test_every_early_kernel_waits_before_it_reads_or_writes() -> None:
    launches = _early_launches()
    assert {"skinny_kernel", "paged_attention_kernel", "combine_kernel"} < launches.keys()
    for name, launch in launches.items():
        wanted = Specialisation.of(launch, TARGETS["cuda:90"])
        compiled = compile_for(wanted)
        text = compiled.asm["ptx"]
        assert compiled.metadata.launch_pdl, name
        assert (text.count(WAIT), text.count(RELEASE)) == (1, 1), name
        first = _MEMORY.search(text)
        assert first is not None
        assert text.index(WAIT) < first.start(), name
        assert ("prefetch.global.L2" in text) == (name in AHEAD), name


@pytest.mark.parametrize("target", ["cuda:80", "hip:gfx942"])
def test_other_devices_launch_in_turn(target: str) -> None:
    device = TARGETS[target]
    assert not device.begins_early
    compiled = compile_for(Specialisation.of(_early_launches()["skinny_kernel"], device))
    code = next(compiled.asm[kind] for kind in ("ptx", "amdgcn") if kind in compiled.asm)
    assert WAIT not in code
    assert "prefetch" not in code
    assert not getattr(compiled.metadata, "launch_pdl", False)


@pytest.mark.parametrize(
    ("requests", "drafts", "early"),
    [(1, 0, True), (2, 0, True), (1, 1, True), (1, 3, False), (4, 0, False)],
)
def test_steps_of_one_or_two_rows_begin_early(requests: int, drafts: int, early: bool) -> None:
    """Their calls say so, and their operators are those that Triton launches."""
    graph: Any = SimpleNamespace(key=StepKey.decode(requests, drafts))
    rows = torch.empty(requests * (drafts + 1), 64, dtype=torch.bfloat16, device="meta")
    calls = fx.Graph()
    gate_up = calls.placeholder("gate_up")
    gate_up.meta["val"] = rows
    node = calls.call_function(torch.ops.mtpc.silu_and_mul.default, (gate_up,))
    configure = early_in_few_rows(lambda node, graph: ("KERNEL:threads=64", ()))
    configs, _ = configure(node, graph)
    assert configs == ("KERNEL:threads=64;early" if early else "KERNEL:threads=64")
    found = [b for b in early_bindings(configure) if b.reference is node.target]
    assert [str(b.target) for b in found] == ["mtpc_loaded.silu_and_mul.default"]
    assert [b.refuses(node, graph) is None for b in found] == [early]
    (launch,), _ = plan("silu_and_mul", rows, configs="early" if early else "")
    assert launch.early == early

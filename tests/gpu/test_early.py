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
_GUARD = r"^\s*(?:@!?%p\d+ )?"
_WRITES = re.compile(_GUARD + r"(?:st\.|cp\.async|atom|red\.)", re.M)
_READS = re.compile(_GUARD + r"ld\.(?:global|volatile)[^\[]*\[\s*(%rd\d+)", re.M)
_MEMORY = re.compile(f"{_READS.pattern}|{_WRITES.pattern}", re.M)
_PARAMETER = re.compile(r"ld\.param\.b64\s+(%rd\d+), \[\w+_param_(\d+)\]")
_MADE = re.compile(r"^\s*[\w.]+\s+(%rd\d+), (.*);", re.M)
WEIGHTS_FIRST = {"skinny_kernel": "weight_ptr"}
"""Kernels that read a weight before they wait -> the parameter."""


def _early_launches() -> dict[str, Launch]:
    """One of each kernel that may begin early."""
    with FakeTensorMode():
        launches = [launch for shipped in SHIPPED.values() for launch in shipped()]
    return {x.name: replace(x, early=True) for x in launches if "EARLY" in x.kernel.arg_names}


def _parameters_read(text: str) -> set[int]:
    """The parameters, by number, from which addresses of loads are computed."""
    parameters = dict(_PARAMETER.findall(text))
    made = dict(_MADE.findall(text))

    def origins(register: str) -> set[int]:
        if register in parameters:
            return {int(parameters[register])}
        return {n for r in re.findall(r"%rd\d+", made.get(register, "")) for n in origins(r)}

    return {number for address in _READS.findall(text) for number in origins(address)}


def test_every_early_kernel_waits_before_it_reads_or_writes() -> None:
    launches = _early_launches()
    assert {"skinny_kernel", "paged_attention_kernel", "combine_kernel"} < launches.keys()
    for name, launch in launches.items():
        wanted = Specialisation.of(launch, TARGETS["cuda:90"])
        compiled = compile_for(wanted)
        text = compiled.asm["ptx"]
        assert compiled.metadata.launch_pdl, name
        assert (text.count(WAIT), text.count(RELEASE)) == (1, 1), name
        before, after = text.split(WAIT)
        assert _MEMORY.search(after), name
        read = {wanted.kernel.arg_names[number] for number in _parameters_read(before)}
        assert read == {WEIGHTS_FIRST[name]} if name in WEIGHTS_FIRST else not read, name
        assert not _WRITES.search(before), name


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

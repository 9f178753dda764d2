"""The recipe for an operator, followed (docs/extending.md, "How to add").

A copy of the package gets the operator's files, and no other file of it is touched. Of the other
C++ kernels the copy has none, so that little is compiled.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib import util
from pathlib import Path

import pytest
from helpers.places import ROOT

PACKAGE = ROOT / "mtpc"

REFERENCE = '''\
"""Halving, and counting of what is halved."""

from __future__ import annotations

from torch import Tensor

from mtpc.ops.traits import Traits, operator


@operator(
    Traits("row", "elements", rows="x counts", features=0),
    lambda x, counts: (x.new_empty(x.shape), counts.new_empty(counts.shape)),
    mutates_args=("counts",),
)
def halve(
    x: Tensor, counts: Tensor, times: int, plus_one: bool = False, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """x / 2^times + bias of float32 [T], and how often each was halved."""
    counts += times
    out = x / 2**times + (1.0 if plus_one else 0.0)
    return out if bias is None else out + bias, counts.clone()
'''

KERNEL = """\
#include <torch/csrc/stable/ops.h>

#include <cmath>

#include "operators.h"

namespace mtpc {

MTPC_OPERATOR std::tuple<Tensor, Tensor> halve(
    const Tensor& x, const Tensor& counts, int64_t times, bool plus_one,
    const std::optional<Tensor>& bias) {
  const Tensor out = torch::stable::empty_like(x);
  for (int64_t i = 0; i < x.numel(); ++i) {
    const float added = bias ? static_cast<const float*>(bias->const_data_ptr())[i] : 0.0f;
    const float value = static_cast<const float*>(x.const_data_ptr())[i];
    static_cast<float*>(out.mutable_data_ptr())[i] =
        std::ldexp(value, -static_cast<int>(times)) + (plus_one ? 1.0f : 0.0f) + added;
    static_cast<int64_t*>(counts.mutable_data_ptr())[i] += times;
  }
  return {out, torch::stable::clone(counts)};
}

}  // namespace mtpc
"""

PLAN = '''\
"""Halving: a program an element."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from mtpc.backends.triton_kernels.launch import Launch
from mtpc.backends.triton_kernels.operator import Plan, operator


@triton.jit
def halve_kernel(x_ptr, counts_ptr, out_ptr, seen_ptr, TIMES: tl.constexpr, ONE: tl.constexpr):
    at = tl.program_id(0)
    tl.store(out_ptr + at, tl.load(x_ptr + at) / (1 << TIMES) + ONE)
    count = tl.load(counts_ptr + at) + TIMES
    tl.store(counts_ptr + at, count)
    tl.store(seen_ptr + at, count)


def _limit(call):
    return "too many" if call["times"] > 30 else None


@operator(limit=_limit)
def halve(x: Tensor, counts: Tensor, times: int, plus_one: bool) -> Plan:
    """One launch; it takes no bias."""
    out = x.new_empty(x.shape), counts.new_empty(counts.shape)
    values = dict(x_ptr=x, counts_ptr=counts, out_ptr=out[0], seen_ptr=out[1])
    values |= dict(TIMES=times, ONE=int(plus_one))
    return [Launch(halve_kernel, (len(x), 1, 1), values)], out
'''

SHARED = """\
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

def run(op, *options, **named):
    x, counts = torch.arange(4.0), torch.arange(4)
    made = [option() if callable(option) else option for option in options]
    return [*op(x, counts, *made, **named), counts]

def check(op, *options, **named):
    for one, other in zip(run(op, *options, **named), run(reference, *options, **named)):
        assert torch.equal(one, other), (one, other)
    with FakeTensorMode():
        fakes = run(op, *options, **named)
    assert [(f.shape, f.dtype) for f in fakes] == [
        (t.shape, t.dtype) for t in run(reference, *options, **named)
    ]
"""

ON_CPU = """\
import ctypes, sys
from pathlib import Path
from mtpc.backends.cpu_kernels import kernel_table, load_kernels
from mtpc.backends.cpu_kernels.build import LIBRARY, build_kernels
from mtpc.store.entries import EntryStore

built = build_kernels(EntryStore(Path(sys.argv[1])))
load_kernels(EntryStore(Path(sys.argv[1])))
reference, ours = torch.ops.mtpc.halve.default, torch.ops.mtpc_cpu.halve.default
assert kernel_table() == {reference: ours}
assert str(ours._schema) == (
    "mtpc_cpu::halve(Tensor x, Tensor(a1!) counts, int times, bool plus_one=False, "
    "Tensor? bias=None) -> (Tensor, Tensor)"
)
check(ours, 3)
check(ours, 3, True, lambda: torch.ones(4))
assert hasattr(ctypes.CDLL(str(built.directory / LIBRARY)), "mtpc_bind_halve")
"""

ON_TRITON = """\
from torch import fx
from mtpc.backends.triton_kernels import kernel_table, refuses, triton_bindings

bindings = {binding.reference: binding for binding in triton_bindings()}
reference = torch.ops.mtpc.halve.default
binding = bindings[reference]
assert str(binding.target._schema) == (
    "mtpc_triton::halve(Tensor x, Tensor(a1!) counts, SymInt times, bool plus_one=False, *, "
    'str configs="") -> (Tensor, Tensor)'
)
for table in (kernel_table(), kernel_table("mtpc_loaded")):
    check(table[reference], 3)
    check(table[reference], 3, plus_one=True)
x = fx.Graph().placeholder("x")
x.meta["val"] = torch.ones(4)
for times, reason in ((30, None), (31, "too many")):
    call = x.graph.call_function(reference, (x, x, times))
    assert refuses(call, None) == reason
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """The folder of a copy of the package in which the recipe was followed."""
    copy = tmp_path / "mtpc"
    others = [path.name for path in (PACKAGE / "backends/cpu_kernels").glob("*.cpp")]
    ignored = shutil.ignore_patterns("__pycache__", "demo", *(set(others) - {"runner.cpp"}))
    shutil.copytree(PACKAGE, copy, ignore=ignored)
    (copy / "ops" / "halve.py").write_text(REFERENCE)
    (copy / "backends" / "cpu_kernels" / "halve.cpp").write_text(KERNEL)
    (copy / "backends" / "triton_kernels" / "ops" / "halve.py").write_text(PLAN)
    return tmp_path


def _run(package: Path, script: str, *args: str, **environment: str) -> str:
    path = os.pathsep.join([str(package), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", SHARED + script, *args],
        env={**os.environ, "PYTHONPATH": path, **environment},
        cwd=package, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return "" if done.returncode == 0 else done.stderr


def test_on_the_cpu(package: Path, tmp_path: Path) -> None:
    """Its schema, registration, fake and C function follow from the reference."""
    tmp_path.chmod(0o755)
    assert _run(package, ON_CPU, str(tmp_path / "cache")) == ""


@pytest.mark.slow
def test_a_kernel_that_deviates_is_not_built(package: Path, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    kernel = package / "mtpc" / "backends" / "cpu_kernels" / "halve.cpp"
    kernel.write_text(KERNEL.replace("bool plus_one", "double plus_one"))
    assert "undefined" in _run(package, ON_CPU, str(tmp_path / "cache"))
    kernel.write_text(KERNEL.replace(" halve(", " third("))
    found = _run(package, ON_CPU, str(tmp_path / "cache"))
    assert "kernels without a reference: third" in found


@pytest.mark.skipif(util.find_spec("triton") is None, reason="needs Triton: tests/run_triton.sh")
def test_in_triton(package: Path) -> None:
    """Its wrappers, fakes and limits follow from the reference and the plan."""
    assert _run(package, ON_TRITON, TRITON_INTERPRET="1") == ""

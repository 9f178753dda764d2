"""Kernels that generated code calls as C functions: they exist, and are called so."""

from __future__ import annotations

import ctypes
import zipfile
from collections.abc import Callable
from pathlib import Path

import torch
from accept_cases import make_call, make_reports
from conftest import CpuBuilt
from torch import Tensor

from mtpc.backends.cpu import compile_settings
from mtpc.backends.cpu_kernels import build_kernels, direct_calls, load_kernels
from mtpc.backends.cpu_kernels.build import LIBRARY
from mtpc.backends.cpu_kernels.direct_calls import function_of
from mtpc.backends.package import CALLS
from mtpc.layout import StepKey
from mtpc.weights.packing import pack

load_kernels()
OPS = torch.ops.mtpc_cpu


def test_the_library_has_the_functions_and_torch_has_none_of_their_names() -> None:
    """A name that torch had, too, would be called in place of ours."""
    built = build_kernels()
    library = ctypes.CDLL(
        str((built.parent if isinstance(built, Path) else built.directory) / LIBRARY)
    )
    theirs = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    names = [op.__name__.removesuffix(".default") for op in direct_calls()]
    assert len(names) > 10
    for name in map(function_of, names):
        assert hasattr(library, name)
        assert not hasattr(theirs, name)


def test_declarations_are_those_of_the_schemas() -> None:
    declared = {str(op): text for op, (text,) in direct_calls().items()}
    assert declared["mtpc_cpu.rms_norm.default"] == (
        "AOTITorchError aoti_torch_cpu_rms_norm(AtenTensorHandle x, AtenTensorHandle weight, "
        "double epsilon, int32_t plus_one, AtenTensorHandle* rows, AtenTensorHandle* result0)"
    )
    assert declared["mtpc_cpu.write_cache.default"].endswith(
        "slot_mapping, AtenTensorHandle* result0)"
    )
    assert declared["mtpc_cpu.add_rms_norm.default"].count("result") == 2
    assert declared["mtpc_cpu.accept.default"].count("result") == 3


class Layer(torch.nn.Module):
    """Ops with every kind of argument and of result."""

    def forward(
        self, x: Tensor, packed: Tensor, bias: Tensor, weight: Tensor, rows: Tensor, cache: Tensor,
        slots: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        some = OPS.packed_linear(x, packed, 48, None, rows)
        OPS.clear_idle_rows(some, rows, 1)
        biased = OPS.packed_linear(x, packed, 48, bias, None)
        active = OPS.silu_and_mul(biased, rows)
        OPS.clear_idle_rows(active, rows, 1)
        total, normed = OPS.add_rms_norm(x, x, weight, 1e-5, True, None)
        OPS.write_cache(cache, biased, slots)
        return some, active, total, normed, cache + 0


def test_arguments_and_results_are_those_of_the_dispatcher(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    inputs = (
        numbers(5, 64), pack(numbers(48, 64)), numbers(48), numbers(64), torch.tensor([3]),
        numbers(2, 4, 48), torch.tensor([7, -1, 0, 5, 2]),
    )  # fmt: skip
    program = torch.export.export(Layer(), inputs, strict=False)
    path = torch._inductor.aoti_compile_and_package(
        program, package_path=str(tmp_path / "layer.pt2"), inductor_configs=compile_settings()
    )
    found = torch._inductor.aoti_load_package(path)(*(tensor.clone() for tensor in inputs))
    for one, other in zip(found, Layer()(*inputs), strict=True):
        assert torch.equal(one, other)
    with zipfile.ZipFile(path) as archive:
        assert not [name for name in archive.namelist() if name.endswith(".wrapper.json")]


class Acceptance(torch.nn.Module):
    """An op that writes several arguments and has several results, with and without options."""

    def forward(self, reports: list[Tensor], call: list[Tensor]) -> tuple[Tensor, ...]:
        alone = OPS.accept(*reports, *call[:-2])
        first = [report + 0 for report in reports]
        beside = OPS.accept(*reports, *call)
        return (*alone, *first, *beside, *(report + 0 for report in reports))


def test_an_op_writes_arguments_and_has_results(tmp_path: Path) -> None:
    reports, call = make_reports(6, 4), make_call(5, 6, 3, 2, True)
    program = torch.export.export(Acceptance(), (reports, call), strict=False)
    path = torch._inductor.aoti_compile_and_package(
        program, package_path=str(tmp_path / "accept.pt2"), inductor_configs=compile_settings()
    )
    found = torch._inductor.aoti_load_package(path)(make_reports(6, 4), call)
    wanted = Acceptance()(make_reports(6, 4), call)
    assert [one.tolist() for one in found] == [other.tolist() for other in wanted]


def test_a_step_calls_no_layers_kernel_through_the_dispatcher(
    cpu_built: Callable[..., CpuBuilt],
) -> None:
    step = cpu_built("mimo").compiler.obtain(StepKey.decode(2, 3))
    listed = step.directory / CALLS
    text = listed.read_text() if listed.exists() else ""
    assert not [op for op in direct_calls() if op.__name__.split(".")[0] in text]

"""Linear layers on packed codes, by rows, beside what the processor's instruction for them can do.

    python -m benchmarks.products
    python -m benchmarks.products --kinds iq4 --rows 16 32 --repeats 20

The rate of the instruction is measured here, by a loop of nothing else on as many threads. Codes
are random, and there are more of them than the second-level cache holds.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.harness.bench import Benchmark, Run
from benchmarks.harness.command import FILES, NUMBERS
from benchmarks.harness.tables import Column, Row, TableForm
from mtpc.backends.cpu_kernels import load_kernels
from mtpc.environment import cxx_compiler
from mtpc.store.machine import cpu_flags
from mtpc.weights.grouped import BITS, Kind
from mtpc.weights.packing import TILE

SHAPES = ((9728, 896), (896, 4864))
"""Outputs and inputs: gate and up, and down, of Qwen2.5-0.5B."""
GROUP, COPIES, DECIMALS = 32, 4, 1e9
KINDS: dict[Kind, torch.dtype] = {
    "int4": torch.uint8, "int8": torch.uint8, "iq4": torch.int8,
}  # fmt: skip
"""Kinds of codes -> the dtype that says so to the kernels."""
_LOOP = r"""
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>
#define ADD(N) "vpdpbusd %%zmm30, %%zmm31, %%zmm" #N "\n"
static void run(long count) {
  for (long i = 0; i < count; ++i)
    asm volatile(ADD(0) ADD(1) ADD(2) ADD(3) ADD(4) ADD(5) ADD(6) ADD(7) ADD(8) ADD(9) ADD(10)
                 ADD(11)
                 :::"zmm0", "zmm1", "zmm2", "zmm3", "zmm4", "zmm5", "zmm6", "zmm7", "zmm8", "zmm9",
                 "zmm10", "zmm11");
}
int main(int, char** given) {
  const long count = 20'000'000;
  std::vector<std::thread> threads;
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < std::atoi(given[1]); ++i) threads.emplace_back(run, count);
  for (auto& each : threads) each.join();
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  std::printf("%g\n", 12.0 * 64 * count * threads.size() / seconds.count());
}
"""


def measure(run: Run) -> Iterator[list[Row]]:
    """Each kind and number of rows, a pass over the layers' weights a sample."""
    load_kernels()
    program = _build_loop(run.workdir)
    for kind in run.args.kinds:
        weights = [(n, *_codes(kind, n, k)) for n, k in SHAPES for _ in range(COPIES)]
        for rows in run.args.rows:
            x = {k: torch.randn(rows, k, dtype=torch.bfloat16) for _, k in SHAPES}
            seconds = min(_pass(x, weights) for _ in range(run.args.repeats))
            products = COPIES * rows * sum(n * k for n, k in SHAPES) / seconds
            peak = _peak(program, run.args.repeats)
            run.tell(f"{kind}, {rows} rows: {products / DECIMALS:.0f} G products a second")
            yield [dict(kind=kind, rows=rows, seconds=seconds, products=products, peak=peak)]


def _codes(kind: Kind, outputs: int, inputs: int) -> tuple[Tensor, Tensor, int]:
    """Packed random codes, their scales, and the inputs."""
    words = inputs * BITS[kind] // 32
    codes = torch.randint(-128, 128, (outputs // TILE, words, TILE, 4), dtype=torch.int8)
    scales = torch.rand(outputs // TILE, inputs // GROUP, TILE).half()
    return codes.view(KINDS[kind]), scales, inputs


def _pass(x: dict[int, Tensor], weights: list[tuple[int, Tensor, Tensor, int]]) -> float:
    start = time.perf_counter()
    for outputs, codes, scales, inputs in weights:
        torch.ops.mtpc_cpu.grouped_linear(x[inputs], codes, scales, None, outputs, None)
    return time.perf_counter() - start


def _build_loop(workdir: Path) -> Path | None:
    """The program that measures the instruction; None where the processor has none."""
    if "avx512_vnni" not in cpu_flags():
        return None
    source, program = workdir / "loop.cpp", workdir / "loop"
    source.write_text(_LOOP)
    subprocess.run(
        [cxx_compiler(), "-O2", "-mavx512f", "-pthread", source, "-o", program], check=True
    )
    return program


def _peak(program: Path | None, repeats: int) -> float | None:
    """Products a second, on torch's number of threads."""
    if program is None:
        return None
    line = [str(program), str(torch.get_num_threads())]
    said = [subprocess.check_output(line, text=True) for _ in range(min(repeats, 3))]
    return max(map(float, said))


def _share(row: Row, _: object) -> float | None:
    return row["products"] / row["peak"] if row["peak"] else None


FORM = TableForm(
    "Products with codes",
    (
        Column("codes", "kind"),
        Column("rows"),
        Column("ms", "seconds", ".2f", f"{COPIES} times both layers, {SHAPES}.", 1e3),
        Column("G products/s", "products", ".0f", "of the fastest pass.", 1 / DECIMALS),
        Column("of the instruction's", _share, ".0%", "vpdpbusd in a loop, on as many threads."),
    ),
)
BENCHMARK = Benchmark(
    "products",
    __doc__,
    measure,
    FORM.of,
    ("--threads", *FILES),
    dict(repeats=20),
    {
        "--kinds": dict(nargs="+", choices=KINDS, default=list(KINDS), help="of codes"),
        "--rows": NUMBERS | dict(default=[1, 2, 4, 8, 16, 32, 128]),
    },
)
main, table = BENCHMARK.commands(__name__)

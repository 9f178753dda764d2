"""What one package for all batches would cost at run time against one package per bucket.

    python -m benchmarks.dynamic_batch                       # the 0.5B shape, R = 1 2 4 8, Q = 4
    python -m benchmarks.dynamic_batch --shape tiny --buckets 1 2 --repeats 2

What is compared is the target with its head, as `mtpc.capture.trace` traces it and on the cpu
backend's kernels: exported once with dynamic numbers of tokens and requests, and once per bucket
with fixed ones. Both are compiled with the backend's settings, without the rewrites that mtpc's
passes do at a bucket's exact sizes, and run on the same weights, caches and inputs, in turns.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import warnings
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache
from torch.export import Dim

from benchmarks.harness import command
from benchmarks.harness.command import positive
from benchmarks.harness.machine import CpuWatch
from benchmarks.harness.models import SHAPES, write_checkpoint
from benchmarks.harness.results import SAMPLES_NOTE, Record, Table, publish, sample_counts
from benchmarks.harness.sampling import ATTEMPTS, Tell
from mtpc.backends.cpu import compile_settings
from mtpc.backends.cpu_kernels import kernel_table, load_kernels
from mtpc.backends.eager import EagerBackend
from mtpc.backends.package import CALLS, LIBRARY
from mtpc.capture.trace import ModelTraces
from mtpc.config import CompileOptions
from mtpc.models.load import SteppedModel, load
from mtpc.program.compiler import StepCompiler
from mtpc.step.records import Metadata

MEMBERS = {LIBRARY: ".wrapper.so", CALLS: ".wrapper.json"}
"""What a running package needs, and how its name ends in AOTInductor's archive."""
CACHE_SCALE = 0.5
"""Standard deviation of what the caches hold before the first call."""
MOST_ROUNDING = 0.05
"""By which compiled bfloat16 may be off node-by-node bfloat16, which rounds more often."""
NOTES = (
    "ms: one call of target and head for R requests of Q rows; medians of samples in turns.",
    "dynamic/static: above 1, the package with dynamic sizes is the slower one; per pair of turns.",
    "difference: of the two packages' logits, its length over theirs.",
    SAMPLES_NOTE,
)


class Verify(nn.Module):
    """The target and its head over flat tokens, with the cpu backend's kernels in it."""

    def __init__(self, traces: ModelTraces):
        super().__init__()
        self.target, self.head = traces.target, traces.target_head
        table = kernel_table()
        for piece in (self.target, self.head):
            for node in piece.graph.nodes:
                if node.op == "call_function":
                    node.target = table.get(node.target, node.target)
            piece.recompile()

    def forward(self, ids: Tensor, *metadata: Tensor) -> Tensor:
        return self.head(self.target(ids, *metadata))


@dataclass(frozen=True)
class Model:
    """What is compiled, and the sizes its inputs are made by."""

    module: Verify
    vocab_size: int
    page_size: int
    blocks: int

    def inputs(self, reqs: int, rows: int, context: int) -> tuple[Tensor, ...]:
        """A decode step's: `rows` tokens for each request, after `context` tokens in its cache."""
        generator = torch.Generator().manual_seed(reqs)
        ids = torch.randint(self.vocab_size, (reqs * rows,), generator=generator)
        positions = torch.arange(context, context + rows).repeat(reqs)
        table = 1 + torch.arange(reqs * self.blocks).view(reqs, self.blocks)  # Page 0 is nobody's.
        owner = torch.arange(reqs).repeat_interleave(rows)
        slots = table[owner, positions // self.page_size] * self.page_size
        metadata = Metadata(
            positions=positions,
            slot_mapping=slots + positions % self.page_size,
            seq_lens=torch.full((reqs,), context + rows, dtype=torch.int32),
            query_start_loc=torch.arange(0, reqs * rows + 1, rows, dtype=torch.int32),
            block_table=table.int(),
            state_slots=torch.arange(reqs),
            certain_lens=torch.ones(reqs, dtype=torch.int32),  # All but the drafts is certain.
        )
        return (ids, *metadata)


def load_model(directory: Path, args: argparse.Namespace) -> Model:
    """Trace the checkpoint's target once, over caches that hold random numbers."""
    loaded = load(directory, None, needs_mtp=False)
    options = CompileOptions(spec_tokens=0, batch_buckets=args.buckets, max_len=args.max_len)
    compiler = StepCompiler(loaded, options, EagerBackend())
    layout = compiler.layout(compiler.keys[0])
    pools = {name: t for name, t in compiler.shared.items() if name.startswith("kv.")}
    torch.manual_seed(args.seed)
    for pool in pools.values():
        pool.normal_(std=CACHE_SCALE)
    num_slots, blocks = layout.shape("state.block_table")
    traces = ModelTraces(SteppedModel(loaded, pools, num_slots), layout)
    return Model(Verify(traces), traces.vocab_size, options.page_size, blocks)


@dataclass(frozen=True)
class Package:
    """A compiled package: how to call it, what it took to build, what it weighs."""

    run: Callable[[Sequence[Tensor]], Tensor]
    build_s: float
    nbytes: int


def build(model: Model, inputs: tuple[Tensor, ...], is_dynamic: bool, directory: Path) -> Package:
    """Export and compile for these inputs' sizes, or for any; then bind the model's tensors."""
    start = time.perf_counter()
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*treespec.*")  # torch's own code.
        program = torch.export.export(
            model.module, inputs, dynamic_shapes=_dims() if is_dynamic else None, strict=False
        )
        archive = torch._inductor.aoti_compile_and_package(
            program,
            package_path=str(directory / "package.pt2"),
            inductor_configs=compile_settings(),
        )
    seconds = time.perf_counter() - start
    with zipfile.ZipFile(archive) as files:
        for member in files.namelist():
            for name, ending in MEMBERS.items():
                if member.endswith(ending):
                    (directory / name).write_bytes(files.read(member))
    runner = torch._C._aoti.AOTIModelContainerRunnerCpu(str(directory / LIBRARY), 1)
    tensors = {**program.state_dict, **program.constants}
    names = runner.get_constant_names_to_original_fqns()
    constants = {name: tensors[full].detach() for name, full in names.items()}
    runner.update_constant_buffer(constants, False, True, True)
    files = [directory / name for name in MEMBERS]
    nbytes = sum(file.stat().st_size for file in files if file.is_file())
    return Package(lambda values: runner.run(list(values))[0], seconds, nbytes)


def _dims() -> tuple[Any, ...]:
    """Dynamic sizes of `Verify`'s arguments: T flat tokens, R requests."""
    tokens, requests = Dim("tokens"), Dim("requests")
    per_request = ({0: requests}, {0: requests + 1}, *([{0: requests}] * 3))
    return ({0: tokens}, ({0: tokens}, {0: tokens}, *per_request))


@dataclass
class Case:
    """A bucket: its inputs, both packages for it, and milliseconds per call by turn."""

    reqs: int
    rows: int
    inputs: tuple[Tensor, ...]
    packages: dict[str, Package]
    difference: float = 0.0
    taken: list[dict[str, float]] = field(default_factory=list)

    def compare(self, module: nn.Module) -> None:
        """Both packages must say the same, and what the graph says, before they are timed.

        Raises:
            AssertionError: they do not.
        """
        dynamic, static = (self.packages[kind].run(self.inputs) for kind in ("dynamic", "static"))
        # Rounding may differ: where loops are cut depends on what is known of their lengths.
        torch.testing.assert_close(dynamic, static, atol=2e-2, rtol=2e-2)
        self.difference = _distance(dynamic, static)
        with torch.no_grad():
            distance = _distance(dynamic, module(*self.inputs))
        assert distance < MOST_ROUNDING, f"{distance:.1e} from what the graph says"

    def sample(self, calls: int, swap: bool) -> None:
        """One turn: both packages after one another, in one order or the other."""
        watch, turn = CpuWatch(), {}
        for kind in sorted(self.packages, reverse=swap):
            run = self.packages[kind].run
            run(self.inputs)  # The other package's code and scratch memory were in the caches.
            start = time.perf_counter()
            for _ in range(calls):
                run(self.inputs)
            turn[kind] = 1e3 * (time.perf_counter() - start) / calls
        self.taken.append({**turn, "foreign_share": watch.foreign_share()})

    def undisturbed(self, max_foreign: float) -> list[dict[str, float]]:
        """Turns during which others used at most `max_foreign` of the CPU time."""
        return [turn for turn in self.taken if turn["foreign_share"] <= max_foreign]


def _distance(x: Tensor, y: Tensor) -> float:
    """Length of the difference over the length of y."""
    return float((x.float() - y.float()).norm() / y.float().norm())


@dataclass(frozen=True)
class Row:
    """What a bucket's turns say: medians, of undisturbed ones where there are any."""

    reqs: int
    rows: int
    dynamic_ms: float
    static_ms: float
    ratio: float
    difference: float
    static_build_s: float
    static_bytes: int
    samples: int
    discarded: int
    disturbed: bool
    taken: tuple[dict[str, float], ...]


def summarise(case: Case, max_foreign: float) -> Row:
    """The row of a bucket that has been sampled."""
    clean = case.undisturbed(max_foreign)
    kept = clean or case.taken
    return Row(
        reqs=case.reqs,
        rows=case.rows,
        dynamic_ms=median(turn["dynamic"] for turn in kept),
        static_ms=median(turn["static"] for turn in kept),
        ratio=median(turn["dynamic"] / turn["static"] for turn in kept),
        difference=case.difference,
        static_build_s=case.packages["static"].build_s,
        static_bytes=case.packages["static"].nbytes,
        samples=len(kept),
        discarded=len(case.taken) - len(kept),
        disturbed=not clean,
        taken=tuple(case.taken),
    )


def prepare(model: Model, args: argparse.Namespace, scratch: Path, tell: Tell) -> list[Case]:
    """Build everything; one dynamic package, and a static one for each bucket."""

    def make(inputs: tuple[Tensor, ...], is_dynamic: bool, name: str) -> Package:
        (scratch / name).mkdir()
        package = build(model, inputs, is_dynamic, scratch / name)
        tell(f"{name}: {package.build_s:.1f} s, {package.nbytes} bytes")
        return package

    inputs = {reqs: model.inputs(reqs, args.rows, args.context) for reqs in args.buckets}
    with fresh_cache():
        make(inputs[min(inputs)], False, "warm-up")  # Whoever is first pays for Inductor's imports.
    with fresh_cache():
        dynamic = make(inputs[max(inputs)], True, "dynamic")
    with fresh_cache():  # One for all, as in a build of all buckets by one process.
        static = {reqs: make(inputs[reqs], False, f"static, R={reqs}") for reqs in args.buckets}
    return [
        Case(reqs, args.rows, inputs[reqs], {"dynamic": dynamic, "static": static[reqs]})
        for reqs in args.buckets
    ]


def sample_in_turns(cases: Sequence[Case], args: argparse.Namespace, tell: Tell) -> None:
    """Every bucket once a round, until each has enough undisturbed turns."""
    for turn in range(args.repeats * ATTEMPTS):
        for case in cases:
            if len(case.undisturbed(args.max_foreign)) < args.repeats:
                case.sample(args.calls, swap=turn % 2 == 1)
        tell(f"round {turn + 1}")
        if all(len(case.undisturbed(args.max_foreign)) >= args.repeats for case in cases):
            return


COLUMNS = ("R", "Q", "dynamic ms", "static ms", "dynamic/static", "difference", "samples")


def cells(rows: Sequence[Row]) -> list[list[str]]:
    """The table's body."""
    return [
        [
            *(str(row.reqs), str(row.rows), f"{row.dynamic_ms:.3f}", f"{row.static_ms:.3f}"),
            *(f"{row.ratio:.3f}", f"{row.difference:.1e}"),
            sample_counts(row),
        ]
        for row in rows
    ]


def table(record: Record) -> Table:
    """A record's table."""
    rows = [Row(**row) for row in record["rows"]]
    notes = [*totals(rows, record["dynamic"]), *NOTES]
    return Table("One dynamic package, or one per bucket", COLUMNS, cells(rows), notes)


def totals(rows: Sequence[Row], dynamic: dict[str, float]) -> list[str]:
    """What building takes, and what the packages weigh, in lines.

    Args:
        rows: of the static packages.
        dynamic: `build_s` and `bytes` of the dynamic one.
    """
    seconds, nbytes = sum(r.static_build_s for r in rows), sum(r.static_bytes for r in rows)
    build_s, size = dynamic["build_s"], dynamic["bytes"]
    return [
        f"dynamic: 1 package, built in {build_s:.1f} s, {size / 1e6:.2f} MB",
        f"static: {len(rows)} packages, built in {seconds:.1f} s, {nbytes / 1e6:.2f} MB",
        f"static over dynamic: {seconds / build_s:.2f} times the build, "
        f"{nbytes / size:.2f} times the bytes",
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    args = _parse(argv)
    tell = command.begin(args)
    load_kernels(report=tell)
    with (
        command.working_directory(args.workdir) as directory,
        tempfile.TemporaryDirectory() as scratch,
    ):
        write_checkpoint(directory, "mimo", SHAPES[args.shape], accepting=False, seed=args.seed)
        model = load_model(directory, args)
        cases = prepare(model, args, Path(scratch), tell)
        for case in cases:
            case.compare(model.module)
        sample_in_turns(cases, args, tell)
    rows, dynamic = [summarise(c, args.max_foreign) for c in cases], cases[0].packages["dynamic"]
    built = {"build_s": dynamic.build_s, "bytes": dynamic.nbytes}
    measured = {"dynamic": built, "rows": [asdict(row) for row in rows]}
    publish("dynamic_batch", args, measured, table)
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command.new_parser("dynamic_batch", __doc__)
    add = parser.add_argument
    command.add_model(parser)
    add("--buckets", nargs="+", type=positive, default=[1, 2, 4, 8], metavar="R")
    add("--rows", type=positive, default=4, metavar="Q", help="tokens per request, K + 1")
    add("--context", type=positive, default=64, metavar="N", help="tokens in each cache")
    add("--max-len", type=positive, default=1024, metavar="N")
    add("--calls", type=positive, default=20, metavar="N", help="per sample")
    command.add_sampling(parser, 10, "undisturbed samples a bucket")
    command.add_files(parser)
    args = parser.parse_args(argv)
    if args.context + args.rows > args.max_len:
        parser.error("--context and --rows exceed --max-len")
    return args


if __name__ == "__main__":
    sys.exit(main())

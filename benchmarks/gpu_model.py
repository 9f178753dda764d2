"""A roofline model of GPU steps, without a GPU: kernels, and the bytes that each moves.

    python -m benchmarks.gpu_model                            # needs Triton; nothing is run
    python -m benchmarks.gpu_model --cases glm4-8b:64:3
    python -m benchmarks.gpu_model --out benchmarks/results/paper/gpu_model.json

A case is SHAPE:BATCH:K, or SHAPE:BATCH:K:sampled. Steps are traced, rewritten for the cuda backend
and scheduled by Inductor, with uninitialised weights. Times are computed.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.count import Lowered, lowered
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.models import SHAPES, build
from benchmarks.harness import command
from benchmarks.harness.bench import ON_PAPER, Benchmark, Run
from benchmarks.harness.tables import Column, Row, TableForm, fields
from mtpc import CompileOptions
from mtpc.capture.graph import StepGraph
from mtpc.errors import BackendError
from mtpc.layout import Layout, StepKey
from mtpc.models.load import LoadedModel
from mtpc.plan import make_plan
from mtpc.program.compiler import StepCompiler

if TYPE_CHECKING:
    from benchmarks.gpu.traffic import Cost, Device

CASES = ("glm4-0.5b:1:3", "glm4-8b:1:3", "glm4-8b:64:3:sampled", "mla-moe-16b:1:3",
         "glm4.5-air:1:3", "deepseek-v3:64:3")  # fmt: skip
BEFORE = ("merge-projections", "fuse-elementwise", "fuse-draft-entry")
"""Passes that are disabled for the first count."""
SLOWEST, WHOLE = 5, "whole step"


@dataclass(frozen=True)
class Case:
    """A step of a shape.

    Attributes:
        shape: a name in benchmarks.gpu.models.SHAPES.
        batch: number of requests.
        spec_tokens: K.
        sampled: whether tokens are sampled, with top-k and top-p.
    """

    shape: str
    batch: int
    spec_tokens: int
    sampled: bool

    @classmethod
    def of(cls, text: str) -> Case:
        """Parse SHAPE:BATCH:K[:sampled]."""
        shape, batch, spec_tokens, *rest = text.split(":")
        if shape not in SHAPES or rest not in ([], ["sampled"]):
            raise argparse.ArgumentTypeError(
                f"{text!r}; expected SHAPE:BATCH:K or SHAPE:BATCH:K:sampled, shapes are "
                + ", ".join(SHAPES)
            )
        return cls(shape, command.positive(batch), int(spec_tokens), bool(rest))

    def __str__(self) -> str:
        chosen = ":sampled" if self.sampled else ""
        return f"{self.shape}:{self.batch}:{self.spec_tokens}{chosen}"


def measure(run: Run) -> Iterator[list[Row]]:
    """The rows of each case."""
    run.facts["machine"] = ON_PAPER
    cases, run.args.cases = run.args.cases, " ".join(map(str, run.args.cases))
    for case in cases:
        run.tell(f"{case.shape}, batch {case.batch}, K={case.spec_tokens}")
        yield case_rows(case, run.args.context, run.args.device)


def unfilled(shape: str, layers: int) -> LoadedModel:
    """A model of a shape with uninitialised weights, which take no memory."""
    loaded = build(shape, "meta", layers, accepting=False)
    for module in (loaded.target, *loaded.mtp_layers):
        module.to_empty(device="cpu")
    return loaded


def case_rows(case: Case, context: int, device: str) -> list[dict[str, Any]]:
    """The slowest operators of a case, and its whole step.

    Raises:
        BackendError: there is no Triton.
    """
    try:
        from benchmarks.gpu.traffic import DEVICES, launches_of
    except ModuleNotFoundError as error:
        raise BackendError(
            "benchmarks.gpu_model needs Triton, whose kernels it counts: pip install triton"
        ) from error
    before = launches_of(all_layers(case, context, DEVICES[device], BEFORE))
    costs = all_layers(case, context, DEVICES[device])
    total = replace(costs[0], operator=WHOLE)
    for cost in costs[1:]:
        total = total + cost
    kernels = dict(kernels_before=before, kernels=launches_of(costs))
    whole = [total, *costs[:SLOWEST]]
    return [{**asdict(case), **kernels, **asdict(cost)} for cost in whole]


def all_layers(
    case: Case, context: int, device: Device, disabled: tuple[str, ...] = ()
) -> list[Cost]:
    """The operators of a step, ordered by distance from their floor."""
    from benchmarks.gpu.traffic import Cost

    few, more, copies = _two_depths(case, context, device, disabled)
    none = Cost("", 0, 0, 0, 0, 0, 0)
    found = [cost.extended(few.get(cost.operator, none), copies) for cost in more.values()]
    return sorted(found, key=lambda cost: cost.floor - cost.seconds)


def one_layer(case: Case, context: int, disabled: tuple[str, ...] = ()) -> tuple[int, float]:
    """The launches of a decoder layer of the last kind, and the bytes that they move."""
    from benchmarks.gpu.traffic import DEVICES, launches_of

    few, more, _ = _two_depths(case, context, DEVICES["h200"], disabled)
    launches = launches_of(more.values()) - launches_of(few.values())
    return launches, sum(c.moved for c in more.values()) - sum(c.moved for c in few.values())


def _two_depths(
    case: Case, context: int, device: Device, disabled: tuple[str, ...]
) -> tuple[dict[str, Cost], dict[str, Cost], int]:
    """Operators of a step of few layers, those of one more, and how many more there are in all.

    Layers of one kind cost the same. So two models that differ by one layer of the last kind give
    the cost of all layers; Inductor would take minutes for all of them. It schedules the ends of a
    model of two layers in another way, so the smaller one has three.
    """
    from benchmarks.gpu.traffic import Work, step_costs

    (_, shape), work = SHAPES[case.shape], Work(case.batch, context)
    depth = shape.num_hidden_layers
    least = min(depth - 1, 3 + shape.more.get("first_k_dense_replace", int(bool(shape.experts))))
    few, more = (
        step_costs(*step(unfilled(case.shape, layers), case, context, disabled), work, device)
        for layers in (least, least + 1)
    )
    return {c.operator: c for c in few}, {c.operator: c for c in more}, depth - least


def step(
    loaded: LoadedModel, case: Case, context: int, disabled: tuple[str, ...] = ()
) -> tuple[StepGraph, Lowered]:
    """A decode step with mtpc's operators, and its schedule by Inductor."""
    options = CompileOptions(
        spec_tokens=case.spec_tokens, batch_buckets=(case.batch,), max_len=context, page_size=16,
        prefill_chunk=64, sampling=case.sampled, token_mask=False,
        disabled_passes=disabled,
    )  # fmt: skip
    backend = Machine().backend()
    compiler = StepCompiler(loaded, make_plan(options), backend, new_buffer=Layout.reserve)
    compiler.weights.defers = True
    graph = compiler.rewritten(StepKey.decode(case.batch, case.spec_tokens))
    return graph, lowered(graph)


FORM = TableForm(
    "Decode steps of an {device} by the model, {context} tokens of context",
    (
        *fields("shape, batch, K=spec_tokens"),
        Column("choice", lambda row, _: "sampled" if row["sampled"] else "greedy"),
        Column("kernels before", "kernels_before", "", "without " + ", ".join(BEFORE) + "."),
        *fields("kernels, operator, calls, launches"),
        Column("MB moved", "moved", ".1f", "what programs load and store.", 1e-6),
        Column("MB least", "least", ".1f", "what an operator is given and gives.", 1e-6),
        Column("us least", "floor", ".0f", factor=1e6),
        Column(
            "us", "seconds", ".0f",
            "by the model: 2 for each launch, and the longer of the times of memory and cache "
            "(assumed: 5.5 TB/s of an H100, 7 of an H200), by the share of 132 processors that "
            "have a program; products of libraries at their floor.", 1e6,
        ),
        Column(
            "us measured", "measured", ".0f",
            "in older records: of the operator's kernels in a profile.", 1e6,
        ),
    ),
    (
        "the five operators of each case that are farthest from their floor, and the whole step.",
        "generated: what Inductor writes.",
    ),
)  # fmt: skip
BENCHMARK = Benchmark(
    "gpu_model",
    __doc__,
    measure,
    FORM.of,
    command.RESULTS,
    options={
        "--cases": dict(
            type=Case.of,
            nargs="+",
            default=[Case.of(text) for text in CASES],
            metavar="SHAPE:BATCH:K[:sampled]",
        ),
        "--context": command.NUMBER | dict(default=4096, help="tokens of a request"),
        "--device": dict(choices=("h100", "h200"), default="h200"),
    },
)
main, table = BENCHMARK.commands(__name__)

"""A model's forward with torch.compile: eager, Inductor, and the backend mtpc, sampled in rounds.

    python -m benchmarks.dynamo              # the 0.5B shape: a prompt of 512, and decode rows
    python -m benchmarks.dynamo --shape tiny --repeats 1

transformers' Qwen2 in bfloat16, random weights. "prefill" is one forward of a prompt without a
cache, with logits of the last row only. "decode" is a forward of one token of each request, with
the prompts in transformers' StaticCache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from transformers import StaticCache

from benchmarks.harness import command
from benchmarks.harness.bench import Benchmark, Run
from benchmarks.harness.models import SHAPES, make_config
from benchmarks.harness.rounds import ATTEMPTS, Case
from benchmarks.harness.tables import SAMPLES, Column, Row, TableForm, fields, over
from mtpc.integrations.dynamo import backend
from mtpc.models.families.mimo import MIMO
from mtpc.models.seams import CACHE

ENGINES: dict[str, dict[str, Any] | None] = {
    "eager": None,
    "Inductor": {"backend": "inductor"},
    "mtpc": {"backend": "mtpc", "options": {"fallback": "error"}},
}
"""Name in the table -> torch.compile's backend; None does not compile."""


def measure(run: Run) -> Iterator[list[Row]]:
    """Each forward with each engine."""
    torch.manual_seed(run.args.seed)
    config = make_config(MIMO, SHAPES[run.args.shape])
    config.num_hidden_layers -= 1  # Of an MTP layer this benchmark has no use.
    model: Any = transformers.Qwen2ForCausalLM(config)
    model = model.to(torch.bfloat16).eval()
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=64):
        rows = run.sample([_started(*place, run) for place in _forwards(model, run)])
    run.facts["reports"] = [*map(str, backend.reports)]
    for report in run.facts["reports"]:
        run.tell(report)
    yield rows


Forward = tuple[str, int, str, Callable[[], Any], int]
"""Its kind, requests, engine, what runs it, and how often a sample does."""


def _forwards(model: Any, run: Run) -> Iterator[Forward]:
    vocab, args = model.config.vocab_size, run.args
    for engine, options in ENGINES.items():
        called = model if options is None else torch.compile(model, dynamic=False, **options)
        prompt = torch.randint(0, vocab, (1, args.prompt_tokens))
        yield "prefill", 1, engine, _prefill(called, prompt), 1
        for batch in args.batches:
            prompts = torch.randint(0, vocab, (batch, args.prompt_tokens))
            decode = _decode(model, called, prompts, args.calls * (2 + args.repeats * ATTEMPTS))
            yield "decode", batch, engine, decode, args.calls


def _prefill(called: Any, prompt: torch.Tensor) -> Callable[[], Any]:
    return lambda: called(prompt, use_cache=False, logits_to_keep=1).logits


def _decode(model: Any, called: Any, prompts: torch.Tensor, room: int) -> Callable[[], Any]:
    """A forward of one token after each prompt, with a static cache."""
    cache = StaticCache(config=model.config, max_cache_len=prompts.shape[1] + room)
    model(prompts, logits_to_keep=1, **{CACHE: cache})
    return lambda: called(prompts[:, -1:], **{CACHE: cache}).logits


def _started(
    kind: str, batch: int, engine: str, forward: Callable[[], Any], calls: int, run: Run
) -> Case:
    """The case of a forward, after its first call, which compiles."""

    def seconds(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            forward()
        return time.perf_counter() - start

    first_s = seconds(1)
    run.tell(f"first call: {kind}, batch {batch}, {engine}: {first_s:.1f} s")

    def take() -> Row:
        return dict(ms=1e3 * seconds(calls) / calls, first_s=first_s)

    return Case(dict(forward=kind, batch=batch, engine=engine), take)


FORM = TableForm(
    "torch.compile: prompts of {prompt_tokens} tokens, {shape}",
    (
        *fields("forward, batch, engine"),
        Column("ms", "ms", ".2f", "of one forward; medians."),
        Column(
            "over Inductor",
            over("ms", ("forward", "batch"), inverse=True, engine="Inductor"),
            ".2fx",
            "its time over the engine's; above 1 is faster.",
        ),
        Column("first call, s", "first_s", ".1f", "with compilation."),
        SAMPLES,
    ),
)
BENCHMARK = Benchmark(
    "dynamo",
    __doc__,
    measure,
    FORM.of,
    (*command.FILES, "--shape", *command.SAMPLING),
    dict(prompt_tokens=512, batches=[1, 4], repeats=7),
    {"--calls": command.NUMBER | dict(default=16, help="decode rows of a sample")},
)
main, table = BENCHMARK.commands(__name__)

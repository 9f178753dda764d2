"""Drafts of a real model, copies or a drafter's: tokens a step and tokens/s on edits and on prose.

    python -m benchmarks.copies CHECKPOINT --out RESULTS.json
    python -m benchmarks.copies CHECKPOINT --prompts 8 --settings 0 3 auto --minutes 12
    python -m benchmarks.copies FILE.gguf --drafts DRAFTER copy+DRAFTER --llama PROGRAMS
    python -m benchmarks.copies DIRECTORY --llama PROGRAMS --llama-file FILE.gguf
    python -m benchmarks.copies CHECKPOINT --batch 4 --drafts DRAFTER copy+DRAFTER
    python -m benchmarks.copies CHECKPOINT --batch 4 --drafts DRAFTER --settings 0 1 2 3 budget

An edit is a function of Python's standard library that the model is to rewrite with type hints. The
settings take turns at every prompt, each in another order, one request at a time, or with `--batch`
as many at once, half of them edits. With `--repeats` each answers as often, in turns; tokens/s are
of the median, and a gain is the median of the turns' gains. All must give the text of K = 0. Edits
and prose alternate, and each prompt is written to the results when it is done. A run whose results
exist goes on behind them, if its arguments are the same.

llama.cpp runs as a process for each prompt and type of `--spec-type`, on a GGUF file: its
llama-speculative-simple, whose times leave out the loading.
"""

from __future__ import annotations

import argparse
import inspect
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice, product
from operator import itemgetter
from pathlib import Path
from pkgutil import resolve_name
from statistics import geometric_mean, median_low
from typing import Any

import torch

import mtpc
from benchmarks.harness import command
from benchmarks.harness.bench import Benchmark, Run
from benchmarks.harness.tables import Record, Row, TableForm, fields
from benchmarks.peers.llama_decoder import SPECULATIVE, Counts, look_up
from mtpc.option_checks import drafters_of
from mtpc.server.chat import load_chat_template
from mtpc.weights.checkpoint import Checkpoint
from mtpc.weights.gguf.file import GgufTensor

EDITED = """
ast:get_docstring base64:b64encode base64:decodebytes calendar:isleap calendar:leapdays
calendar:monthrange calendar:timegm colorsys:hls_to_rgb colorsys:hsv_to_rgb colorsys:rgb_to_hls
colorsys:rgb_to_hsv copy:copy difflib:get_close_matches fnmatch:filter fnmatch:fnmatch
fnmatch:fnmatchcase functools:total_ordering glob:escape heapq:nlargest heapq:nsmallest
html:escape html:unescape inspect:cleandoc inspect:indentsize linecache:getlines
email.utils:formataddr textwrap:fill textwrap:wrap urllib.parse:quote_plus urllib.parse:urldefrag
random:Random.choices random:Random.shuffle shlex:join shutil:copy shutil:copyfileobj
statistics:median statistics:mode string:capwords textwrap:dedent textwrap:indent
"""
TOPICS = """
autumn bees bread bridges bronze candles caves chess clouds comets copper coral deserts dreams fog
forests glaciers harbours honey islands kites lighthouses maps markets meadows mirrors moss
mountains music owls paper rivers salt shadows silk snow stone tea trains winter
"""
NOTES = (
    "edits: rewrite a function of the standard library with type hints; prose: a short story; "
    "mixed: as many of each at once.",
    "tokens/step and tokens/s: all tokens of decode steps over all their steps and seconds.",
    "over K=0: geometric mean over the prompts of each one's seconds a token at K = 0 of the same "
    "engine over its own, of repeats the median of those in one turn; least: of the prompt that "
    "gained least.",
    "same text: prompts whose text is that of K = 0 of the same engine.",
)
MTPC, LLAMA = "mtpc", "llama.cpp"
FREE = ("minutes", "prompts")
"""Arguments in which a run that goes on may differ."""
PLAIN = "0"
"""The setting that others are compared with."""


CASE = ("text", "engine", "weights", "draft", "setting")
"""What identifies a row of the table. A setting is K; "auto": among several; "own": llama.cpp's."""


def middle(row: Row) -> float:
    """Seconds of the median of an answer's repeats, of two the lower."""
    return median_low(row["seconds"])


def gain(row: Row, plain: Row) -> float:
    """How often as fast as `plain`, by token: the median of what both took in one turn."""
    turns = zip(plain["seconds"], row["seconds"], strict=True)
    return median_low(p / own for p, own in turns) * row["tokens"] / plain["tokens"]


@dataclass(frozen=True)
class Runner:
    """One setting of an engine, by its fields of a row; `run` answers prompts."""

    case: Row
    run: Callable[[list[str]], Counts]

    def answer(self, text: str, name: str, prompts: list[str]) -> Row:
        """The row of some prompts of a kind of text, of one repeat."""
        return {"text": text, "prompt": name, **self.case, **self.run(prompts)._asdict()}


def prompts(count: int) -> Iterator[tuple[str, str, str]]:
    """Kind, name and wording of `count` prompts of each kind, in turns."""
    asked = "Rewrite this function with type hints. Answer with the code alone."
    for name, topic in zip(EDITED.split()[:count], TOPICS.split(), strict=False):
        source = inspect.cleandoc("\n" + inspect.getsource(resolve_name(name)))
        yield "edits", name, f"{asked}\n\n```python\n{source}\n```"
        yield "prose", topic, f"Write a short story about {topic}."


def batches(
    given: Iterable[tuple[str, str, str]], size: int
) -> Iterator[tuple[str, str, list[str]]]:
    """Kind, name and wordings of what is answered at once: each prompt alone, or `size` of them."""
    given = iter(given)
    while group := list(islice(given, size)):
        kinds, names, wordings = zip(*group, strict=True)
        yield "mixed" if size > 1 else kinds[0], "+".join(names), list(wordings)


def answer(spec: mtpc.SpecModel, count: int, prompts: list[str]) -> Counts:
    """Tokens, steps by request and seconds of decoding, and the answers' token ids."""
    before = spec.stats.decode_counts()
    ids = [i for found in spec.generate(prompts, count) for i in found.token_ids]
    used = spec.stats.decode_counts() - before
    return Counts(used.tokens, used.request_steps, used.seconds, ids)


def alone(run: Callable[[str], Counts], prompts: list[str]) -> Counts:
    """The answer to one prompt."""
    (prompt,) = prompts
    return run(prompt)


def weights_of(checkpoint: Path) -> str:
    """What an engine multiplies by: a dtype, or the types of a GGUF file's matrices."""
    opened = Checkpoint(checkpoint)
    matrices = [tensor for tensor in opened.tensors.values() if len(tensor.shape) > 1]
    kinds = {t.block.name for t in matrices if isinstance(t, GgufTensor)}
    entries = (opened.text_config.get("dtype"), opened.text_config.get("torch_dtype"))
    return "+".join(sorted(kinds)) or str(next(filter(None, entries), "float32"))


def name_of(draft: str) -> str:
    """A draft as a record names it: of a drafter's checkpoint the last part of its path."""
    copies, other = drafters_of(draft)
    return "+".join(["copy"] * copies + [Path(other).name] * bool(other))


def runners(args: argparse.Namespace, tell: Callable[[str], None]) -> Iterator[Runner]:
    """A runner for each setting of mtpc, warmed up, and for each of llama.cpp's types."""
    weights = weights_of(args.checkpoint)
    plain = [("none", PLAIN)] if PLAIN in args.settings else []
    drafted = [setting for setting in args.settings if setting != PLAIN]
    for draft, setting in chain(plain, product(map(str, args.drafts), drafted)):
        tell(f"compile {draft} {setting}")
        spec = compiled(args.checkpoint, draft, setting, args)
        answer(spec, 24, ["Warm up."] * args.batch)
        case = dict(engine=MTPC, weights=weights, draft=name_of(draft), setting=setting)
        yield Runner(case, partial(answer, spec, args.new_tokens))
    if args.llama:
        file = args.llama_file or args.checkpoint
        held = weights_of(file)
        threads = args.threads or torch.get_num_threads()
        for kind in args.llama_types:
            how = (args.llama, file, kind, args.new_tokens, args.max_len, threads)
            run = partial(alone, partial(look_up, *how))
            name = PLAIN if kind == "none" else "own"
            yield Runner(dict(engine=LLAMA, weights=held, draft=kind, setting=name), run)


def compiled(checkpoint: Path, draft: str, setting: str, args: argparse.Namespace) -> Any:
    """A model of one setting: a number of drafts, or one that is chosen, with budgets or not."""
    options: dict[str, Any] = dict(batch_buckets=(args.batch,), max_len=args.max_len)
    if setting != PLAIN:
        options["draft"] = draft
    if setting in ("auto", "budget"):
        options |= dict(spec_tokens="auto", spec_tiers=args.tiers)
    else:
        options["spec_tokens"] = int(setting)
    if setting == "budget":
        options["row_budgets"] = range(2, max(args.tiers) + 2)
    return mtpc.compile(checkpoint, **options)


def repeated(rows: Sequence[Row]) -> Row:
    """One answer's repeats as one row."""
    first = rows[0]
    assert all(row["answer"] == first["answer"] for row in rows), "a repeat has another text"
    return {**first, "seconds": [row["seconds"] for row in rows]}


def _rows(record: Record) -> list[Row]:
    """A row for each kind of text, engine and setting."""
    place = itemgetter("text", "prompt", "engine")
    plain = {place(row): row for row in record["rows"] if row["setting"] == PLAIN}
    groups = dict[tuple[str, ...], list[Row]]()
    for row in record["rows"]:
        groups.setdefault(tuple(row[name] for name in CASE), []).append(row)
    shown = []
    for case, found in sorted(groups.items()):
        tokens, steps = (sum(row[name] for row in found) for name in ("tokens", "steps"))
        pairs = [(row, plain[place(row)]) for row in found]
        gains = [gain(row, before) for row, before in pairs]
        same = sum(row["answer"] == before["answer"] for row, before in pairs)
        figures = dict(
            per_step=tokens / steps,
            speed=tokens / sum(map(middle, found)),
            gain=geometric_mean(gains),
            least=min(gains),
            same=f"{same} of {len(found)}",
            prompts=len(found),
        )
        shown.append({**dict(zip(CASE, case, strict=True)), **figures})
    return shown


FORM = TableForm(
    "Drafts on edits and prose",
    fields(
        "text, engine, weights, draft, K=setting, tokens/step=per_step:.2f, tokens/s=speed:.1f, "
        "over K=0=gain:.2fx, least:.2fx, same text=same, prompts"
    ),
    NOTES,
    _rows,
)


def measure(run: Run) -> Iterator[list[Row]]:
    """The answers to each prompt, after those of a run that ended early."""
    args, rows = run.args, run.earlier_rows(FREE)
    done = {(row["text"], row["prompt"]) for row in rows}
    template = load_chat_template(args.checkpoint, None)
    assert template is not None, "an edit needs a checkpoint with a chat template"
    found = list(runners(args, run.tell))
    yield rows
    end = time.monotonic() + 60 * args.minutes
    for number, (kind, name, wordings) in enumerate(batches(prompts(args.prompts), args.batch)):
        if (kind, name) in done:
            continue
        if time.monotonic() > end:
            run.tell(f"{args.minutes} minutes are over: run again with this --out to go on")
            break
        given = [template.render([{"role": "user", "content": each}], {}) for each in wordings]
        turn = number % len(found)
        taken = [*found[turn:], *found[:turn]]
        rounds = [[r.answer(kind, name, given) for r in taken] for _ in range(args.repeats)]
        run.tell(f"{kind} {name}")
        yield [repeated(rows) for rows in zip(*rounds, strict=True)]


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    if args.llama and args.batch > 1:
        parser.error(f"--batch is {args.batch}; expected 1 with --llama, whose program takes one")


BENCHMARK = Benchmark(
    "copies",
    __doc__,
    measure,
    FORM.of,
    ("--threads", *command.RESULTS),
    dict(new_tokens=200, max_len=2048, repeats=1),
    {
        "checkpoint": dict(type=Path, metavar="CHECKPOINT", help="a model with a chat template"),
        "--drafts": dict(
            nargs="+", type=Path, default=[Path("copy")], metavar="DRAFT",
            help="as `mtpc.compile` takes it: copy, a drafter's directory, copy+DIR",
        ),
        "--settings": dict(
            nargs="+", default=["0", "1", "3", "7", "auto"], metavar="K|auto|budget"
        ),
        "--tiers": dict(
            nargs="+", type=int, default=[0, 1, 3, 7], metavar="K", help="of auto and budget"
        ),
        "--prompts": command.NUMBER | dict(default=40, help="of each kind, at most 40"),
        "--batch": command.NUMBER | dict(default=1, help="prompts at once"),
        "--minutes": dict(
            type=float, default=12, metavar="N", help="begin no prompt after so many"
        ),
        "--llama": dict(
            type=Path, metavar="PROGRAMS", help=f"directory of llama.cpp's {SPECULATIVE}"
        ),
        "--llama-file": dict(
            type=Path, metavar="FILE", help="a GGUF file; default: CHECKPOINT"
        ),
        "--llama-types": dict(
            nargs="+", default=["none", "ngram-simple", "ngram-map-k", "ngram-mod", "ngram-cache"],
            metavar="TYPE", help="of --spec-type",
        ),
    },
    _check,
)  # fmt: skip
main, table = BENCHMARK.commands(__name__)

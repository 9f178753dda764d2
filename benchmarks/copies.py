"""Drafts that are copies: tokens a step and tokens/s of a real model on edits and on free prose.

    python -m benchmarks.copies CHECKPOINT --out RESULTS.json
    python -m benchmarks.copies CHECKPOINT --prompts 8 --settings 0 3 auto

An edit is a function of Python's standard library that the model is to rewrite with type hints. The
settings take turns at every prompt, each in another order, one request at a time. All must give the
text of K = 0.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from pkgutil import resolve_name
from statistics import geometric_mean
from typing import Any

import mtpc
from benchmarks.harness import command
from benchmarks.harness.command import positive
from benchmarks.harness.results import Record, Table, add_result_files, publish
from mtpc.server.chat import load_chat_template

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
COLUMNS = ("text", "draft", "K", "tokens/step", "tokens/s", "over K=0", "least", "same text",
           "prompts")  # fmt: skip
NOTES = (
    "edits: rewrite a function of the standard library with type hints; prose: a short story.",
    "tokens/step and tokens/s: all tokens of decode steps over all their steps and seconds.",
    "over K=0: geometric mean over the prompts of each one's seconds at K = 0 over its own; "
    "least: of the prompt that gained least.",
    "same text: prompts whose text is that of K = 0.",
)


@dataclass(frozen=True)
class Sample:
    """One answer: `tokens` in `steps` decode steps, which took `seconds`."""

    text: str
    prompt: str
    draft: str
    setting: str
    tokens: int
    steps: int
    seconds: float
    ids: list[int]


def prompts(count: int) -> Iterator[tuple[str, str, str]]:
    """Kind, name and wording of `count` prompts of each kind."""
    for name in EDITED.split()[:count]:
        source = inspect.cleandoc("\n" + inspect.getsource(resolve_name(name)))
        asked = "Rewrite this function with type hints. Answer with the code alone."
        yield "edits", name, f"{asked}\n\n```python\n{source}\n```"
    for topic in TOPICS.split()[:count]:
        yield "prose", topic, f"Write a short story about {topic}."


def answer(spec: mtpc.SpecModel, prompt: str, count: int) -> tuple[int, int, float, list[int]]:
    """Tokens, steps and seconds of decoding, and the answer's token ids."""
    stats = spec.stats
    tokens, steps, seconds = stats.decode_counts().tokens, stats.decode_steps, stats.decode_s
    ids = list(spec.generate(prompt, count).token_ids)
    stats = spec.stats
    used = (stats.decode_steps - steps, stats.decode_s - seconds)
    return stats.decode_counts().tokens - tokens, *used, ids


def compiled(checkpoint: Path, draft: str, setting: str, args: argparse.Namespace) -> Any:
    """A model of one setting: a number of drafts, or "auto" among several."""
    options: dict[str, Any] = dict(batch_buckets=(1,), max_len=args.max_len, dtype=args.dtype)
    if setting == "0":
        return mtpc.compile(checkpoint, spec_tokens=0, **options)
    if setting != "auto":
        return mtpc.compile(checkpoint, spec_tokens=int(setting), draft=draft, **options)
    return mtpc.compile(
        checkpoint, spec_tokens="auto", spec_tiers=args.tiers, draft=draft, **options
    )


def table(record: Record) -> Table:
    """A record's table: a row for each kind of text and setting."""
    samples = [Sample(**row) for row in record["rows"]]
    plain = {(s.text, s.prompt): s for s in samples if s.setting == "0"}
    groups = dict[tuple[str, str, str], list[Sample]]()
    for sample in samples:
        groups.setdefault((sample.text, sample.draft, sample.setting), []).append(sample)
    body = list[list[str]]()
    for key, found in groups.items():
        tokens, seconds = sum(s.tokens for s in found), sum(s.seconds for s in found)
        gains = [plain[s.text, s.prompt].seconds / s.seconds for s in found]
        same = sum(s.ids == plain[s.text, s.prompt].ids for s in found)
        rates = (f"{tokens / sum(s.steps for s in found):.2f}", f"{tokens / seconds:.1f}")
        speed = (f"{geometric_mean(gains):.2f}x", f"{min(gains):.2f}x")
        body.append([*key, *rates, *speed, f"{same} of {len(found)}", str(len(found))])
    return Table("Copies as drafts", COLUMNS, sorted(body), NOTES)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    args = _parse(argv)
    tell, rows = command.begin(args), list[dict[str, Any]]()
    template = load_chat_template(args.checkpoint, None)
    assert template is not None, "an edit needs a checkpoint with a chat template"
    models = list[tuple[str, str, Any]]()
    for setting in args.settings:
        tell(f"compile {setting}")
        draft = "none" if setting == "0" else args.draft
        models.append((draft, setting, compiled(args.checkpoint, draft, setting, args)))
    for _, _, spec in models:
        answer(spec, "Warm up.", 24)
    for number, (kind, name, wording) in enumerate(prompts(args.prompts)):
        prompt = template.render([{"role": "user", "content": wording}], {})
        turn = number % len(models)
        for draft, setting, spec in models[turn:] + models[:turn]:
            *counts, ids = answer(spec, prompt, args.new_tokens)
            rows.append(asdict(Sample(kind, name, draft, setting, *counts, ids)))
        tell(f"{kind} {name}")
    publish("copies", args, {"rows": rows}, table)
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command.new_parser("copies", __doc__)
    add = parser.add_argument
    add("checkpoint", type=Path, metavar="CHECKPOINT", help="a model with a chat template")
    add("--draft", default="copy", metavar="DRAFT", help="as `mtpc.compile` takes it")
    add("--settings", nargs="+", default=["0", "1", "3", "7", "auto"], metavar="K|auto")
    add("--tiers", nargs="+", type=int, default=[0, 1, 3, 7], metavar="K", help="of auto")
    add("--prompts", type=positive, default=40, metavar="N", help="of each kind, at most 40")
    add("--new-tokens", type=positive, default=200, metavar="N")
    add("--max-len", type=positive, default=2048, metavar="N")
    add("--dtype", metavar="NAME", help="of the weights; default: the checkpoint's")
    add("--threads", type=positive, metavar="N", help="torch's threads; default: as torch has it")
    add_result_files(parser)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())

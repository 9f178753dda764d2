"""What the comparisons with other servers share: the work, mtpc's answers, and how two compare."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeAlias

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from helpers import tiny  # noqa: E402
from helpers.plans import of_backend  # noqa: E402

import mtpc  # noqa: E402
from mtpc.backends import make_backend  # noqa: E402
from mtpc.layout import StepKey  # noqa: E402
from mtpc.models.load import load  # noqa: E402
from mtpc.program.compiler import StepCompiler  # noqa: E402
from mtpc.wiring import check_rules  # noqa: E402

HEADS: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
"""Servers' attention takes heads of 32 and more."""
PROMPTS = [[5, 9, 17, 33], [3], [40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50], [90, 7, 61]]
"""The first prompts. Further ones are drawn."""
MAX_LEN = 128
NEW_TOKENS = 24
LIMIT_S = 1800
"""For a server's process."""
Counts: TypeAlias = dict[str, Any]


class Refused(Exception):
    """A server does not run a checkpoint; says so in the server's own words."""


@dataclass(frozen=True)
class Work:
    """What both programs decode.

    Attributes:
        prompts: token ids.
        new_tokens: of each request.
        max_len: the longest request, in tokens.
        sampling: for each prompt fields of `mtpc.SamplingParams`; none for a greedy one, and none
            at all where all are.
    """

    prompts: list[list[int]]
    new_tokens: int
    max_len: int = MAX_LEN
    sampling: list[dict[str, Any]] = field(default_factory=list)


def make_work(requests: int, new_tokens: int) -> Work:
    """`PROMPTS`, and prompts of 1 to 20 tokens that are drawn from a fixed seed."""
    draw, vocab_size = random.Random(0), tiny.CONFIGS["mimo"]["vocab_size"]
    drawn = [
        [draw.randrange(vocab_size) for _ in range(draw.randint(1, 20))]
        for _ in range(requests - len(PROMPTS))
    ]
    return Work([*PROMPTS, *drawn][:requests], new_tokens)


@dataclass(frozen=True)
class Decoded:
    """What one prompt became: tokens, accepted drafts by position, and how many were drafted."""

    tokens: list[int]
    accepted: list[int]
    drafted: int


def run_mtpc(
    directory: Path,
    spec_tokens: int,
    work: Work,
    dtype: str,
    rules: Mapping[str, Any],
    backend: str = "eager",
) -> list[Decoded]:
    """Each prompt decoded by mtpc, one after the other, wired as `rules` say.

    Drafts may be any token, whichever tokens a drafter was trained for.
    """
    sizes = {"batch_buckets": (1,), "max_len": work.max_len}
    options = of_backend(backend, spec_tokens=spec_tokens, **sizes)
    rows = check_rules(rules)
    loaded = load(directory, dtype, spec_tokens > 0, rows, **tiny.drafter(directory))
    compiler = StepCompiler(loaded, options, make_backend(backend))
    spec = mtpc.SpecModel(loaded.served(), compiler.plan, compiler.compile(), loaded)
    # Servers count all drafts of a request's last step; our statistics only those handed out. So
    # they are counted here, from what each step reports.
    report = spec.program.steps[StepKey.decode(1, spec_tokens)].buffers["batch.num_accepted"]
    answers = []
    for prompt, asked in zip_longest(work.prompts, work.sampling):
        spec.engine.add(prompt, work.new_tokens, sampling=mtpc.SamplingParams(**asked or {}))
        accepted, tokens, start = [0] * spec_tokens, list[int](), spec.stats.decode_steps
        while spec.engine.has_work:
            before = spec.stats.decode_steps
            tokens += [t for output in spec.engine.step() for t in output.token_ids]
            if spec.stats.decode_steps > before:
                accepted = [n + (i < int(report[0])) for i, n in enumerate(accepted)]
        drafted = spec_tokens * (spec.stats.decode_steps - start)
        answers.append(Decoded(tokens, accepted, drafted))
    return answers


def compare(
    work: Work,
    ours: list[Decoded],
    theirs: list[Decoded],
    rounding_decides: Callable[[list[int], list[int], list[int]], bool] = lambda *_: False,
    drafts_differ: str = "",
) -> Counts:
    """How two programs' answers compare, prompt by prompt; prints those that differ.

    Args:
        work: the prompts.
        ours: an answer to each.
        theirs: an answer to each.
        rounding_decides: whether a prompt's two texts differ by rounding alone.
        drafts_differ: why the server drafts otherwise, if it does: then texts alone are compared.

    Returns:
        How many prompts are `equal`, `differ`, or differ where `rounding` decides; and of the equal
        ones, how many drafts were `drafted`, and `accepted` by position; with `drafts_differ`, it
        and those that the server has `accepted_there`, and `drafted_there`.
    """
    pairs = list(zip(work.prompts, ours, theirs, strict=True))

    def agree(one: Decoded, other: Decoded) -> bool:
        return one == other or (bool(drafts_differ) and one.tokens == other.tokens)

    equal = [(one, other) for _, one, other in pairs if agree(one, other)]
    unlike = [pair for pair in pairs if not agree(pair[1], pair[2])]
    wrong = [
        pair for pair in unlike if not rounding_decides(pair[0], pair[1].tokens, pair[2].tokens)
    ]
    for prompt, one, other in wrong:
        print(f"prompt {prompt}: mtpc {one}\n  the server {other}")
    found = {
        "equal": len(equal),
        "rounding": len(unlike) - len(wrong),
        "differ": len(wrong),
        **_drafts("", [one for one, _ in equal]),
    }
    if drafts_differ:
        found |= {"drafts_differ": drafts_differ}
        found |= _drafts("_there", [other for _, other in equal])
    return found


def _drafts(where: str, answers: list[Decoded]) -> Counts:
    by_position = zip(*(answer.accepted for answer in answers), strict=True)
    return {
        f"accepted{where}": [sum(column) for column in by_position],
        f"drafted{where}": sum(answer.drafted for answer in answers),
    }


def ask(command: Sequence[str], environment: Mapping[str, str]) -> list[dict[str, Any]]:
    """Run a server in a process of its own; returns the last list that it printed as JSON.

    Raises:
        Refused: there is none.
    """
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command, env=environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )
    try:
        out, log = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # Its workers, too.
        raise Refused(f"no answer within {LIMIT_S} s") from None
    lines = [line for line in out.splitlines() if line.startswith("[{")]
    if not lines:
        print(log[-4000:], file=sys.stderr)
        raise Refused(last_error(log, process.returncode))
    return list(json.loads(lines[-1]))


def last_error(log: str, status: int) -> str:
    """What a server's process that failed said last: an exception, or the signal it ended by."""
    found = re.findall(
        r"^(?:\[.*?\]:? *)?((?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b: .+)$", log, re.M
    )
    if found:
        return str(found[-1])
    return signal.Signals(-status).name if status < 0 else f"exit status {status}"


def differs(found: Mapping[str, Counts]) -> bool:
    """Whether two programs differ in any family and K that a server runs."""
    ran = [counts for counts in found.values() if "refused" not in counts]
    return any(each["differ"] for counts in ran for each in counts.values())


def compare_all(
    families: Sequence[str], make: Callable[[str, Path], Any], agree: Callable[[str, Path], Counts]
) -> int:
    """Compare a server with mtpc on a checkpoint of each family, and print all counts.

    Args:
        families: their names.
        make: writes a checkpoint of a family into a directory.
        agree: the counts of a family, of its directory; raises `Refused`.

    Returns:
        The exit code: 1 where tokens or accepted drafts differ.
    """
    found: dict[str, Counts] = {}
    with tempfile.TemporaryDirectory() as kept:
        for family in families:
            directory = Path(kept) / family
            make(family, directory)
            try:
                found[family] = agree(family, directory)
            except Refused as said:
                found[family] = {"refused": str(said)}
            print(f"{family}: {found[family]}", flush=True)
    print(json.dumps(found))
    return int(differs(found))

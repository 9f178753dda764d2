"""llama.cpp with drafts that it copies from the text: its llama-speculative-simple."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import NamedTuple

from benchmarks.peers.llama_decoder import LlamaError

SPECULATIVE = "llama-speculative-simple"
MOST_MATCHED = 1024
"""The most tokens that a copy may be told to match."""
_TIME = re.compile(r"decoded +(\d+) tokens in +([0-9.]+) seconds")
_ACCEPTED = re.compile(r"n_accept += +(\d+)")


class Counts(NamedTuple):
    """Tokens that were decoded in some steps and seconds; and what they were, for comparison."""

    tokens: int
    steps: int
    seconds: float
    answer: list[int]


def look_up(
    programs: Path, file: Path, kind: str, count: int, context: int, threads: int, prompt: str
) -> Counts:
    """Greedy decoding of a prompt by one process. The answer is the bytes of the text.

    Args:
        programs: directory of llama.cpp's programs.
        file: the model.
        kind: of drafts, as `--spec-type` has it. "none", which the program refuses, is a copy of
            so many tokens that none occurs.
        count: of new tokens.
        context: tokens of prompt and answer, at most.
        threads: of llama.cpp.
        prompt: as a chat template renders it.

    Raises:
        LlamaError: the program failed, or does not say how long it decoded.
    """
    sizes = ("-n", count, "-c", context, "-t", threads, "-tb", threads)
    drafts: tuple[str, ...] = ("--spec-type", kind)
    if kind == "none":
        longest = str(min(context, MOST_MATCHED))
        drafts = ("--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", longest)
    how = (*drafts, "--temp", "0", "--no-escape", "-p", prompt)
    command = [str(part) for part in (programs / SPECULATIVE, "-m", file, *sizes, *how)]
    done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL)
    return read_counts(done.stdout, done.stderr.decode(errors="replace"))


def read_counts(text: bytes, log: str) -> Counts:
    """What the program printed, and its log.

    A step gives one token beside those that it accepted.

    Raises:
        LlamaError: the log does not say how long it decoded.
    """
    time, accepted = _TIME.search(log), _ACCEPTED.search(log)
    if time is None or accepted is None:
        tail = "\n".join(log.splitlines()[-8:])
        raise LlamaError(f"{SPECULATIVE} does not say how long it decoded:\n{tail}")
    tokens = int(time[1])
    return Counts(tokens, tokens - int(accepted[1]), float(time[2]), list(text))

"""llama.cpp, one process per sample: llama-batched-bench, and llama-speculative-simple with drafts
that it copies from the text."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from benchmarks import ROOT
from benchmarks.harness.decoders import Decoded, Decoder, Prompts

KINDS = ("Q4_0", "Q4_K_M", "Q8_0", "BF16")
"""Types of files to run, by llama-quantize's names."""
WRITER = ROOT / "benchmarks" / "peers" / "gguf_writer.py"
BENCH, QUANTIZE = "llama-batched-bench", "llama-quantize"
ATTEMPTS = 10
"""The most runs until one prints its result. llama.cpp does not flush its log when it ends, and so
loses results of small models (ggml-org/llama.cpp#22142)."""


class LlamaError(Exception):
    """A llama.cpp program or a converter failed; the message has the end of its output."""


class LlamaTimes(NamedTuple):
    """The seconds of a run's prefill, and of its decode steps."""

    prompt_s: float
    decode_s: float


@dataclass(frozen=True)
class LlamaFiles:
    """The GGUF files of one checkpoint.

    Attributes:
        programs: directory of llama.cpp's programs.
        python: interpreter that has the package gguf.
        checkpoint: directory of the checkpoint.
        directory: where to write the files.
    """

    programs: Path
    python: Path
    checkpoint: Path
    directory: Path

    def write(self, kind: str) -> Path:
        """Return the file of one of `KINDS`; llama-quantize makes it from the bfloat16 file.

        The embedding stays bfloat16, as in mtpc: a step reads only some of its rows.

        Raises:
            LlamaError: a program failed.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        plain, file = self.directory / "BF16.gguf", self.directory / f"{kind}.gguf"
        if not plain.is_file():
            _run(self.plain_command(plain))
        if not file.is_file():
            keep = ("--token-embedding-type", "bf16")
            _run([self.programs / QUANTIZE, *keep, plain, file, kind])
        return file

    def plain_command(self, plain: Path) -> list[object]:
        """The command that writes the bfloat16 file."""
        # Not resolved: the interpreter finds its environment by the path of its symbolic link.
        return [self.python.absolute(), WRITER, self.checkpoint, plain]


class LlamaDecoder(Decoder):
    """A GGUF file in llama-batched-bench, which makes prompts of the same length itself.

    Each sample is a process of its own.

    Args:
        programs: directory of llama.cpp's programs.
        file: the model.
        kind: the file's type.
        threads: number of llama.cpp's threads.
    """

    spec_tokens = 0
    stays_warm = False

    def __init__(self, programs: Path, file: Path, kind: str, threads: int) -> None:
        self.engine = f"llama.cpp {kind}"
        self._program, self._file, self._threads = programs / BENCH, file, threads

    def step_bytes(self, embedding_bytes: int) -> int:
        """The bytes that a step reads: the file without the embedding."""
        return self._file.stat().st_size - embedding_bytes

    def decode(self, prompts: Prompts, new_tokens: int) -> Decoded:
        """Decode `new_tokens` for each of as many requests as prompts."""
        found = self.run(len(prompts), len(prompts[0]), new_tokens)
        return Decoded(new_tokens, len(prompts) * new_tokens, found.decode_s, None)

    def prefill(self, prompts: Prompts) -> Decoded:
        """Of as many requests; the program decodes a token, too, whose time does not count."""
        found = self.run(len(prompts), len(prompts[0]), 1)
        return Decoded(len(prompts), sum(map(len, prompts)), found.prompt_s, None)

    def run(self, batch: int, length: int, new_tokens: int) -> LlamaTimes:
        """The times of `batch` requests of one length."""
        threads, context = str(self._threads), batch * (length + new_tokens)
        sizes = ("-c", context, "-npp", length, "-ntg", new_tokens, "-npl", batch)
        how = ("-t", threads, "-tb", threads, "--output-format", "jsonl")
        command = [self._program, "-m", self._file, *sizes, *how]
        told = (output for _ in range(ATTEMPTS) if "{" in (output := _run(command)))
        return read_result(next(told, ""))


def read_result(output: str) -> LlamaTimes:
    """The times in llama-batched-bench's output, which has one line of JSON.

    Raises:
        LlamaError: the output has no such line, or several.
    """
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    if len(lines) != 1:
        raise LlamaError(f"{BENCH} wrote {len(lines)} results; expected one, in {output!r}")
    return LlamaTimes(float(lines[0]["t_pp"]), float(lines[0]["t_tg"]))


def tail(log: str) -> str:
    """The last lines of what a program said."""
    return "\n".join(log.splitlines()[-8:])


def _run(command: list[object]) -> str:
    done = subprocess.run([str(part) for part in command], cwd=ROOT, capture_output=True, text=True)
    if done.returncode != 0:
        raise LlamaError(f"{command[0]} ended with status {done.returncode}:\n{tail(done.stderr)}")
    return done.stdout


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
        raise LlamaError(f"{SPECULATIVE} does not say how long it decoded:\n{tail(log)}")
    tokens = int(time[1])
    return Counts(tokens, tokens - int(accepted[1]), float(time[2]), list(text))

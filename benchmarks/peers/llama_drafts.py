"""llama.cpp with drafts of the MTP layer: its llama-server, one process per sample."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.decoders import Decoded, Decoder, Prompts
from benchmarks.harness.machine import child_seconds
from benchmarks.peers.llama_decoder import LlamaError, LlamaFiles
from benchmarks.peers.llama_server import SERVER, LlamaServer

KINDS = ("Q4_0", "Q8_0", "BF16")
"""Types of files to run, by llama-quantize's names."""
CONVERTER = "benchmarks.peers.gguf_converter"
WARM_TOKENS = 4


@dataclass(frozen=True)
class ConvertedFiles(LlamaFiles):
    """GGUF files with MTP layers; llama.cpp's converter makes the bfloat16 file.

    The programs are in build/bin of the directory of llama.cpp's sources.
    """

    def plain_command(self, plain: Path) -> list[object]:
        sources = self.programs.resolve().parents[1]
        return [sys.executable, "-m", CONVERTER, sources, self.checkpoint, plain]


class ServerDecoder(Decoder):
    """A GGUF file in llama-server. The server's own `timings` are the result.

    Args:
        programs: directory of llama.cpp's programs.
        file: the model.
        kind: the file's type.
        spec_tokens: number of drafts of the file's MTP layer in a step.
        threads: number of llama.cpp's threads.
    """

    def __init__(
        self, programs: Path, file: Path, kind: str, spec_tokens: int, threads: int
    ) -> None:
        self.engine, self.spec_tokens = f"llama.cpp {kind}", spec_tokens
        self._programs, self._file, self._threads = programs, file, threads

    def step_bytes(self, embedding_bytes: int) -> int:
        """The bytes that a step reads once: the file without the embedding."""
        return self._file.stat().st_size - embedding_bytes

    def decode(self, prompts: Prompts, new_tokens: int) -> Decoded:
        """Decode `new_tokens` for each prompt; all requests are sent at once."""
        before, batch = child_seconds(), len(prompts)
        length = max(map(len, prompts))
        context = batch * (length + new_tokens + self.spec_tokens + 1)
        log = self._file.with_suffix(".log")
        place = (self._programs, self._file, context, self._threads, log)
        server = LlamaServer(*place, slots=batch, options=self._options())
        try:
            server.complete(prompts[0], WARM_TOKENS)
            with ThreadPoolExecutor(batch) as pool:
                found = list(pool.map(lambda ids: server.complete(ids, new_tokens), prompts))
        finally:
            server.close()
        timings = [one.get("timings", {}) for one in found]
        return read_timings(timings, child_seconds() - before)

    def _options(self) -> list[str]:
        """Options that disable the prompt cache and the warm-up, and options of the drafts."""
        plain = ["-ctxcp", "0", "--cache-ram", "0", "--no-warmup"]
        limits = ["--spec-draft-n-max", str(self.spec_tokens), "--spec-draft-p-min", "0"]
        return [*plain, "--spec-type", "draft-mtp", *limits] if self.spec_tokens else plain


def server_decoders(
    programs: Path, checkpoint: Path, numbers: Sequence[int], kinds: Sequence[str] = KINDS
) -> Iterator[ServerDecoder]:
    """A decoder for each type of file and number of drafts.

    Args:
        programs: directory of llama.cpp's programs, in its build.
        checkpoint: directory of the checkpoint; the files are written to its directory gguf.
        numbers: numbers of drafts.
        kinds: types of files.
    """
    files = ConvertedFiles(programs, Path(sys.executable), checkpoint, checkpoint / "gguf")
    for kind in kinds:
        file = files.write(kind)
        for k in numbers:
            yield ServerDecoder(programs, file, kind, k, torch.get_num_threads())


def read_timings(found: Sequence[Mapping[str, Any]], cpu_s: float) -> Decoded:
    """Decode steps of concurrent requests, from the `timings` of each.

    Prefill gives the first token of a request. A step gives one token and the accepted drafts.

    Raises:
        LlamaError: the timings lack an entry.
    """
    try:
        tokens = [one["predicted_n"] - 1 for one in found]
        accepted = [one.get("draft_n_accepted", 0) for one in found]
        seconds = max(one["predicted_ms"] for one in found) / 1e3
    except KeyError as error:
        raise LlamaError(f"{SERVER}'s timings have no {error}, in {list(found)}") from None
    drafted = sum(one.get("draft_n", 0) for one in found)
    return Decoded(
        steps=max(n - a for n, a in zip(tokens, accepted, strict=True)),
        tokens=sum(tokens),
        seconds=seconds,
        acceptance_rate=sum(accepted) / drafted if drafted else None,
        child_cpu_s=cpu_s,
    )

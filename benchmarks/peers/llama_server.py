"""llama.cpp's server in another process, which also drafts with MTP layers."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.decoders import Decoded, Decoder, Prompts, Turn
from benchmarks.peers.llama_decoder import LlamaDecoder, LlamaError, LlamaFiles, tail

SERVER = "llama-server"
_START_S, _POLL_S = 120.0, 0.1


class LlamaServer(Decoder):
    """A server's process.

    Args:
        programs: directory of llama.cpp's programs.
        file: the model, a GGUF file.
        context: number of tokens in the KV cache, which the slots share.
        threads: number of llama.cpp's threads.
        log: file for the server's output.
        slots: the most concurrent requests. A slot of llama.cpp keeps its last request's KV cache.
        options: further options of the command line.

    Raises:
        LlamaError: it did not start.
    """

    engine, spec_tokens = "llama.cpp", 0

    def __init__(
        self,
        programs: Path,
        file: Path,
        context: int,
        threads: int,
        log: Path,
        slots: int = 1,
        options: Sequence[str] = (),
    ) -> None:
        self._log, self._port = log, _free_port()
        sizes = ("-c", context, "-np", slots, "-t", threads, "-tb", threads)
        place = ("--host", "127.0.0.1", "--port", self._port)
        command = [programs / SERVER, "-m", file, *sizes, *place, *options]
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [str(part) for part in command], stdout=output, stderr=output
            )
        deadline = time.monotonic() + _START_S
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.close()
                said = tail(log.read_text(errors="replace"))
                raise LlamaError(f"{SERVER} did not start:\n{said}")
            time.sleep(_POLL_S)

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.wait()

    def turn(self, prompt: list[int], new_tokens: int) -> Turn:
        """Continue a prompt greedily, by exactly `new_tokens`.

        The server itself measures the seconds, because its stream omits tokens that end in half a
        character.

        Raises:
            LlamaError: the server refuses the request or gives fewer tokens.
        """
        told = self.complete(prompt, new_tokens, cache_prompt=True)
        tokens, timings = told["tokens"], told["timings"]
        if len(tokens) != new_tokens:
            raise LlamaError(
                f"{SERVER} gave {len(tokens)} tokens; expected {new_tokens}: its log is {self._log}"
            )
        return 1e-3 * timings["prompt_ms"], tokens, len(prompt) - int(timings["prompt_n"])

    def complete(
        self, prompt: Sequence[int], new_tokens: int, cache_prompt: bool = False
    ) -> dict[str, Any]:
        """The server's whole answer to a greedy request.

        Args:
            prompt: token ids.
            new_tokens: number of new tokens.
            cache_prompt: whether the server may reuse the KV cache of its slot.

        Raises:
            LlamaError: the server refuses the request.
        """
        body = dict(
            prompt=list(prompt), n_predict=new_tokens, temperature=0.0, ignore_eos=True,
            cache_prompt=cache_prompt, return_tokens=True,
        )  # fmt: skip
        connection = http.client.HTTPConnection("127.0.0.1", self._port)
        with closing(connection):
            connection.request("POST", "/completion", json.dumps(body))
            response = connection.getresponse()
            data = response.read()
        if response.status != 200:
            raise LlamaError(f"{SERVER} answers {response.status}: {data[:200]!r}")
        answer: dict[str, Any] = json.loads(data)
        return answer

    def _is_ready(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self._port)
        with suppress(OSError), closing(connection):
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        return False


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


SERVED_KINDS = ("Q4_0", "Q8_0", "BF16")
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


class ServerDecoder(LlamaDecoder):
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
        super().__init__(programs, file, kind, threads)
        self._programs, self.spec_tokens = programs, spec_tokens

    def decode(self, prompts: Prompts, new_tokens: int) -> Decoded:
        """Decode `new_tokens` for each prompt; all requests are sent at once."""
        batch, length = len(prompts), max(map(len, prompts))
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
        return read_timings(timings)

    def _options(self) -> list[str]:
        """Options that disable the prompt cache and the warm-up, and options of the drafts."""
        plain = ["-ctxcp", "0", "--cache-ram", "0", "--no-warmup"]
        limits = ["--spec-draft-n-max", str(self.spec_tokens), "--spec-draft-p-min", "0"]
        return [*plain, "--spec-type", "draft-mtp", *limits] if self.spec_tokens else plain


def read_timings(found: Sequence[Mapping[str, Any]]) -> Decoded:
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
    )

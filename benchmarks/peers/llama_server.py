"""llama.cpp's server in another process."""

from __future__ import annotations

import http.client
import json
import socket
import subprocess
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from benchmarks.peers.llama_decoder import LlamaError

SERVER = "llama-server"
_START_S, _POLL_S = 120.0, 0.1


class LlamaServer:
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
                tail = "\n".join(log.read_text(errors="replace").splitlines()[-8:])
                raise LlamaError(f"{SERVER} did not start:\n{tail}")
            time.sleep(_POLL_S)

    def close(self) -> None:
        """End the process."""
        self._process.terminate()
        self._process.wait()

    def answer(self, prompt: list[int], new_tokens: int) -> tuple[float, list[int], int]:
        """Continue a prompt greedily, by exactly `new_tokens`.

        Returns:
            The seconds to the first token, the tokens, and the number of reused prompt tokens. The
            server itself measures the seconds, because its stream omits tokens that end in half a
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

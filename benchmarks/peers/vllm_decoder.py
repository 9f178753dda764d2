"""vLLM in another process, which waits between samples."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks import ROOT
from benchmarks.harness.decoders import Decoded, Decoder, Prompts, Turn
from benchmarks.peers import vllm_host

VLLM = "vLLM"
"""The engine's name in tables."""


class VllmError(Exception):
    """vLLM ended early; the message names its log."""


class VllmDecoder(Decoder):
    """The process of a vLLM engine with one number of drafts, which waits for jobs.

    It has as many threads as torch has here.

    Args:
        python: the interpreter of its environment.
        checkpoint: directory of the checkpoint.
        spec_tokens: number of drafts.
        max_len: the most tokens of a request.
        max_seqs: the most concurrent requests.
        kept: a directory for its caches and its log.
        engine: its name in tables.
        relaunches: whether each round starts a new process.
        **more: options of `vllm.LLM`.

    Raises:
        VllmError: the process did not start.
    """

    def __init__(
        self,
        python: Path,
        checkpoint: Path,
        spec_tokens: int,
        max_len: int,
        max_seqs: int,
        kept: Path,
        engine: str = VLLM,
        relaunches: bool = False,
        **more: Any,
    ) -> None:
        self.engine, self.spec_tokens, self._relaunches = engine, spec_tokens, relaunches
        # Not resolved: the interpreter finds its environment by the path of its symbolic link.
        self._python, self._kept = python.absolute(), kept.absolute()
        self._kept.mkdir(parents=True, exist_ok=True)
        self._log = self._kept / f"K={spec_tokens}.log"
        path = str(checkpoint.absolute())
        self._options = vllm_host.arguments(path, spec_tokens, max_len, max_seqs) | more
        self._start()

    def _start(self) -> None:
        start, threads = time.perf_counter(), torch.get_num_threads()
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [str(self._python), "-m", "benchmarks.peers.vllm_host", json.dumps(self._options)],
                cwd=ROOT,
                env=os.environ | vllm_host.environment(self._kept, threads, self._python),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self._read()
        self.build_s = time.perf_counter() - start

    def ask(self, **job: Any) -> dict[str, Any]:
        """Send a job and return its result; `vllm_host` describes jobs."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return self._read()

    def renew(self) -> bool:
        """End the process and start another if `relaunches`; return whether it did."""
        if self._relaunches:
            self.close()
            self._start()
            self.launches += 1
        return self._relaunches

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def decode(self, prompts: Prompts, new_tokens: int) -> Decoded:
        """Continue prompts greedily, by exactly `new_tokens` each."""
        done = self.ask(prompts=list(prompts), new_tokens=new_tokens)
        per_step = done["tokens"] / done["steps"] / len(prompts)
        rate = (per_step - 1) / self.spec_tokens if self.spec_tokens else None
        return _decoded(done, rate)

    def prefill(self, prompts: Prompts) -> Decoded:
        """Of prompts, one after another; the process measures the time."""
        tokens = sum(len(prompt) for prompt in prompts)
        return _decoded(
            {**self.ask(prefill=list(prompts)), "steps": len(prompts), "tokens": tokens}
        )

    def turn(self, prompt: list[int], new_tokens: int) -> Turn:
        """Answer a prompt; the process measures the time."""
        done = self.ask(turn=prompt, new_tokens=new_tokens)
        return done["seconds"], done["answer"], done["reused"]

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise VllmError(
                f"vLLM ended with status {self._process.wait()}; its log is {self._log}"
            )
        return json.loads(line)


def _decoded(done: Mapping[str, Any], rate: float | None = None) -> Decoded:
    return Decoded(done["steps"], done["tokens"], done["seconds"], rate, done["cpu_s"])

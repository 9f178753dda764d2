"""vLLM in another process, which waits between samples."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch

from benchmarks import ROOT
from benchmarks.harness.decoders import Decoded, Decoder, Prompts
from benchmarks.peers import vllm_host

VLLM = "vLLM"
"""The engine's name in tables."""


class VllmError(Exception):
    """vLLM ended early; the message names its log."""


class VllmProcess:
    """The process of a vLLM engine with one number of drafts. It waits for jobs.

    Args:
        python: the interpreter of its environment.
        options: see `vllm_host.arguments`.
        kept: a directory for its caches and its log.
        threads: number of vLLM's threads.

    Raises:
        VllmError: the process did not start.
    """

    def __init__(self, python: Path, options: Mapping[str, Any], kept: Path, threads: int) -> None:
        drafts = options["speculative_config"]
        self.spec_tokens = drafts["num_speculative_tokens"] if drafts else 0
        kept.mkdir(parents=True, exist_ok=True)
        self._log = kept / f"K={self.spec_tokens}.log"
        # Not resolved: the interpreter finds its environment by the path of its symbolic link.
        python, start = python.absolute(), time.perf_counter()
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [str(python), "-m", "benchmarks.peers.vllm_host", json.dumps(dict(options))],
                cwd=ROOT,
                env=os.environ | vllm_host.environment(kept, threads, python),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self._read()
        self.build_s = time.perf_counter() - start

    @classmethod
    def of(
        cls,
        python: Path,
        checkpoint: Path,
        spec_tokens: int,
        max_len: int,
        max_seqs: int,
        kept: Path,
        **more: Any,
    ) -> Self:
        """On a checkpoint, with as many threads as torch has; `more` is for `vllm.LLM`."""
        path = str(checkpoint.absolute())
        options = vllm_host.arguments(path, spec_tokens, max_len, max_seqs) | more
        return cls(python, options, kept.absolute(), torch.get_num_threads())

    def ask(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Send a job and return its result; `vllm_host` describes jobs."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise VllmError(
                f"vLLM ended with status {self._process.wait()}; its log is {self._log}"
            )
        return json.loads(line)


class VllmDecoder(Decoder):
    """vLLM as a decoder of the decode benchmark.

    Args:
        launch: starts a process.
        relaunches: whether each round starts a new process.
        engine: its name in tables.
    """

    def __init__(
        self, launch: Callable[[], VllmProcess], relaunches: bool, engine: str = VLLM
    ) -> None:
        self.engine = engine
        self._launch, self._relaunches = launch, relaunches
        self.process, self.launches = launch(), 1
        self.spec_tokens, self.build_s = self.process.spec_tokens, self.process.build_s

    def renew(self) -> bool:
        """End the process and start another if `relaunches`; return whether it did."""
        if self._relaunches:
            self.close()
            self.process = self._launch()
            self.launches += 1
        return self._relaunches

    def close(self) -> None:
        """End the process."""
        self.process.close()

    def decode(self, prompts: Prompts, new_tokens: int) -> Decoded:
        """Continue prompts greedily, by exactly `new_tokens` each."""
        done = self.process.ask({"prompts": list(prompts), "new_tokens": new_tokens})
        per_step = done["tokens"] / done["steps"] / len(prompts)
        rate = (per_step - 1) / self.spec_tokens if self.spec_tokens else None
        return Decoded(done["steps"], done["tokens"], done["seconds"], rate, done["cpu_s"])


def vllm_decoders(
    python: Path,
    checkpoint: Path,
    numbers: Sequence[int],
    max_len: int,
    max_seqs: int,
    workdir: Path,
    relaunches: bool = False,
    engine: str = VLLM,
    decoder: type[VllmDecoder] = VllmDecoder,
    **more: Any,
) -> Iterator[VllmDecoder]:
    """An engine for each number of drafts; it starts when the iteration reaches it.

    Args:
        python: the interpreter of vLLM's environment.
        checkpoint: directory of the checkpoint.
        numbers: numbers of drafts.
        max_len: the most tokens of a request.
        max_seqs: the most concurrent requests.
        workdir: caches and logs go to a directory of the engine's name, without spaces: Inductor's
            compiler takes none.
        relaunches: whether each round starts a new process.
        engine: its name in tables.
        decoder: what decodes.
        **more: options of `vllm.LLM`.
    """
    kept = workdir / engine.replace(" ", "-")
    for k in numbers:
        launch = partial(VllmProcess.of, python, checkpoint, k, max_len, max_seqs, kept, **more)
        yield decoder(launch, relaunches, engine)

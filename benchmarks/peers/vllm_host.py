"""Runs vLLM's CPU build in another process, with mtpc's options where vLLM has them.

The process runs in vLLM's environment, without mtpc. It imports the standard library and vllm only.

It reads jobs from its input until the input ends. Each job and each result is a line of JSON:

- `{"prompts": [[...]], "new_tokens": N}` decodes a batch;
- `{"prefill": [[...]]}` prefills prompts, one after another, and gives their first new tokens;
- `{"turn": [...], "new_tokens": N}` answers one prompt; the result has the tokens;
- `{"arrivals": [...]}` runs requests as they arrive (see `arrivals`).
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness.arrivals import Arrival, serve


def environment(kept: Path, threads: int, python: Path, ranks: int = 1) -> dict[str, str]:
    """The environment variables of the process.

    Args:
        kept: a directory for its caches.
        threads: number of threads, bound to the first processors.
        python: the interpreter of vLLM's environment.
        ranks: number of ranks of tensor parallelism; each gets the same number of processors.
    """
    each = threads // ranks
    places = [f"{rank * each}-{(rank + 1) * each - 1}" for rank in range(ranks)]
    return {
        "OMP_NUM_THREADS": str(each),
        "HF_HUB_OFFLINE": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(kept / "inductor"),
        "VLLM_CACHE_ROOT": str(kept / "vllm"),
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(places),
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        # vLLM's kernels are linked against the OpenMP of its wheel.
        "LD_PRELOAD": str(python.parent.parent / "lib" / "libiomp5.so"),
    }


def arguments(
    directory: str, spec_tokens: int, max_len: int, max_seqs: int, eager: bool = False
) -> dict[str, Any]:
    """The arguments of `vllm.LLM`."""
    drafts = {"method": "mtp", "num_speculative_tokens": spec_tokens} if spec_tokens else None
    return dict(
        model=directory,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=max_len,
        max_num_seqs=max_seqs,
        enforce_eager=eager,
        enable_prefix_caching=False,
        seed=0,
        speculative_config=drafts,
    )


def _add(engine: Any, name: str, prompt: list[int], new_tokens: int) -> None:
    """Queue a greedy request for exactly so many tokens."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    engine.add_request(name, {"prompt_token_ids": prompt}, params)


def decode(engine: Any, prompts: list[list[int]], new_tokens: int) -> dict[str, float]:
    """Decode one batch; return the steps, the tokens of all requests, seconds and CPU seconds."""
    cpu = time.process_time()
    for index, prompt in enumerate(prompts):
        _add(engine, str(index), prompt, new_tokens)
    lengths: dict[str, int] = {}
    ticks: list[tuple[float, int]] = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            lengths[output.request_id] = len(output.outputs[0].token_ids)
        if len(lengths) == len(prompts):  # The prefill of all requests has ended.
            ticks.append((time.perf_counter(), sum(lengths.values())))
    (begin, before), (end, after) = ticks[0], ticks[-1]
    return dict(
        steps=len(ticks) - 1,
        tokens=after - before,
        seconds=end - begin,
        cpu_s=time.process_time() - cpu,
    )


def first_tokens(engine: Any, prefill: list[list[int]]) -> dict[str, float]:
    """Prefill prompts, one after another; return seconds and CPU seconds."""
    cpu, start = time.process_time(), time.perf_counter()
    for index, prompt in enumerate(prefill):
        _add(engine, str(index), prompt, 1)
        while engine.has_unfinished_requests():
            engine.step()
    return dict(seconds=time.perf_counter() - start, cpu_s=time.process_time() - cpu)


def answer(engine: Any, turn: list[int], new_tokens: int) -> dict[str, Any]:
    """Answer a prompt; return the seconds to the first token, the tokens and the reused tokens."""
    start, seconds = time.perf_counter(), None
    output: Any = None
    _add(engine, "turn", turn, new_tokens)
    while engine.has_unfinished_requests():
        for output in engine.step():
            if seconds is None and output.outputs[0].token_ids:
                seconds = time.perf_counter() - start
    return dict(
        seconds=seconds,
        answer=list(output.outputs[0].token_ids),
        reused=output.num_cached_tokens or 0,
    )


class VllmServer:
    """vLLM's engine under load."""

    def __init__(self, engine: Any):
        self._engine = engine
        self._lengths: dict[str, int] = {}

    def add(self, name: str, arrival: Arrival) -> None:
        """Queue a request."""
        _add(self._engine, name, arrival.prompt, arrival.new_tokens)

    def step(self) -> Iterator[tuple[str, int]]:
        """Run one step; yield the new tokens of requests."""
        for output in self._engine.step():
            before = self._lengths.get(output.request_id, 0)
            self._lengths[output.request_id] = len(output.outputs[0].token_ids)
            yield output.request_id, len(output.outputs[0].token_ids) - before


def serve_all(engine: Any, arrivals: list[dict[str, Any]]) -> dict[str, Any]:
    """Serve requests; return their traces (see `arrivals.serve`) and CPU seconds."""
    cpu = time.process_time()
    traces = serve(VllmServer(engine), [Arrival(**arrival) for arrival in arrivals])
    return dict(traces=traces, cpu_s=time.process_time() - cpu)


_WORK: dict[str, Callable[..., Any]] = {
    "prompts": decode,
    "prefill": first_tokens,
    "turn": answer,
    "arrivals": serve_all,
}
"""The function of a job, by the name of its input."""


def main(options: str) -> None:
    """Start vLLM, report that it is ready, and run jobs."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # vLLM's output goes to the log.
    from vllm import LLM

    engine = LLM(**json.loads(options)).llm_engine
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        job = json.loads(line)
        (kind,) = _WORK.keys() & job.keys()
        print(json.dumps(_WORK[kind](engine, **job)), file=answers)


if __name__ == "__main__":
    main(sys.argv[1])

"""A process of `benchmarks.real_size`: starts, generates a token, and times decode steps.

It imports what a user's program imports, and no more: other parts of the benchmark would import
transformers, which a start from the graph cache does not need.
"""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

PROMPT = list(range(2, 34))


def main(job: dict[str, Any]) -> dict[str, Any]:
    """The report of this process.

    Args:
        job: the checkpoint's `directory`, the graph `cache`, `k`, how many `steps` to time, and
            the `prompt`, a text; None for token ids.

    Returns:
        `first_token`: `time.monotonic()` after it; `peak_bytes`: the most that was resident until
        then; `step_ms`: milliseconds of each decode step.
    """
    import mtpc

    model = mtpc.compile(
        job["directory"], spec_tokens=job["k"], cache_dir=job["cache"], backend="cpu", max_len=1024
    )
    model.generate([job["prompt"] or PROMPT], 1, ignore_eos=True)
    first_token = time.monotonic()
    found = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    step_ms = _time_steps(model.engine, job["steps"])
    return dict(
        first_token=first_token, peak_bytes=1024 * int(found[1]) if found else 0, step_ms=step_ms
    )


def _time_steps(engine: Any, count: int) -> list[float]:
    """Milliseconds of decode steps of one request."""
    times = list[float]()
    engine.add(PROMPT, count * (engine.options.spec_tokens + 1))
    while engine.has_work and len(times) < count:
        decodes, begin = engine.running and engine.running[0].is_prefilled, time.perf_counter()
        engine.step()
        if decodes:
            times.append(1e3 * (time.perf_counter() - begin))
    return times


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))

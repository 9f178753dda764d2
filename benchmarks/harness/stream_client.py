"""Clients of a server under measurement, in a process of their own. Standard library only.

Each line on standard input is a round, {"port": ..., "bodies": [...]}: the bodies are posted at
once, each on a connection of its own, and read as streams of events. Each line on standard output
says how long that took, how many tokens came in how many events, and the CPU time it cost.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

DONE = b"data: [DONE]\n\n"


async def stream(port: int, body: dict[str, Any]) -> tuple[int, int]:
    """Post one request; returns completion tokens and events."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    data = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        b"content-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(data) + data
    )
    answer = b""
    while part := await reader.read(65536):
        answer += part
    writer.close()
    status = answer.split(b" ", 2)[1]
    if status != b"200" or DONE not in answer:
        raise RuntimeError(f"the server answered {answer[:500]!r}")
    usage = answer[answer.rindex(b'"completion_tokens": ') :].split(b" ", 2)[1]
    return int(usage.rstrip(b",}\r\n")), answer.count(b"data: ") - 2


async def round_of(port: int, bodies: list[dict[str, Any]]) -> dict[str, float]:
    """All of them at once."""
    start, cpu_s = time.perf_counter(), time.process_time()
    results = await asyncio.gather(*(stream(port, body) for body in bodies))
    return {
        "seconds": time.perf_counter() - start,
        "tokens": sum(tokens for tokens, _ in results),
        "events": sum(events for _, events in results),
        "cpu_s": time.process_time() - cpu_s,
    }


def main() -> None:
    """Serve rounds until standard input ends."""
    for line in sys.stdin:
        task = json.loads(line)
        print(json.dumps(asyncio.run(round_of(task["port"], task["bodies"]))), flush=True)


if __name__ == "__main__":
    main()

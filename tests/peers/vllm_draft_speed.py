"""How long does vLLM draft with mtpc's draft model, and with its own, eager and compiled?

    tests/peers/vllm_setup.sh VENV DIST
    python tests/peers/vllm_draft_speed.py --vllm-python VENV/bin/python --dist DIST

A random checkpoint in bfloat16 of each family. vLLM's CPU build decodes one prompt in a process of
its own for each way and round, in turns. The time is that of the first rank's proposer: all K
drafts of a step, with vLLM's own metadata, head and argmax. "compiled" is vLLM without
`enforce_eager`, whatever of its own class it then compiles.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
WAYS = [*product(("vLLM", "mtpc"), ("eager", "compiled"))]
PROMPT = [5, 9, 17, 40, 3, 8, 61, 22]


def child(job: dict[str, Any]) -> dict[str, Any]:
    """Under vLLM's interpreter: decode, and answer with the seconds of each proposal."""
    import torch
    from vllm import LLM, SamplingParams

    torch.cpu._init_amx()
    start = time.perf_counter()
    llm = LLM(**job["options"])
    started = time.perf_counter() - start

    def watch(worker: Any) -> str:
        drafter = worker.model_runner.drafter
        propose, seconds = drafter.propose, []

        def timed(*args: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            result = propose(*args, **options)
            seconds.append(time.perf_counter() - begin)
            return result

        drafter.propose, worker.draft_seconds = timed, seconds
        return type(drafter.model).__qualname__

    name, *_ = llm.collective_rpc(watch)
    params = SamplingParams(
        temperature=0, max_tokens=job["new_tokens"], ignore_eos=True, detokenize=False
    )
    llm.generate([{"prompt_token_ids": PROMPT}], params)
    llm.collective_rpc(lambda worker: worker.draft_seconds.clear())
    begin = time.perf_counter()
    (output,) = llm.generate([{"prompt_token_ids": PROMPT}], params)
    whole = time.perf_counter() - begin
    tokens = list(output.outputs[0].token_ids)
    seconds, *_ = llm.collective_rpc(lambda worker: list(worker.draft_seconds))
    return dict(seconds=seconds[1:], whole=whole, start=started, tokens=tokens, draft_class=name)


def ask(way: tuple[str, str], directory: Path, kept: Path, args: argparse.Namespace) -> Any:
    """One vLLM in a process of its own."""
    from benchmarks.peers import vllm_host

    python, (kind, mode) = args.vllm_python.absolute(), way
    options = vllm_host.arguments(str(directory), args.spec_tokens, 256, 1, mode == "eager")
    ranks = options["tensor_parallel_size"] = args.tensor_parallel_size
    done = subprocess.run(
        [
            str(python),
            str(Path(__file__)),
            "--child",
            json.dumps({"options": options, "new_tokens": args.new_tokens}),
        ],
        env=os.environ
        | vllm_host.environment(kept, args.threads, python, ranks)
        | {"PYTHONPATH": str(args.dist), "VLLM_PLUGINS": "mtpc" if kind == "mtpc" else ""}
        | {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"},  # Functions go to the workers.
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"vLLM failed:\n{done.stderr[-4000:]}")
    # Other ranks say that they end.
    said = [line for line in done.stdout.splitlines() if line.startswith("{")]
    answer = json.loads(said[-1])
    assert (answer["draft_class"] == "TracedMTP") == (kind == "mtpc"), answer["draft_class"]
    return answer


def main() -> None:
    """Measure, and print a table."""
    from benchmarks.harness import models

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm-python", type=Path, required=True, metavar="VENV/bin/python")
    parser.add_argument("--dist", type=Path, required=True, help="where mtpc is installed")
    parser.add_argument("--families", nargs="+", default=["mimo", "glm4_moe", "deepseek_v3"])
    parser.add_argument("--shape", choices=models.SHAPES, default="0.5b")
    parser.add_argument("--spec-tokens", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2, help="of all ranks together")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        kept = Path(name)
        for family in args.families:
            shapes = models.MOE_SHAPES if family == "deepseek_v3" else models.SHAPES
            models.write_checkpoint(kept / family, family, shapes[args.shape], accepting=False)
            found: dict[Any, list[Any]] = {way: [] for way in WAYS}
            for _, way in product(range(args.rounds), WAYS):
                found[way].append(ask(way, kept / family, kept / "caches", args))
            report(family, args.spec_tokens, found)


def report(family: str, spec_tokens: int, found: dict[Any, list[Any]]) -> None:
    """A line for each way: medians of the rounds' medians, and the rounds' range."""
    print(f"{family}, K={spec_tokens}: ms for all drafts of a step, [rounds], start-up s")
    for way, answers in found.items():
        rounds = sorted(1e3 * statistics.median(answer["seconds"]) for answer in answers)
        middle = statistics.median(rounds)
        start = statistics.median(answer["start"] for answer in answers)
        spread = f"[{rounds[0]:.2f}, {rounds[-1]:.2f}]"
        print(f"  {' '.join(way):16} {middle:8.2f} {spread:20} {start:6.1f}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(child(json.loads(sys.argv[2]))))
    else:
        sys.path[:0] = [str(ROOT)]
        main()

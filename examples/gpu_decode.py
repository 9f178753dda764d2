"""Generate text on a GPU: one graph launch per iteration, with the host one step behind.

    python examples/gpu_decode.py
    python examples/gpu_decode.py --checkpoint DIR --spec-tokens 3 --prompt "..."
    python examples/gpu_decode.py --dry-run    # no GPU: the same steps on the null device

Without `--checkpoint` it uses the demo model that ships with mtpc. It prints `stats.fallbacks`,
which lists what ran differently from what was requested. docs/gpu.md says on which GPUs
this backend has run.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import mtpc
from mtpc.cli.demo import BENCH_PROMPTS, demo_checkpoint
from mtpc.errors import BackendError


def main() -> int:
    """Generate text and print statistics. Return 0, or 2 if there is no GPU."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--prompt", action="append", help="a prompt; repeat it for a batch")
    parser.add_argument("--spec-tokens", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument(
        "--dry-run", action="store_true", help="run on the null device, which is slow"
    )
    args = parser.parse_args()
    prompts = args.prompt or list(BENCH_PROMPTS)
    try:
        spec = mtpc.compile(
            args.checkpoint or demo_checkpoint(),
            spec_tokens=args.spec_tokens,
            backend="null" if args.dry_run else "cuda",
            batch_buckets=(len(prompts),),
            max_len=512,
            async_scheduling=True,
        )
    except BackendError as error:
        print(f"{error}\nuse --dry-run to run the same steps on the null device", file=sys.stderr)
        return 2
    for prompt, text in zip(prompts, spec.generate(prompts, args.max_new_tokens), strict=True):
        print(prompt + text)
    stats = spec.stats
    print(
        f"{stats.emitted_tokens} tokens, {stats.acceptance_length:.2f} per request and step, in "
        f"{stats.decode_steps} decode steps of one launch each"
    )
    for reason, times in stats.fallbacks.items():
        print(f"{times} times: {reason}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""transformers' `generate`, plain and with mtpc's steps: the same tokens, fewer forwards.

    python examples/transformers_generate.py
    python examples/transformers_generate.py --checkpoint DIR --spec-tokens 1 --backend eager

Without `--checkpoint` it takes the demo model that ships with mtpc. Times are those of one run,
after a first one that is not counted, and say little on a model of this size.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer

import mtpc
from mtpc.cli.demo import BENCH_PROMPTS, demo_checkpoint


def timed(run: Callable[[], torch.Tensor]) -> tuple[torch.Tensor, float]:
    """What it returns the second time, and how many seconds that took."""
    run()
    start = time.perf_counter()
    return run(), time.perf_counter() - start


def main() -> int:
    """Compare the two; 1 where a token differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, default=None)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--spec-tokens", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    args = parser.parse_args()

    directory = args.checkpoint or demo_checkpoint()
    # float32: in bfloat16 near ties may fall either way, as they do between two batch sizes.
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(directory, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    inputs = tokenizer(list(BENCH_PROMPTS), return_tensors="pt", padding=True)
    inputs.pop("token_type_ids", None)
    wanted = {"max_new_tokens": args.max_new_tokens, "do_sample": False}

    plain, plain_s = timed(lambda: model.generate(**inputs, **wanted))
    generator = mtpc.transformers.Generator(
        model, spec_tokens=args.spec_tokens, backend=args.backend, batch_buckets=(1, 4), max_len=512
    )
    ours, ours_s = timed(lambda: model.generate(**inputs, **wanted, custom_generate=generator))

    one = tokenizer(BENCH_PROMPTS[0], return_tensors="pt")
    one.pop("token_type_ids", None)
    generator.generate(**one, **wanted, streamer=TextStreamer(tokenizer))
    stats = generator.spec.stats
    print(f"\nplain generate          {plain_s:6.2f} s")
    print(f"generate, mtpc's steps  {ours_s:6.2f} s, {stats.acceptance_length:.2f} tokens a step")
    print(f"tokens equal            {torch.equal(plain, ours)}")
    return 0 if torch.equal(plain, ours) else 1


if __name__ == "__main__":
    sys.exit(main())

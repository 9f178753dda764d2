"""transformers' `generate`, plain and with mtpc's steps: the same tokens with fewer forwards.

    python examples/transformers_generate.py
    python examples/transformers_generate.py --checkpoint DIR --spec-tokens 1 --backend eager

Without `--checkpoint` it uses the demo model that ships with mtpc. Each time is that of the second
of two runs. The times of so small a model say little about larger ones.
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
    """Call a function twice. Return the second result, and the seconds of the second call."""
    run()
    start = time.perf_counter()
    return run(), time.perf_counter() - start


def main() -> int:
    """Compare the two. Return 1 if a token differs, else 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, default=None)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--spec-tokens", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    args = parser.parse_args()

    directory = args.checkpoint or demo_checkpoint()
    # float32, because in bfloat16 the order of two almost equal logits may change.
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
    print(f"generate, mtpc's steps  {ours_s:6.2f} s, {stats.acceptance_length:.2f} tokens per step")
    print(f"tokens equal            {torch.equal(plain, ours)}")
    return 0 if torch.equal(plain, ours) else 1


if __name__ == "__main__":
    sys.exit(main())

"""Time to the first token of a chat's second turn, beside that of a cold start.

    python -m benchmarks.second_turn                       # 8,192 tokens, K = 0 and 1
    python -m benchmarks.second_turn --family step3p5 --prompt-tokens 2048

Random weights of a small hybrid shape: what decides the times is how much of the prompt is computed
again. The cold prompt is computed with nothing known. The second turn is that prompt, its answer
and a new message. The *stripped* turn leaves out the first half of the answer, as templates leave
out thinking.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import mtpc
from mtpc.models import FAMILIES
from mtpc.models.hf import model_class
from mtpc.models.mtp_layers import build_mtp_layer
from mtpc.models.save import save_checkpoint

ANSWER, MESSAGE = 64, 40
"""Tokens of the first answer and of the second message."""
_COMMON: dict[str, Any] = dict(
    vocab_size=8192,
    hidden_size=512,
    intermediate_size=1536,
    num_hidden_layers=8,
    num_attention_heads=8,
    max_position_embeddings=65536,
    num_nextn_predict_layers=1,
    tie_word_embeddings=False,
    pad_token_id=None,
    bos_token_id=0,
    eos_token_id=1,
)
_SLIDING = [["full_attention", "sliding_attention"][i % 4 > 0] for i in range(9)]
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3_5": {
        **_COMMON,
        "mtp_num_hidden_layers": 1,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "layer_types": [["linear_attention", "full_attention"][i % 4 > 2] for i in range(8)],
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    },
    "step3p5": {
        **_COMMON,
        "pad_token_id": 0,
        "layer_types": _SLIDING,
        "mlp_layer_types": ["dense"] * 9,
        "rope_theta": [1e5 if kind == "full_attention" else 1e4 for kind in _SLIDING],
        "partial_rotary_factors": [1.0] * 9,
        "swiglu_limits": [0.0] * 9,
        "swiglu_limits_shared": [0.0] * 9,
        "num_attention_groups": 2,
        "attention_other_setting": {"num_attention_heads": 8},
        "head_dim": 64,
        "sliding_window": 512,
        "moe_intermediate_size": 128,
        "share_expert_dim": 128,
        "moe_num_experts": 4,
        "moe_top_k": 2,
        "moe_layers_enum": "",
    },
}


def write(family_name: str, directory: Path) -> Path:
    """A checkpoint of a shape with random weights."""
    import transformers

    family = next(f for f in FAMILIES if f.name == family_name)
    torch.manual_seed(0)
    config = getattr(transformers, family.hf_config_class)(**SHAPES[family_name])
    target = model_class(family)(config).to(torch.bfloat16).eval()
    layer = build_mtp_layer(family, target, 0, ("head",) if family_name == "step3p5" else ())
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return save_checkpoint(target, [layer.to(torch.bfloat16)], directory, family)


def first_token(spec: mtpc.SpecModel, prompt: list[int]) -> tuple[float, list[int], int]:
    """Seconds to the first token of a prompt, its answer, and the tokens that were reused."""
    before = spec.stats.reused_tokens
    answer = spec.generate(prompt, ANSWER, ignore_eos=True)
    return answer.first_token_s, list(answer), spec.stats.reused_tokens - before


def measure(spec: mtpc.SpecModel, length: int, seed: int) -> None:
    """Print the times of one conversation."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, 8192, (length + MESSAGE,), generator=generator).tolist()
    prompt, message = ids[:length], ids[length:]
    spec.engine.reset_prefix_cache()
    cold, answer, _ = first_token(spec, prompt)
    for name, said in (("second turn", answer), ("stripped", answer[ANSWER // 2 :])):
        seconds, _, reused = first_token(spec, prompt + said + message)
        share = f"{seconds / cold:.1%} of a cold one's {cold:.2f} s"
        print(f"  {name}: {1e3 * seconds:.0f} ms, {share}; {reused} tokens reused", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--family", choices=SHAPES, default="qwen3_5")
    parser.add_argument("--prompt-tokens", type=int, default=8192)
    parser.add_argument("--spec-tokens", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--repeats", type=int, default=2)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as place:
        directory = write(args.family, Path(place))
        for spec_tokens in args.spec_tokens:
            spec = mtpc.compile(
                directory,
                spec_tokens=spec_tokens,
                batch_buckets=(1,),
                max_len=args.prompt_tokens + 4 * ANSWER,
                backend=args.backend,
                use_cache=False,
            )
            print(f"{args.family}, {args.prompt_tokens} tokens, K = {spec_tokens}", flush=True)
            for seed in range(args.repeats):
                measure(spec, args.prompt_tokens, seed)
            print(spec.stats, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

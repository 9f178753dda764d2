"""Does vLLM emit the same text where torch.compile has the backend "mtpc" as with its own?

    tests/peers/vllm_setup.sh VENV DIST
    python tests/peers/vllm_backend.py --vllm-python VENV/bin/python --dist DIST

A dense random checkpoint in bfloat16, decoded greedily by vLLM's CPU build: with its default
backend, with `compilation_config={"mode": 2, "backend": "mtpc"}`, and with that and
`quantization="mtpc"`, which leaves linear layers to the backend. Prints what mtpc says of its
graphs, and seconds of each. bfloat16 rounds otherwise in other kernels, so texts may part where two
tokens are as good as equal. Exits with 1 where a text parts at tokens whose logits differ by more
than twice the error of transformers' own model in bfloat16 (`gap_of`).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = [[5, 9, 17, 40, 3, 8, 61, 22], [31, 7], [2, 4, 8, 16, 32, 64, 1, 3, 9, 27, 81, 50]]
MTPC = {"compilation_config": {"mode": 2, "backend": "mtpc"}}
WAYS: dict[str, dict[str, Any]] = {
    "vLLM": {},
    "mtpc": MTPC,
    "mtpc, plain linears": {**MTPC, "quantization": "mtpc"},
}
"""What `vllm.LLM` is given beside the checkpoint."""


def child(job: dict[str, Any]) -> dict[str, Any]:
    """Under vLLM's interpreter: decode, and answer with texts, seconds and mtpc's reports."""
    import torch
    from vllm import LLM, SamplingParams

    torch.cpu._init_amx()
    start = time.perf_counter()
    llm = LLM(**job["options"])
    loaded = time.perf_counter()
    params = SamplingParams(
        temperature=0, max_tokens=job["new_tokens"], ignore_eos=True, detokenize=False
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    llm.generate(prompts, params)
    warm = time.perf_counter()
    outputs = [llm.generate([prompt], params)[0] for prompt in prompts]
    seconds = time.perf_counter() - warm
    answer: dict[str, Any] = {"tokens": [list(out.outputs[0].token_ids) for out in outputs]}
    answer |= {"start_s": loaded - start, "seconds": seconds, "reports": []}
    if "mtpc" in str(job["options"].get("compilation_config")):
        from mtpc.integrations.dynamo import backend

        answer["reports"] = [str(report) for report in backend.reports]
    return answer


def ask(options: dict[str, Any], directory: Path, kept: Path, args: argparse.Namespace) -> Any:
    """One vLLM in a process of its own."""
    from benchmarks.peers import vllm_host

    python = args.vllm_python.absolute()
    given = vllm_host.arguments(str(directory), 0, 128, 4) | options
    job = {"options": given, "prompts": PROMPTS, "new_tokens": args.new_tokens}
    done = subprocess.run(
        [str(python), str(Path(__file__)), "--child", json.dumps(job)],
        env=os.environ
        | vllm_host.environment(kept, 2, python)
        # What vLLM writes to its cache of compiled code must come from Inductor alone.
        | {"PYTHONPATH": str(args.dist), "VLLM_PLUGINS": "mtpc", "VLLM_USE_AOT_COMPILE": "0"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"vLLM failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def write_checkpoint(directory: Path, args: argparse.Namespace) -> None:
    """A dense random model in bfloat16."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=512,
        hidden_size=args.hidden,
        intermediate_size=4 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 64,
        num_key_value_heads=max(1, args.hidden // 256),
        max_position_embeddings=256,
        initializer_range=0.08,
        tie_word_embeddings=False,
    )
    model = transformers.Qwen2ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(directory)


def agreement(one: list[int], other: list[int]) -> int:
    """Tokens before two texts part."""
    pairs = enumerate(zip(one, other, strict=True))
    return next((i for i, (a, b) in pairs if a != b), len(one))


def gap_of(directory: Path, prompt: list[int], one: list[int], other: list[int]) -> float:
    """Of two texts after a prompt, how unequal the tokens are at which they part; 0 if they do not.

    That is the difference of the tokens' logits, by the largest error that bfloat16 makes there in
    any logit: of transformers' model in bfloat16, against float32. Two tokens may change places
    where it is at most 2.
    """
    import torch
    import transformers

    place = agreement(one, other)
    if place == len(one):
        return 0.0
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
        with torch.no_grad():
            found.append(model(torch.tensor([prompt + one[:place]])).logits[0, -1].float())
    exact, rounded = found
    return float((exact[one[place]] - exact[other[place]]).abs() / (exact - rounded).abs().max())


def main() -> int:
    """Compare; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vllm-python", type=Path, required=True, metavar="VENV/bin/python")
    parser.add_argument("--dist", type=Path, required=True, help="where mtpc is installed")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS])
    args = parser.parse_args()
    bad = 0
    with tempfile.TemporaryDirectory() as name:
        kept = Path(name)
        write_checkpoint(kept / "model", args)
        expected = None
        for way in args.ways:
            answer = ask(WAYS[way], kept / "model", kept / "caches", args)
            expected = expected or answer["tokens"]
            pairs = list(zip(answer["tokens"], expected, strict=True))
            equal = [agreement(*pair) for pair in pairs]
            gaps = [
                gap_of(kept / "model", prompt, *pair)
                for prompt, pair in zip(PROMPTS, pairs, strict=True)
            ]
            bad += max(gaps) > 2
            print(
                f"{way}: start {answer['start_s']:.1f} s, decode {answer['seconds']:.2f} s, ",
                end="",
            )
            print(f"equal for {equal} tokens, parted at gaps of {[round(gap, 2) for gap in gaps]}")
            for report in answer["reports"]:
                print(f"  {report}")
    return 1 if bad else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(child(json.loads(sys.argv[2]))))
    else:
        sys.path[:0] = [str(ROOT)]
        sys.exit(main())

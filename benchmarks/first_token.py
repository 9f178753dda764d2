"""A process that starts one engine on one checkpoint and says when it had its first token.

    python -m benchmarks.first_token ENGINE CHECKPOINT JSON-OPTIONS

It is started, and timed, by `benchmarks.startup`. The times it prints are of the monotonic clock,
which all processes of a machine share. Every import that costs anything is inside the engines, so
that it is counted; nothing but the standard library is needed for engines that run elsewhere.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Stages = dict[str, float]
"""When each stage had ended, by name."""


def _floor(checkpoint: Path, options: dict[str, Any], stages: Stages) -> list[int]:
    """Importing torch and mapping the weights: what no engine on torch can go below."""
    import torch
    from safetensors import safe_open

    stages["import torch"] = time.monotonic()
    torch.set_num_threads(options["threads"])
    for path in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            _ = [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118
    return []


def _mtpc(checkpoint: Path, options: dict[str, Any], stages: Stages) -> list[int]:
    """mtpc: every bucket, drafting and verifying, from the graph cache or into it."""
    import torch

    stages["import torch"] = time.monotonic()
    torch.set_num_threads(options["threads"])
    import mtpc

    spec = mtpc.compile(checkpoint, progress=lambda progress: None, **options["mtpc"])
    stages["compile or load"] = time.monotonic()
    (ids,) = spec.generate([options["prompt"]], 1, ignore_eos=True)
    stages["first token"] = time.monotonic()
    (more,) = spec.generate([options["prompt"]], options["new_tokens"], ignore_eos=True)
    return [*ids, *more[1:]]


def _transformers(checkpoint: Path, options: dict[str, Any], stages: Stages) -> list[int]:
    """transformers' generate, eager."""
    import torch

    stages["import torch"] = time.monotonic()
    torch.set_num_threads(options["threads"])
    model = _load_target(checkpoint, options)
    stages["compile or load"] = time.monotonic()
    ids = torch.tensor([options["prompt"]])
    out = model.generate(ids, max_new_tokens=1, min_new_tokens=1, do_sample=False)
    return out[0, ids.shape[1] :].tolist()


def _torch_compile(checkpoint: Path, options: dict[str, Any], stages: Stages) -> list[int]:
    """torch.compile of one forward over the prompt: one graph, no decode step, no drafts."""
    import torch

    stages["import torch"] = time.monotonic()
    torch.set_num_threads(options["threads"])
    model = _load_target(checkpoint, options)
    forward = torch.compile(model, dynamic=False)
    with torch.no_grad():
        logits = forward(torch.tensor([options["prompt"]]), use_cache=False).logits
    return [int(logits[0, -1].argmax())]


def _load_target(checkpoint: Path, options: dict[str, Any]) -> Any:
    """The target without its MTP layer, whose tensors transformers does not know."""
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    model_class = getattr(transformers, options["hf_class"])
    config = getattr(transformers, options["hf_config_class"]).from_pretrained(checkpoint)
    return model_class.from_pretrained(
        checkpoint, config=config, dtype=torch.bfloat16, local_files_only=True
    ).eval()


def _vllm(checkpoint: Path, options: dict[str, Any], stages: Stages) -> list[int]:
    """vLLM in this process, its scheduler and its MTP on."""
    from vllm import LLM, SamplingParams

    stages["import torch"] = time.monotonic()
    llm = LLM(model=str(checkpoint), **options["vllm"])
    stages["compile or load"] = time.monotonic()
    sampling = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": options["prompt"]}], sampling, use_tqdm=False)
    return list(outputs[0].outputs[0].token_ids)


ENGINES: dict[str, Callable[[Path, dict[str, Any], Stages], list[int]]] = {
    "floor": _floor,
    "mtpc": _mtpc,
    "transformers": _transformers,
    "torch.compile": _torch_compile,
    "vllm": _vllm,
}


def main(engine: str, checkpoint: str, options: str) -> None:
    """Run one engine; the last line of standard output is what it has to say."""
    stages: Stages = {}
    tokens = ENGINES[engine](Path(checkpoint), json.loads(options), stages)
    stages.setdefault("first token", time.monotonic())
    print("\n" + json.dumps({"stages": stages, "tokens": tokens}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

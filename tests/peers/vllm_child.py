"""vLLM runs for its neighbours here, under vLLM's interpreter. It imports nothing of mtpc's itself.

Reads a job, or a list of them, as JSON from its argument; its last line of output is the answer,
or the list of answers, as JSON.
"""

from __future__ import annotations

import json
import sys
from itertools import pairwise

import torch
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.model_executor.models.gemma4_mtp import Gemma4MTP


def run(job: dict) -> dict:
    """Decode, greedily where nothing else is asked; answer with the tokens, and what was drafted
    and accepted."""
    llm = LLM(**job["options"])
    before = counts(llm)
    common = {"max_tokens": job["new_tokens"], "ignore_eos": True, "detokenize": False}
    prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    asked = job.get("sampling") or [{}] * len(prompts)
    params = [SamplingParams(**{"temperature": 0, **common, **own}) for own in asked]
    tokens: list[list[int]] = []
    counted = [before]
    if job.get("together"):
        tokens = [list(out.outputs[0].token_ids) for out in llm.generate(prompts, params)]
    else:
        # One by one: counts then do not depend on who shares a batch.
        for prompt, own in zip(prompts, params, strict=True):
            tokens += [list(out.outputs[0].token_ids) for out in llm.generate([prompt], own)]
            counted.append(counts(llm))
    answer = {"tokens": tokens, "draft_class": llm.collective_rpc(draft_class)[0]}
    answer["counts"] = minus(counts(llm), before)
    answer["counts_by_prompt"] = [minus(after, last) for last, after in pairwise(counted)]
    answer["replays"] = llm.collective_rpc(replays)[0]
    return answer


def place_drafts_later() -> None:
    """Give Gemma 4's drafts the position of the last token, as transformers does, where vLLM gives
    them that of the row before it. What they attend to stays the same."""
    forward = Gemma4MTP.forward

    def later(self, input_ids, positions, *rest, **named):
        return forward(self, input_ids, positions + 1, *rest, **named)

    Gemma4MTP.forward = later


def counts(llm) -> dict:
    """What has been drafted, accepted and preempted so far, in all engines of this process."""
    return {
        metric.name: getattr(metric, "values", None) or getattr(metric, "value", None)
        for metric in llm.get_metrics()
        if "spec_decode" in metric.name or "preemptions" in metric.name
    }


def minus(after, before):
    """A count, counts by position, or all counts by name, less what was there before."""
    if not before:
        return after
    if isinstance(after, dict):
        return {name: minus(value, before.get(name)) for name, value in after.items()}
    if isinstance(after, list):
        return [a - b for a, b in zip(after, before, strict=True)]
    return after - before


def draft_class(worker) -> str | None:
    """The class of the draft model that a worker runs."""
    model = getattr(getattr(worker.model_runner, "drafter", None), "model", None)
    return None if model is None else f"{type(model).__module__}.{type(model).__qualname__}"


def replays(worker) -> dict[str, int] | None:
    """How often a worker of mtpc's ran each of its steps; None for vLLM's own worker."""
    steps = getattr(worker, "steps", None)
    if steps is None:
        return None
    assert worker.model_runner is None  # No forward is vLLM's.
    return {f"{key}: {part}": count for (key, part), count in steps.program.replays.items()}


def main(jobs: dict | list) -> None:
    """Do what is asked, one after the other."""
    # Some of vLLM's kernels use tile registers without asking Linux for them: the process would end
    # by SIGILL, unless somebody else had asked. False, and no harm, where there are none.
    torch.cpu._init_amx()
    place_drafts_later()
    if isinstance(jobs, dict):
        answer: dict | list = run(jobs)
    else:
        answer = []
        for job in jobs:
            answer.append(run(job))
            cleanup_dist_env_and_memory()
    print(json.dumps(answer))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

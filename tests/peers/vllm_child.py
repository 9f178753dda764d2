"""One vLLM run for its neighbours here, under vLLM's interpreter: standard library and vllm only.

Reads a job as JSON from its argument; its last line of output is the answer as JSON.
"""

from __future__ import annotations

import json
import sys

from vllm import LLM, SamplingParams


def main(job: dict) -> None:
    """Decode greedily; answer with the tokens, and what was drafted and accepted."""
    llm = LLM(**job["options"])
    params = SamplingParams(
        temperature=0, max_tokens=job["new_tokens"], ignore_eos=True, detokenize=False
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
    tokens: list[list[int]] = []
    for prompt in prompts:  # One by one: counts then do not depend on who shares a batch.
        tokens += [list(out.outputs[0].token_ids) for out in llm.generate([prompt], params)]
    counts = {
        metric.name: getattr(metric, "values", None) or getattr(metric, "value", None)
        for metric in llm.get_metrics()
        if "spec_decode" in metric.name
    }
    classes = llm.collective_rpc(draft_class)
    print(json.dumps({"tokens": tokens, "counts": counts, "draft_class": classes[0]}))


def draft_class(worker) -> str | None:
    """The class of the draft model that a worker runs."""
    model = getattr(getattr(worker.model_runner, "drafter", None), "model", None)
    return None if model is None else f"{type(model).__module__}.{type(model).__qualname__}"


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

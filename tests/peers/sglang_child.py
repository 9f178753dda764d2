"""One SGLang run for `sglang_plugin.py`, under SGLang's interpreter: standard library and sglang.

Reads a job as JSON from its argument; its last line of output is the answer as JSON. The host's
scheduler is a process of its own, which imports this file anew.
"""

from __future__ import annotations

import json
import sys
from itertools import zip_longest


def main(job: dict) -> None:
    """Decode batch by batch, greedily where nothing else is asked; answer with tokens and numbers
    of accepted drafts."""
    from sglang.srt.entrypoints.engine import Engine

    engine = Engine(**job["options"])
    params = {"temperature": 0, "max_new_tokens": job["new_tokens"], "ignore_eos": True}
    answers = []
    for batch, asked in zip_longest(job["batches"], job["sampling"]):
        each = [{**params, **own} for own in asked or [{}] * len(batch)]
        for out in engine.generate(input_ids=batch, sampling_params=each):
            meta = out["meta_info"]
            answers.append(
                {
                    "tokens": out["output_ids"],
                    "histogram": meta["spec_correct_drafts_histogram"],
                    "accept_length": meta["spec_accept_length"],
                }
            )
    print(json.dumps(answers), flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

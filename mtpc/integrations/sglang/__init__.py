"""mtpc inside SGLang: draft models, one graph for the draft phase, and one for an iteration.

See docs/embedding-sglang.md. There are three ways, and the user must ask for each by name:

- `SGLANG_EXTERNAL_MODEL_PACKAGE=mtpc.integrations.sglang.models` replaces draft architectures.
- `--speculative-algorithm MTPC` chains drafts in one graph; `register` makes the name known.
- `--speculative-algorithm MTPC_STEP` with `mtpc.integrations.sglang.step_models` instead runs
  verify, acceptance and all drafts as one graph.
"""

from __future__ import annotations


def register() -> None:
    """Entry point of the group `sglang.srt.plugins`. SGLang calls it once in each process."""
    from mtpc.integrations.sglang.algorithm import register_algorithm

    register_algorithm()

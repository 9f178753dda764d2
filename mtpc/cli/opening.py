"""What several commands do with a checkpoint: check its tokenizer, set threads, compile it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mtpc
from mtpc.errors import RequestError
from mtpc.layout.display import Tell, stage_listener

Prompt = str | list[int]
SMALL_BYTES = 64 * 2**20
"""A checkpoint with fewer bytes than this runs on one thread by default."""


def compile_model(
    checkpoint: Path,
    options: dict[str, Any],
    args: argparse.Namespace,
    tell: Tell,
    reads_text: bool = True,
) -> mtpc.SpecModel:
    """Compile a checkpoint with the command's number of threads, and report each stage."""
    compile_checkpoint = mtpc.compile  # This imports torch.
    set_threads(args.threads, checkpoint, getattr(args, "tensor_parallel_size", None))
    tell(f"open {checkpoint}")
    listener = stage_listener(tell, args.verbose)
    return compile_checkpoint(checkpoint, listener, reads_text=reads_text, **options)


def set_threads(requested: int | None, checkpoint: Path, ranks: int | None = None) -> None:
    """Set torch's number of threads: the requested one, or 1 for a small checkpoint.

    A small model runs fastest on one thread. Ranks divide the cores among them. Only commands set
    the number, because the process is theirs; the library never changes it.
    """
    import torch

    from mtpc.weights.gguf import find_gguf

    files = find_gguf(checkpoint) or checkpoint.glob("*.safetensors")
    weights = sum(file.stat().st_size for file in files)
    if requested is not None or weights < SMALL_BYTES:
        torch.set_num_threads(requested or 1)
    elif ranks is not None:
        torch.set_num_threads(max(1, torch.get_num_threads() // ranks))


def drafts(checkpoint: Path, given: dict[str, Any]) -> bool:
    """Whether steps will draft, as it is planned; a log line says why not.

    Raises:
        CheckpointError: nothing drafts, and K is given.
    """
    from mtpc.program.open_cache import plan_model

    asked = {name: value for name, value in given.items() if name in ("draft", "spec_tokens")}
    several = asked.get("spec_tokens")
    if isinstance(several, tuple):
        asked["spec_tokens"] = next((k for k in several if k != 0), 0)
    _, plan = plan_model(checkpoint, mtpc.CompileOptions.parse(asked))
    return plan.spec_tokens > 0


def check_tokenizer(
    checkpoint: Path,
    prompts: Sequence[Prompt],
    advice: str = 'give prompts as token ids: --ids "1 2 3"',
) -> None:
    """Check that text prompts have a tokenizer, before a compilation that takes minutes. `advice`
    ends the error.

    Raises:
        RequestError: a prompt is text, and the checkpoint has no tokenizer.
        CheckpointError: it is not a checkpoint.
    """
    has_text = any(isinstance(prompt, str) for prompt in prompts)
    if not has_text or (checkpoint / "tokenizer.json").is_file():
        return
    from mtpc.weights.checkpoint_files import ConfigFile
    from mtpc.weights.gguf import find_gguf
    from mtpc.weights.served_model import find_tokenizer

    if find_tokenizer(checkpoint)[0] is None:
        if not find_gguf(checkpoint):
            ConfigFile(checkpoint)  # Without a config.json, that is the error.
        raise RequestError(f"{checkpoint} has no tokenizer.json; {advice}")

"""What the content of KV pages depends on, in addition to tokens, for `kv_offload_dir`."""

from __future__ import annotations

from pathlib import Path

from mtpc.errors import OptionError
from mtpc.plan import Plan
from mtpc.program.open_cache import checkpoint_fields
from mtpc.program.step_cache import program_fields
from mtpc.store.key import digest
from mtpc.store.machine import processor_fields
from mtpc.weights.checkpoint import Checkpoint
from mtpc.weights.content import content_digest

_ROWS_IN_RINGS = "options.rows_in_rings"
"""A key field that only sizes buffers. A snapshot's own form states their sizes."""
MEMORY = ".mtpc-weights.json"
"""File of `kv_offload_dir` that keeps the digests of weights' files."""


def page_identity(checkpoint: Checkpoint, plan: Plan, backend: str) -> str:
    """A digest of the weights, the options, mtpc's sources, libraries and the processor.

    Args:
        checkpoint: holds the weights. All its files are read, the first time.
        plan: of the steps, with a `kv_offload_dir`.
        backend: name of the backend that runs the steps.

    Raises:
        OptionError: `kv_offload_dir` cannot be made.
        OSError: a file of the checkpoint cannot be read.
    """
    directory = Path(plan.kv_offload_dir)
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise OptionError(f"kv_offload_dir is {directory}, which cannot be made: {error}") from None
    fields = program_fields(backend, checkpoint_fields(checkpoint), plan)
    del fields[_ROWS_IN_RINGS]
    weights = content_digest(checkpoint.paths, directory / MEMORY)
    return digest({**fields, **processor_fields(), "weights": weights})

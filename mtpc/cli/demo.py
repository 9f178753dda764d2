"""The small checkpoint that ships with mtpc, for commands that are given no other."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from mtpc.errors import CheckpointError

DEFAULT_PROMPT = "The with statement is used to wrap the execution of a block with"
"""The demo model has read the Python documentation and nothing else."""
BENCH_PROMPTS = (
    DEFAULT_PROMPT,
    "The dictionary view objects provide a dynamic view on",
    "If the class defines a method named",
    "The following exceptions are raised when",
)
"""What `mtpc bench` continues where it is given nothing else."""


def demo_checkpoint() -> Path:
    """Directory of the demo model.

    Raises:
        CheckpointError: this installation has none.
    """
    directory = Path(str(resources.files("mtpc") / "demo"))
    if not (directory / "config.json").is_file():
        raise CheckpointError(
            f"this installation has no demo model in {directory}; name a checkpoint directory, or "
            "make the demo model with examples/train_demo_model.py"
        )
    return directory

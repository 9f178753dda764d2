"""Files of a run that is not over: replaced as a whole, and refused if they are damaged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from mtpc.errors import CheckpointError


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write within the block, which then takes the place of `path`.

    Raises:
        CheckpointError: it cannot be written; nothing is left of it.
    """
    scratch = path.with_suffix(".new")
    try:
        yield scratch
        scratch.replace(path)
    except (OSError, RuntimeError) as error:  # torch hides the error of the system.
        raise CheckpointError(
            f"cannot write {path}: {error}; free space, and continue with --resume"
        ) from error
    finally:
        scratch.unlink(missing_ok=True)


def unreadable(path: Path, error: Exception) -> CheckpointError:
    """The error for a file of an interrupted run that is damaged."""
    reason = f"{type(error).__name__}: {error}"
    return CheckpointError(
        f"cannot read {path}: {reason:.300}; remove {path.parent} to begin anew, without --resume"
    )

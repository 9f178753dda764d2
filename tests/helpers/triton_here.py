"""Whether Triton is installed, and in which mode; `tests/run_triton.sh` installs it."""

from __future__ import annotations

import os
from importlib import util

_FOUND = util.find_spec("triton") is not None
_INTERPRETER = os.environ.get("TRITON_INTERPRET") == "1"
INTERPRETS = _FOUND and _INTERPRETER
COMPILES = _FOUND and not _INTERPRETER
NO_INTERPRETER = "needs Triton and TRITON_INTERPRET=1: tests/run_triton.sh"
NO_COMPILER = "needs Triton that compiles: tests/run_triton.sh"
"""Why a test module is skipped."""

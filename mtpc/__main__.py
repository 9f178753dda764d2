"""`python -m mtpc`: the same as the command `mtpc`."""

from __future__ import annotations

from mtpc.cli.main import run

run()

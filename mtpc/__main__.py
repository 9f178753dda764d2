"""`python -m mtpc`: the same as the command `mtpc`."""

from __future__ import annotations

import sys

from mtpc.cli.main import main

sys.exit(main())

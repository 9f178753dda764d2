"""Operators of the cpu backend alone; importing this package declares them. See `mtpc.ops`."""

from __future__ import annotations

import sys

from torch.library import CustomOpDef

from mtpc.ops import members

members(sys.modules[__name__], CustomOpDef)

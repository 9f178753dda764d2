"""Operators with Triton kernels: their kernels, plans, limits and configurations.

Importing this needs Triton.
"""

from __future__ import annotations

import sys

from mtpc.backends.triton_kernels.operator import Operator
from mtpc.ops import members

OPERATORS = members(sys.modules[__name__], Operator)
"""Every operator that has Triton kernels, by its name."""

"""Passes of the cpu backend; `mtpc.backends.pipeline` has their places.

Importing one declares the operators that they emit.
"""

import mtpc.backends.cpu.ops  # noqa: F401

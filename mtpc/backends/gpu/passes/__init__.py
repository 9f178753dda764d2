"""Passes of GPU backends; `mtpc.backends.pipeline` has their places.

Importing one declares the operators that they emit.
"""

import mtpc.backends.gpu.ops  # noqa: F401

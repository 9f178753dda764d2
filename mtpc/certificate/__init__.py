"""The checker of certificates: a proof, from a step's listing, that requests do not mix.

It proves that what a step emits and keeps for a request depends on the request's own tokens,
parameters and state, and on weights, and that no order of sums depends on the number of rows. It
imports nothing of mtpc and believes no type that it reads: its rules are its own, and what has no
rule proves nothing. docs/certificate.md has the theorem, and what it rests on.
"""

from mtpc.certificate.checker import RefusedError
from mtpc.certificate.file import Certificate, CertificateError, prove
from mtpc.certificate.rules import types_of

__all__ = ["Certificate", "CertificateError", "RefusedError", "prove", "types_of"]

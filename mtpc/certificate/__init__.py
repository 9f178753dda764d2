"""A proof, from a step's listing alone, that requests do not mix: docs/certificate.md."""

from mtpc.certificate.checker import RefusedError
from mtpc.certificate.file import Certificate, CertificateError, prove
from mtpc.certificate.rules import types_of

__all__ = ["Certificate", "CertificateError", "RefusedError", "prove", "types_of"]

"""What commands show of certificates."""

from __future__ import annotations

import gzip

from mtpc.backends.package import TAPE
from mtpc.certificate import Certificate, CertificateError
from mtpc.cli.tables import print_table, say
from mtpc.program.step_cache import CERTIFICATE
from mtpc.store.entries import Entry


def print_certificate(certificate: Certificate, title: str) -> None:
    """Print the verdict, and each line with its type."""
    rows = [
        (line[0], line[1], kind)
        for line, kind in zip(certificate.lines, certificate.types, strict=False)
        if line[1] != "get"
    ]
    if rows:
        print_table(f"{title}: every line's type", ("line", "operator", "type"), rows)
    say(f"{title}: {verdict(certificate)}")


def verdict(certificate: Certificate) -> str:
    """One line that says whether a step is certified."""
    if certificate.refusal is not None:
        return f"no certificate: {certificate.refusal}"
    return "certified: a request's tokens depend on nothing of another request"


def check_certificate(entry: Entry) -> tuple[bool | None, str]:
    """Prove an entry's certificate again. Returns whether the step is certified, None if its
    certificate does not hold; and a line on it."""
    try:
        certificate = Certificate.decode(entry.read(CERTIFICATE))
        last = max(file for file in entry.files if file.startswith("graph."))
        certificate.check(entry.read(TAPE), gzip.decompress(entry.read(last)).decode())
    except CertificateError as error:
        return None, str(error)
    return certificate.refusal is None, verdict(certificate)

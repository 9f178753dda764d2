"""The file of a certificate: a typed listing, and the tape that it is about."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from mtpc.certificate.checker import RefusedError
from mtpc.certificate.rules import types_of
from mtpc.certificate.tables import KERNELS


class CertificateError(Exception):
    """A certificate does not hold for its step; the message says where."""


@dataclass(frozen=True)
class Certificate:
    """A step's listing and what is proven of it.

    Attributes:
        lines: [name, operator, {argument: value}, shapes, dtypes] each.
        types: of each line; none if nothing is proven.
        refusal: the operator by which nothing is proven; None if the step is certified.
        tape: SHA-256 of the tape's file; "" where there is none.
        on_gpu: whether elementwise operators have a thread for each element.
    """

    lines: Sequence[Sequence[Any]]
    types: Sequence[str]
    refusal: str | None
    tape: str = ""
    on_gpu: bool = False

    def encode(self) -> bytes:
        """The file's bytes; equal certificates have equal ones."""
        return gzip.compress(json.dumps(vars(self)).encode(), mtime=0)

    @classmethod
    def decode(cls, data: bytes) -> Certificate:
        """Read what `encode` wrote; raises CertificateError if it is something else."""
        try:
            return cls(**json.loads(gzip.decompress(data)))
        except (OSError, EOFError, ValueError, TypeError) as error:
            raise CertificateError(f"it is no certificate: {error}") from error

    def check(self, tape: bytes | None, text: str) -> None:
        """Prove it again, from the lines alone, and compare them with the rest of the artifact.

        Args:
            tape: the file that runs; None where there is none.
            text: of the step's final graph.

        Raises:
            CertificateError: it is not what the checker proves, or it is about another tape.
        """
        if [(line[0], line[1]) for line in self.lines] != _calls(text):
            raise CertificateError("it lists other calls than the step's graph")
        proven = prove(self.lines, tape, self.on_gpu)
        if proven.tape != self.tape:
            raise CertificateError("it is about another tape")
        names = ["the step", *(line[0] for line in self.lines)]
        found, claimed = ([one.refusal, *one.types] for one in (proven, self))
        for name, wanted, said in zip_longest(names, found, claimed):
            if wanted != said:
                raise CertificateError(f"it says that {name} is {said}; proven is: {wanted}")


def prove(
    lines: Sequence[Sequence[Any]], tape: bytes | None = None, on_gpu: bool = False
) -> Certificate:
    """The certificate of a listing, or the operator by which there is none.

    The tape of a step on a CPU says which operators go through PyTorch's dispatcher. It must call
    the listing's kernels in the listing's order.
    """
    digest = "" if tape is None else hashlib.sha256(tape).hexdigest()
    try:
        types = types_of(lines, () if tape is None else _dispatched(lines, tape), on_gpu)
    except RefusedError as error:
        return Certificate(lines, (), str(error), digest, on_gpu)
    return Certificate(lines, types, None, digest, on_gpu)


def _calls(text: str) -> list[tuple[str, str]]:
    """Names and operators of the lines of a graph's text, as a listing has them."""
    found = []
    for name, kind, target in re.findall(r"^%(\w+).*? = (function|get_attr) (\S+)", text, re.M):
        space, _, op = target.partition("(")[0].partition(".")
        op = f"{space}::{op}" if not space.startswith("mtpc_") else op.partition(".")[0]
        op = "getitem" if target.startswith("<built-in") else op
        found.append((name, "get" if kind == "get_attr" else op))
    return found


def _dispatched(lines: Sequence[Sequence[Any]], tape: bytes) -> set[str]:
    """ATen's operators that a tape calls; refuses other kernels than the listing's."""
    entries = json.loads(tape)["entries"]
    kernels = [entry[1] for entry in entries if entry[0] == "kernel"]
    listed = [line[1] for line in lines if line[1] in KERNELS]
    for number, (found, wanted) in enumerate(zip_longest(kernels, listed)):
        if found and found not in KERNELS:
            raise RefusedError(f"{found} has no rule")
        if found != wanted:
            raise RefusedError(f"kernel {number} of the tape is {found}, not {wanted}")
    return {f"{entry[1]}.{entry[2] or 'default'}" for entry in entries if entry[0] == "aten"}

"""Artifacts carry certificates; commands show them, and a step without one says so."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.families import TINY

import mtpc
from mtpc.backends.package import TAPE
from mtpc.certificate import Certificate
from mtpc.cli.main import main
from mtpc.program.step_cache import CERTIFICATE
from mtpc.store.entries import Entry, EntryStore
from mtpc.store.lookup import keep, key_of

OPTIONS = {**TINY, "spec_tokens": 0, "batch_buckets": (2,), "dtype": "bfloat16", "backend": "cpu"}


def _entries(store: EntryStore) -> list[Entry]:
    found = [store.read(digest) for digest in store.digests()]
    return [entry for entry in found if entry is not None and CERTIFICATE in entry.files]


def test_artifacts_carry_certificates(
    checkpoint: Callable[..., Path], cpu_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two steps that are certified, the same without packed weights, and one that is forged."""
    store, before = EntryStore(cpu_cache), {e.digest for e in _entries(EntryStore(cpu_cache))}
    spec = mtpc.compile(checkpoint("mimo"), **OPTIONS, cache_dir=cpu_cache)
    assert spec.stats.fallbacks == {}
    whole = [entry for entry in _entries(store) if entry.digest not in before]
    assert len(whole) == 2
    for entry in whole:
        certificate = Certificate.decode(entry.read(CERTIFICATE))
        assert certificate.refusal is None
        texts = [name for name in entry.files if name.startswith("graph.")]
        text = gzip.decompress(entry.read(max(texts))).decode()
        certificate.check(entry.read(TAPE), text)

    other = {**OPTIONS, "disabled_passes": ("pack-weights",), "cache_dir": cpu_cache}
    for _ in range(2):  # Built, and from the cache.
        (line,) = {
            line.split(":", 1)[1]
            for line in mtpc.compile(checkpoint("mimo"), **other).stats.fallbacks
        }
        assert "aten::linear" in line

    assert main(["cache", "verify", "--cache-dir", str(cpu_cache)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.count("no certificate: aten::linear") == 2
    assert "steps are certified" in printed

    files = {name: whole[0].read(name) for name in whole[0].files if name != "key.json"}
    found = Certificate.decode(files[CERTIFICATE])
    forged = Certificate(found.lines[:-1], found.types[:-1], None, found.tape)
    files |= {CERTIFICATE: forged.encode()}
    entry = keep(store, {**key_of(whole[0]), "forged": "1"}, files)
    assert main(["cache", "verify", "--cache-dir", str(cpu_cache)]) == 1
    assert "forged: " in capsys.readouterr().out
    store.remove(entry.digest)


def test_inspect_prints_every_type(
    checkpoint: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--certificate", "--dtype", "bfloat16", "--spec-tokens", "0", "--max-len", "64"]
    assert main(["inspect", str(checkpoint("mimo")), *words, "--batch", "2"]) == 0
    printed = capsys.readouterr().out
    assert "decode[R=2,Q=1,K=0], cpu: certified" in " ".join(printed.split())
    assert "rms_norm" in printed
    assert main(["inspect", str(checkpoint("mimo")), *words, "--after", "canonicalise"]) == 2

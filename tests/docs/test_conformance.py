"""docs/conformance.md is what its script writes, and names tests and files that are there."""

from __future__ import annotations

import re

from helpers import conformance
from helpers.places import ROOT, TESTS


def test_the_page_is_the_scripts() -> None:
    page = (ROOT / "docs" / "conformance.md").read_text()
    assert page == conformance.page(), "cd tests && python -m helpers.conformance > ../docs/..."


def test_what_it_names_is_there() -> None:
    for row in conformance.rows():
        assert row.met in ("yes", "partly", "no")
        assert bool(row.tests) or row.met == "no", row.says
        assert row.how or row.met == "yes", row.says
        for test in row.tests:
            path, _, name = test.partition("::")
            source = (TESTS / path).read_text()
            assert path.startswith("peers/") or f"\ndef {name}(" in source, test
        for path in re.findall(r"`(mtpc/[\w/.]+)`", row.how):
            assert (ROOT / path).is_file(), path

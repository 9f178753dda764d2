"""The table of families in docs/certificate.md: `python -m certificate.families` in tests/.

With names of families it makes their rows alone.
"""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

from helpers import tiny
from helpers.families import ASSISTED, DRAFTED, EVERY_FAMILY
from helpers.listings import Listings
from helpers.places import ROOT

from mtpc.certificate import prove

PAGE = ROOT / "docs" / "certificate.md"
FAMILIES = (*EVERY_FAMILY, *DRAFTED, *ASSISTED)
PART = re.compile(r"(?<=<!-- families -->\n).*(?=<!-- /families -->)", re.DOTALL)


def row(family: str, refusals: dict[str, str | None]) -> str:
    """A family's line: certified, or by which operator it is not."""
    found = {re.sub(r" \(\w+\)", "", text) for text in refusals.values() if text}
    verdict = "yes" if not found else "no: " + "; ".join(sorted(found))
    return f"| {family} | {verdict} |"


def main() -> None:
    kept = {line.split(" | ")[0]: line for line in PAGE.read_text().splitlines()}
    rows = ["| family | certified |", "|---|---|"]
    for family in FAMILIES:
        if sys.argv[1:] and family not in sys.argv[1:]:
            rows += [kept[f"| {family}"]] if f"| {family}" in kept else []
            continue
        with tempfile.TemporaryDirectory() as name:
            tiny.make_checkpoint(family, Path(name), mtp=True)
            steps = Listings(Path(name))
            refusals = {
                phase: prove(steps[phase].lines, steps[phase].tape).refusal
                for phase in ("decode", "prefill")
            }
        rows.append(row(family, refusals))
        print(rows[-1], flush=True)
    PAGE.write_text(PART.sub("\n".join(rows) + "\n", PAGE.read_text()))


if __name__ == "__main__":
    main()

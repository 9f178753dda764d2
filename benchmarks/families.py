"""What is shown for each family of models, by the test behind each cell.

    python -m benchmarks.families                              # the tests alone, some minutes
    python -m benchmarks.families --vllm-python VENV/bin/python   # and vLLM on the same checkpoints
    python -m benchmarks.families --vllm-python ... --vllm-requests 40   # 2,000 steps and more

A cell says "yes" where the test behind it passed, "no" where it failed, and "-" where there is no
such test. A server's cell says "not run" where no run of that server is in the record.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks import ROOT
from benchmarks.harness import command
from benchmarks.harness.results import Record, Table, add_result_files, publish

FAMILIES = (
    "mimo",
    "glm4_moe",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "deepseek_v3",
    "deepseek_v32",
    "deepseek_v4",
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
    "step3p5",
    "step3p7",
    "mimo_v2",
    "ernie4_5_moe",
    "exaone_moe",
    "nemotron_h",
)
_STEP3P5 = "models/test_step3p5.py"
_RECURRENT = "models/test_recurrent.py"
TESTS: dict[str, tuple[str, dict[str, str]]] = {
    "released names": (
        "models/test_wiring.py::test_rows_equal_the_released_wiring[{family}]",
        {},
    ),
    "text = plain": (
        "test_theorem.py::test_speculative_output_equals_plain_decoding[{family}-3]",
        {
            "step3p5": f"{_STEP3P5}::test_speculative_output_equals_plain_decoding[3]",
            "qwen3_5": f"{_RECURRENT}::test_speculative_output_equals_plain_decoding[qwen3_5-3]",
            "qwen3_5_moe": (
                f"{_RECURRENT}::test_speculative_output_equals_plain_decoding[qwen3_5_moe-2]"
            ),
        },
    ),
    "drafts = the wiring": (
        "models/test_drafts.py::test_drafts_equal_the_wiring[{family}-trained]",
        {
            "step3p5": f"{_STEP3P5}::test_partial_acceptance_and_drafts",
            "qwen3_5": f"{_RECURRENT}::test_drafts_equal_the_released_names[qwen3_5]",
            "qwen3_5_moe": f"{_RECURRENT}::test_drafts_equal_the_released_names[qwen3_5_moe]",
        },
    ),
    "drafts = transformers": (
        "models/test_drafts.py::test_drafts_equal_transformers_mtp[{family}-trained]",
        {},
    ),
    "model object": (
        "models/test_objects.py::test_an_object_decodes_as_its_directory[{family}]",
        {},
    ),
}
"""Column -> the test of a family, below tests/, and those with other names."""
VLLM = "text and drafts = vLLM"
SGLANG = "text and drafts = SGLang"
COLUMNS = ("family", *TESTS, VLLM, SGLANG)
NOTES = (
    "released names: every row of every MTP layer equals plain code over the released tensor names",
    "text = plain: the theorem at K = 3 (K = 2 for qwen3_5_moe)",
    "drafts = the wiring: drafts after each step equal an oracle that shares no code with mtpc",
    "drafts = transformers: the same against transformers' own `MtpModel`, where it has the family",
    f"{VLLM}: tests/peers/vllm_agreement.py, K = 0, 1, 3; with the drafts that both accept at K=1 "
    "of those made. *: bfloat16's rounding decides some prompts, which are not counted",
    f"{SGLANG}: no command compares them; tests/peers/sglang_plugin.py runs mtpc inside SGLang",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tests and print the table; exit status 1 if one failed."""
    args = _parse(argv)
    tell = command.teller()
    known = _collected()
    tests = {
        (family, column): test
        for family in FAMILIES
        for column in TESTS
        for test in [test_of(family, column)]
        if test in known
    }
    tell(f"run {len(set(tests.values()))} tests")
    passed = _run(sorted(set(tests.values())))
    rows = []
    for family in FAMILIES:
        cells = {c: tests.get((family, c)) for c in TESTS}
        row: dict[str, Any] = {"family": family, "tests": cells}
        row["passed"] = {c: test in passed for c, test in cells.items() if test is not None}
        if args.vllm_python:
            tell(f"{family} in vLLM")
            row["vllm"] = _beside_vllm(args, family)
            row["passed"][VLLM] = row["vllm"] and row["vllm"]["passed"]
        rows.append(row)
    publish("families", args, {"rows": rows}, table)
    return int(not all(p is not False for row in rows for p in row["passed"].values()))


def test_of(family: str, column: str) -> str:
    """The test behind a cell, whether there is one of that name or not."""
    usual, others = TESTS[column]
    return others.get(family, usual.format(family=family))


def table(record: Record) -> Table:
    """A record's table."""
    words = {True: "yes", False: "no"}
    unknown = {column: "not run" if column in (VLLM, SGLANG) else "-" for column in COLUMNS}
    cells = [
        [row["family"], *(words.get(row["passed"].get(c), unknown[c]) for c in COLUMNS[1:])]
        for row in record["rows"]
    ]
    for row, line in zip(record["rows"], cells, strict=True):
        if row.get("vllm"):
            line[COLUMNS.index(VLLM)] += _accepted(row["vllm"]["counts"])
    return Table("Families", COLUMNS, cells, NOTES)


def _collected() -> set[str]:
    """The names of all tests."""
    listing = _pytest("--collect-only", "-n", "0", "tests/models", "tests/test_theorem.py")
    lines = listing.stdout.splitlines()
    return {line.removeprefix("tests/") for line in lines if "::" in line}


def _run(tests: Sequence[str]) -> set[str]:
    """Run tests; returns those that passed."""
    with tempfile.TemporaryDirectory() as kept:
        report = Path(kept) / "report.xml"
        _pytest("--junitxml", str(report), *(f"tests/{test}" for test in tests))
        cases = list(ElementTree.parse(report).iter("testcase"))
    return {
        f"{case.attrib['classname'].removeprefix('tests.').replace('.', '/')}.py::"
        f"{case.attrib['name']}"
        for case in cases
        if not any(child.tag in ("failure", "error", "skipped") for child in case)
    }


def _pytest(*options: str) -> subprocess.CompletedProcess[str]:
    """Run pytest in the repository, slow tests included."""
    line = [sys.executable, "-m", "pytest", "-m", "", *options]
    return subprocess.run(line, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def _beside_vllm(args: argparse.Namespace, family: str) -> dict[str, Any] | None:
    """Whether vLLM emits and accepts the same, and the counts; None where it cannot run."""
    vllm = ("--vllm-python", str(args.vllm_python.absolute()))
    work = ("--requests", str(args.vllm_requests), "--new-tokens", "100")
    line = [sys.executable, "tests/peers/vllm_agreement.py", *vllm, "--families", family, *work]
    done = subprocess.run(line, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    lines = done.stdout.splitlines()
    if not lines or not lines[-1].startswith("{"):
        return None
    return {"passed": done.returncode == 0, "counts": json.loads(lines[-1])}


def _accepted(counts: dict[str, dict[str, Any]]) -> str:
    """What a cell adds: drafts accepted at K = 1."""
    (found,) = (count for name, count in counts.items() if name.endswith("K=1"))
    rounded = "*" if any(count["rounding"] for count in counts.values()) else ""
    return f"{rounded}, {found['accepted'][0]} of {found['drafted']}"


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command.new_parser("families", __doc__)
    parser.add_argument("--vllm-python", type=Path, metavar="VENV/bin/python")
    help_ = "prompts of 100 new tokens for each K"
    parser.add_argument("--vllm-requests", type=command.positive, default=4, help=help_)
    add_result_files(parser)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())

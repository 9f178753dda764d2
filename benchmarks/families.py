"""A table of what the tests show for each family of models.

    python -m benchmarks.families                              # only the tests, some minutes
    python -m benchmarks.families --vllm-python VENV/bin/python     # and vLLM, same checkpoints
    python -m benchmarks.families --sglang-python VENV/bin/python   # and SGLang
    python -m benchmarks.families ... --resume RECORD...        # only what these records lack
    python -m benchmarks.families ... --resume RECORD --families mimo   # measures mimo again

Each cell has a test. It says "yes" if the test passed, "no" if it failed, and "-" if there is no
such test. A server's cell says "refused" if the server does not run the family on a CPU, and "not
run" if the record has no run of that server. The record is written after each family. Parts that
another commit or another machine measured are named below the table.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks import ROOT
from benchmarks.harness import command
from benchmarks.harness.bench import Benchmark, Run
from benchmarks.harness.machine import describe_machine, describe_versions
from benchmarks.harness.rounds import Tell
from benchmarks.harness.tables import Record, Row, Table
from mtpc import models

FAMILIES = (*(family.name for family in models.FAMILIES), "llama", "qwen2", "qwen3")
"""The last five have drafters of their own: Gemma 4's assistants, and EAGLE-3 heads."""
_STEP3P5 = "models/test_step3p5.py"
_RECURRENT = "models/test_recurrent.py"
_IMAGES = "models/test_images.py"
_EAGLE3 = "models/test_eagle3.py::test_drafts_equal_the_authors_code"
TESTS: dict[str, tuple[str, dict[str, str]]] = {
    "released names": (
        "models/test_wiring.py::test_rows_equal_the_released_wiring[{family}]",
        {
            "gemma4": "models/test_gemma4.py::test_released_names[gemma4]",
            "gemma4_unified": "models/test_gemma4.py::test_released_names[gemma4_unified]",
            "llama": f"{_EAGLE3}[llama-8-changes1]",
            "qwen2": f"{_EAGLE3}[qwen2-7-changes2]",
            "qwen3": f"{_EAGLE3}[qwen3-7-changes0]",
        },
    ),
    "text = plain": (
        "test_theorem.py::test_speculative_output_equals_plain_decoding[{family}-3]",
        {
            "step3p5": f"{_STEP3P5}::test_speculative_output_equals_plain_decoding[3]",
            "qwen3_5": f"{_RECURRENT}::test_speculative_output_equals_plain_decoding[qwen3_5-3]",
            "qwen3_5_moe": (
                f"{_RECURRENT}::test_speculative_output_equals_plain_decoding[qwen3_5_moe-2]"
            ),
            "glm4v_moe": f"{_IMAGES}::test_text_is_transformers[glm4v_moe-3]",
        },
    ),
    "drafts = the wiring": (
        "models/test_drafts.py::test_drafts_equal_the_wiring[{family}-trained]",
        {
            "step3p5": f"{_STEP3P5}::test_partial_acceptance_and_drafts",
            "qwen3_5": f"{_RECURRENT}::test_drafts_equal_the_released_names[qwen3_5]",
            "qwen3_5_moe": f"{_RECURRENT}::test_drafts_equal_the_released_names[qwen3_5_moe]",
            "glm4v_moe": f"{_IMAGES}::test_drafts_after_images[glm4v_moe]",
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
"""Column -> the name of a family's test below tests/, and tests with other names."""
SERVERS = {"vllm": "text and drafts = vLLM", "sglang": "text and drafts = SGLang"}
"""Server -> its column. `tests/peers/SERVER_agreement.py` fills its cells."""
WITHOUT_PEERS = {
    "vllm": ("glm4v_moe", "qwen4_exp", "gemma4_unified"),
    "sglang": ("glm4v_moe", "qwen4_exp", "gemma4", "gemma4_unified", "llama", "qwen2", "qwen3"),
}
"""Server -> the families for which its program in tests/peers makes no checkpoint."""
SPEC_TOKENS = {"vllm": (1, 3), "sglang": (3,)}
"""Server -> the K of its runs."""
COLUMNS = ("family", *TESTS, *SERVERS.values())
NOTES = (
    "released names: every row of every MTP layer equals plain code over the released tensor names",
    "released names of an EAGLE-3 head (llama, qwen2, qwen3): its drafts equal a page after the "
    "authors' source",
    "text = plain: the theorem at K = 3 (K = 2 for qwen3_5_moe)",
    "drafts = the wiring: drafts after each step equal an oracle that shares no code with mtpc",
    "drafts = transformers: the same against transformers' own `MtpModel`, where it has the family",
    f"{SERVERS['vllm']}: tests/peers/vllm_agreement.py, K = 1 and 3, request by request; steps "
    "with drafts, and drafts accepted at each position at K = 3. *: bfloat16's rounding decides "
    "some requests, which are not counted. vLLM's own drafts of gemma4 have another position than "
    "transformers'; here they have transformers'",
    f"{SERVERS['sglang']}: tests/peers/sglang_agreement.py, K = 3, the same",
)


def measure(run: Run) -> Iterator[list[Row]]:
    """Run the tests, and the servers beside them; the run fails if one failed."""
    args = run.args
    rows: dict[str, Row] = {f: {"family": f, "commits": {}} for f in FAMILIES}
    for path in args.resume:
        record = json.loads(path.read_text())
        for row in record["rows"]:
            _take(rows[row["family"]], row, record["machine"]["cpu"])
    for family in args.families or ():
        rows[family]["commits"] = {}
    commit = describe_versions()["commit"]
    untested = [row for row in rows.values() if "tests" not in row["commits"]]
    _test(untested, run.tell)
    for row in untested:
        row["commits"]["tests"] = commit
    yield list(rows.values())
    for server in SERVERS:
        beside = [row for family, row in rows.items() if family not in WITHOUT_PEERS[server]]
        for row in beside:
            if getattr(args, f"{server}_python") and server not in row["commits"]:
                run.tell(f"{row['family']} in {server}")
                row[server] = _beside(args, server, row["family"])
                row["commits"][server] = commit
                yield []  # The rows are written again.
    run.failed = any(False in _outcomes(row).values() for row in rows.values())


def _take(into: dict[str, Any], row: dict[str, Any], cpu: str) -> None:
    """Copy the parts of a row that another record has, and name its processor if it is another."""
    where = "" if cpu == describe_machine()["cpu"] else f" on {cpu}"
    for part, commit in row["commits"].items():
        into["commits"][part] = commit if " on " in commit else commit + where
        into[part] = row[part]
    if "tests" in row["commits"]:
        into["passed"] = row["passed"]


def _test(rows: list[dict[str, Any]], tell: Tell) -> None:
    """Run the tests, and add their results to the rows of the families."""
    known = _collected() if rows else set()
    for row in rows:
        named = {column: test_of(row["family"], column) for column in TESTS}
        row["tests"] = {column: test for column, test in named.items() if test in known}
    tests = sorted({test for row in rows for test in row["tests"].values()})
    tell(f"run {len(tests)} tests")
    passed = _run(tests) if tests else set()
    for row in rows:
        row["passed"] = {column: test in passed for column, test in row["tests"].items()}


def test_of(family: str, column: str) -> str:
    """The name of a cell's test, which may not exist."""
    usual, others = TESTS[column]
    return others.get(family, usual.format(family=family))


def table_of(record: Record) -> Table:
    """A record's table."""
    words = {True: "yes", False: "no", None: "-"}
    cells, refusals, others = [], [], defaultdict(list)
    for row in record["rows"]:
        outcomes = _outcomes(row)
        tested = [words[outcomes.get(column)] for column in TESTS]
        cells.append([row["family"], *tested, *(_cell(row, server) for server in SERVERS)])
        for server, column in SERVERS.items():
            found = row.get(server, {})
            if said := found.get("refused"):
                refusals.append(f"{row['family']}, {column}, refused: {said}")
            elif why := _drafts_differ(found):
                refusals.append(f"{row['family']}, {column}: {why}")
        for part, commit in row.get("commits", {}).items():
            if commit != record["versions"]["commit"]:
                others[commit].append(f"{row['family']} ({part})")
    made = [f"made by commit {commit}: {', '.join(parts)}" for commit, parts in others.items()]
    return Table("Families", COLUMNS, cells, (*NOTES, *refusals, *made))


def _cell(row: dict[str, Any], server: str) -> str:
    """A server's cell."""
    found = row.get(server)
    if found is None:
        return "-" if row["family"] in WITHOUT_PEERS[server] else "not run"
    if "refused" in found:
        return "refused"
    if _drafts_differ(found):
        return f"text {'yes' if _agree(found) else 'no'}, drafts no"
    return f"{'yes' if _agree(found) else 'no'}: {_counts(found)}"


def _drafts_differ(found: dict[str, Any]) -> str:
    """Why a server makes other drafts, if only its texts were compared."""
    return next((str(c["drafts_differ"]) for c in found.values() if "drafts_differ" in c), "")


def _agree(found: dict[str, Any]) -> bool:
    """Whether all requests agree."""
    return not any(counts["differ"] for counts in found.values())


def _outcomes(row: dict[str, Any]) -> dict[str, bool]:
    """The result of each cell of a row that has run."""
    ran = {column: row[server] for server, column in SERVERS.items() if server in row}
    agree = {column: _agree(found) for column, found in ran.items() if "refused" not in found}
    return row["passed"] | agree


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


def _beside(args: Any, server: str, family: str) -> dict[str, Any]:
    """Compare a server's answers with mtpc's for each K; or the reason why it `refused`."""
    python = getattr(args, f"{server}_python").absolute()
    requests = getattr(args, f"{server}_requests")
    line = [sys.executable, f"tests/peers/{server}_agreement.py", f"--{server}-python", python]
    line += ["--families", family, "--requests", str(requests), "--new-tokens", "100"]
    line += ["--spec-tokens", *map(str, SPEC_TOKENS[server])]
    done = subprocess.run(line, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    *_, last = done.stdout.splitlines() or [""]
    if not last.startswith("{"):
        raise SystemExit(f"{server}_agreement.py failed on {family}")
    return dict(json.loads(last)[family])


def _counts(found: dict[str, dict[str, Any]]) -> str:
    """The additional text of a server's cell: steps, and acceptance by position."""
    drafting = {int(name.removeprefix("K=")): c for name, c in found.items() if c["drafted"]}
    steps = {k: counts["drafted"] // k for k, counts in drafting.items()}
    if not steps:
        return "no request to count"
    most = max(steps)
    shares = (f"{n / steps[most]:.0%}" for n in drafting[most]["accepted"])
    rounded = "*" if any(counts["rounding"] for counts in found.values()) else ""
    return f"{sum(steps.values()):,} steps{rounded}, {' '.join(shares)}"


_PYTHON: dict[str, Any] = dict(type=Path, metavar="VENV/bin/python")
_REQUESTS = command.NUMBER | dict(help="prompts of 100 new tokens for each K")
BENCHMARK = Benchmark(
    "families",
    __doc__,
    measure,
    table_of,
    command.RESULTS,
    options={
        "--vllm-python": _PYTHON,
        "--vllm-requests": _REQUESTS | dict(default=28),
        "--sglang-python": _PYTHON,
        "--sglang-requests": _REQUESTS | dict(default=8),
        "--resume": dict(
            nargs="+",
            type=Path,
            default=[],
            metavar="RECORD",
            help="records whose parts are kept; of one that several have, the last one's",
        ),
        "--families": dict(
            nargs="+",
            choices=FAMILIES,
            metavar="FAMILY",
            help="with --resume: make these anew",
        ),
    },
)
main, table = BENCHMARK.commands(__name__)

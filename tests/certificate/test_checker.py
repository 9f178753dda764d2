"""The checker proves what is true of real steps, and refuses what was planted or forged."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from certificate import planted_drafts, planted_windows
from certificate.families import FAMILIES, PAGE, row
from certificate.planted import DFLASH2, PLANTED, earlier_rows
from helpers.listings import Edit, Listings
from torch.nn import functional as F

from mtpc.certificate import Certificate, CertificateError, RefusedError, prove, tables, types_of
from mtpc.ops import references
from mtpc.ops.signatures import written_by
from mtpc.ops.traits import traits_of

Steps = Callable[[str], Listings]
BOTH = ("decode", "prefill")


@pytest.mark.parametrize(
    ("family", "phases"),
    [
        ("mimo", BOTH),
        ("glm4_moe", BOTH),
        ("mimo_v2", BOTH[1:]),
        ("deepseek_v4", BOTH[1:]),
        *(pytest.param(name, BOTH, marks=pytest.mark.slow) for name in FAMILIES),
    ],
)
def test_families_are_certified(family: str, phases: tuple[str, ...], steps: Steps) -> None:
    """In bfloat16; docs/certificate.md has each family's line."""
    refusals = {}
    for phase in phases:
        step = steps(family)[phase]
        found = prove(step.lines, step.tape)
        refusals[phase] = found.refusal
        if found.refusal is None:
            read = Certificate.decode(found.encode())
            assert read.types == found.types
            read.check(step.tape, step.text)
    assert row(family, refusals) in PAGE.read_text().splitlines()
    assert not any(refusals.values())


@pytest.mark.parametrize("phase", BOTH)
def test_a_budget_and_convolutions_are_certified(phase: str, steps: Steps) -> None:
    """Which drafts are verified depends on all requests; what is emitted does not."""
    step = steps(DFLASH2)[phase]
    found = prove(step.lines, step.tape)
    assert found.refusal is None
    types = dict(zip((line[0] for line in step.lines), found.types, strict=True))
    counts = Edit(step.lines).find("aten::cumsum.default")[2]["self"]
    assert types[counts[1:]].startswith("any" if phase == "decode" else "own")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["glm4_moe", planted_windows.V4, planted_windows.QWEN4])
def test_steps_of_one_row_are_certified(family: str, checkpoint: Callable[..., Path]) -> None:
    """There, a number of one row and a column of numbers have shapes alike."""
    steps = Listings(checkpoint(family, "random"), batch_buckets=(1,), spec_tokens=0)
    for phase in BOTH:
        assert prove(steps[phase].lines, steps[phase].tape).refusal is None


def test_sixty_dependences_are_planted() -> None:
    families = {family for family, *_ in PLANTED.values()}
    assert {planted_drafts.DFLASH2, planted_windows.V4} < families
    assert len(PLANTED) >= 60


SLOW = {planted_windows.QWEN4: pytest.mark.slow}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=SLOW.get(family, ())) for name, (family, *_) in PLANTED.items()],
)
def test_planted_dependences_are_refused(name: str, steps: Steps) -> None:
    """By the checker alone: the tape is not read."""
    family, phase, plant = PLANTED[name]
    lines = steps(family)[phase].lines
    edit = Edit.of(lines)
    plant(edit)
    assert edit.lines != lines
    with pytest.raises(RefusedError):
        types_of(edit.lines)


def test_equal_steps_are_not_refused(steps: Steps) -> None:
    """What plants are made of is not what is refused: edits that mix no rows are certified."""
    edit = Edit.of(steps("mimo")["prefill"].lines)
    line = edit.find("aten::embedding.default")
    shape, dtype = line[3][0], line[4][0]
    follower = edit.lines[edit.lines.index(line) + 1]
    args = {"self": f"%{line[0]}", "dim": 2, "dtype": None}
    softmax = edit.add(follower, "aten::softmax.int", args, shape, dtype)
    edit.redirect(f"%{line[0]}", softmax, follower)
    earlier_rows(edit)
    assert len(types_of(edit.lines)) == len(edit.lines)


# ---- Certificates that were edited by hand -----------------------------------------------------


def _forged(steps: Steps, forge: Callable[[Edit, list[str]], None]) -> Certificate:
    step = steps("mimo")["decode"]
    found = prove(step.lines, step.tape)
    edit, types = Edit.of(step.lines), list(found.types)
    forge(edit, types)
    return replace(found, lines=edit.lines, types=types)


def _weaken(edit: Edit, types: list[str]) -> None:
    at = next(n for n, kind in enumerate(types) if kind.startswith("own"))
    types[at] = types[at].replace("own", "const")


def _worsen(edit: Edit, types: list[str]) -> None:
    at = next(n for n, kind in enumerate(types) if kind.startswith("own"))
    types[at] = types[at].replace("own", "any")


def _rename(edit: Edit, types: list[str]) -> None:
    edit.find("rms_norm")[1] = "silu_and_mul"


def _rename_aten(edit: Edit, types: list[str]) -> None:
    edit.find("aten::cos.default")[1] = "aten::erfinv.default"


def _drop_write(edit: Edit, types: list[str]) -> None:
    at = next(n for n, line in enumerate(edit.lines) if line[1] == "count_tokens")
    del edit.lines[at], types[at]


def _drop_value(edit: Edit, types: list[str]) -> None:
    at = next(n for n, line in enumerate(edit.lines) if line[1] == "aten::mul.Tensor")
    del edit.lines[at], types[at]


def _drop_last_write(edit: Edit, types: list[str]) -> None:
    del edit.lines[-1], types[-1]


def _drop_type(edit: Edit, types: list[str]) -> None:
    types.pop()


def _swap(edit: Edit, types: list[str]) -> None:
    """Two kernels trade places."""
    names = ("count_tokens", "write_logprobs")
    calls = [number for number, line in enumerate(edit.lines) if line[1] in names]
    one, other = calls[:2]
    for table in (edit.lines, types):
        table[one], table[other] = table[other], table[one]


@pytest.mark.parametrize(
    "forge",
    [
        _weaken,
        _worsen,
        _rename,
        _rename_aten,
        _drop_write,
        _drop_last_write,
        _drop_value,
        _drop_type,
        _swap,
    ],
)
def test_forged_certificates_do_not_hold(
    forge: Callable[[Edit, list[str]], None], steps: Steps
) -> None:
    forged = _forged(steps, forge)
    with pytest.raises(CertificateError):
        forged.check(steps("mimo")["decode"].tape, steps("mimo")["decode"].text)


def test_a_certificate_is_about_one_tape(steps: Steps) -> None:
    """Another step's tape, or one in which a function goes through PyTorch's dispatcher."""
    step = steps("mimo")["decode"]
    found = prove(step.lines, step.tape)
    with pytest.raises(CertificateError, match="another tape"):
        found.check(steps("mimo")["prefill"].tape, step.text)
    value = json.loads(step.tape)
    value["entries"].append(["aten", "aten::cos", "", [], [], []])
    tape = json.dumps(value).encode()
    assert "aten::cos.default" in (prove(step.lines, tape).refusal or "")
    with pytest.raises(CertificateError):
        found.check(tape, step.text)


def test_what_is_no_certificate_is_refused() -> None:
    for data in (b"", b"{}", Certificate((), (), None).encode()[:-3]):
        with pytest.raises(CertificateError):
            Certificate.decode(data)
    assert prove([]).refusal is not None


# ---- What the checker believes of operators ----------------------------------------------------


@pytest.mark.parametrize("name", sorted(tables.KERNELS))
def test_kernels_are_as_they_declare(name: str) -> None:
    """The checker's table agrees with the traits, which it does not read."""
    op = references()[name]
    traits = traits_of(op)
    rows, features = tables.KERNELS[name]
    assert set(rows) <= set(traits.rows.split()) | set(traits.requests.split())
    is_by_request = name in ("accept", "count_tokens", "write_logprobs")
    assert is_by_request or {*traits.rows.split()} <= {*rows, *tables.OWNED}
    assert features == (-1 if traits.features is None else traits.features) or features == -1
    held = {*written_by(op)} - {"x"}
    assert held == {*tables.WRITES.get(name, ())}
    assert traits.reach != "request" or name in tables.WHOLE | tables.ANCHORED
    assert ("anchors" in traits.requests.split()) == (name in tables.ANCHORED)
    assert traits.reach in ("row", "earlier", "request")


ROW_BY_ROW: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    lambda x: x.softmax(-1),
    lambda x: F.layer_norm(x, x.shape[-1:]),
    lambda x: torch.stack([x, -x, x / 2], 1).softmax(1, dtype=torch.float32),
)


def test_rows_are_taken_one_by_one() -> None:
    """PyTorch's softmax and layer_norm along dimensions behind the rows, alone and in company."""
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.bfloat16, torch.float32):
        for size in (4, 9, 40, 257):
            x = 3 * torch.randn(37, size, generator=generator).to(dtype)
            for function in ROW_BY_ROW:
                together = function(x)
                for count in (1, 3):
                    parts = [function(part.clone()) for part in x.split(count)]
                    assert torch.equal(together, torch.cat(parts))


def test_certificates_name_no_path(steps: Steps, checkpoint: Callable[..., Path]) -> None:
    text = json.dumps(steps("mimo")["decode"].lines)
    assert str(checkpoint("mimo", "random")) not in text

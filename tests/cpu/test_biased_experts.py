"""The kernel of experts with biases on codes: float64, the reference, rows, memory and refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.batches import mixture
from helpers.compiled import run_on
from helpers.grouped import Packed, random_weight
from torch import Tensor

from mtpc.backends.cpu_kernels import load_kernels
from mtpc.weights.grouped import GroupedWeight, GroupForm

load_kernels()
OURS, REFERENCE = torch.ops.mtpc_cpu, torch.ops.mtpc
EXPERTS, HIDDEN, INNER = 6, 288, 96
GATE = (3.0, 1.7)
"""Limit and alpha."""


def mxfp4(*shape: int) -> Packed:
    """Random codes, and exponents that make weights about 1 / sqrt(K)."""
    gen = torch.Generator().manual_seed(shape[-1])
    codes = torch.randint(0, 16, shape, generator=gen, dtype=torch.uint8)
    groups = (*shape[:-1], shape[-1] // 32)
    exponents = torch.randint(121, 125, groups, generator=gen, dtype=torch.uint8)
    return Packed(GroupedWeight(GroupForm("e2m1", 32), codes, exponents), shape[-2])


WEIGHTS = {
    "mxfp4": (mxfp4(EXPERTS, 2 * INNER, HIDDEN), mxfp4(EXPERTS, HIDDEN, INNER)),
    "int4": (
        random_weight("int4", (EXPERTS, 2 * INNER, HIDDEN), 32),
        random_weight("int4", (EXPERTS, HIDDEN, INNER), 96),
    ),
}


def call(kind: str, tokens: int, dtype: torch.dtype) -> dict[str, Any]:
    """Arguments of the operator by name; biases of all experts and features differ."""
    mix, (wide, narrow) = mixture(tokens, (EXPERTS, HIDDEN, INNER), dtype), WEIGHTS[kind]
    gen = torch.Generator().manual_seed(tokens)
    names = ("gate_up", "gate_up_scales", "gate_up_bias", "down", "down_scales", "down_bias")
    biases = [torch.randn(EXPERTS, n, generator=gen).bfloat16() for n in (2 * INNER, HIDDEN)]
    parts = (*wide.parts[:2], biases[0], *narrow.parts[:2], biases[1])
    choices = {"expert_ids": mix.ids, "expert_weights": mix.weights}
    held = dict(zip(names, parts, strict=True))
    return {"x": mix.x * 8, **held, **choices, "limit": GATE[0], "alpha": GATE[1]}


def rows(given: dict[str, Any], which: slice) -> dict[str, Any]:
    """The call for some rows."""
    by_row = ("x", "expert_ids", "expert_weights")
    return given | {name: given[name][which] for name in by_row}


def exact(kind: str, given: dict[str, Any]) -> Tensor:
    """The values in float64, row by row."""
    wide, narrow = (made.weight.dequantise().double() for made in WEIGHTS[kind])
    out = torch.zeros(given["x"].shape, dtype=torch.float64)
    for row, (x, ids) in enumerate(zip(given["x"].double(), given["expert_ids"], strict=True)):
        for weight, expert in zip(given["expert_weights"][row].double(), ids.tolist(), strict=True):
            both = wide[expert] @ x + given["gate_up_bias"][expert].double()
            gate, up = both[0::2].clamp(max=GATE[0]), both[1::2].clamp(-GATE[0], GATE[0])
            active = (up + 1) * gate / (1 + torch.exp(-GATE[1] * gate))
            out[row] += weight * (narrow[expert] @ active + given["down_bias"][expert].double())
    return out


@pytest.mark.parametrize("kind", WEIGHTS)
def test_values(kind: str) -> None:
    """As the reference's, but for what is rounded to another integer; near those of float64."""
    given = call(kind, 13, torch.float32)
    found, wanted = OURS.grouped_biased_experts(**given), exact(kind, given)
    expected = REFERENCE.grouped_biased_experts(**given)
    assert float((found - expected).norm()) <= 2e-3 * float(expected.norm())
    assert float((found.double() - wanted).norm()) <= 4e-2 * float(wanted.norm()) > 0


@pytest.mark.parametrize("kind", WEIGHTS)
def test_rows_do_not_depend_on_rows(kind: str) -> None:
    given = call(kind, 21, torch.bfloat16)
    together = OURS.grouped_biased_experts(**given)
    with run_on(2):
        assert torch.equal(OURS.grouped_biased_experts(**given), together)
    for row in range(21):
        one = slice(row, row + 1)
        assert torch.equal(OURS.grouped_biased_experts(**rows(given, one)), together[one])
    dirty = given["x"].clone()
    dirty[17:] = torch.nan
    some = {**given, "x": dirty, "rows": torch.tensor([17])}
    assert torch.equal(OURS.grouped_biased_experts(**some)[:17], together[:17])


def test_plain_weights_are_those_of_codes() -> None:
    """`biased_experts` on dequantised stacks, which have inputs first."""
    given = call("mxfp4", 9, torch.float64)
    stacks = (made.weight.dequantise().double().mT for made in WEIGHTS["mxfp4"])
    plain = dict(zip(("gate_up", "down"), stacks, strict=True))
    biases = {name: given[name].double() for name in ("gate_up_bias", "down_bias")}
    kept = ("x", "expert_ids", "expert_weights", "limit", "alpha")
    others = {name: given[name] for name in kept}
    found = REFERENCE.biased_experts(**plain, **biases, **others)
    torch.testing.assert_close(found, exact("mxfp4", given), rtol=1e-9, atol=1e-9)


def test_schemas_and_fakes() -> None:
    tests = ("test_schema", "test_faketensor")
    given = call("mxfp4", 3, torch.bfloat16)
    for namespace in (OURS, REFERENCE):
        op = namespace.grouped_biased_experts.default
        torch.library.opcheck(op, (), given, test_utils=tests)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("x", lambda t: t[:, :256], "do not fit 256 inputs"),
        ("gate_up", lambda t: t[0], "packed stacks"),
        ("gate_up_bias", lambda t: t[:, 1:], r"expected biases \[6, 192\] and \[6, 288\]"),
        ("down_bias", lambda t: t[1:], r"expected biases \[6, 192\] and \[6, 288\]"),
        ("down_scales", lambda t: t[:, :1], "do not fit 96 inputs"),
        ("expert_ids", lambda t: t[:2], "must be"),
    ],
)
def test_misfits_are_refused(name: str, change: Any, message: str) -> None:
    given = call("mxfp4", 3, torch.bfloat16)
    with pytest.raises(RuntimeError, match=message):
        OURS.grouped_biased_experts(**given | {name: change(given[name])})

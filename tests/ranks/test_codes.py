"""Weights in groups on ranks: each holds its slices of the codes and scales that one rank has."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers.batches import bf16
from helpers.families import TINY
from helpers.grouped import Zeros, random_weight
from helpers.plans import plan_of
from helpers.tiny import make_checkpoint
from torch import Tensor, fx

from mtpc.backends import make_backend
from mtpc.capture.graph import StepGraph, arguments, operators
from mtpc.errors import OptionError
from mtpc.models.load import load
from mtpc.passes.quantise_draft import draft_spec
from mtpc.program.compiler import StepCompiler
from mtpc.ranks.group import Ranks
from mtpc.weights.grouped import (
    GroupedWeight,
    GroupForm,
    Kind,
    form_of,
    unpack_codes,
    unpack_scales,
)
from mtpc.weights.grouped_recipes import GroupSpec, make_grouped, rows_of
from mtpc.weights.quantise import SCHEMES, quantise, quantised_rows, spec_by_scheme
from mtpc.weights.recipes import (
    Grouped,
    Join,
    Recipe,
    Rows,
    make,
    names,
    part_spec,
    spec_of,
)
from mtpc.weights.write_quantised import quantise_checkpoint

OPS = torch.ops.mtpc


@pytest.mark.parametrize(
    ("form", "runs", "group"),
    [
        (GroupForm("int4", 32), ((32, 64),), 32),
        (GroupForm("int4", 32), ((48, 96),), 16),
        (GroupForm("int8", 96), ((0, 24), (48, 72)), 24),  # A scale a row.
        (GroupForm("int4", 32, True), ((0, 52),), None),  # Half a word of codes.
    ],
)
def test_a_cut_through_groups(
    form: GroupForm, runs: tuple[tuple[int, int], ...], group: int | None
) -> None:
    """Groups that are cut become smaller ones, which must fill words; other cuts change none."""
    spec, recipe = GroupSpec(form, "bfloat16"), Rows(runs, "w", -1)
    assert spec_of(recipe, {"w": spec}) == (spec if group else None)
    assert spec_of(Rows(runs, "w", 1), {"w": spec}) == spec
    if group:
        assert part_spec(Join("stack", (recipe, recipe)), spec).form == replace(form, group=group)


@pytest.mark.parametrize(
    ("kind", "group", "zeros"),
    [("int4", 32, "zeros"), ("int4", 32, "mins"), ("int8", 96, ""), ("float8", 32, "")],
)
def test_slices_have_the_values_of_the_whole(kind: Kind, group: int, zeros: Zeros) -> None:
    """Rows, inputs and rows of each matrix of a stack; of stored codes, and of rounded weights."""
    matrix = random_weight(kind, (40, 96), group, zeros=zeros).weight
    stack = random_weight(kind, (3, 40, 96), group, zeros=zeros).weight
    plain = {name: w.dequantise() for name, w in {"m": matrix, "s": stack}.items()}
    spec = GroupSpec(matrix.form, "float16")
    stored = {"m": rows_of(matrix), "s": rows_of(stack)}
    recipes: list[Recipe] = [
        Rows(((48, 96),), "m", -1),
        Rows(((24, 48), (72, 96)), "m", -1),
        Rows(((32, 64),), "s", -1),
        Rows(((5, 9), (20, 30)), "s", 1),
        Join("stack", (Rows(((48, 96),), Rows(((3, 9),), "m"), -1),) * 2),
    ]
    symmetric = replace(spec, form=GroupForm(spec.form.kind, spec.form.group))
    rounded = {name: quantise(w, symmetric).dequantise() for name, w in plain.items()}
    for recipe in recipes:
        found = make_grouped(recipe, spec, lambda name, _: stored[name]).whole()
        assert torch.equal(found.dequantise(), make(recipe, plain.__getitem__))
        assert found.form == part_spec(recipe, spec).form
        made = make_grouped(recipe, symmetric, lambda name, s: quantised_rows(plain[name], s))
        assert torch.equal(made.whole().dequantise(), make(recipe, rounded.__getitem__))


def test_what_scales_do_not_need_is_not_read() -> None:
    """A rank reads its own groups only, if none is cut; a scale of a row needs the whole row."""
    weight = bf16(40, 96)
    weight[:, :48], weight[:8] = math.nan, math.nan
    for scheme, inputs, is_own in (("int4-g32", 64, True), ("int4-g32", 48, False),
                                   ("int8", 64, False)):  # fmt: skip
        spec = SCHEMES[scheme].spec(96, weight.dtype)
        assert spec is not None
        part = Rows(((inputs, 96),), Rows(((8, 40),), "w"), -1)
        made = make_grouped(part, spec, lambda name, s: quantised_rows(weight, s)).whole()
        assert bool(made.dequantise().isfinite().all()) is is_own


def compiler(
    directory: Path, scheme: str | None, rank: int, placing: str = "pack-groups"
) -> StepCompiler:
    """That of one of two ranks, which builds steps without the other; a pass places codes."""
    loaded = load(str(directory), "bfloat16", True)
    options = plan_of(
        spec_tokens=1, batch_buckets=(2,), quantize=scheme, enabled_passes=(placing,), **TINY
    )
    return StepCompiler(loaded, options, make_backend("eager"), ranks=Ranks(rank, 2, "0"))


def codes_read(graph: StepGraph) -> list[tuple[Recipe, Tensor]]:
    """Each weight that the products of a step read as codes: its recipe, and its values."""

    def weight(held: list[fx.Node | None]) -> tuple[Recipe, Tensor]:
        codes, scales, *zeros = (graph.weights[str(n.target)] for n in held if n is not None)
        assert held[0] is not None
        recipe = graph.weights.recipes[str(held[0].target)]
        assert isinstance(recipe, Grouped)
        *_, features, inputs = make(recipe.part, graph.weights.__getitem__).shape
        form = form_of(inputs, codes, scales, zeros[0] if zeros else None)
        assert form == part_spec(recipe.part, recipe.spec).form
        points = [unpack_scales(each, features) for each in zeros]
        plain = unpack_codes(codes, form.kind, features)
        whole = GroupedWeight(form, plain, unpack_scales(scales, features), *points)
        return recipe.part, whole.dequantise()

    found = []
    for node, op in operators(graph.graph):
        given = list(arguments(node).values())
        if op is OPS.grouped_experts.default:
            found += [weight(given[1:4]), weight(given[4:7])]
        elif op.overloadpacket.__name__.startswith("grouped"):
            found.append(weight(given[1:4]))
    return found


@pytest.mark.parametrize(
    ("family", "scheme", "is_stored"),
    [
        ("mimo", "int8", False),
        *(
            pytest.param(family, scheme, stored, marks=pytest.mark.slow)
            for family in ("mimo", "glm4_moe")
            for scheme in ("int4-g32", "int8", "fp8")  # A cut of mimo goes through groups of 32.
            for stored in (False, True)
            if (family, scheme, stored) != ("mimo", "int8", False)
        ),
    ],
)
def test_each_rank_has_its_part_of_the_codes(
    family: str, scheme: str, is_stored: bool, tmp_path: Path
) -> None:
    """The values are the slices of what one rank has: of every linear and of experts."""
    changes = {} if family == "mimo" else {"moe_intermediate_size": 64}
    directory = make_checkpoint(family, tmp_path / "plain", **changes)
    if is_stored:
        plain, directory = directory, tmp_path / "stored"
        quantise_checkpoint(plain, directory, scheme)
    weights = load(str(directory), "bfloat16", True).weights()

    def values(name: str) -> Tensor:
        if is_stored:  # Which are dequantised here.
            return weights[name].detach()
        spec = SCHEMES[scheme].spec(weights[name].shape[-1], torch.bfloat16)
        assert spec is not None
        return quantise(weights[name].detach(), spec).dequantise()

    seen = set()
    for rank in (0, 1):
        built = compiler(directory, None if is_stored else scheme, rank)
        for recipe, found in codes_read(built.rewritten(built.keys[0])):
            expected = make(recipe, values)
            assert torch.equal(found.to(expected.dtype), expected)
            seen |= {(rank, name) for name in names(recipe)}
            if family == "mimo" and "down_proj" in str(recipe):
                assert isinstance(recipe, Rows)
                assert (recipe.runs, recipe.dim) == (((48 * rank, 48 * rank + 48),), -1)
    both = {name for name in weights if {(0, name), (1, name)} <= seen}
    rounded = {name for name, w in weights.items() if spec_by_scheme(scheme, name, w) is not None}
    assert both == rounded - ({"lm_head.weight"} if is_stored else set())
    assert len(both) > 15


def test_drafts_have_the_scales_of_whole_rows(checkpoint: Callable[..., Path]) -> None:
    """With quantise-draft, which rounds the MTP layer's matrices and its use of the head."""
    built = compiler(checkpoint("mimo", "random"), None, 1, "quantise-draft")
    weights, seen = built.loaded.weights(), set()

    def values(name: str) -> Tensor:
        spec = draft_spec(weights[name])
        assert spec is not None
        return quantise(weights[name].detach(), spec).dequantise()

    for recipe, found in codes_read(built.rewritten(built.keys[0])):
        assert torch.equal(found, make(recipe, values))
        seen |= {*names(recipe)}
    assert {"mtp.0.block.self_attn.o_proj.weight", "lm_head.weight"} <= seen
    assert not any(name.startswith("model.layers") for name in seen)


def test_experts_that_kernels_cannot_read_are_refused(checkpoint: Callable[..., Path]) -> None:
    """One rank rounds these experts, and a rank with 16 of their features could not."""
    built = compiler(checkpoint("glm4_moe", "random"), "int8", 0)
    wanted = r"'int8', and a rank has 16 of the 32 inputs of model\.layers\.1\.mlp\.experts\.down"
    with pytest.raises(OptionError, match=wanted + r".* a multiple of 32, .*fewer ranks"):
        built.rewritten(built.keys[0])

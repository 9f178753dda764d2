"""Weights in groups: their recipes, the pass that places them, and the theorem on them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.batches import bf16
from helpers.families import TINY
from helpers.grouped import pack_codes
from helpers.modelopt import write_nvfp4
from helpers.plans import plan_of
from helpers.theorem import PROMPTS
from helpers.whole_steps import compiler_of

import mtpc
from mtpc.backends.eager import EagerBackend
from mtpc.capture.graph import operators
from mtpc.config import SCHEMES as NAMES
from mtpc.errors import OptionError
from mtpc.layout import StepKey
from mtpc.models.load import load
from mtpc.weights import grouped_recipes, recipes
from mtpc.weights.checkpoint import Checkpoint
from mtpc.weights.grouped import VALUES, GroupedWeight, GroupForm, pack_scales
from mtpc.weights.grouped_recipes import GroupedRows, GroupSpec, rows_of
from mtpc.weights.packing import Packer
from mtpc.weights.quantise import SCHEMES, quantise, spec_by_scheme
from mtpc.weights.recipes import Grouped, Held, Join, Rows, make_all
from mtpc.weights.rounding import Grid
from mtpc.weights.write_quantised import quantise_checkpoint

OPS = torch.ops.mtpc
SPECS = [
    GroupSpec(GroupForm("int4", 32, True), "bfloat16"),
    GroupSpec(GroupForm("int8", 64), "float32"),
    GroupSpec(GroupForm("int4", 32, has_mins=True), "float32"),
    GroupSpec(GroupForm("float8", 32), "float16"),
]


def weight(spec: GroupSpec, *shape: int, seed: int = 0) -> GroupedWeight:
    """Random codes, scales and zero points."""
    torch.manual_seed(seed)
    form, groups = spec.form, shape[-1] // spec.form.group
    most = 16 if form.kind == "int4" else 256
    codes = torch.randint(0, most, shape).to(torch.uint8)
    if form.kind == "float8":
        codes = torch.randn(shape).to(torch.float8_e4m3fn)
    scales = torch.rand(*shape[:-1], groups).to(getattr(torch, spec.scales))
    zeros = torch.randint(0, most, scales.shape).to(torch.uint8)
    of = {0: None, 1: zeros, 2: most * torch.rand_like(scales)}
    return GroupedWeight(form, codes, scales, of[form.has_zeros + 2 * form.has_mins])


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    raw = one.view(torch.uint8), other.view(torch.uint8)
    return one.dtype == other.dtype and torch.equal(*raw)


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("at_once", [32 * 64, 1 << 20])
def test_codes_are_joined_as_they_are(
    spec: GroupSpec, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Joined rows, rows taken, stacks of matrices, and rows of stacks; and through JSON.

    A tile's rows at a time, and all of them.
    """
    monkeypatch.setattr(grouped_recipes, "_AT_ONCE", at_once)
    a, b, c, d = (weight(spec, rows, 64, seed=rows) for rows in (70, 40, 32, 33))
    e, f = (weight(spec, 3, rows, 64, seed=rows) for rows in (32, 40))
    known = dict(zip("abcdef", (a, b, c, d, e, f), strict=True))
    cases: list[tuple[recipes.Recipe, Callable[[Any], Any]]] = [
        ("a", lambda t: t("a")),
        (Join("cat", ("a", "b", "c")), lambda t: torch.cat([t("a"), t("b"), t("c")])),
        (Rows(((3, 40), (41, 42)), "a"), lambda t: torch.cat([t("a")[3:40], t("a")[41:42]])),
        (
            Join("stack", (Join("cat", ("c", "b")), Join("cat", ("b", "c")))),
            lambda t: torch.stack([torch.cat([t("c"), t("b")]), torch.cat([t("b"), t("c")])]),
        ),
        (Join("cat_rows", ("e", "f")), lambda t: torch.cat([t("e"), t("f")], 1)),
    ]

    def form(name: str) -> torch.Tensor:
        return torch.empty(known[name].codes.shape)

    class Codes(Held):
        def codes(self, part: recipes.Recipe, spec: GroupSpec) -> GroupedRows:
            return rows_of(known[str(part)])

    source = Codes(form)
    for part, of in cases:
        shape = list(of(lambda name: known[name].codes.view(torch.uint8)).shape)
        for piece in spec.pieces:

            def raw(name: str, piece: Any = piece) -> torch.Tensor:
                tensor = getattr(known[name], piece)
                return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor

            dtype = getattr(a, piece).dtype
            expected = of(raw).view(dtype)
            pack = pack_scales if piece != "codes" else lambda t: pack_codes(t, spec.form.kind)
            recipe = Grouped(piece, spec, part)
            found = make_all(recipe, source, Packer())[recipe]
            assert same(found, pack(expected)), (part, piece)
            memory = recipes.allocate(recipe, form)
            assert (memory.shape, memory.dtype) == (found.shape, found.dtype)
            assert recipes.from_json(recipes.to_json(recipe)) == recipe
        assert shape[-1] == 64
    assert recipes.spec_of(Join("cat", ("a", "b")), {"a": spec, "b": spec}) == spec
    assert recipes.spec_of(Join("cat", ("a", "b")), {"a": spec}) is None


@pytest.mark.parametrize("name", NAMES)
def test_scales_have_the_least_error_of_many(name: str) -> None:
    """Less than by ten others for all, for each group than by the usual one; zeros stay zeros."""
    plain = torch.cat([bf16(20, 256), bf16(20, 256, seed=1) ** 3, torch.zeros(1, 256).bfloat16()])
    plain[3, 7] = 40  # An outlier.
    spec = SCHEMES[name].spec(256, plain.dtype)
    assert spec is not None
    found = quantise(plain, spec)
    assert not found.dequantise()[40].any()
    form, wide = found.form, plain.float().unflatten(-1, (-1, found.form.group))
    error = (found.dequantise().view(wide.shape) - wide).square().sum(-1)
    if form.kind == "float8":
        assert bool(
            (found.dequantise() - plain.float()).abs().le(plain.float().abs() / 16 + 1e-2).all()
        )
        return
    grid = Grid(form.kind)
    largest = wide.abs().amax(-1, keepdim=True)
    if form.kind in VALUES:  # Its numbers differ on both sides of zero, so the sign counts.
        largest = wide.gather(-1, wide.abs().argmax(-1, keepdim=True))
    for factor in (*torch.linspace(0.6, 1.2, 10).tolist(), 1.0):
        scale = largest / grid.ends[1] * factor
        scale = scale.to(found.scales.dtype).float()
        numbers = grid.nearest(wide, torch.where(scale == 0, 0, 1 / scale))
        other = (numbers * scale - wide).square().sum(-1)
        assert float(error.sum()) <= float(other.sum())
    assert bool((error <= other * 1.0001).all())  # Of each group, by the usual scale.


def test_schemes_are_those_of_the_options() -> None:
    assert tuple(SCHEMES) == NAMES
    with pytest.raises(
        OptionError, match=r"'int4_g32' \(the nearest is 'int4-g32'\); expected one"
    ):
        plan_of(quantize="int4_g32")


def test_the_pass_takes_linears_and_experts(checkpoint: Callable[..., Path]) -> None:
    """All but embeddings, routers and the MTP layer's joint; q, k and v become one."""
    options = dict(spec_tokens=1, batch_buckets=(2,), quantize="int4-g32", **TINY)
    compiler = compiler_of(checkpoint("glm4_moe"), "float32", EagerBackend(), **options)
    graph = compiler.rewrite(compiler.trace(StepKey.decode(2, 1)))
    calls = list(operators(graph.graph))
    plain = {str(n.args[1]) for n, op in calls if op is torch.ops.aten.linear.default}
    assert all("gate_weight" in name or "projection" in name for name in plain), plain
    assert OPS.experts.default not in [op for _, op in calls]
    assert OPS.grouped_experts.default in [op for _, op in calls]
    held = {str(n.target) for n in graph.graph.nodes if n.op == "get_attr"}
    joined = "+".join(f"model_layers_0_self_attn_{p}_proj_weight" for p in "qkv")
    assert {f"grouped.{joined}.codes", f"grouped.{joined}.scales"} <= held
    assert "grouped.lm_head_weight.codes" in held


def test_a_file_holds_what_a_scheme_rounds_to(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Every matrix but the head; experts, which are written one by one, and the MTP layer."""
    quantise_checkpoint(checkpoint("glm4_moe"), tmp_path / "out", "int4-g32")
    plain, written = (
        load(path, None, needs_mtp=True).weights()
        for path in (checkpoint("glm4_moe"), tmp_path / "out")
    )
    seen = set[str]()
    for name, weight in plain.items():
        spec = spec_by_scheme("int4-g32", name, weight)
        if spec is None or name == "lm_head.weight":
            continue
        wanted = quantise(weight.detach(), spec).dequantise()
        assert torch.equal(written[name].detach().to(wanted.dtype), wanted), name
        seen.add("experts" if ".experts." in name else name.split(".")[0])
    assert seen == {"experts", "model", "mtp"}


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["int4-g32", "fp8"])
def test_in_memory_as_in_a_file(
    checkpoint: Callable[..., Path], scheme: str, tmp_path: Path
) -> None:
    """A scheme rounds to what `mtpc quantize` writes; experts one by one, and the MTP layer."""
    options = dict(backend="eager", spec_tokens=1, batch_buckets=(2,), quantize=scheme, **TINY)
    plain = checkpoint("glm4_moe")
    written = quantise_checkpoint(plain, tmp_path / "out", scheme)
    assert sum(written.quantised.values()) > 20
    assert "lm_head.weight" in written.plain
    specs = Checkpoint(tmp_path / "out").specs
    assert {name for name in specs if "experts.0." in name}
    found, expected = (mtpc.compile(path, **options) for path in (tmp_path / "out", plain))
    assert found.generate(PROMPTS[3:6], 12) == expected.generate(PROMPTS[3:6], 12)
    assert found.stats.accepted == expected.stats.accepted


EACH = [("mimo", "int4-g32"), ("mimo", "nvfp4")] + [
    pytest.param(family, scheme, marks=pytest.mark.slow)
    for family in ("mimo", "glm4_moe", "deepseek_v3", "qwen3_next")
    for scheme in ("int4-g32", "int8", "fp8")
    if (family, scheme) != ("mimo", "int4-g32")
]


@pytest.mark.parametrize(("family", "scheme"), EACH)
def test_the_theorem_on_codes(
    family: str, scheme: str, checkpoint: Callable[..., Path], cpu_cache: Path, tmp_path: Path
) -> None:
    """Speculation changes no token, nor does the batch; on the cpu backend, from the files' codes.

    Nor do chunks and K, in the slow run. mimo's MTP layer stays plain, as some exporters leave it.
    """
    keep = ("*mtp_layers*",) if family == "mimo" else ()
    if scheme == "nvfp4":
        write_nvfp4(checkpoint(family), tmp_path / "out", keep=("mtp_layers",))
    else:
        quantise_checkpoint(checkpoint(family), tmp_path / "out", scheme, keep=keep)
    common: dict[str, Any] = dict(
        TINY, backend="cpu", dtype="bfloat16", batch_buckets=(4,), cache_dir=cpu_cache
    )
    plain = mtpc.compile(tmp_path / "out", spec_tokens=0, **common)
    spec = mtpc.compile(tmp_path / "out", spec_tokens=3, **common)
    expected = [plain.generate(prompt, 16, ignore_eos=True) for prompt in PROMPTS[2:8]]
    assert [spec.generate(prompt, 16, ignore_eos=True) for prompt in PROMPTS[2:8]] == expected
    assert spec.generate(PROMPTS[2:8], 16, ignore_eos=True) == expected
    assert sum(spec.stats.accepted) > 0
    if scheme == "nvfp4":
        assert not any("dequantised" in line for line in spec.stats.fallbacks)
    if (family, scheme) not in EACH[:2]:
        other = {**common, "spec_tokens": 1, "prefill_chunk": 5, "batch_buckets": (1, 3)}
        one = mtpc.compile(tmp_path / "out", **other)
        assert one.generate(PROMPTS[2:8], 16, ignore_eos=True) == expected

"""Whole steps on the Triton kernels, interpreted, captured on the null device: same tokens.

Needs Triton's interpreter: `tests/run_triton.sh`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.plans import changed
from helpers.triton_here import INTERPRETS, NO_INTERPRETER
from torch import fx

from mtpc.plan import Plan

if not INTERPRETS:
    pytest.skip(NO_INTERPRETER, allow_module_level=True)

from helpers.tapes import op_names
from helpers.triton_steps import (
    EACH_FAMILY,
    EACH_STEP,
    FAMILIES,
    OPTIONS,
    PROMPTS,
    SLOW,
    compile_on,
)

from mtpc.api import SpecModel
from mtpc.backends.bindings import BindKernels
from mtpc.backends.cuda import CudaBackend
from mtpc.backends.eager import EagerBackend
from mtpc.backends.gpu.passes import fuse_skinny_linears
from mtpc.backends.null import NullGraphs
from mtpc.backends.triton_kernels import NAMESPACES, recurrence, refuses, triton_bindings
from mtpc.backends.triton_kernels.ops import OPERATORS
from mtpc.backends.triton_kernels.plans import step_launches
from mtpc.layout import StepKey
from mtpc.models.load import load
from mtpc.passes import fuse_cache_write, fuse_elementwise, rotary
from mtpc.program.compiler import StepCompiler
from mtpc.sampling_params import SamplingParams

pytestmark = pytest.mark.triton

NORMS = {"rms_norm", "add_rms_norm", "draft_entry"}
FUSED = ("fuse-elementwise", "fuse-draft-entry", "fuse-skinny-linears")


@pytest.mark.parametrize("family", EACH_FAMILY)
def test_steps_on_triton_emit_the_same_tokens(family: str, checkpoint: Callable[..., Path]) -> None:
    """Ragged joins, chunks of a prompt, rejections; the acceptance of each step is the same."""
    _compare(checkpoint(family), OPTIONS, FAMILIES[family])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "kernel"),
    [
        ("nemotron_h", "scan_chunk_state_kernel"),
        ("qwen3_5", "delta_chunk_state_kernel"),
    ],
)
def test_prompts_in_chunks_emit_the_same_tokens(
    family: str, kernel: str, checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of state that rows replace: a prompt in chunks of two steps, and one beside drafts."""
    monkeypatch.setattr(recurrence, "CHUNK", 16)
    monkeypatch.setattr(recurrence, "_LEAST_ROWS", 20)
    prompts = [[41, 8], list(range(3, 40))]
    options = changed(OPTIONS, prefill_chunk=24, max_len=48, num_pages=40)
    ours, theirs = _compare(checkpoint(family), options, FAMILIES[family], prompts=prompts)
    held = {n: t for n, t in theirs.program.shared.items() if t.is_floating_point()}
    assert sum(name.endswith("recurrent") for name in held) >= 1
    for name, wanted in held.items():  # Tokens alone would hide much.
        found, least = ours.program.shared[name][1:], 1e-3 * wanted[1:].abs().max().item()
        torch.testing.assert_close(found, wanted[1:], rtol=1e-3, atol=least, msg=name)
    loaded = load(checkpoint(family), "float32", True)
    backend = CudaBackend(NullGraphs(), EagerBackend().lower, triton_bindings(), device="cpu")
    compiler = StepCompiler(loaded, options, backend)
    with torch.no_grad():
        launches = {
            key.phase: {x.name for x in step_launches(compiler.rewritten(key))}
            for key in compiler.keys
        }
    assert kernel in launches["prefill"]
    assert kernel not in launches["decode"], "decode steps go position by position"


@pytest.mark.slow
@pytest.mark.parametrize("spec_tokens", [0, 1, 4])
def test_steps_of_other_widths(spec_tokens: int, checkpoint: Callable[..., Path]) -> None:
    """Plain decoding, one draft, and four; all other tests have two."""
    # A chunk of which half fits beside drafts, or decoding and prefill take turns; and a prompt
    # of which some is left then.
    options = changed(OPTIONS, spec_tokens=spec_tokens, prefill_chunk=max(6, 2 * spec_tokens + 4))
    prompts = [PROMPTS[0], PROMPTS[0] + PROMPTS[1]]
    _compare(checkpoint("mimo"), options, {"paged_attention"}, prompts=prompts)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "of_layers"), [("mimo", set()), ("glm4_moe", {"experts", "grouped_experts", "topk"})]
)
def test_int8_drafts_are_the_same(
    family: str, of_layers: set[str], checkpoint: Callable[..., Path]
) -> None:
    """The draft's linears, experts and head: what the reference accepts is accepted."""
    options = changed(OPTIONS, enabled_passes=("quantise-draft",))
    _compare(checkpoint(family), options, {"paged_attention", "grouped_linear", *of_layers})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "of_layers"), [("mimo", set()), ("glm4_moe", {"grouped_experts", "topk"})]
)
def test_steps_on_codes_emit_the_same_tokens(
    family: str, of_layers: set[str], checkpoint: Callable[..., Path]
) -> None:
    """Of all linears and experts that a scheme rounds."""
    options, called = changed(OPTIONS, quantize="int4-g32"), {"paged_attention", "grouped_linear"}
    _compare(checkpoint(family), options, {*called, *of_layers}, prompts=PROMPTS[:2], new=3)


@pytest.mark.parametrize(
    ("family", "kind", "spec_tokens"),
    [
        ("mimo", "int8", 2),
        *(
            pytest.param(family, kind, k, marks=pytest.mark.slow)
            for family in ("mimo", "glm4_moe", "mimo_v2", "qwen4_exp")
            for kind in ("int8", "fp8")
            for k in (0, 2)
            if (family, kind, k) != ("mimo", "int8", 2)
        ),
    ],
)
def test_steps_on_pages_of_codes_emit_the_same_tokens(
    family: str, kind: str, spec_tokens: int, checkpoint: Callable[..., Path]
) -> None:
    """Nothing is left to a reference, and codes and scales in the pages are alike."""
    options = changed(OPTIONS, kv_cache_dtype=kind, spec_tokens=spec_tokens)
    expected = FAMILIES.get(family, {"paged_attention"})
    ours, theirs = _compare(checkpoint(family), options, expected)
    held = {n: t for n, t in theirs.program.shared.items() if n.endswith("_scale")}
    assert held
    for name, wanted in held.items():
        found = ours.program.shared[name]
        torch.testing.assert_close(found[1:], wanted[1:], rtol=1e-3, atol=1e-5)
        codes = (p.program.shared[name.removesuffix("_scale")][1:].float() for p in (ours, theirs))
        assert (next(codes) - next(codes)).abs().max() <= (1 if kind == "int8" else 32)
        assert wanted[1:].any()


@torch.no_grad()
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_a_layer_on_codes_has_one_launch_before_attention(
    kind: str, checkpoint: Callable[..., Path]
) -> None:
    """Triton launches what writes float8, which Inductor would copy."""
    loaded = load(checkpoint("glm4_moe"), "bfloat16", True)
    backend = CudaBackend(NullGraphs(), EagerBackend().lower, triton_bindings(), device="cpu")
    compiler = StepCompiler(loaded, changed(OPTIONS, kv_cache_dtype=kind), backend)
    graph = compiler.rewrite(compiler.trace(StepKey.decode(2, 2)))
    called = Counter(str(n.target) for n in graph.graph.nodes)
    library = "mtpc_loaded" if kind == "fp8" else "mtpc_triton"
    writes = called[f"{library}.rotate_and_write.default"]
    assert writes == called["mtpc_triton.paged_attention.default"] > 0
    assert not any("write_cache" in name or name.startswith("mtpc.") for name in called)
    assert not backend.notes


def test_sampled_steps_emit_the_same_tokens(checkpoint: Callable[..., Path]) -> None:
    """Filters, penalties and log-probabilities, a request's own each, in verify and in drafts."""
    options = changed(OPTIONS, sampling=True)
    params = SamplingParams(
        temperature=0.9, top_k=20, top_p=0.95, min_p=0.01, repetition_penalty=1.2, seed=5,
        logit_bias={7: 1.5}, logprobs=2,
    )  # fmt: skip
    others = [SamplingParams(temperature=1.3, seed=9, top_p=0.8), SamplingParams()]
    expected = {"paged_attention", "sample", "count_tokens", "write_logprobs"}
    _compare(checkpoint("mimo"), options, expected, sampling=[params, *others])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "linears"),
    [
        ("mimo", {"skinny_linear", "norm_linear", "silu_and_mul"}),
        ("glm4_moe", {"skinny_linear", "silu_and_mul"}),
        ("qwen3_next", {"skinny_linear"}),
    ],
)
def test_fused_norms_emit_the_same_tokens(
    family: str,
    linears: set[str],
    checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Norms, and linears of few rows. The passes take bfloat16, which the interpreter rounds
    wrongly: here they are told to take float16."""
    for module in (fuse_cache_write, fuse_elementwise, fuse_skinny_linears, rotary):
        monkeypatch.setattr(module, "is_narrow", _is_float16)
    options = changed(OPTIONS, enabled_passes=FUSED)
    expected = FAMILIES.get(family, {"paged_attention"}) | NORMS | linears | {"rotate_and_write"}
    _compare(checkpoint(family), options, expected, dtype="float16")


def _is_float16(node: Any) -> bool:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return isinstance(value, torch.Tensor) and value.dtype == torch.float16


def _compare(
    directory: Path,
    options: Plan,
    expected: set[str],
    dtype: str = "float32",
    prompts: list[list[int]] = PROMPTS,
    new: int = 4,
    **arguments: Any,
) -> tuple[SpecModel, SpecModel]:
    def lower(graph):  # type: ignore[no-untyped-def]
        return EagerBackend().lower(graph)

    graphs = NullGraphs()
    backend = CudaBackend(graphs, lower, triton_bindings(), device="cpu")
    ours = compile_on(directory, backend, options, dtype)
    reference = CudaBackend(NullGraphs(), lower, (), device="cpu")
    theirs = compile_on(directory, reference, options, dtype)
    assert not backend.notes, "everything is bound"
    assert ours.generate(prompts, new, **arguments) == theirs.generate(prompts, new, **arguments)
    assert ours.stats.accepted == theirs.stats.accepted
    assert ours.stats.drafted == theirs.stats.drafted
    assert ours.stats.joined.steps > 0
    called = {name.split(".")[1] for tape in graphs.tapes for name in op_names(tape)
              if name.startswith(NAMESPACES)}  # fmt: skip
    assert "accept" in called
    assert called - EACH_STEP == expected
    assert not any(n.startswith("mtpc.") for tape in graphs.tapes for n in op_names(tape))
    return ours, theirs


@torch.no_grad()
def test_grids_and_constants_are_of_the_bucket_alone(checkpoint: Callable[..., Path]) -> None:
    """No launch knows of lengths: they follow from a traced graph, where there are none."""
    loaded = load(checkpoint("glm4_moe"), "float32", True)
    backend = CudaBackend(NullGraphs(), EagerBackend().lower, triton_bindings(), device="cpu")
    compiler = StepCompiler(loaded, OPTIONS, backend)
    launches = step_launches(compiler.rewrite(compiler.trace(StepKey.decode(2, 2))))
    assert {launch.name for launch in launches} == {
        "write_cache_kernel", "paged_attention_kernel", "combine_kernel",
        "sort_choices_kernel", "expert_gate_up_kernel", "expert_down_kernel", "expert_sum_kernel",
        "accept_kernel", "topk_kernel",
    }  # fmt: skip
    for launch in launches:
        numbers = [v for v in launch.arguments.values() if not isinstance(v, torch.Tensor)]
        assert all(type(value) is int for value in (*launch.grid, *numbers))


@torch.no_grad()
def test_a_layer_in_bfloat16_has_one_launch_before_attention(
    checkpoint: Callable[..., Path],
) -> None:
    """What the backend enables: angles and cache writes are one kernel."""
    loaded = load(checkpoint("glm4_moe"), "bfloat16", True)
    backend = CudaBackend(NullGraphs(), EagerBackend().lower, triton_bindings(), device="cpu")
    compiler = StepCompiler(loaded, OPTIONS, backend)
    launches = step_launches(compiler.rewrite(compiler.trace(StepKey.decode(2, 2))))
    names = [launch.name for launch in launches]
    assert names.count("rotate_and_write_kernel") == names.count("paged_attention_kernel") > 0
    assert "write_cache_kernel" not in names
    assert not backend.notes


@pytest.mark.parametrize(
    "family",
    [
        "mimo",
        *(
            pytest.param(n, marks=SLOW)
            for n in ("glm4_moe", "qwen3_next", "deepseek_v3", "step3p7")
        ),
    ],
)
def test_nothing_that_passes_fuse_is_left_to_references(
    family: str, checkpoint: Callable[..., Path]
) -> None:
    """In bfloat16: norms, entries, activations of joint projections. Linears of few rows would take
    some of these along."""
    for launches in _fused_launches(checkpoint(family), "fuse-skinny-linears"):
        assert launches["draft_entry_kernel"] == 2
        # MiMo's MTP layer is fed from before the target's final norm, which is alone then.
        assert launches["add_rms_norm_kernel"] > 5 - (family == "mimo")
        assert launches["rms_norm_kernel"] > 2
        # Qwen3-Next's layers here are all mixtures; Step-3.7 bounds what it multiplies.
        assert (launches["silu_and_mul_kernel"] > 0) == (family not in ("qwen3_next", "step3p7"))
        assert not launches["rotate_kernel"], "cache writes follow, or other operators turn"


def test_angles_without_cache_writes_have_a_kernel(checkpoint: Callable[..., Path]) -> None:
    """Of half a head. Cache writes are a pass of their own, which may be off."""
    for launches in _fused_launches(checkpoint("glm4_moe"), "fuse-cache-write"):
        assert launches["rotate_kernel"] == launches["write_cache_kernel"] > 0


@torch.no_grad()
def _fused_launches(directory: Path, *disabled: str) -> Iterator[Counter[str]]:
    """Of a decode step and of the longest prompt's, with all that fuses enabled; all is bound."""
    loaded = load(directory, "bfloat16", True)
    backend = CudaBackend(NullGraphs(), EagerBackend().lower, triton_bindings(), device="cpu")
    enabled = (*FUSED, "merge-projections")
    options = changed(OPTIONS, enabled_passes=enabled, disabled_passes=disabled)
    compiler = StepCompiler(loaded, options, backend)
    for key in (StepKey.decode(2, 2), compiler.keys[-1]):
        graph = compiler.rewritten(key)
        assert not backend.notes
        assert not [n for n in graph.graph.nodes if str(n.target).startswith("mtpc.")]
        yield Counter(launch.name for launch in step_launches(graph))


def test_wide_norms_stay_with_the_reference() -> None:
    """A row is held in registers."""
    graph = fx.Graph()
    x, weight = graph.placeholder("x"), graph.placeholder("weight")
    call = graph.call_function(torch.ops.mtpc.rms_norm.default, (x, weight, 1e-6))
    for width, reason in ((16_384, None), (16_392, "rows of 16392; it takes up to 16384")):
        for node, shape in ((x, (2, width)), (weight, (width,))):
            node.meta["val"] = torch.empty(shape, dtype=torch.bfloat16)
        assert refuses(call, None) == reason  # type: ignore[arg-type]


def test_float64_stays_with_the_reference_and_is_noted(checkpoint: Callable[..., Path]) -> None:
    notes: list[str] = []
    loaded = load(checkpoint("mimo"), "float64", True)
    compiler = StepCompiler(loaded, OPTIONS, EagerBackend())
    with torch.no_grad():
        graph = compiler.rewrite(compiler.trace(StepKey.decode(2, 2)))
    assert BindKernels(triton_bindings(), notes.append).apply(graph) == 1, "of integers: accept"
    assert any("mtpc::paged_attention does not run on triton (float64; it" in n for n in notes)
    assert len(OPERATORS) == len({binding.reference for binding in triton_bindings()})

"""Steps of two ranks on the Triton kernels, interpreted, captured on the null device.

Ranks exchange values over gloo, where a GPU would have NCCL. Needs Triton's interpreter:
`tests/run_triton.sh`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.plans import changed
from helpers.triton_here import INTERPRETS, NO_INTERPRETER
from torch import Tensor, fx

from mtpc.plan import Plan

if not INTERPRETS:
    pytest.skip(NO_INTERPRETER, allow_module_level=True)

from helpers import triton_steps
from helpers.forked_ranks import run_ranks
from helpers.mapped_peers import share_mapped
from helpers.oracles import Oracle
from helpers.tapes import op_names
from helpers.triton_steps import EACH_STEP, FAMILIES, OPTIONS

from mtpc.api import SpecModel
from mtpc.backends.cuda import CudaBackend
from mtpc.backends.eager import EagerBackend
from mtpc.backends.gpu.passes import fuse_skinny_linears, lower_choices
from mtpc.backends.null import NullGraphs
from mtpc.backends.peer_memory import MOST_BYTES, PEERS
from mtpc.backends.triton_kernels import invariantly, triton_bindings
from mtpc.capture.graph import operators
from mtpc.layout import StepKey
from mtpc.models.load import load
from mtpc.ops.collectives import is_collective
from mtpc.passes import fuse_cache_write, fuse_elementwise, rotary
from mtpc.program.compiler import StepCompiler
from mtpc.program.follow import FollowingProgram, LeadingProgram, ranked
from mtpc.ranks.group import Ranks

pytestmark = pytest.mark.triton

PROMPTS = triton_steps.PROMPTS[:2]
NEW, WITHIN_S = 4, 900.0


def generate(
    ranks: Ranks,
    directory: Path,
    spec_tokens: int,
    dtype: str,
    options: Plan = OPTIONS,
    peers: Path | None = None,
) -> dict[str, Any]:
    """What a rank has when rank 0 has generated text.

    Its part of the head counts as wide. The interpreter rounds bfloat16 wrongly: passes that take
    bfloat16 alone take float16 here, too.
    """
    lower_choices.LEAST_ROW_MAX = 16
    if dtype == "float16":
        for module in (fuse_cache_write, fuse_elementwise, fuse_skinny_linears, rotary):
            vars(module)["is_narrow"] = _is_float16
    if peers is not None:
        share_mapped(ranks.rank, ranks.size, ranks.group, peers / "memory")
        ranks = replace(ranks, peer_bytes=MOST_BYTES)
    graphs = NullGraphs()
    backend = CudaBackend(graphs, EagerBackend().lower, triton_bindings(), device="cpu")
    options = changed(options, spec_tokens=spec_tokens)
    loaded = load(directory, dtype, spec_tokens > 0)
    program = ranked(StepCompiler(loaded, options, backend, ranks=ranks).compile(), ranks)
    texts: list[list[int]] = []
    accepted = 0
    if isinstance(program, LeadingProgram):
        spec = SpecModel(loaded.served(), options, program)
        texts = spec.generate(PROMPTS, NEW, ignore_eos=True)
        accepted = sum(spec.stats.accepted)
        spec.close()
    else:
        assert isinstance(program, FollowingProgram)
        program.follow()
    return {
        "flags": PEERS[ranks.group].flags[0].tolist() if peers else [],
        "texts": texts,
        "accepted": accepted,
        "notes": dict(backend.notes),
        "called": {name for tape in graphs.tapes for name in op_names(tape)},
        "tokens": program.shared["state.token_ids"].tolist(),
        "passes": {
            done.name
            for step in program.steps.values()
            for done in (step.graph.history if step.graph else ())
            if done.rewrites
        },
    }


def check(
    directory: Path, plain: Oracle, family: str, tmp_path: Path, dtype: str = "float32"
) -> list[dict[str, Any]]:
    """Text of K = 0 and of K = 3 is that of plain decoding; what the ranks of K = 3 have."""
    wanted = [plain.generate(prompt, NEW, stop=False) for prompt in PROMPTS]
    for spec_tokens in (0, 3):
        directories = tmp_path / str(spec_tokens)
        directories.mkdir()
        body = partial(generate, directory=directory, spec_tokens=spec_tokens, dtype=dtype)
        found = run_ranks(2, directories, body, WITHIN_S)
        assert found[0]["texts"] == wanted
        assert not any(rank["notes"] for rank in found), "everything is bound"
        assert found[0]["tokens"] == found[1]["tokens"]
        assert found[0]["called"] == found[1]["called"]
    assert found[0]["accepted"] > 0
    called = found[0]["called"]
    exchanges = {name.split(".")[1] for name in called if name.startswith("mtpc.")}
    assert exchanges == {"gather_ranks", "rank_part"}
    ours = {name.split(".")[1] for name in called if name.startswith("mtpc_triton.")}
    written = {"rotate_and_write"} if dtype == "float16" else {"write_cache"}
    wanted = FAMILIES.get(family, {"paged_attention"}) | (EACH_STEP - {"write_cache"}) | written
    assert wanted | {"row_max"} <= ours
    assert {"shard", "merge-projections", "spell-collectives"} <= found[0]["passes"]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mimo", "glm4_moe", "deepseek_v3"])
def test_text_is_that_of_plain_decoding(
    family: str,
    checkpoint: Callable[..., Path],
    oracle: Callable[..., Oracle],
    tmp_path: Path,
) -> None:
    """With the passes and kernels of a GPU."""
    check(checkpoint(family), oracle(family), family, tmp_path)


def test_small_exchanges_by_the_memory_of_peers(
    checkpoint: Callable[..., Path], oracle: Callable[..., Oracle], tmp_path: Path
) -> None:
    """Every sum and gather of the steps is; text is that of plain decoding."""
    body = partial(
        generate, directory=checkpoint("mimo"), spec_tokens=1, dtype="float32", peers=tmp_path
    )
    found = run_ranks(2, tmp_path, body, WITHIN_S)
    plain = oracle("mimo")
    assert found[0]["texts"] == [plain.generate(prompt, NEW, stop=False) for prompt in PROMPTS]
    assert found[0]["tokens"] == found[1]["tokens"]
    called = found[0]["called"]
    assert {"mtpc_loaded.sum_ranks.default", "mtpc_loaded.gather_ranks.default"} <= called
    assert {name for name in called if name.startswith("mtpc.")} == {"mtpc.rank_part.default"}
    assert not any(rank["notes"] for rank in found)
    (own, other) = found[0]["flags"]
    assert own == other == found[1]["flags"][0] > 50


@pytest.mark.slow
def test_fused_norms_of_ranks_emit_the_same_tokens(
    checkpoint: Callable[..., Path],
    oracle: Callable[..., Oracle],
    tmp_path: Path,
) -> None:
    """Norms, and linears of few rows."""
    found = check(checkpoint("mimo"), oracle("mimo"), "mimo", tmp_path, "float16")
    ours = {name.split(".")[1] for name in found[0]["called"] if name.startswith("mtpc_triton.")}
    assert {"add_rms_norm", "norm_linear", "skinny_linear"} <= ours


@pytest.mark.slow
def test_codes_and_a_trimmed_head_of_ranks(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Weights and pages as codes, and a trimmed head: the text of one rank, whatever K is.

    Codes of fp8 are dequantised exactly on a GPU, so a rank's part of a row needs no scale.
    """
    options = changed(OPTIONS, quantize="fp8", kv_cache_dtype="int8", draft_vocab=tuple(range(60)))
    backend = CudaBackend(NullGraphs(), EagerBackend().lower, triton_bindings(), device="cpu")
    wanted = triton_steps.compile_on(checkpoint("mimo"), backend, options).generate(
        PROMPTS, NEW, ignore_eos=True
    )
    for spec_tokens in (0, 3):
        directories = tmp_path / str(spec_tokens)
        directories.mkdir()
        body = partial(
            generate,
            directory=checkpoint("mimo"),
            spec_tokens=spec_tokens,
            dtype="float32",
            options=options,
        )
        found = run_ranks(2, directories, body, WITHIN_S)
        assert found[0]["texts"] == wanted
        assert found[0]["called"] == found[1]["called"]
        called = {name for name in found[0]["called"] if "grouped_linear" in name}
        assert {name.partition(".")[0] for name in called} == {"mtpc_triton"}


def _is_float16(node: Any) -> bool:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return isinstance(value, Tensor) and value.dtype == torch.float16


@torch.no_grad()
@pytest.mark.parametrize("invariant", [False, True])
def test_what_a_rank_launches(invariant: bool, checkpoint: Callable[..., Path]) -> None:
    """In bfloat16, on a rank's part: joint projections, fused norms, linears of few rows, experts.

    The passes before and after `shard` find what they find in a whole step.
    """
    loaded = load(checkpoint("glm4_moe"), "bfloat16", True)
    bindings = triton_bindings(invariantly) if invariant else triton_bindings()
    backend = CudaBackend(NullGraphs(), EagerBackend().lower, bindings, "cpu", invariant)
    counts = []
    for ranks in (None, Ranks(0, 2)):
        compiler = StepCompiler(loaded, OPTIONS, backend, ranks=ranks)
        graph = compiler.rewritten(StepKey.decode(2, 0))
        counts.append(Counter(str(op).split(".")[1] for _, op in operators(graph.graph)))
        assert not backend.notes
    whole, part = counts
    targets = [b.target for b in bindings if not is_collective(b.target)]
    names = {str(target.name()).partition("::")[2] for target in targets}
    assert part["gather_ranks"] > 6
    assert {name: n for name, n in whole.items() if name in names} == {
        name: n for name, n in part.items() if name in names
    }
    wanted = {"paged_attention", "rotate_and_write", "experts", "topk", "silu_and_mul", "accept"}
    assert wanted | ({"row_sum"} if invariant else {"skinny_linear", "norm_linear"}) <= {*part}

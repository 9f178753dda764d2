"""`mtpc build --target` of released models, without their weights, for every GPU of AMD's.

Decode steps with drafts, and prompts, as they are bound without aiter. Layers are cut to one of each
kind. Needs Triton, compiling: `tests/run_triton.sh`. Nothing runs.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.plans import plan_of
from helpers.triton_here import COMPILES, NO_COMPILER

if not COMPILES:
    pytest.skip(NO_COMPILER, allow_module_level=True)

from benchmarks.gpu_bound import BATCH, SPEC_TOKENS
from benchmarks.harness.released_shapes import RELEASED
from mtpc.backends.targets import TARGETS
from mtpc.program.build import build_for_targets

pytestmark = pytest.mark.gpu_compile

SPILLS = {"hip:gfx942": 1, "hip:gfx950": 1, "hip:gfx1201": 372}
"""Registers of a thread that may be in memory; RDNA has half of what CDNA has."""
FAST = "Qwen3-Next-80B"


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n == FAST else pytest.mark.slow) for n in RELEASED]
)
def test_its_steps_are_built_for_amd(name: str, tmp_path: Path) -> None:
    """The fast part has one target."""
    tmp_path.chmod(0o755)
    (tmp_path / "model").mkdir()
    model, targets = RELEASED[name], [TARGETS[each] for each in SPILLS]
    model.write(tmp_path / "model")
    plan = plan_of(
        spec_tokens=SPEC_TOKENS if model.has_drafts else 0, batch_buckets=(BATCH,), max_len=4096,
        page_size=16, prefill_chunk=64, sampling=False, token_mask=False, backend="cuda",
        cache_dir=tmp_path / "cache",
    )  # fmt: skip
    used = targets[:1] if name == FAST else targets
    report = build_for_targets(tmp_path / "model", [plan], used)
    assert {key.phase for key in report.launches} == {"decode", "prefill"}
    assert min(report.launches.values()) > 10
    for target in used:
        found = [made for made in report.kernels if made.target == target]
        assert len({made.kernel for made in found}) > 4
        for made in found:
            assert made.resources.shared_bytes <= target.shared_bytes
            assert made.resources.spills <= SPILLS[target.name], made
    # Choices of latent attention for a GPU with more shared memory; all else is built.
    left = [note for note in report.notes if "left out: latent_attention_kernel takes" not in note]
    assert left == []

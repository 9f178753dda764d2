"""`mtpc build --target` of released models, without their weights, for every GPU of AMD's.

Decode steps with drafts, and prompts, as they are bound without aiter. Layers are cut to one of
each kind. Needs Triton, compiling: `tests/run_triton.sh`. Nothing runs.
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

AMD = [name for name, target in TARGETS.items() if target.vendor == "hip"]
FAST = ("Qwen3-Next-80B", "hip:gfx942")


@pytest.mark.parametrize(
    ("name", "target"),
    [
        pytest.param(name, target, marks=[] if (name, target) == FAST else pytest.mark.slow)
        for name in RELEASED
        for target in AMD
    ],
)
def test_its_steps_are_built_for_amd(name: str, target: str, tmp_path: Path) -> None:
    """In a minute each, but DeepSeek-V3's, which takes several. What spills, `test_crosscompile`
    says of each kernel."""
    tmp_path.chmod(0o755)
    (tmp_path / "model").mkdir()
    model, device = RELEASED[name], TARGETS[target]
    model.write(tmp_path / "model")
    plan = plan_of(
        spec_tokens=SPEC_TOKENS if model.has_drafts else 0, batch_buckets=(BATCH,), max_len=4096,
        page_size=16, prefill_chunk=64, sampling=False, token_mask=False, backend="cuda",
        cache_dir=tmp_path / "cache",
    )  # fmt: skip
    report = build_for_targets(tmp_path / "model", [plan], [device])
    assert {key.phase for key in report.launches} == {"decode", "prefill"}
    assert min(report.launches.values()) > 10
    assert len({made.kernel for made in report.kernels}) > 4
    for made in report.kernels:
        assert made.resources.shared_bytes <= device.shared_bytes
    # Choices of latent attention for a GPU with more shared memory; all else is built.
    left = [note for note in report.notes if "left out: latent_attention_kernel takes" not in note]
    assert left == []

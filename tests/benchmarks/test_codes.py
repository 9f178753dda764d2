"""Checkpoints of random codes have the tensors that `mtpc quantize` writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.harness.large import write_codes
from benchmarks.harness.models import SHAPES, write_checkpoint
from mtpc.weights.checkpoint import Checkpoint
from mtpc.weights.write_quantised import quantise_checkpoint


@pytest.mark.parametrize("scheme", ["int4-g32", "int4-g128"])
def test_codes_have_the_names_and_shapes_of_a_quantised_checkpoint(
    scheme: str, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path / "plain", "mimo", SHAPES["tiny"], accepting=False)
    quantise_checkpoint(tmp_path / "plain", tmp_path / "wanted", scheme, head=True)
    write_codes(tmp_path / "found", SHAPES["tiny"], scheme)
    found, wanted = (Checkpoint(tmp_path / name) for name in ("found", "wanted"))
    assert found.specs == wanted.specs
    assert found.specs
    described = ({n: str(t) for n, t in c.stored.items()} for c in (found, wanted))
    assert next(described) == next(described)
    name = next(iter(found.specs))
    assert 0.015 < float(found.grouped(name).whole().dequantise().std()) < 0.025
    ours, theirs = (c.config | {"quantization_config": None} for c in (found, wanted))
    assert all(ours[key] == theirs[key] for key in ours.keys() & theirs.keys())
    assert torch.isfinite(found.tensor("model.embed_tokens.weight")).all()


def test_plain_weights_have_the_names_of_a_checkpoint(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "wanted", "mimo", SHAPES["tiny"], accepting=False)
    write_codes(tmp_path / "found", SHAPES["tiny"], None)
    found, wanted = (Checkpoint(tmp_path / name) for name in ("found", "wanted"))
    described = [{n: str(t) for n, t in c.stored.items()} for c in (found, wanted)]
    assert described[0] == described[1]
    assert "quantization_config" not in found.config

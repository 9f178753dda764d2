"""Checkpoints whose every draft is right, and whose attention and experts decide the text."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from helpers import tiny, uncached

DRAFTS = 3
LOUD = 5.0
"""Initial scale of experts, so that the rest of the model learns to depend on them."""
STEPS = 260
_SUCCESSORS = torch.randperm(94, generator=torch.Generator().manual_seed(7)) + 2


def interleaved_text(num_rows: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """Token rows [B, L]: each token depends on the one before the last, so attention is needed."""
    rows = list(torch.randint(2, 96, (2, num_rows), generator=generator))
    while len(rows) < length:
        rows.append(_SUCCESSORS[rows[-2] - 2])
    return torch.stack(rows, 1)


@torch.enable_grad()
def make_fitted_checkpoint(name: str, directory: Path) -> Path:
    """Train target and MTP layer for half a minute, until both predict `interleaved_text` exactly.

    One MTP layer is recycled for all drafts.
    """
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    target = tiny.build_target(name, **eager)
    (layer,) = tiny.build_mtp_layers(name, target)
    for module in (target, layer):
        for key, weight in module.named_parameters():
            if ".experts." in key:
                weight.data *= LOUD
    optimizer = torch.optim.AdamW([*target.parameters(), *layer.parameters()], lr=5e-3)
    generator = torch.Generator().manual_seed(3)
    for _ in range(STEPS):
        ids = interleaved_text(16, 20, generator)
        logits = uncached.logits_of(target, uncached.target_features(target, ids))[:, 1:-1]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 2:].flatten())
        features = uncached.fed_features(name, target, ids)
        for index in range(DRAFTS):
            rows = ids[:, 1 + index :]
            features = uncached.run_mtp_uncached(name, target, layer, rows, features[:, :-1])
            logits = uncached.logits_of(target, features, layer)[:, :-1]
            loss = loss + nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return tiny.save_checkpoint(name, target.eval(), [layer], directory)


def without(directory: Path, part: str, out: Path) -> Path:
    """A copy of a checkpoint in which the matrices with `part` in their names are zero."""
    out.mkdir()
    (out / "config.json").write_bytes((directory / "config.json").read_bytes())
    tensors = load_file(directory / "model.safetensors")
    zeroed = [name for name in tensors if part in name]
    assert zeroed, part
    tensors |= {name: torch.zeros_like(tensors[name]) for name in zeroed}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out

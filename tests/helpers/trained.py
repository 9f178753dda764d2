"""Checkpoints whose drafts are right: in part after seconds of training, or always."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from helpers import assistant, eagle
from helpers.families import ASSISTED, DRAFTED
from helpers.tiny import (
    build_mtp_layer,
    build_mtp_layers,
    build_target,
    is_norm,
    save_checkpoint,
)
from helpers.uncached import fed_features, logits_of, run_mtp_uncached, target_features
from mtpc.models.hf import MTPLayer


def cyclic_text(num_rows: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """Token rows [B, L], mostly predictable: a fixed successor per token, and 10 % noise."""
    successor = torch.randperm(94, generator=torch.Generator().manual_seed(7)) + 2
    rows = [torch.randint(2, 96, (num_rows,), generator=generator)]
    for _ in range(length - 1):
        noise = torch.randint(2, 96, (num_rows,), generator=generator)
        keep = torch.rand(num_rows, generator=generator) > 0.1
        rows.append(torch.where(keep, successor[rows[-1] - 2], noise))
    return torch.stack(rows, 1)


@torch.enable_grad()
def train(name: str, target: Any, layers: Sequence[MTPLayer], steps: int = 18) -> None:
    """A few seconds of training of target and MTP layers: drafts are then accepted in part.

    It also works under `torch.no_grad`, in which the first test that needs it may run.
    """
    generator = torch.Generator().manual_seed(3)
    parameters = [*target.parameters(), *(p for layer in layers for p in layer.parameters())]
    optimizer = torch.optim.AdamW(parameters, lr=3e-3)
    target.set_attn_implementation("eager")
    for _ in range(steps):
        ids = cyclic_text(8, 24, generator)
        logits = logits_of(target, target_features(target, ids))[:, :-1].flatten(0, 1)
        loss = nn.functional.cross_entropy(logits, ids[:, 1:].flatten())
        features = first = fed_features(name, target, ids)
        for index, layer in enumerate(layers):
            rows = ids[:, 1 + index :]
            if layer.wiring.chaining == "target":
                features = first[:, : rows.shape[1] + 1]
            features = run_mtp_uncached(name, target, layer, rows, features[:, :-1])
            logits = logits_of(target, features, layer)[:, :-1].flatten(0, 1)
            loss = loss + nn.functional.cross_entropy(logits, rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def make_trained_checkpoint(
    name: str,
    directory: Path,
    seed: int = 0,
    drafter: Mapping[str, Any] | None = None,
    **changes: Any,
) -> Path:
    """A checkpoint trained for seconds, so that drafts are accepted in part.

    `changes` are those of the target's config, and `drafter` those of its drafter's.
    """
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    target = build_target(name, seed, **eager, **changes)
    layers = [] if name in (*DRAFTED, *ASSISTED) else build_mtp_layers(name, target, seed + 1)
    with torch.no_grad():
        for layer in layers:
            # In a few seconds, the layer's own head stays close to the target's.
            if layer.head is not None:
                head = target.get_output_embeddings().weight
                layer.head.weight.copy_(head + 0.03 * torch.randn_like(head))
    if name == "qwen4_exp":  # Its target learns late; trained together, drafts are all right.
        train(name, target, [], 60)
    steps = {"deepseek_v4": 16, "qwen4_exp": 10, **dict.fromkeys((*DRAFTED, *ASSISTED), 30)}
    train(name, target, layers, steps.get(name, 18))
    save_drafter(name, target, directory / "draft", **(drafter or {}))
    return save_checkpoint(name, target, layers, directory)


def save_drafter(name: str, target: Any, directory: Path, **changes: Any) -> None:
    """Train and write the drafter of a family in `DRAFTED` or `ASSISTED`; others have none.

    `changes` are those of its config.
    """
    if name in DRAFTED:
        save_head(target, directory, **changes)
    if name in ASSISTED:
        drafter = assistant.new_assistant(name, **changes)
        assistant.train_assistant(drafter, target, cyclic_text)
        assistant.save_assistant(drafter, directory)


def save_head(target: Any, directory: Path, **changes: Any) -> None:
    """Train and write an EAGLE-3 head of a target; `changes` are those of its config."""
    config = {**eagle.CONFIG, **changes}
    head = eagle.new_head(config, target.config.hidden_size)
    eagle.save_head(eagle.train_head(head, config, target, cyclic_text), config, directory)


@torch.no_grad()
def make_full_acceptance_checkpoint(directory: Path, seed: int = 0) -> Path:
    """A mimo checkpoint whose every draft is right: both models map a token to its successor.

    Attention and feed-forward write nothing (o_proj and down_proj are zero), the head is the
    permuted embedding, and the MTP projection passes on the token embedding alone ([0 | I] for
    the concat [hidden, embedding]).
    """
    target = build_target("mimo", seed)
    layer = build_mtp_layer("mimo", target, seed + 1)
    for block in (*target.get_decoder().layers, layer.block):
        block.self_attn.o_proj.weight.zero_()
        block.mlp.down_proj.weight.zero_()
    embedding = target.get_input_embeddings().weight
    embedding.copy_(torch.nn.functional.normalize(torch.randn_like(embedding), dim=1))
    target.get_output_embeddings().weight.copy_(embedding[torch.randperm(embedding.shape[0])])
    for module in (target.get_decoder(), layer):
        for parameter_name, parameter in module.named_parameters():
            if is_norm(parameter_name):
                parameter.fill_(1)
    hidden = embedding.shape[1]
    layer.projection.weight.copy_(torch.cat([torch.zeros(hidden, hidden), torch.eye(hidden)], 1))
    return save_checkpoint("mimo", target, [layer], directory)

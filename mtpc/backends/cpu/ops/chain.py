"""Linear chains: successive linear layers and norms as one operator.

In a dense layer, one chain is everything between two attentions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from mtpc.backends.cpu.ops.packed import packed_gated_linear, packed_linear
from mtpc.ops.fused import add_rms_norm
from mtpc.ops.grouped import grouped_gated_linear, grouped_linear
from mtpc.ops.traits import Traits, operator, with_features
from mtpc.weights.packing import TILE

LINEAR, BIASED, GATED, NORM, NORM_PLUS_ONE = "LBGNP"
"""Kinds of stages: `packed_linear` without and with a bias, `packed_gated_linear`, `add_rms_norm`
without and with `plus_one`."""
GROUPED = {LINEAR: "l", BIASED: "b", GATED: "g"}
"""The same kinds of linears on grouped weights: `grouped_linear`, `grouped_gated_linear`."""
ZEROS = "z"
"""Follows the letter of a grouped stage whose weight has zero points."""
_PACKED = {small: large for large, small in GROUPED.items()}


@dataclass(frozen=True)
class _Stage:
    """One stage: a kind of packed linears and norms (a capital letter, for grouped linears, too),
    and the operands of its operator: its weight or codes, and scales, zeros and a bias where it has
    them."""

    kind: str
    weight: Tensor
    scales: Tensor | None = None
    zeros: Tensor | None = None
    bias: Tensor | None = None

    @property
    def features(self) -> int:
        return self.weight.shape[0] * TILE


def _stages(kinds: str, operands: Sequence[Tensor]) -> Iterator[_Stage]:
    """The stages of a chain. Raises ValueError: an unknown kind, no norm, or too few or many
    operands."""
    letters = [kind + ZEROS * kinds.startswith(ZEROS, at + 1) for at, kind in enumerate(kinds)]
    letters = [letter for letter in letters if letter[0] != ZEROS]
    known = {*_PACKED, *GROUPED, NORM, NORM_PLUS_ONE, *(kind + ZEROS for kind in _PACKED)}
    names = [_operand_names(letter) for letter in letters]
    count = sum(map(len, names))
    fits = known.issuperset(letters) and "".join(letters) == kinds and len(operands) == count
    if not fits or not {NORM, NORM_PLUS_ONE} & set(kinds):
        raise ValueError(
            f"mtpc::linear_chain: expected stages of L, B, G, N and P, or l, b and g with or "
            f"without z, an N or P among them, and {count} operands; found {kinds!r} and "
            f"{len(operands)}"
        )
    following = iter(operands)
    for letter, stage in zip(letters, names, strict=True):
        kind = _PACKED.get(letter[0], letter[0])
        yield _Stage(kind, **{name: next(following) for name in stage})


def _operand_names(letter: str) -> list[str]:
    """Which operands a stage has, in order."""
    kind, names = letter[0], ["weight"]
    if kind in _PACKED:
        names.append("scales")
    if letter.endswith(ZEROS):
        names.append("zeros")
    if kind in (BIASED, GROUPED[BIASED]):
        names.append("bias")
    return names


def _results(
    x: Tensor, residual: Tensor, kinds: str, operands: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    width = x.shape[-1]
    for stage in _stages(kinds, operands):
        if stage.kind == GATED:
            width = stage.features // 2
        elif stage.kind in (LINEAR, BIASED):
            width = stage.features
    return residual.new_empty(residual.shape), with_features(x, width)


@operator(Traits("row", "sums", rows="x residual"), _results)
def linear_chain(
    x: Tensor,
    residual: Tensor,
    kinds: str,
    operands: Sequence[Tensor],
    epsilon: float,
    rows: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Each stage reads the result of the stage before; a norm first adds it to the residual stream.

    Args:
        x: bfloat16 [..., K].
        residual: bfloat16 [..., N], as many rows.
        kinds: one of `LINEAR`, `BIASED`, `GATED`, `NORM` and `NORM_PLUS_ONE` for each stage; of a
            linear on a grouped weight its letter in `GROUPED`, with `ZEROS` after it if the weight
            has zero points.
        operands: for each stage its weight, as its operator takes it: packed
            [features / 32, inputs / 2, 32, 2], codes [features / 32, ...], or [N] of a norm. Codes
            are followed by scales and, if the stage has them, zeros. A bias [features] comes last.
            Linears have a multiple of 32 features, gated ones of 64, and N before a norm.
        epsilon: of all norms.
        rows: int32 or int64 [1], how many leading rows are in use. The results of the others are
            undefined (`mtpc.ops.ragged.clear_idle_rows`).

    Returns:
        The residual stream after the last norm, [..., N]; and the result of the last stage,
        [..., M].

    Raises:
        ValueError: an unknown kind, no norm, or too few or many operands.
    """
    for stage in _stages(kinds, operands):
        if stage.kind in (NORM, NORM_PLUS_ONE):
            plus_one = stage.kind == NORM_PLUS_ONE
            residual, x = add_rms_norm(residual, x, stage.weight, epsilon, plus_one, rows)
        else:
            x = _linear(stage, x, rows)
    return residual, x


def _linear(stage: _Stage, x: Tensor, rows: Tensor | None) -> Tensor:
    if stage.scales is None:
        if stage.kind == GATED:
            return packed_gated_linear(x, stage.weight, stage.features, rows)
        return packed_linear(x, stage.weight, stage.features, stage.bias, rows)
    operands = (stage.weight, stage.scales, stage.zeros, stage.features)
    if stage.kind == GATED:
        return grouped_gated_linear(x, *operands, rows)
    return grouped_linear(x, *operands, stage.bias, rows)

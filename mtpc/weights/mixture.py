"""Which scheme each matrix gets where all of them together have a budget of bits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor

from mtpc.weights.quantise import SCHEMES, quantise
from mtpc.weights.rounding import Sensitivity, root_of

_SAMPLE = 64
"""Rows of a matrix that are rounded in each way."""


def expected_losses(weight: Tensor, schemes: Iterable[str], known: Sensitivity) -> dict[str, float]:
    """What each scheme, with error feedback, costs a matrix, in nats a token.

    A weight's error is made up for by later ones (`root_of`). Some rows stand for all.

    Args:
        weight: [N, K].
        schemes: names of `SCHEMES` that fit it.
        known: its sensitivity.
    """
    some = weight[:: -(-len(weight) // _SAMPLE)].float().contiguous()
    left = root_of(known.moments).diagonal(dim1=1, dim2=2).flatten().square()
    found = {}
    for scheme in schemes:
        spec = SCHEMES[scheme].spec(weight.shape[1], weight.dtype)
        assert spec is not None
        squares = (quantise(some, spec).dequantise() - some).square().mean(0)
        found[scheme] = float(squares @ left) * known.scale / 2
    return found


def choose_schemes(
    losses: Mapping[str, Mapping[str, float]],
    sizes: Mapping[str, int],
    bits_of: Mapping[str, float],
    bits: float,
) -> dict[str, str]:
    """The scheme of each matrix: the least loss that so many bits a weight can have, nearly.

    All begin with the scheme of fewest bits. As long as the budget lasts, that matrix gets more
    which gains most by each bit.

    Args:
        losses: expected, by matrix and scheme; no scheme of a matrix of which nothing is known.
        sizes: weights of each matrix.
        bits_of: bits of a weight of each scheme.
        bits: of a weight, on average over all matrices.
    """
    least = min(bits_of, key=bits_of.__getitem__)
    chosen = dict.fromkeys(losses, least)
    left = (bits - bits_of[least]) * sum(sizes.values())
    while True:
        steps = [
            ((of[chosen[name]] - loss) / spent, spent, name, scheme)
            for name, of in losses.items()
            for scheme, loss in of.items()
            if 0 < (spent := (bits_of[scheme] - bits_of[chosen[name]]) * sizes[name]) <= left
        ]
        gain, spent, name, scheme = max(steps, default=(0.0, 0.0, "", ""))
        if gain <= 0:
            return chosen
        chosen[name], left = scheme, left - spent

"""The counter-based generator: known answers, an independent scalar form, and uniformity."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.philox import scalar_philox, scalar_uniform

from mtpc.ops.philox import gumbel, philox, uniform

# Random123's own kat_vectors, philox4x32 of 10 rounds: counter, key, result.
KNOWN = (
    ("00000000 00000000 00000000 00000000", "00000000 00000000",
     "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
     "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
     "d16cfe09 94fdcceb 5001e420 24126ea1"),
)  # fmt: skip


def words(text: str) -> tuple[int, ...]:
    return tuple(int(word, 16) for word in text.split())


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN)
def test_known_answers(counter: str, key: str, expected: str) -> None:
    assert scalar_philox(words(counter), words(key)) == words(expected)
    c = [torch.tensor([word]) for word in words(counter)]
    k = [torch.tensor([word]) for word in words(key)]
    found = philox((c[0], c[1], c[2], c[3]), (k[0], k[1]))
    assert tuple(int(word) for word in found) == words(expected)


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**32, 2**63 - 1])
@pytest.mark.parametrize("position", [0, 1, 2**31, 2**32 - 1])
def test_uniform_is_the_documented_function(seed: int, position: int) -> None:
    found = uniform(torch.tensor([seed]), torch.tensor([position]), 7)[0]
    assert found.tolist() == [scalar_uniform(seed, position, token) for token in range(7)]


def test_uniform_and_uncorrelated() -> None:
    """A smoke test of how the generator is used: 40 seeds, 50 positions, 101 tokens."""
    seeds = torch.arange(40).repeat_interleave(50)
    u = uniform(seeds, torch.arange(50).repeat(40), 101)
    count = u.numel()
    assert u.unique().numel() == count
    assert 0 < float(u.min()) < 2 / count * 10
    assert 0 < 1 - float(u.max()) < 2 / count * 10
    cells = torch.histc(u.flatten(), 256, 0, 1)
    chi_square = float(((cells - count / 256) ** 2 / (count / 256)).sum())
    assert abs(chi_square - 255) < 5 * math.sqrt(2 * 255)
    cube = u.view(40, 50, 101) - 0.5
    for dim in range(3):  # Neighbouring seeds, positions and tokens know nothing of each other.
        size = cube.shape[dim] - 1
        product = (cube.narrow(dim, 0, size) * cube.narrow(dim, 1, size)).flatten()
        assert abs(float(product.mean())) < 5 / 12 / math.sqrt(product.numel())


def test_gumbel_moments() -> None:
    """Mean Euler's constant, variance pi^2 / 6."""
    g = gumbel(torch.arange(300), torch.zeros(300, dtype=torch.int64), 1000).flatten()
    assert abs(float(g.mean()) - 0.5772157) < 5 * math.sqrt(math.pi**2 / 6 / g.numel())
    assert abs(float(g.var()) - math.pi**2 / 6) < 0.03

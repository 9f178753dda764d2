"""Philox4x32-10, a counter-based generator, in tensor operations; and Gumbel noise from it.

Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011. A number is a
function of a key and a counter, so there is no state to keep. The noise of a (seed, position,
token) is the same in any batch, at any K, on any thread, and after any preemption.

A word is an int64 tensor with a value in 0..2^32 - 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF

Words = tuple[Tensor, Tensor, Tensor, Tensor]


def _multiply(word: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """High and low word of a product; it may wrap around as a signed number, the bits are right."""
    product = word * factor
    return (product >> 32) & _WORD, product & _WORD


def philox(counter: Words, key: tuple[Tensor, Tensor]) -> Words:
    """Four random words, of the shape that four words `counter` and two words `key` broadcast
    to."""
    a, b, c, d = counter
    low, high = key
    for _ in range(ROUNDS):
        first_high, first_low = _multiply(a, _MULTIPLIERS[0])
        second_high, second_low = _multiply(c, _MULTIPLIERS[1])
        a, b, c, d = second_high ^ b ^ low, second_low, first_high ^ d ^ high, first_low
        low, high = (low + _KEY_STEPS[0]) & _WORD, (high + _KEY_STEPS[1]) & _WORD
    return a, b, c, d


def uniform(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Numbers strictly between 0 and 1, in steps of 2^-52, one a token of the vocabulary.

    Two tokens share a call of the generator: counter (token / 2, position, 0, 0), key (low, high)
    of the seed; token v takes words 2(v mod 2) and the next. Both ends are half a step away: 1
    would be infinite noise.

    Args:
        seeds: int64 [N].
        positions: int64 [N], of the token to be chosen in its sequence.
        vocab_size: V.

    Returns:
        float64 [N, V].
    """
    pair = torch.arange((vocab_size + 1) // 2, device=seeds.device)[None, :]
    zero = torch.zeros_like(pair)
    key = (seeds[:, None] & _WORD, (seeds[:, None] >> 32) & _WORD)
    a, b, c, d = philox((pair, positions[:, None] & _WORD, zero, zero), key)
    steps = torch.stack([(a << 20) | (b >> 12), (c << 20) | (d >> 12)], 2)
    return (steps.flatten(1)[:, :vocab_size].double() + 0.5) * 2.0**-52


def gumbel(seeds: Tensor, positions: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise, float64 [N, V]; arguments as of `uniform`.

    The argmax of log-probabilities plus this is distributed by these probabilities.
    """
    return -torch.log(-torch.log(uniform(seeds, positions, vocab_size)))

"""The counter-based generator, one number at a time."""

from __future__ import annotations


def scalar_philox(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """The paper's round on Python's integers, for oracles."""
    c, k = list(counter), list(key)
    for _ in range(10):
        left, right = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [(right >> 32) ^ c[1] ^ k[0], right % 2**32, (left >> 32) ^ c[3] ^ k[1], left % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return tuple(c)


def scalar_uniform(seed: int, position: int, token: int) -> float:
    """What `uniform` documents, one number at a time."""
    out = scalar_philox((token // 2, position, 0, 0), (seed % 2**32, seed >> 32))
    high, low = out[2 * (token % 2) : 2 * (token % 2) + 2]
    return (high * 2**20 + low // 2**12 + 0.5) / 2**52

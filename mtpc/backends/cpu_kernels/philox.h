// Philox4x32-10 and the uniform numbers made of it; mtpc/ops/philox.py says what they are.
#pragma once

#include <cstdint>

namespace mtpc {

/// Random numbers for pairs of tokens at one (seed, position), a block of pairs at a time: the
/// loops over lanes have nothing to wait for, and compile to vectors.
class PairedNoise {
 public:
  static constexpr int kPairs = 16;

  PairedNoise(int64_t seed, int64_t position)
      : low_(static_cast<uint32_t>(seed)),
        high_(static_cast<uint32_t>(static_cast<uint64_t>(seed) >> 32)),
        position_(static_cast<uint32_t>(position)) {}

  /// steps[2 * i + t]: the 52 random bits of token 2 * (first + i) + t.
  void fill(int64_t first, uint64_t (&steps)[2 * kPairs]) const {
    uint32_t a[kPairs], b[kPairs], c[kPairs], d[kPairs];
    for (int i = 0; i < kPairs; ++i) {
      a[i] = static_cast<uint32_t>(first + i);
      b[i] = position_;
      c[i] = d[i] = 0;
    }
    uint32_t low = low_, high = high_;
    for (int round = 0; round < 10; ++round) {
      for (int i = 0; i < kPairs; ++i) {
        const uint64_t left = static_cast<uint64_t>(a[i]) * 0xD2511F53u;
        const uint64_t right = static_cast<uint64_t>(c[i]) * 0xCD9E8D57u;
        a[i] = static_cast<uint32_t>(right >> 32) ^ b[i] ^ low;
        b[i] = static_cast<uint32_t>(right);
        c[i] = static_cast<uint32_t>(left >> 32) ^ d[i] ^ high;
        d[i] = static_cast<uint32_t>(left);
      }
      low += 0x9E3779B9u;
      high += 0xBB67AE85u;
    }
    for (int i = 0; i < kPairs; ++i) {
      steps[2 * i] = static_cast<uint64_t>(a[i]) << 20 | b[i] >> 12;
      steps[2 * i + 1] = static_cast<uint64_t>(c[i]) << 20 | d[i] >> 12;
    }
  }

 private:
  uint32_t low_, high_, position_;
};

}  // namespace mtpc

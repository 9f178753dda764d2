// Philox4x32-10 and the uniform numbers made of it; mtpc/ops/philox.py says what they are.
#pragma once

#include <cstdint>

#include "simd.h"

namespace mtpc {

/// Random numbers for pairs of tokens at one (seed, position), a block of pairs at a time: four
/// registers of words, so that none waits for another's multiplication.
class PairedNoise {
  using Words = uint64_t __attribute__((vector_size(kVectorBytes)));
  static constexpr int kWords = kVectorBytes / sizeof(uint64_t);
  static constexpr int kChains = 4;
  static constexpr uint64_t kWord = 0xFFFFFFFFu;

 public:
  static constexpr int kPairs = kChains * kWords;

  PairedNoise(int64_t seed, int64_t position)
      : low_(static_cast<uint64_t>(seed) & kWord),
        high_(static_cast<uint64_t>(seed) >> 32),
        position_(static_cast<uint64_t>(position) & kWord) {}

  /// steps[2 * i + t]: the 52 random bits of token 2 * (first + i) + t.
  void fill(int64_t first, uint64_t (&steps)[2 * kPairs]) const {
    Words a[kChains], b[kChains], c[kChains] = {}, d[kChains] = {};
    for (int i = 0; i < kChains; ++i) {
      for (int w = 0; w < kWords; ++w) a[i][w] = static_cast<uint64_t>(first + i * kWords + w);
      b[i] = Words{} + position_;
    }
    uint64_t low = low_, high = high_;
    for (int round = 0; round < 10; ++round) {
#pragma GCC unroll 4
      for (int i = 0; i < kChains; ++i) {
        const Words left = a[i] * 0xD2511F53u, right = c[i] * 0xCD9E8D57u;
        a[i] = (right >> 32) ^ b[i] ^ low;
        b[i] = right & kWord;
        c[i] = (left >> 32) ^ d[i] ^ high;
        d[i] = left & kWord;
      }
      low = (low + 0x9E3779B9u) & kWord;
      high = (high + 0xBB67AE85u) & kWord;
    }
    for (int i = 0; i < kChains; ++i) {
      const Words even = a[i] << 20 | b[i] >> 12, odd = c[i] << 20 | d[i] >> 12;
      for (int w = 0; w < kWords; ++w) {
        steps[2 * (i * kWords + w)] = even[w];
        steps[2 * (i * kWords + w) + 1] = odd[w];
      }
    }
  }

 private:
  uint64_t low_, high_, position_;
};

}  // namespace mtpc

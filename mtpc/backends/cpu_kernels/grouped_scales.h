// Scales, zero points and minima of a tile's groups.
#pragma once

#include <algorithm>

#include "grouped_rows.h"

namespace mtpc {

/// a * b + c, rounded once where the level has such an instruction.
inline Vec<float> multiply_add(Vec<float> a, Vec<float> b, Vec<float> c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}

/// Byte kByte of each lane, a float8, times 2^-120.
template <int kByte>
inline Vec<float> small_float8(Groups codes) {
  return reinterpret_cast<Vec<float>>(((codes << (24 - 8 * kByte)) >> 4) & 0x87f00000);
}

/// Bytes ahead of the codes in use that are fetched meanwhile, a line at a time as codes are used:
/// in bursts, or from nearer by, they come too late for more rows than one (docs/performance.md).
inline constexpr int64_t kCodesAhead = 12288, kLine = 64;

/// How products of kRows rows fetch. For one row nearer by is enough, and then lines may pass by the
/// second-level cache (`kPassing`).
template <int kRows>
struct LineAhead {
  static constexpr bool kPasses = kGoesPast && kRows == 1;
  static constexpr int64_t kCodes = kPasses ? 3072 : kCodesAhead, kScales = kCodes / 8;

  static void fetch(const char* from) { __builtin_prefetch(from, 0, kPasses ? kPassing : 3); }
};

/// A tile's scales, and zero points or minima, a register of features at a time.
class TileScales {
 public:
  explicit TileScales(const GroupedWeight& tile)
      : scales_(tile.scales),
        zeros_(tile.has_mins ? nullptr : reinterpret_cast<const uint8_t*>(tile.zeros)),
        mins_(tile.has_mins ? tile.zeros : nullptr),
        type_(tile.scale_type) {}

  Vec<float> scale(int64_t group, int64_t feature) const { return floats(scales_, group, feature); }

  bool has_zeros() const { return zeros_ != nullptr; }

  Groups zero(int64_t group, int64_t feature) const {
    return widen_bytes(zeros_ + group * kFeatures + feature);
  }

  bool has_mins() const { return mins_ != nullptr; }

  Vec<float> min(int64_t group, int64_t feature) const { return floats(mins_, group, feature); }

  /// Fetches scales that groups some way after these will need.
  template <int kRows>
  void fetch(int64_t group, int64_t end) const {
    using Ahead = LineAhead<kRows>;
    const int64_t bytes = kFeatures * (type_ == ScalarType::Float ? 4 : 2);
    for (int64_t at = group * bytes; at < end * bytes; at += kLine) {
      Ahead::fetch(scales_ + at + Ahead::kScales);
      if (has_mins()) Ahead::fetch(mins_ + at + Ahead::kScales);
    }
  }

 private:
  Vec<float> floats(const char* from, int64_t group, int64_t feature) const {
    const int64_t at = group * kFeatures + feature;
    if (type_ == ScalarType::Half) return load<float>(reinterpret_cast<const Half*>(from) + at);
    if (type_ == ScalarType::Float) return load<float>(reinterpret_cast<const float*>(from) + at);
    return load<float>(reinterpret_cast<const BFloat16*>(from) + at);
  }

  const char* scales_;
  const uint8_t* zeros_;
  const char* mins_;
  ScalarType type_;
};

}  // namespace mtpc

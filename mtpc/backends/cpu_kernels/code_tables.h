// Tables of what codes of four bits stand for.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>

#include "grouped_rows.h"

namespace mtpc {

/// What codes of four bits stand for, plus kByteZero.
using Table = std::array<uint8_t, 16>;

constexpr Table with_zero(const std::array<int, 16>& values) {
  Table table{};
  for (int i = 0; i < 16; ++i) table[i] = static_cast<uint8_t>(values[i] + kByteZero);
  return table;
}

/// As in mtpc/weights/grouped.py.
inline constexpr Table kIq4Table = with_zero(
    {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113});
inline constexpr Table kE2m1Table =
    with_zero({0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12});

inline Groups look_up(Groups places, const Table& table) {
#if defined(__AVX512F__)
  const __m128i values = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table.data()));
  return (Groups)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(values), (__m512i)places);
#elif defined(__AVX2__)
  const __m128i values = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table.data()));
  return (Groups)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(values), (__m256i)places);
#else
  uint8_t bytes[sizeof(Groups)];
  std::memcpy(bytes, &places, sizeof(bytes));
  for (uint8_t& byte : bytes) byte = table[byte];
  std::memcpy(&places, bytes, sizeof(bytes));
  return places;
#endif
}

}  // namespace mtpc

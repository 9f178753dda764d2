// Packing of blocks as GGUF files have them, in the order in which grouped_linear.cpp reads them.
// mtpc/weights/gguf/blocks.py says what blocks hold, and mtpc/weights/grouped.py what words do.
#include <algorithm>
#include <cstring>

#include "operators.h"
#include "product_rows.h"
#include "tensors.h"

namespace mtpc {
namespace {

constexpr int64_t kMostInputs = 256;

/// Runs of kWidth bytes as low halves, then high halves, run by run.
template <int kWidth>
void halves(const uint8_t* from, int runs, uint8_t* to) {
  for (int run = 0; run < runs; ++run, from += kWidth, to += 2 * kWidth) {
    for (int i = 0; i < kWidth; ++i) to[i] = from[i] & 15, to[kWidth + i] = from[i] >> 4;
  }
}

/// The bits of 4 bytes become the fifth bits of 32 codes.
void add_fifth(const uint8_t* from, uint8_t* codes) {
  uint32_t bits;
  std::memcpy(&bits, from, sizeof(bits));
  for (uint32_t i = 0; i < 32; ++i) codes[i] |= (bits >> i & 1) << 4;
}

void q4_0(const uint8_t* block, uint8_t* codes) { halves<16>(block + 2, 1, codes); }
void q4_1(const uint8_t* block, uint8_t* codes) { halves<16>(block + 4, 1, codes); }
void mxfp4(const uint8_t* block, uint8_t* codes) { halves<16>(block + 1, 1, codes); }
void q4_k(const uint8_t* block, uint8_t* codes) { halves<32>(block + 16, 4, codes); }
void iq4_xs(const uint8_t* block, uint8_t* codes) { halves<16>(block + 8, 8, codes); }

void q5_0(const uint8_t* block, uint8_t* codes) {
  halves<16>(block + 6, 1, codes);
  add_fifth(block + 2, codes);
}

void q5_1(const uint8_t* block, uint8_t* codes) {
  halves<16>(block + 8, 1, codes);
  add_fifth(block + 4, codes);
}

void q8_0(const uint8_t* block, uint8_t* codes) {
  for (int i = 0; i < 32; ++i) codes[i] = block[2 + i] ^ 128;
}

void q5_k(const uint8_t* block, uint8_t* codes) {
  halves<32>(block + 48, 4, codes);
  for (int run = 0; run < 8; ++run, codes += 32) {
    for (int i = 0; i < 32; ++i) codes[i] |= (block[16 + i] >> run & 1) << 4;
  }
}

void q6_k(const uint8_t* block, uint8_t* codes) {
  halves<64>(block, 2, codes);
  for (int run = 0; run < 8; ++run, codes += 32) {
    const uint8_t* high = block + 128 + run / 4 * 32;
    for (int i = 0; i < 32; ++i) codes[i] |= (high[i] >> run % 4 * 2 & 3) << 4;
  }
}

/// Bytes of a block that are scales.
struct Run {
  int64_t begin, end;
};

/// A type of ggml: where its scales are, and at which byte its minimum is, if not in a super-block.
struct BlockType {
  const char* name;
  int64_t inputs, bytes, bits, scale_bytes;
  Run scales[2];
  int64_t min;
  void (*decode)(const uint8_t* block, uint8_t* codes);

  int64_t words() const { return inputs * bits / 32; }

  /// Elements of a block's scales.
  int64_t count() const {
    return (scales[0].end - scales[0].begin + scales[1].end - scales[1].begin) / scale_bytes;
  }
};

constexpr BlockType kTypes[] = {
    {"Q4_0", 32, 18, 4, 2, {{0, 2}}, 0, q4_0},
    {"Q4_1", 32, 20, 4, 2, {{0, 2}}, 2, q4_1},
    {"Q5_0", 32, 22, 5, 2, {{0, 2}}, 0, q5_0},
    {"Q5_1", 32, 24, 5, 2, {{0, 2}}, 2, q5_1},
    {"Q8_0", 32, 34, 8, 2, {{0, 2}}, 0, q8_0},
    {"Q4_K", 256, 144, 4, 2, {{0, 16}}, 0, q4_k},
    {"Q5_K", 256, 176, 5, 2, {{0, 16}}, 0, q5_k},
    {"Q6_K", 256, 210, 6, 2, {{208, 210}, {192, 208}}, 0, q6_k},
    {"IQ4_NL", 32, 18, 4, 2, {{0, 2}}, 0, q4_0},
    {"IQ4_XS", 256, 136, 4, 2, {{0, 8}}, 0, iq4_xs},
    {"MXFP4", 32, 17, 4, 1, {{0, 1}}, 0, mxfp4},
};

/// The low four bits of eight codes in a word, and what four codes have above those.
inline uint32_t low_word(const uint8_t* codes) {
  uint32_t quads[2];
  std::memcpy(quads, codes, sizeof(quads));
  return (quads[0] & 0x0f0f0f0f) | (quads[1] & 0x0f0f0f0f) << 4;
}

inline uint32_t above(const uint8_t* codes) {
  uint32_t quad;
  std::memcpy(&quad, codes, sizeof(quad));
  return quad >> 4 & 0x0f0f0f0f;
}

/// The words of a block's codes: 32 bits of one feature each, a tile's row apart.
void put_codes(const BlockType& type, const uint8_t* codes, uint32_t* to) {
  const auto put = [&](uint32_t word) {
    *to = word;
    to += kFeatures;
  };
  if (type.bits == 8) {
    for (int64_t i = 0; i < type.inputs; i += 4) {
      uint32_t word;
      std::memcpy(&word, codes + i, sizeof(word));
      put(word);
    }
    return;
  }
  const int64_t more = type.bits - 4, unit = more > 0 ? 32 / more : 8;
  for (int64_t i = 0; i < type.inputs; i += unit) {
    for (int64_t k = i; k < i + unit; k += 8) put(low_word(codes + k));
    if (more == 0) continue;
    uint32_t rest = 0;
    for (int64_t k = 0; k < unit; k += 4) rest |= above(codes + i + k) << k / 4 * more;
    put(rest);
  }
}

/// Where a tile of rows comes from and goes to.
struct Tile {
  const uint8_t* rows;
  int64_t count, blocks;
  uint32_t* codes;
  uint8_t* scales;
  uint16_t* mins;  // may be null
};

void put_scales(const BlockType& type, const uint8_t* block, uint8_t* to) {
  for (const Run& run : type.scales) {
    for (int64_t at = run.begin; at < run.end; at += type.scale_bytes) {
      std::memcpy(to, block + at, type.scale_bytes);
      to += kFeatures * type.scale_bytes;
    }
  }
}

/// Features beyond the rows are zeros.
void clear(const BlockType& type, const Tile& tile) {
  std::memset(tile.codes, 0, tile.blocks * type.words() * kFeatures * sizeof(uint32_t));
  std::memset(tile.scales, 0, tile.blocks * type.count() * kFeatures * type.scale_bytes);
  if (tile.mins) std::memset(tile.mins, 0, tile.blocks * kFeatures * sizeof(uint16_t));
}

void pack_tile(const BlockType& type, const Tile& tile) {
  if (tile.count < kFeatures) clear(type, tile);
  const int64_t row_bytes = tile.blocks * type.bytes;
  alignas(64) uint8_t codes[kMostInputs];
  for (int64_t b = 0; b < tile.blocks; ++b) {
    for (int64_t f = 0; f < tile.count; ++f) {
      const uint8_t* block = tile.rows + f * row_bytes + b * type.bytes;
      // More streams than the processor follows by itself.
      __builtin_prefetch(block + 4 * 64);
      type.decode(block, codes);
      put_codes(type, codes, tile.codes + b * type.words() * kFeatures + f);
      put_scales(type, block, tile.scales + (b * type.count() * kFeatures + f) * type.scale_bytes);
      if (!tile.mins) continue;
      uint16_t min;
      std::memcpy(&min, block + type.min, sizeof(min));
      tile.mins[b * kFeatures + f] = min ^ 0x8000;
    }
  }
}

const BlockType& find_type(const std::string& name) {
  const auto* found = std::find_if(std::begin(kTypes), std::end(kTypes),
                                   [&](const BlockType& type) { return name == type.name; });
  STD_TORCH_CHECK(found != std::end(kTypes), "mtpc_cpu::pack_blocks: no kernel reads ", name);
  return *found;
}

/// Blocks of a row, after all shapes were checked.
int64_t check(const BlockType& type, const Tensor& raw, const Tensor& codes, const Tensor& scales,
              const std::optional<Tensor>& zeros) {
  const int64_t dim = raw.dim();
  STD_TORCH_CHECK(
      dim >= 2 && raw.is_contiguous() && raw.scalar_type() == ScalarType::Byte &&
          raw.size(dim - 1) % type.bytes == 0,
      "mtpc_cpu::pack_blocks: expected contiguous rows of blocks, uint8 [..., N, bytes]");
  const int64_t blocks = raw.size(dim - 1) / type.bytes;
  const auto fits = [&](const Tensor& t, int64_t dims, int64_t rows, size_t bytes) {
    bool is = t.is_contiguous() && t.dim() == dim + dims && t.element_size() == bytes &&
        t.size(dim - 2) == count_tiles(raw.size(dim - 2)) && t.size(dim - 1) == rows &&
        t.size(dim) == kFeatures;
    for (int64_t i = 0; i < dim - 2; ++i) is = is && t.size(i) == raw.size(i);
    return is;
  };
  STD_TORCH_CHECK(
      fits(codes, 2, blocks * type.words(), 1) && codes.size(dim + 1) == 4 &&
          fits(scales, 1, blocks * type.count(), type.scale_bytes) &&
          zeros.has_value() == (type.min > 0) && (!zeros || fits(*zeros, 1, blocks, 2)),
      "mtpc_cpu::pack_blocks: codes, scales or minima do not fit ", type.name, ": expected [..., "
      "ceil(N / 32), K * bits / 32, 32, 4] and [..., ceil(N / 32), scales of a row, 32]");
  return blocks;
}

}  // namespace

MTPC_OPERATOR void pack_blocks(const Tensor& raw, const std::string& block, const Tensor& codes,
                               const Tensor& scales, const std::optional<Tensor>& zeros) {
  const BlockType& type = find_type(block);
  const int64_t blocks = check(type, raw, codes, scales, zeros);
  if (raw.numel() == 0) return;
  const int64_t features = raw.size(raw.dim() - 2), tiles = count_tiles(features);
  const int64_t matrices = raw.numel() / features / raw.size(raw.dim() - 1);
  const auto* from = static_cast<const uint8_t*>(raw.const_data_ptr());
  auto* to = static_cast<uint32_t*>(codes.mutable_data_ptr());
  auto* steps = static_cast<uint8_t*>(scales.mutable_data_ptr());
  auto* mins = zeros ? static_cast<uint16_t*>(zeros->mutable_data_ptr()) : nullptr;
  run_tasks(matrices * tiles, worker_count(raw.numel()), [&](int64_t task) {
    const int64_t first = task / tiles * features + task % tiles * kFeatures;
    const int64_t count = std::min<int64_t>(kFeatures, features - task % tiles * kFeatures);
    const int64_t at = task * blocks * kFeatures;
    pack_tile(type, {from + first * blocks * type.bytes, count, blocks, to + at * type.words(),
                     steps + at * type.count() * type.scale_bytes, mins ? mins + at : nullptr});
  });
}

}  // namespace mtpc

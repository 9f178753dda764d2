// The largest of each row's features, found while a linear layer computes them tile by tile.
#pragma once

#include <tuple>

#include "product_rows.h"
#include "row_steps.h"

namespace mtpc {

/// The largest feature of each row in each tile, as a key. Keys have the order of the numbers that
/// they stand for. So the first of equals wins, and NaN wins over all numbers, as with torch,
/// whichever thread notes which tile first.
class Maxima {
 public:
  Maxima(int64_t rows, int64_t tiles) : tiles_(tiles), keys_(rows * tiles), places_(rows * tiles) {}

  /// Notes a tile's features of a row, `count` of them; `values` has room for a whole tile.
  void put(int64_t tile, int64_t row, BFloat16* values, int64_t count) const {
    std::fill(values + count, values + kFeatures, BFloat16(-kInfinity<float>));
    Mask<float> keys[kSteps], best{};
    for (int step = 0; step < kSteps; ++step) {
      keys[step] = keys_of(values + step * kStep);
      best = step == 0 ? keys[step] : larger(keys[step], best);
    }
    const int32_t largest = reduce_integers(best, larger);
    Mask<float> place = lane_numbers<float>() + kFeatures;
    for (int step = kSteps; step-- > 0;) {
      place = keys[step] == largest ? lane_numbers<float>() + step * kStep : place;
    }
    const int64_t at = row * tiles_ + tile;
    keys_.get()[at] = largest;
    places_.get()[at] = static_cast<uint8_t>(reduce_integers(place, smaller));
  }

  /// The largest of a row, and which feature it is.
  void write(int64_t row, BFloat16* value, int64_t* feature) const {
    const int32_t* keys = keys_.get() + row * tiles_;
    const int64_t tile = std::max_element(keys, keys + tiles_) - keys;
    *value = number_of(keys[tile]);
    *feature = tile * kFeatures + places_.get()[row * tiles_ + tile];
  }

 private:
  static constexpr int kSteps = kFeatures / kStep;

  /// Bits of floats, ordered as integers: those of negative numbers the other way round.
  static Mask<float> keys_of(const BFloat16* values) {
    const Vec<float> found = load<float>(values);
    // Adding zero turns -0.0 into 0.0.
    const Vec<float> x = found == found ? found + 0.0f
                                        : Vec<float>{} + std::numeric_limits<float>::quiet_NaN();
    const Mask<float> bits = reinterpret_cast<Mask<float>>(x);
    return bits ^ ((bits >> 31) & 0x7fffffff);
  }

  static BFloat16 number_of(int32_t key) {
    const int32_t bits = key ^ ((key >> 31) & 0x7fffffff);
    float number;
    std::memcpy(&number, &bits, sizeof(number));
    return static_cast<BFloat16>(number);
  }

  int64_t tiles_;
  Buffer<int32_t> keys_;    // [rows, tiles]
  Buffer<uint8_t> places_;  // the same, in the tile
};

/// The largest of each row of a linear layer without its last dimension, and which feature it is;
/// nothing of rows from `used` on.
inline std::tuple<Tensor, Tensor> write_maxima(const Tensor& x, int64_t used,
                                               const Maxima& maxima) {
  const std::vector<int64_t> shape = leading_sizes(x);
  const Tensor values = dense_empty(x, shape);
  const Tensor features = dense_empty(shape, aoti_torch_dtype_int64());
  auto* feature = static_cast<int64_t*>(features.mutable_data_ptr());
  for (int64_t row = 0; row < used; ++row) maxima.write(row, data(values) + row, feature + row);
  return {values, features};
}

}  // namespace mtpc

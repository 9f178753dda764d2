// The largest of each row's features, while a linear layer gives them tile by tile.
#pragma once

#include <tuple>

#include "product_rows.h"
#include "row_steps.h"

namespace mtpc {

/// Each tile's largest of each row, by keys whose order is that of the numbers they stand for: no
/// matter which thread notes a tile when, the first of equals wins, and NaN before all numbers, as
/// with torch.
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
    const int32_t largest = across(best, larger);
    Mask<float> place = lane_numbers<float>() + kFeatures;
    for (int step = kSteps; step-- > 0;) {
      place = keys[step] == largest ? lane_numbers<float>() + step * kStep : place;
    }
    const int64_t at = row * tiles_ + tile;
    keys_.get()[at] = largest;
    places_.get()[at] = static_cast<uint8_t>(across(place, smaller));
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
    // A zero more makes both zeros one number.
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

  static Mask<float> larger(Mask<float> a, Mask<float> b) { return a > b ? a : b; }
  static Mask<float> smaller(Mask<float> a, Mask<float> b) { return a < b ? a : b; }

  template <class Choose>
  static int32_t across(Mask<float> lanes, Choose choose) {
    const float chosen = reduce_lanes<float>(
        reinterpret_cast<Vec<float>>(lanes), [&](Vec<float> a, Vec<float> b) {
          return reinterpret_cast<Vec<float>>(
              choose(reinterpret_cast<Mask<float>>(a), reinterpret_cast<Mask<float>>(b)));
        });
    int32_t bits;
    std::memcpy(&bits, &chosen, sizeof(bits));
    return bits;
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

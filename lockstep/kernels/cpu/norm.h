// The one root-mean-square norm: layers, queries and keys all call it.
#pragma once

#include "vec.h"

namespace lk {

struct NormWeight {
  const void* data;
  int64_t dtype;
  bool unit_offset;

  LK_INLINE F16 at(int64_t i, int64_t left) const {
    F16 w = dtype == kFloat32 ? load_part(static_cast<const float*>(data) + i, left)
                              : load_part(static_cast<const bf16*>(data) + i, left);
    return unit_offset ? 1.0f + w : w;
  }
};

// 1 / sqrt(mean of squares + eps). Lane l sums elements l, l + 16, ... ascending;
// the lanes fold at distances 8, 4, 2, 1.
template <typename T>
LK_INLINE float inverse_rms(const T* x, int64_t size, float eps) {
  F16 sum{};
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) {
    F16 v = load(x + i);
    sum = fma(v, v, sum);
  }
  if (i < size) {
    F16 v = load_part(x + i, size - i);
    sum = fma(v, v, sum);
  }
  return 1.0f / std::sqrt(sum_lanes(sum) / float(size) + eps);
}

// Sixteen normed elements from position i on, already cast to T.
template <typename T>
LK_INLINE F16 normed(const T* x, int64_t i, int64_t left, float inverse, const NormWeight& weight) {
  F16 v = load_part(x + i, left) * inverse;
  F16 w = weight.at(i, left);
  return weight.unit_offset ? cast<T>(v * w) : cast<T>(cast<T>(v) * w);
}

}  // namespace lk

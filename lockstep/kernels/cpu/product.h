// The product of rows with a packed weight, tile by tile, and what follows it in a tile.
//
// A weight [N, K] lies in panels of PANEL outputs: float32 as [K][PANEL], bfloat16
// as [K / 2][PANEL] pairs (k in the low half, zero-padded when K is odd). A gated
// pair alternates gate and up panels.
#pragma once

#include <algorithm>
#include <vector>

#include "threads.h"
#include "tiles.h"

namespace lk {

template <typename T>
struct Step;  // what one k step of a tile reads
template <>
struct Step<float> {
  using type = float;
  static constexpr int64_t width = 1;
};
template <>
struct Step<bf16> {
  using type = uint32_t;
  static constexpr int64_t width = 2;
};

template <typename T>
int64_t steps_of(int64_t k) {
  return (k + Step<T>::width - 1) / Step<T>::width;
}

// Rows whose pairs cannot be read in place (odd K) are copied with a zero at the end.
template <typename T>
const typename Step<T>::type* operand(const T* x, int64_t rows, int64_t k, std::vector<T>& copy,
                                      int64_t* lda) {
  constexpr int64_t W = Step<T>::width;
  *lda = steps_of<T>(k);
  if (k % W != 0) {
    copy.assign(size_t(rows * *lda * W), T{});
    for (int64_t r = 0; r < rows; ++r)
      std::memcpy(copy.data() + r * *lda * W, x + r * k, sizeof(T) * size_t(k));
    x = copy.data();
  }
  return reinterpret_cast<const typename Step<T>::type*>(x);
}

// How a launch is cut into tasks: `group` panels by `block` rows. A block's rows stay in the
// core's cache from panel to panel; many tasks, because the last ones to finish are waited for.
struct Cut {
  int64_t group, block, groups, blocks;
};

inline Cut cut(int64_t threads, int64_t panels, int64_t rows) {
  Cut c;
  const int64_t wanted = threads * 24;
  const int64_t tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
  c.blocks = (tiles + 15) / 16;
  c.block = (tiles + c.blocks - 1) / c.blocks * TILE_ROWS;
  c.blocks = (rows + c.block - 1) / c.block;
  c.group = std::max<int64_t>(1, panels * c.blocks / wanted);
  c.groups = (panels + c.group - 1) / c.group;
  return c;
}

// Every tile of every panel: store_tile(row, rows, panel, values [rows][PANELS * PANEL]);
// it may change the values.
template <typename T, int PANELS, typename F>
void product(Pool* pool, const T* x, int64_t rows, int64_t k, const T* weight, int64_t panels,
             F&& store_tile) {
  using E = typename Step<T>::type;
  std::vector<T> copy;
  int64_t lda;
  const E* a = operand(x, rows, k, copy, &lda);
  const E* w = reinterpret_cast<const E*>(weight);
  const int64_t steps = steps_of<T>(k);
  if (rows == 0) return;
  const Cut c = cut(pool->threads(), panels, rows);
  const int64_t panel = steps * PANEL;
  parallel(pool, c.groups * c.blocks, [&](int64_t task) {
    const int64_t first = task / c.blocks * c.group, begin = task % c.blocks * c.block;
    const int64_t last = std::min(first + c.group, panels);
    const int64_t end = std::min(begin + c.block, rows);
    // Where this thread will probably go on after its last panel.
    const int64_t after = (task + pool->threads()) / c.blocks * c.group;
    // With one tile of rows the next panel would come no earlier than the hardware brings it.
    const int64_t stride = end - begin > TILE_ROWS ? 64 : 0;
    alignas(64) float values[TILE_ROWS * PANEL * PANELS];
    for (int64_t p = first; p < last; ++p) {
      const int64_t next = std::min(p + 1 < last ? p + 1 : after, panels - 1) * PANELS * panel;
      const char* ahead = reinterpret_cast<const char*>(w + next);
      const char* const ahead_end = ahead + PANELS * panel * int64_t(sizeof(E));
      for (int64_t r = begin; r < end; r += TILE_ROWS) {
        const int height = int(std::min<int64_t>(TILE_ROWS, end - r));
        for (int half = 0; half < PANELS; ++half) {
          const int64_t step = ahead < ahead_end ? stride : 0;
          tile_rows<E, PANEL_VECS, true>(height, a + r * lda, lda, w + (p * PANELS + half) * panel,
                                         PANEL, values + half * PANEL, PANELS * PANEL, steps,
                                         Ahead{ahead, step});
          ahead += steps * step;
        }
        store_tile(r, height, p, values);
      }
    }
  });
}

LK_INLINE F16 load_bias(const void* bias, int64_t dtype, int64_t at, int64_t n) {
  return dtype == kFloat32 ? load_part(static_cast<const float*>(bias) + at, n)
                           : load_part(static_cast<const bf16*>(bias) + at, n);
}

// Bias, cast and residual of a tile of accumulators [rows][PANEL].
template <typename T, typename Out>
struct LinearOut {
  int64_t n;
  const void* bias;
  int64_t bias_dtype;
  const T* residual;
  Out* out;

  LK_INLINE void operator()(int64_t row, int height, int64_t panel, const float* values) const {
    const int64_t room = n - panel * PANEL;
    if (!bias && room >= PANEL) {  // almost every tile: no lane to leave out
      const T* res = residual ? residual + row * n + panel * PANEL : nullptr;
      Out* to = out + row * n + panel * PANEL;
      for (int i = 0; i < height; ++i, to += n)
#pragma GCC unroll 2
        for (int v = 0; v < PANEL_VECS; ++v) {
          F16 y = load(values + i * PANEL + v * LANES);
          if (res) y = load(res + i * n + v * LANES) + cast<T>(y);
          store(to + v * LANES, y);
        }
      return;
    }
    for (int i = 0; i < height; ++i)
      for (int v = 0; v < PANEL_VECS; ++v) {
        const int64_t at = panel * PANEL + v * LANES, left = n - at;
        if (left <= 0) break;
        F16 y = load(values + i * PANEL + v * LANES);
        if (bias) y = y + load_bias(bias, bias_dtype, at, left);
        const int64_t place = (row + i) * n + at;
        if (residual) y = load_part(residual + place, left) + cast<T>(y);
        store_part(out + place, y, left);
      }
  }
};

enum Activation : int64_t { kSilu = 0, kGeluTanh = 1 };

LK_INLINE F16 activate(F16 x, int64_t activation) {
  if (activation == kSilu) return x / (1.0f + exp(-x));
  // 0.5 (1 + tanh(u)) is sigmoid(2 u).
  F16 u = 0.7978845608028654f * fma(0.044715f * x * x, x, x);
  return x * sigmoid(u + u);
}

// The gated product of a tile of accumulators [rows][gate panel, up panel].
template <typename T>
struct GatedOut {
  int64_t f, activation;
  T* out;

  LK_INLINE void operator()(int64_t row, int height, int64_t panel, const float* values) const {
    const int64_t at = panel * PANEL;
    T* to = out + row * f + at;
    auto value = [&](const float* gate) {
      return cast<T>(activate(cast<T>(load(gate)), activation)) * cast<T>(load(gate + PANEL));
    };
    for (int i = 0; i < height; ++i, values += 2 * PANEL, to += f) {
      if (f - at >= PANEL) {
        F16 y[PANEL_VECS];
#pragma GCC unroll 4
        for (int v = 0; v < PANEL_VECS; ++v) y[v] = value(values + v * LANES);
#pragma GCC unroll 4
        for (int v = 0; v < PANEL_VECS; ++v) store(to + v * LANES, y[v]);
      } else {
        for (int v = 0; v < PANEL_VECS; ++v)
          store_part(to + v * LANES, value(values + v * LANES), f - at - v * LANES);
      }
    }
  }
};

}  // namespace lk

// Packed weights and the products that read them.
//
// A weight [N, K] lies in panels of PANEL outputs: float32 as [K][PANEL], bfloat16
// as [K / 2][PANEL] pairs (k in the low half, zero-padded when K is odd). A gated
// pair alternates gate and up panels.
#include <algorithm>

#include "packed.h"
#include "threads.h"
#include "tiles.h"

namespace lk {
namespace {

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

template <typename T>
void pack(Pool* pool, const T* source, int64_t n, int64_t k, T* target, int64_t panel_stride) {
  constexpr int64_t W = Step<T>::width;
  const int64_t steps = steps_of<T>(k), panels = (n + PANEL - 1) / PANEL;
  constexpr int64_t kChunk = 64;
  parallel(pool, panels, [&](int64_t p) {
    T* out = target + p * panel_stride;
    for (int64_t s0 = 0; s0 < steps; s0 += kChunk) {
      const int64_t s1 = std::min(s0 + kChunk, steps);
      for (int64_t lane = 0; lane < PANEL; ++lane) {
        const int64_t row = p * PANEL + lane;
        const T* in = source + row * k;
        const int64_t whole = row < n ? std::min(s1, k / W) : s0;
        for (int64_t s = s0; s < whole; ++s)
          std::memcpy(out + (s * PANEL + lane) * W, in + s * W, sizeof(T) * W);
        for (int64_t s = std::max(s0, whole); s < s1; ++s)
          for (int64_t w = 0; w < W; ++w)
            out[(s * PANEL + lane) * W + w] = row < n && s * W + w < k ? in[s * W + w] : T{};
      }
    }
  });
}

// Row `row` of a packed matrix: K elements, by way of `scaled`.
template <typename T, typename F>
void gather_row(const T* panels, int64_t panel_stride, int64_t row, int64_t k, F&& scaled) {
  constexpr int64_t W = Step<T>::width;
  const T* in = panels + row / PANEL * panel_stride + row % PANEL * W;
  for (int64_t i = 0; i < k; ++i) scaled(i, in[i / W * PANEL * W + i % W]);
}

template <typename T>
void unpack(Pool* pool, const T* panels, int64_t n, int64_t k, T* target, int64_t panel_stride) {
  parallel(pool, n, [&](int64_t row) {
    T* out = target + row * k;
    gather_row(panels, panel_stride, row, k, [&](int64_t i, T value) { out[i] = value; });
  });
}

template <typename T>
void embedding(Pool* pool, const int32_t* ids, int64_t rows, const T* panels, int64_t n,
               int64_t k, float scale, T* target) {
  const int64_t stride = steps_of<T>(k) * Step<T>::width * PANEL;
  parallel(pool, rows, [&](int64_t r) {
    T* out = target + r * k;
    const int64_t row = std::min<int64_t>(std::max<int64_t>(ids[r], 0), n - 1);
    if (scale == 1.0f)
      gather_row(panels, stride, row, k, [&](int64_t i, T value) { out[i] = value; });
    else
      gather_row(panels, stride, row, k,
                 [&](int64_t i, T value) { out[i] = from_float<T>(to_float(value) * scale); });
  });
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

Cut cut(int64_t threads, int64_t panels, int64_t rows) {
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

// Every tile of every panel: store_tile(row, rows, panel, values [rows][PANELS * PANEL]).
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

template <typename T, typename Out>
void linear(Pool* pool, const T* x, int64_t rows, const T* weight, int64_t n, int64_t k,
            const void* bias, int64_t bias_dtype, const T* residual, Out* out) {
  const int64_t panels = (n + PANEL - 1) / PANEL;
  product<T, 1>(pool, x, rows, k, weight, panels,
                [&](int64_t row, int height, int64_t panel, const float* values) {
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
                });
}

enum Activation : int64_t { kSilu = 0, kGeluTanh = 1 };

LK_INLINE F16 activate(F16 x, int64_t activation) {
  if (activation == kSilu) return x / (1.0f + exp(-x));
  // 0.5 (1 + tanh(u)) is sigmoid(2 u).
  F16 u = 0.7978845608028654f * fma(0.044715f * x * x, x, x);
  return x * sigmoid(u + u);
}

template <typename T>
void gated(Pool* pool, const T* x, int64_t rows, const T* weight, int64_t f, int64_t k,
           int64_t activation, T* out) {
  const int64_t panels = (f + PANEL - 1) / PANEL;
  product<T, 2>(pool, x, rows, k, weight, panels,
                [&](int64_t row, int height, int64_t panel, const float* values) {
                  const int64_t at = panel * PANEL;
                  T* to = out + row * f + at;
                  auto value = [&](const float* gate) {
                    return cast<T>(activate(cast<T>(load(gate)), activation)) *
                           cast<T>(load(gate + PANEL));
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
                });
}

}  // namespace
}  // namespace lk

using namespace lk;

#pragma GCC visibility push(default)
extern "C" {

int64_t lk_panel() { return PANEL; }

// What fixes the bits of a product.
const char* lk_isa() {
#if defined(LK_DOT_BF16)
  return "avx512-bf16";
#elif defined(LK_AVX512)
  return "avx512";
#elif defined(__AVX2__) && defined(__FMA__)
  return "avx2-fma";
#elif defined(__aarch64__)
  return "neon";
#else
  return "generic";
#endif
}

// Elements of the packed form of [n, k]; the target must hold as many.
int64_t lk_packed_size(int64_t dtype, int64_t n, int64_t k) {
  const int64_t steps = dtype == kFloat32 ? steps_of<float>(k) : steps_of<bf16>(k) * 2;
  return (n + PANEL - 1) / PANEL * PANEL * steps;
}

// `parts` interleaves panels (2 for a gated pair), `part` says which of them this is.
void lk_pack(void* pool, int64_t dtype, const void* source, int64_t n, int64_t k, void* target,
             int64_t part, int64_t parts) {
  if (dtype == kFloat32) {
    const int64_t panel = steps_of<float>(k) * PANEL;
    pack((Pool*)pool, (const float*)source, n, k, (float*)target + part * panel, parts * panel);
  } else {
    const int64_t panel = steps_of<bf16>(k) * 2 * PANEL;
    pack((Pool*)pool, (const bf16*)source, n, k, (bf16*)target + part * panel, parts * panel);
  }
}

void lk_unpack(void* pool, int64_t dtype, const void* source, int64_t n, int64_t k, void* target,
               int64_t part, int64_t parts) {
  if (dtype == kFloat32) {
    const int64_t panel = steps_of<float>(k) * PANEL;
    unpack((Pool*)pool, (const float*)source + part * panel, n, k, (float*)target, parts * panel);
  } else {
    const int64_t panel = steps_of<bf16>(k) * 2 * PANEL;
    unpack((Pool*)pool, (const bf16*)source + part * panel, n, k, (bf16*)target, parts * panel);
  }
}

void lk_embedding(void* pool, int64_t dtype, const int32_t* ids, int64_t rows, const void* weight,
                  int64_t n, int64_t k, float scale, void* out) {
  if (dtype == kFloat32)
    embedding((Pool*)pool, ids, rows, (const float*)weight, n, k, scale, (float*)out);
  else
    embedding((Pool*)pool, ids, rows, (const bf16*)weight, n, k, scale, (bf16*)out);
}

void lk_linear(void* pool, int64_t dtype, const void* x, int64_t rows, const void* weight,
               int64_t n, int64_t k, const void* bias, int64_t bias_dtype, const void* residual,
               void* out) {
  if (dtype == kFloat32)
    linear((Pool*)pool, (const float*)x, rows, (const float*)weight, n, k, bias, bias_dtype,
           (const float*)residual, (float*)out);
  else
    linear((Pool*)pool, (const bf16*)x, rows, (const bf16*)weight, n, k, bias, bias_dtype,
           (const bf16*)residual, (bf16*)out);
}

void lk_logits(void* pool, int64_t dtype, const void* x, int64_t rows, const void* weight,
               int64_t n, int64_t k, float* out) {
  if (dtype == kFloat32)
    linear((Pool*)pool, (const float*)x, rows, (const float*)weight, n, k, nullptr, kFloat32,
           (const float*)nullptr, out);
  else
    linear((Pool*)pool, (const bf16*)x, rows, (const bf16*)weight, n, k, nullptr, kFloat32,
           (const bf16*)nullptr, out);
}

void lk_gated(void* pool, int64_t dtype, const void* x, int64_t rows, const void* weight,
              int64_t f, int64_t k, int64_t activation, void* out) {
  if (dtype == kFloat32)
    gated((Pool*)pool, (const float*)x, rows, (const float*)weight, f, k, activation,
          (float*)out);
  else
    gated((Pool*)pool, (const bf16*)x, rows, (const bf16*)weight, f, k, activation, (bf16*)out);
}

LK_PACKED(lk_linear)
LK_PACKED(lk_gated)
}
#pragma GCC visibility pop

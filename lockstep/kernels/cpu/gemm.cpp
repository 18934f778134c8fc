// Packing, and the products that read packed weights (product.h).
#include "packed.h"
#include "product.h"

namespace lk {
namespace {

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

template <typename T, typename Out>
void linear(Pool* pool, const T* x, int64_t rows, const T* weight, int64_t n, int64_t k,
            const void* bias, int64_t bias_dtype, const T* residual, Out* out) {
  product<T, 1>(pool, x, rows, k, weight, (n + PANEL - 1) / PANEL,
                LinearOut<T, Out>{n, bias, bias_dtype, residual, out});
}

template <typename T>
void gated(Pool* pool, const T* x, int64_t rows, const T* weight, int64_t f, int64_t k,
           int64_t activation, T* out) {
  product<T, 2>(pool, x, rows, k, weight, (f + PANEL - 1) / PANEL,
                GatedOut<T>{f, activation, out});
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

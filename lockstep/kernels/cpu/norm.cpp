// Row norms, and what happens to queries, keys and values between projection and cache.
#include "norm.h"

#include <algorithm>

#include "packed.h"
#include "threads.h"

namespace lk {
namespace {

// Rows a task: enough work to be worth a claim.
int64_t rows_per_task(int64_t elements_per_row) {
  return std::max<int64_t>(1, 8192 / std::max<int64_t>(1, elements_per_row));
}

template <typename F>
void parallel_rows(Pool* pool, int64_t rows, int64_t elements_per_row, F&& body) {
  const int64_t step = rows_per_task(elements_per_row);
  parallel(pool, (rows + step - 1) / step, [&](int64_t task) {
    const int64_t end = std::min(rows, (task + 1) * step);
    for (int64_t r = task * step; r < end; ++r) body(r);
  });
}

template <typename T>
void rms_norm(Pool* pool, const T* x, int64_t rows, int64_t d, const NormWeight& weight, float eps,
              const T* residual, T* out) {
  parallel_rows(pool, rows, d, [&](int64_t r) {
    const T* row = x + r * d;
    const float inverse = inverse_rms(row, d, eps);
    for (int64_t i = 0; i < d; i += LANES) {
      F16 y = normed(row, i, d - i, inverse, weight);
      if (residual) y = load_part(residual + r * d + i, d - i) + y;
      store_part(out + r * d + i, y, d - i);
    }
  });
}

// Where one layer's keys and values lie.
template <typename T>
struct Cache {
  T* k;
  T* v;
  int64_t page_stride, page_tokens, head_dim;

  // Keys are transposed inside a page: float32 [E][tokens], bfloat16 [E / 2][tokens][2].
  LK_INLINE void put_key(int64_t page, int64_t head, int64_t token, const T* values) const {
    T* base = k + page * page_stride + head * head_dim * page_tokens;
    constexpr int64_t W = sizeof(T) == 2 ? 2 : 1;
    for (int64_t e = 0; e < head_dim; e += W)
      std::memcpy(base + e * page_tokens + token * W, values + e, sizeof(T) * W);
  }
  LK_INLINE void put_value(int64_t page, int64_t head, int64_t token, const T* values) const {
    std::memcpy(v + page * page_stride + (head * page_tokens + token) * head_dim, values,
                sizeof(T) * size_t(head_dim));
  }
};

constexpr int64_t kMaxHead = 1024;

template <typename T>
LK_INLINE void norm_and_rotate(const T* x, int64_t e, const float* cosine, const float* sine,
                               const NormWeight* norm, float eps, T* out) {
  T buffer[kMaxHead];
  if (norm) {
    const float inverse = inverse_rms(x, e, eps);
    for (int64_t i = 0; i < e; i += LANES) store(buffer + i, normed(x, i, e - i, inverse, *norm));
    x = buffer;
  }
  const int64_t half = e / 2;
  for (int64_t i = 0; i < half; i += LANES) {
    const int64_t left = half - i;
    F16 a = load_part(x + i, left), b = load_part(x + half + i, left);
    F16 c = load_part(cosine + i, left), s = load_part(sine + i, left);
    store_part(out + i, a * c - b * s, left);
    store_part(out + half + i, b * c + a * s, left);
  }
}

template <typename T>
void write_kv(Pool* pool, const T* qkv, int64_t rows, const int32_t* positions, const float* cosine,
              const float* sine, int64_t table, const Cache<T>& cache, const int32_t* slots,
              int64_t q_heads, int64_t kv_heads, const NormWeight* q_norm,
              const NormWeight* k_norm, float eps, T* q_out) {
  const int64_t e = cache.head_dim, width = (q_heads + 2 * kv_heads) * e;
  parallel_rows(pool, rows, width, [&](int64_t r) {
    const T* row = qkv + r * width;
    const int64_t p = std::min<int64_t>(std::max<int64_t>(positions[r], 0), table - 1);
    const float* c = cosine + p * (e / 2);
    const float* s = sine + p * (e / 2);
    for (int64_t h = 0; h < q_heads; ++h)
      norm_and_rotate(row + h * e, e, c, s, q_norm, eps, q_out + (r * q_heads + h) * e);
    if (slots[r] < 0) return;
    const int64_t page = slots[r] / cache.page_tokens, token = slots[r] % cache.page_tokens;
    T key[kMaxHead];
    for (int64_t h = 0; h < kv_heads; ++h) {
      norm_and_rotate(row + (q_heads + h) * e, e, c, s, k_norm, eps, key);
      cache.put_key(page, h, token, key);
      cache.put_value(page, h, token, row + (q_heads + kv_heads + h) * e);
    }
  });
}

}  // namespace
}  // namespace lk

using namespace lk;

#pragma GCC visibility push(default)
extern "C" {

void lk_rms_norm(void* pool, int64_t dtype, const void* x, int64_t rows, int64_t d,
                 const void* weight, int64_t weight_dtype, float eps, int64_t unit_offset,
                 const void* residual, void* out) {
  const NormWeight w{weight, weight_dtype, unit_offset != 0};
  if (dtype == kFloat32)
    rms_norm((Pool*)pool, (const float*)x, rows, d, w, eps, (const float*)residual, (float*)out);
  else
    rms_norm((Pool*)pool, (const bf16*)x, rows, d, w, eps, (const bf16*)residual, (bf16*)out);
}

void lk_write_kv(void* pool, int64_t dtype, const void* qkv, int64_t rows,
                 const int32_t* positions, const float* cosine, const float* sine, int64_t table,
                 void* k, void* v, int64_t page_stride, int64_t page_tokens, int64_t head_dim,
                 const int32_t* slots, int64_t q_heads, int64_t kv_heads, const void* q_norm,
                 const void* k_norm, int64_t norm_dtype, float eps, int64_t unit_offset,
                 void* q_out) {
  const NormWeight qn{q_norm, norm_dtype, unit_offset != 0};
  const NormWeight kn{k_norm, norm_dtype, unit_offset != 0};
  const NormWeight* qp = q_norm ? &qn : nullptr;
  const NormWeight* kp = k_norm ? &kn : nullptr;
  if (dtype == kFloat32) {
    const Cache<float> cache{(float*)k, (float*)v, page_stride, page_tokens, head_dim};
    write_kv((Pool*)pool, (const float*)qkv, rows, positions, cosine, sine, table, cache, slots,
             q_heads, kv_heads, qp, kp, eps, (float*)q_out);
  } else {
    const Cache<bf16> cache{(bf16*)k, (bf16*)v, page_stride, page_tokens, head_dim};
    write_kv((Pool*)pool, (const bf16*)qkv, rows, positions, cosine, sine, table, cache, slots,
             q_heads, kv_heads, qp, kp, eps, (bf16*)q_out);
  }
}

void lk_copy_pages(void* pool_data, int64_t page_bytes, const int64_t* pairs, int64_t count) {
  char* data = static_cast<char*>(pool_data);
  for (int64_t i = 0; i < count; ++i)
    std::memmove(data + pairs[2 * i + 1] * page_bytes, data + pairs[2 * i] * page_bytes,
                 size_t(page_bytes));
}

LK_PACKED(lk_rms_norm)
LK_PACKED(lk_write_kv)
}
#pragma GCC visibility pop

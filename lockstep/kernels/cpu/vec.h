// Sixteen-lane vectors and the elementwise functions that every operation shares.
//
// Everything is spelled out: fused multiply-adds are explicit, contraction is off,
// and no function's result depends on the lane that computes it. The types are
// compiler vectors, so that any target compiles; only what the language cannot
// say (fma, wide multiplies, bfloat16 dot products) has a form per instruction set.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define LK_AVX512 1
#endif
#if defined(LK_AVX512) && defined(__AVX512BF16__)
#define LK_DOT_BF16 1
#endif
#if defined(LK_AVX512) || (defined(__AVX2__) && defined(__FMA__))
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#define LK_INLINE inline __attribute__((always_inline))

namespace lk {

constexpr int LANES = 16;

typedef float F16 __attribute__((vector_size(64)));
typedef int32_t I16 __attribute__((vector_size(64)));
typedef uint32_t U16 __attribute__((vector_size(64)));
typedef uint16_t H16 __attribute__((vector_size(32)));

// Element types of a launch, as Python passes them.
enum DType : int64_t { kFloat32 = 0, kBFloat16 = 1 };

struct bf16 {
  uint16_t bits;
};

LK_INLINE float bits_to_float(uint32_t u) {
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}
LK_INLINE uint32_t float_to_bits(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  return u;
}

// bfloat16 by round-to-nearest-even on the bits: keeps subnormals, one NaN.
LK_INLINE float to_float(bf16 x) { return bits_to_float(uint32_t(x.bits) << 16); }
LK_INLINE float to_float(float x) { return x; }
template <typename T>
LK_INLINE T from_float(float x);
template <>
LK_INLINE float from_float<float>(float x) {
  return x;
}
template <>
LK_INLINE bf16 from_float<bf16>(float x) {
  uint32_t u = float_to_bits(x);
  if (x != x) return bf16{0x7fc0};
  return bf16{uint16_t((u + 0x7fff + ((u >> 16) & 1)) >> 16)};
}

LK_INLINE F16 splat(float x) { return F16{} + x; }
LK_INLINE U16 splat_u(uint32_t x) { return U16{} + x; }
LK_INLINE I16 iota() { return I16{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }

template <typename V>
LK_INLINE V load_as(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof(V));
  return v;
}
template <typename V>
LK_INLINE void store_as(void* p, V v) {
  std::memcpy(p, &v, sizeof(V));
}

LK_INLINE U16 widen(H16 h) {
#if defined(LK_AVX512)
  return (U16)_mm512_cvtepu16_epi32((__m256i)h);
#else
  return __builtin_convertvector(h, U16);
#endif
}
LK_INLINE H16 narrow(U16 u) {
#if defined(LK_AVX512)
  return (H16)_mm512_cvtepi32_epi16((__m512i)u);
#else
  return __builtin_convertvector(u, H16);
#endif
}

LK_INLINE F16 load(const float* p) { return load_as<F16>(p); }
LK_INLINE F16 load(const bf16* p) { return (F16)(widen(load_as<H16>(p)) << 16); }
LK_INLINE void store(float* p, F16 v) { store_as(p, v); }
LK_INLINE H16 round_bf16(F16 v) {
#if defined(LK_DOT_BF16)
  // The instruction agrees but for subnormals, which it flushes, and NaNs, which it keeps.
  constexpr int kSubnormalOrNan = 0x20 | 0x01 | 0x80;
  if (__builtin_expect(_mm512_fpclass_ps_mask((__m512)v, kSubnormalOrNan) == 0, 1))
    return (H16)_mm512_cvtneps_pbh((__m512)v);
#endif
  U16 u = (U16)v;
  U16 r = (u + 0x7fff + ((u >> 16) & 1)) >> 16;
  return narrow(v != v ? splat_u(0x7fc0) : r);
}
LK_INLINE void store(bf16* p, F16 v) { store_as(p, round_bf16(v)); }

// The value that a cast to T and back leaves.
template <typename T>
LK_INLINE F16 cast(F16 v);
template <>
LK_INLINE F16 cast<float>(F16 v) {
  return v;
}
template <>
LK_INLINE F16 cast<bf16>(F16 v) {
#if defined(LK_DOT_BF16)
  return (F16)(widen(round_bf16(v)) << 16);
#else
  U16 u = (U16)v;
  U16 r = (u + 0x7fff + ((u >> 16) & 1)) & 0xffff0000u;
  return v != v ? (F16)splat_u(0x7fc00000) : (F16)r;
#endif
}

// Loads and stores of the first n lanes only; the others read as zero.
template <typename T>
LK_INLINE F16 load_part(const T* p, int64_t n) {
  if (n >= LANES) return load(p);
  T buffer[LANES] = {};
  if (n > 0) std::memcpy(buffer, p, size_t(n) * sizeof(T));
  return load(buffer);
}
template <typename T>
LK_INLINE void store_part(T* p, F16 v, int64_t n) {
  if (n >= LANES) {
    store(p, v);
    return;
  }
  T buffer[LANES];
  store(buffer, v);
  if (n > 0) std::memcpy(p, buffer, size_t(n) * sizeof(T));
}

LK_INLINE F16 fma(F16 a, F16 b, F16 c) {
#if defined(LK_AVX512)
  return (F16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
  union U {
    F16 v;
    __m256 h[2];
  } x{a}, y{b}, z{c};
  z.h[0] = _mm256_fmadd_ps(x.h[0], y.h[0], z.h[0]);
  z.h[1] = _mm256_fmadd_ps(x.h[1], y.h[1], z.h[1]);
  return z.v;
#elif defined(__ARM_NEON) && defined(__aarch64__)
  union U {
    F16 v;
    float32x4_t h[4];
  } x{a}, y{b}, z{c};
  for (int i = 0; i < 4; ++i) z.h[i] = vfmaq_f32(z.h[i], x.h[i], y.h[i]);
  return z.v;
#else
  F16 r;
  for (int i = 0; i < LANES; ++i) r[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return r;
#endif
}
LK_INLINE float fma1(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

// Bit i is set where lane i of a comparison holds.
LK_INLINE uint32_t mask_of(I16 v) {
#if defined(LK_AVX512)
  return _mm512_movepi32_mask((__m512i)v);
#else
  uint32_t bits = 0;
  for (int i = 0; i < LANES; ++i) bits |= uint32_t(v[i] & 1) << i;
  return bits;
#endif
}

LK_INLINE F16 max(F16 a, F16 b) { return a > b ? a : b; }
LK_INLINE F16 min(F16 a, F16 b) { return a < b ? a : b; }

// Fixed trees over the lanes: distance 8, 4, 2, 1.
LK_INLINE float sum_lanes(F16 v) {
#if defined(LK_AVX512)
  const __m512 w = (__m512)v;
  const __m256 a = _mm256_add_ps(_mm512_castps512_ps256(w), _mm512_extractf32x8_ps(w, 1));
  const __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  const __m128 c = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
#else
  float t[LANES];
  store_as(t, v);
  for (int d = 8; d > 0; d >>= 1)
    for (int i = 0; i < d; ++i) t[i] = t[i] + t[i + d];
  return t[0];
#endif
}
LK_INLINE float max_lanes(F16 v) {
#if defined(LK_AVX512)
  const __m512 w = (__m512)v;
  const __m256 a = _mm256_max_ps(_mm512_castps512_ps256(w), _mm512_extractf32x8_ps(w, 1));
  const __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  const __m128 c = _mm_max_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_max_ss(c, _mm_movehdup_ps(c)));
#else
  float t[LANES];
  store_as(t, v);
  for (int d = 8; d > 0; d >>= 1)
    for (int i = 0; i < d; ++i) t[i] = t[i] > t[i + d] ? t[i] : t[i + d];
  return t[0];
#endif
}

// exp to about one unit in the last place; below -87.33 exactly 0, above 88.72 inf.
// Cody-Waite reduction; minimax coefficients as in Cephes expf (Moshier).
LK_INLINE F16 exp(F16 x) {
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  F16 t = fma(x, splat(1.44269504088896341f), splat(magic));
  F16 n = t - magic;
  F16 r = fma(n, splat(-0.693359375f), x);
  r = fma(n, splat(2.12194440e-4f), r);
  F16 p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r) + 1.0f;
  U16 scaled = (U16)p + (((U16)t - float_to_bits(magic)) << 23);
  F16 y = (F16)scaled;
  y = x < -87.33f ? F16{} : y;
  y = x > 88.72f ? splat(INFINITY) : y;
  return x != x ? x : y;
}
LK_INLINE float exp1(float x) { return exp(splat(x))[0]; }

// Natural logarithm of positive normal numbers (Cephes logf); 0 gives -inf.
LK_INLINE F16 log(F16 x) {
  U16 u = (U16)x;
  I16 e = (I16)(u >> 23) - 126;
  F16 m = (F16)((u & 0x007fffffu) | 0x3f000000u);  // [0.5, 1)
  I16 small = m < 0.707106781186547524f;
  e = small ? e - 1 : e;
  m = (small ? m + m : m) - 1.0f;
  F16 z = m * m;
  F16 p = splat(7.0376836292e-2f);
  p = fma(p, m, splat(-1.1514610310e-1f));
  p = fma(p, m, splat(1.1676998740e-1f));
  p = fma(p, m, splat(-1.2420140846e-1f));
  p = fma(p, m, splat(1.4249322787e-1f));
  p = fma(p, m, splat(-1.6668057665e-1f));
  p = fma(p, m, splat(2.0000714765e-1f));
  p = fma(p, m, splat(-2.4999993993e-1f));
  p = fma(p, m, splat(3.3333331174e-1f));
  F16 y = m * z * p;
  F16 ef = __builtin_convertvector(e, F16);
  y = fma(ef, splat(-2.12194440e-4f), y);
  y = fma(z, splat(-0.5f), y);
  F16 r = fma(ef, splat(0.693359375f), m + y);
  r = x == 0.0f ? splat(-INFINITY) : r;
  r = x == INFINITY ? x : r;
  return (x != x) | (x < 0.0f) ? splat(NAN) : r;
}

LK_INLINE F16 sigmoid(F16 x) { return 1.0f / (1.0f + exp(-x)); }

}  // namespace lk

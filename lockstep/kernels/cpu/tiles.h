// Register tiles: C[m][n] += sum over k ascending of A[m][k] * B[k][n].
//
// One float32 accumulator an element, K ascending, one instruction a step: the
// value of an element does not depend on the tile's height or on its neighbours.
#pragma once

#include <array>
#include <utility>

#include "vec.h"

namespace lk {

// Outputs a panel of packed weights, in 16-lane vectors, and rows a register tile.
#if defined(LK_AVX512)
constexpr int PANEL_VECS = 2;
constexpr int TILE_ROWS = 12;
#else
constexpr int PANEL_VECS = 1;
constexpr int TILE_ROWS = 4;
#endif
constexpr int PANEL = PANEL_VECS * LANES;

// Tiles work in the target's own registers: VF floats, VU words of WIDTH lanes.
#if defined(LK_AVX512)
constexpr int WIDTH = 16;
typedef F16 VF;
typedef U16 VU;
LK_INLINE VF fma_register(VF a, VF b, VF c) { return fma(a, b, c); }
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int WIDTH = 8;
typedef float VF __attribute__((vector_size(32)));
typedef uint32_t VU __attribute__((vector_size(32)));
LK_INLINE VF fma_register(VF a, VF b, VF c) {
  return (VF)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
}
#else
constexpr int WIDTH = 4;
typedef float VF __attribute__((vector_size(16)));
typedef uint32_t VU __attribute__((vector_size(16)));
LK_INLINE VF fma_register(VF a, VF b, VF c) {
#if defined(__ARM_NEON) && defined(__aarch64__)
  return (VF)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  for (int i = 0; i < WIDTH; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
#endif
}
#endif

// One step of a bfloat16 product: a and b hold pairs (k, k + 1), k in the low half.
// The hardware form flushes subnormals and takes the odd element first; see reference.py.
LK_INLINE VF multiply_add(VF acc, uint32_t a, VU b) {
  const VU pair = VU{} + a;
#if defined(LK_DOT_BF16)
  return (VF)_mm512_dpbf16_ps((__m512)acc, (__m512bh)pair, (__m512bh)b);
#else
  acc = fma_register((VF)(pair << 16), (VF)(b << 16), acc);
  return fma_register((VF)(pair & 0xffff0000u), (VF)(b & 0xffff0000u), acc);
#endif
}
LK_INLINE VF multiply_add(VF acc, float a, VF b) { return fma_register(VF{} + a, b, acc); }

template <typename E>
struct VectorOf;
template <>
struct VectorOf<float> {
  using type = VF;
};
template <>
struct VectorOf<uint32_t> {
  using type = VU;
};

// Lines that a tile brings near while it computes, one a step: memory is read all the time
// instead of only when a tile meets new weights.
struct Ahead {
  const char* first;
  int64_t stride;  // bytes; 0 asks for the same line again, which is free
};

// E is float (one k a step) or uint32_t (a bfloat16 pair a step). Strides in E.
// FRESH tiles start at zero, others at what C holds.
template <typename E, int ROWS, int VECS, bool FRESH>
void tile(const E* a, int64_t lda, const E* b, int64_t ldb, float* c, int64_t ldc, int64_t steps,
          Ahead ahead) {
  using V = typename VectorOf<E>::type;
  constexpr int N = VECS * LANES / WIDTH;
  // Three rows an address register: with one each, x86 runs out and moves them through
  // vector registers, which costs the multiply units 8% of their turns.
  constexpr int SHARE = 3, BASES = (ROWS + SHARE - 1) / SHARE;
  const E* base[BASES];
#pragma GCC unroll 16
  for (int g = 0; g < BASES; ++g) base[g] = a + g * SHARE * lda;
  VF acc[ROWS][N];
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) acc[i][j] = FRESH ? VF{} : load_as<VF>(c + i * ldc + j * WIDTH);
  for (int64_t k = 0; k < steps; ++k) {
    V bv[N];
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) bv[j] = load_as<V>(b + j * WIDTH);
    b += ldb;
    __builtin_prefetch(ahead.first, 0, 2);
    ahead.first += ahead.stride;
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; ++i) {
      E av;
      std::memcpy(&av, base[i / SHARE] + i % SHARE * lda, sizeof(E));
#pragma GCC unroll 8
      for (int j = 0; j < N; ++j) acc[i][j] = multiply_add(acc[i][j], av, bv[j]);
    }
#pragma GCC unroll 16
    for (int g = 0; g < BASES; ++g) {
      ++base[g];
      asm("" : "+r"(base[g]));  // keeps the compiler from making twelve of them again
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) store_as(c + i * ldc + j * WIDTH, acc[i][j]);
}

template <typename E>
using Tile = void (*)(const E*, int64_t, const E*, int64_t, float*, int64_t, int64_t, Ahead);

template <typename E, int VECS, bool FRESH, size_t... I>
constexpr std::array<Tile<E>, sizeof...(I)> tiles_of(std::index_sequence<I...>) {
  return {{tile<E, int(I) + 1, VECS, FRESH>...}};
}

// Any number of rows from 1 to TILE_ROWS, by the tile of exactly that height.
template <typename E, int VECS, bool FRESH>
void tile_rows(int rows, const E* a, int64_t lda, const E* b, int64_t ldb, float* c, int64_t ldc,
               int64_t steps, Ahead ahead) {
  static constexpr auto kTiles =
      tiles_of<E, VECS, FRESH>(std::make_index_sequence<size_t(TILE_ROWS)>());
  kTiles[size_t(rows - 1)](a, lda, b, ldb, c, ldc, steps, ahead);
}

template <typename E, int VECS, bool FRESH>
void tile_rows(int rows, const E* a, int64_t lda, const E* b, int64_t ldb, float* c, int64_t ldc,
               int64_t steps) {
  tile_rows<E, VECS, FRESH>(rows, a, lda, b, ldb, c, ldc, steps,
                            Ahead{reinterpret_cast<const char*>(b), 0});
}

}  // namespace lk

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

// One step of a bfloat16 product: a and b hold pairs (k, k + 1), k in the low half.
// The hardware form flushes subnormals and takes the odd element first; see reference.py.
LK_INLINE F16 dot_pair(F16 acc, U16 a, U16 b) {
#if defined(LK_DOT_BF16)
  return (F16)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
#else
  acc = fma((F16)(a << 16), (F16)(b << 16), acc);
  return fma((F16)(a & 0xffff0000u), (F16)(b & 0xffff0000u), acc);
#endif
}

LK_INLINE F16 multiply_add(F16 acc, float a, F16 b) { return fma(splat(a), b, acc); }
LK_INLINE F16 multiply_add(F16 acc, uint32_t a, U16 b) { return dot_pair(acc, splat_u(a), b); }

template <typename E>
struct VectorOf;
template <>
struct VectorOf<float> {
  using type = F16;
};
template <>
struct VectorOf<uint32_t> {
  using type = U16;
};

// E is float (one k a step) or uint32_t (a bfloat16 pair a step). Strides in E.
// FRESH tiles start at zero, others at what C holds.
template <typename E, int ROWS, int VECS, bool FRESH>
void tile(const E* a, int64_t lda, const E* b, int64_t ldb, float* c, int64_t ldc, int64_t steps) {
  using V = typename VectorOf<E>::type;
  F16 acc[ROWS][VECS];
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < VECS; ++j) acc[i][j] = FRESH ? F16{} : load(c + i * ldc + j * LANES);
  for (int64_t k = 0; k < steps; ++k) {
    V bv[VECS];
#pragma GCC unroll 4
    for (int j = 0; j < VECS; ++j) bv[j] = load_as<V>(b + k * ldb + j * LANES);
#pragma GCC unroll 16
    for (int i = 0; i < ROWS; ++i) {
      E av;
      std::memcpy(&av, a + i * lda + k, sizeof(E));
#pragma GCC unroll 4
      for (int j = 0; j < VECS; ++j) acc[i][j] = multiply_add(acc[i][j], av, bv[j]);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < VECS; ++j) store(c + i * ldc + j * LANES, acc[i][j]);
}

template <typename E>
using Tile = void (*)(const E*, int64_t, const E*, int64_t, float*, int64_t, int64_t);

template <typename E, int VECS, bool FRESH, size_t... I>
constexpr std::array<Tile<E>, sizeof...(I)> tiles_of(std::index_sequence<I...>) {
  return {{tile<E, int(I) + 1, VECS, FRESH>...}};
}

// Any number of rows from 1 to TILE_ROWS, by the tile of exactly that height.
template <typename E, int VECS, bool FRESH>
void tile_rows(int rows, const E* a, int64_t lda, const E* b, int64_t ldb, float* c, int64_t ldc,
               int64_t steps) {
  static constexpr auto kTiles =
      tiles_of<E, VECS, FRESH>(std::make_index_sequence<size_t(TILE_ROWS)>());
  kTiles[size_t(rows - 1)](a, lda, b, ldb, c, ldc, steps);
}

}  // namespace lk

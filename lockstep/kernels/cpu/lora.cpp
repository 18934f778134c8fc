// Products with low-rank deltas: acc + (cast(x a^T)) b^T on the rows that have an adapter.
#include "packed.h"
#include "product.h"

namespace lk {
namespace {

// One pair of one adapter, as native.py lays out its table. b's panels lie on the grid of
// the weight's panels from output `origin` on; lanes outside begin .. begin + n are zeros.
struct Pair {
  int64_t begin, n, rank, origin, a, b;
};

// Of adapter i the pairs first[i] .. first[i + 1].
struct Adapters {
  const int32_t* index;  // by row; -1 is none
  const int64_t* first;
  const Pair* pairs;
  int64_t count;

  int64_t run_end(int64_t row, int64_t rows) const {
    int64_t end = row + 1;
    while (end < rows && index[end] == index[row]) ++end;
    return end;
  }
};

template <typename T>
class Deltas {
  using E = typename Step<T>::type;
  static constexpr int64_t W = Step<T>::width;

 public:
  // Computes t = cast(x a^T) of every row that has an adapter.
  Deltas(Pool* pool, const T* x, int64_t rows, int64_t k, const Adapters& adapters)
      : adapters_(adapters) {
    for (int64_t i = 0; i < adapters.count; ++i) {
      int64_t steps = 0;
      for (int64_t p = adapters.first[i]; p < adapters.first[i + 1]; ++p)
        steps += steps_of<T>(adapters.pairs[p].rank);
      ldt_ = std::max(ldt_, steps);
    }
    t_.assign(size_t(rows * ldt_), E{});
    for (int64_t row = 0, end; row < rows; row = end) {
      end = adapters.run_end(row, rows);
      const int64_t adapter = adapters.index[row];
      if (adapter < 0) continue;
      T* t = reinterpret_cast<T*>(t_.data() + row * ldt_);
      for (int64_t p = adapters.first[adapter]; p < adapters.first[adapter + 1]; ++p) {
        const Pair& pair = adapters.pairs[p];
        product<T, 1>(pool, x + row * k, end - row, k, reinterpret_cast<const T*>(pair.a),
                      (pair.rank + PANEL - 1) / PANEL,
                      [&](int64_t first, int height, int64_t panel, const float* values) {
                        for (int i = 0; i < height; ++i)
                          for (int v = 0; v < PANEL_VECS; ++v) {
                            const int64_t at = panel * PANEL + v * LANES;
                            if (at >= pair.rank) break;
                            store_part(t + (first + i) * ldt_ * W + at,
                                       load(values + i * PANEL + v * LANES), pair.rank - at);
                          }
                      });
        t += steps_of<T>(pair.rank) * W;
      }
    }
  }

  // Adds to rows [row, row + height) of accumulators of the outputs base .. base + PANEL,
  // of which those before `limit` are meant.
  void add(int64_t row, int height, int64_t base, int64_t limit, float* values,
           int64_t ldv) const {
    const int64_t stop = row + height;
    for (int64_t begin = row, end; begin < stop; begin = end) {
      end = adapters_.run_end(begin, stop);
      const int64_t adapter = adapters_.index[begin];
      if (adapter < 0) continue;
      const E* t = t_.data() + begin * ldt_;
      for (int64_t p = adapters_.first[adapter]; p < adapters_.first[adapter + 1]; ++p) {
        const Pair& pair = adapters_.pairs[p];
        const int64_t steps = steps_of<T>(pair.rank);
        const int64_t low = std::max(pair.begin, base);
        const int64_t high = std::min(pair.begin + pair.n, std::min(limit, base + PANEL));
        if (low < high) {
          alignas(64) float delta[TILE_ROWS * PANEL];
          const E* b = reinterpret_cast<const E*>(pair.b) + (base - pair.origin) * steps;
          tile_rows<E, PANEL_VECS, true>(int(end - begin), t, ldt_, b, PANEL, delta, PANEL, steps);
          float* to = values + (begin - row) * ldv;
          for (int64_t i = 0; i < end - begin; ++i)
            for (int64_t c = low - base; c < high - base; ++c)
              to[i * ldv + c] += delta[i * PANEL + c];
        }
        t += steps;
      }
    }
  }

 private:
  const Adapters& adapters_;
  int64_t ldt_ = 0;
  std::vector<E> t_;
};

template <typename T>
void adapted_linear(Pool* pool, const T* x, int64_t rows, const T* weight, int64_t n, int64_t k,
                    const Adapters& adapters, const void* bias, int64_t bias_dtype,
                    const T* residual, T* out) {
  const Deltas<T> deltas(pool, x, rows, k, adapters);
  const LinearOut<T, T> finish{n, bias, bias_dtype, residual, out};
  product<T, 1>(pool, x, rows, k, weight, (n + PANEL - 1) / PANEL,
                [&](int64_t row, int height, int64_t panel, float* values) {
                  deltas.add(row, height, panel * PANEL, n, values, PANEL);
                  finish(row, height, panel, values);
                });
}

template <typename T>
void adapted_gated(Pool* pool, const T* x, int64_t rows, const T* weight, int64_t f, int64_t k,
                   const Adapters& adapters, int64_t activation, T* out) {
  const Deltas<T> deltas(pool, x, rows, k, adapters);
  const GatedOut<T> finish{f, activation, out};
  product<T, 2>(pool, x, rows, k, weight, (f + PANEL - 1) / PANEL,
                [&](int64_t row, int height, int64_t panel, float* values) {
                  // Outputs of the gate half end at f, where those of the up half begin.
                  const int64_t base = panel * PANEL;
                  deltas.add(row, height, base, f, values, 2 * PANEL);
                  deltas.add(row, height, f + base, 2 * f, values + PANEL, 2 * PANEL);
                  finish(row, height, panel, values);
                });
}

}  // namespace
}  // namespace lk

using namespace lk;

#pragma GCC visibility push(default)
extern "C" {

void lk_adapted_linear(void* pool, int64_t dtype, const void* x, int64_t rows, const void* weight,
                       int64_t n, int64_t k, const int32_t* index, const int64_t* first,
                       const void* pairs, int64_t count, const void* bias, int64_t bias_dtype,
                       const void* residual, void* out) {
  const Adapters adapters{index, first, (const Pair*)pairs, count};
  if (dtype == kFloat32)
    adapted_linear((Pool*)pool, (const float*)x, rows, (const float*)weight, n, k, adapters, bias,
                   bias_dtype, (const float*)residual, (float*)out);
  else
    adapted_linear((Pool*)pool, (const bf16*)x, rows, (const bf16*)weight, n, k, adapters, bias,
                   bias_dtype, (const bf16*)residual, (bf16*)out);
}

void lk_adapted_gated(void* pool, int64_t dtype, const void* x, int64_t rows, const void* weight,
                      int64_t f, int64_t k, const int32_t* index, const int64_t* first,
                      const void* pairs, int64_t count, int64_t activation, void* out) {
  const Adapters adapters{index, first, (const Pair*)pairs, count};
  if (dtype == kFloat32)
    adapted_gated((Pool*)pool, (const float*)x, rows, (const float*)weight, f, k, adapters,
                  activation, (float*)out);
  else
    adapted_gated((Pool*)pool, (const bf16*)x, rows, (const bf16*)weight, f, k, adapters,
                  activation, (bf16*)out);
}

LK_PACKED(lk_adapted_linear)
LK_PACKED(lk_adapted_gated)
}
#pragma GCC visibility pop

// From float32 logits to log-sum-exp, argmax and drawn ids; one row is one task.
#include <algorithm>
#include <cmath>
#include <vector>

#include "threads.h"
#include "vec.h"

namespace lk {
namespace {

constexpr float kNever = -INFINITY;

// Largest value; NaN counts as the smallest.
float row_max(const float* x, int64_t n) {
  F16 top = splat(kNever);
  for (int64_t i = 0; i < n; i += LANES) {
    F16 v = n - i >= LANES ? load(x + i) : load_part(x + i, n - i);
    if (n - i < LANES) v = iota() < int32_t(n - i) ? v : splat(kNever);
    top = max(v, top);
  }
  return max_lanes(top);
}

int64_t row_argmax(const float* x, int64_t n) {
  const float top = row_max(x, n);
  for (int64_t i = 0; i < n; ++i)
    if (x[i] == top) return i;
  return 0;  // every value is NaN
}

float log_sum_exp(const float* x, int64_t n, int64_t block) {
  const float top = row_max(x, n);
  if (top == kNever || top == INFINITY) return top;
  float total = 0.0f;
  for (int64_t b = 0; b < n; b += block) {
    const int64_t end = std::min(n, b + block);
    F16 sum{};
    for (int64_t i = b; i < end; i += LANES) {
      F16 v = exp(load_part(x + i, end - i) - top);
      if (end - i < LANES) v = iota() < int32_t(end - i) ? v : F16{};
      sum = sum + v;
    }
    total = total + sum_lanes(sum);
  }
  return top + log(splat(total))[0];
}

// --- random numbers -----------------------------------------------------------

LK_INLINE void multiply_wide(U16 a, uint32_t b, U16* high, U16* low) {
#if defined(LK_AVX512)
  const __m512i m = _mm512_set1_epi64(b);
  const __m512i even = _mm512_mul_epu32((__m512i)a, m);
  const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64((__m512i)a, 32), m);
  *low = (U16)_mm512_mask_blend_epi32(0xaaaa, even, _mm512_slli_epi64(odd, 32));
  *high = (U16)_mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd);
#else
  for (int i = 0; i < LANES; ++i) {
    const uint64_t product = uint64_t(a[i]) * b;
    (*high)[i] = uint32_t(product >> 32);
    (*low)[i] = uint32_t(product);
  }
#endif
}

// Philox-4x32-10 (Salmon, Moraes, Dror, Shaw 2011).
LK_INLINE void philox(U16 c[4], uint32_t k0, uint32_t k1) {
#pragma GCC unroll 10
  for (int round = 0; round < 10; ++round) {
    U16 h0, l0, h1, l1;
    multiply_wide(c[0], 0xD2511F53u, &h0, &l0);
    multiply_wide(c[2], 0xCD9E8D57u, &h1, &l1);
    const U16 a = h1 ^ c[1] ^ k0, b = h0 ^ c[3] ^ k1;
    c[0] = a;
    c[1] = l1;
    c[2] = b;
    c[3] = l0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
}

struct Stream {
  uint32_t k0, k1, position, choice;
};

// First Philox words of sixteen ids, as uniform numbers in (0, 1).
LK_INLINE F16 uniform(const Stream& s, I16 ids) {
  U16 c[4] = {(U16)ids, splat_u(s.position), splat_u(s.choice), splat_u(0)};
  philox(c, s.k0, s.k1);
  F16 u = (__builtin_convertvector(c[0], F16) + 0.5f) * 2.3283064365386963e-10f;
  return min(u, splat(1.0f - 5.9604644775390625e-8f));
}

// -log(-log1p(-u)), with log1p(-u) = log(w) * -u / (w - 1) and w = 1 - u rounded (Kahan).
LK_INLINE F16 gumbel(F16 u) {
  const F16 w = 1.0f - u, d = w - 1.0f;
  const F16 e = d == 0.0f ? u : -(log(w) * (-u / d));
  return -log(e);
}

// An upper bound of exp(x), loose by at most 7%: 2^i (1 + f) >= 2^(i + f).
LK_INLINE F16 exp_above(F16 x) {
  x = min(max(x, splat(-80.0f)), splat(1.0f));
  const F16 scaled = fma(x, splat(12102203.16f), splat(1065353216.0f));  // 2^23 / ln 2; 1.0f
  return (F16)__builtin_convertvector(scaled, I16) * 1.01f;
}

// --- selection ----------------------------------------------------------------

// Orders floats as unsigned integers; -0 and +0 are one value.
LK_INLINE uint32_t order_key(float x) {
  const uint32_t u = float_to_bits(x + 0.0f);
  return u & 0x80000000u ? ~u : u | 0x80000000u;
}

struct Entry {
  uint32_t key, id;
};

// Probability mass in units of 2^-32 of the largest: integers, so that sums have no order.
LK_INLINE uint64_t mass_of(float p) { return uint64_t(double(p) * 4294967296.0); }

// Memory of the calling thread, so that a draw allocates nothing once it is warm.
struct Buffers {
  std::vector<float> z, p;
  std::vector<Entry> kept, chosen, rest, next;
  std::vector<uint64_t> bins;
};
thread_local Buffers t_buffers;

// Shortens `b.kept` (ids ascending among equal keys) to the shortest prefix in
// (key descending, id ascending) order whose weights sum to `target`, in no order.
// weight(entry) depends on the key alone. Radix selection, 11 + 11 + 10 bits.
template <typename F>
void keep_prefix(Buffers& b, uint64_t target, F&& weight) {
  constexpr int kShift[3] = {21, 10, 0};
  constexpr uint32_t kMask[3] = {2047, 2047, 1023};
  b.bins.resize(2048);
  b.chosen.clear();
  b.rest.swap(b.kept);
  uint64_t before = 0;
  for (int level = 0; level < 3; ++level) {
    std::fill(b.bins.begin(), b.bins.end(), 0);
    for (const Entry& x : b.rest) b.bins[(x.key >> kShift[level]) & kMask[level]] += weight(x);
    int64_t edge = kMask[level];
    for (; edge > 0; --edge) {
      if (before + b.bins[size_t(edge)] >= target) break;
      before += b.bins[size_t(edge)];
    }
    b.next.clear();
    for (const Entry& x : b.rest) {
      const int64_t bin = (x.key >> kShift[level]) & kMask[level];
      if (bin > edge)
        b.chosen.push_back(x);
      else if (bin == edge)
        b.next.push_back(x);
    }
    b.rest.swap(b.next);
  }
  for (const Entry& x : b.rest) {  // equal keys, ids ascending
    if (before >= target && !b.chosen.empty()) break;
    before += weight(x);
    b.chosen.push_back(x);
  }
  b.kept.swap(b.chosen);
}

// Every id whose z lies above `floor`, ascending.
void collect(Buffers& b, int64_t n, float floor) {
  b.kept.clear();
  for (int64_t i = 0; i < n; i += LANES)
    for (uint32_t above = mask_of(load(b.z.data() + i) > floor); above; above &= above - 1) {
      const int64_t id = i + __builtin_ctz(above);
      b.kept.push_back({order_key(b.z[size_t(id)]), uint32_t(id)});
    }
}

struct Params {
  float temperature;
  int32_t top_k;
  float top_p, min_p;
  Stream stream;
};

// z of sixteen ids from i on; NaN and what lies beyond the row never win.
LK_INLINE F16 scaled(const float* x, int64_t n, int64_t i, float top, float temperature) {
  F16 z = (load_part(x + i, n - i) - top) / temperature;
  z = z == z ? z : splat(kNever);
  return n - i < LANES ? (iota() < int32_t(n - i) ? z : splat(kNever)) : z;
}

// Best of z + g over all ids. A cheap bound on g spares most ids the logarithms:
// z + g >= best only if u <= 1 - exp(-exp(z - best)) <= exp(z - best).
int64_t draw_all(const float* x, int64_t n, float top, const Params& p) {
  float best = kNever;
  F16 best_value = splat(kNever);
  I16 best_id{};
  for (int64_t i = 0; i < n; i += LANES) {
    const F16 z = scaled(x, n, i, top, p.temperature);
    const I16 ids = iota() + int32_t(i);
    const F16 u = uniform(p.stream, ids);
    if (!mask_of(u <= exp_above(z - best))) continue;
    const F16 value = z + gumbel(u);
    const I16 better = value > best_value;
    best_value = better ? value : best_value;
    best_id = better ? ids : best_id;
    best = max_lanes(best_value);
  }
  float value = kNever;
  int64_t id = -1;
  for (int lane = 0; lane < LANES; ++lane)
    if (best_value[lane] > value || (best_value[lane] == value && id >= 0 && best_id[lane] < id)) {
      value = best_value[lane];
      id = best_id[lane];
    }
  return id;
}

int64_t draw_kept(const Buffers& b, const Params& p) {
  float best = kNever;
  int64_t best_id = -1;
  for (size_t at = 0; at < b.kept.size(); at += LANES) {
    const size_t count = std::min<size_t>(LANES, b.kept.size() - at);
    I16 ids{};
    F16 value = splat(kNever);
    for (size_t j = 0; j < count; ++j) {
      ids[j] = int32_t(b.kept[at + j].id);
      value[j] = b.z[b.kept[at + j].id];
    }
    value = value + gumbel(uniform(p.stream, ids));
    for (size_t j = 0; j < count; ++j)
      if (value[j] > best || (value[j] == best && ids[j] < best_id)) {
        best = value[j];
        best_id = ids[j];
      }
  }
  return best_id;
}

// Where the search for candidates stops, in z; below the last, mass is 0.
constexpr float kFloors[] = {-1, -2, -4, -8, -16, -23};

// The top_k largest. Counting is cheap, so only few more than k are collected.
void keep_top_k(Buffers& b, int64_t n, int64_t k) {
  float floor = kNever;
  for (float candidate : kFloors) {
    int64_t above = 0;
    for (int64_t i = 0; i < n; i += LANES)
      above += __builtin_popcount(mask_of(load(b.z.data() + i) > candidate));
    if (above >= k) {
      floor = candidate;
      break;
    }
  }
  collect(b, n, floor);
  keep_prefix(b, uint64_t(k), [](const Entry&) { return uint64_t(1); });
}

uint64_t mass_needed(double top_p, uint64_t total) {
  return std::max<uint64_t>(1, uint64_t(std::ceil(std::max(top_p, 0.0) * double(total))));
}

// Shortens what top_k kept, or all ids if `all`, to the shortest prefix of mass top_p.
void keep_top_p(Buffers& b, int64_t n, bool all, float top_p) {
  auto mass = [&](const Entry& entry) { return mass_of(b.p[entry.id]); };
  uint64_t total = 0;
  if (all)
    for (int64_t i = 0; i < n; ++i) total += mass_of(b.p[size_t(i)]);
  else
    for (const Entry& entry : b.kept) total += mass(entry);
  const uint64_t needed = mass_needed(double(top_p), total);
  if (all)
    for (float floor : kFloors) {
      uint64_t above = 0;
      collect(b, n, floor);
      for (const Entry& entry : b.kept) above += mass(entry);
      if (above >= needed) break;
    }
  keep_prefix(b, needed, mass);
}

// The ids that top_k, top_p and min_p leave, into b.kept.
void truncate(Buffers& b, const float* x, int64_t n, float top, const Params& p) {
  const bool by_k = p.top_k > 0 && p.top_k < n, by_p = p.top_p < 1.0f, by_min = p.min_p > 0.0f;
  const size_t padded = size_t((n + LANES - 1) / LANES * LANES);
  b.z.resize(padded);
  b.p.resize(padded);
  for (int64_t i = 0; i < n; i += LANES) {
    const F16 z = scaled(x, n, i, top, p.temperature);
    store(b.z.data() + i, z);
    store(b.p.data() + i, exp(z));
  }
  if (by_k) keep_top_k(b, n, p.top_k);
  if (by_p) keep_top_p(b, n, !by_k, p.top_p);
  if (!by_k && !by_p) collect(b, n, std::log(p.min_p) - 1.0f);
  if (by_min)
    b.kept.erase(std::remove_if(b.kept.begin(), b.kept.end(),
                                [&](const Entry& entry) { return !(b.p[entry.id] >= p.min_p); }),
                 b.kept.end());
}

int64_t sample_row(const float* x, int64_t n, const Params& p) {
  const float top = row_max(x, n);
  if (!(p.temperature > 0.0f) || !std::isfinite(top)) return row_argmax(x, n);
  int64_t id;
  if ((p.top_k <= 0 || p.top_k >= n) && p.top_p >= 1.0f && !(p.min_p > 0.0f)) {
    id = draw_all(x, n, top, p);
  } else {
    truncate(t_buffers, x, n, top, p);
    id = draw_kept(t_buffers, p);
  }
  return id >= 0 ? id : row_argmax(x, n);
}

}  // namespace
}  // namespace lk

using namespace lk;

#pragma GCC visibility push(default)
extern "C" {

void lk_log_sum_exp(void* pool, const float* x, int64_t rows, int64_t n, int64_t block,
                    float* out) {
  parallel((Pool*)pool, rows, [&](int64_t r) { out[r] = log_sum_exp(x + r * n, n, block); });
}

void lk_argmax(void* pool, const float* x, int64_t rows, int64_t n, int64_t* out) {
  parallel((Pool*)pool, rows, [&](int64_t r) { out[r] = row_argmax(x + r * n, n); });
}

void lk_sample(void* pool, const float* x, int64_t rows, int64_t n, const float* temperature,
               const int32_t* top_k, const float* top_p, const float* min_p, const int64_t* seed,
               const int32_t* choice, const int32_t* position, int64_t* out) {
  parallel((Pool*)pool, rows, [&](int64_t r) {
    const uint64_t s = uint64_t(seed[r]);
    const Params p{temperature[r],
                   top_k[r],
                   top_p[r],
                   min_p[r],
                   {uint32_t(s), uint32_t(s >> 32), uint32_t(position[r]), uint32_t(choice[r])}};
    out[r] = sample_row(x + r * n, n, p);
  });
}

// Philox on explicit counters [count][4], for the tests' known answers.
void lk_philox(const uint32_t* counters, int64_t count, uint32_t k0, uint32_t k1, uint32_t* out) {
  for (int64_t i = 0; i < count; ++i) {
    U16 c[4];
    for (int j = 0; j < 4; ++j) c[j] = splat_u(counters[i * 4 + j]);
    philox(c, k0, k1);
    for (int j = 0; j < 4; ++j) out[i * 4 + j] = c[j][0];
  }
}
}
#pragma GCC visibility pop

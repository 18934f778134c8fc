// Paged causal attention: prefill, chunks, decode and verification in one launch.
//
// A row's tree: segments at absolute multiples of `segment`, in each a fresh online
// softmax over blocks of BLOCK keys ascending, partials merged ascending. Keys that
// a row may not see are skipped, so neither their bits nor their presence matter.
#include <algorithm>
#include <cmath>

#include "packed.h"
#include "threads.h"
#include "tiles.h"

namespace lk {
namespace {

constexpr int64_t BLOCK = 32;
// Query rows times heads that share one load of a block.
constexpr int64_t UNIT_ROWS = 48;
// Up to so many, keys and values are read where they lie instead of being laid out once.
constexpr int64_t FEW_ROWS = 4;

template <typename T>
struct KeyStep;
template <>
struct KeyStep<float> {
  using type = float;
};
template <>
struct KeyStep<bf16> {
  using type = uint32_t;
};

template <typename T>
struct Launch {
  const T* q;
  const T* k;
  const T* v;
  T* out;
  int64_t page_stride, page_tokens, head_dim, q_heads, kv_heads, pages, table_width;
  const int32_t* query_start;
  const int32_t* context_len;
  const int32_t* page_table;
  int64_t runs, window, segment;
  float scale;
};

// Query rows [first, last) of one run under one key/value head.
struct Unit {
  int64_t run, first, last, head, cost;
};

// Scratch of one unit, carved out of the thread's own memory.
struct Work {
  float *keys, *values, *scores, *acc, *m, *l, *total_acc, *total_m, *total_l, *query;
  int32_t *low, *high;  // row r sees positions [low[r], high[r]); both grow with r

  static size_t floats(int64_t rows, int64_t e) {
    return size_t(2 * BLOCK * e + rows * (BLOCK + 3 * e) + 6 * (rows + LANES) + 8 * LANES);
  }
  Work(float* base, int64_t rows, int64_t e) {
    auto take = [&](int64_t n) {
      float* p = base;
      base += (n + LANES - 1) / LANES * LANES;
      return p;
    };
    keys = take(BLOCK * e);
    values = take(BLOCK * e);
    query = take(rows * e);
    scores = take(rows * BLOCK);
    acc = take(rows * e);
    total_acc = take(rows * e);
    m = take(rows);
    l = take(rows);
    total_m = take(rows);
    total_l = take(rows);
    low = reinterpret_cast<int32_t*>(take(rows));
    high = reinterpret_cast<int32_t*>(take(rows));
  }
};

// The keys and values of one block where they lie, sixteen positions at a time; a null
// where nothing is to be read. Few rows read them in place, and fetch the next block's
// lines, one by one, while they compute.
constexpr int64_t PARTS = BLOCK / LANES;
static_assert(PARTS == 2, "a part that is not there is read as the other one");
template <typename T>
struct InPlace {
  const typename KeyStep<T>::type* keys[PARTS] = {};
  const T* values[PARTS] = {};
  bool whole = true;  // every position of the range has a page of at least sixteen
};

LK_INLINE void fetch(const void* line) { __builtin_prefetch(line, 0, 2); }

// Calls use(column, count, keys, values) for every stretch of one page in positions
// [begin, end); column counts from `start`. Absent pages are left out.
template <typename T, typename F>
LK_INLINE void each_page(const Launch<T>& a, const Unit& u, int64_t start, int64_t begin,
                         int64_t end, F&& use) {
  const int64_t e = a.head_dim, tokens = a.page_tokens;
  const int32_t* table = a.page_table + u.run * a.table_width;
  for (int64_t p = begin; p < end;) {
    const int64_t entry = p / tokens, at = p % tokens, n = std::min(tokens - at, end - p);
    const int64_t page = entry < a.table_width ? table[entry] : -1;
    if (page >= 0 && page < a.pages) {
      const int64_t base = page * a.page_stride + u.head * tokens * e;
      using E = typename KeyStep<T>::type;
      use(p - start, n, reinterpret_cast<const E*>(a.k + base) + at, a.v + base + at * e);
    }
    p += n;
  }
}

// Keys [begin, end) of the block that starts at position `start`, as [step][BLOCK], and
// their values, converted to float32 [BLOCK][E]. Everything else reads as zero.
template <typename T>
void load_block(const Launch<T>& a, const Unit& u, int64_t start, int64_t begin, int64_t end,
                Work& w) {
  using E = typename KeyStep<T>::type;
  constexpr int64_t W = sizeof(E) / sizeof(T);
  const int64_t e = a.head_dim, steps = e / W, tokens = a.page_tokens;
  E* keys = reinterpret_cast<E*>(w.keys);
  if (begin > start || end < start + BLOCK) {
    std::memset(keys, 0, sizeof(E) * size_t(steps * BLOCK));
    std::memset(w.values, 0, sizeof(float) * size_t(BLOCK * e));
  }
  each_page(a, u, start, begin, end, [&](int64_t column, int64_t n, const E* from, const T* v) {
    if (n == LANES) {
      for (int64_t s = 0; s < steps; ++s)
        store_as(keys + s * BLOCK + column, load_as<U16>(from + s * tokens));
    } else {
      for (int64_t s = 0; s < steps; ++s)
        std::memcpy(keys + s * BLOCK + column, from + s * tokens, sizeof(E) * size_t(n));
    }
    for (int64_t i = 0; i < n * e; i += LANES) store(w.values + column * e + i, load(v + i));
  });
}

// Where positions [begin, end) of the block at `start` lie. Positions outside that share a
// part with one inside are read too, and masked.
template <typename T>
InPlace<T> find_block(const Launch<T>& a, const Unit& u, int64_t start, int64_t begin,
                      int64_t end) {
  InPlace<T> found;
  const int64_t e = a.head_dim, tokens = a.page_tokens;
  const int32_t* table = a.page_table + u.run * a.table_width;
  for (int64_t part = 0; part < PARTS; ++part) {
    const int64_t p = start + part * LANES;
    if (p >= end || p + LANES <= begin) continue;
    const int64_t entry = p / tokens, at = p - entry * tokens;
    const int64_t page = entry < a.table_width ? table[entry] : -1;
    if (tokens % LANES != 0 || page < 0 || page >= a.pages) {
      found.whole = false;
      return found;
    }
    using E = typename KeyStep<T>::type;
    const int64_t base = page * a.page_stride + u.head * tokens * e;
    found.keys[part] = reinterpret_cast<const E*>(a.k + base) + at;
    found.values[part] = a.v + base + at * e;
  }
  return found;
}

// One row's step of the online softmax: scores become probabilities in place.
LK_INLINE void soften(float* s, int64_t low, int64_t high, float scale, float* m, float* l,
                      float* acc, int64_t e) {
  F16 x[BLOCK / LANES];
  F16 top = splat(-INFINITY);
  for (int j = 0; j < BLOCK / LANES; ++j) {
    x[j] = load(s + j * LANES) * scale;
    if (low > 0 || high < BLOCK) {
      const I16 at = iota() + j * LANES;
      x[j] = (at >= int32_t(low)) & (at < int32_t(high)) ? x[j] : splat(-INFINITY);
    }
    top = max(x[j], top);
  }
  const float block_max = max_lanes(top);
  const float next = block_max > *m ? block_max : *m;
  const float keep = exp1(*m - next);
  F16 sum{};
  for (int j = 0; j < BLOCK / LANES; ++j) {
    x[j] = exp(x[j] - next);
    store(s + j * LANES, x[j]);
    sum = j == 0 ? x[j] : sum + x[j];
  }
  *l = fma1(*l, keep, sum_lanes(sum));
  *m = next;
  for (int64_t i = 0; i < e; i += LANES) store(acc + i, load(acc + i) * keep);
}

// acc[row] += sum over keys of p[row][key] * value[key], keys [low, high) ascending.
LK_INLINE void weigh(int rows, const float* p, const float* values, float* acc, int64_t e,
                     int64_t low, int64_t high) {
  int64_t i = 0;
  for (; i + PANEL <= e; i += PANEL)
    tile_rows<float, PANEL_VECS, false>(rows, p + low, BLOCK, values + low * e + i, e, acc + i, e,
                                        high - low);
  for (; i < e; i += LANES)
    tile_rows<float, 1, false>(rows, p + low, BLOCK, values + low * e + i, e, acc + i, e,
                               high - low);
}

// Scores of few rows against keys where they lie, [step][tokens].
template <typename T, int ROWS>
void score_in_place(const typename KeyStep<T>::type* q, int64_t steps, int64_t tokens,
                    const InPlace<T>& block, const InPlace<T>& next, float* scores) {
  using E = typename KeyStep<T>::type;
  using V = typename VectorOf<E>::type;
  constexpr int N = LANES / WIDTH;
  const E *key[PARTS], *line[PARTS];
  for (int64_t part = 0; part < PARTS; ++part) {
    key[part] = block.keys[part] ? block.keys[part] : block.keys[PARTS - 1 - part];
    line[part] = next.keys[part] ? next.keys[part] : key[part];
  }
  VF acc[ROWS][PARTS][N];
#pragma GCC unroll 64
  for (int i = 0; i < ROWS * PARTS * N; ++i) (&acc[0][0][0])[i] = VF{};
  for (int64_t s = 0; s < steps; ++s) {
#pragma GCC unroll 8
    for (int part = 0; part < PARTS; ++part) {
      fetch(line[part] + s * tokens);
#pragma GCC unroll 8
      for (int j = 0; j < N; ++j) {
        const V b = load_as<V>(key[part] + s * tokens + j * WIDTH);
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; ++i)
          acc[i][part][j] = multiply_add(acc[i][part][j], q[i * steps + s], b);
      }
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; ++i)
#pragma GCC unroll 8
    for (int part = 0; part < PARTS; ++part)
#pragma GCC unroll 8
      for (int j = 0; j < N; ++j)
        store_as(scores + i * BLOCK + part * LANES + j * WIDTH, acc[i][part][j]);
}

// As `weigh` for few rows, from values where they lie.
template <typename T, int ROWS, int VECS>
LK_INLINE void weigh_chunk(const float* p, const InPlace<T>& block, const InPlace<T>& next,
                           int64_t at, float* acc, int64_t e, int64_t low, int64_t high) {
  constexpr int64_t kLine = 64 / sizeof(T);
  F16 sum[ROWS][VECS];
  for (int i = 0; i < ROWS; ++i)
    for (int j = 0; j < VECS; ++j) sum[i][j] = load(acc + i * e + j * LANES);
  for (int64_t part = 0; part < PARTS; ++part) {
    const int64_t from = std::max(low, part * LANES), to = std::min(high, (part + 1) * LANES);
    if (from >= to) continue;
    const T* value = block.values[part] + at - part * LANES * e;
    const T* line = (next.values[part] ? next.values[part] : block.values[part]) + at -
                    part * LANES * e;
    for (int64_t key = from; key < to; ++key) {
      F16 v[VECS];
      for (int j = 0; j < VECS; ++j) v[j] = load(value + key * e + j * LANES);
      for (int64_t j = 0; j < VECS * LANES; j += kLine) fetch(line + key * e + j);
      for (int i = 0; i < ROWS; ++i)
        for (int j = 0; j < VECS; ++j) sum[i][j] = fma(splat(p[i * BLOCK + key]), v[j], sum[i][j]);
    }
  }
  for (int i = 0; i < ROWS; ++i)
    for (int j = 0; j < VECS; ++j) store(acc + i * e + j * LANES, sum[i][j]);
}

template <typename T, int ROWS>
void weigh_in_place(const float* p, const InPlace<T>& block, const InPlace<T>& next, float* acc,
                    int64_t e, int64_t low, int64_t high) {
  constexpr int VECS = 2 * PANEL_VECS;
  for (int64_t i = 0; i < e;) {
    if (i + VECS * LANES <= e) {
      weigh_chunk<T, ROWS, VECS>(p, block, next, i, acc + i, e, low, high);
      i += VECS * LANES;
    } else {
      weigh_chunk<T, ROWS, 1>(p, block, next, i, acc + i, e, low, high);
      i += LANES;
    }
  }
}

// Adds a finished segment to the total: exact copy for a row's first segment.
void merge(Work& w, int64_t row, int64_t e, bool first) {
  float* total = w.total_acc + row * e;
  const float* part = w.acc + row * e;
  if (first) {
    std::memcpy(total, part, sizeof(float) * size_t(e));
    w.total_m[row] = w.m[row];
    w.total_l[row] = w.l[row];
    return;
  }
  const float next = w.m[row] > w.total_m[row] ? w.m[row] : w.total_m[row];
  const float a = exp1(w.total_m[row] - next), b = exp1(w.m[row] - next);
  w.total_l[row] = fma1(w.total_l[row], a, w.l[row] * b);
  w.total_m[row] = next;
  for (int64_t i = 0; i < e; i += LANES)
    store(total + i, fma(load(total + i), splat(a), load(part + i) * b));
}

// Rows [from, to) of a unit that see some of the block at k0.
struct Span {
  int64_t from, to;
};
Span rows_at(const Work& w, int64_t k0, int64_t rows) {
  Span s{0, rows};
  while (s.from < rows && w.high[s.from] <= k0) ++s.from;
  while (s.to > s.from && w.low[s.to - 1] >= k0 + BLOCK) --s.to;
  return s;
}

// Calls use(row, count, low, high) for neighbouring rows, at most `most`, that see the same
// keys [low, high) of the block.
template <typename F>
LK_INLINE void each_alike(const Work& w, int64_t k0, Span span, int64_t most, F&& use) {
  for (int64_t r = span.from; r < span.to;) {
    const int64_t low = std::max<int64_t>(0, w.low[r] - k0);
    const int64_t high = std::min<int64_t>(BLOCK, w.high[r] - k0);
    int64_t n = 1;
    while (n < most && r + n < span.to && std::max<int64_t>(0, w.low[r + n] - k0) == low &&
           std::min<int64_t>(BLOCK, w.high[r + n] - k0) == high)
      ++n;
    use(r, n, low, high);
    r += n;
  }
}

// One block's keys and values into the running softmax of every row that sees some of them.
template <typename T>
void add_block(const Launch<T>& a, const Unit& u, int64_t k0, int64_t rows, const T* query,
               Work& w) {
  using E = typename KeyStep<T>::type;
  const int64_t e = a.head_dim, steps = e * int64_t(sizeof(T)) / int64_t(sizeof(E));
  load_block(a, u, k0, std::max<int64_t>(k0, w.low[0]),
             std::min<int64_t>(k0 + BLOCK, w.high[rows - 1]), w);
  const Span span = rows_at(w, k0, rows);
  const E* keys = reinterpret_cast<const E*>(w.keys);
  for (int64_t r = span.from; r < span.to; r += TILE_ROWS)
    for (int64_t j = 0; j < BLOCK; j += PANEL)
      tile_rows<E, PANEL_VECS, true>(int(std::min<int64_t>(TILE_ROWS, span.to - r)),
                                     reinterpret_cast<const E*>(query) + r * steps, steps,
                                     keys + j, BLOCK, w.scores + r * BLOCK + j, BLOCK, steps);
  for (int64_t r = span.from; r < span.to; ++r)
    soften(w.scores + r * BLOCK, w.low[r] - k0, w.high[r] - k0, a.scale, w.m + r, w.l + r,
           w.acc + r * e, e);
  each_alike(w, k0, span, TILE_ROWS, [&](int64_t r, int64_t n, int64_t low, int64_t high) {
    weigh(int(n), w.scores + r * BLOCK, w.values, w.acc + r * e, e, low, high);
  });
}

template <typename T, int ROWS>
void add_in_place(const Launch<T>& a, int64_t k0, const InPlace<T>& block, const InPlace<T>& next,
                  const T* query, Work& w) {
  using E = typename KeyStep<T>::type;
  const int64_t e = a.head_dim, steps = e * int64_t(sizeof(T)) / int64_t(sizeof(E));
  score_in_place<T, ROWS>(reinterpret_cast<const E*>(query), steps, a.page_tokens, block, next,
                          w.scores);
  const Span span = rows_at(w, k0, ROWS);
  for (int64_t r = span.from; r < span.to; ++r)
    soften(w.scores + r * BLOCK, w.low[r] - k0, w.high[r] - k0, a.scale, w.m + r, w.l + r,
           w.acc + r * e, e);
  each_alike(w, k0, span, ROWS, [&](int64_t r, int64_t n, int64_t low, int64_t high) {
    const float* p = w.scores + r * BLOCK;
    float* acc = w.acc + r * e;
    if (n == ROWS) return weigh_in_place<T, ROWS>(p, block, next, acc, e, low, high);
    for (int64_t i = 0; i < n; ++i)
      weigh_in_place<T, 1>(p + i * BLOCK, block, next, acc + i * e, e, low, high);
  });
}

template <typename T>
void add_few(int64_t rows, const Launch<T>& a, int64_t k0, const InPlace<T>& block,
             const InPlace<T>& next, const T* query, Work& w) {
  switch (rows) {
    case 1: return add_in_place<T, 1>(a, k0, block, next, query, w);
    case 2: return add_in_place<T, 2>(a, k0, block, next, query, w);
    case 3: return add_in_place<T, 3>(a, k0, block, next, query, w);
    default: return add_in_place<T, 4>(a, k0, block, next, query, w);
  }
}

// Positions that some row of the unit sees.
template <typename T>
void seen_by(const Launch<T>& a, const Unit& u, int64_t* begin, int64_t* end) {
  const int64_t length = a.query_start[u.run + 1] - a.query_start[u.run];
  const int64_t place = a.context_len[u.run] - length;
  *begin = a.window > 0 ? std::max<int64_t>(0, place + u.first + 1 - a.window) : 0;
  *end = place + u.last;
}

// The block with which a unit begins.
template <typename T>
InPlace<T> first_block(const Launch<T>& a, const Unit* u) {
  if (u == nullptr) return {};
  int64_t begin, end;
  seen_by(a, *u, &begin, &end);
  const int64_t start = begin / BLOCK * BLOCK;
  return find_block(a, *u, start, begin, std::min(start + BLOCK, end));
}

// `after` is the unit that this thread will probably run next, or null.
template <typename T>
void run_unit(const Launch<T>& a, const Unit& u, const Unit* after) {
  const int64_t e = a.head_dim, group = a.q_heads / a.kv_heads;
  const int64_t rows = (u.last - u.first) * group;
  Work w(static_cast<float*>(scratch(sizeof(float) * Work::floats(rows, e))), rows, e);
  T* query = reinterpret_cast<T*>(w.query);
  const int64_t row0 = a.query_start[u.run];
  const int64_t place = a.context_len[u.run] - (a.query_start[u.run + 1] - row0);
  for (int64_t i = u.first; i < u.last; ++i)
    std::memcpy(query + (i - u.first) * group * e,
                a.q + ((row0 + i) * a.q_heads + u.head * group) * e, sizeof(T) * size_t(group * e));

  for (int64_t r = 0; r < rows; ++r) {
    w.high[r] = int32_t(place + u.first + r / group + 1);
    w.low[r] = a.window > 0 ? int32_t(std::max<int64_t>(0, w.high[r] - a.window)) : 0;
  }
  const bool few = rows <= FEW_ROWS;
  const int64_t begin = w.low[0], end = w.high[rows - 1];
  InPlace<T> next;
  if (few) next = first_block(a, &u);
  for (int64_t segment = begin / a.segment * a.segment; segment < end; segment += a.segment) {
    const int64_t segment_end = std::min(segment + a.segment, end);
    for (int64_t r = 0; r < rows; ++r) {
      w.m[r] = -INFINITY;
      w.l[r] = 0.0f;
    }
    std::memset(w.acc, 0, sizeof(float) * size_t(rows * e));
    for (int64_t k0 = std::max(segment, begin / BLOCK * BLOCK); k0 < segment_end; k0 += BLOCK)
      if (few) {
        const InPlace<T> block = next;
        next = k0 + BLOCK < end ? find_block(a, u, k0 + BLOCK, begin, std::min(k0 + 2 * BLOCK, end))
                                : first_block(a, after);
        if (block.whole)
          add_few(rows, a, k0, block, next, query, w);
        else
          add_block(a, u, k0, rows, query, w);
      } else {
        add_block(a, u, k0, rows, query, w);
      }
    for (int64_t r = 0; r < rows; ++r)
      if (w.low[r] < segment_end && w.high[r] > segment)
        merge(w, r, e, w.low[r] / a.segment * a.segment == segment);
  }
  for (int64_t r = 0; r < rows; ++r) {
    T* out = a.out + ((row0 + u.first + r / group) * a.q_heads + u.head * group + r % group) * e;
    for (int64_t i = 0; i < e; i += LANES)
      store(out + i, load(w.total_acc + r * e + i) / w.total_l[r]);
  }
}

template <typename T>
void attention(Pool* pool, const Launch<T>& a) {
  const int64_t group = a.q_heads / a.kv_heads;
  const int64_t height = std::max<int64_t>(1, UNIT_ROWS / group);
  std::vector<Unit> units;
  for (int64_t b = 0; b < a.runs; ++b) {
    const int64_t length = a.query_start[b + 1] - a.query_start[b];
    const int64_t place = a.context_len[b] - length;
    for (int64_t i = 0; i < length; i += height) {
      const int64_t last = std::min(length, i + height);
      const int64_t keys = a.window > 0 ? std::min(place + last, a.window + last - i)
                                        : place + last;
      for (int64_t h = 0; h < a.kv_heads; ++h)
        units.push_back({b, i, last, h, keys * (last - i + 4)});
    }
  }
  std::stable_sort(units.begin(), units.end(),
                   [](const Unit& x, const Unit& y) { return x.cost > y.cost; });
  const int64_t count = int64_t(units.size()), ahead = pool == nullptr ? 1 : pool->threads();
  parallel(pool, count, [&](int64_t i) {
    run_unit(a, units[size_t(i)], i + ahead < count ? &units[size_t(i + ahead)] : nullptr);
  });
}

}  // namespace
}  // namespace lk

using namespace lk;

#pragma GCC visibility push(default)
extern "C" {

void lk_attention(void* pool, int64_t dtype, const void* q, const void* k, const void* v,
                  void* out, int64_t page_stride, int64_t page_tokens, int64_t head_dim,
                  int64_t q_heads, int64_t kv_heads, int64_t pages, int64_t table_width,
                  const int32_t* query_start, const int32_t* context_len,
                  const int32_t* page_table, int64_t runs, int64_t window, int64_t segment,
                  float scale) {
  if (dtype == kFloat32)
    attention((Pool*)pool,
              Launch<float>{(const float*)q, (const float*)k, (const float*)v, (float*)out,
                            page_stride, page_tokens, head_dim, q_heads, kv_heads, pages,
                            table_width, query_start, context_len, page_table, runs, window,
                            segment, scale});
  else
    attention((Pool*)pool,
              Launch<bf16>{(const bf16*)q, (const bf16*)k, (const bf16*)v, (bf16*)out, page_stride,
                           page_tokens, head_dim, q_heads, kv_heads, pages, table_width,
                           query_start, context_len, page_table, runs, window, segment, scale});
}

LK_PACKED(lk_attention)
}
#pragma GCC visibility pop

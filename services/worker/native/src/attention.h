// Causal attention over a paged cache, for decodes and prefill chunks alike.
//
// Keys are taken in splits of 256 positions, counted from position 0. Within a split: all scores, their maximum, the
// weights, the weighted values; then the split is folded into what came before it, in order. So a token's result
// depends on its own context alone: not on the batch, on how a prompt was cut, or on the number of threads.
#pragma once

#include <new>
#include <vector>

#include "dot_tile.h"
#include "model.h"

namespace sluice {

constexpr int kSplit = 256;
constexpr int kItemRows = 16;   // query rows (tokens times heads of a group) of one work item, unless a group has more
constexpr int kMaxGroup = 64;   // query heads that may share a key head
constexpr int kAhead = 48;      // keys between a prefetch and its use
constexpr int kSpread = 4;      // items per thread below which long contexts are cut by splits
constexpr int64_t kMaxParts = 16 << 20;  // floats of splits that are computed side by side; the reserve counts them

// Tokens of one row that share a key head: the unit of work, times kv_heads.
struct Item {
  int32_t row, first, count;  // tokens [first, first + count) of the row
};

// Pointers to the keys and values of one split, for one key head.
template <class T>
struct SplitKeys {
  const T* keys[kSplit];
  const T* values[kSplit];
};

// The fold over splits of one query row.
struct Running {
  float top = -INFINITY;  // largest score so far, in units of log2
  float total = 0.0f;     // sum of 2^(score - top)
};

template <class T>
class Attention {
 public:
  explicit Attention(const Attend& args) : args_(args), group_(args.heads / args.kv_heads) {}

  // Returns what all layers of a step share.
  static std::vector<Item> items(const Rows& rows, int64_t group) {
    const int64_t tokens = std::max<int64_t>(1, kItemRows / group);
    std::vector<Item> found;
    found.reserve(rows.num_rows);
    for (int64_t row = 0; row < rows.num_rows; row++)
      for (int32_t first = 0; first < rows.row_tokens[row]; first += tokens)
        found.push_back({static_cast<int32_t>(row), first,
                         static_cast<int32_t>(std::min<int64_t>(tokens, rows.row_tokens[row] - first))});
    return found;
  }

  // Called by all threads of a parallel region; ends with a barrier. `parts` is shared and empty.
  void run(const std::vector<Item>& items, std::vector<float>& parts, int num_threads) const {
    const int64_t units = static_cast<int64_t>(items.size()) * args_.kv_heads;
    if (units < kSpread * num_threads && longest(items) > 2 * kSplit && take_parts(units, items, parts)) {
      run_by_splits(items, parts);
      return;
    }
#pragma omp for schedule(dynamic, 1)
    for (int64_t unit = 0; unit < units; unit++) attend(items[unit / args_.kv_heads], unit % args_.kv_heads);
  }

 private:
  static constexpr int kMaxRows = kItemRows > kMaxGroup ? kItemRows : kMaxGroup;

  // One item's query rows: r = token * group + head.
  struct Queries {
    int count;
    const T* at[kMaxRows + 3];  // a tile may read past the end; those repeat the last one
    int64_t position[kMaxRows];
  };

  int64_t longest(const std::vector<Item>& items) const {
    int64_t most = 0;
    for (const Item& item : items) most = std::max<int64_t>(most, args_.rows.row_start[item.row] + item.first + item.count);
    return most;
  }

  int64_t first_position(const Item& item) const { return args_.rows.row_start[item.row] + item.first; }

  int64_t lowest_key(int64_t position) const {
    return args_.window > 0 ? std::max<int64_t>(0, position + 1 - args_.window) : 0;
  }

  Queries queries(const Item& item, int64_t kv_head) const {
    Queries found;
    found.count = static_cast<int>(item.count * group_);
    const T* base = static_cast<const T*>(args_.queries);
    const int64_t token = args_.rows.row_first[item.row] + item.first;
    for (int r = 0; r < found.count; r++) {
      found.at[r] = base + (token + r / group_) * args_.query_stride + (kv_head * group_ + r % group_) * args_.head_dim;
      found.position[r] = first_position(item) + r / group_;
    }
    for (int r = 0; r < 3; r++) found.at[found.count + r] = found.at[found.count - 1];
    return found;
  }

  void attend(const Item& item, int64_t kv_head) const {
    const Queries q = queries(item, kv_head);
    const int64_t width = args_.head_dim;
    thread_local std::vector<float> scratch;
    scratch.assign(static_cast<size_t>(2 * q.count * width), 0.0f);
    float *whole = scratch.data(), *part = whole + q.count * width;
    Running running[kMaxRows];
    const int64_t last = q.position[q.count - 1];
    for (int64_t split = lowest_key(q.position[0]) / kSplit; split <= last / kSplit; split++) {
      Running of_split[kMaxRows];
      attend_split(item, kv_head, q, split, of_split, part);
      fold(q.count, running, whole, of_split, part);
    }
    store(item, kv_head, q.count, running, whole);
  }

  int64_t num_splits(const std::vector<Item>& items) const { return (longest(items) + kSplit - 1) / kSplit; }

  int64_t most_rows(const std::vector<Item>& items) const {
    int64_t rows = 0;
    for (const Item& item : items) rows = std::max(rows, item.count * group_);
    return rows;
  }

  // Makes room for all splits of all items; false, for all threads alike, if that is too much or there is no memory.
  bool take_parts(int64_t units, const std::vector<Item>& items, std::vector<float>& parts) const {
    const int64_t size = units * num_splits(items) * most_rows(items) * (args_.head_dim + 2);
    if (size > kMaxParts) return false;
#pragma omp single
    {
      try {
        parts.resize(static_cast<size_t>(size));
      } catch (const std::bad_alloc&) {  // must not leave the library
        parts.clear();
      }
    }
    return static_cast<int64_t>(parts.size()) == size;
  }

  // Few items with long contexts: splits are computed by all threads, then folded in order as `attend` does.
  void run_by_splits(const std::vector<Item>& items, std::vector<float>& parts) const {
    const int64_t width = args_.head_dim, splits = num_splits(items), rows = most_rows(items);
    const int64_t slot = rows * (width + 2), units = static_cast<int64_t>(items.size()) * args_.kv_heads;
#pragma omp for schedule(dynamic, 1) collapse(2)
    for (int64_t unit = 0; unit < units; unit++)
      for (int64_t split = 0; split < splits; split++) {
        const Item& item = items[unit / args_.kv_heads];
        const Queries q = queries(item, unit % args_.kv_heads);
        if (split < lowest_key(q.position[0]) / kSplit || split > q.position[q.count - 1] / kSplit) continue;
        float* at = parts.data() + (unit * splits + split) * slot;
        attend_split(item, unit % args_.kv_heads, q, split, reinterpret_cast<Running*>(at), at + 2 * rows);
      }
#pragma omp for schedule(static)
    for (int64_t unit = 0; unit < units; unit++) {
      const Item& item = items[unit / args_.kv_heads];
      const Queries q = queries(item, unit % args_.kv_heads);
      std::vector<float> whole(static_cast<size_t>(q.count * width), 0.0f);
      Running running[kMaxRows];
      for (int64_t split = lowest_key(q.position[0]) / kSplit; split <= q.position[q.count - 1] / kSplit; split++) {
        const float* at = parts.data() + (unit * splits + split) * slot;
        fold(q.count, running, whole.data(), reinterpret_cast<const Running*>(at), at + 2 * rows);
      }
      store(item, unit % args_.kv_heads, q.count, running, whole.data());
    }
  }

  // Computes one split for all query rows: `running` of the split alone, and the weighted values part [rows, head_dim].
  void attend_split(const Item& item, int64_t kv_head, const Queries& q, int64_t split, Running* running, float* part) const {
    const int64_t base = split * kSplit, from = std::max<int64_t>(0, lowest_key(q.position[0]) - base);
    const int64_t to = std::min<int64_t>(kSplit, q.position[q.count - 1] + 1 - base);
    SplitKeys<T> at;
    find_keys(item, kv_head, base, from, to, at);
    alignas(64) float weights[4 * kSplit];
    for (int r = 0; r < q.count; r += 4) {
      const int rows = std::min(4, q.count - r);
      if (rows >= 3) {
        scores<4>(q.at + r, at, from, to, weights);
      } else if (rows == 2) {
        scores<2>(q.at + r, at, from, to, weights);
      } else {
        scores<1>(q.at + r, at, from, to, weights);
      }
      for (int i = 0; i < rows; i++) {
        const int64_t first = std::max(from, lowest_key(q.position[r + i]) - base);
        const int64_t end = std::min<int64_t>(to, q.position[r + i] + 1 - base);
        running[r + i] = weigh(weights + i * kSplit, from, first, end, to);
      }
      weighted_values(weights, rows, at, from, to, part + r * args_.head_dim);
    }
  }

  void find_keys(const Item& item, int64_t kv_head, int64_t base, int64_t from, int64_t to, SplitKeys<T>& at) const {
    const int32_t* table = args_.rows.tables + item.row * args_.rows.table_stride;
    const int64_t token_stride = args_.kv_heads * args_.head_dim, size = args_.block_size;
    const T* keys = static_cast<const T*>(args_.keys) + kv_head * args_.head_dim;
    const T* values = static_cast<const T*>(args_.values) + kv_head * args_.head_dim;
    for (int64_t t = from; t < to;) {
      const int64_t offset = (base + t) % size, count = std::min(size - offset, to - t);
      int64_t slot = table[(base + t) / size] * size + offset;
      for (int64_t i = 0; i < count; i++, t++, slot++) {
        at.keys[t] = keys + slot * token_stride;
        at.values[t] = values + slot * token_stride;
      }
    }
  }

  // Asks for the values of these keys, and for the keys that come kAhead later: a row's blocks lie anywhere.
  void fetch_ahead(const SplitKeys<T>& at, int64_t from, int64_t count, int64_t to) const {
    const int64_t bytes = args_.head_dim * static_cast<int64_t>(sizeof(T));
    const int64_t end = std::min(from + count, to);
    for (int64_t t = from; t < end; t++) {
      const char* value = reinterpret_cast<const char*>(at.values[t]);
      const char* key = reinterpret_cast<const char*>(at.keys[std::min(t + kAhead, to - 1)]);
      for (int64_t byte = 0; byte < bytes; byte += 64) {
        __builtin_prefetch(key + byte, 0, 2);
        __builtin_prefetch(value + byte, 0, 2);
      }
    }
  }

  // out[i * 256 + t] = log2(e) * scale * q[i] . key[t] for t in [from, to)
  template <int M>
  void scores(const T* const* q, const SplitKeys<T>& at, int64_t from, int64_t to, float* out) const {
    constexpr int N = kTile / M;
    const float scale = args_.scale * kLog2E;
    for (int64_t t = from; t < to; t += N) {
      fetch_ahead(at, t, N, to);
      const T* keys[N];
      for (int c = 0; c < N; c++) keys[c] = at.keys[std::min(t + c, to - 1)];
      float tile[kTile];
      dot_tile<T, M>(q, keys, static_cast<int>(args_.head_dim), tile);
      const int count = static_cast<int>(std::min<int64_t>(N, to - t));
      for (int i = 0; i < M; i++)
        for (int c = 0; c < count; c++) out[i * kSplit + t + c] = tile[i * N + c] * scale;
    }
  }

  // Turns scores [first, end) into weights and the rest of [from, to) into zeros.
  static Running weigh(float* scores, int64_t from, int64_t first, int64_t end, int64_t to) {
    if (first >= end) {
      std::fill(scores + from, scores + to, 0.0f);
      return Running{};
    }
    float top = scores[first];
#pragma omp simd reduction(max : top)
    for (int64_t t = first; t < end; t++) top = std::max(top, scores[t]);
    // sixteen partial sums by position, so that the order does not depend on where a query's keys begin
    float totals[16] = {};
    for (int64_t t = from; t < first; t++) scores[t] = 0.0f;
#pragma omp simd
    for (int64_t t = first; t < end; t++) scores[t] = exp2_nonpositive(scores[t] - top);
    for (int64_t t = end; t < to; t++) scores[t] = 0.0f;
    const int64_t begin = (first + 15) / 16 * 16, stop = std::max(begin, end / 16 * 16);
    for (int64_t t = first; t < std::min(begin, end); t++) totals[t % 16] += scores[t];
    for (int64_t t = begin; t < stop; t += 16) {
#pragma omp simd
      for (int i = 0; i < 16; i++) totals[i] += scores[t + i];
    }
    for (int64_t t = stop; t < end; t++) totals[t % 16] += scores[t];
    float total = 0.0f;
    for (float each : totals) total += each;
    return Running{top, total};
  }

  static void fold(int count, Running* running, float* whole, const Running* of_split, const float* part, int64_t width) {
    for (int r = 0; r < count; r++) {
      if (of_split[r].total == 0.0f) continue;
      const float top = std::max(running[r].top, of_split[r].top);
      const float kept = exp2_nonpositive(running[r].top - top), added = exp2_nonpositive(of_split[r].top - top);
      running[r].total = running[r].total * kept + of_split[r].total * added;
      running[r].top = top;
#pragma omp simd
      for (int64_t d = 0; d < width; d++) whole[r * width + d] = whole[r * width + d] * kept + part[r * width + d] * added;
    }
  }

  void fold(int count, Running* running, float* whole, const Running* of_split, const float* part) const {
    fold(count, running, whole, of_split, part, args_.head_dim);
  }

  void store(const Item& item, int64_t kv_head, int count, const Running* running, const float* whole) const {
    const int64_t width = args_.head_dim, token = args_.rows.row_first[item.row] + item.first;
    for (int r = 0; r < count; r++) {
      const int64_t place = (token + r / group_) * args_.heads + kv_head * group_ + r % group_;
      T* out = static_cast<T*>(args_.out) + place * width;
      const float inverse = running[r].total > 0.0f ? 1.0f / running[r].total : 0.0f;
      for (int64_t d = 0; d < width; d++) out[d] = from_float<T>(whole[r * width + d] * inverse);
      if (args_.lse != nullptr) args_.lse[place] = running[r].total > 0.0f ? running[r].top + std::log2(running[r].total) : -INFINITY;
    }
  }

  void weighted_values(const float* weights, int rows, const SplitKeys<T>& at, int64_t from, int64_t to, float* part) const;

  const Attend& args_;
  const int64_t group_;
};

#if SLUICE_AVX512

// Adds weights[i][t] * value[t] for some rows over 16 dimensions (float32) or 32 (bfloat16).
template <int kRows, bool kWhole>
inline void add_values(const float* weights, const float* const* values, int64_t offset, int count, int64_t from, int64_t to,
                       __m512 (&sums)[kRows][2]) {
  const auto mask = static_cast<__mmask16>((1u << count) - 1u);
  for (int64_t t = from; t < to; t++) {
    const __m512 value = kWhole ? _mm512_loadu_ps(values[t] + offset) : _mm512_maskz_loadu_ps(mask, values[t] + offset);
    for (int i = 0; i < kRows; i++) sums[i][0] = _mm512_fmadd_ps(_mm512_set1_ps(weights[i * kSplit + t]), value, sums[i][0]);
  }
}

template <int kRows, bool kWhole>
inline void add_values(const float* weights, const bf16* const* values, int64_t offset, int count, int64_t from, int64_t to,
                       __m512 (&sums)[kRows][2]) {
  const auto mask = static_cast<__mmask32>((1ull << count) - 1ull);
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  for (int64_t t = from; t < to; t++) {
    const __m512i pairs =
        kWhole ? _mm512_loadu_si512(values[t] + offset) : _mm512_maskz_loadu_epi16(mask, values[t] + offset);
    const __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
    const __m512 odd = _mm512_castsi512_ps(_mm512_and_si512(pairs, high));
    for (int i = 0; i < kRows; i++) {
      const __m512 weight = _mm512_set1_ps(weights[i * kSplit + t]);
      sums[i][0] = _mm512_fmadd_ps(weight, even, sums[i][0]);
      sums[i][1] = _mm512_fmadd_ps(weight, odd, sums[i][1]);
    }
  }
}

inline void put_values(const __m512 (&sums)[2], float* out, int count, const float*) {
  _mm512_mask_storeu_ps(out, static_cast<__mmask16>((1u << count) - 1u), sums[0]);
}

inline void put_values(const __m512 (&sums)[2], float* out, int count, const bf16*) {
  alignas(64) float even[16], odd[16];
  _mm512_store_ps(even, sums[0]);
  _mm512_store_ps(odd, sums[1]);
  for (int d = 0; d < count; d++) out[d] = d % 2 ? odd[d / 2] : even[d / 2];
}

template <class T, int kRows>
inline void weigh_values(const float* weights, const T* const* values, int64_t width, int64_t from, int64_t to, float* part) {
  constexpr int kStep = Lanes<T>::kStep;
  for (int64_t offset = 0; offset < width; offset += kStep) {
    const int count = static_cast<int>(std::min<int64_t>(kStep, width - offset));
    __m512 sums[kRows][2];
    for (auto& row : sums) row[0] = row[1] = _mm512_setzero_ps();
    if (count == kStep) {
      add_values<kRows, true>(weights, values, offset, count, from, to, sums);
    } else {
      add_values<kRows, false>(weights, values, offset, count, from, to, sums);
    }
    for (int i = 0; i < kRows; i++) put_values(sums[i], part + i * width + offset, count, static_cast<const T*>(nullptr));
  }
}

template <class T>
void Attention<T>::weighted_values(const float* weights, int rows, const SplitKeys<T>& at, int64_t from, int64_t to,
                                   float* part) const {
  switch (rows) {
    case 1:
      return weigh_values<T, 1>(weights, at.values, args_.head_dim, from, to, part);
    case 2:
      return weigh_values<T, 2>(weights, at.values, args_.head_dim, from, to, part);
    case 3:
      return weigh_values<T, 3>(weights, at.values, args_.head_dim, from, to, part);
    default:
      return weigh_values<T, 4>(weights, at.values, args_.head_dim, from, to, part);
  }
}

#else

template <class T>
void Attention<T>::weighted_values(const float* weights, int rows, const SplitKeys<T>& at, int64_t from, int64_t to,
                                   float* part) const {
  const int64_t width = args_.head_dim;
  std::fill(part, part + rows * width, 0.0f);
  for (int64_t t = from; t < to; t++) {
    const T* value = at.values[t];
    for (int i = 0; i < rows; i++) {
      const float weight = weights[i * kSplit + t];
      float* row = part + i * width;
#pragma omp simd
      for (int64_t d = 0; d < width; d++) row[d] += weight * to_float(value[d]);
    }
  }
}

#endif

}  // namespace sluice

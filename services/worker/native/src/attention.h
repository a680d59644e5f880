// Causal attention over a paged cache, for decodes and prefill chunks alike.
//
// Keys are taken in splits of 256 positions, counted from position 0. Within a split: all scores, their maximum, the
// weights, the weighted values; then the split is folded into what came before it, in order. So a token's result
// depends on its own context alone: not on the batch, on how a prompt was cut, or on the number of threads.
#pragma once

#include <type_traits>

#include "attention_tiles.h"
#include "attention_work.h"
#include "dot_tile.h"
#include "model.h"
#include "team.h"
#include "values.h"

namespace sluice {

constexpr int kAhead = 48;  // keys between a prefetch and its use

// Calls f with the size of a head as a constant of the compiler's if it is a usual one, else with 0.
template <class F>
inline void with_head_dim(int64_t head_dim, F f) {
  switch (head_dim) {
    case 64:
      return f(std::integral_constant<int, 64>{});
    case 80:
      return f(std::integral_constant<int, 80>{});
    case 96:
      return f(std::integral_constant<int, 96>{});
    case 128:
      return f(std::integral_constant<int, 128>{});
    case 256:
      return f(std::integral_constant<int, 256>{});
    default:
      return f(std::integral_constant<int, 0>{});
  }
}

template <class T>
class Attention {
 public:
  explicit Attention(const Attend& args) : args_(args), group_(args.heads / args.kv_heads) {}

  void run(const Crew& crew, AttentionWork& work) const {
    if (work.splits_apart()) {
      run_by_splits(crew, work);
      return;
    }
    const std::vector<Item>& items = work.items();
    const int64_t num_items = static_cast<int64_t>(items.size()), heads = args_.kv_heads;
    const bool by_rows = num_items >= kSpread * crew.num_threads();
    const auto attend_head = [&](int thread, int64_t place, int64_t kv_head) {
      const bool has_next = by_rows && place + 1 < num_items && items[place + 1].row != items[place].row;
      Upcoming upcoming(*this, items[place], has_next ? &items[place + 1] : nullptr, kv_head);
      attend(items[place], kv_head, work.scratch(thread), upcoming);
    };
    if (by_rows) {
      crew.share(num_items, heads * work.unit_work(), [&](int thread, int64_t place) {
        for (int64_t kv_head = 0; kv_head < heads; kv_head++) attend_head(thread, place, kv_head);
      });
    } else {
      crew.share(num_items * heads, work.unit_work(), [&](int thread, int64_t unit) { attend_head(thread, unit / heads, unit % heads); });
    }
  }

 private:
  // Pointers to the keys and values of one split, for one key head.
  struct SplitKeys {
    const T* keys[kSplit];
    const T* values[kSplit];
  };

  // One item's query rows: r = token * group + head.
  struct Queries {
    int count;
    const T* at[kMaxRows + 3];  // a tile may read past the end; those repeat the last one
    int64_t position[kMaxRows];
  };

  // The keys and values of the next row, all heads of them: every unit of a row asks for its share of them, little by
  // little, so that the next row finds them in the second-level cache.
  class Upcoming {
   public:
    Upcoming(const Attention& attention, const Item& present, const Item* next, int64_t kv_head) : args_(attention.args_) {
      if (next == nullptr) return;
      const int64_t first = attention.first_key(*next), end = attention.end_key(*next);
      const int64_t count = std::min(end - first, kMost), heads = args_.kv_heads;
      if (count <= 0) return;
      table_ = args_.rows.table(next->row);
      at_ = first + count * kv_head / heads;
      end_ = first + count * (kv_head + 1) / heads;
      const int64_t num_keys = std::max<int64_t>(1, attention.end_key(present) - attention.first_key(present));
      per_key_ = static_cast<float>(end_ - at_) / static_cast<float>(num_keys);
    }

    // Asks for as many as come to this number of keys.
    void some(int64_t num_keys) {
      due_ += per_key_ * static_cast<float>(num_keys);
      const int64_t bytes = args_.kv_heads * args_.head_dim * static_cast<int64_t>(sizeof(T));
      for (; due_ > 0.0f && at_ < end_; at_++, due_ -= 1.0f) {
        const int64_t slot = slot_of(table_[at_ / args_.block_size], at_ % args_.block_size, args_.block_size);
        const char* key = static_cast<const char*>(args_.keys) + slot * bytes;
        const char* value = static_cast<const char*>(args_.values) + slot * bytes;
        for (int64_t byte = 0; byte < bytes; byte += 64) {
          __builtin_prefetch(key + byte, 0, 2);
          __builtin_prefetch(value + byte, 0, 2);
        }
      }
    }

   private:
    static constexpr int64_t kMost = 512;  // keys: what the cache keeps until they are used
    const Attend& args_;
    const int32_t* table_ = nullptr;
    int64_t at_ = 0, end_ = 0;
    float per_key_ = 0.0f, due_ = 0.0f;
  };

  int64_t lowest_key(int64_t position) const {
    return args_.window > 0 ? std::max<int64_t>(0, position + 1 - args_.window) : 0;
  }

  // The keys [first, end) that one pass over an item takes.
  int64_t first_key(const Item& item) const {
    const int64_t seen = lowest_key(item.position);
    return args_.row_first == nullptr ? seen : std::max<int64_t>(seen, args_.row_first[item.row]);
  }
  int64_t end_key(const Item& item) const {
    const int64_t seen = item.position + item.count;
    return args_.row_end == nullptr ? seen : std::min<int64_t>(seen, args_.row_end[item.row]);
  }

  Queries queries(const Item& item, int64_t kv_head) const {
    Queries found;
    found.count = static_cast<int>(item.count * group_);
    const T* base = static_cast<const T*>(args_.queries);
    for (int r = 0; r < found.count; r++) {
      found.at[r] = base + (item.token + r / group_) * args_.query_stride + (kv_head * group_ + r % group_) * args_.head_dim;
      found.position[r] = item.position + r / group_;
    }
    for (int r = 0; r < 3; r++) found.at[found.count + r] = found.at[found.count - 1];
    return found;
  }

  // `whole` has room for the results of an item and of one split of it.
  void attend(const Item& item, int64_t kv_head, float* whole, Upcoming& upcoming) const {
    const Queries q = queries(item, kv_head);
    float* part = whole + q.count * args_.head_dim;
    Running running[kMaxRows];
    begin(item, kv_head, q.count, running, whole);
    for (int64_t split = first_split(item, q), end = end_split(item, q); split < end; split++) {
      Running of_split[kMaxRows];
      attend_split(item, kv_head, q, split, of_split, part, upcoming);
      fold(q.count, running, whole, of_split, part);
    }
    finish(item, kv_head, q.count, running, whole);
  }

  // The splits that one pass over these query rows takes.
  int64_t first_split(const Item& item, const Queries& q) const {
    const int64_t seen = lowest_key(q.position[0]) / kSplit;
    return args_.row_first == nullptr ? seen : std::max<int64_t>(seen, args_.row_first[item.row] / kSplit);
  }
  int64_t end_split(const Item& item, const Queries& q) const {
    const int64_t seen = q.position[q.count - 1] / kSplit + 1;
    return args_.row_end == nullptr ? seen : std::min<int64_t>(seen, args_.row_end[item.row] / kSplit);
  }

  // The state of a query row: its weighted values, then the largest score and the sum.
  float* state(const Item& item, int64_t kv_head, int r) const {
    const int64_t token = args_.row_state[item.row] + item.offset + r / group_;
    return args_.states + (token * args_.heads + kv_head * group_ + r % group_) * (args_.head_dim + 2);
  }

  // What came before the first split.
  void begin(const Item& item, int64_t kv_head, int count, Running* running, float* whole) const {
    const int64_t width = args_.head_dim;
    if (args_.row_first == nullptr) {
      std::fill(whole, whole + count * width, 0.0f);
      return;
    }
    for (int r = 0; r < count; r++) {
      const float* from = state(item, kv_head, r);
      std::memcpy(whole + r * width, from, width * sizeof(float));
      running[r] = Running{from[width], from[width + 1]};
    }
  }

  void finish(const Item& item, int64_t kv_head, int count, const Running* running, const float* whole) const {
    if (args_.row_end == nullptr) {
      store(item, kv_head, count, running, whole);
      return;
    }
    const int64_t width = args_.head_dim;
    for (int r = 0; r < count; r++) {
      float* to = state(item, kv_head, r);
      std::memcpy(to, whole + r * width, width * sizeof(float));
      to[width] = running[r].top;
      to[width + 1] = running[r].total;
    }
  }

  // Few items with long contexts: splits are computed by all threads, then folded in order as `attend` does.
  void run_by_splits(const Crew& crew, AttentionWork& work) const {
    const std::vector<Item>& items = work.items();
    const int64_t splits = work.num_splits(), units = static_cast<int64_t>(items.size()) * args_.kv_heads;
    crew.share(units * splits, work.unit_work() / splits, [&](int, int64_t place) {
      const int64_t unit = place / splits, split = place % splits;
      const Item& item = items[unit / args_.kv_heads];
      const Queries q = queries(item, unit % args_.kv_heads);
      if (split < first_split(item, q) || split >= end_split(item, q)) return;
      Upcoming nothing(*this, item, nullptr, 0);
      attend_split(item, unit % args_.kv_heads, q, split, work.running(unit, split), work.part(unit, split), nothing);
    });
    crew.share(units, work.unit_work() / kSplit, [&](int thread, int64_t unit) {
      const Item& item = items[unit / args_.kv_heads];
      const Queries q = queries(item, unit % args_.kv_heads);
      float* whole = work.scratch(thread);
      Running running[kMaxRows];
      begin(item, unit % args_.kv_heads, q.count, running, whole);
      for (int64_t split = first_split(item, q), end = end_split(item, q); split < end; split++)
        fold(q.count, running, whole, work.running(unit, split), work.part(unit, split));
      finish(item, unit % args_.kv_heads, q.count, running, whole);
    });
  }

  // Computes one split for all query rows: `running` of the split alone, and the weighted values part [rows, head_dim].
  void attend_split(const Item& item, int64_t kv_head, const Queries& q, int64_t split, Running* running, float* part, Upcoming& upcoming) const {
#if SLUICE_AMX
    if constexpr (std::is_same_v<T, bf16>)
      if (args_.head_dim % kTileDepth == 0 && args_.head_dim <= kMaxTileHead) return attend_split_by_tiles(item, kv_head, q, split, running, part, upcoming);
#endif
    with_head_dim(args_.any_head_dim ? 0 : args_.head_dim, [&](auto head_dim) {
      attend_split_of<decltype(head_dim)::value>(item, kv_head, q, split, running, part, upcoming);
    });
  }

  // kHeadDim is the size of a head, or 0: any. Results are the same bits.
  template <int kHeadDim>
  void attend_split_of(const Item& item, int64_t kv_head, const Queries& q, int64_t split, Running* running, float* part, Upcoming& upcoming) const {
    const int64_t head_dim = kHeadDim > 0 ? kHeadDim : args_.head_dim;
    const int64_t base = split * kSplit, from = std::max<int64_t>(0, lowest_key(q.position[0]) - base);
    const int64_t to = std::min<int64_t>(kSplit, q.position[q.count - 1] + 1 - base);
    SplitKeys at;
    find_keys(item, kv_head, base, from, to, at);
    alignas(64) float weights[4 * kSplit];
    for (int r = 0; r < q.count; r += 4) {
      const int rows = std::min(4, q.count - r);
      if (rows >= 3) {
        scores<4, kHeadDim>(q.at + r, at, from, to, weights, r == 0 ? &upcoming : nullptr);
      } else if (rows == 2) {
        scores<2, kHeadDim>(q.at + r, at, from, to, weights, r == 0 ? &upcoming : nullptr);
      } else {
        scores<1, kHeadDim>(q.at + r, at, from, to, weights, r == 0 ? &upcoming : nullptr);
      }
      for (int i = 0; i < rows; i++) {
        const int64_t first = std::max(from, lowest_key(q.position[r + i]) - base);
        const int64_t end = std::min<int64_t>(to, q.position[r + i] + 1 - base);
        running[r + i] = weigh(weights + i * kSplit, from, first, end, to);
      }
      weighted_values<T, kHeadDim>(weights, rows, at.values, head_dim, from, to, part + r * head_dim);
    }
  }

#if SLUICE_AMX

  static constexpr int kMaxTileHead = 256;

  // The 16 keys at positions t to t + 15 of the split; what is not in [from, to) may be anything.
  KeyTile key_tile(const Item& item, int64_t kv_head, const SplitKeys& at, int64_t base, int64_t t, int64_t from, int64_t to, bf16* copy) const {
    const int64_t size = args_.block_size, token_stride = args_.kv_heads * args_.head_dim;
    if (size % kTileRows == 0) {
      const int64_t entry = args_.rows.table(item.row)[(base + t) / size], slot = slot_of(entry, (base + t) % size, size);
      const int64_t stride = step_of(entry) * token_stride * static_cast<int64_t>(sizeof(bf16));
      return {static_cast<const bf16*>(args_.keys) + slot * token_stride + kv_head * args_.head_dim, stride};
    }
    for (int64_t i = std::max(t, from); i < std::min(t + kTileRows, to); i++)
      std::memcpy(copy + (i - t) * args_.head_dim, at.keys[i], args_.head_dim * sizeof(bf16));
    memory_is_as_written();
    return {copy, args_.head_dim * static_cast<int64_t>(sizeof(bf16))};
  }

  void attend_split_by_tiles(const Item& item, int64_t kv_head, const Queries& q, int64_t split, Running* running, float* part, Upcoming& upcoming) const {
    const int64_t head_dim = args_.head_dim, base = split * kSplit;
    const int64_t from = std::max<int64_t>(0, lowest_key(q.position[0]) - base);
    const int64_t to = std::min<int64_t>(kSplit, q.position[q.count - 1] + 1 - base);
    const int64_t first_tile = from / kTileDepth * kTileDepth, end_tile = (to + kTileDepth - 1) / kTileDepth * kTileDepth;
    SplitKeys at;
    find_keys(item, kv_head, base, from, to, at);
    alignas(64) bf16 queries[kMaxTileHead * kTileRows], copy[kMaxTileHead * kTileRows];
    alignas(64) TileScores scores;
    alignas(64) bf16 weights[kTileRows][kTilePositions];
    for (int r = 0; r < q.count; r += kTileRows) {
      const int count = std::min(kTileRows, q.count - r);
      pack_queries(q.at + r, count, head_dim, queries);
      memory_is_as_written();
      for (int64_t t = from / kTileRows * kTileRows; t < to; t += kTileRows) {
        if (r == 0) upcoming.some(std::min(t + kTileRows, to) - std::max(t, from));
        fetch_ahead(at, head_dim, std::max(t, from), std::min(t + kTileRows, to) - std::max(t, from), to);
        score_keys(key_tile(item, kv_head, at, base, t, from, to, copy), queries, count, head_dim, args_.scale * kLog2E, t, scores);
      }
      for (int i = 0; i < count; i++) {
        const int64_t first = std::max(from, lowest_key(q.position[r + i]) - base);
        const int64_t end = std::min<int64_t>(to, q.position[r + i] + 1 - base);
        running[r + i] = weigh(scores[i], from, first, end, to);
        std::fill(scores[i] + first_tile, scores[i] + from, 0.0f);
        std::fill(scores[i] + to, scores[i] + end_tile, 0.0f);
      }
      round_weights(scores, count, first_tile, end_tile, weights);
      memory_is_as_written();
      for (int64_t d = 0; d < head_dim; d += 2 * kTileDepth) {
        const auto weigh_some = head_dim - d > kTileDepth ? weigh_values<2> : weigh_values<1>;
        weigh_some(weights, count, at.values, d, from, to, part + r * head_dim + d, head_dim);
      }
    }
  }

#endif

  __attribute__((noinline)) void find_keys(const Item& item, int64_t kv_head, int64_t base, int64_t from, int64_t to, SplitKeys& at) const {
    const int64_t token_stride = args_.kv_heads * args_.head_dim, size = args_.block_size;
    const int32_t* entry = args_.rows.table(item.row) + (base + from) / size;
    int64_t offset = (base + from) % size;
    const T* keys = static_cast<const T*>(args_.keys) + kv_head * args_.head_dim;
    const T* values = static_cast<const T*>(args_.values) + kv_head * args_.head_dim;
    for (int64_t t = from; t < to; entry++, offset = 0) {
      const int64_t count = std::min(size - offset, to - t), step = step_of(*entry) * token_stride;
      int64_t place = slot_of(*entry, offset, size) * token_stride;
      for (int64_t i = 0; i < count; i++, t++, place += step) {
        at.keys[t] = keys + place;
        at.values[t] = values + place;
      }
    }
  }

  // Asks for the values of these keys, and for the keys that come kAhead later: a row's blocks lie anywhere.
  static void fetch_ahead(const SplitKeys& at, int64_t head_dim, int64_t from, int64_t count, int64_t to) {
    const int64_t bytes = head_dim * static_cast<int64_t>(sizeof(T));
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
  template <int M, int kHeadDim>
  void scores(const T* const* q, const SplitKeys& at, int64_t from, int64_t to, float* out, Upcoming* upcoming) const {
    constexpr int N = kTile / M;
    const int64_t head_dim = kHeadDim > 0 ? kHeadDim : args_.head_dim;
    const float scale = args_.scale * kLog2E;
    for (int64_t t = from; t < to; t += N) {
      if (upcoming != nullptr) upcoming->some(N);
      fetch_ahead(at, head_dim, t, N, to);
      const T* keys[N];
      for (int c = 0; c < N; c++) keys[c] = at.keys[std::min(t + c, to - 1)];
      float tile[kTile];
      dot_tile<T, M>(q, keys, static_cast<int>(head_dim), tile);
      const int count = static_cast<int>(std::min<int64_t>(N, to - t));
      for (int i = 0; i < M; i++)
        for (int c = 0; c < count; c++) out[i * kSplit + t + c] = tile[i * N + c] * scale;
    }
  }

  // Sixteen at a time: as one reduction compilers leave it to wait for each comparison.
  static float largest(const float* values, int64_t count) {
    float tops[16], top = values[0];
    for (float& each : tops) each = top;
    int64_t at = 0;
    for (; at + 16 <= count; at += 16) {
#pragma omp simd
      for (int i = 0; i < 16; i++) tops[i] = values[at + i] > tops[i] ? values[at + i] : tops[i];
    }
    for (; at < count; at++) top = std::max(top, values[at]);
    for (const float each : tops) top = std::max(top, each);
    return top;
  }

  // Turns scores [first, end) into weights and the rest of [from, to) into zeros.
  static __attribute__((noinline)) Running weigh(float* scores, int64_t from, int64_t first, int64_t end, int64_t to) {
    if (first >= end) {
      std::fill(scores + from, scores + to, 0.0f);
      return Running{};
    }
    const float top = largest(scores + first, end - first);
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

  void fold(int count, Running* running, float* whole, const Running* of_split, const float* part) const {
    const int64_t width = args_.head_dim;
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

  void store(const Item& item, int64_t kv_head, int count, const Running* running, const float* whole) const {
    const int64_t width = args_.head_dim;
    for (int r = 0; r < count; r++) {
      const int64_t place = (item.token + r / group_) * args_.heads + kv_head * group_ + r % group_;
      T* out = static_cast<T*>(args_.out) + place * width;
      const float inverse = running[r].total > 0.0f ? 1.0f / running[r].total : 0.0f;
      for (int64_t d = 0; d < width; d++) out[d] = from_float<T>(whole[r * width + d] * inverse);
    }
  }

  const Attend& args_;
  const int64_t group_;
};

}  // namespace sluice

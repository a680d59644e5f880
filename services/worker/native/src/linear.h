// Products with a weight matrix [n, k] as checkpoints store it: out = in * W^T, then an epilogue of the caller's.
//
// Nothing is packed: a layer's parameters stay one plain range of memory that can be dropped, restored or handed over.
#pragma once

#include <memory>
#include <new>
#include <type_traits>

#include "amx.h"
#include "dot_tile.h"
#include "team.h"

namespace sluice {

constexpr int kColumns = 16;       // rows of W that one work unit covers
constexpr int kMaxBlockRows = 256; // rows of the input in one work unit
constexpr int kDepth = 1024;       // elements of k that are summed before the sums are stored; tiles of both sides stay in L1

// Memory that will be needed soon: every tile asks for a part of it, so that the requests never queue up.
class Ahead {
 public:
  Ahead(const void* from, int64_t bytes, int64_t num_tiles)
      : at_(static_cast<const char*>(from)), end_(at_ + bytes), step_((bytes / std::max<int64_t>(num_tiles, 1) / 64 + 1) * 64) {}

  void some() {
    const char* until = std::min(at_ + step_, end_);
    for (; at_ < until; at_ += 64) __builtin_prefetch(at_, 0, 2);
  }

 private:
  const char *at_, *end_;
  int64_t step_;
};

// sums[i * 16 + c] += in[i] . w[c] for M rows and 16 columns.
template <class T, int M>
inline void product_rows(const T* in, int64_t in_stride, const T* const* columns, int k, float* sums, Ahead& ahead) {
  const T* rows[M];
  for (int r = 0; r < M; r++) rows[r] = in + r * in_stride;
  constexpr int N = kTile / M;
  for (int c0 = 0; c0 < kColumns; c0 += N) {
    float tile[kTile];
    ahead.some();
    dot_tile<T, M>(rows, columns + c0, k, tile);
    for (int r = 0; r < M; r++)
      for (int c = 0; c < N; c++) sums[r * kColumns + c0 + c] += tile[r * N + c];
  }
}

// sums[i * 16] += in[i] . column for M rows.
template <class T, int M>
inline void product_column(const T* in, int64_t in_stride, const T* column, int64_t k, float* sums) {
  for (int64_t from = 0; from < k; from += kDepth) {
    const T* rows[M];
    float out[M];
    for (int r = 0; r < M; r++) rows[r] = in + r * in_stride + from;
    dot_row<T, M>(rows, column + from, static_cast<int>(std::min<int64_t>(kDepth, k - from)), out);
    for (int r = 0; r < M; r++) sums[r * kColumns] += out[r];
  }
}

// sums[i * 16 + c] = in[i] . weight[c] for m rows and n <= 16 columns; the other columns repeat the last one. The next
// 16 rows of the matrix, of which `rest` are left, are fetched meanwhile: the thread that computes these has them next.
template <class T>
inline void product(const T* in, int64_t in_stride, int m, const T* weight, int64_t k, int64_t rest, float* sums) {
  const int64_t n = std::min<int64_t>(kColumns, rest);
  const T* columns[kColumns];
  for (int64_t c = 0; c < kColumns; c++) columns[c] = weight + std::min(c, n - 1) * k;
  std::memset(sums, 0, sizeof(float) * m * kColumns);
  if (m < 4) {  // memory is the limit, and is fastest when read in one line
    const auto few_rows = m == 1 ? product_column<T, 1> : m == 2 ? product_column<T, 2> : product_column<T, 3>;
    for (int64_t c = 0; c < n; c++) few_rows(in, in_stride, columns[c], k, sums + c);
    return;
  }
  const int64_t num_depths = (k + kDepth - 1) / kDepth;
  Ahead ahead(weight + n * k, std::min<int64_t>(kColumns, rest - n) * k * sizeof(T), m * num_depths);
  for (int64_t from = 0; from < k; from += kDepth) {
    const int depth = static_cast<int>(std::min<int64_t>(kDepth, k - from));
    const T* at = in + from;
    int i = 0;
    for (; i + 4 <= m; i += 4) product_rows<T, 4>(at + i * in_stride, in_stride, columns, depth, sums + i * kColumns, ahead);
    if (i + 2 <= m) {
      product_rows<T, 2>(at + i * in_stride, in_stride, columns, depth, sums + i * kColumns, ahead);
      i += 2;
    }
    if (i < m) product_rows<T, 1>(at + i * in_stride, in_stride, columns, depth, sums + i * kColumns, ahead);
    for (const T*& column : columns) column += depth;
  }
}

// Rows of the input per work unit: as many as stay in the second-level cache.
inline int block_rows(int64_t k, size_t item_bytes) {
  const int64_t fitting = (384 << 10) / static_cast<int64_t>(k * item_bytes);
  return static_cast<int>(std::clamp<int64_t>(fitting / 4 * 4, 16, kMaxBlockRows));
}

// What a product of so many rows takes, in multiplications of one row, for which the matrix is read: of others a quarter.
inline int64_t product_work(int64_t num_rows, int64_t row_work) { return (num_rows + 3) * row_work / 4; }

using Sums = float[kMaxBlockRows * kColumns];

// Room for the input of a product in the form that the matrix unit reads; empty where it is not used.
template <class T>
class Packed {
 public:
#if SLUICE_AMX
  static constexpr bool kIsUsed = std::is_same_v<T, bf16>;
#else
  static constexpr bool kIsUsed = false;
#endif

  // For inputs of up to num_tokens rows, and up to widest elements of k.
  Packed(int64_t num_tokens, int64_t widest) {
    if constexpr (kIsUsed)
      items_.reset(static_cast<T*>(operator new[]((num_tokens + 15) / 16 * ((widest + 31) / 32) * 512 * sizeof(T), kAlignment)));
  }

  T* items() const { return items_.get(); }

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Free {
    void operator()(T* items) const { operator delete[](items, kAlignment); }
  };
  std::unique_ptr<T[], Free> items_;
};

template <int kMatrices, class T>
inline void add_bias(const T* bias, int64_t n, int64_t column, int num_columns, int num_rows, Sums* sums) {
  for (int i = 0; i < kMatrices && bias != nullptr; i++)
    for (int r = 0; r < num_rows; r++)
      for (int c = 0; c < num_columns; c++) sums[i][r * kColumns + c] += to_float(bias[i * n + column + c]);
}

#if SLUICE_AMX

// As `linear`. A work unit has two sets of 16 rows of W: of two matrices, or neighbours of one.
template <int kMatrices, class Finish>
void linear_by_tiles(const Crew& crew, const bf16* in, int64_t m, const bf16* weight, const bf16* bias, int64_t n, int64_t k,
                     const Packed<bf16>& room, Finish finish) {
  constexpr int kStep = kMatrices == 2 ? kColumns : 2 * kColumns;
  constexpr int64_t kCacheBytes = 1 << 20;
  const int64_t tile_items = num_depth_tiles(k) * kTileItems, num_token_tiles = (m + 15) / 16;
  bf16* packed = room.items();
  crew.share(num_token_tiles, 16 * k, [=](int, int64_t tile) {
    pack_tokens(in + tile * 16 * k, k, static_cast<int>(std::min<int64_t>(16, m - tile * 16)), k, packed + tile * tile_items);
  });
  const auto set = [=](int64_t column, int i) {
    const int64_t matrix = kMatrices == 2 ? i : 0, first = kMatrices == 2 ? column : column + i * kColumns;
    const int count = static_cast<int>(std::clamp<int64_t>(n - first, 0, kColumns));
    return WeightRows{weight + (matrix * n + std::min(first, n - 1)) * k, count, k};
  };
  const int64_t rows = std::clamp<int64_t>(kCacheBytes / static_cast<int64_t>(k * sizeof(bf16)) / 32 * 32, 32, kMaxBlockRows);
  const int64_t num_blocks = (m + rows - 1) / rows, units_per_block = (n + kStep - 1) / kStep;
  crew.share(num_blocks * units_per_block, product_work(std::min(m, rows), 2 * kColumns * k), [=](int, int64_t unit) {
    const int64_t row = unit / units_per_block * rows, column = unit % units_per_block * kStep;
    const int num_rows = static_cast<int>(std::min(rows, m - row));
    const WeightRows weights[2] = {set(column, 0), set(column, 1)};
    const WeightRows following[2] = {set(column + kStep, 0), set(column + kStep, 1)};
    alignas(64) Sums sums[2];
    for (int r = 0; r < num_rows; r += 32) {
      const bf16* tokens = packed + (row + r) / 16 * tile_items;
      float* const to[2] = {sums[0] + r * kColumns, sums[1] + r * kColumns};
      const int left = std::min(32, num_rows - r);
      const auto multiply = left > kTileRows ? (r == 0 ? product_tiles<2, true> : product_tiles<2, false>)
                                             : (r == 0 ? product_tiles<1, true> : product_tiles<1, false>);
      multiply(weights, following, tokens, left, to);
    }
    if constexpr (kMatrices == 2) {
      add_bias<2>(bias, n, column, weights[0].count, num_rows, sums);
      finish(row, num_rows, column, weights[0].count, sums);
    } else {
      for (int i = 0; i < 2 && weights[i].count > 0; i++) {
        add_bias<1>(bias, n, column + i * kColumns, weights[i].count, num_rows, sums + i);
        finish(row, num_rows, column + i * kColumns, weights[i].count, sums + i);
      }
    }
  });
}

#endif

// Multiplies in [m, k] with kMatrices matrices [n, k], transposed, that lie one behind the other in `weight`, and adds
// their biases [kMatrices, n]; null: none. Calls finish(first_row, num_rows, first_column, num_columns, sums) for each
// tile; sums[i] is that of matrix i, [num_rows, 16].
template <int kMatrices, class T, class Finish>
void linear(const Crew& crew, const T* in, int64_t m, const T* weight, const T* bias, int64_t n, int64_t k, const Packed<T>& room,
            Finish finish) {
#if SLUICE_AMX
  if constexpr (Packed<T>::kIsUsed) return linear_by_tiles<kMatrices>(crew, in, m, weight, bias, n, k, room, finish);
#endif
  const int64_t rows = block_rows(k, sizeof(T));
  const int64_t num_blocks = (m + rows - 1) / rows, units_per_block = (n + kColumns - 1) / kColumns;
  crew.share(num_blocks * units_per_block, product_work(std::min(m, rows), kMatrices * kColumns * k), [=](int, int64_t unit) {
    const int64_t row = unit / units_per_block * rows, column = unit % units_per_block * kColumns;
    const int num_rows = static_cast<int>(std::min(rows, m - row));
    const int num_columns = static_cast<int>(std::min<int64_t>(kColumns, n - column));
    alignas(64) Sums sums[kMatrices];
    for (int i = 0; i < kMatrices; i++)
      product(in + row * k, k, num_rows, weight + (i * n + column) * k, k, n - column, sums[i]);
    add_bias<kMatrices>(bias, n, column, num_columns, num_rows, sums);
    finish(row, num_rows, column, num_columns, sums);
  });
}

}  // namespace sluice

// Products with a weight matrix [n, k] as checkpoints store it: out = in * W^T, then an epilogue of the caller's.
//
// Called by all threads of a parallel region; ends with a barrier. Nothing is packed: a layer's parameters stay one
// plain range of memory that can be dropped, restored or handed over.
#pragma once

#include <omp.h>

#include "dot_tile.h"

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

// Work units that a thread takes at a time: neighbours, so that what is fetched ahead is the thread's own, and few
// enough for every thread to have several turns.
inline int64_t units_per_turn(int64_t num_units) {
  constexpr int64_t kMost = 8, kTurns = 8;
  return std::clamp<int64_t>(num_units / (omp_get_num_threads() * kTurns), 1, kMost);
}

// Rows of the input per work unit: as many as stay in the second-level cache.
inline int block_rows(int64_t k, size_t item_bytes) {
  const int64_t fitting = (384 << 10) / static_cast<int64_t>(k * item_bytes);
  return static_cast<int>(std::clamp<int64_t>(fitting / 4 * 4, 16, kMaxBlockRows));
}

using Sums = float[kMaxBlockRows * kColumns];

// Multiplies in [m, k] with kMatrices matrices [n, k], transposed, that lie one behind the other in `weight`, and adds
// their biases [kMatrices, n]; null: none. Calls finish(first_row, num_rows, first_column, num_columns, sums) for each
// tile; sums[i] is that of matrix i, [num_rows, 16].
template <int kMatrices, class T, class Finish>
void linear(const T* in, int64_t m, const T* weight, const T* bias, int64_t n, int64_t k, Finish finish) {
  const int64_t rows = block_rows(k, sizeof(T));
  const int64_t num_blocks = (m + rows - 1) / rows, units_per_block = (n + kColumns - 1) / kColumns;
  const int64_t num_units = num_blocks * units_per_block, per_turn = units_per_turn(num_units);
#pragma omp for schedule(dynamic, per_turn)
  for (int64_t unit = 0; unit < num_units; unit++) {
    const int64_t row = unit / units_per_block * rows, column = unit % units_per_block * kColumns;
    const int num_rows = static_cast<int>(std::min(rows, m - row));
    const int num_columns = static_cast<int>(std::min<int64_t>(kColumns, n - column));
    alignas(64) Sums sums[kMatrices];
    for (int i = 0; i < kMatrices; i++) {
      product(in + row * k, k, num_rows, weight + (i * n + column) * k, k, n - column, sums[i]);
      for (int r = 0; r < num_rows && bias != nullptr; r++)
        for (int c = 0; c < num_columns; c++) sums[i][r * kColumns + c] += to_float(bias[i * n + column + c]);
    }
    finish(row, num_rows, column, num_columns, sums);
  }
}

}  // namespace sluice

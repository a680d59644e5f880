// One split of attention on the matrix unit, for up to 16 query rows at a time.
//
//     scores = keys as they lie (16 at a time) x queries, packed      weights (softmax's numerators, bfloat16) x values,
//                                                                     pairs of keys side by side
//
// Tiles of keys and values begin at multiples of 16 and 32 positions, and what lies outside a query's keys has weight
// zero, so a query's result depends on its own keys alone.
#pragma once

#include "amx.h"

#if SLUICE_AMX

namespace sluice {

constexpr int kTilePositions = 256;  // positions of a split
using TileScores = float[kTileRows][kTilePositions];

// Where 16 keys lie at one distance from each other.
struct KeyTile {
  const bf16* from;
  int64_t stride;  // bytes; below 0 in a block that is filled from the right
};

// Packs up to 16 query rows as tiles of tokens.
inline void pack_queries(const bf16* const* at, int count, int64_t head_dim, bf16* out) {
  for (int64_t d = 0; d < head_dim; d += kTileDepth, out += kTileItems) {
    __m512i rows[16];
    for (int r = 0; r < 16; r++) rows[r] = r < count ? _mm512_loadu_si512(at[r] + d) : _mm512_setzero_si512();
    turn_square(rows);
    for (int r = 0; r < 16; r++) _mm512_store_si512(out + r * kTileDepth, rows[r]);
  }
}

// scores[r][t + i] = scale * query r . key i for 16 keys.
inline void score_keys(const KeyTile& keys, const bf16* queries, int count, int64_t head_dim, float scale, int64_t t, TileScores& scores) {
  _tile_zero(0);
  for (int64_t d = 0; d < head_dim; d += kTileDepth) {
    _tile_loadd(4, keys.from + d, keys.stride);
    _tile_loadd(5, queries + d * kTileRows, 64);
    _tile_dpbf16ps(0, 4, 5);
  }
  alignas(64) float tile[256];
  _tile_stored(0, tile, 64);
  memory_is_as_written();
  __m512i rows[16];
  for (int r = 0; r < 16; r++) rows[r] = _mm512_load_si512(tile + r * 16);
  turn_square(rows);
  const __m512 factor = _mm512_set1_ps(scale);
  for (int r = 0; r < count; r++) _mm512_store_ps(scores[r] + t, _mm512_mul_ps(_mm512_castsi512_ps(rows[r]), factor));
}

// Rounds weights [from, to), multiples of 32, to bfloat16.
inline void round_weights(const TileScores& weights, int count, int64_t from, int64_t to, bf16 (&out)[kTileRows][kTilePositions]) {
  for (int r = 0; r < count; r++)
    for (int64_t t = from; t < to; t += kTileDepth) {
      const __m512bh both = _mm512_cvtne2ps_pbh(_mm512_load_ps(weights[r] + t + 16), _mm512_load_ps(weights[r] + t));
      _mm512_store_si512(out[r] + t, reinterpret_cast<__m512i>(both));
    }
}

// Puts kPairs * 32 elements of two values side by side, element by element. Every 32 of them fill a line of two tiles:
// elements 0-3, 8-11, 16-19, 24-27 of the first, the others of the second.
template <int kPairs>
inline void pair_values(const bf16* even, const bf16* odd, bf16* out) {
  for (int j = 0; j < kPairs; j++) {
    const __m512i a = even == nullptr ? _mm512_setzero_si512() : _mm512_loadu_si512(even + j * kTileDepth);
    const __m512i b = odd == nullptr ? _mm512_setzero_si512() : _mm512_loadu_si512(odd + j * kTileDepth);
    _mm512_store_si512(out + 2 * j * kTileItems, _mm512_unpacklo_epi16(a, b));
    _mm512_store_si512(out + (2 * j + 1) * kTileItems, _mm512_unpackhi_epi16(a, b));
  }
}

// Stores two tiles of sums, whose columns `pair_values` has parted, as rows of `width` floats.
inline void store_joined(const float (&first)[256], const float (&second)[256], int count, float* out, int64_t width) {
  const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i high = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  for (int r = 0; r < count; r++) {
    const __m512 a = _mm512_load_ps(first + r * 16), b = _mm512_load_ps(second + r * 16);
    _mm512_storeu_ps(out + r * width, _mm512_permutex2var_ps(a, low, b));
    _mm512_storeu_ps(out + r * width + 16, _mm512_permutex2var_ps(a, high, b));
  }
}

// out[r] = sum over t in [from, to) of weights[r][t] * values[t], for kPairs * 32 elements of the values from `first` on;
// weights are zero from from / 32 * 32 on and up to the next multiple of 32 behind `to`.
template <int kPairs>
inline void weigh_values(const bf16 (&weights)[kTileRows][kTilePositions], int count, const bf16* const* values, int64_t first,
                         int64_t from, int64_t to, float* out, int64_t width) {
  alignas(64) bf16 paired[2 * kPairs][kTileItems];
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (kPairs == 2) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t t = from / kTileDepth * kTileDepth; t < to; t += kTileDepth) {
    for (int64_t i = 0; i < kTileDepth; i += 2) {
      const bool has_even = t + i >= from && t + i < to, has_odd = t + i + 1 >= from && t + i + 1 < to;
      pair_values<kPairs>(has_even ? values[t + i] + first : nullptr, has_odd ? values[t + i + 1] + first : nullptr,
                          paired[0] + i / 2 * kTileDepth);
    }
    memory_is_as_written();
    _tile_loadd(4, weights[0] + t, kTilePositions * sizeof(bf16));
    _tile_loadd(5, paired[0], 64);
    _tile_dpbf16ps(0, 4, 5);
    _tile_loadd(6, paired[1], 64);
    _tile_dpbf16ps(1, 4, 6);
    if constexpr (kPairs == 2) {
      _tile_loadd(5, paired[2], 64);
      _tile_dpbf16ps(2, 4, 5);
      _tile_loadd(6, paired[3], 64);
      _tile_dpbf16ps(3, 4, 6);
    }
    memory_is_as_written();
  }
  alignas(64) float tiles[2 * kPairs][256];
  _tile_stored(0, tiles[0], 64);
  _tile_stored(1, tiles[1], 64);
  if constexpr (kPairs == 2) {
    _tile_stored(2, tiles[2], 64);
    _tile_stored(3, tiles[3], 64);
  }
  memory_is_as_written();
  for (int j = 0; j < kPairs; j++) store_joined(tiles[2 * j], tiles[2 * j + 1], count, out + j * kTileDepth, width);
}

}  // namespace sluice

#endif

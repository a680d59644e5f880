// Products on the processor's matrix unit (AMX): 16 rows of a weight matrix times 16 tokens, 32 elements of k at a time.
//
//     weights, as they lie       tokens, packed: pairs of k turned      sums
//     16 rows x 32 elements   x  16 pairs x 16 tokens                =  16 rows x 16 tokens, float32
//
// The weights are read where they are; only the tokens, which are few, are turned. Every sum runs over k in one order
// whatever else is computed beside it, so a token's results depend on itself alone. Subnormal numbers count as zero.
#pragma once

#include "dot_tile.h"

#if SLUICE_AVX512 && defined(__AMX_TILE__) && defined(__AMX_BF16__)
#define SLUICE_AMX 1

#include <sys/syscall.h>
#include <unistd.h>

namespace sluice {

constexpr int kTileRows = 16;                     // rows of every tile
constexpr int kTileDepth = 32;                    // elements of k in one tile
constexpr int kTileItems = kTileRows * kTileDepth;  // of a tile of bfloat16

// Asks the system for the matrix unit, once for the process. Returns whether it may be used.
inline bool may_use_tiles() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

// While it lives, this thread's tiles have 16 rows of 64 bytes each.
class Tiles {
 public:
  Tiles() {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } shape;
    _tile_loadconfig(&shape);
  }
  ~Tiles() { _tile_release(); }
  Tiles(const Tiles&) = delete;
  Tiles& operator=(const Tiles&) = delete;
};

// Compilers do not know which memory the tile instructions read and write.
inline void memory_is_as_written() { asm volatile("" ::: "memory"); }

// Turns a square of 16 x 16 four-byte words: rows become columns.
inline void turn_square(__m512i (&rows)[16]) {
  __m512i pairs[16], quads[16];
  for (int i = 0; i < 16; i += 2) {
    pairs[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    pairs[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    quads[i] = _mm512_unpacklo_epi64(pairs[i], pairs[i + 2]);
    quads[i + 1] = _mm512_unpackhi_epi64(pairs[i], pairs[i + 2]);
    quads[i + 2] = _mm512_unpacklo_epi64(pairs[i + 1], pairs[i + 3]);
    quads[i + 3] = _mm512_unpackhi_epi64(pairs[i + 1], pairs[i + 3]);
  }
  // quads[4 * g + j], lane l: column 4 * l + j of rows 4 * g to 4 * g + 3
  for (int j = 0; j < 4; j++) {
    const __m512i low02 = _mm512_shuffle_i32x4(quads[j], quads[4 + j], 0x88), low13 = _mm512_shuffle_i32x4(quads[j], quads[4 + j], 0xdd);
    const __m512i high02 = _mm512_shuffle_i32x4(quads[8 + j], quads[12 + j], 0x88);
    const __m512i high13 = _mm512_shuffle_i32x4(quads[8 + j], quads[12 + j], 0xdd);
    rows[j] = _mm512_shuffle_i32x4(low02, high02, 0x88);
    rows[8 + j] = _mm512_shuffle_i32x4(low02, high02, 0xdd);
    rows[4 + j] = _mm512_shuffle_i32x4(low13, high13, 0x88);
    rows[12 + j] = _mm512_shuffle_i32x4(low13, high13, 0xdd);
  }
}

// Tiles of k, the last one filled up.
inline int64_t num_depth_tiles(int64_t k) { return (k + kTileDepth - 1) / kTileDepth; }

// Packs up to 16 tokens [count, k] as tiles, one behind the other in k; tokens and elements that do not exist are zeros.
inline void pack_tokens(const bf16* in, int64_t stride, int count, int64_t k, bf16* out) {
  for (int64_t at = 0; at < k; at += kTileDepth, out += kTileItems) {
    const int64_t left = std::min<int64_t>(kTileDepth, k - at);
    const __mmask32 mask = static_cast<__mmask32>((1ull << left) - 1ull);
    __m512i rows[16];
    for (int r = 0; r < 16; r++) rows[r] = r < count ? _mm512_maskz_loadu_epi16(mask, in + r * stride + at) : _mm512_setzero_si512();
    turn_square(rows);
    for (int r = 0; r < 16; r++) _mm512_store_si512(out + r * kTileDepth, rows[r]);
  }
}

// 16 rows of a matrix [.., k] from `from` on, of which `count` exist, and the edge that no tile may be read at.
struct WeightRows {
  const bf16* from;
  int count;
  int64_t k;

  bool is_whole(int64_t tile) const { return count == kTileRows && (tile + 1) * kTileDepth <= k; }

  // Copies a tile at the matrix's edge, with zeros behind it.
  void copy(int64_t tile, bf16* out) const {
    const int64_t left = std::min<int64_t>(kTileDepth, k - tile * kTileDepth);
    std::memset(out, 0, kTileItems * sizeof(bf16));
    for (int r = 0; r < count; r++) std::memcpy(out + r * kTileDepth, from + r * k + tile * kTileDepth, left * sizeof(bf16));
  }

  // Asks for a tile that is needed soon.
  void fetch(int64_t tile) const {
    for (int r = 0; r < count; r++) _mm_prefetch(reinterpret_cast<const char*>(from + r * k + tile * kTileDepth), _MM_HINT_T0);
  }
};

constexpr int kFetchTiles = 12;  // how far ahead in k

// sums[t * 16 + c] = token t . row c for 16 tokens; `tile` holds [c][t].
inline void store_turned(const float* tile, int num_tokens, float* sums) {
  __m512i rows[16];
  for (int r = 0; r < 16; r++) rows[r] = _mm512_load_si512(tile + r * 16);
  turn_square(rows);
  for (int t = 0; t < num_tokens; t++) _mm512_store_si512(sums + t * 16, rows[t]);
}

// Multiplies two sets of 16 weight rows with one or two tiles of tokens; sums[i] is that of set i, [num_tokens, 16].
// Where `following` exists, the rows that come next are fetched meanwhile.
template <int kTokenTiles, bool kFetch>
inline void product_tiles(const WeightRows (&weights)[2], const WeightRows (&following)[2], const bf16* packed, int num_tokens,
                          float* const (&sums)[2]) {
  const int64_t num_tiles = num_depth_tiles(weights[0].k), stride = weights[0].k * static_cast<int64_t>(sizeof(bf16));
  const int64_t token_stride = num_tiles * kTileItems;
  alignas(64) bf16 edges[2][kTileItems];
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (kTokenTiles == 2) {
    _tile_zero(2);
    _tile_zero(3);
  }
  memory_is_as_written();
  for (int64_t i = 0; i < num_tiles; i++, packed += kTileItems) {
    if (weights[0].is_whole(i) && weights[1].is_whole(i)) {
      if constexpr (kFetch) {
        const int64_t ahead = i + kFetchTiles;
        for (int w = 0; w < 2; w++) (ahead < num_tiles ? weights[w] : following[w]).fetch(ahead < num_tiles ? ahead : ahead - num_tiles);
      }
      _tile_loadd(4, weights[0].from + i * kTileDepth, stride);
      _tile_loadd(5, weights[1].from + i * kTileDepth, stride);
    } else {
      for (int w = 0; w < 2; w++) weights[w].copy(i, edges[w]);
      memory_is_as_written();
      _tile_loadd(4, edges[0], 64);
      _tile_loadd(5, edges[1], 64);
      memory_is_as_written();
    }
    _tile_loadd(6, packed, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 5, 6);
    if constexpr (kTokenTiles == 2) {
      _tile_loadd(7, packed + token_stride, 64);
      _tile_dpbf16ps(2, 4, 7);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  alignas(64) float tiles[4][256];
  _tile_stored(0, tiles[0], 64);
  _tile_stored(1, tiles[1], 64);
  if constexpr (kTokenTiles == 2) {
    _tile_stored(2, tiles[2], 64);
    _tile_stored(3, tiles[3], 64);
  }
  memory_is_as_written();
  for (int w = 0; w < 2; w++) {
    store_turned(tiles[w], std::min(num_tokens, kTileRows), sums[w]);
    if constexpr (kTokenTiles == 2) store_turned(tiles[2 + w], num_tokens - kTileRows, sums[w] + 256);
  }
}

}  // namespace sluice

#endif

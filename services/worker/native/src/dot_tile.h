// The one product under everything: a few rows of a against a few rows of b, both contiguous in k.
//
// dot_tile<T, M> computes M * (16 / M) dot products at once; M is 1, 2 or 4. Every dot product is summed in the same
// order whatever M is, so a result never depends on which other rows were computed beside it.
//
// dot_row<T, M> computes M dot products with one row of b, summed in that order too. It reads b in one line, and where
// b comes from memory that is what counts.
#pragma once

#include "numbers.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define SLUICE_AVX512 1
#include <immintrin.h>
#endif

namespace sluice {

constexpr int kTile = 16;            // dot products of one call
constexpr int kPrefetchBytes = 8192;  // how far dot_row asks ahead of what it reads

#if SLUICE_AVX512

// Sums 16 vectors at once: element 4 * j + i of the result is the sum of sums[4 * i + j].
inline __m512 sum_each(const __m512 (&sums)[16]) {
  __m512 quads[4];
  for (int i = 0; i < 4; i++) {
    const __m512* s = sums + 4 * i;
    const __m512 ab = _mm512_add_ps(_mm512_shuffle_f32x4(s[0], s[1], 0x44), _mm512_shuffle_f32x4(s[0], s[1], 0xee));
    const __m512 cd = _mm512_add_ps(_mm512_shuffle_f32x4(s[2], s[3], 0x44), _mm512_shuffle_f32x4(s[2], s[3], 0xee));
    quads[i] = _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
  }
  const __m512 low = _mm512_add_ps(_mm512_shuffle_ps(quads[0], quads[1], 0x44), _mm512_shuffle_ps(quads[0], quads[1], 0xee));
  const __m512 high = _mm512_add_ps(_mm512_shuffle_ps(quads[2], quads[3], 0x44), _mm512_shuffle_ps(quads[2], quads[3], 0xee));
  return _mm512_add_ps(_mm512_shuffle_ps(low, high, 0x88), _mm512_shuffle_ps(low, high, 0xdd));
}

template <class T>
struct Lanes;

template <>
struct Lanes<float> {
  static constexpr int kStep = 16;
  using Vector = __m512;
  static Vector load(const float* from) { return _mm512_loadu_ps(from); }
  static Vector load(const float* from, int count) {
    return _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1u), from);
  }
  static __m512 multiply_add(__m512 sum, Vector a, Vector b) { return _mm512_fmadd_ps(a, b, sum); }
};

#if defined(__AVX512BF16__)

template <>
struct Lanes<bf16> {
  static constexpr int kStep = 32;
  using Vector = __m512bh;
  static Vector load(const bf16* from) { return reinterpret_cast<Vector>(_mm512_loadu_si512(from)); }
  static Vector load(const bf16* from, int count) {
    return reinterpret_cast<Vector>(_mm512_maskz_loadu_epi16(static_cast<__mmask32>((1ull << count) - 1ull), from));
  }
  static __m512 multiply_add(__m512 sum, Vector a, Vector b) { return _mm512_dpbf16_ps(sum, a, b); }
};

#else

template <>
struct Lanes<bf16> {
  static constexpr int kStep = 32;
  using Vector = __m512i;
  static Vector load(const bf16* from) { return _mm512_loadu_si512(from); }
  static Vector load(const bf16* from, int count) {
    return _mm512_maskz_loadu_epi16(static_cast<__mmask32>((1ull << count) - 1ull), from);
  }
  static __m512 even(Vector pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }
  static __m512 odd(Vector pairs) {
    return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
  }
  static __m512 multiply_add(__m512 sum, Vector a, Vector b) {
    return _mm512_fmadd_ps(odd(a), odd(b), _mm512_fmadd_ps(even(a), even(b), sum));
  }
};

#endif

// out[r * (16 / M) + c] = a[r] . b[c] over k elements.
template <class T, int M>
inline void dot_tile(const T* const* a, const T* const* b, int k, float* out) {
  constexpr int N = kTile / M;
  using L = Lanes<T>;
  __m512 sums[16];
  for (int i = 0; i < 16; i++) sums[i] = _mm512_setzero_ps();
  // the sum of (r, c) stands where sum_each puts it at r * N + c
  const auto index = [](int r, int c) constexpr { return 4 * (c % 4) + r * (4 / M) + c / 4; };
  int at = 0;
  for (; at + L::kStep <= k; at += L::kStep) {
    typename L::Vector left[M];
    for (int r = 0; r < M; r++) left[r] = L::load(a[r] + at);
    for (int c = 0; c < N; c++) {
      const typename L::Vector right = L::load(b[c] + at);
      for (int r = 0; r < M; r++) sums[index(r, c)] = L::multiply_add(sums[index(r, c)], left[r], right);
    }
  }
  if (at < k) {
    typename L::Vector left[M];
    for (int r = 0; r < M; r++) left[r] = L::load(a[r] + at, k - at);
    for (int c = 0; c < N; c++) {
      const typename L::Vector right = L::load(b[c] + at, k - at);
      for (int r = 0; r < M; r++) sums[index(r, c)] = L::multiply_add(sums[index(r, c)], left[r], right);
    }
  }
  _mm512_storeu_ps(out, sum_each(sums));
}

// The same sum, of one vector, in the same order.
inline float sum_of(__m512 v) {
  const __m256 halves = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
  const __m128 quads = _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1));
  const __m128 pairs = _mm_add_ps(quads, _mm_movehl_ps(quads, quads));
  return _mm_cvtss_f32(_mm_add_ss(pairs, _mm_movehdup_ps(pairs)));
}

// out[r] = a[r] . b over k elements, as dot_tile has them; what lies behind b is fetched.
template <class T, int M>
inline void dot_row(const T* const* a, const T* b, int k, float* out) {
  using L = Lanes<T>;
  __m512 sums[M];
  for (int r = 0; r < M; r++) sums[r] = _mm512_setzero_ps();
  int at = 0;
  for (; at + L::kStep <= k; at += L::kStep) {
    __builtin_prefetch(reinterpret_cast<const char*>(b + at) + kPrefetchBytes);
    const typename L::Vector right = L::load(b + at);
    for (int r = 0; r < M; r++) sums[r] = L::multiply_add(sums[r], L::load(a[r] + at), right);
  }
  if (at < k) {
    const typename L::Vector right = L::load(b + at, k - at);
    for (int r = 0; r < M; r++) sums[r] = L::multiply_add(sums[r], L::load(a[r] + at, k - at), right);
  }
  for (int r = 0; r < M; r++) out[r] = sum_of(sums[r]);
}

#else

// Without AVX-512: plain vectors, as wide as the target has them.
#if defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));

inline float sum_of(Floats values) {
  float sum = 0.0f;
  for (int i = 0; i < kLanes; i++) sum += values[i];
  return sum;
}

// Two vectors of floats for 2 * kLanes elements; bfloat16 splits into even and odd elements.
struct Pair {
  Floats first, second;
};

inline Pair load_pair(const float* from) {
  Pair pair;
  std::memcpy(&pair.first, from, sizeof pair.first);
  std::memcpy(&pair.second, from + kLanes, sizeof pair.second);
  return pair;
}

inline Pair load_pair(const bf16* from) {
  Words words;
  std::memcpy(&words, from, sizeof words);
  return Pair{(Floats)(words << 16), (Floats)(words & 0xffff0000u)};
}

template <class T>
inline Pair load_pair(const T* from, int count) {
  T padded[2 * kLanes] = {};
  std::memcpy(padded, from, count * sizeof(T));
  return load_pair(padded);
}

template <class T, int M>
inline void dot_tile(const T* const* a, const T* const* b, int k, float* out) {
  constexpr int N = kTile / M;
  constexpr int kColumns = M == 4 ? 2 : 4;  // keeps the sums in 16 registers
  for (int c0 = 0; c0 < N; c0 += kColumns) {
    Floats sums[M][kColumns] = {};
    const auto add = [&](auto load, int at) {
      Pair left[M];
      for (int r = 0; r < M; r++) left[r] = load(a[r] + at);
      for (int c = 0; c < kColumns; c++) {
        const Pair right = load(b[c0 + c] + at);
        for (int r = 0; r < M; r++) sums[r][c] += left[r].first * right.first;
        for (int r = 0; r < M; r++) sums[r][c] += left[r].second * right.second;
      }
    };
    int at = 0;
    for (; at + 2 * kLanes <= k; at += 2 * kLanes) add([](const T* from) { return load_pair(from); }, at);
    if (at < k) add([left = k - at](const T* from) { return load_pair(from, left); }, at);
    for (int r = 0; r < M; r++)
      for (int c = 0; c < kColumns; c++) out[r * N + c0 + c] = sum_of(sums[r][c]);
  }
}

// out[r] = a[r] . b over k elements, as dot_tile has them; what lies behind b is fetched.
template <class T, int M>
inline void dot_row(const T* const* a, const T* b, int k, float* out) {
  Floats sums[M] = {};
  const auto add = [&](auto load, int at) {
    const Pair right = load(b + at);
    for (int r = 0; r < M; r++) {
      const Pair left = load(a[r] + at);
      sums[r] += left.first * right.first;
      sums[r] += left.second * right.second;
    }
  };
  int at = 0;
  for (; at + 2 * kLanes <= k; at += 2 * kLanes) {
    __builtin_prefetch(reinterpret_cast<const char*>(b + at) + kPrefetchBytes);
    add([](const T* from) { return load_pair(from); }, at);
  }
  if (at < k) add([left = k - at](const T* from) { return load_pair(from, left); }, at);
  for (int r = 0; r < M; r++) out[r] = sum_of(sums[r]);
}

#endif

}  // namespace sluice

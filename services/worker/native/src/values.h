// Attention's second product: the values of some keys, weighted and summed, for up to four query rows at once.
//
// Every sum runs over the keys in order, whatever is computed beside it. kHeadDim is the size of a head if it is known
// at compile time, else 0; results are the same bits.
#pragma once

#include "dot_tile.h"

namespace sluice {

constexpr int kSplit = 256;  // keys that are taken at a time, and the distance of two rows of weights

#if SLUICE_AVX512

// Values of one key over Lanes<T>::kStep dimensions, as vectors of floats: one for float32, two for bfloat16.
template <class T>
struct ValueLanes;

template <>
struct ValueLanes<float> {
  static constexpr int kVectors = 1;
  static void load(const float* from, __m512 (&out)[1]) { out[0] = _mm512_loadu_ps(from); }
  static void load(const float* from, int count, __m512 (&out)[1]) {
    out[0] = _mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1u), from);
  }
  static void store(const __m512 (&sums)[1], float* to, int count) {
    _mm512_mask_storeu_ps(to, static_cast<__mmask16>((1u << count) - 1u), sums[0]);
  }
};

template <>
struct ValueLanes<bf16> {
  static constexpr int kVectors = 2;  // even and odd dimensions
  static void split(__m512i pairs, __m512 (&out)[2]) {
    out[0] = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
    out[1] = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
  }
  static void load(const bf16* from, __m512 (&out)[2]) { split(_mm512_loadu_si512(from), out); }
  static void load(const bf16* from, int count, __m512 (&out)[2]) {
    split(_mm512_maskz_loadu_epi16(static_cast<__mmask32>((1ull << count) - 1ull), from), out);
  }
  static void store(const __m512 (&sums)[2], float* to, int count) {
    alignas(64) float even[16], odd[16];
    _mm512_store_ps(even, sums[0]);
    _mm512_store_ps(odd, sums[1]);
    for (int d = 0; d < count; d++) to[d] = d % 2 ? odd[d / 2] : even[d / 2];
  }
};

// part[i] = sum of weights[i][t] * values[t] over t in [from, to), for kRows rows and the dimensions of kSteps vectors
// of elements from `offset` on; the last vector holds `last` elements.
template <class T, int kRows, int kSteps, bool kWhole>
inline void weigh_block(const float* weights, const T* const* values, int64_t offset, int last, int64_t from, int64_t to,
                        int64_t width, float* part) {
  using L = ValueLanes<T>;
  constexpr int kStep = Lanes<T>::kStep;
  __m512 sums[kRows][kSteps][L::kVectors];
  for (auto& row : sums)
    for (auto& step : row)
      for (auto& sum : step) sum = _mm512_setzero_ps();
  for (int64_t t = from; t < to; t++) {
    __m512 value[kSteps][L::kVectors];
    for (int s = 0; s < kSteps; s++) {
      const T* at = values[t] + offset + s * kStep;
      if (kWhole || s + 1 < kSteps) {
        L::load(at, value[s]);
      } else {
        L::load(at, last, value[s]);
      }
    }
    for (int i = 0; i < kRows; i++) {
      const __m512 weight = _mm512_set1_ps(weights[i * kSplit + t]);
      for (int s = 0; s < kSteps; s++)
        for (int v = 0; v < L::kVectors; v++) sums[i][s][v] = _mm512_fmadd_ps(weight, value[s][v], sums[i][s][v]);
    }
  }
  for (int i = 0; i < kRows; i++)
    for (int s = 0; s < kSteps; s++)
      L::store(sums[i][s], part + i * width + offset + s * kStep, s + 1 < kSteps ? kStep : last);
}

// The same for all dimensions of a head: as many at a time as leave the sums in 16 registers.
template <class T, int kHeadDim, int kRows>
inline void weigh_rows(const float* weights, const T* const* values, int64_t head_dim, int64_t from, int64_t to, float* part) {
  constexpr int kStep = Lanes<T>::kStep, kMost = 16 / (kRows * ValueLanes<T>::kVectors);
  if constexpr (kHeadDim > 0) {
    constexpr int kAll = (kHeadDim + kStep - 1) / kStep, kSteps = kMost < kAll ? kMost : kAll;
    constexpr int kBlocks = kAll / kSteps, kRest = kAll % kSteps, kTail = kHeadDim % kStep;
    constexpr bool kEven = kTail == 0;
    constexpr int kLast = kEven ? kStep : kTail;
    for (int block = 0; block < kBlocks; block++) {
      const int64_t offset = block * kSteps * kStep;
      if (!kEven && kRest == 0 && block + 1 == kBlocks) {
        weigh_block<T, kRows, kSteps, false>(weights, values, offset, kLast, from, to, kHeadDim, part);
      } else {
        weigh_block<T, kRows, kSteps, true>(weights, values, offset, kStep, from, to, kHeadDim, part);
      }
    }
    if constexpr (kRest > 0)
      weigh_block<T, kRows, kRest, kEven>(weights, values, kBlocks * kSteps * kStep, kLast, from, to, kHeadDim, part);
  } else {
    for (int64_t offset = 0; offset < head_dim; offset += kStep) {
      const int last = static_cast<int>(std::min<int64_t>(kStep, head_dim - offset));
      if (last == kStep) {
        weigh_block<T, kRows, 1, true>(weights, values, offset, last, from, to, head_dim, part);
      } else {
        weigh_block<T, kRows, 1, false>(weights, values, offset, last, from, to, head_dim, part);
      }
    }
  }
}

#else

template <class T, int kHeadDim, int kRows>
inline void weigh_rows(const float* weights, const T* const* values, int64_t head_dim, int64_t from, int64_t to, float* part) {
  const int64_t width = kHeadDim > 0 ? kHeadDim : head_dim;
  std::fill(part, part + kRows * width, 0.0f);
  for (int64_t t = from; t < to; t++) {
    const T* value = values[t];
    for (int i = 0; i < kRows; i++) {
      const float weight = weights[i * kSplit + t];
      float* row = part + i * width;
#pragma omp simd
      for (int64_t d = 0; d < width; d++) row[d] += weight * to_float(value[d]);
    }
  }
}

#endif

// part [rows, head_dim] = weights [rows, kSplit] times values, over keys [from, to); at most four rows.
template <class T, int kHeadDim>
inline void weighted_values(const float* weights, int rows, const T* const* values, int64_t head_dim, int64_t from, int64_t to,
                            float* part) {
  switch (rows) {
    case 1:
      return weigh_rows<T, kHeadDim, 1>(weights, values, head_dim, from, to, part);
    case 2:
      return weigh_rows<T, kHeadDim, 2>(weights, values, head_dim, from, to, part);
    case 3:
      return weigh_rows<T, kHeadDim, 3>(weights, values, head_dim, from, to, part);
    default:
      return weigh_rows<T, kHeadDim, 4>(weights, values, head_dim, from, to, part);
  }
}

}  // namespace sluice

// Element types and the few scalar functions that every kernel needs.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace sluice {

// Upper half of an IEEE binary32.
struct bf16 {
  uint16_t bits;
};

inline float to_float(float value) { return value; }

inline float to_float(bf16 value) {
  const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}

template <class T>
T from_float(float value);

template <>
inline float from_float<float>(float value) {
  return value;
}

// Rounds to the nearest, ties to even; a NaN stays one.
template <>
inline bf16 from_float<bf16>(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return bf16{static_cast<uint16_t>(is_nan ? (bits >> 16) | 0x40u : rounded)};
}

// 2^x for x <= 0 within 2e-7 of the value; 0 below 2^-126. Written so that loops over it become vector code.
inline float exp2_nonpositive(float x) {
  const float clamped = x < -126.0f ? -126.0f : x;
  const float shifted = clamped + 12582912.0f;  // 1.5 * 2^23: rounds to an integer in the low bits
  int32_t bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  const float part = clamped - (shifted - 12582912.0f);  // in [-0.5, 0.5]
  float power = 1.5353362e-4f;
  power = power * part + 1.3398874e-3f;
  power = power * part + 9.6181291e-3f;
  power = power * part + 5.5503324e-2f;
  power = power * part + 2.4022651e-1f;
  power = power * part + 6.9314718e-1f;
  power = power * part + 1.0f;
  const int32_t scale_bits = (bits - 0x4b400000 + 127) << 23;
  float scale;
  std::memcpy(&scale, &scale_bits, sizeof scale);
  return x < -126.0f ? 0.0f : power * scale;
}

constexpr float kLog2E = 1.44269504088896340736f;

// x / (1 + e^-x), without overflow on either side.
inline float silu(float x) {
  const float decay = exp2_nonpositive(-std::fabs(x) * kLog2E);
  return x * (x >= 0.0f ? 1.0f : decay) / (1.0f + decay);
}

}  // namespace sluice

// The noise's arithmetic, operation by operation that of verify_kernels/noise.py. log and exp use IEEE + - * / only (the
// build forbids contraction), so that a seed means the same text on every machine.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

namespace sd {

constexpr double LN2 = 0.6931471805599453;
constexpr float WEIGHT_SCALE = 17592186044416.0f;  // 2^44
constexpr double WEIGHT_BITS = 44.0;
constexpr float NO_WEIGHT_BELOW = -31.0f;  // exp(-31) * 2^44 < 1

inline double fixed_log(double x) {
  int exponent;
  double m = std::frexp(x, &exponent);
  if (m < 0.7071067811865476) {
    m *= 2.0;
    exponent -= 1;
  }
  double s = (m - 1.0) / (m + 1.0), square = s * s, series = 1.0 / 23.0;
  for (int odd = 21; odd > 1; odd -= 2) series = series * square + 1.0 / odd;
  double twice = s + s;
  return exponent * LN2 + (twice + twice * (square * series));
}

// d <= 0. Exactly 1 at 0.
inline float fixed_exp(float d) {
  d = d > -40.0f ? d : -40.0f;
  float n = (d * 1.4426950408889634f + 12582912.0f) - 12582912.0f;
  float r = (d - n * 0.693359375f) - n * -2.12194440e-4f;
  float e = (float)(1.0 / 5040.0);
  e = e * r + (float)(1.0 / 720.0);
  e = e * r + (float)(1.0 / 120.0);
  e = e * r + (float)(1.0 / 24.0);
  e = e * r + (float)(1.0 / 6.0);
  e = e * r + 0.5f;
  e = e * r + 1.0f;
  e = e * r + 1.0f;
  int32_t power = ((int32_t)n + 127) << 23;
  float scale;
  memcpy(&scale, &power, 4);
  return e * scale;
}

// exp(d) in units of 2^-44. Integers: a sum is exact, whatever its order.
inline int64_t softmax_weight(float d) { return (int64_t)(fixed_exp(d) * WEIGHT_SCALE); }

inline double log_of_weight(int64_t total) { return fixed_log((double)total) - WEIGHT_BITS * LN2; }

// -log(-log(u)), u = (bits + 1/2) / 2^32.
inline float gumbel_from_bits(uint32_t bits) {
  double u = ((double)bits + 0.5) * 0x1p-32;
  return (float)-fixed_log(-fixed_log(u));
}

// Philox4x32-10 (Salmon et al., SC 2011), sixteen calls at a time: 64 tokens' bits in plain loops GCC vectorises.
constexpr int PHILOX_TOKENS = 64;

// bits[lane][i] belongs to token 4 * (first_call + i) + lane. Counter words: position low, high, call, 0.
inline void philox16(uint64_t key, uint64_t position, uint32_t first_call, uint32_t bits[4][16]) {
  uint32_t c0[16], c1[16], c2[16], c3[16];
  for (int i = 0; i < 16; ++i) {
    c0[i] = (uint32_t)position;
    c1[i] = (uint32_t)(position >> 32);
    c2[i] = first_call + i;
    c3[i] = 0;
  }
  uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
  for (int round = 0; round < 10; ++round) {
    for (int i = 0; i < 16; ++i) {
      uint64_t even = (uint64_t)0xD2511F53u * c0[i], odd = (uint64_t)0xCD9E8D57u * c2[i];
      uint32_t n0 = (uint32_t)(odd >> 32) ^ c1[i] ^ k0, n2 = (uint32_t)(even >> 32) ^ c3[i] ^ k1;
      c1[i] = (uint32_t)odd;
      c3[i] = (uint32_t)even;
      c0[i] = n0;
      c2[i] = n2;
    }
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  for (int i = 0; i < 16; ++i) {
    bits[0][i] = c0[i];
    bits[1][i] = c1[i];
    bits[2][i] = c2[i];
    bits[3][i] = c3[i];
  }
}

}  // namespace sd

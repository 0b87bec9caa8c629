// float16 as bits, for processors and places without an instruction for it.
#pragma once
#include <cstdint>
#include <cstring>

namespace sd {

inline float half_to_float(uint16_t h) {
  const uint32_t sign = (uint32_t)(h & 0x8000) << 16, mantissa = h & 0x3ff;
  uint32_t exponent = (h >> 10) & 0x1f, bits;
  if (exponent == 0) {  // zero and subnormals: mantissa * 2^-24 is exact in float
    const float value = (float)mantissa * 5.9604644775390625e-8f;
    memcpy(&bits, &value, 4);
  } else {
    bits = (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | (mantissa << 13);
  }
  bits |= sign;
  float out;
  memcpy(&out, &bits, 4);
  return out;
}

// Rounds half to even; overflow becomes infinity. `x` is not NaN.
inline uint16_t float_to_half(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  const uint32_t sign = bits >> 16 & 0x8000;
  bits &= 0x7fffffff;
  if (bits >= 0x477ff000) return sign | 0x7c00;
  if (bits < 0x38800000) {  // the sum's last bit is worth 2^-24, as a subnormal's
    float small;
    memcpy(&small, &bits, 4);
    small += 0.5f;
    memcpy(&bits, &small, 4);
    return sign | (bits - 0x3f000000);
  }
  return sign | ((bits + 0xfff + (bits >> 13 & 1)) >> 13) - (112 << 10);
}

}  // namespace sd

// Keys and values as the cache holds them: float32, bfloat16, or int8 with one float32 scale per head and token.
//
// Sums are float32 for every type. A value is rounded when it is written, and even rows of the same forward read the
// rounded value: a tree node sees the same keys as plain decode.
#pragma once
#include <cstdint>
#include <cstring>

#include "prologue.h"
#include "vec.h"

namespace sd {

inline float widen(float x) { return x; }
inline float widen(int8_t x) { return x; }
inline float widen(uint16_t x) {
  const uint32_t bits = (uint32_t)x << 16;
  float out;
  memcpy(&out, &bits, 4);
  return out;
}

// 16 * N stored values as floats, in the order that suits their type: of bfloat16 those at even places come first.
template <int N, class T>
inline void load_stored(const T* p, v16* out) {
  if constexpr (sizeof(T) == 2 && N % 2 == 0) {
    for (int j = 0; j < N; j += 2) load_pairs(p + 16 * j, out[j], out[j + 1]);
  } else {
    for (int j = 0; j < N; ++j) out[j] = load16(p + 16 * j);
  }
}

// Converts 16 * N floats from plain order to the order of load_stored, and back.
template <int N, class T>
inline void load_sums(const float* p, v16* out) {
  if constexpr (sizeof(T) == 2 && N % 2 == 0) {
    for (int j = 0; j < N; j += 2) unzip(load16(p + 16 * j), load16(p + 16 * j + 16), out[j], out[j + 1]);
  } else {
    for (int j = 0; j < N; ++j) out[j] = load16(p + 16 * j);
  }
}
template <int N, class T>
inline void store_sums(float* p, const v16* sums) {
  if constexpr (sizeof(T) == 2 && N % 2 == 0) {
    for (int j = 0; j < N; j += 2) {
      v16 first, second;
      zip(sums[j], sums[j + 1], first, second);
      store16(p + 16 * j, first);
      store16(p + 16 * j + 16, second);
    }
  } else {
    for (int j = 0; j < N; ++j) store16(p + 16 * j, sums[j]);
  }
}

// One head of one token to `out`, its values `stride` apart; `scale` is of int8 alone.
inline void store_head(const float* x, int dim, float* out, int64_t stride, float*) {
  for (int d = 0; d < dim; ++d) out[d * stride] = x[d];
}

inline void store_head(const float* x, int dim, uint16_t* out, int64_t stride, float*) {
  for (int d = 0; d < dim; ++d) {  // round half to even; NaN stays NaN
    uint32_t bits;
    memcpy(&bits, x + d, 4);
    out[d * stride] = x[d] == x[d] ? (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16) : 0x7fc0;
  }
}

inline void store_head(const float* x, int dim, int8_t* out, int64_t stride, float* scale) {
  int8_t q[CHUNK];
  int32_t offset;  // of a product with weights that have one
  quantise_chunk(x, dim, q, scale, &offset);
  for (int d = 0; d < dim; ++d) out[d * stride] = q[d];
}

}  // namespace sd

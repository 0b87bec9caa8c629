// vec.h on AVX-512: one register holds the sixteen.
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace sd {

typedef float v16 __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t i16v __attribute__((vector_size(64), aligned(4), may_alias));

// How many v16 an inner loop accumulates for each of `rows` rows: as many as keep to the registers, of which 32 are here.
constexpr int columns_for(int rows) { return 4; }

inline v16 load16(const float* p) { return *reinterpret_cast<const v16*>(p); }
inline void store16(float* p, v16 x) { *reinterpret_cast<v16*>(p) = x; }
inline v16 splat(float x) { return (v16)_mm512_set1_ps(x); }
inline i16v splat_bits(int32_t x) { return (i16v)_mm512_set1_epi32(x); }
inline float first_of(v16 x) { return x[0]; }
inline i16v bits_of(v16 x) { return (i16v)x; }
inline v16 floats_of(i16v x) { return (v16)x; }
inline i16v less16(v16 a, v16 b) { return (i16v)(a < b); }

// a * b + c in one rounding. `fma1` rounds like `fma16`, which is what lets a scalar tail and a vector body give the
// same bits.
inline v16 fma16(v16 a, v16 b, v16 c) { return (v16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
inline float fma1(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline v16 max16(v16 a, v16 b) { return (v16)_mm512_max_ps((__m512)a, (__m512)b); }

// Horizontal reductions in one fixed order: halves, quarters, ...
inline float sum16(v16 x) { return _mm512_reduce_add_ps((__m512)x); }
inline float hmax16(v16 x) { return _mm512_reduce_max_ps((__m512)x); }
inline int32_t sum_bits(i16v x) { return _mm512_reduce_add_epi32((__m512i)x); }

// Lane i becomes x[i ^ H] + x[i], or x[i ^ H] - x[i] where i has the bit H: one stage of a Hadamard transform.
template <int H>
inline v16 butterfly16(v16 x) {
  const i16v lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const i16v flip = ((lane & H) != 0) & (int32_t)0x80000000;
  return __builtin_shuffle(x, lane ^ H) + (v16)((i16v)x ^ flip);
}

// Sixteen bfloat16 values.
inline v16 load16(const uint16_t* p) {
  return (v16)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
}

// Thirty-two bfloat16 values: those at even places and those at odd ones. One load and one operation for each sixteen,
// where load16 takes two.
inline void load_pairs(const uint16_t* p, v16& even, v16& odd) {
  const __m512i x = _mm512_loadu_si512(p);
  even = (v16)_mm512_slli_epi32(x, 16);
  odd = (v16)_mm512_and_si512(x, _mm512_set1_epi32((int32_t)0xffff0000));
}

// Values of even and odd places to thirty-two in their order, and back.
inline void zip(v16 even, v16 odd, v16& first, v16& second) {
  const __m512i lane = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  first = (v16)_mm512_permutex2var_ps((__m512)even, lane, (__m512)odd);
  second = (v16)_mm512_permutex2var_ps((__m512)even, _mm512_add_epi32(lane, _mm512_set1_epi32(8)), (__m512)odd);
}
inline void unzip(v16 first, v16 second, v16& even, v16& odd) {
  const __m512i lane = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  even = (v16)_mm512_permutex2var_ps((__m512)first, lane, (__m512)second);
  odd = (v16)_mm512_permutex2var_ps((__m512)first, _mm512_add_epi32(lane, _mm512_set1_epi32(1)), (__m512)second);
}

// Sixteen bytes.
inline v16 load16(const int8_t* p) {
  return (v16)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}

// The low byte of each lane; lanes hold -128..127.
inline void store_bytes(int8_t* p, i16v x) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8((__m512i)x)); }

}  // namespace sd

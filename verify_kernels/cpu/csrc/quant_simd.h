// The vector operations of quant_linear.cpp, each on one register of this processor.
//
// A register holds LANES output channels: as bytes four input channels of each, as int32 or float one value of each.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "half.h"

namespace sd {

// MOST_ROWS rows times COLUMNS registers of channels take two registers each beside their operands; up to FEW_SUMS of
// them leave room for as many again. Up to DIRECT_ROWS rows are multiplied without unpacking first, with AVX2 any number;
// with AVX-512 up to FEW_ROWS of them with 32 channels at once, the others with 16.
#if defined(__AVX512VNNI__)
constexpr int WIDTH = 64, MOST_ROWS = 6, COLUMNS = 2, FEW_SUMS = 8, FEW_ROWS = 4, DIRECT_ROWS = 12;
#elif defined(__AVX2__)
constexpr int WIDTH = 32, MOST_ROWS = 0, COLUMNS = 1, FEW_SUMS = 0, FEW_ROWS = 0, DIRECT_ROWS = INT32_MAX;
#elif defined(__aarch64__)
constexpr int WIDTH = 16, MOST_ROWS = 6, COLUMNS = 2, FEW_SUMS = 8, FEW_ROWS = 0, DIRECT_ROWS = 0;
#else
constexpr int WIDTH = 16, MOST_ROWS = 4, COLUMNS = 1, FEW_SUMS = 0, FEW_ROWS = 0, DIRECT_ROWS = 0;
#endif
constexpr int LANES4 = WIDTH / 4;

// How many times too large levels from the high halves of bytes are left. AVX2's sums of 16 bits have no room for that,
// nor have ARM's products of signed bytes.
#if (defined(__AVX2__) && !defined(__AVX512VNNI__)) || (defined(__aarch64__) && !defined(__ARM_FEATURE_MATMUL_INT8))
constexpr int HIGH = 1;
#else
constexpr int HIGH = 16;
#endif

typedef uint16_t wordv __attribute__((vector_size(WIDTH), aligned(1), may_alias));  // bytes, for shifts by whole words
typedef int32_t intv __attribute__((vector_size(WIDTH), aligned(4), may_alias));
typedef float floatv __attribute__((vector_size(WIDTH), aligned(4), may_alias));

inline wordv load_bytes(const uint8_t* p) { return *reinterpret_cast<const wordv*>(p); }
inline wordv all_bytes(uint8_t x) { return wordv{} + (uint16_t)(x * 0x101); }
inline void store_bytes(uint8_t* p, wordv x) { *reinterpret_cast<wordv*>(p) = x; }
inline floatv load_floats(const float* p) { return *reinterpret_cast<const floatv*>(p); }
inline void store_floats(float* p, floatv x) { *reinterpret_cast<floatv*>(p) = x; }
inline floatv to_floats(intv x) { return __builtin_convertvector(x, floatv); }
inline floatv all_floats(float x) { return x - floatv{}; }
inline intv all_ints(int32_t x) { return intv{} + x; }

// What a sum begins with. 1.5 * 2^23 as a float's bits: a sum below 2^22 added to them makes the bits of a float F, and
// one fused operation converts and scales it, F * s - 1.5 * 2^23 * s. Scales of up to 22 bits make the latter exact.
#if defined(__AVX512VNNI__)
constexpr int32_t START = 0x4B400000;
constexpr float LESS_START = -12582912.0f;
#else
constexpr int32_t START = 0;
constexpr float LESS_START = 0;
#endif

template <int BITS>
#if defined(__AVX2__) && !defined(__AVX512VNNI__)
constexpr int SUM_BITS = BITS;
#elif defined(__aarch64__) && !defined(__ARM_FEATURE_MATMUL_INT8)
constexpr int SUM_BITS = BITS < 8 ? 7 : 8;
#else
constexpr int SUM_BITS = 8;  // the same operations for all
#endif

// The four activations at `q`, for every channel.
inline intv spread(const int8_t* q) {
  int32_t four;
  memcpy(&four, q, 4);
  return all_ints(four);
}

#if defined(__AVX512VNNI__)

inline floatv fused(floatv a, floatv b, floatv c) { return (floatv)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
// Prefetches the lines from `from` to `end`, at least one; returns where it stopped. The loop is aligned because
// processors from Skylake to Cascade Lake decode jumps across 32 bytes every time, which took 1.4 times as long.
inline const char* ask_for(const char* from, const char* end) {
  asm volatile(".p2align 5\n0: prefetcht1 (%0)\n add $64, %0\n cmp %1, %0\n jb 0b" : "+r"(from) : "r"(end) : "cc");
  return from;
}

// a times the float at `b`, plus c. Written out because GCC would load what two of these share into a register first,
// one instruction more, and the front end is nearly as busy as the multipliers.
inline floatv fused_with(floatv a, const int8_t* b, floatv c) {
  asm("vfmadd231ps %2%{1to16%}, %1, %0" : "+v"(c) : "v"(a), "m"(*(const float(*)[1])b));
  return c;
}
inline floatv halfs(const uint8_t* p) { return (floatv)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
inline floatv from_u8(const uint8_t* p) {
  return (floatv)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)));
}
inline floatv from_s8(const uint8_t* p) {
  return (floatv)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
}

inline floatv scaled(intv sum, floatv scale, floatv zero) { return fused((floatv)sum, scale, zero); }

// sum += the products of four inputs, the j-th four of a run, with levels below 2^BITS.
template <int BITS>
inline void multiply(intv& sum, intv&, wordv levels, intv four, int) {
  sum = (intv)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)levels, (__m512i)four);
}

// The same for the four activations at `q` and AT registers of levels. Written out for one of them, because GCC would load
// the four into a register first.
template <int BITS, int AT>
inline void multiply_all(intv (&sum)[AT], intv (&run)[AT], const wordv (&levels)[AT], const int8_t* q, int j) {
  if constexpr (AT == 1) {
    intv in_register = sum[0];  // an array's element, given to `asm` itself, GCC stores every time
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(in_register) : "v"(levels[0]), "m"(*(const int32_t(*)[1])q));
    sum[0] = in_register;
  } else {
    const intv four = spread(q);
#pragma GCC unroll 2
    for (int c = 0; c < AT; ++c) multiply<BITS>(sum[c], run[c], levels[c], four, j);
  }
}

#elif defined(__AVX2__)

inline floatv fused(floatv a, floatv b, floatv c) { return (floatv)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
inline floatv halfs(const uint8_t* p) { return (floatv)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
inline floatv from_u8(const uint8_t* p) {
  return (floatv)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}
inline floatv from_s8(const uint8_t* p) {
  return (floatv)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
}

// Pairs of products are added in 16 bits, in `run`, as many as cannot overflow; eight-bit levels are split in two.
template <int BITS>
inline void multiply(intv& sum, intv& run, wordv levels, intv four, int j) {
  constexpr int RUN = BITS <= 4 ? 8 : BITS == 5 ? 4 : 2;  // 2 * 127 * (2^BITS - 1) * RUN < 2^15
  const __m256i w = (__m256i)levels, a = (__m256i)four;
  if (BITS == 8) {
    const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(a, 8), 8), odd = _mm256_srai_epi16(a, 8);
    sum += (intv)_mm256_madd_epi16(_mm256_and_si256(w, _mm256_set1_epi16(255)), even);
    sum += (intv)_mm256_madd_epi16(_mm256_srli_epi16(w, 8), odd);
    return;
  }
  const __m256i pairs = _mm256_maddubs_epi16(w, a);
  run = j % RUN ? (intv)_mm256_add_epi16((__m256i)run, pairs) : (intv)pairs;
  asm("" : "+x"(run));  // or GCC makes all products first and spills them
  if (j % RUN == RUN - 1) sum += (intv)_mm256_madd_epi16((__m256i)run, _mm256_set1_epi16(1));
}

#elif defined(__aarch64__)

inline floatv fused(floatv a, floatv b, floatv c) {
  return (floatv)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}
inline floatv halfs(const uint8_t* p) { return (floatv)vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p))); }
inline floatv from_u8(const uint8_t* p) {
  uint32_t four;
  memcpy(&four, p, 4);
  return (floatv)vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four)))));
}
inline floatv from_s8(const uint8_t* p) {
  uint32_t four;
  memcpy(&four, p, 4);
  return (floatv)vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(four)))));
}

#else

inline floatv fused(floatv a, floatv b, floatv c) {
  for (int i = 0; i < LANES4; ++i) a[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return a;
}
inline floatv halfs(const uint8_t* p) {
  floatv r;
  for (int i = 0; i < LANES4; ++i) r[i] = half_to_float((uint16_t)(p[2 * i] | p[2 * i + 1] << 8));
  return r;
}
inline floatv from_u8(const uint8_t* p) {
  floatv r;
  for (int i = 0; i < LANES4; ++i) r[i] = p[i];
  return r;
}
inline floatv from_s8(const uint8_t* p) {
  floatv r;
  for (int i = 0; i < LANES4; ++i) r[i] = (int8_t)p[i];
  return r;
}

#endif

#if defined(__ARM_FEATURE_MATMUL_INT8)

template <int BITS>
inline void multiply(intv& sum, intv&, wordv levels, intv four, int) {
  sum = (intv)vusdotq_s32((int32x4_t)sum, (uint8x16_t)levels, (int8x16_t)four);
}

#elif defined(__ARM_FEATURE_DOTPROD)

// Both are signed: levels of eight bits are taken less 128, which is added as twice 64.
template <int BITS>
inline void multiply(intv& sum, intv&, wordv levels, intv four, int) {
  const int8x16_t q = (int8x16_t)four, half = vdupq_n_s8(64);
  int32x4_t start = (int32x4_t)sum;
  if (BITS == 8) start = vdotq_s32(vdotq_s32(start, half, q), half, q);
  sum = (intv)vdotq_s32(start, (int8x16_t)(BITS == 8 ? levels ^ all_bytes(0x80) : levels), q);
}

#elif !defined(__AVX2__)

template <int BITS>
inline void multiply(intv& sum, intv&, wordv levels, intv four, int) {
  uint8_t w[WIDTH];
  int8_t q[4];
  memcpy(w, &levels, WIDTH), memcpy(q, &four, 4);
  for (int i = 0; i < LANES4; ++i)
    for (int b = 0; b < 4; ++b) sum[i] += (int32_t)w[4 * i + b] * q[b];
}

#endif

#if !defined(__AVX512VNNI__)

inline const char* ask_for(const char* from, const char* end) {
  do __builtin_prefetch(from, 0, 2);
  while ((from += 64) < end);
  return from;
}
inline floatv fused_with(floatv a, const int8_t* b, floatv c) { return fused(a, all_floats(*(const float*)b), c); }
inline floatv scaled(intv sum, floatv scale, floatv) { return to_floats(sum) * scale; }

#endif

}  // namespace sd

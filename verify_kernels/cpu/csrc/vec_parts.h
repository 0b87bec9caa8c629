// vec.h on narrower registers: sixteen floats are two of AVX2's or four of SSE's or NEON's.
//
// GCC keeps these parts in registers; a vector type wider than the processor's it keeps in memory.
#pragma once
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#include <cstdint>
#include <cstring>

namespace sd {

#if defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
constexpr int PARTS = 16 / LANES;

// How many v16 an inner loop accumulates for each of `rows` rows: as many as keep to the registers, of which AVX2 has 16,
// and enough to hide an addition's latency.
constexpr int columns_for(int rows) { return rows == 1 ? 4 : rows == 2 ? 2 : 1; }

typedef float fpart __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t ipart __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

struct v16 {
  fpart p[PARTS];
};
struct i16v {
  ipart p[PARTS];
};

#define SD_EACH _Pragma("GCC unroll 4") for (int i = 0; i < PARTS; ++i)

inline v16 load16(const float* x) {
  v16 r;
  SD_EACH r.p[i] = *reinterpret_cast<const fpart*>(x + LANES * i);
  return r;
}
inline void store16(float* x, const v16& v) { SD_EACH *reinterpret_cast<fpart*>(x + LANES * i) = v.p[i]; }
inline v16 splat(float x) {
  v16 r;
  SD_EACH r.p[i] = fpart{} + x;
  return r;
}
inline i16v splat_bits(int32_t x) {
  i16v r;
  SD_EACH r.p[i] = ipart{} + x;
  return r;
}
inline float first_of(const v16& x) { return x.p[0][0]; }

#define SD_BINARY(T, OP)                            \
  inline T operator OP(const T& a, const T& b) {    \
    T r;                                            \
    SD_EACH r.p[i] = a.p[i] OP b.p[i];              \
    return r;                                       \
  }
SD_BINARY(v16, +)
SD_BINARY(v16, -)
SD_BINARY(v16, *)
SD_BINARY(v16, /)
SD_BINARY(i16v, +)
SD_BINARY(i16v, -)
SD_BINARY(i16v, &)
SD_BINARY(i16v, ^)
#undef SD_BINARY

inline v16 operator-(const v16& a) {
  v16 r;
  SD_EACH r.p[i] = -a.p[i];
  return r;
}
inline i16v operator~(const i16v& a) {
  i16v r;
  SD_EACH r.p[i] = ~a.p[i];
  return r;
}
inline i16v operator<<(const i16v& a, int n) {
  i16v r;
  SD_EACH r.p[i] = a.p[i] << n;
  return r;
}
inline i16v bits_of(const v16& x) {
  i16v r;
  SD_EACH r.p[i] = (ipart)x.p[i];
  return r;
}
inline v16 floats_of(const i16v& x) {
  v16 r;
  SD_EACH r.p[i] = (fpart)x.p[i];
  return r;
}
inline i16v less16(const v16& a, const v16& b) {
  i16v r;
  SD_EACH r.p[i] = (ipart)(a.p[i] < b.p[i]);
  return r;
}
inline v16 max16(const v16& a, const v16& b) {
  v16 r;
  SD_EACH r.p[i] = a.p[i] > b.p[i] ? a.p[i] : b.p[i];
  return r;
}

// a * b + c. One rounding where the processor fuses, two where it does not; `fma1` always rounds like `fma16`,
// which is what lets a scalar tail and a vector body give the same bits.
inline v16 fma16(const v16& a, const v16& b, const v16& c) {
  v16 r;
#if defined(__AVX2__) && defined(__FMA__)
  SD_EACH r.p[i] = (fpart)_mm256_fmadd_ps((__m256)a.p[i], (__m256)b.p[i], (__m256)c.p[i]);
#elif defined(__ARM_NEON) && defined(__aarch64__)
  SD_EACH r.p[i] = (fpart)vfmaq_f32((float32x4_t)c.p[i], (float32x4_t)a.p[i], (float32x4_t)b.p[i]);
#else
  SD_EACH r.p[i] = a.p[i] * b.p[i] + c.p[i];
#endif
  return r;
}
inline float fma1(float a, float b, float c) {
#if (defined(__AVX2__) && defined(__FMA__)) || (defined(__ARM_NEON) && defined(__aarch64__))
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

// Horizontal reductions in one fixed order: halves, quarters, ...
template <class Lane, class Vector, class Join>
inline Lane fold16(const Vector& x, Join join) {
  Lane a[16];
  memcpy(a, &x, 64);
  for (int h = 8; h; h >>= 1)
    for (int i = 0; i < h; ++i) a[i] = join(a[i], a[i + h]);
  return a[0];
}
inline float sum16(const v16& x) {
  return fold16<float>(x, [](float a, float b) { return a + b; });
}
inline float hmax16(const v16& x) {
  return fold16<float>(x, [](float a, float b) { return a > b ? a : b; });
}
inline int32_t sum_bits(const i16v& x) {
  return (int32_t)fold16<uint32_t>(x, [](uint32_t a, uint32_t b) { return a + b; });  // wraps, as vectors do
}

// Lane i becomes x[i ^ H] + x[i], or x[i ^ H] - x[i] where i has the bit H: one stage of a Hadamard transform.
template <int H>
inline v16 butterfly16(const v16& x) {
  v16 r;
  if constexpr (H >= LANES) {
    SD_EACH r.p[i] = i * LANES & H ? x.p[i ^ (H / LANES)] - x.p[i] : x.p[i ^ (H / LANES)] + x.p[i];
  } else {
    ipart lane;
    for (int i = 0; i < LANES; ++i) lane[i] = i;
    const ipart flip = ((lane & H) != 0) & (int32_t)0x80000000;
    SD_EACH r.p[i] = __builtin_shuffle(x.p[i], lane ^ H) + (fpart)((ipart)x.p[i] ^ flip);
  }
  return r;
}

// Sixteen bfloat16 values.
inline v16 load16(const uint16_t* x) {
  i16v r;
#if defined(__AVX2__)
  SD_EACH r.p[i] = (ipart)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(x + 8 * i))), 16);
#else
  SD_EACH for (int j = 0; j < LANES; ++j) r.p[i][j] = (int32_t)((uint32_t)x[LANES * i + j] << 16);
#endif
  return floats_of(r);
}

// Thirty-two bfloat16 values: those at even places and those at odd ones. One load and one operation for each sixteen.
inline void load_pairs(const uint16_t* x, v16& even, v16& odd) {
  SD_EACH {
    const ipart pair = *reinterpret_cast<const ipart*>(x + 2 * LANES * i);
    even.p[i] = (fpart)(pair << 16);
    odd.p[i] = (fpart)(pair & (int32_t)0xffff0000);
  }
}

// Values of even and odd places to thirty-two in their order, and back.
inline void zip(const v16& even, const v16& odd, v16& first, v16& second) {
  ipart low, high;
  for (int i = 0; i < LANES; ++i) low[i] = i / 2 + i % 2 * LANES;
  high = low + LANES / 2;
  SD_EACH {
    v16& out = 2 * i < PARTS ? first : second;
    out.p[2 * i % PARTS] = __builtin_shuffle(even.p[i], odd.p[i], low);
    out.p[2 * i % PARTS + 1] = __builtin_shuffle(even.p[i], odd.p[i], high);
  }
}
inline void unzip(const v16& first, const v16& second, v16& even, v16& odd) {
  ipart lane;
  for (int i = 0; i < LANES; ++i) lane[i] = 2 * i;
  SD_EACH {
    const v16& in = 2 * i < PARTS ? first : second;
    const fpart a = in.p[2 * i % PARTS], b = in.p[2 * i % PARTS + 1];
    even.p[i] = __builtin_shuffle(a, b, lane);
    odd.p[i] = __builtin_shuffle(a, b, lane + 1);
  }
}

// Sixteen bytes.
inline v16 load16(const int8_t* x) {
  v16 r;
#if defined(__AVX2__)
  SD_EACH r.p[i] = (fpart)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(x + 8 * i))));
#else
  SD_EACH for (int j = 0; j < LANES; ++j) r.p[i][j] = (float)x[LANES * i + j];
#endif
  return r;
}

// The low byte of each lane; lanes hold -128..127.
inline void store_bytes(int8_t* out, const i16v& x) {
#if defined(__AVX2__)
  const __m256i words = _mm256_packs_epi32((__m256i)x.p[0], (__m256i)x.p[1]);  // in halves: 0-3 8-11 4-7 12-15
  const __m256i order = _mm256_permute4x64_epi64(words, 0xD8);
  const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(order), _mm256_extracti128_si256(order, 1));
  _mm_storeu_si128((__m128i*)out, bytes);
#else
  SD_EACH for (int j = 0; j < LANES; ++j) out[LANES * i + j] = (int8_t)x.p[i][j];
#endif
}

#undef SD_EACH

}  // namespace sd

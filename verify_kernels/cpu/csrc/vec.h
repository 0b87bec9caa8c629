// Sixteen floats as one value, whatever the processor's own width, and functions of them.
//
// The same operations in the same order everywhere: processors that fuse multiply and add agree bit for bit. The sixteen
// are one register of AVX-512's, two of AVX2's or four of SSE's or NEON's. GCC keeps these parts in registers; a vector
// type wider than the processor's it keeps in memory.
#pragma once
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#include <cstdint>
#include <cstring>

namespace sd {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
constexpr int PARTS = 16 / LANES;

// How many v16 an inner loop accumulates for each of `rows` rows: as many as keep to the registers, of which AVX-512 has
// 32 and AVX2 16, and enough to hide an addition's latency.
constexpr int columns_for(int rows) { return PARTS == 1 || rows == 1 ? 4 : rows == 2 ? 2 : 1; }

typedef float fpart __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t ipart __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

struct v16 {
  fpart p[PARTS];
};
struct i16v {
  ipart p[PARTS];
};

// The value whose part i is part(i).
template <class Value, class Part>
inline __attribute__((always_inline)) Value by_part(Part part) {
  Value r;
#pragma GCC unroll 4
  for (int i = 0; i < PARTS; ++i) r.p[i] = part(i);
  return r;
}

inline v16 load16(const float* x) {
  return by_part<v16>([&](int i) { return *reinterpret_cast<const fpart*>(x + LANES * i); });
}
inline void store16(float* x, const v16& v) {
#pragma GCC unroll 4
  for (int i = 0; i < PARTS; ++i) *reinterpret_cast<fpart*>(x + LANES * i) = v.p[i];
}
inline v16 splat(float x) {
  return by_part<v16>([&](int) { return x - fpart{}; });
}
inline i16v splat_bits(int32_t x) {
  return by_part<i16v>([&](int) { return ipart{} + x; });
}
inline float first_of(const v16& x) { return x.p[0][0]; }

#define SD_BINARY(T, OP) \
  inline T operator OP(const T& a, const T& b) { return by_part<T>([&](int i) { return a.p[i] OP b.p[i]; }); }
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
  return by_part<v16>([&](int i) { return -a.p[i]; });
}
inline i16v operator~(const i16v& a) {
  return by_part<i16v>([&](int i) { return ~a.p[i]; });
}
inline i16v operator<<(const i16v& a, int n) {
  return by_part<i16v>([&](int i) { return a.p[i] << n; });
}
inline i16v bits_of(const v16& x) {
  return by_part<i16v>([&](int i) { return (ipart)x.p[i]; });
}
inline v16 floats_of(const i16v& x) {
  return by_part<v16>([&](int i) { return (fpart)x.p[i]; });
}
inline i16v less16(const v16& a, const v16& b) {
  return by_part<i16v>([&](int i) { return (ipart)(a.p[i] < b.p[i]); });
}
inline fpart larger(fpart a, fpart b) {
#if defined(__AVX512F__)
  return (fpart)_mm512_max_ps((__m512)a, (__m512)b);  // of a comparison GCC makes two operations there
#else
  return a > b ? a : b;
#endif
}
inline v16 max16(const v16& a, const v16& b) {
  return by_part<v16>([&](int i) { return larger(a.p[i], b.p[i]); });
}
inline v16 abs16(const v16& a) { return floats_of(bits_of(a) & splat_bits(0x7fffffff)); }

// a * b + c. One rounding where the processor fuses, two where it does not; `fma1` always rounds like `fma16`,
// which is what lets a scalar tail and a vector body give the same bits.
inline v16 fma16(const v16& a, const v16& b, const v16& c) {
  return by_part<v16>([&](int i) {
#if defined(__AVX512F__)
    return (fpart)_mm512_fmadd_ps((__m512)a.p[i], (__m512)b.p[i], (__m512)c.p[i]);
#elif defined(__AVX2__) && defined(__FMA__)
    return (fpart)_mm256_fmadd_ps((__m256)a.p[i], (__m256)b.p[i], (__m256)c.p[i]);
#elif defined(__ARM_NEON) && defined(__aarch64__)
    return (fpart)vfmaq_f32((float32x4_t)c.p[i], (float32x4_t)a.p[i], (float32x4_t)b.p[i]);
#else
    return a.p[i] * b.p[i] + c.p[i];
#endif
  });
}
inline float fma1(float a, float b, float c) {
#if (defined(__AVX2__) && defined(__FMA__)) || (defined(__ARM_NEON) && defined(__aarch64__))
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

inline ipart lanes() {  // 0, 1, 2, ...
  ipart lane;
  for (int i = 0; i < LANES; ++i) lane[i] = i;
  return lane;
}

// Horizontal reductions in one fixed order: halves, quarters, ...
template <class Value, class Join>
inline auto fold16(Value x, Join join) {
#pragma GCC unroll 2
  for (int h = PARTS / 2; h; h /= 2)
#pragma GCC unroll 2
    for (int i = 0; i < h; ++i) x.p[i] = join(x.p[i], x.p[i + h]);
#pragma GCC unroll 4
  for (int h = LANES / 2; h; h /= 2) x.p[0] = join(x.p[0], __builtin_shuffle(x.p[0], lanes() ^ h));
  return x.p[0][0];
}
inline float sum16(const v16& x) {
  return fold16(x, [](fpart a, fpart b) { return a + b; });
}
inline float hmax16(const v16& x) {
  return fold16(x, larger);
}
inline int32_t sum_bits(const i16v& x) {
  return fold16(x, [](ipart a, ipart b) { return a + b; });
}

// Lane i becomes x[i ^ H] + x[i], or x[i ^ H] - x[i] where i has the bit H: one stage of a Hadamard transform.
template <int H>
inline v16 butterfly16(const v16& x) {
  return by_part<v16>([&](int i) {
    if constexpr (H >= LANES) {
      const fpart other = x.p[i ^ (H / LANES)];
      return i * LANES & H ? other - x.p[i] : other + x.p[i];
    } else {
      const ipart flip = ((lanes() & H) != 0) & (int32_t)0x80000000;
      return __builtin_shuffle(x.p[i], lanes() ^ H) + (fpart)((ipart)x.p[i] ^ flip);
    }
  });
}

// Sixteen bfloat16 values.
inline v16 load16(const uint16_t* x) {
  return floats_of(by_part<i16v>([&](int i) {
    const uint16_t* p = x + LANES * i;
#if defined(__AVX512F__)
    return (ipart)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#elif defined(__AVX2__)
    return (ipart)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
#else
    ipart r;
    for (int j = 0; j < LANES; ++j) r[j] = (int32_t)((uint32_t)p[j] << 16);
    return r;
#endif
  }));
}

// Thirty-two bfloat16 values: those at even places and those at odd ones. One load and one operation for each sixteen,
// where load16 takes two.
inline void load_pairs(const uint16_t* x, v16& even, v16& odd) {
  const i16v pairs = bits_of(load16((const float*)x));
  even = floats_of(pairs << 16), odd = floats_of(pairs & splat_bits((int32_t)0xffff0000));
}

// Values of even and odd places to thirty-two in their order, and back.
inline void zip(const v16& even, const v16& odd, v16& first, v16& second) {
  const ipart low = (lanes() >> 1) + (lanes() & 1) * LANES;
#pragma GCC unroll 8
  for (int i = 0; i < 2 * PARTS; ++i) {
    v16& out = i < PARTS ? first : second;
    out.p[i % PARTS] = __builtin_shuffle(even.p[i / 2], odd.p[i / 2], low + i % 2 * (LANES / 2));
  }
}
inline void unzip(const v16& first, const v16& second, v16& even, v16& odd) {
  const auto part = [&](int i) { return (i < PARTS ? first : second).p[i % PARTS]; };
  even = by_part<v16>([&](int i) { return __builtin_shuffle(part(2 * i), part(2 * i + 1), 2 * lanes()); });
  odd = by_part<v16>([&](int i) { return __builtin_shuffle(part(2 * i), part(2 * i + 1), 2 * lanes() + 1); });
}

// Sixteen bytes.
inline v16 load16(const int8_t* x) {
  return by_part<v16>([&](int i) {
    const int8_t* p = x + LANES * i;
#if defined(__AVX512F__)
    return (fpart)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(__AVX2__)
    return (fpart)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
    fpart r;
    for (int j = 0; j < LANES; ++j) r[j] = (float)p[j];
    return r;
#endif
  });
}

// The low byte of each lane; lanes hold -128..127.
inline void store_bytes(int8_t* out, const i16v& x) {
#if defined(__AVX512F__)
  _mm_storeu_si128((__m128i*)out, _mm512_cvtepi32_epi8((__m512i)x.p[0]));
#elif defined(__AVX2__)
  const __m256i words = _mm256_packs_epi32((__m256i)x.p[0], (__m256i)x.p[1]);  // in halves: 0-3 8-11 4-7 12-15
  const __m256i order = _mm256_permute4x64_epi64(words, 0xD8);
  const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(order), _mm256_extracti128_si256(order, 1));
  _mm_storeu_si128((__m128i*)out, bytes);
#else
  for (int i = 0; i < 16; ++i) out[i] = (int8_t)x.p[i / LANES][i % LANES];
#endif
}

// exp(x) by Cody-Waite reduction and a degree-6 Taylor polynomial on |r| <= ln2/2: relative error < 2e-7.
// Below -87.3 the result is 0, above 88 it saturates.
inline v16 exp16(v16 x) {
  const v16 magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to the nearest integer
  const i16v low = less16(x, splat(-87.3f));
  x = max16(x, splat(-87.3f));
  x = -max16(-x, splat(-88.0f));
  v16 shifted = fma16(x, splat(1.44269504088896341f), magic);
  v16 n = shifted - magic;
  v16 r = fma16(n, splat(-0.693359375f), x);
  r = fma16(n, splat(2.12194440e-4f), r);
  v16 p = splat(1.0f / 720);
  p = fma16(p, r, splat(1.0f / 120));
  p = fma16(p, r, splat(1.0f / 24));
  p = fma16(p, r, splat(1.0f / 6));
  p = fma16(p, r, splat(0.5f));
  p = fma16(p, r, splat(1.0f));
  p = fma16(p, r, splat(1.0f));
  const i16v bits = (bits_of(shifted) << 23) + bits_of(p);  // the low bits of `shifted` hold the integer n
  return floats_of(bits & ~low);
}

inline float exp1(float x) { return first_of(exp16(splat(x))); }

}  // namespace sd

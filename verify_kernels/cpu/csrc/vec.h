// Sixteen floats as one value. GCC's vector extension lowers it to AVX-512, AVX2, SSE or NEON alike.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace sd {

typedef float v16 __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t i16v __attribute__((vector_size(64), aligned(4), may_alias));

inline v16 load16(const float* p) { return *reinterpret_cast<const v16*>(p); }
inline void store16(float* p, v16 x) { *reinterpret_cast<v16*>(p) = x; }
inline v16 splat(float x) { return v16{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }

// a * b + c. One rounding where the processor fuses, two where it does not; `fma1` always rounds like `fma16`,
// which is what lets a scalar tail and a vector body give the same bits.
inline v16 fma16(v16 a, v16 b, v16 c) {
#if defined(__AVX512F__)
  return (v16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
  return a * b + c;
#endif
}

inline float fma1(float a, float b, float c) {
#if defined(__AVX512F__)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

inline v16 max16(v16 a, v16 b) {
#if defined(__AVX512F__)
  return (v16)_mm512_max_ps((__m512)a, (__m512)b);
#else
  v16 r;
  for (int i = 0; i < 16; ++i) r[i] = a[i] > b[i] ? a[i] : b[i];
  return r;
#endif
}

inline v16 abs16(v16 a) { return (v16)((i16v)a & 0x7fffffff); }

// Horizontal reductions in one fixed order: halves, quarters, ...
inline float sum16(v16 x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)x);
#endif
  float a[16];
  memcpy(a, &x, 64);
  for (int h = 8; h; h >>= 1)
    for (int i = 0; i < h; ++i) a[i] += a[i + h];
  return a[0];
}

inline float hmax16(v16 x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)x);
#endif
  float a[16];
  memcpy(a, &x, 64);
  for (int h = 8; h; h >>= 1)
    for (int i = 0; i < h; ++i) a[i] = a[i] > a[i + h] ? a[i] : a[i + h];
  return a[0];
}

// exp(x) by Cody-Waite reduction and a degree-6 Taylor polynomial on |r| <= ln2/2: relative error < 2e-7.
// Below -87.3 the result is 0, above 88 it saturates.
inline v16 exp16(v16 x) {
  const v16 magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to the nearest integer
  v16 low = (v16)(x < splat(-87.3f) ? i16v{} - 1 : i16v{});
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
  i16v bits = ((i16v)shifted << 23) + (i16v)p;  // the low bits of `shifted` hold the integer n
  return (v16)(bits & ~(i16v)low);
}

inline float exp1(float x) { return exp16(splat(x))[0]; }

}  // namespace sd

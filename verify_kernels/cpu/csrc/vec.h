// Sixteen floats as one value, whatever the processor's own width, and functions of them.
//
// The same operations in the same order everywhere: processors that fuse multiply and add agree bit for bit.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__AVX512F__)
#include "vec_avx512.h"
#else
#include "vec_parts.h"
#endif

namespace sd {

inline v16 abs16(v16 a) { return floats_of(bits_of(a) & splat_bits(0x7fffffff)); }

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

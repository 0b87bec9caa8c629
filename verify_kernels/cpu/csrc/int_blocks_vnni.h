// int_blocks.h on AVX-512 with VNNI: one instruction multiplies a group of sixteen channels and adds it up.
#pragma once
#include <immintrin.h>

namespace sd {

constexpr int MAX_MR = 12;   // 12 x 2 accumulators, 2 weights, 1 activation
constexpr int AHEAD = 4096;  // farther, and several rows' values are pushed out of the first cache

template <int MR>
inline void int8_block(const uint8_t* w, const int8_t* q, int64_t ld, int groups, Fetch fetch, int32_t (*acc)[TILE]) {
  __m512i sum[MR][2];
#pragma GCC unroll 12
  for (int m = 0; m < MR; ++m) sum[m][0] = sum[m][1] = _mm512_setzero_si512();
  for (int g = 0; g < groups; ++g) {
    const __m512i w0 = _mm512_loadu_si512(w), w1 = _mm512_loadu_si512(w + 64);
    _mm_prefetch(fetch.from, _MM_HINT_T0);
    _mm_prefetch(fetch.from + fetch.step / 2, _MM_HINT_T0);
    fetch.from += fetch.step;
    w += 4 * TILE;
#pragma GCC unroll 12
    for (int m = 0; m < MR; ++m) {
      int32_t four;
      memcpy(&four, q + m * ld + 4 * g, 4);
      const __m512i a = _mm512_set1_epi32(four);
      sum[m][0] = _mm512_dpbusd_epi32(sum[m][0], w0, a);
      sum[m][1] = _mm512_dpbusd_epi32(sum[m][1], w1, a);
    }
  }
#pragma GCC unroll 12
  for (int m = 0; m < MR; ++m) {
    _mm512_storeu_si512(&acc[m][0], sum[m][0]);
    _mm512_storeu_si512(&acc[m][16], sum[m][1]);
  }
}

}  // namespace sd

// Integer products of a chunk, exact in 32 bits: acc[m][n] = sum_k w[n][k] * q[m][k].
//
// Each processor's version defines int8_block for up to MAX_MR rows (a tree's rows share the stream of weights that one
// row needs anyway), and AHEAD, how many bytes before their use a single block prefetches its weights.
#pragma once
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include <cstring>

#include "linear.h"

namespace sd {

// Prefetches from `from` on, `step` bytes for each 128 of the block's own.
struct Fetch {
  const char* from;
  int step;
};

#if defined(__AVX512VNNI__)

// One instruction multiplies a group of sixteen channels and adds it up.

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

#elif defined(__AVX2__)

// A product of bytes saturates at 16 bits there, so weights are widened first.

constexpr int MAX_MR = 5;       // 5 x 2 accumulators, 2 x 2 weights, 2 activations
constexpr int AHEAD = 8192;     // a chunk, of which each pass reads a half
constexpr int MAX_GROUPS = 64;  // groups of four in a chunk
constexpr int PART_BYTES = 64;  // of the 128 that a group takes: 16 channels, whose sums fit the registers

// A row's groups of four as words: values 0 and 2 in `even`, 1 and 3 in `odd`, one group to 32 bits.
struct WideRow {
  alignas(32) int32_t even[MAX_GROUPS], odd[MAX_GROUPS];

  void fill(const int8_t* q, int groups) {
    int g = 0;
    for (; g + 8 <= groups; g += 8) {
      const __m256i x = _mm256_loadu_si256((const __m256i*)(q + 4 * g));
      _mm256_store_si256((__m256i*)(even + g), _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8));
      _mm256_store_si256((__m256i*)(odd + g), _mm256_srai_epi16(x, 8));
    }
    for (; g < groups; ++g) {
      const int8_t* a = q + 4 * g;
      even[g] = (uint16_t)a[0] | (uint32_t)(uint16_t)a[2] << 16;
      odd[g] = (uint16_t)a[1] | (uint32_t)(uint16_t)a[3] << 16;
    }
  }
};

inline void fetch_some(Fetch& fetch) {  // while PART_BYTES of the block's own are read
  _mm_prefetch(fetch.from, _MM_HINT_T0);
  fetch.from += fetch.step * PART_BYTES / 128;
}

template <int MR>
inline void int8_block(const uint8_t* w, const int8_t* q, int64_t ld, int groups, Fetch fetch, int32_t (*acc)[TILE]) {
  WideRow rows[MR];
  for (int m = 0; m < MR; ++m) rows[m].fill(q + m * ld, groups);
  const __m256i low = _mm256_set1_epi16(255);
  for (int part = 0; part < 2; ++part) {
    __m256i sum[MR][2];
#pragma GCC unroll 5
    for (int m = 0; m < MR; ++m) sum[m][0] = sum[m][1] = _mm256_setzero_si256();
    const uint8_t* own = w + part * PART_BYTES;
    for (int g = 0; g < groups; ++g, own += 2 * PART_BYTES) {
      const __m256i w0 = _mm256_loadu_si256((const __m256i*)own), w1 = _mm256_loadu_si256((const __m256i*)(own + 32));
      const __m256i even0 = _mm256_and_si256(w0, low), odd0 = _mm256_srli_epi16(w0, 8);
      const __m256i even1 = _mm256_and_si256(w1, low), odd1 = _mm256_srli_epi16(w1, 8);
      fetch_some(fetch);
#pragma GCC unroll 5
      for (int m = 0; m < MR; ++m) {
        const __m256i even = _mm256_set1_epi32(rows[m].even[g]), odd = _mm256_set1_epi32(rows[m].odd[g]);
        sum[m][0] = _mm256_add_epi32(sum[m][0], _mm256_madd_epi16(even0, even));
        sum[m][1] = _mm256_add_epi32(sum[m][1], _mm256_madd_epi16(even1, even));
        sum[m][0] = _mm256_add_epi32(sum[m][0], _mm256_madd_epi16(odd0, odd));
        sum[m][1] = _mm256_add_epi32(sum[m][1], _mm256_madd_epi16(odd1, odd));
      }
    }
#pragma GCC unroll 5
    for (int m = 0; m < MR; ++m) {
      _mm256_store_si256((__m256i*)&acc[m][16 * part], sum[m][0]);
      _mm256_store_si256((__m256i*)&acc[m][16 * part + 8], sum[m][1]);
    }
  }
}

#else  // plain C++

constexpr int MAX_MR = 12;
constexpr int AHEAD = 4096;

template <int MR>
inline void int8_block(const uint8_t* w, const int8_t* q, int64_t ld, int groups, Fetch fetch, int32_t (*acc)[TILE]) {
  for (int m = 0; m < MR; ++m) {
    memset(acc[m], 0, sizeof(acc[m]));
    for (int g = 0; g < groups; ++g) {
      const uint8_t* wg = w + 4 * TILE * (int64_t)g;
      const int8_t* a = q + m * ld + 4 * g;
      for (int n = 0; n < TILE; ++n)
        for (int j = 0; j < 4; ++j) acc[m][n] += (int32_t)wg[4 * n + j] * (int32_t)a[j];
    }
  }
}

#endif

// What block `b` of `blocks` over a chunk of `bytes` at `w` prefetches. A single block prefetches its own weights; each
// of several a share of the next chunk, or memory would be idle while all but the first compute.
inline Fetch fetch_share(const void* w, int bytes, int b, int blocks) {
  if (blocks == 1) return {(const char*)w + AHEAD, 128};
  return {(const char*)w + bytes + (int64_t)bytes * b / blocks, (128 + blocks - 1) / blocks};
}

}  // namespace sd

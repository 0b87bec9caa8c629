// Integer products of a chunk, exact in 32 bits: acc[m][n] = sum_k w[n][k] * q[m][k].
//
// Each processor's version defines int8_block for up to MAX_MR rows (a tree's rows share the stream of weights that one
// row needs anyway), and AHEAD, how many bytes before their use a single block prefetches its weights.
#pragma once
#include <cstring>

#include "linear.h"

namespace sd {

// Prefetches from `from` on, `step` bytes for each 128 of the block's own.
struct Fetch {
  const char* from;
  int step;
};

}  // namespace sd

#if defined(__AVX512VNNI__)
#include "int_blocks_vnni.h"
#elif defined(__AVX2__)
#include "int_blocks_avx2.h"
#endif

namespace sd {

#if !defined(__AVX2__)  // plain C++

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

// int_blocks.h in plain C++, for processors without AVX2.
#pragma once
#include <cstring>

#include "weight_tile.h"

namespace sd {

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

// As int8_block for weights of four bits: a byte holds a channel of each of two groups of four.
template <int MR>
inline void int4_block(const uint8_t* w, const int8_t* q, int64_t ld, int pairs, Fetch fetch, int32_t (*acc)[TILE]) {
  for (int m = 0; m < MR; ++m) {
    memset(acc[m], 0, sizeof(acc[m]));
    for (int g = 0; g < pairs; ++g) {
      const uint8_t* wg = w + 4 * TILE * (int64_t)g;
      const int8_t* a = q + m * ld + 8 * g;
      for (int n = 0; n < TILE; ++n)
        for (int j = 0; j < 4; ++j)
          acc[m][n] += (int32_t)(wg[4 * n + j] & 15) * a[j] + (int32_t)(wg[4 * n + j] >> 4) * a[4 + j];
    }
  }
}

}  // namespace sd

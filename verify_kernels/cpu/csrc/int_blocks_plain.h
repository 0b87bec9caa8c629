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

}  // namespace sd

// Rounds a draft model's weights to blocks when it is first loaded. round_blocks in verify_kernels/packed_weights.py is
// the plain twin; verify_kernels/quant_formats.py documents the block formats.
#include <cmath>
#include <cstdint>
#include <cstring>

#include "half.h"
#include "linear.h"
#include "vec.h"

namespace sd {
namespace {

constexpr int GROUP = 32;  // weights of a block

inline v16 rounded(v16 x) { return (x + splat(12582912.0f)) - splat(12582912.0f); }  // half to even
inline v16 within(v16 x, float low, float high) { return -max16(-max16(x, splat(low)), splat(-high)); }

// Rounds 32 weights to a block of Q4_0 or Q3_0. The largest of them is about -8 or -4 times the scale. Of a few scales,
// each fitted to the levels that it leads to, the one with the least squared error is taken.
void round_block(int kind, const float* w, const float* fits, int tried, uint8_t* block) {
  const int most = kind == SD_Q3_0 ? 4 : 8;
  const v16 a = load16(w), b = load16(w + 16);
  const float peak = hmax16(max16(abs16(a), abs16(b)));
  float extreme = 1.0f, best = INFINITY;
  for (int i = GROUP - 1; i >= 0; --i) extreme = peak > 0 && std::fabs(w[i]) == peak ? w[i] : extreme;
  v16 low = splat(0), high = splat(0);
  uint16_t scale = 0;
  for (int i = 0; i < tried; ++i) {
    const v16 inverse = splat(-fits[i] / extreme);
    const v16 p = within(rounded(a * inverse), -most, most - 1), q = within(rounded(b * inverse), -most, most - 1);
    const float square = sum16(p * p + q * q);
    const uint16_t half = float_to_half(sum16(a * p + b * q) / (square > 1 ? square : 1.0f));
    const v16 fitted = splat(half_to_float(half)), e = a - p * fitted, f = b - q * fitted;
    const float error = sum16(e * e + f * f);
    if (error < best) best = error, scale = half, low = p, high = q;
  }
  memcpy(block, &scale, 2);
  float levels[GROUP];
  store16(levels, low), store16(levels + 16, high);
  if (kind == SD_Q4_0) {
    for (int i = 0; i < 16; ++i) block[2 + i] = (int)(levels[i] + 8) | (int)(levels[16 + i] + 8) << 4;
    return;
  }
  for (int i = 0; i < GROUP; i += 8) {
    uint32_t eight = 0;
    for (int j = 0; j < 8; ++j) eight |= (uint32_t)(levels[i + j] + 4) << 3 * j;
    for (int j = 0; j < 3; ++j) block[2 + i / 8 * 3 + j] = eight >> 8 * j;
  }
}

}  // namespace
}  // namespace sd

// Rounds `count` runs of 32 weights to blocks of `kind`, Q4_0 or Q3_0, of `bytes` each. fits: `tried` values of the largest
// weight over the scale.
extern "C" void sd_round_blocks(
    int32_t kind, int32_t bytes, const float* weight, int64_t count, const float* fits, int32_t tried, uint8_t* raw) {
  for (int64_t i = 0; i < count; ++i) sd::round_block(kind, weight + 32 * i, fits, tried, raw + bytes * i);
}

// Repacks weights in blocks from a model's file to the layout of quant_formats.h, when a model is first loaded.
// verify_kernels/quant_formats.py is the plain twin and documents the block formats.
#include <cmath>
#include <cstdint>
#include <cstring>

#include "half.h"
#include "linear.h"
#include "vec.h"

namespace sd {
namespace {

constexpr int HALF = 16;              // channels of a unit
constexpr int GROUP = 32;             // inputs of a group
constexpr int MAX_BLOCK_BYTES = 256;  // of a block in a file, rounded up

// One channel's place in a unit, part after part.
struct Lane {
  uint8_t* at;
  int channel;

  template <int SIZE>
  void each(const void* values, int count) {
    const uint8_t* from = (const uint8_t*)values;
    for (int i = 0; i < count; ++i) memcpy(at + SIZE * (HALF * i + channel), from + SIZE * i, SIZE);
    at += SIZE * HALF * count;
  }
};

// The eight scales and low ends of six bits each that 12 bytes hold.
void k_scales(const uint8_t* from, uint8_t* scale, uint8_t* low) {
  for (int i = 0; i < 4; ++i) {
    scale[i] = from[i] & 63, scale[4 + i] = (from[8 + i] & 15) | from[i] >> 6 << 4;
    low[i] = from[4 + i] & 63, low[4 + i] = from[8 + i] >> 4 | from[4 + i] >> 6 << 4;
  }
}

void pack_k(int kind, const uint8_t* block, Lane to) {
  if (kind == SD_Q6_K) {
    uint16_t half;
    memcpy(&half, block + 208, 2);
    const float largest = half_to_float(half);
    to.each<4>(block, 48), to.each<1>(block + 192, 16), to.each<4>(&largest, 1);
    return;
  }
  uint8_t scale[8], low[8];
  k_scales(block + 4, scale, low);
  if (kind == SD_Q5_K) to.each<4>(block + 48, 32), to.each<4>(block + 16, 8);
  else to.each<4>(block + 16, 32);
  to.each<1>(scale, 8), to.each<1>(low, 8), to.each<2>(block, 2);
}

// Two blocks of 32.
void pack_simple(int kind, const uint8_t* const* blocks, Lane to) {
  const bool low_end = kind == SD_Q4_1 || kind == SD_Q5_1, fifth = kind == SD_Q5_0 || kind == SD_Q5_1;
  const int head = 2 + 2 * low_end + 4 * fifth;
  uint8_t levels[2 * GROUP], planes[2][4] = {};
  uint16_t scale[2], low[2];
  for (int b = 0; b < 2; ++b) {
    const uint8_t *block = blocks[b], *stored = block + head;
    memcpy(&scale[b], block, 2);
    if (low_end) memcpy(&low[b], block + 2, 2), low[b] ^= 0x8000;  // the file stores the negated value, which is added
    if (kind == SD_Q8_0) {
      for (int i = 0; i < GROUP; ++i) levels[GROUP * b + i] = stored[i] ^ 0x80;
      continue;
    }
    for (int i = 0; i < GROUP / 2; ++i) {  // of 16 bytes the high halves follow the low ones
      const uint8_t first = stored[i] & 15, second = stored[i] >> 4;
      levels[i] = b ? levels[i] | first << 4 : first;
      levels[GROUP / 2 + i] = b ? levels[GROUP / 2 + i] | second << 4 : second;
    }
    if (fifth)  // bit j of byte i is of input 4 j + i
      for (int i = 0; i < 4; ++i)
        for (int j = 0; j < 8; ++j) planes[b][i] |= (block[head - 4 + j / 2] >> (4 * (j % 2) + i) & 1) << j;
  }
  to.each<4>(levels, kind == SD_Q8_0 ? 16 : 8);
  if (fifth) to.each<4>(planes, 2);
  to.each<2>(scale, 2);
  if (low_end) to.each<2>(low, 2);
}

// 128 inputs in `count` blocks.
void pack_u4(const uint8_t* const* blocks, int count, Lane to) {
  uint8_t levels[128], pairs[64], zero[4];
  uint16_t scale[4];
  for (int b = 0; b < count; ++b) {
    memcpy(&scale[b], blocks[b], 2);
    zero[b] = blocks[b][2];
    uint8_t* own = levels + 128 / count * b;
    for (int i = 0; i < 64 / count; ++i) own[2 * i] = blocks[b][3 + i] & 15, own[2 * i + 1] = blocks[b][3 + i] >> 4;
  }
  for (int i = 0; i < 64; ++i) pairs[i] = levels[i + i / 32 * 32] | levels[i + i / 32 * 32 + 32] << 4;
  to.each<4>(pairs, 16), to.each<2>(scale, count), to.each<1>(zero, count);
}

// Four blocks of 32; see quant_formats.h for where levels lie.
void pack_q3(const uint8_t* const* blocks, Lane to) {
  uint8_t levels[4][GROUP], bytes[48];
  uint16_t scale[4];
  for (int b = 0; b < 4; ++b) {
    memcpy(&scale[b], blocks[b], 2);
    for (int i = 0; i < GROUP; ++i) {
      const uint8_t* eight = blocks[b] + 2 + i / 8 * 3;  // levels in three bytes
      levels[b][i] = (eight[0] | eight[1] << 8 | eight[2] << 16) >> 3 * (i % 8) & 7;
    }
  }
  for (int i = 0; i < GROUP; ++i) bytes[i] = levels[0][i] | levels[1][i] << 3 | levels[3][i] >> 1 << 6;
  for (int i = 0; i < 16; ++i) {
    const uint8_t* last = levels[3] + i + i / 4 * 4;
    bytes[GROUP + i] = levels[2][i] | levels[2][16 + i] << 3 | (last[0] & 1) << 6 | (last[4] & 1) << 7;
  }
  to.each<4>(bytes, 12), to.each<2>(scale, 4);
}

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

extern "C" {

// Repacks rows of `blocks` whole blocks each to [tiles, units, 2, unit_bytes]. Padding dequantises to zeros. A block has
// `block` inputs of a row in the file, a unit `unit` inputs of 16 rows.
void sd_pack_blocks(int32_t kind, int32_t block, int32_t block_bytes, int32_t unit, int32_t unit_bytes,
                    const uint8_t* raw, int64_t rows, int64_t blocks, uint8_t* out) {
  using namespace sd;
  const int each = unit / block;
  const int64_t units = (blocks + each - 1) / each, tiles = (rows + 31) / 32;
  static const uint8_t none[MAX_BLOCK_BYTES] = {};
  memset(out, 0, tiles * units * 2 * unit_bytes);
  for (int64_t row = 0; row < tiles * 32; ++row) {
    for (int64_t u = 0; u < units; ++u) {
      const uint8_t* own[4];
      for (int i = 0; i < each; ++i) {
        const int64_t b = u * each + i;
        own[i] = row < rows && b < blocks ? raw + (row * blocks + b) * block_bytes : none;
      }
      const Lane to{out + ((row / 32 * units + u) * 2 + row / 16 % 2) * unit_bytes, (int)(row % 16)};
      if (kind == SD_Q3_0) pack_q3(own, to);
      else if (kind >= SD_U4_32) pack_u4(own, each, to);
      else if (block == 256) pack_k(kind, own[0], to);
      else pack_simple(kind, own, to);
    }
  }
}

// Rounds `count` runs of 32 weights to blocks of `kind`, Q4_0 or Q3_0, of `bytes` each. fits: `tried` values of the largest
// weight over the scale.
void sd_round_blocks(int32_t kind, int32_t bytes, const float* weight, int64_t count, const float* fits, int32_t tried,
                     uint8_t* raw) {
  for (int64_t i = 0; i < count; ++i) sd::round_block(kind, weight + 32 * i, fits, tried, raw + bytes * i);
}
}

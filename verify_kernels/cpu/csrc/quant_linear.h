// Products of int8 rows with weights in blocks.
#pragma once
#include "linear.h"

namespace sd {

inline bool is_block_format(int kind) { return kind >= SD_Q4_0; }

// sums[m * 32 + n] of `rows` rows from `row` on, of `all` in the call, and one tile of 32 channels, over all inputs.
void quant_tile(const sd_linear_args& a, int tile, int row, int rows, int all, float* sums);

// The same for at most DIRECT_ROWS rows (quant_simd.h), into sums that are 0.
void direct_tile(const sd_linear_args& a, int tile, int row, int rows, int all, float* sums);

// x [k], row `row` of `all` in the call, in the weights' order to int8 with one scale per group of 32, where quant_tile
// reads it.
void quant_row(const sd_linear_args& a, const float* x, int row, int all);

}  // namespace sd

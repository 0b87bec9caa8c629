// Products of int8 rows with int8 weights on processors with AMX, whose registers are tiles of 16 x 64 bytes.
#pragma once
#include "linear.h"

namespace sd {

constexpr int LEAST_TILED_ROWS = 8;  // fewer are faster without

// Whether this processor has AMX, and the system lets this process use it.
bool can_tile();

// sums[m * 32 + n] += of `rows` rows from `row` on and one tile of 32 channels, chunk by chunk as everywhere. Integer sums
// are exact, so the bits are those of any other int8 product. At least LEAST_TILED_ROWS rows.
void int8_tiles(const sd_linear_args& a, int tile, int row, int rows, float* sums);

}  // namespace sd

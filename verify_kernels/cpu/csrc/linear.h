// A linear layer with its prologue (norm, gate) and epilogue (bias, residual, norm) in one call.
#pragma once
#include <cstdint>
#include <type_traits>

extern "C" {

enum {
  SD_INT8 = 0, SD_BF16 = 1, SD_FP32 = 2,
  SD_Q4_0 = 3, SD_Q4_1 = 4, SD_Q5_0 = 5, SD_Q5_1 = 6, SD_Q8_0 = 7, SD_Q4_K = 8, SD_Q5_K = 9, SD_Q6_K = 10,
  SD_U4_32 = 11, SD_U4_64 = 12, SD_U4_128 = 13, SD_Q3_0 = 14
};
enum { SD_PRE_NONE = 0, SD_PRE_RMS = 1, SD_PRE_SILU = 2, SD_PRE_GELU = 3 };
enum { SD_POST_STORE = 0, SD_POST_ADD = 1, SD_POST_NORM_ADD = 2 };

// Mirrors LinearArgs in verify_kernels/cpu/native_backend.py, field by field.
struct sd_linear_args {
  int32_t kind, pre, post, threads;
  int32_t n, k, k_pad, tiles;
  int64_t ld_src, ld_dst;  // row strides in floats
  const void* weight;
  const float* weight_scale;
  const float* bias;
  const int32_t* order;  // [k] block formats: the input that stands at each place of the weights; null: as they come
  const float* src;
  float* dst;
  const float* pre_norm;
  const float* post_norm;
  float eps;
  float* x;         // [rows, k_pad] input of the product (float kinds), or the normed row before quantisation to int8
  int8_t* q;        // [rows, k_pad] quantised rows; block formats: [chunks, rows, bytes of a Record of quant_rows.h]
  float* q_scale;   // [rows, chunks]
  int32_t* q_sum;   // [rows, chunks] 128 * sum of the chunk's int8 values
  float* result;    // [rows, tiles * 32] for SD_POST_NORM_ADD, else unused
};

void sd_linear(const sd_linear_args* args, int32_t rows);
}

namespace sd {

// Rows [start[g], start[g + 1]) times matrix g of `groups` that lie one after the other, with n outputs and `bytes` of
// weights each. Row r is read at row from[r] of src; null: at row r. Not for SD_POST_NORM_ADD, nor with a bias.
void grouped_linear(const sd_linear_args& a, int64_t bytes, int groups, const int32_t* start, const int32_t* from);

// call(std::integral_constant<int, count>{}), for a `count` from 1 to MOST: the compiler then knows it.
template <int MOST, int COUNT = 1, class Call>
inline void with_count(int count, Call call) {
  if constexpr (COUNT <= MOST) {
    if (count == COUNT) call(std::integral_constant<int, COUNT>{});
    else with_count<MOST, COUNT + 1>(count, call);
  }
}

constexpr int TILE = 32;  // output channels per tile; 128 bytes hold a group of four values of each

// Products of int8 rows with int8 weights on processors with AMX, whose registers are tiles of 16 x 64 bytes.

constexpr int LEAST_TILED_ROWS = 8;  // fewer are faster without

// Whether this processor has AMX, and the system lets this process use it.
bool can_tile();

// sums[m * 32 + n] += of `rows` rows from `row` on and one tile of 32 channels, chunk by chunk as everywhere. Integer sums
// are exact, so the bits are those of any other int8 product. At least LEAST_TILED_ROWS rows.
void int8_tiles(const sd_linear_args& a, int tile, int row, int rows, float* sums);

// Products of int8 rows with weights in blocks.

inline bool is_block_format(int kind) { return kind >= SD_Q4_0; }

// sums[m * 32 + n] += of `rows` rows from `row` on, of `all` in the call, and one tile of 32 channels, over all inputs.
void quant_tile(const sd_linear_args& a, int tile, int row, int rows, int all, float* sums);

// The same for at most DIRECT_ROWS rows (quant_simd.h).
void direct_tile(const sd_linear_args& a, int tile, int row, int rows, int all, float* sums);

// x [k], row `row` of `all` in the call, in the weights' order to int8 with one scale per group of 32, where quant_tile
// reads it.
void quant_row(const sd_linear_args& a, const float* x, int row, int all);

}  // namespace sd

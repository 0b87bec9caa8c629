// y = prologue(x) W^T + b, then stored, added to the residual stream, or normed and added.
//
// Every output element is computed by the same sequence of operations for any number of rows: rows are blocked only to
// reuse a loaded weight, never to reorder a sum.
#include "linear.h"

#include <algorithm>
#include <vector>

#include "int_blocks.h"
#include "parallel.h"
#include "prologue.h"

namespace sd {
namespace {

constexpr int ROW_BLOCK = 192;  // rows whose partial sums (32 floats each) stay in cache beside the weights

// sums[m] += (acc - offset) * scale for one chunk.
template <int MR>
void int8_chunk(const sd_linear_args& a, int tile, int chunk, int row, int b, int blocks, float* sums) {
  const int begin = chunk * CHUNK, chunks = (a.k_pad + CHUNK - 1) / CHUNK;
  const int width = a.k_pad - begin < CHUNK ? a.k_pad - begin : CHUNK;
  const uint8_t* w = (const uint8_t*)a.weight + ((int64_t)tile * a.k_pad + begin) * TILE;
  alignas(64) int32_t acc[MR][TILE];
  const Fetch fetch = fetch_share(w, width * TILE, b, blocks);
  int8_block<MR>(w, a.q + (int64_t)row * a.k_pad + begin, a.k_pad, width / 4, fetch, acc);
  for (int m = 0; m < MR; ++m) {
    const float scale = a.q_scale[(row + m) * chunks + chunk];
    const int32_t offset = a.q_sum[(row + m) * chunks + chunk];
    for (int n = 0; n < TILE; ++n) sums[m * TILE + n] += (float)(acc[m][n] - offset) * scale;
  }
}

// Not inlined: in one function with eight-bit blocks, GCC runs out of registers for both, and 8 rows take 1.1 times as
// long. Eight-bit blocks in functions of their own are slower too.
template <int MR, class W>
__attribute__((noinline)) void float_chunk(const sd_linear_args& a, int tile, int chunk, int row, float* sums) {
  constexpr int STEP = columns_for(MR) < 2 ? 1 : 2;  // v16 at once of the tile's two
  const int begin = chunk * CHUNK, width = a.k - begin < CHUNK ? a.k - begin : CHUNK;
  const float* x = a.x + (int64_t)row * a.k_pad + begin;
  for (int column = 0; column < TILE; column += 16 * STEP) {
    const W* w = (const W*)a.weight + ((int64_t)tile * a.k + begin) * TILE + column;
    v16 sum[MR][STEP];
    for (int m = 0; m < MR; ++m)
      for (int j = 0; j < STEP; ++j) sum[m][j] = load16(sums + m * TILE + column + 16 * j);
    for (int i = 0; i < width; ++i, w += TILE) {
      v16 own[STEP];
      for (int j = 0; j < STEP; ++j) own[j] = load16(w + 16 * j);
      for (int m = 0; m < MR; ++m) {
        const v16 v = splat(x[m * (int64_t)a.k_pad + i]);
        for (int j = 0; j < STEP; ++j) sum[m][j] = fma16(v, own[j], sum[m][j]);
      }
    }
    for (int m = 0; m < MR; ++m)
      for (int j = 0; j < STEP; ++j) store16(sums + m * TILE + column + 16 * j, sum[m][j]);
  }
}

template <int MR>
void chunk_rows(const sd_linear_args& a, int tile, int chunk, int row, int b, int blocks, float* sums) {
  if (a.kind == SD_INT8) int8_chunk<MR>(a, tile, chunk, row, b, blocks, sums);
  else if (a.kind == SD_BF16) float_chunk<MR, uint16_t>(a, tile, chunk, row, sums);
  else float_chunk<MR, float>(a, tile, chunk, row, sums);
}

void finish_tile(const sd_linear_args& a, int tile, int row, int rows, const float* sums) {
  const int first = tile * TILE, width = a.n - first < TILE ? a.n - first : TILE;
  const float* scale = a.weight_scale ? a.weight_scale + first : nullptr;
  const float* bias = a.bias ? a.bias + first : nullptr;
  const bool staged = a.post == SD_POST_NORM_ADD;
  float* out = staged ? a.result : a.dst;
  const int64_t ld = staged ? (int64_t)a.tiles * TILE : a.ld_dst;
  for (int m = 0; m < rows; ++m) {
    float y[TILE];
    memcpy(y, sums + m * TILE, sizeof(y));
    if (scale) for (int n = 0; n < TILE; ++n) y[n] *= scale[n];
    if (bias) for (int n = 0; n < TILE; ++n) y[n] += bias[n];
    float* dst = out + (row + m) * ld + first;
    if (a.post == SD_POST_ADD) for (int n = 0; n < width; ++n) dst[n] += y[n];
    else memcpy(dst, y, width * 4);
  }
}

void chunked_tile(const sd_linear_args& a, int tile, int row, int rows, float* sums) {
  const int chunks = (a.k_pad + CHUNK - 1) / CHUNK;
  const int blocks = (rows + MAX_MR - 1) / MAX_MR;
  for (int c = 0; c < chunks; ++c) {
    for (int b = 0; b < blocks; ++b) {  // blocks of nearly equal height: 16 rows are 8 + 8, not 12 + 4
      const int begin = (int64_t)rows * b / blocks, end = (int64_t)rows * (b + 1) / blocks;
      with_count<MAX_MR>(end - begin, [&]<int MR>(std::integral_constant<int, MR>) {
        chunk_rows<MR>(a, tile, c, row + begin, b, blocks, sums + begin * TILE);
      });
    }
  }
}

void compute_unit(const sd_linear_args& a, int tile, int row, int rows, int all, float* sums) {
  memset(sums, 0, (size_t)rows * TILE * 4);
  if (is_block_format(a.kind)) quant_tile(a, tile, row, rows, all, sums);
  else if (a.kind == SD_INT8 && rows >= LEAST_TILED_ROWS && can_tile()) int8_tiles(a, tile, row, rows, sums);
  else chunked_tile(a, tile, row, rows, sums);
  finish_tile(a, tile, row, rows, sums);
}

void post_norm_row(const sd_linear_args& a, int row) {
  add_normed(a.result + (int64_t)row * a.tiles * TILE, a.post_norm, a.n, a.eps, a.dst + row * a.ld_dst);
}

struct RowBlock {
  int group, row, height;
};

}  // namespace

void grouped_linear(const sd_linear_args& a, int64_t bytes, int groups, const int32_t* start, const int32_t* from) {
  const int rows = start[groups];
  for_units(a.threads, rows, [&](int row) { prepare_row(a, from ? from[row] : row, row, rows); });
  std::vector<RowBlock> blocks;
  for (int g = 0; g < groups; ++g)
    for (int row = start[g]; row < start[g + 1]; row += ROW_BLOCK)
      blocks.push_back({g, row, std::min(start[g + 1] - row, ROW_BLOCK)});
  // A unit is a run of tiles: long enough to stream, short enough that the threads finish together.
  const int count = blocks.size(), grain = a.tiles * count > 64 * a.threads ? 8 : 2;
  const int runs = (a.tiles + grain - 1) / grain;
  for_units(a.threads, runs * count, [&](int unit) {
    alignas(64) float sums[ROW_BLOCK * TILE];
    const RowBlock& block = blocks[unit / runs];
    sd_linear_args own = a;
    own.weight = (const char*)a.weight + block.group * bytes;
    if (a.weight_scale) own.weight_scale = a.weight_scale + (int64_t)block.group * a.n;
    const int first = unit % runs * grain, end = std::min(first + grain, a.tiles);
    for (int tile = first; tile < end; ++tile) compute_unit(own, tile, block.row, block.height, rows, sums);
  });
}

}  // namespace sd

extern "C" void sd_linear(const sd_linear_args* args, int32_t rows) {
  const int32_t start[] = {0, rows};
  sd::grouped_linear(*args, 0, 1, start, nullptr);
  if (args->post == SD_POST_NORM_ADD)
    sd::for_units(args->threads, rows, [&](int row) { sd::post_norm_row(*args, row); });
}

// y = prologue(x) W^T + b, then stored, added to the residual stream, or normed and added.
//
// Every output element is computed by the same sequence of operations whatever the number of rows: rows are
// blocked only to reuse a loaded weight, never to reorder a sum.
#include "linear.h"

#include "parallel.h"
#include "prologue.h"

namespace sd {
namespace {

constexpr int TILE = 32;        // output channels per tile, as packed
constexpr int ROW_BLOCK = 192;  // rows whose partial sums (32 floats each) stay in cache beside the weights
constexpr int AHEAD = 4096;     // bytes; farther, and several rows' values are pushed out of the first cache
constexpr int MAX_MR = 12;      // rows per register block: 12 x 2 accumulators, 2 weights, 1 activation

// What a register block asks memory for while it computes: from `from` on, `step` bytes for each 128 of its own.
struct Fetch {
  const char* from;
  int step;
};

// Block `b` of `blocks` over a chunk of `bytes` at `w`. One block asks for what it will need itself soon; several ask
// for a share each of the next chunk, or memory would rest while all but the first compute.
inline Fetch fetch_share(const void* w, int bytes, int b, int blocks) {
  if (blocks == 1) return {(const char*)w + AHEAD, 128};
  return {(const char*)w + bytes + (int64_t)bytes * b / blocks, (128 + blocks - 1) / blocks};
}

// One register block. Up to MAX_MR rows pass over the weights once: a tree's rows ride on the stream of weights that
// one row needs anyway.
template <int MR>
inline void int8_block(const uint8_t* w, const int8_t* q, int64_t ld, int groups, Fetch fetch, int32_t (*acc)[TILE]) {
#if defined(__AVX512VNNI__)
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
#else
  for (int m = 0; m < MR; ++m) {
    memset(acc[m], 0, sizeof(acc[m]));
    for (int g = 0; g < groups; ++g) {
      const uint8_t* wg = w + 4 * TILE * (int64_t)g;
      const int8_t* a = q + m * ld + 4 * g;
      for (int n = 0; n < TILE; ++n)
        for (int j = 0; j < 4; ++j) acc[m][n] += (int32_t)wg[4 * n + j] * (int32_t)a[j];
    }
  }
#endif
}

// As int8_block for weights of four bits: a byte holds a channel of each of two groups of four.
template <int MR>
inline void int4_block(const uint8_t* w, const int8_t* q, int64_t ld, int pairs, Fetch fetch, int32_t (*acc)[TILE]) {
#if defined(__AVX512VNNI__)
  __m512i sum[MR][2];
#pragma GCC unroll 12
  for (int m = 0; m < MR; ++m) sum[m][0] = sum[m][1] = _mm512_setzero_si512();
  const __m512i low = _mm512_set1_epi8(15);
  for (int g = 0; g < pairs; ++g) {
    const __m512i b0 = _mm512_loadu_si512(w), b1 = _mm512_loadu_si512(w + 64);
    _mm_prefetch(fetch.from, _MM_HINT_T0);
    _mm_prefetch(fetch.from + fetch.step / 2, _MM_HINT_T0);
    fetch.from += fetch.step;
    w += 4 * TILE;
    const __m512i l0 = _mm512_and_si512(b0, low), l1 = _mm512_and_si512(b1, low);
    const __m512i h0 = _mm512_and_si512(_mm512_srli_epi16(b0, 4), low);
    const __m512i h1 = _mm512_and_si512(_mm512_srli_epi16(b1, 4), low);
#pragma GCC unroll 12
    for (int m = 0; m < MR; ++m) {
      int32_t first, second;
      memcpy(&first, q + m * ld + 8 * g, 4);
      memcpy(&second, q + m * ld + 8 * g + 4, 4);
      const __m512i a = _mm512_set1_epi32(first), b = _mm512_set1_epi32(second);
      sum[m][0] = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(sum[m][0], l0, a), h0, b);
      sum[m][1] = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(sum[m][1], l1, a), h1, b);
    }
  }
#pragma GCC unroll 12
  for (int m = 0; m < MR; ++m) {
    _mm512_storeu_si512(&acc[m][0], sum[m][0]);
    _mm512_storeu_si512(&acc[m][16], sum[m][1]);
  }
#else
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
#endif
}

// sums[m] += (acc - offset) * scale for one chunk; q_sum counts 128 per value, weights of four bits are off by 8.
template <int MR>
void int4_chunk(const sd_linear_args& a, int tile, int chunk, int row, int b, int blocks, float* sums) {
  const int begin = chunk * CHUNK, chunks = (a.k_pad + CHUNK - 1) / CHUNK;
  const int width = a.k_pad - begin < CHUNK ? a.k_pad - begin : CHUNK;
  const uint8_t* w = (const uint8_t*)a.weight + ((int64_t)tile * a.k_pad + begin) * TILE / 2;
  const float* weight_scale = a.weight_scale + ((int64_t)tile * chunks + chunk) * TILE;
  alignas(64) int32_t acc[MR][TILE];
  const Fetch fetch = fetch_share(w, width * TILE / 2, b, blocks);
  int4_block<MR>(w, a.q + (int64_t)row * a.k_pad + begin, a.k_pad, width / 8, fetch, acc);
  for (int m = 0; m < MR; ++m) {
    const float scale = a.q_scale[(row + m) * chunks + chunk];
    const int32_t offset = a.q_sum[(row + m) * chunks + chunk] / 16;
    for (int n = 0; n < TILE; ++n) sums[m * TILE + n] += (float)(acc[m][n] - offset) * (scale * weight_scale[n]);
  }
}

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

inline v16 weight16(const float* w) { return load16(w); }
inline v16 weight16(const uint16_t* w) {
#if defined(__AVX512F__)
  return (v16)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)w)), 16);
#else
  i16v wide;
  for (int i = 0; i < 16; ++i) wide[i] = (int32_t)((uint32_t)w[i] << 16);
  return (v16)wide;
#endif
}

template <int MR, class W>
void float_chunk(const sd_linear_args& a, int tile, int chunk, int row, float* sums) {
  const int begin = chunk * CHUNK, width = a.k - begin < CHUNK ? a.k - begin : CHUNK;
  const W* w = (const W*)a.weight + ((int64_t)tile * a.k + begin) * TILE;
  const float* x = a.x + (int64_t)row * a.k_pad + begin;
  v16 sum[MR][2];
  for (int m = 0; m < MR; ++m)
    for (int j = 0; j < 2; ++j) sum[m][j] = load16(sums + m * TILE + 16 * j);
  for (int i = 0; i < width; ++i, w += TILE) {
    const v16 w0 = weight16(w), w1 = weight16(w + 16);
    for (int m = 0; m < MR; ++m) {
      const v16 v = splat(x[m * (int64_t)a.k_pad + i]);
      sum[m][0] = fma16(v, w0, sum[m][0]);
      sum[m][1] = fma16(v, w1, sum[m][1]);
    }
  }
  for (int m = 0; m < MR; ++m)
    for (int j = 0; j < 2; ++j) store16(sums + m * TILE + 16 * j, sum[m][j]);
}

template <int MR>
void chunk_rows(const sd_linear_args& a, int tile, int chunk, int row, int b, int blocks, float* sums) {
  if (a.kind == SD_INT8) int8_chunk<MR>(a, tile, chunk, row, b, blocks, sums);
  else if (a.kind == SD_INT4) int4_chunk<MR>(a, tile, chunk, row, b, blocks, sums);
  else if (a.kind == SD_BF16) float_chunk<MR, uint16_t>(a, tile, chunk, row, sums);
  else float_chunk<MR, float>(a, tile, chunk, row, sums);
}

void chunk_dispatch(const sd_linear_args& a, int tile, int chunk, int row, int mr, int b, int blocks, float* sums) {
  switch (mr) {
    case 1: chunk_rows<1>(a, tile, chunk, row, b, blocks, sums); break;
    case 2: chunk_rows<2>(a, tile, chunk, row, b, blocks, sums); break;
    case 3: chunk_rows<3>(a, tile, chunk, row, b, blocks, sums); break;
    case 4: chunk_rows<4>(a, tile, chunk, row, b, blocks, sums); break;
    case 5: chunk_rows<5>(a, tile, chunk, row, b, blocks, sums); break;
    case 6: chunk_rows<6>(a, tile, chunk, row, b, blocks, sums); break;
    case 7: chunk_rows<7>(a, tile, chunk, row, b, blocks, sums); break;
    case 8: chunk_rows<8>(a, tile, chunk, row, b, blocks, sums); break;
    case 9: chunk_rows<9>(a, tile, chunk, row, b, blocks, sums); break;
    case 10: chunk_rows<10>(a, tile, chunk, row, b, blocks, sums); break;
    case 11: chunk_rows<11>(a, tile, chunk, row, b, blocks, sums); break;
    default: chunk_rows<12>(a, tile, chunk, row, b, blocks, sums);
  }
}

void finish_tile(const sd_linear_args& a, int tile, int row, int rows, const float* sums) {
  const int first = tile * TILE, width = a.n - first < TILE ? a.n - first : TILE;
  const float* scale = a.weight_scale && a.kind != SD_INT4 ? a.weight_scale + first : nullptr;
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

void compute_unit(const sd_linear_args& a, int tile, int row, int rows, float* sums) {
  memset(sums, 0, (size_t)rows * TILE * 4);
  const int chunks = (a.k_pad + CHUNK - 1) / CHUNK;
  const int blocks = (rows + MAX_MR - 1) / MAX_MR;
  for (int c = 0; c < chunks; ++c) {
    for (int b = 0; b < blocks; ++b) {  // blocks of nearly equal height: 16 rows are 8 + 8, not 12 + 4
      const int begin = (int64_t)rows * b / blocks, end = (int64_t)rows * (b + 1) / blocks;
      chunk_dispatch(a, tile, c, row + begin, end - begin, b, blocks, sums + begin * TILE);
    }
  }
  finish_tile(a, tile, row, rows, sums);
}

void post_norm_row(const sd_linear_args& a, int row) {
  float* y = a.result + (int64_t)row * a.tiles * TILE;
  float* dst = a.dst + row * a.ld_dst;
  const float s = rms_scale(y, a.n, a.eps);
  for (int i = 0; i < a.n; ++i) dst[i] += y[i] * s * a.post_norm[i];
}

}  // namespace
}  // namespace sd

extern "C" void sd_linear(const sd_linear_args* args, int32_t rows) {
  using namespace sd;
  const sd_linear_args& a = *args;
  const int row_blocks = (rows + ROW_BLOCK - 1) / ROW_BLOCK;
  // A unit is a run of tiles: long enough to stream, short enough that the threads finish together.
  const int grain = a.tiles * row_blocks > 64 * a.threads ? 8 : 2;
  const int runs = (a.tiles + grain - 1) / grain;
  for_units(a.threads, rows, [&](int row) { prepare_row(a, row); });
  for_units(a.threads, runs * row_blocks, [&](int unit) {
    alignas(64) float sums[ROW_BLOCK * TILE];
    const int row = unit / runs * ROW_BLOCK, first = unit % runs * grain;
    const int height = rows - row < ROW_BLOCK ? rows - row : ROW_BLOCK;
    for (int tile = first; tile < first + grain && tile < a.tiles; ++tile) compute_unit(a, tile, row, height, sums);
  });
  if (a.post == SD_POST_NORM_ADD) for_units(a.threads, rows, [&](int row) { post_norm_row(a, row); });
}

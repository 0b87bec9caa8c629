#include "linear.h"

#if defined(__AMX_INT8__) && defined(__AVX512F__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstring>

#include "prologue.h"

namespace sd {
namespace {

constexpr int STRIP = 16;    // rows of a tile
constexpr int DEPTH = 64;    // inputs of a tile
constexpr int AHEAD = 8192;  // bytes before their use that weights are prefetched, if all rows are one turn

struct alignas(64) Shapes {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {};  // of a row of each tile
  uint8_t rows[16] = {};
};

// Tiles 0 to 3 are sums, [strip][half of the channels]; 4 and 5 activations of two strips; 6 and 7 weights.
void shape_tiles(int rows) {
  Shapes shapes;
  for (int t = 0; t < 8; ++t) shapes.bytes[t] = 64, shapes.rows[t] = t < 6 ? rows : DEPTH / 4;
  // Not _tile_loadconfig: GCC 12 assumes that it reads eight bytes, and does not store the others.
  asm volatile("ldtilecfg %0" : : "m"(shapes));
}

// The sums of one strip at `q`, or of two, over `depth` inputs, a multiple of DEPTH. Prefetches `lines` cache lines from
// `ahead` on with each DEPTH inputs.
template <int STRIPS>
void multiply_strips(const uint8_t* w, const int8_t* const (&q)[2], int64_t ld, int depth, const char* ahead, int lines,
                     int32_t (&acc)[2][STRIP][TILE]) {
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (STRIPS == 2) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int i = 0; i < depth; i += DEPTH, w += DEPTH * TILE) {
    for (int line = 0; line < lines; ++line, ahead += 64) _mm_prefetch(ahead, _MM_HINT_T1);
    _tile_loadd(6, w, 4 * TILE);
    _tile_loadd(4, q[0] + i, ld);
    _tile_dpbsud(0, 4, 6);
    _tile_loadd(7, w + 64, 4 * TILE);
    _tile_dpbsud(1, 4, 7);
    if constexpr (STRIPS == 2) {
      _tile_loadd(5, q[1] + i, ld);
      _tile_dpbsud(2, 5, 6);
      _tile_dpbsud(3, 5, 7);
    }
  }
  _tile_stored(0, acc[0], 4 * TILE);
  _tile_stored(1, &acc[0][0][16], 4 * TILE);
  if constexpr (STRIPS == 2) {
    _tile_stored(2, acc[1], 4 * TILE);
    _tile_stored(3, &acc[1][0][16], 4 * TILE);
  }
}

// The products of the last inputs of a row, fewer than DEPTH, added to its sums.
void add_rest(const uint8_t* w, const int8_t* q, int fours, int32_t* acc) {
  for (int half = 0; half < TILE; half += 16) {
    __m512i sum = _mm512_loadu_si512(acc + half);
    for (int g = 0; g < fours; ++g) {
      int32_t four;
      memcpy(&four, q + 4 * g, 4);
      sum = _mm512_dpbusd_epi32(sum, _mm512_loadu_si512(w + 4 * (TILE * g + half)), _mm512_set1_epi32(four));
    }
    _mm512_storeu_si512(acc + half, sum);
  }
}

}  // namespace

bool can_tile() {
  constexpr int REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM: threads started later may use it too
  static const bool granted = syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
  return granted;
}

void int8_tiles(const sd_linear_args& a, int tile, int row, int rows, float* sums) {
  const int chunks = (a.k_pad + CHUNK - 1) / CHUNK, height = rows < STRIP ? rows : STRIP;
  const int strips = (rows + STRIP - 1) / STRIP, turns = (strips + 1) / 2;
  shape_tiles(height);
  alignas(64) int32_t acc[2][STRIP][TILE];
  for (int c = 0; c < chunks; ++c) {
    const int begin = c * CHUNK, width = a.k_pad - begin < CHUNK ? a.k_pad - begin : CHUNK, depth = width / DEPTH * DEPTH;
    const uint8_t* w = (const uint8_t*)a.weight + ((int64_t)tile * a.k_pad + begin) * TILE;
    for (int turn = 0; turn < turns; ++turn) {
      const int first[2] = {2 * STRIP * turn, 2 * STRIP * turn + STRIP};
      const int8_t* q[2];
      int shift[2];  // rows of the last strip, shifted to be full, that the strip before it has added
      for (int s = 0; s < 2; ++s) {
        shift[s] = first[s] + height > rows ? first[s] + height - rows : 0;
        q[s] = a.q + (int64_t)(row + first[s] - shift[s]) * a.k_pad + begin;
      }
      const int lines = (DEPTH * TILE / 64 + turns - 1) / turns;
      const char* ahead = (const char*)w + (turns == 1 ? AHEAD : width * TILE * (turns + turn) / turns);
      const int count = first[1] < rows ? 2 : 1;
      if (count == 2) multiply_strips<2>(w, q, a.k_pad, depth, ahead, lines, acc);
      else multiply_strips<1>(w, q, a.k_pad, depth, ahead, lines, acc);
      for (int s = 0; s < count; ++s) {
        for (int m = shift[s]; m < height; ++m) {
          if (depth < width) add_rest(w + depth * TILE, q[s] + m * (int64_t)a.k_pad + depth, (width - depth) / 4, acc[s][m]);
          const int at = first[s] - shift[s] + m;
          const float scale = a.q_scale[(row + at) * chunks + c];
          const int32_t offset = a.q_sum[(row + at) * chunks + c];
          for (int n = 0; n < TILE; ++n) sums[at * TILE + n] += (float)(acc[s][m][n] - offset) * scale;
        }
      }
    }
  }
  _tile_release();
}

}  // namespace sd

#else

namespace sd {

bool can_tile() { return false; }

void int8_tiles(const sd_linear_args&, int, int, int, float*) {}

}  // namespace sd

#endif

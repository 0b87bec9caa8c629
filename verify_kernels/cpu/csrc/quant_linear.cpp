// Products of int8 rows with weights in the blocks of the model's file.
//
// For every 32 inputs (16 of Q6_K), in ascending order: the product of levels and activations, exact in 32 bits; times
// the weights' scale; less their low end times the sum of the activations; times the activations' scale, added up.
// These operations, each fused one with one rounding, are the same on every processor, so a row's bits depend on the
// row alone.
#include "quant_rows.h"
#include "vec.h"

namespace sd {
namespace {

constexpr int EARLY = 1;  // lines of 64 bytes of weights prefetched while a group of 16 channels is unpacked
constexpr int SLICES = TILE / (COLUMNS * LANES4);

// A chunk of a tile in any format: four inputs of each channel, scales and low ends of groups.
struct Unpacked {
  alignas(64) uint8_t level[CHUNK / 4][4 * TILE];
  float scale[2 * GROUPS][TILE];
  float low[GROUPS][TILE];
};

template <class F>
void unpack(const uint8_t* units, int count, const char* ahead, Unpacked& to) {
  for (int u = 0; u < 2 * count; ++u, units += F::BYTES) {
    const int half = u % 2 * HALF;
    each(std::make_integer_sequence<int, F::GROUPS>{}, [&]<int G>(std::integral_constant<int, G>) {
      const int g = u / 2 * F::GROUPS + G;
#pragma GCC unroll 4
      for (int i = 0; i < EARLY; ++i) __builtin_prefetch(ahead + 64 * (EARLY * (F::GROUPS * u + G) + i), 0, 2);
      for (int slice = 0; slice < HALF; slice += LANES4) {
        const int n = half + slice;
#pragma GCC unroll 8
        for (int j = 0; j < 8; ++j) store_bytes(to.level[8 * g + j] + 4 * n, F::template level<G>(units, slice, j));
        for (int part = 0; part < F::SCALES; ++part)
          store_floats(to.scale[F::SCALES * g + part] + n, F::template scale<G>(units, slice, part));
        if constexpr (F::LOW) store_floats(to.low[g] + n, F::template low<G>(units, slice));
      }
    });
  }
}

// What is prefetched during a panel: `step` bytes of weights for each group. If only the first rows prefetched, or only
// unpacking, memory would be idle while the others compute.
struct Ahead {
  const char* from;
  int64_t step;
};

// acc += the products of MR rows with AT pieces, from `first` on at `q` and from `piece` on in the chunk. The first four
// inputs of all rows come first, then the next four, so that independent sums follow each other.
template <int BITS, int SCALES, bool LOW, int MR, int AT>
inline __attribute__((always_inline)) void multiply_pieces(
    const Unpacked& w, int piece, const int8_t* q, int first, int n, floatv (&acc)[MR][COLUMNS]) {
  using P = Piece<SCALES>;
  constexpr int ROW = Record<SCALES>::BYTES;
  intv sum[AT][MR][COLUMNS], run[AT][MR][COLUMNS];
#pragma GCC unroll 2
  for (int p = 0; p < AT; ++p)
#pragma GCC unroll 6
    for (int m = 0; m < MR; ++m)
#pragma GCC unroll 2
      for (int c = 0; c < COLUMNS; ++c)
        sum[p][m][c] = all_ints(LOW ? START : *(const int32_t*)(q + m * ROW + P::sum(first + p)));
#pragma GCC unroll 8
  for (int j = 0; j < P::FOURS; ++j) {
#pragma GCC unroll 2
    for (int p = 0; p < AT; ++p) {
      const uint8_t* levels = w.level[P::FOURS * (piece + p) + j] + 4 * n;
      wordv level[COLUMNS];
#pragma GCC unroll 2
      for (int c = 0; c < COLUMNS; ++c) level[c] = load_bytes(levels + WIDTH * c);
#pragma GCC unroll 6
      for (int m = 0; m < MR; ++m) {
        const intv four = spread(q + m * ROW + P::values(first + p) + 4 * j);
#pragma GCC unroll 2
        for (int c = 0; c < COLUMNS; ++c) multiply<BITS>(sum[p][m][c], run[p][m][c], level[c], four, j);
      }
    }
  }
#pragma GCC unroll 2
  for (int p = 0; p < AT; ++p) {
#pragma GCC unroll 2
    for (int c = 0; c < COLUMNS; ++c) {
      const int at = n + c * LANES4;
      const floatv scale = load_floats(w.scale[piece + p] + at), zero = scale * all_floats(LESS_START);
      const floatv low = LOW ? load_floats(w.low[piece + p] + at) : floatv{};
#pragma GCC unroll 6
      for (int m = 0; m < MR; ++m) {
        floatv u = scaled(sum[p][m][c], scale, zero);
        if (LOW) u = fused_with(low, q + m * ROW + P::sum(first + p), u);
        acc[m][c] = fused_with(u, q + m * ROW + P::scale(first + p), acc[m][c]);
      }
    }
  }
}

// sums[m * TILE + 0..] += the product of a panel of MR rows with `groups` groups, an even number.
template <int BITS, int SCALES, bool LOW, int MR>
__attribute__((noinline)) void panel_product(
    const Unpacked& w, int groups, const int8_t* panel, Ahead ahead, float* sums) {
  constexpr int AT = MR * COLUMNS <= FEW_SUMS ? 2 : 1;  // pieces at once: with few sums each would wait for itself
  constexpr int STRIDE = AT > SCALES ? AT : 1;          // groups
  for (int n = 0; n < TILE; n += COLUMNS * LANES4) {
    floatv acc[MR][COLUMNS];
#pragma GCC unroll 6
    for (int m = 0; m < MR; ++m)
#pragma GCC unroll 2
      for (int c = 0; c < COLUMNS; ++c) acc[m][c] = load_floats(sums + m * TILE + n + c * LANES4);
    const int8_t* q = panel;
    for (int g = 0; g < groups; g += STRIDE, q += STRIDE * Record<SCALES>::STEP) {
      ahead.from = ask_for(ahead.from, ahead.from + STRIDE * ahead.step);
#pragma GCC unroll 2
      for (int p = 0; p < STRIDE * SCALES; p += AT)
        multiply_pieces<BITS, SCALES, LOW, MR, AT>(w, SCALES * g + p, q, p, n, acc);
    }
#pragma GCC unroll 6
    for (int m = 0; m < MR; ++m)
#pragma GCC unroll 2
      for (int c = 0; c < COLUMNS; ++c) store_floats(sums + m * TILE + n + c * LANES4, acc[m][c]);
  }
}

template <class F>
void any_panel(const Unpacked& w, int groups, const int8_t* panel, int rows, Ahead ahead, float* sums) {
  constexpr int BITS = SUM_BITS<F::BITS>, S = F::SCALES;
  with_count<MOST_ROWS>(rows, [&]<int MR>(std::integral_constant<int, MR>) {
    panel_product<BITS, S, F::LOW, MR>(w, groups, panel, ahead, sums);
  });
}

template <class F>
void tile_rows(const sd_linear_args& a, int tile, int row, int rows, int all, float* sums) {
  constexpr int INPUTS = GROUP * F::GROUPS, UNITS = CHUNK / INPUTS;  // of a unit; of a chunk
  const int units = a.k_pad / INPUTS, chunks = (units + UNITS - 1) / UNITS;
  const int panels = (rows + MOST_ROWS - 1) / MOST_ROWS, height = (rows + panels - 1) / panels;  // 8 rows are 4 + 4
  const uint8_t* w = (const uint8_t*)a.weight + (int64_t)tile * units * 2 * F::BYTES;
  Unpacked unpacked;
  for (int c = 0; c < chunks; ++c, w += (int64_t)UNITS * 2 * F::BYTES) {
    const int count = units - c * UNITS < UNITS ? units - c * UNITS : UNITS, groups = count * F::GROUPS;
    const char* ahead = (const char*)w + AHEAD;
    unpack<F>(w, count, ahead, unpacked);
    const int early = 64 * EARLY * 2 * groups, bytes = 2 * count * F::BYTES - early, asks = panels * groups * SLICES;
    const int64_t step = (bytes / asks + 63) / 64 * 64;
    ahead += early;
    for (int first = 0; first < rows; first += height) {
      const int8_t* panel = Record<F::SCALES>::at(a, c, row + first, all);
      any_panel<F>(unpacked, groups, panel, rows - first < height ? rows - first : height, {ahead, step},
                   sums + first * TILE);
      ahead += bytes / panels;
    }
  }
}

// Scale = max|x| / 127, round half to even.
void quant_group(const float* x, int8_t* q, float* scale, int32_t* sums) {
  const v16 a = load16(x), b = load16(x + 16);
  const float peak = hmax16(max16(abs16(a), abs16(b)));
  *scale = peak / 127.0f;
  const v16 inverse = splat(peak > 0 ? 127.0f / peak : 0.0f);
  // Adding 1.5 * 2^23 rounds half to even and leaves the integer in the low bits.
  const i16v low = bits_of(a * inverse + splat(12582912.0f)) - splat_bits(0x4B400000);
  const i16v high = bits_of(b * inverse + splat(12582912.0f)) - splat_bits(0x4B400000);
  store_bytes(q, low), store_bytes(q + 16, high);
  sums[0] = sum_bits(low), sums[1] = sum_bits(high);
}

const float* gather(const float* x, const int32_t* order, float* to) {
  for (int i = 0; i < GROUP; ++i) to[i] = x[order[i]];
  return to;
}

// Row `n` of the tile at `w`, dequantised, times `scale`.
template <class F>
void embed_row(const uint8_t* w, int n, int k, int k_pad, float scale, float* out) {
  constexpr int INPUTS = GROUP * F::GROUPS, UNITS = CHUNK / INPUTS, SCALED = GROUP / F::SCALES;
  Unpacked unpacked;
  for (int begin = 0; begin < k; begin += CHUNK, w += (int64_t)UNITS * 2 * F::BYTES) {
    const int units = (k_pad - begin) / INPUTS, width = k - begin < CHUNK ? k - begin : CHUNK;
    unpack<F>(w, units < UNITS ? units : UNITS, (const char*)w, unpacked);
    for (int i = 0; i < width; ++i) {
      const int g = i / GROUP, level = unpacked.level[i / 4][4 * n + i % 4] - (g & 1 ? F::ODD_OFFSET : F::OFFSET);
      const float value = unpacked.scale[i / SCALED][n] * (float)level;
      out[begin + i] = (F::LOW ? value - unpacked.low[g][n] : value) * scale;
    }
  }
}

}  // namespace

void quant_tile(const sd_linear_args& a, int tile, int row, int rows, int all, float* sums) {
  if (rows <= DIRECT_ROWS) return direct_tile(a, tile, row, rows, all, sums);
  with_format(a.kind, [&]<class F>(F) { tile_rows<F>(a, tile, row, rows, all, sums); });
}

void quant_row(const sd_linear_args& a, const float* x, int row, int all) {
  with_format(a.kind, [&]<class F>(F) {
    using Own = Record<F::SCALES>;
    for (int g = 0; g < a.k_pad / GROUP; ++g) {
      int8_t* q = Own::at(a, g / GROUPS, row, all) + g % GROUPS * Own::STEP;
      float scale = 0;
      int32_t sums[2] = {0, 0};
      float gathered[GROUP];
      if (GROUP * g >= a.k) memset(q, 0, GROUP);  // a group that fills the last unit up
      else quant_group(a.order ? gather(x, a.order + GROUP * g, gathered) : x + GROUP * g, q, &scale, sums);
      memcpy(q + GROUP, &scale, 4);
      const int offset = g & 1 ? F::ODD_OFFSET : F::OFFSET, whole = sums[0] + sums[1];
      const float less_sum = (float)-whole;
      const int32_t start[2] = {START - offset * (F::SCALES == 2 ? sums[0] : whole), START - offset * sums[1]};
      memcpy(q + GROUP + 4, F::LOW ? (const void*)&less_sum : start, 4 * F::SCALES);
    }
  });
}

}  // namespace sd

// out[r] = row ids[r] of a table in blocks, `k` wide, times `scale`.
extern "C" void sd_embed_blocks(int32_t kind, const uint8_t* table, int32_t k, int32_t k_pad, const int32_t* ids,
                                int32_t rows, float scale, float* out) {
  sd::with_format(kind, [&]<class F>(F) {
    const int64_t tile = (int64_t)k_pad / (sd::GROUP * F::GROUPS) * 2 * F::BYTES;
    for (int r = 0; r < rows; ++r)
      sd::embed_row<F>(table + ids[r] / sd::TILE * tile, ids[r] % sd::TILE, k, k_pad, scale, out + (int64_t)r * k);
  });
}

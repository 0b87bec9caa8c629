// Products of int8 rows with weights in blocks, which stay as the model's file has them.
//
// Of every group of 32 inputs, in ascending order: the product of levels and activations, exact in 32 bits; times the
// weights' scale; less their low end times the sum of the activations; times the activations' scale, added up. Always
// these operations, each fused one in one rounding, so a row's bits depend on the row alone, on every processor.
#include "quant_linear.h"

#include <utility>

#include "quant_formats.h"
#include "vec.h"

namespace sd {
namespace {

constexpr int TILE = 2 * HALF;
constexpr int CHUNK = 256;   // inputs that a block of rows runs through before the next block does
constexpr int AHEAD = 8192;  // bytes before their use that weights are asked for

struct Rows {
  const int8_t* q;
  const float* scale;     // by group
  const float* less_sum;  // by group: minus the sum of q
  const int32_t* start;   // by group, or by scale where it has two: minus the offset times the sum of q
  int64_t ld_q, ld_group;
};

struct Ahead {
  const char* from;
  int lines;  // per group
};

// Of all rows the first four inputs, then the next four: sums that do not wait for each other stand side by side.
template <class F, int MR, int G>
inline void group_rows(const uint8_t* unit, int first, int slice, const Rows& r, int at, floatv* acc) {
  constexpr int FOURS = 8 / F::SCALES;  // of a scale
  const floatv low = F::template low<G>(unit, first, slice);
  floatv u[MR];
#pragma GCC unroll 2
  for (int part = 0; part < F::SCALES; ++part) {
    intv sum[MR], run[MR];
#pragma GCC unroll 12
    for (int m = 0; m < MR; ++m) sum[m] = all_ints(F::LOW ? 0 : r.start[F::SCALES * (m * r.ld_group + at) + part]);
#pragma GCC unroll 8
    for (int j = FOURS * part; j < FOURS * (part + 1); ++j) {
      const wordv level = F::template level<G>(unit, first, slice, j);
#pragma GCC unroll 12
      for (int m = 0; m < MR; ++m) multiply<F::BITS>(sum[m], run[m], level, r.q + m * r.ld_q + GROUP * at, j);
    }
    const floatv scale = F::template scale<G>(unit, first, slice, part);
#pragma GCC unroll 12
    for (int m = 0; m < MR; ++m) u[m] = part ? fused(to_floats(sum[m]), scale, u[m]) : to_floats(sum[m]) * scale;
  }
#pragma GCC unroll 12
  for (int m = 0; m < MR; ++m) {
    const int64_t i = m * r.ld_group + at;
    if (F::LOW) u[m] = fused(low, all_floats(r.less_sum[i]), u[m]);
    acc[m] = fused(u[m], all_floats(r.scale[i]), acc[m]);
  }
}

// Blocks of more rows are not compiled: with two scales to a group a row takes three registers.
template <class F>
constexpr int most_rows = F::SCALES == 2 ? MOST_ROWS * 2 / 3 : MOST_ROWS;

template <int... I, class Call>
inline void each(std::integer_sequence<int, I...>, Call call) {
  (call(std::integral_constant<int, I>{}), ...);
}

// sums[m * TILE + 0..15] += the product over `units` units, which lie two halves apart.
template <class F, int MR>
__attribute__((noinline)) void chunk_rows(const uint8_t* w, int units, const Rows& r, Ahead ahead, float* sums) {
  for (int slice = 0; slice < HALF; slice += LANES4) {
    floatv acc[MR];
#pragma GCC unroll 12
    for (int m = 0; m < MR; ++m) acc[m] = load_floats(sums + m * TILE + slice);
    for (int u = 0; u < units; ++u) {
      const uint8_t* unit = w + (int64_t)2 * F::BYTES * u;
      for (int first = 0; first < F::GROUPS; first += F::PERIOD) {
        each(std::make_integer_sequence<int, F::PERIOD>{}, [&]<int G>(std::integral_constant<int, G>) {
          for (int line = 0; line < ahead.lines; ++line) __builtin_prefetch(ahead.from + 64 * line);
          ahead.from += 64 * ahead.lines;
          group_rows<F, MR, G>(unit, first, slice, r, F::GROUPS * u + first + G, acc);
        });
      }
    }
#pragma GCC unroll 12
    for (int m = 0; m < MR; ++m) store_floats(sums + m * TILE + slice, acc[m]);
  }
}

template <class F>
void chunk_any(const uint8_t* w, int units, const Rows& r, int rows, Ahead ahead, float* sums) {
#define SD_ROWS(N) \
  case N: if constexpr (N <= most_rows<F>) chunk_rows<F, N>(w, units, r, ahead, sums); break;
  switch (rows) {
    SD_ROWS(1) SD_ROWS(2) SD_ROWS(3) SD_ROWS(4) SD_ROWS(5) SD_ROWS(6)
    SD_ROWS(7) SD_ROWS(8) SD_ROWS(9) SD_ROWS(10) SD_ROWS(11) SD_ROWS(12)
  }
#undef SD_ROWS
}

template <class F>
void tile_rows(const sd_linear_args& a, int tile, int row, int rows, float* sums) {
  constexpr int INPUTS = GROUP * F::GROUPS, UNITS = CHUNK / INPUTS;  // of a unit; of a chunk
  const int units = a.k_pad / INPUTS, groups = a.k_pad / GROUP;
  const int blocks = (rows + most_rows<F> - 1) / most_rows<F>;
  const uint8_t* w = (const uint8_t*)a.weight + (int64_t)tile * units * 2 * F::BYTES;
  for (int first = 0; first < units; first += UNITS, w += (int64_t)UNITS * 2 * F::BYTES) {
    const int count = units - first < UNITS ? units - first : UNITS;
    const int lines = (2 * count * F::BYTES + 63) / 64, calls = 2 * blocks * count * F::GROUPS;
    const Ahead ahead{(const char*)w + AHEAD, (lines + calls - 1) / calls};
    for (int half = 0; half < 2; ++half) {
      for (int b = 0; b < blocks; ++b) {  // blocks of nearly equal height: 9 rows are 5 + 4, not 8 + 1
        const int begin = (int64_t)rows * b / blocks, end = (int64_t)rows * (b + 1) / blocks;
        const int64_t at = (int64_t)(row + begin) * groups + first * F::GROUPS;
        const Rows r{a.q + GROUP * at, a.q_scale + at, a.q_less_sum + at, a.q_sum + F::SCALES * at, a.k_pad, groups};
        const int64_t asked = 64LL * ahead.lines * count * F::GROUPS * (half * blocks + b);
        chunk_any<F>(w + half * F::BYTES, count, r, end - begin, {ahead.from + asked, ahead.lines},
                     sums + begin * TILE + half * HALF);
      }
    }
  }
}

template <class Call>
void with_format(int kind, Call call) {
  switch (kind) {
    case SD_Q4_0: call(Q4_0{}); break;
    case SD_Q4_1: call(Q4_1{}); break;
    case SD_Q5_0: call(Q5_0{}); break;
    case SD_Q5_1: call(Q5_1{}); break;
    case SD_Q8_0: call(Q8_0{}); break;
    case SD_Q4_K: call(Q4_K{}); break;
    case SD_Q5_K: call(Q5_K{}); break;
    case SD_Q6_K: call(Q6_K{}); break;
    case SD_U4_32: call(U4<32>{}); break;
    case SD_U4_64: call(U4<64>{}); break;
    case SD_U4_128: call(U4<128>{}); break;
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

}  // namespace

void quant_tile(const sd_linear_args& a, int tile, int row, int rows, float* sums) {
  memset(sums, 0, (size_t)rows * TILE * 4);
  with_format(a.kind, [&]<class F>(F) { tile_rows<F>(a, tile, row, rows, sums); });
}

void quant_row(const sd_linear_args& a, const float* x, int row) {
  const int groups = a.k_pad / GROUP;
  with_format(a.kind, [&]<class F>(F) {
    for (int g = 0; g < groups; ++g) {
      const int64_t at = (int64_t)row * groups + g;
      int8_t* q = a.q + GROUP * at;
      if (GROUP * g >= a.k) {  // a group that fills the last unit up
        memset(q, 0, GROUP);
        a.q_scale[at] = a.q_less_sum[at] = 0;
        a.q_sum[F::SCALES * at] = a.q_sum[F::SCALES * at + F::SCALES - 1] = 0;
        continue;
      }
      int32_t sums[2];
      const float* from = x + GROUP * g;
      float gathered[GROUP];
      if (a.order) {
        for (int i = 0; i < GROUP; ++i) gathered[i] = x[a.order[GROUP * g + i]];
        from = gathered;
      }
      quant_group(from, q, a.q_scale + at, sums);
      a.q_less_sum[at] = (float)-(sums[0] + sums[1]);
      const int offset = g & 1 ? F::ODD_OFFSET : F::OFFSET;
      a.q_sum[F::SCALES * at] = -offset * (F::SCALES == 2 ? sums[0] : sums[0] + sums[1]);
      if (F::SCALES == 2) a.q_sum[2 * at + 1] = -offset * sums[1];
    }
  });
}

}  // namespace sd

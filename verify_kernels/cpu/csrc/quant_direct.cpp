// Rows times weights in blocks, with levels straight from their units.
#include "quant_rows.h"

namespace sd {
namespace {

#if defined(__AVX2__) && !defined(__AVX512VNNI__)

// The levels of a group stay in eight registers while any number of rows is multiplied with them: they are unpacked once
// and never stored. TOGETHER rows at once keep the multipliers busy; more registers a row leave room for fewer.
template <class F>
constexpr int TOGETHER = F::BITS <= 4 || (F::BITS != 6 && !F::LOW) ? 4 : 2;

// sums += the products of MR rows with a group's levels. The operations on a sum, and their order, are those of
// quant_linear.cpp.
template <class F, int MR>
inline __attribute__((always_inline)) void multiply_group(
    const wordv (&level)[8], const floatv (&scale)[F::SCALES], floatv low, const int8_t* q, float* sums) {
  constexpr int ROW = Record<F::SCALES>::BYTES;
  using P = Piece<F::SCALES>;
#pragma GCC unroll 2
  for (int p = 0; p < F::SCALES; ++p) {
    intv sum[MR], run[MR];
#pragma GCC unroll 4
    for (int m = 0; m < MR; ++m) sum[m] = F::LOW ? intv{} : all_ints(*(const int32_t*)(q + m * ROW + P::sum(p)));
#pragma GCC unroll 8
    for (int j = 0; j < P::FOURS; ++j)
#pragma GCC unroll 4
      for (int m = 0; m < MR; ++m)
        multiply<SUM_BITS<F::BITS>>(sum[m], run[m], level[p * P::FOURS + j], spread(q + m * ROW + P::values(p) + 4 * j), j);
#pragma GCC unroll 4
    for (int m = 0; m < MR; ++m) {
      floatv x = to_floats(sum[m]) * scale[p];
      if (F::LOW) x = fused_with(low, q + m * ROW + P::sum(p), x);
      store_floats(sums + m * TILE, fused_with(x, q + m * ROW + P::scale(p), load_floats(sums + m * TILE)));
    }
  }
}

// A tile's chunk of `units` units for `rows` rows.
template <class F>
__attribute__((noinline)) void direct_chunk(const uint8_t* w, int units, const int8_t* q, int rows, float* sums) {
  constexpr int S = F::SCALES, MOST = TOGETHER<F>, ROW = Record<S>::BYTES, PAIRS = (F::BYTES / 64 + 1) / 2;
  for (int n = 0; n < TILE; n += LANES4) {
    const uint8_t* unit = w + n / HALF * F::BYTES;
    int64_t slice = n % HALF;  // 0 prefetches every other line, LANES4 the rest
    const int8_t* own = q;
    for (int u = 0; u < units; ++u, unit += 2 * F::BYTES) {
      each(std::make_integer_sequence<int, F::GROUPS>{}, [&]<int G>(std::integral_constant<int, G>) {
        // Without it GCC keeps an address for every operand of this loop on the stack.
        asm volatile("" : "+r"(own), "+r"(unit), "+r"(slice));
#pragma GCC unroll 16
        for (int i = PAIRS * G / F::GROUPS; i < PAIRS * (G + 1) / F::GROUPS; ++i)
#pragma GCC unroll 3
          for (const int distance : DISTANCES)  // six bits take so many lines that one request each is faster
            if (F::BITS < 6 || distance == AHEAD) __builtin_prefetch(unit + distance + 128 * i + 8 * slice, 0, 2);
        wordv level[8];
#pragma GCC unroll 8
        for (int j = 0; j < 8; ++j) {
          wordv four = F::template level<G>(unit, slice, j);
          asm("" : "+x"(four));  // or GCC unpacks it again for every row
          level[j] = four;
        }
        floatv scale[S], low = {};
#pragma GCC unroll 2
        for (int p = 0; p < S; ++p) scale[p] = F::template scale<G>(unit, slice, p);
        if constexpr (F::LOW) low = F::template low<G>(unit, slice);
        const int8_t* from = own;
        float* to = sums + n;
        for (int left = rows / MOST; left; --left, from += MOST * ROW, to += MOST * TILE)
          multiply_group<F, MOST>(level, scale, low, from, to);
        switch (rows % MOST) {
          case 1: multiply_group<F, 1>(level, scale, low, from, to); break;
          case 2: if constexpr (MOST > 2) multiply_group<F, 2>(level, scale, low, from, to); break;
          case 3: if constexpr (MOST > 3) multiply_group<F, 3>(level, scale, low, from, to); break;
        }
        own += Record<S>::STEP;
      });
    }
  }
}

template <class F>
void any_rows(const sd_linear_args& a, int tile, int row, int rows, int all, float* sums) {
  constexpr int UNITS = GROUPS / F::GROUPS, PANEL = 64;  // rows that share one unpacking
  const int units = a.k_pad / (GROUP * F::GROUPS), chunks = (units + UNITS - 1) / UNITS;
  for (int first = 0; first < rows; first += PANEL) {
    const uint8_t* w = (const uint8_t*)a.weight + (int64_t)tile * units * 2 * F::BYTES;
    const int height = rows - first < PANEL ? rows - first : PANEL;
    for (int c = 0; c < chunks; ++c, w += UNITS * 2 * F::BYTES) {
      const int count = units - c * UNITS < UNITS ? units - c * UNITS : UNITS;
      direct_chunk<F>(w, count, Record<F::SCALES>::at(a, c, row + first, all), height, sums + first * TILE);
    }
  }
}

#else

// A tile for MR rows: unpacking does not pay for so few rows, and memory is read evenly. AT of the tile's two halves at
// a time, each a register here. The operations on a sum, and their order, are those of quant_linear.cpp.
template <class F, int MR, int AT>
__attribute__((noinline)) void direct_rows(const uint8_t* w, int units, const int8_t* q, int64_t chunk, float* sums) {
  constexpr int BITS = SUM_BITS<F::BITS>, S = F::SCALES, ROW = Record<S>::BYTES, LINES = AT * F::BYTES / 64;
  constexpr int UNITS = GROUPS / F::GROUPS;
  using P = Piece<S>;
  for (; units > 0; units -= UNITS, w += UNITS * 2 * F::BYTES, q += chunk) {
    for (int half = 0; half < 2; half += AT) {
      floatv acc[MR][AT];
#pragma GCC unroll 12
      for (int m = 0; m < MR; ++m)
#pragma GCC unroll 2
        for (int c = 0; c < AT; ++c) acc[m][c] = load_floats(sums + m * TILE + (half + c) * HALF);
      const uint8_t* unit = w + half * F::BYTES;
      const int8_t* own = q;
      for (int u = 0; u < UNITS && u < units; ++u, unit += 2 * F::BYTES, own += F::GROUPS * Record<S>::STEP) {
        each(std::make_integer_sequence<int, F::GROUPS>{}, [&]<int G>(std::integral_constant<int, G>) {
          // Without it GCC keeps all addresses of this loop on the stack; loading them takes as long as multiplying.
          asm volatile("" : "+r"(own));
#pragma GCC unroll 16
          for (int i = LINES * G / F::GROUPS; i < LINES * (G + 1) / F::GROUPS; ++i)
#pragma GCC unroll 3
            for (const int distance : DISTANCES) __builtin_prefetch(unit + distance + 64 * i, 0, 2);
#pragma GCC unroll 2
          for (int p = 0; p < S; ++p) {
            intv sum[MR][AT], run[MR][AT];
#pragma GCC unroll 12
            for (int m = 0; m < MR; ++m)
#pragma GCC unroll 2
              for (int c = 0; c < AT; ++c)
                sum[m][c] = all_ints(F::LOW ? START : *(const int32_t*)(own + m * ROW + P::sum(S * G + p)));
#pragma GCC unroll 8
            for (int j = 0; j < P::FOURS; ++j) {
              wordv level[AT];
#pragma GCC unroll 2
              for (int c = 0; c < AT; ++c) level[c] = F::template level<G>(unit + c * F::BYTES, 0, p * P::FOURS + j);
#pragma GCC unroll 12
              for (int m = 0; m < MR; ++m)
                multiply_all<BITS>(sum[m], run[m], level, own + m * ROW + P::values(S * G + p) + 4 * j, j);
            }
#pragma GCC unroll 2
            for (int c = 0; c < AT; ++c) {
              const uint8_t* of = unit + c * F::BYTES;
              const floatv scale = F::template scale<G>(of, 0, p), zero = scale * all_floats(LESS_START);
              floatv low = {};
              if constexpr (F::LOW) low = F::template low<G>(of, 0);
#pragma GCC unroll 12
              for (int m = 0; m < MR; ++m) {
                floatv x = scaled(sum[m][c], scale, zero);
                if (F::LOW) x = fused_with(low, own + m * ROW + P::sum(S * G + p), x);
                acc[m][c] = fused_with(x, own + m * ROW + P::scale(S * G + p), acc[m][c]);
              }
            }
          }
        });
      }
#pragma GCC unroll 12
      for (int m = 0; m < MR; ++m)
#pragma GCC unroll 2
        for (int c = 0; c < AT; ++c) store_floats(sums + m * TILE + (half + c) * HALF, acc[m][c]);
    }
  }
}

template <class F>
void any_rows(const sd_linear_args& a, int tile, int row, int rows, int all, float* sums) {
  const int units = a.k_pad / (GROUP * F::GROUPS);
  const uint8_t* w = (const uint8_t*)a.weight + (int64_t)tile * units * 2 * F::BYTES;
  const int8_t* q = Record<F::SCALES>::at(a, 0, row, all);
  const int64_t step = Record<F::SCALES>::at(a, 1, row, all) - q;
  with_count<DIRECT_ROWS>(rows, [&]<int MR>(std::integral_constant<int, MR>) {
    direct_rows<F, MR, MR <= FEW_ROWS ? 2 : 1>(w, units, q, step, sums);
  });
}
static_assert(DIRECT_ROWS == 0 || LANES4 == HALF);

#endif

}  // namespace

void direct_tile(const sd_linear_args& a, int tile, int row, int rows, int all, float* sums) {
  with_format(a.kind, [&]<class F>(F) { any_rows<F>(a, tile, row, rows, all, sums); });
}

}  // namespace sd

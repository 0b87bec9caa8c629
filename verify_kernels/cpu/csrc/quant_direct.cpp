// Few rows times weights in blocks, as in a step of decoding.
#include "quant_rows.h"

namespace sd {
namespace {

// A tile for MR rows, with levels straight from their units: unpacking does not pay for so few rows, and memory is read
// evenly. AT of the tile's two halves at a time, each a register here. The operations on a sum, and their order, are
// those of quant_linear.cpp.
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
#define SD_ROWS(N) \
  case N: if constexpr (N <= DIRECT_ROWS) direct_rows<F, N, N <= FEW_ROWS ? 2 : 1>(w, units, q, step, sums); break;
  switch (rows) {
    SD_ROWS(1) SD_ROWS(2) SD_ROWS(3) SD_ROWS(4) SD_ROWS(5) SD_ROWS(6)
    SD_ROWS(7) SD_ROWS(8) SD_ROWS(9) SD_ROWS(10) SD_ROWS(11) SD_ROWS(12)
  }
#undef SD_ROWS
}
static_assert(DIRECT_ROWS <= 12 && (DIRECT_ROWS == 0 || LANES4 == HALF));

}  // namespace

void direct_tile(const sd_linear_args& a, int tile, int row, int rows, int all, float* sums) {
  with_format(a.kind, [&]<class F>(F) { any_rows<F>(a, tile, row, rows, all, sums); });
}

}  // namespace sd

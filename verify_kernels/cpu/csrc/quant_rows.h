// What products with weights in blocks share for any number of rows: a row's layout, and the dispatch on the format.
#pragma once
#include <utility>

#include "linear.h"
#include "quant_formats.h"

namespace sd {
namespace {

static_assert(TILE == 2 * HALF);
constexpr int CHUNK = 256;   // inputs whose sums are added up before the next, of all rows
constexpr int GROUPS = CHUNK / GROUP;
constexpr int AHEAD = 8192;  // bytes before their use that weights are prefetched

// The same for few rows, which wait for memory. Zen drops a prefetch while too many misses are under way, so a line is
// prefetched again when it is nearer; a line that has arrived costs only the instruction.
#if defined(__znver3__) || defined(__znver4__) || defined(__znver5__)
constexpr int DISTANCES[] = {16384, 8192, 4096};
#else
constexpr int DISTANCES[] = {AHEAD};
#endif

// A row's chunk: for each group 32 values, their scale and, per scale of the weights, a term of their sum: minus the sum
// as a float if levels have no offset, else START less the offset times the sum. Rows of a chunk lie beside each other,
// so that one address and constants reach all that are multiplied together.
template <int SCALES>
struct Record {
  static constexpr int STEP = GROUP + 4 + 4 * SCALES, BYTES = (GROUPS * STEP + 63) / 64 * 64;
  static int8_t* at(const sd_linear_args& a, int chunk, int row, int all) {
    return a.q + ((int64_t)chunk * all + row) * BYTES;
  }
};

template <int... I, class Call>
inline void each(std::integer_sequence<int, I...>, Call call) {
  (call(std::integral_constant<int, I>{}), ...);
}

// The inputs of one scale, which are multiplied at once. A group is one such piece, or two.
template <int SCALES>
struct Piece {
  static constexpr int FOURS = 8 / SCALES;
  static constexpr int values(int p) { return p / SCALES * Record<SCALES>::STEP + p % SCALES * 4 * FOURS; }
  static constexpr int scale(int p) { return p / SCALES * Record<SCALES>::STEP + GROUP; }
  static constexpr int sum(int p) { return scale(p) + 4 + p % SCALES * 4; }
};

template <class Call>
inline void with_format(int kind, Call call) {
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
    case SD_Q3_0: call(Q3_0{}); break;
  }
}

}  // namespace
}  // namespace sd

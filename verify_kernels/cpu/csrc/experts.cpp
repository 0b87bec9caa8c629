// A mixture of experts: x += the sum over a row's chosen experts of share * down(gate(up(norm(x)))).
//
// Which experts a row chooses, and the order in which their outputs are added, depend on its scores alone. Rows of one
// expert are multiplied together only to reuse a loaded weight.
#include <algorithm>

#include "linear.h"
#include "parallel.h"
#include "vec.h"

extern "C" {

// Mirrors ExpertsArgs in verify_kernels/cpu/native_backend.py, field by field.
struct sd_experts_args {
  const sd_linear_args* gate_up;  // of one expert; reads x
  const sd_linear_args* down;     // of one expert; reads what gate_up writes
  int64_t gate_up_bytes, down_bytes;  // of one expert's weights
  int32_t experts, chosen, normalise, threads;
  const float* scores;  // [rows, experts]
  float* x;             // [rows, ld_x]
  int64_t ld_x;
  // Scratch, a value per pair of a row and one of its experts
  int32_t* expert;  // [rows, chosen], by falling score
  float* share;     // [rows, chosen]
  int32_t* place;   // [rows, chosen]: the pair's row in gate_up and down, sorted by expert
  int32_t* row;     // at a place, the row of x
  int32_t* start;   // [experts + 1], the first place of each expert
};

}  // extern "C"

namespace {

// The experts of the highest scores, the lower number first among equals, and their part of the softmax.
void choose(const sd_experts_args& a, int row) {
  const float* scores = a.scores + (int64_t)row * a.experts;
  int32_t* expert = a.expert + (int64_t)row * a.chosen;
  float* share = a.share + (int64_t)row * a.chosen;
  int count = 0;
  for (int e = 0; e < a.experts; ++e) {
    int at = count;
    while (at > 0 && scores[e] > scores[expert[at - 1]]) --at;
    if (at == a.chosen) continue;
    count = std::min(count + 1, a.chosen);
    for (int i = count - 1; i > at; --i) expert[i] = expert[i - 1];
    expert[at] = e;
  }
  const float top = scores[expert[0]];
  float total = 0;
  // exp1, not std::exp, whose last bit depends on the machine.
  if (!a.normalise) for (int e = 0; e < a.experts; ++e) total += sd::exp1(scores[e] - top);
  for (int i = 0; i < a.chosen; ++i) {
    share[i] = sd::exp1(scores[expert[i]] - top);
    if (a.normalise) total += share[i];
  }
  for (int i = 0; i < a.chosen; ++i) share[i] /= total;
}

void sort_by_expert(const sd_experts_args& a, int rows) {
  const int pairs = rows * a.chosen;
  std::fill_n(a.start, a.experts + 1, 0);
  for (int p = 0; p < pairs; ++p) ++a.start[a.expert[p] + 1];
  for (int e = 0; e < a.experts; ++e) a.start[e + 1] += a.start[e];
  for (int p = 0; p < pairs; ++p) {
    const int at = a.start[a.expert[p]]++;
    a.place[p] = at;
    a.row[at] = p / a.chosen;
  }
  for (int e = a.experts; e > 0; --e) a.start[e] = a.start[e - 1];  // each has advanced to the next one's first place
  a.start[0] = 0;
}

void add_outputs(const sd_experts_args& a, int row) {
  float* x = a.x + row * a.ld_x;
  for (int i = 0; i < a.chosen; ++i) {
    const int64_t pair = (int64_t)row * a.chosen + i;
    const float* y = a.down->dst + a.place[pair] * a.down->ld_dst;
    const float share = a.share[pair];
    for (int n = 0; n < a.down->n; ++n) x[n] += share * y[n];
  }
}

}  // namespace

extern "C" void sd_experts(const sd_experts_args* args, int32_t rows) {
  const sd_experts_args& a = *args;
  for (int row = 0; row < rows; ++row) choose(a, row);
  sort_by_expert(a, rows);
  sd::grouped_linear(*a.gate_up, a.gate_up_bytes, a.experts, a.start, a.row);
  sd::grouped_linear(*a.down, a.down_bytes, a.experts, a.start, nullptr);
  sd::for_units(a.threads, rows, [&](int row) { add_outputs(a, row); });
}

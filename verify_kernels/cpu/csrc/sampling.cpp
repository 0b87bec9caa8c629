// Entry points of the sampling kernels (noise: verify_kernels/noise.py). One row is one unit of work, done start to
// end by one thread: a result is a function of its row alone.
#include "parallel.h"
#include "sampling_scan.h"

namespace {

using namespace sd;

Scratch& scratch() {  // grows to the vocabulary once per thread
  static thread_local Scratch s;
  return s;
}

int32_t sample_row(const float* raw, int vocab, const sd_sample_row& row, const int32_t* path) {
  Scratch& s = scratch();
  View view = make_view(apply_edits(raw, vocab, row, path, s), vocab, row.temperature, s);
  if (row.temperature == 0 || view.max == DEAD) return argmax(view);
  Cut cut = make_cut(view, row, s);
  Best best(1);
  scan_noisy(view, row, cut, best);
  return best.n ? best.id[0] : -1;
}

double logprob(float z, float z_max, double normaliser) {
  return ((double)z - (double)z_max) - normaliser + 0.0;  // never -0, which would show the maximum's sign of zero
}

// Returns the logarithm of the weight that the cut keeps.
double write_best(const View& view, const Best& best, const Cut& cut, int32_t* ids, double* values) {
  float z_max = view.max / view.temperature;
  double normaliser = log_of_weight(total_weight(view, cut));
  for (int i = 0; i < best.width; ++i) {
    ids[i] = i < best.n ? best.id[i] : -1;
    values[i] = i < best.n ? logprob(best.z[i], z_max, normaliser) : (double)DEAD;
  }
  return normaliser;
}

void children_of(const float* raw, int vocab, const sd_sample_row& row, const int32_t* path, int width, int32_t* ids,
                 double* values) {
  Scratch& s = scratch();
  View view = make_view(apply_edits(raw, vocab, row, path, s), vocab, row.temperature, s);
  Best best(width);
  Cut cut;
  if (view.max != DEAD) {
    if (row.temperature == 0) {
      scan_plain(view, best);
    } else {
      cut = make_cut(view, row, s);
      scan_noisy(view, row, cut, best);
    }
  }
  write_best(view, best, cut, ids, values);
}

double logprobs_of(const float* raw, int vocab, int32_t token, int top, int32_t* ids, double* values) {
  View view = make_view(raw, vocab, 0, scratch());
  bool usable = view.max != DEAD && token >= 0 && token < vocab;
  Best best(top);
  if (usable && top > 0) scan_plain(view, best);
  double normaliser = write_best(view, best, Cut(), ids, values);
  return usable ? logprob(view.z(token), view.max, normaliser) : (double)DEAD;
}

}  // namespace

extern "C" {

void sd_sample_rows(const float* logits, int64_t ld, int rows, int vocab, int threads, const sd_sample_row* how,
                    const int32_t* path, int32_t* out) {
  for_units(threads, rows, [&](int r) { out[r] = sample_row(logits + r * ld, vocab, how[r], path); });
}

// ids and values: [rows, width], width <= 64.
void sd_sample_children(const float* logits, int64_t ld, int rows, int vocab, int threads, const sd_sample_row* how,
                        const int32_t* path, int width, int32_t* ids, double* values) {
  for_units(threads, rows, [&](int r) {
    children_of(logits + r * ld, vocab, how[r], path, width, ids + (int64_t)r * width, values + (int64_t)r * width);
  });
}

// ids and values: [rows, top], top <= 64.
void sd_sample_logprobs(const float* logits, int64_t ld, int rows, int vocab, int threads, const int32_t* tokens,
                        int top, double* chosen, int32_t* ids, double* values) {
  for_units(threads, rows, [&](int r) {
    chosen[r] = logprobs_of(logits + r * ld, vocab, tokens[r], top, ids + (int64_t)r * top, values + (int64_t)r * top);
  });
}
}

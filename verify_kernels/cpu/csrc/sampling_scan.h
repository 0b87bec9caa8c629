// The best tokens of a row by z + G, exact, with the logarithms of a handful of tokens instead of all.
//
// -log(u) >= 1 - u, so G <= -log(1 - u): a token can reach the current best x only if 1 - u <= exp(z - x). That is a
// threshold on its random bits. One exp per block of 64 (with the block's largest z) gives a threshold that is never
// too strict; tokens that pass are computed in full, as the brute-force twin computes them.
#pragma once
#include "sampling_filter.h"

namespace sd {

constexpr double LARGEST_NOISE = 23.0;  // -log(2^-33) is 22.9
constexpr int MAX_WIDTH = 64;

// The best `width` by (x falling, id rising).
struct Best {
  int width, n = 0;
  float x[MAX_WIDTH], z[MAX_WIDTH];
  int32_t id[MAX_WIDTH];
  explicit Best(int w) : width(w) {}
  bool full() const { return n == width; }
  float bound() const { return x[n - 1]; }
  void offer(float value, float z_value, int32_t token) {
    if (full() && !(value > x[n - 1] || (value == x[n - 1] && token < id[n - 1]))) return;
    int at = full() ? n - 1 : n++;
    for (; at > 0 && (value > x[at - 1] || (value == x[at - 1] && token < id[at - 1])); --at) {
      x[at] = x[at - 1];
      z[at] = z[at - 1];
      id[at] = id[at - 1];
    }
    x[at] = value;
    z[at] = z_value;
    id[at] = token;
  }
};

// Smallest bits with which a token of z <= `top` may reach `bound`; false: none may. The margins cover the rounding
// of G and of z + G to float32 and that of exp here.
inline bool least_bits(float top, float bound, uint32_t& least) {
  double margin = (bound < 0 ? -(double)bound : (double)bound) * 0x1p-23 + 1e-5;
  double gap = (double)top - (double)bound + margin;
  if (gap < -LARGEST_NOISE) return false;
  double span = gap < 0 ? (double)fixed_exp((float)gap) * 1.001 * 0x1p32 + 2.0 : 0x1p32;
  least = span < 0x1p32 ? (uint32_t)(0x1p32 - span) : 0;
  return true;
}

inline void scan_noisy_block(const View& view, const sd_sample_row& row, const Cut& cut, int block, Best& best) {
  float top = view.block_max[block] / view.temperature;
  if (view.block_max[block] == DEAD || top < cut.z) return;
  uint32_t least = 0, bits[4][16];
  if (best.full() && !least_bits(top, best.bound(), least)) return;
  philox16(row.seed, (uint64_t)row.position, (uint32_t)block * 16u, bits);
  uint32_t hits = 0;
  for (int lane = 0; lane < 4; ++lane)
    for (int i = 0; i < 16; ++i) hits += bits[lane][i] >= least;
  if (!hits) return;
  for (int v = view.begin(block), end = view.end(block); v < end; ++v) {
    uint32_t own = bits[v & 3][(v >> 2) & 15];
    if (own < least) continue;
    float z = view.z(v);
    if (z == DEAD || !cut.keeps(z, v)) continue;
    uint32_t least_here = 0;
    if (best.full() && (!least_bits(z, best.bound(), least_here) || own < least_here)) continue;
    best.offer(z + gumbel_from_bits(own), z, v);
  }
}

inline void scan_noisy(const View& view, const sd_sample_row& row, const Cut& cut, Best& best) {
  int first = 0;  // the block of the maximum first: a good bound early
  while (view.block_max[first] != view.max) ++first;
  scan_noisy_block(view, row, cut, first, best);
  for (int b = 0; b < view.blocks; ++b)
    if (b != first) scan_noisy_block(view, row, cut, b, best);
}

inline void scan_plain(const View& view, Best& best) {
  for (int b = 0; b < view.blocks; ++b) {
    if (view.block_max[b] == DEAD || (best.full() && !(view.block_max[b] > best.bound()))) continue;
    for (int v = view.begin(b), end = view.end(b); v < end; ++v) {
      float x = live(view.x[v]);
      if (x > DEAD) best.offer(x, x, v);
    }
  }
}

}  // namespace sd

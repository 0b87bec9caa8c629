// Top-k, top-p, min-p. Each keeps a prefix of the tokens in (z falling, id rising) order, so what is left after all
// three is known from its last token: the cut. Found by selection, without sorting the vocabulary.
#pragma once
#include <algorithm>

#include "sampling_view.h"

namespace sd {

struct Cut {
  float z = -FLT_MAX;  // every live token passes
  int32_t id = INT_MAX;
  bool keeps(float value, int32_t token) const { return value > z || (value == z && token <= id); }
};

inline int64_t weight_of(const Candidate& c, float z_max) { return softmax_weight(c.z - z_max); }

// All live tokens with z >= bound; false, and not all of them, when they are more than `limit`.
inline bool collect(const View& view, float bound, size_t limit, std::vector<Candidate>& out) {
  out.clear();
  for (int b = 0; b < view.blocks; ++b) {
    if (out.size() > limit) return false;
    if (view.block_max[b] == DEAD || view.block_max[b] / view.temperature < bound) continue;
    for (int v = view.begin(b); v < view.end(b); ++v) {
      float z = view.z(v);
      if (z >= bound && z > DEAD) out.push_back({z, v});
    }
  }
  return out.size() <= limit;
}

// Weight of every token the cut keeps.
inline int64_t total_weight(const View& view, const Cut& cut) {
  float z_max = view.max / view.temperature;
  int64_t total = 0;
  for (int b = 0; b < view.blocks; ++b) {
    float top = view.block_max[b] / view.temperature;
    if (top < cut.z || !(top - z_max >= NO_WEIGHT_BELOW)) continue;
    int begin = view.begin(b), n = view.end(b) - begin;
    const float* x = view.x + begin;
    if (n == BLOCK && cut.z == -FLT_MAX) {
      for (int i = 0; i < BLOCK; ++i) total += softmax_weight(live(x[i]) / view.temperature - z_max);
    } else {
      for (int i = 0; i < n; ++i) {
        float z = live(x[i]) / view.temperature;
        total += cut.keeps(z, begin + i) ? softmax_weight(z - z_max) : 0;
      }
    }
  }
  return total;
}

// The k-th largest block maximum bounds the k-th largest token from below: a bound that needs no scale.
inline float top_k_bound(const View& view, int k, Scratch& s) {
  if (k > view.blocks) return -FLT_MAX;
  s.sorted.assign(view.block_max, view.block_max + view.blocks);
  std::nth_element(s.sorted.begin(), s.sorted.begin() + (k - 1), s.sorted.end(), std::greater<float>());
  float bound = s.sorted[k - 1];
  return bound == DEAD ? -FLT_MAX : bound / view.temperature;
}

// Last token of the shortest prefix of `c` that weighs `need` together with the `before` ahead of it: quickselect by
// weight.
inline Cut weighted_cut(std::vector<Candidate>& c, double need, int64_t before, float z_max) {
  size_t low = 0, high = c.size();
  while (high - low > 1) {
    size_t middle = (low + high) / 2;
    std::nth_element(c.begin() + low, c.begin() + middle, c.begin() + high);
    int64_t sum = before;
    for (size_t i = low; i < middle; ++i) sum += weight_of(c[i], z_max);
    if ((double)sum >= need) {
      high = middle;
    } else {
      before = sum;
      low = middle;
    }
  }
  return {c[low].z, c[low].id};
}

// Bins of falling z, 1/16 wide; monotone, so a bin holds a contiguous run of the order.
constexpr int BINS = 513;
inline int bin_of(float z, float z_max) {
  float at = (z_max - z) * 16.0f;
  return (int)(at < (float)(BINS - 1) ? at : (float)(BINS - 1));
}

// Flat distributions: weigh every token into its bin, then select within the bin where the sum reaches `need`.
inline Cut binned_cut(const View& view, double need, float z_max, Scratch& s) {
  int64_t bins[BINS] = {}, weight[BLOCK], before = 0;
  int32_t bin[BLOCK];
  for (int b = 0; b < view.blocks; ++b) {
    int begin = view.begin(b), n = view.end(b) - begin;
    if (!(view.block_max[b] / view.temperature - z_max >= NO_WEIGHT_BELOW)) continue;
    float x[BLOCK];
    for (int i = 0; i < BLOCK; ++i) x[i] = i < n ? view.x[begin + i] : DEAD;
    for (int i = 0; i < BLOCK; ++i) {
      float z = live(x[i]) / view.temperature;
      weight[i] = softmax_weight(z - z_max);
      bin[i] = bin_of(z, z_max);
    }
    for (int i = 0; i < BLOCK; ++i) bins[bin[i]] += weight[i];
  }
  int at = 0;
  while (at < BINS - 1 && (double)(before + bins[at]) < need) before += bins[at++];
  s.candidates.clear();
  for (int b = 0; b < view.blocks; ++b) {
    if (view.block_max[b] == DEAD || bin_of(view.block_max[b] / view.temperature, z_max) > at) continue;
    int hits = 0;  // counted by the vector unit: most blocks have none
    for (int v = view.begin(b), end = view.end(b); v < end; ++v) hits += bin_of(view.z(v), z_max) == at;
    for (int v = view.begin(b), end = hits ? view.end(b) : 0; v < end; ++v) {
      float z = view.z(v);
      if (z > DEAD && bin_of(z, z_max) == at) s.candidates.push_back({z, v});
    }
  }
  return weighted_cut(s.candidates, need, before, z_max);
}

inline Cut top_p_cut(const View& view, double top_p, Scratch& s) {
  constexpr float NEAR = 4.0f;  // most distributions have their mass here, on few tokens
  constexpr size_t FEW = 4096;
  float z_max = view.max / view.temperature;
  double need = top_p * (double)total_weight(view, Cut());
  if (collect(view, z_max - NEAR, FEW, s.candidates)) {
    int64_t sum = 0;
    for (const Candidate& c : s.candidates) sum += weight_of(c, z_max);
    if ((double)sum >= need) return weighted_cut(s.candidates, need, 0, z_max);
  }
  return binned_cut(view, need, z_max, s);
}

// The row must have a live logit.
inline Cut make_cut(const View& view, const sd_sample_row& row, Scratch& s) {
  Cut cut;
  float z_max = view.max / view.temperature;
  bool by_k = row.top_k > 0 && row.top_k < view.vocab, by_p = row.top_p < 1.0;
  if (by_k) {
    collect(view, top_k_bound(view, row.top_k, s), SIZE_MAX, s.candidates);
    std::vector<Candidate>& c = s.candidates;
    if (c.size() >= (size_t)row.top_k) {
      std::nth_element(c.begin(), c.begin() + (row.top_k - 1), c.end());
      c.resize(row.top_k);
      cut = {c.back().z, c.back().id};
    }
    if (by_p) {
      int64_t total = 0;
      for (const Candidate& one : c) total += weight_of(one, z_max);
      cut = weighted_cut(c, row.top_p * (double)total, 0, z_max);
    }
  } else if (by_p) {
    cut = top_p_cut(view, row.top_p, s);
  }
  float floor = z_max + row.log_min_p;
  return floor > cut.z ? Cut{floor, INT_MAX} : cut;
}

}  // namespace sd

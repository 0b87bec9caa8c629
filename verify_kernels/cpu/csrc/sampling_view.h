// One row of logits as the sampler sees it: live values, edits applied, the maximum of every block of 64.
#pragma once
#include <cfloat>
#include <climits>
#include <vector>

#include "sampling_math.h"

// 128 bytes: 40 from SamplingPolicy.record, 16 from NativeSampling, 72 from SequenceEdits.record.
struct sd_sample_row {
  uint64_t seed;
  double top_p;
  float temperature;  // 0: greedy
  float log_min_p;    // -inf: off
  float repetition, presence, frequency;
  int32_t top_k;  // 0: off
  int64_t position;
  int32_t path_begin, n_path;  // pairs (token, count) in the call's path array
  const int32_t* seen_ids;
  const int32_t* seen_counts;
  int64_t n_seen;
  const int32_t* bias_ids;
  const float* bias;
  int32_t n_bias, mask_words;
  const uint32_t* mask;  // null: all allowed
  const int32_t* banned;
  int64_t n_banned;
};
static_assert(sizeof(sd_sample_row) == 128, "the Python side packs 128 bytes");

namespace sd {

constexpr int BLOCK = PHILOX_TOKENS;
constexpr float LIMIT = 1e30f;
constexpr float DEAD = -__builtin_inff();

// Logits that are NaN or not above -1e30 count as masked, those above 1e30 as 1e30.
inline float live(float x) {
  float y = x < LIMIT ? x : LIMIT;
  return x > -LIMIT ? y : DEAD;
}

struct Candidate {
  float z;
  int32_t id;
  bool operator<(const Candidate& o) const { return z > o.z || (z == o.z && id < o.id); }  // comes before
};

struct Scratch {
  std::vector<float> edited, block_max, sorted;
  std::vector<Candidate> candidates;
};

struct View {
  const float* x;  // processed logits; call live() on each value read
  int vocab, blocks;
  const float* block_max;  // of live values
  float max;               // DEAD: no live logit
  float temperature;       // 1 when greedy
  float z(int v) const { return live(x[v]) / temperature; }
  int begin(int block) const { return block * BLOCK; }
  int end(int block) const { return block * BLOCK + BLOCK < vocab ? block * BLOCK + BLOCK : vocab; }
};

inline float penalised(float x, int32_t count, const sd_sample_row& row) {
  float y = x > 0 ? x / row.repetition : x * row.repetition;
  y = y - row.frequency * (float)count;
  return count > 0 ? y - row.presence : y;
}

inline void apply_mask(float* z, int vocab, const uint32_t* mask, int words) {
  for (int w = 0; w * 32 < vocab; ++w) {
    uint32_t bits = w < words ? mask[w] : 0;
    if (bits == ~0u) continue;
    int n = vocab - w * 32 < 32 ? vocab - w * 32 : 32;
    for (int i = 0; i < n; ++i) z[w * 32 + i] = bits >> i & 1 ? z[w * 32 + i] : DEAD;
  }
}

// Penalties, bias, masks, in this order, on a copy. Path counts override the base's: both start from the raw logit.
inline const float* apply_edits(const float* raw, int vocab, const sd_sample_row& row, const int32_t* path, Scratch& s) {
  if (row.n_seen + row.n_path + row.n_bias + row.n_banned == 0 && !row.mask) return raw;
  s.edited.resize(vocab);
  float* z = s.edited.data();
  for (int v = 0; v < vocab; ++v) z[v] = live(raw[v]);
  for (int64_t i = 0; i < row.n_seen; ++i) {
    int v = row.seen_ids[i];
    if (v < vocab) z[v] = penalised(live(raw[v]), row.seen_counts[i], row);
  }
  for (int i = row.path_begin; i < row.path_begin + row.n_path; ++i) {
    int v = path[2 * i];
    if (v < vocab) z[v] = penalised(live(raw[v]), path[2 * i + 1], row);
  }
  for (int i = 0; i < row.n_bias; ++i)
    if (row.bias_ids[i] < vocab) z[row.bias_ids[i]] += row.bias[i];
  if (row.mask) apply_mask(z, vocab, row.mask, row.mask_words);
  for (int64_t i = 0; i < row.n_banned; ++i)
    if (row.banned[i] < vocab) z[row.banned[i]] = DEAD;
  return z;
}

inline float block_maximum(const float* x, int n) {
  float m[16];
  for (int i = 0; i < 16; ++i) m[i] = DEAD;
  if (n == BLOCK) {
    for (int j = 0; j < BLOCK; j += 16)
      for (int i = 0; i < 16; ++i) {
        float y = live(x[j + i]);
        m[i] = y > m[i] ? y : m[i];
      }
  } else {
    for (int j = 0; j < n; ++j) {
      float y = live(x[j]);
      m[j & 15] = y > m[j & 15] ? y : m[j & 15];
    }
  }
  for (int half = 8; half; half >>= 1)
    for (int i = 0; i < half; ++i) m[i] = m[i + half] > m[i] ? m[i + half] : m[i];
  return m[0];
}

inline View make_view(const float* x, int vocab, float temperature, Scratch& s) {
  View view{x, vocab, (vocab + BLOCK - 1) / BLOCK, nullptr, DEAD, temperature > 0 ? temperature : 1.0f};
  s.block_max.resize(view.blocks);
  view.block_max = s.block_max.data();
  for (int b = 0; b < view.blocks; ++b) {
    float m = s.block_max[b] = block_maximum(x + view.begin(b), view.end(b) - view.begin(b));
    view.max = m > view.max ? m : view.max;
  }
  return view;
}

// The lowest id that holds the maximum; -1 when nothing is live.
inline int32_t argmax(const View& view) {
  if (view.max == DEAD) return -1;
  for (int b = 0; b < view.blocks; ++b) {
    if (view.block_max[b] != view.max) continue;
    for (int v = view.begin(b); v < view.end(b); ++v)
      if (live(view.x[v]) == view.max) return v;
  }
  return -1;
}

}  // namespace sd

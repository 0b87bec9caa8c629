// Records of the sampling kernels, as the Python side packs them.
#pragma once
#include <cstdint>

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

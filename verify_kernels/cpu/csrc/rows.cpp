// Around the layers: the KV rows of an accepted path, and memory bandwidth.
#include <atomic>
#include <cstdint>
#include <cstring>

#include "parallel.h"
#include "vec.h"

namespace {

constexpr int PAGE = 64;      // tokens of a KV page
constexpr int AHEAD = 16384;  // bytes prefetched before their use

}  // namespace

extern "C" {

// Copies what one pool holds of token slots from[i] to to[i] (page * 64 + lane), i ascending, in all `layers` of `pages`
// pages with `heads` heads each. A head's page is [planes, 64, bytes]: transposed keys are many planes. An accepted path
// moves towards the front and its order is kept, so a copy never overwrites a source still to be read.
void sd_move_kv(uint8_t* pool, int32_t layers, int64_t pages, int32_t heads, int32_t planes, int32_t bytes,
                const int64_t* from, const int64_t* to, int32_t n) {
  const auto at = [&](int layer, int64_t slot, int head) {
    return pool + (((layer * pages + slot / PAGE) * heads + head) * planes * PAGE + slot % PAGE) * bytes;
  };
  for (int layer = 0; layer < layers; ++layer) {
    for (int i = 0; i < n; ++i) {
      for (int h = 0; h < heads; ++h) {
        const uint8_t* source = at(layer, from[i], h);
        uint8_t* target = at(layer, to[i], h);
        for (int d = 0; d < planes; ++d) memcpy(target + d * PAGE * bytes, source + d * PAGE * bytes, bytes);
      }
    }
  }
}

// Reads `bytes` (a multiple of 256 KiB) with `threads` threads and returns a checksum; measures memory bandwidth.
uint64_t sd_read_bandwidth(const uint8_t* data, int64_t bytes, int32_t threads) {
  std::atomic<uint64_t> total{0};
  const int64_t unit = 1 << 18;
  sd::for_units(threads, (int)(bytes / unit), [&](int u) {
    sd::i16v sum = sd::splat_bits(0);
    const char* p = (const char*)data + u * unit;
    for (int64_t i = 0; i < unit; i += 256) {
      for (int line = 0; line < 256; line += 64) __builtin_prefetch(p + i + AHEAD + line);
      const float* v = (const float*)(p + i);
      const sd::i16v a = sd::bits_of(sd::load16(v)), b = sd::bits_of(sd::load16(v + 16));
      const sd::i16v c = sd::bits_of(sd::load16(v + 32)), d = sd::bits_of(sd::load16(v + 48));
      sum = sum + (a ^ b) + (c ^ d);
    }
    total.fetch_add((uint32_t)sd::sum_bits(sum));
  });
  return total;
}
}

#include <atomic>
#include <cstdint>

#include "parallel.h"
#include "vec.h"

// Reads `bytes` (a multiple of 256 KiB) with `threads` threads and returns a checksum; measures memory bandwidth.
extern "C" uint64_t sd_read_bandwidth(const uint8_t* data, int64_t bytes, int32_t threads) {
  constexpr int AHEAD = 16384;  // bytes prefetched before their use
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

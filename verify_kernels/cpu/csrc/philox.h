// Philox4x32-10 (Salmon et al., SC 2011), sixteen calls at a time: 64 tokens' bits in plain loops GCC vectorises.
// The numpy twin is verify_kernels/noise.py.
#pragma once
#include <cstdint>

namespace sd {

constexpr int PHILOX_TOKENS = 64;

// bits[lane][i] belongs to token 4 * (first_call + i) + lane. Counter words: position low, high, call, 0.
inline void philox16(uint64_t key, uint64_t position, uint32_t first_call, uint32_t bits[4][16]) {
  uint32_t c0[16], c1[16], c2[16], c3[16];
  for (int i = 0; i < 16; ++i) {
    c0[i] = (uint32_t)position;
    c1[i] = (uint32_t)(position >> 32);
    c2[i] = first_call + i;
    c3[i] = 0;
  }
  uint32_t k0 = (uint32_t)key, k1 = (uint32_t)(key >> 32);
  for (int round = 0; round < 10; ++round) {
    for (int i = 0; i < 16; ++i) {
      uint64_t even = (uint64_t)0xD2511F53u * c0[i], odd = (uint64_t)0xCD9E8D57u * c2[i];
      uint32_t n0 = (uint32_t)(odd >> 32) ^ c1[i] ^ k0, n2 = (uint32_t)(even >> 32) ^ c3[i] ^ k1;
      c1[i] = (uint32_t)odd;
      c3[i] = (uint32_t)even;
      c0[i] = n0;
      c2[i] = n2;
    }
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  for (int i = 0; i < 16; ++i) {
    bits[0][i] = c0[i];
    bits[1][i] = c1[i];
    bits[2][i] = c2[i];
    bits[3][i] = c3[i];
  }
}

}  // namespace sd

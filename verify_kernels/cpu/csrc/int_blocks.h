// Integer products of a chunk, exact in 32 bits: acc[m][n] = sum_k w[n][k] * q[m][k].
//
// Each file defines int8_block for up to MAX_MR rows (a tree's rows ride on the stream of weights that one row needs
// anyway), and AHEAD, how many bytes before their use a block that is alone asks for its weights.
#pragma once
#if defined(__AVX512VNNI__)
#include "int_blocks_vnni.h"
#elif defined(__AVX2__)
#include "int_blocks_avx2.h"
#else
#include "int_blocks_plain.h"
#endif

namespace sd {

// Block `b` of `blocks` over a chunk of `bytes` at `w`. One block asks for what it will need itself soon; several ask
// for a share each of the next chunk, or memory would rest while all but the first compute.
inline Fetch fetch_share(const void* w, int bytes, int b, int blocks) {
  if (blocks == 1) return {(const char*)w + AHEAD, 128};
  return {(const char*)w + bytes + (int64_t)bytes * b / blocks, (128 + blocks - 1) / blocks};
}

}  // namespace sd

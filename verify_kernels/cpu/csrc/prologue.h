// What happens to a row before the product: RMS norm or gated activation, then int8 quantisation.
#pragma once
#include <cmath>

#include "linear.h"
#include "vec.h"

namespace sd {

// Input channels that share one activation scale. Integer sums inside a chunk are exact, and chunks are added
// in order, so a row's result depends on nothing but the row.
constexpr int CHUNK = 256;

inline float rms_scale(const float* x, int n, float eps) {
  v16 sum = splat(0);
  int i = 0;
  for (; i + 16 <= n; i += 16) {
    v16 v = load16(x + i);
    sum = fma16(v, v, sum);
  }
  float total = sum16(sum);
  for (; i < n; ++i) total = fma1(x[i], x[i], total);
  return 1.0f / std::sqrt(total / n + eps);
}

inline void rms_norm(const float* x, const float* w, int n, float eps, float* out) {
  const float s = rms_scale(x, n, eps);
  int i = 0;
  for (; i + 16 <= n; i += 16) store16(out + i, load16(x + i) * splat(s) * load16(w + i));
  for (; i < n; ++i) out[i] = x[i] * s * w[i];
}

// out += norm(x): for families that norm a block's output before adding it.
inline void add_normed(const float* x, const float* w, int n, float eps, float* out) {
  const float s = rms_scale(x, n, eps);
  for (int i = 0; i < n; ++i) out[i] += x[i] * s * w[i];
}

inline v16 silu16(v16 g) { return g / (splat(1.0f) + exp16(-g)); }

// 0.5 g (1 + tanh(u)) = g / (1 + exp(-2u)), u = sqrt(2/pi) (g + 0.044715 g^3)
inline v16 gelu16(v16 g) {
  v16 u = splat(0.7978845608028654f) * fma16(splat(0.044715f) * g * g, g, g);
  return g / (splat(1.0f) + exp16(splat(-2.0f) * u));
}

template <class Act>
void gate(const float* src, int n, float* out, Act act) {
  int i = 0;
  for (; i + 16 <= n; i += 16) store16(out + i, act(load16(src + i)) * load16(src + n + i));
  if (i < n) {  // the ragged end goes through the same vector code, so that every lane rounds alike
    float g[16] = {0}, u[16] = {0}, r[16];
    memcpy(g, src + i, (n - i) * 4);
    memcpy(u, src + n + i, (n - i) * 4);
    store16(r, act(load16(g)) * load16(u));
    memcpy(out + i, r, (n - i) * 4);
  }
}

// The Hadamard rotation of `n` floats (a power of two), in place, unscaled: butterflies at distance 1, 2, 4, ...
inline void hadamard(float* x, int n) {
  if (n < 16) {
    for (int h = 1; h < n; h *= 2)
      for (int i = 0; i < n; ++i)
        if (!(i & h)) {
          const float a = x[i], b = x[i + h];
          x[i] = a + b, x[i + h] = a - b;
        }
    return;
  }
  for (int i = 0; i < n; i += 16) {  // distances inside a vector
    store16(x + i, butterfly16<8>(butterfly16<4>(butterfly16<2>(butterfly16<1>(load16(x + i))))));
  }
  for (int h = 16; h < n; h *= 2) {
    for (int i = 0; i < n; i += 16) {
      if (i & h) continue;
      const v16 a = load16(x + i), b = load16(x + i + h);
      store16(x + i, a + b);
      store16(x + i + h, a - b);
    }
  }
}

// Rotates a chunk block by block (256, or falling powers of two) into `out`, as verify_kernels/packed_weights.py does.
inline void rotate_chunk(const float* x, int n, float* out) {
  memcpy(out, x, (size_t)n * 4);
  for (int start = 0; start < n;) {
    int size = CHUNK;
    while (size > n - start) size /= 2;
    hadamard(out + start, size);
    const float scale = 1.0f / std::sqrt((float)size);
    for (int i = 0; i < size; ++i) out[start + i] *= scale;
    start += size;
  }
}

// One chunk to int8: scale = max|x| / 127, round half to even; also 128 * sum, which undoes the weights' offset.
inline void quantise_chunk(const float* x, int n, int8_t* q, float* scale, int32_t* offset) {
  v16 top = splat(0);
  int i = 0;
  for (; i + 16 <= n; i += 16) top = max16(top, abs16(load16(x + i)));
  float peak = hmax16(top);
  for (; i < n; ++i) peak = std::fabs(x[i]) > peak ? std::fabs(x[i]) : peak;
  *scale = peak / 127.0f;
  const float inverse = peak > 0 ? 127.0f / peak : 0.0f;
  int32_t sum = 0;
  for (i = 0; i < n; ++i) {
    // Adding 1.5 * 2^23 rounds half to even and leaves the integer in the low bits.
    float shifted = x[i] * inverse + 12582912.0f;
    int32_t bits;
    memcpy(&bits, &shifted, 4);
    int32_t value = bits - 0x4B400000;
    q[i] = (int8_t)value;
    sum += value;
  }
  *offset = 128 * sum;
}

// A whole chunk, rotated and rounded in registers: the same as rotate_chunk and quantise_chunk, at a third of the time.
inline void prepare_chunk(const float* x, int8_t* q, float* scale, int32_t* offset) {
  constexpr int N = CHUNK / 16;
  v16 v[N];
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) v[i] = butterfly16<8>(butterfly16<4>(butterfly16<2>(butterfly16<1>(load16(x + 16 * i)))));
#pragma GCC unroll 4
  for (int h = 1; h < N; h *= 2) {
#pragma GCC unroll 16
    for (int i = 0; i < N; ++i) {
      if (i & h) continue;
      const v16 a = v[i], b = v[i + h];
      v[i] = a + b, v[i + h] = a - b;
    }
  }
  v16 top = splat(0);
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) top = max16(top, abs16(v[i]));
  const float peak = hmax16(top);  // of the unscaled rotation; its factor 1 / sqrt(256) goes into the scale
  *scale = peak / 127.0f / 16.0f;
  const v16 inverse = splat(peak > 0 ? 127.0f / peak : 0.0f);
  i16v sum = splat_bits(0);
#pragma GCC unroll 16
  for (int i = 0; i < N; ++i) {
    const i16v value = bits_of(v[i] * inverse + splat(12582912.0f)) - splat_bits(0x4B400000);
    sum = sum + value;
    store_bytes(q + 16 * i, value);
  }
  *offset = 128 * sum_bits(sum);
}

// Row `from` of src to row `row` of `rows`.
inline void prepare_row(const sd_linear_args& a, int from, int row, int rows) {
  const float* src = a.src + from * a.ld_src;
  float* x = a.x + (int64_t)row * a.k_pad;
  const float* ready = x;
  const bool blocks = is_block_format(a.kind), quantised = a.kind == SD_INT8;
  switch (a.pre) {
    case SD_PRE_RMS: rms_norm(src, a.pre_norm, a.k, a.eps, x); break;
    case SD_PRE_SILU: gate(src, a.k, x, silu16); break;
    case SD_PRE_GELU: gate(src, a.k, x, gelu16); break;
    default:
      if (quantised || blocks) ready = src;
      else memcpy(x, src, (size_t)a.k * 4);
  }
  if (blocks) quant_row(a, ready, row, rows);
  if (!quantised) return;
  const int chunks = (a.k_pad + CHUNK - 1) / CHUNK;
  int8_t* q = a.q + (int64_t)row * a.k_pad;
  for (int c = 0; c < chunks; ++c) {
    const int begin = c * CHUNK, n = (a.k - begin < CHUNK ? a.k - begin : CHUNK);
    float* scale = a.q_scale + row * chunks + c;
    int32_t* offset = a.q_sum + row * chunks + c;
    if (n == CHUNK) {
      prepare_chunk(ready + begin, q + begin, scale, offset);
      continue;
    }
    float rotated[CHUNK];
    rotate_chunk(ready + begin, n, rotated);
    quantise_chunk(rotated, n, q + begin, scale, offset);
  }
  for (int i = a.k; i < a.k_pad; ++i) q[i] = 0;
}

}  // namespace sd

// Runs linear layers that a file describes: for kernels built for a processor that this Python does not run on.
//
// Of each layer standard input has eight int32 (kind, n, k, k_pad, tiles, rows, bytes of weights, number of scales),
// one more (whether inputs have an order of their own), then weights, scales, order [k] and rows [rows, k]. Standard
// output gets float32 [rows, n].
#include <cstdio>
#include <vector>

#include "linear.h"

namespace {

template <class T>
std::vector<T> read(size_t count) {
  std::vector<T> values(count);
  if (count && fread(values.data(), sizeof(T), count, stdin) != count) values.clear();
  return values;
}

}  // namespace

int main() {
  for (;;) {
    const std::vector<int32_t> head = read<int32_t>(9);
    if (head.empty()) return 0;
    sd_linear_args a{};
    a.kind = head[0], a.n = head[1], a.k = head[2], a.k_pad = head[3], a.tiles = head[4], a.threads = 2;
    const int64_t rows = head[5], wide = (a.k_pad + 255) / 256 * 256;
    const auto weight = read<uint8_t>(head[6]);
    const auto scale = read<float>(head[7]);
    const auto order = read<int32_t>(head[8] ? a.k : 0);
    const auto src = read<float>(rows * a.k);
    std::vector<float> dst(rows * a.n), x(rows * wide), q_scale(rows * wide);
    std::vector<int32_t> sum(rows * wide);
    std::vector<int8_t> q(2 * rows * wide);  // values, and room for their scales and sums
    a.ld_src = a.k, a.ld_dst = a.n;
    a.weight = weight.data(), a.weight_scale = scale.empty() ? nullptr : scale.data();
    a.order = order.empty() ? nullptr : order.data();
    a.src = src.data(), a.dst = dst.data();
    a.x = x.data(), a.q = q.data(), a.q_scale = q_scale.data(), a.q_sum = sum.data();
    sd_linear(&a, (int32_t)rows);
    fwrite(dst.data(), sizeof(float), dst.size(), stdout);
  }
}

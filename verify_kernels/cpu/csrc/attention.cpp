// A row's keys are reduced in logical order, in blocks at absolute multiples of 64. Neither the slots of the keys nor
// the rest of the batch changes a bit, so a tree node gets the result of plain decode.
#include "attention.h"

#include <algorithm>
#include <climits>
#include <cmath>

#include "attention_kv.h"
#include "parallel.h"
#include "prologue.h"
#include "vec.h"

namespace sd {
namespace {

constexpr int BLOCK = 64;      // keys per block = tokens per page
constexpr int STREAMS = 6;     // (node, head) pairs computed together: 6 x columns of accumulators, keys, 1 query
constexpr int MAX_HEADS = 6;   // query heads of one work item
constexpr int MAX_DIM = CHUNK;  // values in a head, rounded to int8 as one chunk is
constexpr int NODE_BLOCK = 8;  // nodes of one work item: a K/V block stays in cache while they all read it
constexpr int MAX_PATH = 64;   // path keys a block can hold

struct State {  // running softmax of one (node, head)
  float peak, sum;
  float acc[MAX_DIM];
};

// Prefetches N values at `p`: the processor's own prefetching stops at every 4 KiB, and pages lie anywhere.
template <int N, class T>
inline void fetch(const T* p) {
  constexpr int LINE = 64 / sizeof(T);
  for (int i = 0; i < N; i += LINE) __builtin_prefetch(p + i);
}

template <class T>
struct ScatteredKeys {  // keys of a block whose slot is not their position
  int n = 0;
  int lane[MAX_PATH];
  const T* k[MAX_PATH];  // element d at k[d * BLOCK]
};

// A block of keys and values as one node sees it: keys [lo, hi) of it.
template <class T>
struct KeyBlock {
  const T* k;          // [dim, 64]
  const T* v[BLOCK];   // [dim] each
  const float *k_scale = nullptr, *v_scale = nullptr;  // [64], of int8
  const T* next;       // keys of the block after this one, or of this one
  int lo = 0, hi = BLOCK;
  ScatteredKeys<T> scattered;
};

// scores[h][0..63] = q_h . K of one block, as many columns of 16 keys at once as the registers hold. Prefetches the
// block's values, which are as many bytes and are read next.
template <int H, class T>
void block_scores(const KeyBlock<T>& block, const float* const* q, int dim, float (*scores)[BLOCK]) {
  constexpr int COLUMNS = columns_for(H);
  const T* ahead = block.v[0];
  for (int column = 0; column < BLOCK; column += 16 * COLUMNS) {
    v16 s[H][COLUMNS];
    for (int h = 0; h < H; ++h)
      for (int j = 0; j < COLUMNS; ++j) s[h][j] = splat(0);
    for (int d = 0; d < dim; ++d) {
      const int64_t at = (int64_t)d * BLOCK + column;
      fetch<16 * COLUMNS>(ahead + at);
      v16 own[COLUMNS];
      load_stored<COLUMNS>(block.k + at, own);
      for (int h = 0; h < H; ++h) {
        const v16 x = splat(q[h][d]);
        for (int j = 0; j < COLUMNS; ++j) s[h][j] = fma16(x, own[j], s[h][j]);
      }
    }
    for (int h = 0; h < H; ++h) store_sums<COLUMNS, T>(&scores[h][column], s[h]);
  }
}

// The same sum as one lane of block_scores, for scattered keys; several heads at once hide the latency.
template <int H, class T>
void scattered_scores(const ScatteredKeys<T>& scattered, const float* const* q, int dim, float (*scores)[BLOCK]) {
  for (int i = 0; i < scattered.n; ++i) {
    float s[H] = {0};
    for (int d = 0; d < dim; ++d) {
      const float x = widen(scattered.k[i][(int64_t)d * BLOCK]);
      for (int h = 0; h < H; ++h) s[h] = fma1(q[h][d], x, s[h]);
    }
    for (int h = 0; h < H; ++h) scores[h][scattered.lane[i]] = s[h];
  }
}

// acc_h += sum_j p_h[j] V[j] over keys [lo, hi), j ascending. Prefetches the next block's keys.
template <int H, class T>
void add_values(const KeyBlock<T>& block, float (*p)[BLOCK], int dim, State* const* state) {
  constexpr int COLUMNS = columns_for(H), WIDTH = 16 * COLUMNS;
  int d = 0;
  for (; d + WIDTH <= dim; d += WIDTH) {
    v16 a[H][COLUMNS];
    for (int h = 0; h < H; ++h) load_sums<COLUMNS, T>(state[h]->acc + d, a[h]);
    for (int key = block.lo; key < block.hi; ++key) {
      fetch<WIDTH>(block.next + (int64_t)key * dim + d);
      v16 own[COLUMNS];
      load_stored<COLUMNS>(block.v[key] + d, own);
      for (int h = 0; h < H; ++h) {
        const v16 x = splat(p[h][key]);
        for (int j = 0; j < COLUMNS; ++j) a[h][j] = fma16(x, own[j], a[h][j]);
      }
    }
    for (int h = 0; h < H; ++h) store_sums<COLUMNS, T>(state[h]->acc + d, a[h]);
  }
  for (; d < dim; ++d)
    for (int h = 0; h < H; ++h)
      for (int key = block.lo; key < block.hi; ++key)
        state[h]->acc[d] = fma1(p[h][key], widen(block.v[key][d]), state[h]->acc[d]);
}

// Each of 64 numbers times its key's scale.
inline void times_scale(float* x, const float* scale) {
  for (int j = 0; j < BLOCK; j += 16) store16(x + j, load16(x + j) * load16(scale + j));
}

// Turns scores into probabilities relative to the running peak; keys outside [lo, hi) get 0.
void softmax_block(float* scores, int lo, int hi, int dim, State& state) {
  for (int j = 0; j < lo; ++j) scores[j] = -INFINITY;
  for (int j = hi; j < BLOCK; ++j) scores[j] = -INFINITY;
  const v16 top = max16(max16(load16(scores), load16(scores + 16)), max16(load16(scores + 32), load16(scores + 48)));
  const float block_peak = hmax16(top), peak = block_peak > state.peak ? block_peak : state.peak;
  const float shrink = peak == state.peak ? 1.0f : exp1(state.peak - peak);  // exp(0) is exactly 1
  v16 sum = splat(0);
  for (int j = 0; j < BLOCK; j += 16) {
    const v16 p = exp16(load16(scores + j) - splat(peak));
    store16(scores + j, p);
    sum = sum + p;
  }
  state.sum = fma1(state.sum, shrink, sum16(sum));
  state.peak = peak;
  if (shrink != 1.0f)
    for (int d = 0; d < dim; ++d) state.acc[d] *= shrink;
}

// One block for H (node, head) pairs that see the same keys of it.
template <int H, class T>
void heads_block(const KeyBlock<T>& block, int dim, const float* const* q, State* const* state) {
  alignas(64) float scores[H][BLOCK];
  block_scores<H>(block, q, dim, scores);
  if (block.scattered.n) scattered_scores<H>(block.scattered, q, dim, scores);
  for (int h = 0; h < H; ++h) {
    if constexpr (sizeof(T) == 1) times_scale(scores[h], block.k_scale);
    softmax_block(scores[h], block.lo, block.hi, dim, *state[h]);
    if constexpr (sizeof(T) == 1) times_scale(scores[h], block.v_scale);
  }
  add_values<H>(block, scores, dim, state);
}

// out = rope(norm(x)) * scale, for one head.
void rotate_head(const float* x, const float* norm, float eps, const float* cos, const float* sin, int dim,
                 float scale, float* out) {
  float y[MAX_DIM];
  if (norm) rms_norm(x, norm, dim, eps, y);
  else memcpy(y, x, dim * 4);
  const int half = dim / 2;
  for (int i = 0; i < half; ++i) {
    const float a = y[i], b = y[i + half];
    out[i] = (a * cos[i] - b * sin[i]) * scale;
    out[i + half] = (b * cos[i] + a * sin[i]) * scale;
  }
}

// A key as it is stored, or a query for such keys. int8 has one scale per head, so keys and queries are rotated by the
// same Hadamard matrix: it keeps their product and spreads the few large channels that key biases make over all.
template <class T>
void keyed_head(const float* x, const float* norm, float eps, const float* cos, const float* sin, int dim, float scale,
                float* out) {
  if constexpr (sizeof(T) == 1) {
    float turned[MAX_DIM];
    rotate_head(x, norm, eps, cos, sin, dim, scale, turned);
    rotate_chunk(turned, dim, out);
  } else {
    rotate_head(x, norm, eps, cos, sin, dim, scale, out);
  }
}

template <class T>
void write_row(const sd_attention_args& a, const sd_batch& b, int row) {
  const int dim = a.head_dim, entry = b.entry_of[row], ctx = b.entry_ctx[entry];
  const int position = ctx + b.depth[row], slot = ctx + (row - b.entry_start[entry]);
  const int64_t page = b.page_table[(int64_t)entry * b.max_pages + slot / BLOCK];
  const int lane = slot % BLOCK;
  const float *cos = a.cos + (int64_t)position * (dim / 2), *sin = a.sin + (int64_t)position * (dim / 2);
  const float* x = a.qkv + (int64_t)row * (a.n_heads + 2 * a.n_kv_heads) * dim;
  float* q = a.q + (int64_t)row * a.n_heads * dim;
  for (int h = 0; h < a.n_heads; ++h, x += dim)
    keyed_head<T>(x, a.q_norm, a.eps, cos, sin, dim, a.scale, q + h * dim);
  for (int h = 0; h < a.n_kv_heads; ++h, x += dim) {
    float k[MAX_DIM];
    keyed_head<T>(x, a.k_norm, a.eps, cos, sin, dim, 1.0f, k);
    const int64_t head = page * a.n_kv_heads + h;
    float* scale = sizeof(T) == 1 ? a.k_scale + head * BLOCK + lane : nullptr;
    store_head(k, dim, (T*)a.k_pool + head * dim * BLOCK + lane, BLOCK, scale);
  }
  for (int h = 0; h < a.n_kv_heads; ++h, x += dim) {
    const int64_t head = page * a.n_kv_heads + h;
    float* scale = sizeof(T) == 1 ? a.v_scale + head * BLOCK + lane : nullptr;
    store_head(x, dim, (T*)a.v_pool + (head * BLOCK + lane) * dim, 1, scale);
  }
}

template <class T>
struct View {  // one entry's cache as one KV head sees it
  const sd_attention_args& a;
  const int32_t* pages;
  int head;
  int64_t head_at(int block) const { return (int64_t)pages[block] * a.n_kv_heads + head; }
  const T* k(int block) const { return (const T*)a.k_pool + head_at(block) * a.head_dim * BLOCK; }
  const T* v(int block) const { return (const T*)a.v_pool + head_at(block) * BLOCK * a.head_dim; }
  const float* k_scale(int block) const { return a.k_scale + head_at(block) * BLOCK; }
  const float* v_scale(int block) const { return a.v_scale + head_at(block) * BLOCK; }

  // The whole of a block; `last` is the last one that will be read.
  void whole(int block, int last, KeyBlock<T>& out) const {
    out.k = k(block);
    out.next = k(block < last ? block + 1 : block);
    for (int j = 0; j < BLOCK; ++j) out.v[j] = v(block) + (int64_t)j * a.head_dim;
    if constexpr (sizeof(T) == 1) out.k_scale = k_scale(block), out.v_scale = v_scale(block);
  }
};

// One node's own scales of a block, where some of its keys are scattered.
struct OwnScales {
  float k[BLOCK], v[BLOCK];
};

// Adds to `keys` the path keys of `row` in `block` whose slot is not their position.
template <class T>
void put_scattered(const View<T>& view, const sd_batch& b, int row, int block, KeyBlock<T>& keys, OwnScales& own) {
  const int entry = b.entry_of[row], first = b.entry_start[entry], ctx = b.entry_ctx[entry];
  if constexpr (sizeof(T) == 1) {
    memcpy(own.k, keys.k_scale, sizeof own.k);
    memcpy(own.v, keys.v_scale, sizeof own.v);
    keys.k_scale = own.k, keys.v_scale = own.v;
  }
  for (int j = row - first; j >= 0 && b.depth[first + j] >= b.diverge[row]; j = b.parent[first + j]) {
    const int position = ctx + b.depth[first + j], slot = ctx + j;
    if (position / BLOCK != block) continue;
    const int i = keys.scattered.n++, lane = position % BLOCK, page = slot / BLOCK, at = slot % BLOCK;
    keys.scattered.lane[i] = lane;
    keys.scattered.k[i] = view.k(page) + at;
    keys.v[lane] = view.v(page) + (int64_t)at * view.a.head_dim;
    if constexpr (sizeof(T) == 1) own.k[lane] = view.k_scale(page)[at], own.v[lane] = view.v_scale(page)[at];
  }
}

// What one row sees of one block: keys [lo, hi), and whether they all lie at their positions' slots.
struct VisibleRange {
  int lo, hi;
  bool scattered;
};

VisibleRange visible_range(const sd_attention_args& a, const sd_batch& b, int ctx, int row, int block) {
  const int position = ctx + b.depth[row], base = block * BLOCK;
  const int floor = a.window && position - a.window + 1 > 0 ? position - a.window + 1 : 0;
  return {floor > base ? floor - base : 0, position + 1 - base < BLOCK ? position + 1 - base : BLOCK,
          b.diverge[row] <= b.depth[row] && ctx + b.diverge[row] < base + BLOCK};
}

// One work item: nodes [begin, end) of one entry, query heads [head, head + heads) of one KV head. Nodes that see the
// whole of a block share its loads. Bundling changes no result, as each stream has its own accumulators.
template <class T>
struct WorkItem {
  const sd_attention_args& a;
  const sd_batch& b;
  View<T> view;
  int begin, end, head, heads, ctx;
  State (*state)[MAX_HEADS];

  void bundle(const KeyBlock<T>& keys, const int* rows, int n) const {
    const float* q[STREAMS];
    State* s[STREAMS];
    int filled = 0;
    for (int i = 0; i < n; ++i) {
      for (int h = 0; h < heads; ++h) {
        q[filled] = a.q + ((int64_t)rows[i] * a.n_heads + head + h) * a.head_dim;
        s[filled++] = &state[rows[i] - begin][h];
        if (filled == STREAMS || (i == n - 1 && h == heads - 1)) {
          with_count<STREAMS>(filled, [&]<int H>(std::integral_constant<int, H>) {
            heads_block<H>(keys, a.head_dim, q, s);
          });
          filled = 0;
        }
      }
    }
  }

  void single(KeyBlock<T>& keys, int row, int block, const VisibleRange& visible) const {
    OwnScales own;
    const float *k_scale = keys.k_scale, *v_scale = keys.v_scale;
    if (visible.scattered) put_scattered(view, b, row, block, keys, own);
    keys.lo = visible.lo, keys.hi = visible.hi;
    bundle(keys, &row, 1);
    for (int i = 0; i < keys.scattered.n; ++i)
      keys.v[keys.scattered.lane[i]] = view.v(block) + (int64_t)keys.scattered.lane[i] * a.head_dim;
    keys.scattered.n = 0, keys.lo = 0, keys.hi = BLOCK, keys.k_scale = k_scale, keys.v_scale = v_scale;
  }

  void run_block(int block, int last) const {
    KeyBlock<T> keys;
    view.whole(block, last, keys);
    int whole[NODE_BLOCK], n = 0;
    for (int row = begin; row < end; ++row) {
      const VisibleRange visible = visible_range(a, b, ctx, row, block);
      if (visible.lo >= visible.hi) continue;
      if (visible.lo == 0 && visible.hi == BLOCK && !visible.scattered) whole[n++] = row;
      else single(keys, row, block, visible);
    }
    bundle(keys, whole, n);
  }

  void run() const {
    int last = 0;
    for (int row = begin; row < end; ++row) {
      last = ctx + b.depth[row] > last ? ctx + b.depth[row] : last;
      for (int h = 0; h < heads; ++h) {
        State& s = state[row - begin][h];
        s.peak = -1e30f, s.sum = 0;
        memset(s.acc, 0, a.head_dim * 4);
      }
    }
    for (int block = 0; block <= last / BLOCK; ++block) run_block(block, last / BLOCK);
    for (int row = begin; row < end; ++row) {
      for (int h = 0; h < heads; ++h) {
        const State& s = state[row - begin][h];
        float* out = a.out + ((int64_t)row * a.n_heads + head + h) * a.head_dim;
        for (int d = 0; d < a.head_dim; ++d) out[d] = s.acc[d] / s.sum;
      }
    }
  }
};

struct Grid {  // how the work is cut, which changes no result
  int heads_per_item, head_items, node_items;
  int nodes_per_item;
};

// The cut with the shortest time of the busiest thread. An item takes the time of its loads, which all its queries share,
// and of its queries; finer items divide the queries but load the same keys again.
Grid cut(const sd_attention_args& a, const sd_batch& b) {
  constexpr int64_t LOADS = 4;  // of an item's keys and values, in units of one query
  const int group = a.n_heads / a.n_kv_heads;
  Grid best{};
  int64_t best_time = LLONG_MAX;
  for (int nodes = NODE_BLOCK; nodes >= 1; nodes /= 2) {
    int node_items = 0, tallest = 0;
    for (int e = 0; e < b.entries; ++e) {
      const int rows = b.entry_start[e + 1] - b.entry_start[e];
      node_items += (rows + nodes - 1) / nodes;
      tallest = std::max(tallest, std::min(rows, nodes));
    }
    for (int heads = std::min(group, MAX_HEADS); heads >= 1; --heads) {
      const int head_items = (group + heads - 1) / heads;
      const int64_t items = (int64_t)node_items * a.n_kv_heads * head_items;
      const int64_t time = (items + a.threads - 1) / a.threads * (LOADS + tallest * heads);
      if (time < best_time) best_time = time, best = {heads, head_items, node_items, nodes};
    }
  }
  return best;
}

template <class T>
void run_item(const sd_attention_args& a, const sd_batch& b, const Grid& grid, int item, State (*state)[MAX_HEADS]) {
  const int group = a.n_heads / a.n_kv_heads, per_node = a.n_kv_heads * grid.head_items;
  int node_item = item / per_node, entry = 0;
  for (;; ++entry) {
    const int own = (b.entry_start[entry + 1] - b.entry_start[entry] + grid.nodes_per_item - 1) / grid.nodes_per_item;
    if (node_item < own) break;
    node_item -= own;
  }
  const int begin = b.entry_start[entry] + node_item * grid.nodes_per_item, limit = b.entry_start[entry + 1];
  const int end = begin + grid.nodes_per_item < limit ? begin + grid.nodes_per_item : limit;
  const int kv_head = item % per_node / grid.head_items, part = item % grid.head_items;
  const int offset = part * grid.heads_per_item;
  const int heads = group - offset < grid.heads_per_item ? group - offset : grid.heads_per_item;
  const View<T> view{a, b.page_table + (int64_t)entry * b.max_pages, kv_head};
  WorkItem<T>{a, b, view, begin, end, kv_head * group + offset, heads, b.entry_ctx[entry], state}.run();
}

template <class T>
void attention(const sd_attention_args& a, const sd_batch& b) {
  const Grid grid = cut(a, b);
  for_units(a.threads, b.rows, [&](int row) { write_row<T>(a, b, row); });
  for_units(a.threads, grid.node_items * a.n_kv_heads * grid.head_items, [&](int item) {
    State state[NODE_BLOCK][MAX_HEADS];
    run_item<T>(a, b, grid, item, state);
  });
}

}  // namespace
}  // namespace sd

extern "C" void sd_attention(const sd_attention_args* args, const sd_batch* batch) {
  switch (args->kv_bytes) {
    case 1: sd::attention<int8_t>(*args, *batch); break;
    case 2: sd::attention<uint16_t>(*args, *batch); break;
    default: sd::attention<float>(*args, *batch);
  }
}

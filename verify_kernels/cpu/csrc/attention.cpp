// A row's keys are reduced in logical order, in blocks at absolute multiples of 64, whatever the slots they lie
// in and whoever else is in the batch: a tree node gets bitwise what plain decode would give it.
#include "attention.h"

#include <cmath>

#include "parallel.h"
#include "prologue.h"
#include "vec.h"

namespace sd {
namespace {

constexpr int BLOCK = 64;      // keys per block = tokens per page
constexpr int STREAMS = 6;     // (node, head) pairs computed together: 6 x columns of accumulators, keys, 1 query
constexpr int MAX_HEADS = 6;   // query heads of one work item
constexpr int MAX_DIM = 256;
constexpr int NODE_BLOCK = 8;  // nodes of one work item: a K/V block stays in cache while they all read it
constexpr int MAX_PATH = 64;   // path keys a block can hold

struct State {  // running softmax of one (node, head)
  float peak, sum;
  float acc[MAX_DIM];
};

struct ScatteredKeys {  // keys of a block that are not where their position says
  int n = 0;
  int lane[MAX_PATH];
  const float* k[MAX_PATH];  // element d at k[d * BLOCK]
  const float* v[MAX_PATH];
};

constexpr int AHEAD = 1024;  // floats: hardware prefetch stops at every 4 KiB, so the next 4 KiB are asked for here

template <int LINES>
inline void fetch(const float* p) {
  for (int i = 0; i < 16 * LINES; i += 16) __builtin_prefetch(p + i);
}

// scores[h][0..63] = q_h . K of one block, as many columns of 16 keys at once as the registers hold.
template <int H>
void block_scores(const float* k, const float* const* q, int dim, float (*scores)[BLOCK]) {
  constexpr int COLUMNS = columns_for(H);
  for (int column = 0; column < BLOCK; column += 16 * COLUMNS) {
    v16 s[H][COLUMNS];
    for (int h = 0; h < H; ++h)
      for (int j = 0; j < COLUMNS; ++j) s[h][j] = splat(0);
    for (int d = 0; d < dim; ++d) {
      const float* keys = k + d * BLOCK + column;
      fetch<COLUMNS>(keys + AHEAD);
      v16 own[COLUMNS];
      for (int j = 0; j < COLUMNS; ++j) own[j] = load16(keys + 16 * j);
      for (int h = 0; h < H; ++h) {
        const v16 x = splat(q[h][d]);
        for (int j = 0; j < COLUMNS; ++j) s[h][j] = fma16(x, own[j], s[h][j]);
      }
    }
    for (int h = 0; h < H; ++h)
      for (int j = 0; j < COLUMNS; ++j) store16(&scores[h][column + 16 * j], s[h][j]);
  }
}

// The same sum as one lane of block_scores, for scattered keys; several heads at once hide the latency.
template <int H>
void scattered_scores(const ScatteredKeys& scattered, const float* const* q, int dim, float (*scores)[BLOCK]) {
  for (int i = 0; i < scattered.n; ++i) {
    float s[H] = {0};
    for (int d = 0; d < dim; ++d) {
      const float x = scattered.k[i][(int64_t)d * BLOCK];
      for (int h = 0; h < H; ++h) s[h] = fma1(q[h][d], x, s[h]);
    }
    for (int h = 0; h < H; ++h) scores[h][scattered.lane[i]] = s[h];
  }
}

// acc_h += sum_j p_h[j] V[j] over keys [lo, hi), j ascending.
template <int H>
void add_values(const float* const* v, float (*p)[BLOCK], int lo, int hi, int dim, State* const* state) {
  constexpr int COLUMNS = columns_for(H), WIDTH = 16 * COLUMNS;
  int d = 0;
  for (; d + WIDTH <= dim; d += WIDTH) {
    v16 a[H][COLUMNS];
    for (int h = 0; h < H; ++h)
      for (int j = 0; j < COLUMNS; ++j) a[h][j] = load16(state[h]->acc + d + 16 * j);
    for (int key = lo; key < hi; ++key) {
      const float* row = v[key] + d;
      fetch<COLUMNS>(row + AHEAD);
      v16 own[COLUMNS];
      for (int j = 0; j < COLUMNS; ++j) own[j] = load16(row + 16 * j);
      for (int h = 0; h < H; ++h) {
        const v16 x = splat(p[h][key]);
        for (int j = 0; j < COLUMNS; ++j) a[h][j] = fma16(x, own[j], a[h][j]);
      }
    }
    for (int h = 0; h < H; ++h)
      for (int j = 0; j < COLUMNS; ++j) store16(state[h]->acc + d + 16 * j, a[h][j]);
  }
  for (; d < dim; ++d)
    for (int h = 0; h < H; ++h)
      for (int key = lo; key < hi; ++key) state[h]->acc[d] = fma1(p[h][key], v[key][d], state[h]->acc[d]);
}

// Turns scores into probabilities relative to the running peak; keys outside [lo, hi) count for nothing.
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

template <int H>
void heads_block(const float* k, const float* const* v, const ScatteredKeys& scattered, int lo, int hi, int dim,
                 const float* const* q, State* const* state) {
  alignas(64) float scores[H][BLOCK];
  block_scores<H>(k, q, dim, scores);
  if (scattered.n) scattered_scores<H>(scattered, q, dim, scores);
  for (int h = 0; h < H; ++h) softmax_block(scores[h], lo, hi, dim, *state[h]);
  add_values<H>(v, scores, lo, hi, dim, state);
}

// One block for up to STREAMS (node, head) pairs that see the same keys of it.
void attend_block(const float* k, const float* const* v, const ScatteredKeys& scattered, int lo, int hi, int dim,
                  int streams, const float* const* q, State* const* state) {
  switch (streams) {
    case 1: heads_block<1>(k, v, scattered, lo, hi, dim, q, state); break;
    case 2: heads_block<2>(k, v, scattered, lo, hi, dim, q, state); break;
    case 3: heads_block<3>(k, v, scattered, lo, hi, dim, q, state); break;
    case 4: heads_block<4>(k, v, scattered, lo, hi, dim, q, state); break;
    case 5: heads_block<5>(k, v, scattered, lo, hi, dim, q, state); break;
    default: heads_block<6>(k, v, scattered, lo, hi, dim, q, state);
  }
}

// Norm and rotate one head in place of a copy: out = rope(norm(x)) * scale.
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

void write_row(const sd_attention_args& a, const sd_batch& b, int row) {
  const int dim = a.head_dim, entry = b.entry_of[row], ctx = b.entry_ctx[entry];
  const int position = ctx + b.depth[row], slot = ctx + (row - b.entry_start[entry]);
  const int64_t page = b.page_table[(int64_t)entry * b.max_pages + slot / BLOCK];
  const int lane = slot % BLOCK;
  const float *cos = a.cos + (int64_t)position * (dim / 2), *sin = a.sin + (int64_t)position * (dim / 2);
  const float* x = a.qkv + (int64_t)row * (a.n_heads + 2 * a.n_kv_heads) * dim;
  float* q = a.q + (int64_t)row * a.n_heads * dim;
  for (int h = 0; h < a.n_heads; ++h, x += dim)
    rotate_head(x, a.q_norm, a.eps, cos, sin, dim, a.scale, q + h * dim);
  for (int h = 0; h < a.n_kv_heads; ++h, x += dim) {
    float k[MAX_DIM];
    rotate_head(x, a.k_norm, a.eps, cos, sin, dim, 1.0f, k);
    float* out = a.k_pool + (page * a.n_kv_heads + h) * dim * BLOCK + lane;
    for (int d = 0; d < dim; ++d) out[(int64_t)d * BLOCK] = k[d];
  }
  for (int h = 0; h < a.n_kv_heads; ++h, x += dim)
    memcpy(a.v_pool + ((page * a.n_kv_heads + h) * BLOCK + lane) * dim, x, dim * 4);
}

struct View {  // one entry's cache as one KV head sees it
  const sd_attention_args& a;
  const int32_t* pages;
  int head;
  const float* k(int block) const {
    return a.k_pool + ((int64_t)pages[block] * a.n_kv_heads + head) * a.head_dim * BLOCK;
  }
  const float* v(int block) const {
    return a.v_pool + ((int64_t)pages[block] * a.n_kv_heads + head) * BLOCK * a.head_dim;
  }
};

// The path keys of `row` that fall into `block` and are not at their position's slot.
void collect_scattered(const View& view, const sd_batch& b, int row, int block, const float** v,
                       ScatteredKeys& scattered) {
  const int entry = b.entry_of[row], first = b.entry_start[entry], ctx = b.entry_ctx[entry];
  scattered.n = 0;
  for (int j = row - first; j >= 0 && b.depth[first + j] >= b.diverge[row]; j = b.parent[first + j]) {
    const int position = ctx + b.depth[first + j], slot = ctx + j;
    if (position / BLOCK != block) continue;
    const int i = scattered.n++;
    scattered.lane[i] = position % BLOCK;
    scattered.k[i] = view.k(slot / BLOCK) + slot % BLOCK;
    scattered.v[i] = view.v(slot / BLOCK) + (int64_t)(slot % BLOCK) * view.a.head_dim;
    v[scattered.lane[i]] = scattered.v[i];
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
// whole of a block share its loads; how they are bundled does not show, as each stream has its own accumulators.
struct WorkItem {
  const sd_attention_args& a;
  const sd_batch& b;
  View view;
  int begin, end, head, heads, ctx;
  State (*state)[MAX_HEADS];

  void bundle(const float* k, const float* const* v, const int* rows, int n) const {
    ScatteredKeys none;
    const float* q[STREAMS];
    State* s[STREAMS];
    int filled = 0;
    for (int i = 0; i < n; ++i) {
      for (int h = 0; h < heads; ++h) {
        q[filled] = a.q + ((int64_t)rows[i] * a.n_heads + head + h) * a.head_dim;
        s[filled++] = &state[rows[i] - begin][h];
        if (filled == STREAMS || (i == n - 1 && h == heads - 1)) {
          attend_block(k, v, none, 0, BLOCK, a.head_dim, filled, q, s);
          filled = 0;
        }
      }
    }
  }

  void single(const float* k, const float** v, int row, int block, const VisibleRange& visible) const {
    ScatteredKeys scattered;
    if (visible.scattered) collect_scattered(view, b, row, block, v, scattered);
    const float* q[STREAMS];
    State* s[STREAMS];
    for (int h = 0; h < heads; ++h) {
      q[h] = a.q + ((int64_t)row * a.n_heads + head + h) * a.head_dim;
      s[h] = &state[row - begin][h];
    }
    attend_block(k, v, scattered, visible.lo, visible.hi, a.head_dim, heads, q, s);
    for (int i = 0; i < scattered.n; ++i)
      v[scattered.lane[i]] = view.v(block) + (int64_t)scattered.lane[i] * a.head_dim;
  }

  void run_block(int block) const {
    const float *k = view.k(block), *v[BLOCK];
    for (int i = 0; i < AHEAD; i += BLOCK) fetch<4>(view.v(block) + i);  // values are read right after the keys
    for (int j = 0; j < BLOCK; ++j) v[j] = view.v(block) + (int64_t)j * a.head_dim;
    int whole[NODE_BLOCK], n = 0;
    for (int row = begin; row < end; ++row) {
      const VisibleRange visible = visible_range(a, b, ctx, row, block);
      if (visible.lo >= visible.hi) continue;
      if (visible.lo == 0 && visible.hi == BLOCK && !visible.scattered) whole[n++] = row;
      else single(k, v, row, block, visible);
    }
    bundle(k, v, whole, n);
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
    for (int block = 0; block <= last / BLOCK; ++block) run_block(block);
    for (int row = begin; row < end; ++row) {
      for (int h = 0; h < heads; ++h) {
        const State& s = state[row - begin][h];
        float* out = a.out + ((int64_t)row * a.n_heads + head + h) * a.head_dim;
        for (int d = 0; d < a.head_dim; ++d) out[d] = s.acc[d] / s.sum;
      }
    }
  }
};

struct Grid {  // how the work is cut; the cut never shows in a result
  int heads_per_item, head_items, node_items;
  int nodes_per_item;
};

Grid cut(const sd_attention_args& a, const sd_batch& b) {
  const int group = a.n_heads / a.n_kv_heads;
  int heads = group <= MAX_HEADS ? group : (group % 6 == 0 ? 6 : group % 5 == 0 ? 5 : group % 4 == 0 ? 4 : MAX_HEADS);
  // Few items leave threads idle, but finer ones read the same keys again: cut only where the work does not come
  // out even. Nodes are cut first (their queries are small), then the heads of a group.
  const auto even = [&](int items) { return items >= 4 * a.threads || items % a.threads == 0; };
  int nodes = NODE_BLOCK, head_items = (group + heads - 1) / heads;
  const auto items = [&] { return (b.rows + nodes - 1) / nodes * a.n_kv_heads * head_items; };
  while (nodes > 2 && !even(items())) nodes /= 2;
  while (heads > 1 && !even(items())) {
    heads /= 2;
    head_items = (group + heads - 1) / heads;
  }
  int node_items = 0;
  for (int e = 0; e < b.entries; ++e) node_items += (b.entry_start[e + 1] - b.entry_start[e] + nodes - 1) / nodes;
  return {heads, head_items, node_items, nodes};
}

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
  const View view{a, b.page_table + (int64_t)entry * b.max_pages, kv_head};
  WorkItem{a, b, view, begin, end, kv_head * group + offset, heads, b.entry_ctx[entry], state}.run();
}

}  // namespace
}  // namespace sd

extern "C" void sd_attention(const sd_attention_args* args, const sd_batch* batch) {
  using namespace sd;
  const sd_attention_args& a = *args;
  const sd_batch& b = *batch;
  const Grid grid = cut(a, b);
  for_units(a.threads, b.rows, [&](int row) { write_row(a, b, row); });
  for_units(a.threads, grid.node_items * a.n_kv_heads * grid.head_items, [&](int item) {
    State state[NODE_BLOCK][MAX_HEADS];
    run_item(a, b, grid, item, state);
  });
}

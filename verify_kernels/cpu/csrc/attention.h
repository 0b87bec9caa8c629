// Tree attention over a paged KV cache, with q/k norm, rotary embedding and the KV write in front.
#pragma once
#include <cstdint>

extern "C" {

// One forward's rows, shared by all layers. Mirrors BatchArgs in verify_kernels/cpu/native_backend.py.
// A row's keys in logical order: positions [0, ctx) of its entry, then its path. Position ctx + depth[j] of path
// row j lies at slot ctx + j; while j == depth the slot is the position (the principal path).
struct sd_batch {
  int32_t rows, entries, max_pages;
  const int32_t* entry_start;  // [entries + 1] first row of each entry
  const int32_t* entry_ctx;    // [entries] slots filled before this forward
  const int32_t* page_table;   // [entries, max_pages]
  const int32_t* entry_of;     // [rows]
  const int32_t* parent;       // [rows] row within the entry, -1 for its first
  const int32_t* depth;        // [rows] position - ctx
  const int32_t* diverge;      // [rows] first depth at which the path leaves slot == position; > depth if never
};

// Mirrors AttentionArgs in verify_kernels/cpu/native_backend.py. K pages are transposed, [kv_heads, head_dim, 64], so
// that one load serves 16 keys.
struct sd_attention_args {
  int32_t n_heads, n_kv_heads, head_dim, window;  // window 0: all earlier positions are seen
  int32_t threads, kv_bytes;  // of a stored key or value: 4 float32, 2 bfloat16, 1 int8
  float scale, eps;
  const float* q_norm;  // [head_dim] or null
  const float* k_norm;
  const float* cos;     // [positions, head_dim / 2]
  const float* sin;
  const float* qkv;     // [rows, (n_heads + 2 n_kv_heads) head_dim]
  float* q;             // [rows, n_heads, head_dim] scratch
  float* out;           // [rows, n_heads head_dim]
  void* k_pool;         // this layer: [pages, kv_heads, head_dim, 64]
  void* v_pool;         // this layer: [pages, kv_heads, 64, head_dim]
  float* k_scale;       // this layer, of int8: [pages, kv_heads, 64]
  float* v_scale;
};

void sd_attention(const sd_attention_args* args, const sd_batch* batch);
}
